import nbformat
import numpy as np
import pandas as pd
import pytest
from bs4 import BeautifulSoup
from matplotlib import colors
from matplotlib.text import Text

from lib import plots
from lib.check import BadInput
from lib.config import RunConfig
from lib.execute import to_html
from lib.stats import compare

BASE = dict(token_budget=12_288 * 100, tokens_per_step=12_288, device_token_capacity=1024, seq_len=256)
DIVIDERS = dict(schedule="dividers", batch_dividers=[12, 4, 1], stage_length=[0.33, 0.33])


def configs(**changes):
    return [RunConfig(**BASE | changes), RunConfig(**BASE | changes | {"tokens_per_step": 3072}),
            RunConfig(**BASE | changes | DIVIDERS)]


def frames(arms=configs(), seeds=(0, 1, 2), lrs=(1e-3,), diverged=()):  # noqa: B008
    """Runs and updates as training would log them, from a made-up loss that falls with tokens and updates."""
    runs, updates = [], []
    for config in arms:
        for lr in lrs:
            for seed in seeds:
                random = np.random.default_rng([seed, int(lr * 1e6)])
                run, rows, tokens, elapsed = f"{config.arm} {lr} {seed}", [], 0, 0.0
                stages = config.resolved()
                while tokens < config.budget:
                    progress = tokens / config.budget
                    stage = max((s for s in stages if s.start <= progress), key=lambda s: s.start)
                    size = stage.tokens_per_step
                    if tokens + size > config.budget:
                        break
                    tokens, elapsed = tokens + size, elapsed + size / 2000
                    loss = 3 + 6 * (1 + 40 * progress) ** -0.7 + 0.15 * np.log2(lr / 1e-3) ** 2 * progress
                    loss += 0.1 * np.log2(config.tokens_per_step / 3072) + random.normal(0, 5 / size**0.5)
                    failed = (config.arm, lr, seed) in diverged and progress > 0.6
                    rate = config.learning_rate(progress, stage)
                    rows.append(dict(run=run, step=len(rows) + 1, tokens=tokens, elapsed=elapsed, loss=loss, lr=rate,
                                     tokens_per_step=size))
                    if failed:
                        rows[-1]["loss"] = np.nan
                        break
                updates += rows
                runs.append(dict(run=run, arm=config.arm, lr=lr, seed=seed, budget_kind="tokens",
                                 status="diverged" if failed else "finished",
                                 validation_loss=np.nan if failed else loss + random.normal(0, 0.01)))
    return pd.DataFrame(runs), pd.DataFrame(updates)


def texts_beside(figure):
    """Boxes of the labels beside the axes and of the figure's legends, drawn."""
    figure.draw_without_rendering()
    boxes = []
    for axes in figure.axes:
        for text in axes.texts:
            boxes.append(Text.get_window_extent(text))  # without the leader to the line's end
            assert boxes[-1].x0 >= axes.bbox.x1, text.get_text()
    return boxes + [legend.get_window_extent() for legend in figure.legends]


def check(figure):
    """What holds for every figure: units or a plain count on every axis, nothing over the data, nothing cut off."""
    boxes = texts_beside(figure)
    assert all(axes.get_legend() is None for axes in figure.axes)
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])
    for box in boxes:
        assert figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1 + 1  # noqa: PT018
        assert not any(axes.bbox.overlaps(box) for axes in figure.axes)
    for axes in figure.axes:
        assert axes.get_ylabel() or len(axes.get_yticklabels())
        sizes = [text.get_fontsize() for text in (*axes.get_xticklabels(), *axes.texts, axes.xaxis.label)]
        assert min(sizes) >= 10
    assert any(word in figure.axes[-1].get_xlabel() for word in
               ("tokens, millions", "minutes", "hours", "seconds", "nat", "learning rate", "length, tokens"))
    return figure


def drawn(figure):
    """Colours of the lines by label."""
    lines = [line for axes in figure.axes for line in axes.lines if not line.get_label().startswith("_")]
    found = {}
    for line in lines:
        found.setdefault(line.get_label(), set()).add(colors.to_hex(line.get_color()))
    return found


