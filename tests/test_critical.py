"""Critical batch sizes against losses and noise that are known."""

from math import inf, nan

import numpy as np
import pandas as pd
import pytest

from lib.check import BadInput
from lib.critical import branches, critical_factor, implied, measured, noise_curve, typical
from lib.runs import frame
from lib.sweep import sweep
from lib.train import train


def quiet(line):
    pass


@pytest.mark.parametrize(("losses", "found"), [
    ({1: 3.0, 2: 3.0, 4: 3.005, 8: 3.02}, 4),
    ({1: 3.0, 2: 3.02, 4: 3.005}, 4),  # one that is worse between does not stop the search
    ({1: 3.0, 2: 2.9, 4: 2.92}, 2),  # held against the best smaller one, not against the first
    ({1: 3.0, 2: 3.02, 4: 3.04}, 1),
    ({1: 3.0, 2: nan, 4: inf}, 1),
    ({1: 3.0, 2: 2.9, 4: 2.8}, 4),
    ({2: 3.0, 1: 2.99}, 2),
    ({1: nan}, 1),
])
def test_the_largest_factor_that_costs_nothing(losses, found):
    assert critical_factor(losses, 0.01) == found


@pytest.mark.parametrize(("estimates", "stages"), [
    ({100: 1500, 200: 2048, 300: 3000, 400: 9000}, [[0, 1024], [200, 2048], [400, 8192]]),
    ({100: 500}, [[0, 1024]]),
    ({0: 4096, 100: 5000}, [[0, 4096]]),
    ({200: 8000, 100: 2048}, [[0, 1024], [100, 2048], [200, 4096]]),  # whatever their order
    ({100: 4096, 200: 2048}, [[0, 1024], [100, 4096]]),  # an estimate that falls takes nothing back
    ({100: 10**9}, [[0, 1024], [100, 8192]]),  # up to the largest
    ({100: typical([2048] * 3)}, [[0, 1024], [100, 2048]]),
])
def test_the_schedule_that_estimates_imply(estimates, stages):
    assert implied(estimates, 1024, 8192) == stages


def test_noise_in_bins_is_the_ratio_of_means():
    tokens = np.arange(1, 101) * 10
    g2, s = np.where(tokens <= 500, 2.0, 4.0), np.where(tokens <= 500, 600.0, 4000.0)
    rows = pd.DataFrame({"run": "a", "tokens": tokens, "noise_g2": g2 + 0.5 * (-1) ** np.arange(100), "noise_s": s})
    rows.loc[3, ["noise_g2", "noise_s"]] = None
    found = noise_curve(rows, 500.0)
    assert found.tokens.tolist() == [250, 750]
    assert found.noise_scale.tolist() == pytest.approx([300, 1000], rel=0.01)


def test_sizes_that_double_have_a_geometric_mean():
    assert typical([1024, 4096]) == pytest.approx(2048)
    assert typical([1024, 2048, 4096, 8192]) == pytest.approx(1024 * 2**1.5)


def test_branches_of_a_run_begin_in_its_state_and_take_more_tokens_a_step(tiny, capsys):
    parent = tiny(tokens_per_step=32, lr_schedule="constant", token_budget=1920, noise_every=2, warmup_fraction=0.1)
    (run,) = sweep([parent], "parent", keep=[640, 1280])
    made = branches(parent, run.name, [640, 1280], [1, 2, 4], 256)
    capsys.readouterr()
    done = sweep(made, "branches")
    assert f"{6 * 256:,} tokens to train" in capsys.readouterr().out
    rows = frame(done)
    assert rows.base_tokens_per_step.tolist() == [32, 64, 128] * 2
    assert rows.lr.tolist() == pytest.approx([0.01, 0.0141421, 0.02] * 2)
    assert rows.branch_at.tolist() == [640] * 3 + [1280] * 3
    assert [child.meta["tokens"] for child in done] == [896] * 3 + [1536] * 3
    assert not (run.path.parent / "pasts").exists()  # the parent kept its checkpoints
    # k = 1 is the parent itself, but for the splits that measure noise.
    straight = tiny(tokens_per_step=32, lr_schedule="constant", token_budget=896, warmup_fraction=192 / 896)
    assert rows.validation_loss[0] == pytest.approx(train(straight, quiet).meta["validation_loss"], abs=1e-3)
    found = measured(rows, 0.01)
    assert found.tokens.tolist() == [640, 1280]
    assert set(found.critical) <= {32, 64, 128}


def test_branches_that_cannot_be_are_refused(tiny):
    with pytest.raises(BadInput, match="lr_schedule = 'cosine': must be constant"):
        branches(tiny(), "run", [384], [1], 384)
    with pytest.raises(BadInput, match="window = 500: must be a multiple of 384, one update of k = 1"):
        branches(tiny(lr_schedule="constant"), "run", [384], [1], 500)
