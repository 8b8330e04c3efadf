"""What is recommended is what did best, and runs as it stands."""

from pathlib import Path

import pandas as pd
import pytest

from lib.advice import best_arm, recommend, write_params
from lib.check import BadInput
from lib.config import RunConfig, read_arguments
from lib.runs import load_runs
from lib.stats import compare, losses
from lib.sweep import swept
from lib.train import resolve


def runs(**losses):
    return pd.DataFrame([
        {"arm": arm, "seed": seed, "validation_loss": loss, "status": "finished" if loss else "diverged"}
        for arm, values in losses.items() for seed, loss in enumerate(values)])


def test_the_arm_of_the_lowest_mean_wins_unless_it_lost_a_run():
    arms = dict(a="A", b="B", c="C")
    assert best_arm(runs(a=[3.0, 3.2], b=[3.1, 3.0], c=[3.5, 3.5]), arms) == "B"
    assert best_arm(runs(a=[3.0, 3.2], b=[2.0, None], c=[3.5, 3.5]), arms) == "A"
    with pytest.raises(BadInput, match="must have an arm that finished on every seed"):
        best_arm(runs(a=[None], b=[None], c=[None]), arms)


@pytest.mark.parametrize("arm", [
    dict(), dict(schedule="dividers", batch_dividers=[4, 1], stage_length=[0.5]),
    dict(schedule="stages", stages=[[0, 96], [1920, 384]], scaling_rule="sde-power", wd_rule="per-token"),
    dict(schedule="seesaw", alpha=2, max_tokens_per_step=768, eps=1e-9, lr=6e-4),
    dict(schedule="adaptive", max_tokens_per_step=768, noise_every=2),
    dict(time_budget=1.5, clock="modelled"),
])
def test_a_recommendation_is_the_run_itself(tiny, arm):
    config = tiny(**arm)
    path = write_params(config, "recommended", "An arm.\nAnd why.")
    assert read_arguments(RunConfig, [path]) == config
    assert resolve(read_arguments(RunConfig, [path])).run.name == resolve(config).run.name
    with open(path) as file:
        assert file.readline() == "# An arm.\n"


def test_a_recommendation_is_verified_on_fresh_seeds(tiny):
    small, large = tiny(tokens_per_step=96), tiny()
    what, gain = recommend(small, [large], [7, 8], 0.02, "recommended")
    assert what.startswith("For this model and data, and 3,840 tokens: constant 96, in micro-batches of 32 tokens")
    fresh, _ = load_runs(small.runs)
    assert set(fresh.run) == set(swept(small.runs, "recommended verification"))
    assert set(fresh.seed) == {7, 8}
    of = {arm: losses(group) for arm, group in fresh.groupby("arm")}
    assert gain == "On fresh seeds, " + compare(of["constant 96"], of["constant 384"], 0.02).sentence(
        "constant 96", "constant 384")
    assert gain.removeprefix("On fresh seeds, ") in Path(small.runs, "recommended.yaml").read_text()
