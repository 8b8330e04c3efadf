"""A study of arms: learning rates chosen on a tuning seed, and arms compared at like rates.

Every arm stands at two rates: `own`, its best on the tuning seed, and `rule`, what the square-root rule makes of the
base arm's best. Rates are like where both arms stand at their own, or both at the rule's.
"""

from collections.abc import Sequence

import pandas as pd

from lib import stats
from lib.check import require
from lib.rules import scaled_lr
from lib.stats import Comparison

RATES = ("own", "rule")
BUDGETS = {"tokens": "number of tokens", "seconds": "time"}
Tests = dict[tuple[str, str, str, str], Comparison]  # by budget, rates, treatment and baseline


def choose(tuned: pd.DataFrame, base_arm: str) -> pd.DataFrame:
    """The rates of each arm: arm, own, rule, and the tuning that chose them. An arm that never finished is left out.

    Raises BadInput where the base arm has no rate at which it finished.
    """
    chosen = stats.best(tuned).dropna(subset=["lr"]).rename(columns={"lr": "own"})
    require(base_arm in set(chosen["arm"]), "lrs", sorted(set(tuned["lr"])), f"{base_arm} finished at none of them")
    base = tuned.groupby("arm")["base_tokens_per_step"].first()
    rate = chosen.set_index("arm")["own"][base_arm]
    chosen.insert(2, "rule", [scaled_lr("sqrt-lr", rate, base[arm] / base[base_arm]) for arm in chosen["arm"]])
    return chosen


def best_constant(chosen: pd.DataFrame) -> str:
    """The constant arm that did best on the tuning seed, so that the seeds of the comparison have no say."""
    constants = chosen[chosen["arm"].str.startswith("constant")]
    return constants.loc[constants["validation_loss"].idxmin(), "arm"]


def compare_arms(runs: pd.DataFrame, chosen: pd.DataFrame, treatments: Sequence[str], baselines: Sequence[str],
                 margin: float) -> Tests:
    """Each treatment against each baseline, paired over seeds, at like rates, under both budgets."""
    measured = {key: stats.losses(group) for key, group in runs.groupby(["budget_kind", "arm", "lr"])}
    rates = chosen.set_index("arm")

    def losses(budget: str, kind: str, arm: str) -> pd.Series:
        key = budget, arm, rates[kind][arm]
        require(key in measured, "runs", f"{arm} at lr {key[2]:g}", f"must be among the runs with a budget in {budget}")
        return measured[key]

    return {
        (budget, kind, treatment, baseline):
            stats.compare(losses(budget, kind, treatment), losses(budget, kind, baseline), margin)
        for budget in BUDGETS for kind in RATES for treatment in treatments for baseline in dict.fromkeys(baselines)
        if treatment != baseline
    }


def hypotheses(runs: pd.DataFrame, baselines: Sequence[str], margin: float) -> pd.DataFrame:
    """Whether at least one schedule differs from, or is better than, each constant T, under each budget; a row each.

    `runs` hold each arm at one rate. Of many schedules one is "better" by luck sooner or later: each of k is tested at
    a confidence of 1 − 0.05 / k (Bonferroni). Supported takes one that is better (to differ: or worse); refuted
    takes all of them worse or equivalent (to differ: equivalent); else it is open.
    """
    rows = []
    for budget in BUDGETS:
        measured = {arm: stats.losses(group) for arm, group in runs[runs["budget_kind"] == budget].groupby("arm")}
        schedules = [arm for arm in measured if not arm.startswith("constant")]
        for baseline in dict.fromkeys(arm for arm in baselines if arm in measured and schedules):
            tests = {arm: stats.compare(measured[arm], measured[baseline], margin, 1 - 0.05 / len(schedules))
                     for arm in schedules}
            found = {verdict: [arm for arm, test in tests.items() if test.verdict == verdict]
                     for verdict in ("better", "worse", "equivalent", "inconclusive")}
            better, worse = found["better"], found["worse"]
            for claim, proof in (("differs from", better + worse), ("is better than", better)):
                rows.append({
                    "fixed": budget, "hypothesis": f"at least one schedule {claim} {baseline}",
                    "verdict": "supported" if proof else "open" if found["inconclusive"] else "refuted",
                    **{verdict: len(arms) for verdict, arms in found.items()},
                    "lowest": min(tests, key=lambda arm: tests[arm].difference),
                })
    return pd.DataFrame(rows)


def labelled(tests: Tests, budget: str) -> dict[str, Comparison]:
    """The comparisons of one budget by a name for a figure or a table."""
    return {f"{treatment}\nagainst {baseline}, {kind} rates": test
            for (of, kind, treatment, baseline), test in tests.items() if of == budget}


def conclusion(tests: Tests, budget: str, treatment: str, baseline: str) -> list[str]:
    """What one comparison shows, in sentences, and whether it depends on the learning rates."""
    own, rule = (tests[budget, kind, treatment, baseline] for kind in RATES)
    first = f"At a fixed {BUDGETS[budget]}, each at its own best rate, {own.sentence(treatment, baseline)}"
    there = f"{rule.verdict} under the square-root rule ({stats.signed(rule.difference, 3)} nat)"
    if own == rule:
        return [first, "Their best rates are those of the square-root rule"]
    depends = "does not depend" if own.verdict == rule.verdict else "depends"
    return [first, f"The verdict {depends} on the learning rates: it is {there}"]
