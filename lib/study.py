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
