"""The run browser: what is drawn is what was logged, on any axis, chosen from any list."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib import colors

from lib import browse
from lib.browse import ALONE, LISTS, catalogue, choose, compare_curves, logs_of, options
from lib.check import BadInput
from lib.config import RunConfig
from lib.plots import colour
from lib.runs import Run
from lib.sweep import sweep
from lib.train import train

SMALL, LARGE = "constant 96", "constant 384"


def quiet(line):
    pass


@pytest.fixture(scope="module")
def shelf(stream, tmp_path_factory):
    """A folder with a sweep of two arms and two seeds, one of another rate, and a run of no sweep."""
    folder = tmp_path_factory.mktemp("shelf") / "runs"
    large = RunConfig(stream=str(stream), runs=str(folder), seq_len=16, hidden_size=16, layers=1, heads=2, mlp_size=32,
                      tokens_per_step=384, device_token_capacity=96, lr=0.01, token_budget=3840, skip_validation=True)
    small = replace(large, tokens_per_step=96)
    sweep([replace(arm, seed=seed) for arm in (small, large) for seed in (0, 1)], "pair")
    sweep([replace(small, lr=0.02), replace(small, seed=1)], "rates")
    train(replace(large, seed=5, lr_schedule="linear"), quiet)
    return str(folder)


def lines(figure):
    """x and y of the lines with a label."""
    return {line.get_label(): np.array(line.get_xydata()) for line in figure.axes[0].lines
            if not line.get_label().startswith("_")}


def test_runs_are_chosen_from_lists(shelf):
    runs = catalogue(shelf)
    assert options(runs, "sweep") == [ALONE, "pair", "rates"]
    assert options(runs, "arm") == [SMALL, LARGE]
    assert options(runs, "seed") == [0, 1, 5]
    everything = {name: options(runs, name) for name in LISTS}
    assert len(choose(runs, everything)) == len(runs) == 6
    assert set(choose(runs, everything | {"arm": [LARGE]}).seed) == {0, 1, 5}
    pair = choose(runs, {"sweep": ["pair"]})
    assert (len(pair), set(pair.label)) == (4, {SMALL, LARGE})  # one of them is of both sweeps
    assert set(choose(runs, {"sweep": ["rates"]}).label) == {f"{SMALL}, lr 0.01", f"{SMALL}, lr 0.02"}
    assert set(choose(runs, {"arm": [LARGE]}).label) == {f"{LARGE}, cosine", f"{LARGE}, linear"}
    assert choose(runs, {"seed": []}).empty


@pytest.mark.parametrize("x", ["tokens", "step", "elapsed"])
def test_a_curve_is_the_mean_of_what_was_logged(shelf, x):
    """Without smoothing, bins are those of the large T: its own updates, and the mean of four of the small."""
    chosen = choose(catalogue(shelf), {"sweep": ["pair"]})
    logs = logs_of(chosen, shelf)
    drawn = lines(compare_curves(chosen, logs, x, smoothing=0))
    for arm, count in ((LARGE, 1), (SMALL, 4)):
        rows = [logs[logs.run == run].reset_index() for run in chosen.run[chosen.arm == arm]]
        loss = np.mean([row.loss.groupby(row.index // count).mean() for row in rows], axis=0)
        assert drawn[arm][:, 1] == pytest.approx(loss)
        middles = (np.arange(10) + 0.5) * 384
        places = np.mean([np.interp(middles, [0, *row.tokens], [0, *row[x]]) for row in rows], axis=0)
        assert drawn[arm][:, 0] == pytest.approx(places / (1e6 if x == "tokens" else 1))
    raw = [line for line in compare_curves(chosen, logs, x).axes[0].lines if line.get_label().startswith("_")]
    assert sorted(len(line.get_xdata()) for line in raw) == [10, 10, 40, 40]


def test_more_smoothing_is_fewer_bins(shelf):
    chosen = choose(catalogue(shelf), {"sweep": ["pair"]})
    logs = logs_of(chosen, shelf)
    assert len(lines(compare_curves(chosen, logs, smoothing=0.5))[SMALL]) == 2
    assert lines(compare_curves(chosen, logs, smoothing=1))[SMALL][0, 1] == pytest.approx(
        logs[logs.run.isin(chosen.run[chosen.arm == SMALL])].loss.mean())


@pytest.mark.parametrize("x", ["tokens", "step"])
def test_a_difference_is_taken_seed_by_seed(shelf, x):
    chosen = choose(catalogue(shelf), {"sweep": ["pair"]})
    logs = logs_of(chosen, shelf)
    figure = compare_curves(chosen, logs, x, smoothing=0, baseline=LARGE)
    plain, less = lines(compare_curves(chosen, logs, x, smoothing=0)), lines(figure)
    assert less[LARGE][:, 1] == pytest.approx(0)
    if x == "tokens":
        assert less[SMALL][:, 1] == pytest.approx(plain[SMALL][:, 1] - plain[LARGE][:, 1])
    else:  # only as far as the baseline has updates: ten, of which the first and last bins end half an update inside
        assert less[SMALL][:, 0].max() <= plain[LARGE][:, 0].max()
    assert figure.axes[0].get_title("left") == f"Training loss less that of {LARGE}, seed by seed"
    alone = chosen[~((chosen.arm == SMALL) & (chosen.seed == 1))]
    assert lines(compare_curves(alone, logs, baseline=SMALL)).keys() == {SMALL, LARGE}  # of seed 0
    apart = chosen[(chosen.arm == SMALL) == (chosen.seed == 1)]
    title = compare_curves(apart, logs, baseline=SMALL).axes[0].get_title("left")
    assert title.endswith(f"\nwithout {LARGE}, which shares no seed")


def test_axes_may_be_logarithmic(shelf):
    chosen = choose(catalogue(shelf), {"sweep": ["pair", "rates"]})
    figure = compare_curves(chosen, logs_of(chosen, shelf), "step", log_x=True, log_y=True)
    axes = figure.axes[0]
    assert (axes.get_xscale(), axes.get_yscale(), axes.get_xlabel()) == ("log", "log", "updates")
    figure.draw_without_rendering()
    labels = {text.get_text() for text in axes.texts}
    assert labels == {LARGE, f"● {SMALL}, lr 0.01", f"■ {SMALL}, lr 0.02"}
    tints = {colors.to_hex(line.get_color()) for line in axes.lines if line.get_label().startswith(SMALL)}
    assert tints == {colors.to_hex(colour(SMALL))}


def test_a_run_that_diverged_is_drawn_as_far_as_it_went_and_counted(shelf):
    chosen = choose(catalogue(shelf), {"sweep": ["pair"]})
    logs = logs_of(chosen, shelf)
    lost = chosen.run[chosen.arm == LARGE].iloc[0]
    logs.loc[(logs.run == lost) & (logs.step > 4), "loss"] = np.nan
    chosen.loc[chosen.run == lost, "status"] = "diverged"
    figure = compare_curves(chosen, logs, smoothing=0)
    assert len(lines(figure)[LARGE]) == 4
    assert f"{LARGE} (of 2: 1 diverged)" in {text.get_text() for text in figure.axes[0].texts}


def test_what_cannot_be_drawn_is_refused(shelf):
    chosen = choose(catalogue(shelf), {"sweep": ["pair"]})
    logs = logs_of(chosen, shelf)
    for changes, message in (({"x": "loss"}, "^x = 'loss': must be one of tokens, step, elapsed"),
                             ({"baseline": "constant 1"}, "^baseline = 'constant 1': must be one of the chosen arms"),
                             ({"baseline": SMALL, "log_y": True}, "^log_y = True: must be off for a difference")):
        with pytest.raises(BadInput, match=message):
            compare_curves(chosen, logs, **changes)
    with pytest.raises(BadInput, match="must have logged an update: choose more"):
        compare_curves(chosen[:0], logs_of(chosen[:0], shelf))
    with pytest.raises(BadInput, match="is not a folder of runs"):
        catalogue(shelf + "/none")


def test_a_log_is_read_again_only_where_it_changed(shelf, monkeypatch):
    chosen = choose(catalogue(shelf), {"seed": [5]})
    before, read = logs_of(chosen, shelf), []
    monkeypatch.setattr(Run, "metrics", lambda run: read.append(run.name) or pd.DataFrame())
    assert logs_of(chosen, shelf).equals(before)
    assert not read
    file = Path(shelf) / chosen.run.iloc[0] / "metrics.jsonl"
    file.write_bytes(file.read_bytes())
    assert logs_of(chosen, shelf).empty
    assert read == [*chosen.run]
    browse.read.cache_clear()