def a_comparison(change=-0.04, seeds=5):
    base = pd.Series(np.linspace(3, 3.2, seeds))
    return compare(base + change + 0.002 * np.sin(base * 100), base, 0.01)


def test_an_arm_has_one_colour_in_every_figure():
    runs, updates = frames(seeds=(0, 1))
    arm, few = "dividers 12,4,1 of 12,288", runs[runs["arm"] != "constant 3,072"]
    figures = [plots.curves(runs, updates), plots.curves(few, updates, x="elapsed"), plots.tuning(runs),
               plots.trajectories(configs()), plots.measured_trajectories(few, updates)]
    for figure in figures:
        assert drawn(figure)[arm] == {colors.to_hex(plots.colour(arm))}
        assert drawn(figure)["constant 12,288"] == {colors.to_hex(plots.colour("constant 12,288"))}
    forest = plots.differences({arm: a_comparison()}, 0.01)
    assert colors.to_hex(plots.colour(arm)) in {colors.to_hex(line.get_color()) for line in forest.axes[0].lines}


def test_colours_tell_arms_apart():
    names = [f"constant {1024 * 2**k:,}" for k in range(10)]
    names += [f"dividers {d}" for d in ("12,4,1", "4,2,1", "2,1", "8,4,2,1", "1,4,12", "1,2", "6,2,1")]
    names += ["seesaw 2", "late_switch 1,024", "adaptive", "stages"]
    tints = np.array([plots.colour(name) for name in names])
    assert tints.min() >= 0
    assert tints.max() <= 1
    apart = np.abs(tints[:, None] - tints[None]).sum(-1) + np.eye(len(names))
    assert apart.min() > 0.04
    assert plots.line_style("constant 1,024") != plots.line_style("dividers 2,1")
    brightness = tints[:10] @ [0.2, 0.7, 0.1]
    assert (np.diff(brightness) > 0).all()  # legible in grey, too
    assert sorted(["seesaw 2", "constant 12,288", "constant 3,072"], key=plots.order)[0] == "constant 3,072"


@pytest.mark.parametrize("x", ["tokens", "elapsed"])
def test_curves(x):
    runs, updates = frames()
    check(plots.curves(runs, updates, x=x, reference=(3.3, "trigrams")))
    tried = frames(lrs=(5e-4, 1e-3, 2e-3), seeds=(0, 1), diverged=[("dividers 12,4,1 of 12,288", 2e-3, 0)])
    figure = check(plots.curves(*tried, x=x))
    labels = {text.get_text() for text in figure.axes[0].texts}
    assert "◆ dividers 12,4,1 of 12,288, lr 0.002 (of 2: 1 diverged)" in labels
    low, high = figure.axes[0].get_ylim()
    assert 3 < low < 4 < high < 7  # the fall from 9 nat does not press the rest flat
    updates["elapsed"] *= 100
    assert "hours" in plots.curves(runs, updates, x="elapsed").axes[0].get_xlabel()
    with pytest.raises(BadInput, match="x ="):
        plots.curves(runs, updates, x="steps")


def test_curves_of_little():
    one = RunConfig(**BASE | {"token_budget": 12_288})
    for seeds in ((0,), (0, 1)):
        runs, updates = frames([one], seeds)
        assert len(updates) == len(seeds)
        check(plots.curves(runs, updates))
        check(plots.measured_trajectories(runs, updates))
        check(plots.tuning(runs))
    updates["loss"] = np.nan
    check(plots.curves(runs.assign(status="diverged", validation_loss=np.nan), updates))


def test_many_labels_do_not_overlap():
    many = [RunConfig(**BASE | {"tokens_per_step": 1024 * k, "token_budget": 2**19}) for k in range(6, 30)]
    check(plots.curves(*frames(many, seeds=(0,))))


