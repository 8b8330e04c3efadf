"""Rates are chosen on the tuning seed alone, arms compared at like rates, and conclusions say what the numbers say."""

import numpy as np
import pandas as pd
import pytest

from lib.check import BadInput
from lib.study import best_constant, choose, compare_arms, conclusion, hypotheses, labelled

BASE, SMALL, RAMP = "constant 1,024", "constant 256", "dividers 4,1 of 1,024"
T = {BASE: 1024, SMALL: 256, RAMP: 1024}
BEST = {BASE: 0.04, SMALL: 0.01, RAMP: 0.02}


def run(arm, lr, seed, loss, budget="tokens", status="finished"):
    return {"arm": arm, "lr": lr, "seed": seed, "validation_loss": loss, "status": status, "budget_kind": budget,
            "base_tokens_per_step": T[arm]}


def tuning(**lost):
    losses = {BASE: 5.0, SMALL: 4.0, RAMP: 4.5}
    return pd.DataFrame([run(arm, lr, 100, np.nan if arm in lost else losses[arm] + abs(np.log(lr / BEST[arm])),
                             status="diverged" if arm in lost else "finished")
                         for arm in T for lr in (0.01, 0.02, 0.04)])


def final(effects):
    """Runs in which `effects[arm, lr]` is the mean loss, and a seed's luck is shared by all arms."""
    rows = [run(arm, lr, seed, loss + seed + 0.001 * ((seed * 7 + i * 3) % 5), budget)
            for budget in ("tokens", "seconds") for i, ((arm, lr), loss) in enumerate(effects.items())
            for seed in range(5)]
    return pd.DataFrame(rows)


def test_rates():
    chosen = choose(tuning(), BASE).set_index("arm")
    assert chosen.own.to_dict() == BEST
    assert chosen.rule.to_dict() == {BASE: 0.04, SMALL: 0.02, RAMP: 0.04}  # √(256/1024) of the base's, and the base's
    assert chosen.at_edge.to_dict() == {BASE: True, SMALL: True, RAMP: False}
    assert best_constant(choose(tuning(), BASE)) == SMALL


def test_an_arm_that_never_finished_is_left_out_and_a_lost_base_is_said():
    assert set(choose(tuning(**{SMALL: 1}), BASE).arm) == {BASE, RAMP}
    with pytest.raises(BadInput, match="constant 1,024 finished at none of them"):
        choose(tuning(**{BASE: 1}), BASE)


def test_arms_are_compared_at_like_rates():
    runs = final({(BASE, 0.04): 5.0, (SMALL, 0.01): 4.0, (SMALL, 0.02): 4.4, (RAMP, 0.02): 4.2, (RAMP, 0.04): 4.6})
    tests = compare_arms(runs, choose(tuning(), BASE), [RAMP], [BASE, SMALL], margin=0.02)
    found = {key[1:]: round(test.difference, 1) for key, test in tests.items() if key[0] == "tokens"}
    assert found == {("own", RAMP, BASE): -0.8, ("rule", RAMP, BASE): -0.4,
                     ("own", RAMP, SMALL): 0.2, ("rule", RAMP, SMALL): 0.2}
    assert [test.verdict for test in labelled(tests, "seconds").values()] == ["better", "worse", "better", "worse"]
    first, second = conclusion(tests, "tokens", RAMP, BASE)
    assert first.startswith("At a fixed number of tokens, each at its own best rate, "
                            f"{RAMP} is better than {BASE}: −0.8")
    assert second == ("The verdict does not depend on the learning rates: "
                      "it is better under the square-root rule (−0.400 nat)")


def test_a_verdict_that_depends_on_the_rates_is_said_to():
    runs = final({(BASE, 0.04): 5.0, (RAMP, 0.02): 4.2, (RAMP, 0.04): 5.4})
    tests = compare_arms(runs, choose(tuning(), BASE), [RAMP], [BASE], margin=0.02)
    assert conclusion(tests, "seconds", RAMP, BASE)[1].startswith(
        "The verdict depends on the learning rates: it is worse under the square-root rule (+0.4")


def test_equal_rates_are_named_as_such():
    chosen = choose(tuning(), BASE)
    chosen["own"] = chosen["rule"]
    runs = final({(BASE, 0.04): 5.0, (RAMP, 0.04): 4.6})
    tests = compare_arms(runs, chosen, [RAMP], [BASE, BASE], margin=0.02)
    assert conclusion(tests, "tokens", RAMP, BASE)[1] == "Their best rates are those of the square-root rule"


def test_runs_that_are_missing_are_named():
    with pytest.raises(BadInput, match=r"dividers 4,1 of 1,024 at lr 0\.02"):
        compare_arms(final({(BASE, 0.04): 5.0}), choose(tuning(), BASE), [RAMP], [BASE], margin=0.02)


@pytest.mark.parametrize(("effects", "differs", "better"), [
    ([-0.5, 0.5], "supported", "supported"),  # one that wins is enough
    ([0.5, 0.5], "supported", "refuted"),
    ([0.0, 0.5], "supported", "refuted"),  # equivalent is not better
    ([0.0, 0.0], "refuted", "refuted"),
])
def test_hypotheses_of_at_least_one_schedule(effects, differs, better):
    T.update({f"ramp {number}": 1024 for number in range(len(effects))})
    ramps = {(f"ramp {number}", 0.04): 5.0 + effect for number, effect in enumerate(effects)}
    runs = final({(BASE, 0.04): 5.0} | ramps)
    found = hypotheses(runs, [BASE, BASE], margin=0.05)
    assert found["fixed"].tolist() == ["tokens", "tokens", "seconds", "seconds"]
    assert found["verdict"].tolist() == [differs, better] * 2
    assert set(found["lowest"]) == {f"ramp {np.argmin(effects)}"} or effects[0] == effects[1]


def test_one_of_many_schedules_is_not_better_by_luck():
    """Eight schedules that change nothing: at 95 % each, one would be called better in one study of five."""
    random, found = np.random.default_rng(0), []
    for _ in range(80):
        runs = pd.DataFrame([{"arm": arm, "seed": seed, "validation_loss": random.normal(5, 0.1), "status": "finished",
                              "budget_kind": "tokens"}
                             for arm in (BASE, *(f"ramp {number}" for number in range(8))) for seed in range(5)])
        found.append(hypotheses(runs, [BASE], margin=1e-6).verdict[1])
    assert found.count("supported") <= 8  # of 80, at 5 % and below