def test_trajectories():
    figure = check(plots.trajectories(configs()))
    batch, rate, count = ({line.get_label(): line.get_xydata() for line in axes.lines} for axes in figure.axes)
    stepped = batch["dividers 12,4,1 of 12,288"]
    assert sorted(set(stepped[:, 1])) == [1024, 3072, 12288]
    assert stepped[stepped[:, 1] == 1024, 0].max() == pytest.approx(0.33 * 1.2288)
    assert rate["constant 12,288"][:, 1].max() == pytest.approx(1e-3, rel=0.01)
    assert count["constant 12,288"][-1, 1] == pytest.approx(100)
    assert count["dividers 12,4,1 of 12,288"][-1, 1] == pytest.approx(100 * (12 * 0.33 + 4 * 0.33 + 0.34))
    timed = check(plots.trajectories(configs(token_budget=None, time_budget=300.0)))
    assert len(timed.axes) == 2
    assert timed.axes[-1].get_xlabel() == "time, seconds"
    assert set(drawn(plots.trajectories([*configs(), *configs(lr=2e-3)]))) > {"constant 12,288, lr 0.001"}
    alone = plots.trajectories(configs()[:1], configs()[0].arm)
    assert not alone.legends
    assert plots.trajectories(configs()[:1]).legends
    with pytest.raises(BadInput, match="same kind of budget"):
        plots.trajectories(configs() + configs(token_budget=None, time_budget=300.0))


def test_measured_trajectories_are_those_planned():
    runs, updates = frames(seeds=(0,))
    figure = check(plots.measured_trajectories(runs, updates))
    batch, _, count = ({line.get_label(): line.get_xydata() for line in axes.lines} for axes in figure.axes)
    assert batch["constant 3,072"][:, 0].min() == 0
    assert sorted(set(batch["dividers 12,4,1 of 12,288"][:, 1])) == [1024, 3072, 12288]
    assert count["constant 12,288"][-1].tolist() == pytest.approx([1.2288, 100])


def test_differences():
    lost = compare(pd.Series([3.0, 3.1, np.nan]), pd.Series([3.0, 3.0, 3.0]), 0.01)
    figure = check(plots.differences({"dividers 12,4,1 of 12,288": a_comparison(), "constant 3,072": a_comparison(0, 9),
                                      "constant 6,144": a_comparison(0.1), "seesaw 2": lost,
                                      "adaptive": a_comparison(seeds=1)}, 0.01))
    assert [text.get_text() for text in figure.axes[0].texts] == [
        "better (n = 5)", "equivalent (n = 9)", "worse (n = 5)", "inconclusive (n = 2, 1 lost)", "inconclusive (n = 1)"]
    assert "margin ±0.01" in figure.axes[0].get_xlabel()


def test_tuning_marks_the_best_and_what_failed():
    runs, _ = frames(lrs=(5e-4, 1e-3, 2e-3), seeds=(0,), diverged=[("dividers 12,4,1 of 12,288", 2e-3, 0)])
    axes = check(plots.tuning(runs)).axes[0]
    stars = [line.get_xdata()[0] for line in axes.lines if line.get_marker() == "*"]
    crosses = [list(line.get_xdata()) for line in axes.lines if line.get_marker() == "x"]
    assert stars == [1e-3] * 3
    assert crosses == [[], [], [2e-3]]


def test_lengths():
    axes = check(plots.lengths([10 * k for k in range(17)])).axes[0]
    assert "1,360 documents" in axes.get_title("left")
    assert [bar.get_height() for bar in axes.patches] == [10 * k for k in range(17)]
    check(plots.lengths([5]))


def test_alternative_text_reaches_the_page(monkeypatch, tmp_path):
    published = []
    monkeypatch.setattr(plots, "display", lambda data, metadata, raw: published.append((data, metadata)))
    alt = 'loss of "12,4,1" < loss of constant & co'
    plots.show(plots.lengths([5]), alt)
    (data, metadata), = published
    output = nbformat.v4.new_output("display_data", data, metadata=metadata)
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("show(figure, alt)", outputs=[output])])
    notebook.metadata["papermill"] = {"parameters": {}}
    nbformat.write(notebook, tmp_path / "report.ipynb")
    page = to_html(tmp_path / "report.ipynb")
    image, = BeautifulSoup(page, "html.parser").select("img")
    assert image["alt"] == alt
    assert image["src"].startswith("data:image/png;base64,iVBOR")
    with pytest.raises(BadInput, match="alt"):
        plots.show(plots.lengths([5]), " ")
