"""Figures of a choice: what they draw is what they were given, beside no legend, with everything in the frame."""

import numpy as np
import pandas as pd
import pytest
from matplotlib import colors
from matplotlib.text import Text

from lib.charts import against, at_each_size, capacities, catch_up, fronts, of_law, overlay, savings, speeds
from lib.config import RunConfig
from lib.fleet import SHAPES, Fleet, compare_times
from lib.plots import colour
from lib.theory import Law, final, rivals

SMALL, LARGE, LATE = "constant 1,024", "constant 12,288", "switch 1,024 to 12,288 at 0.5, lr unscaled"
LINE = pd.DataFrame({"x": [0.25, 0.5, 0.75], "middle": [4.2, 4.1, 4.15], "low": [4.1, 4.05, 4.1],
                     "high": [4.3, 4.15, 4.2]})


def check(figure):
    """Labels and legends lie beside the axes, inside the frame and off each other."""
    figure.draw_without_rendering()
    boxes = [Text.get_window_extent(text) for axes in figure.axes for text in axes.texts]
    boxes += [axes.get_legend().get_window_extent() for axes in figure.axes if axes.get_legend()]
    boxes += [legend.get_window_extent() for legend in figure.legends]
    assert boxes
    for place, box in enumerate(boxes):
        assert figure.bbox.x0 <= box.x0
        assert box.x1 <= figure.bbox.x1 + 1
        assert not any(axes.bbox.overlaps(box) for axes in figure.axes)
        assert not any(box.overlaps(other) for other in boxes[:place])
    assert all(axes.get_xlabel() for axes in figure.axes[-1:])
    return figure


@pytest.mark.parametrize("doubling", [False, True])
def test_a_choice_is_drawn_with_its_intervals_between_arms_that_make_none(doubling):
    levels = {SMALL: (4.0, 3.9, 4.1), LARGE: (5.0, 4.9, 5.1)}
    (axes,) = check(against({"late switch": LINE}, "Title", "switch", "loss, nat", levels, doubling)).axes
    line = next(line for line in axes.lines if len(line.get_xdata()) == 3)
    assert line.get_ydata().tolist() == LINE.middle.tolist()
    assert {colors.to_hex(line.get_color()) for line in axes.lines} >= {colors.to_hex(colour(arm)) for arm in levels}
    assert {text.get_text() for text in axes.texts} >= {"late switch", *levels}
    assert axes.get_yscale() == ("log" if doubling else "linear")


def test_a_choice_whose_last_places_have_no_number_is_labelled_where_it_ends():
    line = LINE.assign(middle=[4.2, np.nan, np.nan])
    check(against({"a": line, "b": LINE}, "Title", "x", "y"))


def test_catch_up_lays_the_constant_over_the_tail_update_by_update():
    """Loss is the place in the stream here, so that both lines are the same where they lie right."""
    rows = []
    for arm, small in ((LARGE, 0), (LATE, 6)):
        sizes = [1024] * small * 12 + [12_288] * (12 - small)
        ends = np.cumsum(sizes)
        rows += [dict(run=arm, tokens=end, tokens_per_step=size, stage=int(size > 1024 and small > 0), loss=end / 1e5)
                 for end, size in zip(ends, sizes, strict=True)]
    runs = pd.DataFrame({"run": [LARGE, LATE], "arm": [LARGE, LATE]})
    (axes,) = check(catch_up(runs, pd.DataFrame(rows), LARGE, "Title")).axes
    of = {line.get_label(): line for line in axes.lines}
    assert of[LATE].get_xdata().tolist() == of[LARGE].get_xdata().tolist() == [1, 2, 3, 4, 5, 6]
    assert of[LATE].get_ydata() == pytest.approx(of[LARGE].get_ydata())


def test_fronts_join_what_no_other_beats():
    base = dict(token_budget=122_880, tokens_per_step=12_288, device_token_capacity=1024, seq_len=256)
    arms = [RunConfig(**base).arm, SMALL, "constant 3,072", LATE, "seesaw 1,024 to 12,288 by 2",
            "dividers 12,4,1 of 12,288, sde-power, decay per token"]
    costs = pd.DataFrame({"arm": arms, "budget_kind": "tokens", "validation_loss": [5.0, 4.0, 4.5, 4.6, 4.1, 4.9],
                          "tokens": 1.1e6, "steps": [90, 1080, 360, 600, 702, 510],
                          "elapsed_seconds": [36, 39, 35, 38, 37, 40]})
    costs = pd.concat([costs, costs.iloc[:2].assign(budget_kind="seconds", elapsed_seconds=36)])
    figure = check(fronts(costs, "Title"))
    tokens, steps, _ = figure.axes
    assert tokens.lines[0].get_ydata().tolist() == [4.0]
    assert steps.lines[0].get_xdata().tolist() == [90, 360, 702, 1080]
    hollow = [line for line in steps.lines if colors.to_hex(line.get_markerfacecolor()) == "#ffffff"]
    assert len(hollow) == 2


def test_an_overlay_shows_the_distance_from_one_arm_and_hatches_what_does_not_count():
    x = np.arange(1.0, 21)
    curves = pd.concat([pd.DataFrame({"x": x, "arm": arm, "loss": 3 + 5 / x + gap})
                        for arm, gap in (("A 512", 0.0), ("H 32", 0.001), ("J 512", 0.02), ("B 32", 0.021))])
    curves.loc[(curves.arm == "H 32") & (curves.x < 8), "loss"] = np.nan  # hidden behind another
    curves.loc[(curves.arm == "B 32") & curves.x.between(6, 15), "loss"] = np.nan
    figure = check(overlay(curves, "J 512", "Title", "tokens, millions", excluded=5))
    above, below = figure.axes
    of = {line.get_label(): line for line in below.lines}
    assert of["J 512"].get_ydata() == pytest.approx(0)
    assert of["A 512"].get_ydata() == pytest.approx(-0.02)
    assert of["H 32"].get_xdata().min() == 8
    assert np.isnan(of["B 32"].get_ydata()[of["B 32"].get_xdata() == 10.5]).all()  # broken, not drawn across
    assert not np.isnan(of["A 512"].get_ydata()).any()
    assert [patch.get_x() for patch in above.patches] == [1]
    assert [patch.get_width() for patch in below.patches] == [4]
    assert above.get_ylim()[1] < 3 + 5 / 4  # what does not count has no say in the range
    assert of["A 512"].get_linestyle() != of["H 32"].get_linestyle()
    assert colour("A 512") != colour("J 512")


def test_savings_have_a_row_of_panels_a_size():
    times = compare_times(Fleet(), [124e6, 7e9], [1, 64, 4096])
    figure = check(savings(times, "Title"))
    assert [axes.get_ylabel() for axes in figure.axes[::2]] == ["124M", "7B"]
    for axes in figure.axes:
        assert len(axes.lines) == len(SHAPES) + 1  # and the zero
    line = figure.axes[2].lines[0]
    expected = times[(times.parameters == 7e9) & (times.arm == line.get_label())].from_start
    assert line.get_ydata().tolist() == expected.tolist()


def test_each_size_has_its_updates_above_it():
    line = pd.DataFrame({"x": [512, 1024, 4096], "middle": [2.0, 1.9, 2.1], "low": [1.9, 1.8, 2.0],
                         "high": [2.1, 2.0, 2.2]})
    figure = check(at_each_size({"baseline's rate": line}, pd.Series({512: 800.4, 1024: 450.0, 4096: 120.0}), "Title",
                                "loss, bits per byte"))
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_xticklabels()] == ["512", "1,024", "4,096"]
    assert [label.get_text() for label in axes.child_axes[0].get_xticklabels()] == ["800", "450", "120"]


@pytest.mark.parametrize("tried", [1, 2, 5])
def test_capacities_are_drawn_with_what_does_not_fit(tried):
    tries = pd.DataFrame({"capacity": [128, 256, 512, 768, 1024], "fits": [True, True, True, False, False],
                          "tokens_per_second": [9e3, 12e3, 11e3, None, None],
                          "peak_memory": [4e8, 5e8, 9e8, None, None]})
    figure = capacities(tries[:tried], 128)
    figure.draw_without_rendering()
    above, below = figure.axes
    assert min(axes.bbox.height for axes in figure.axes) > 0.3 * figure.bbox.height
    crosses = [line for line in above.lines if line.get_marker() == "x"]
    assert [line.get_xdata().tolist() for line in crosses] == [[768, 1024]][:tried > 3]
    assert below.get_ylim()[0] == 0


@pytest.mark.parametrize("noise", [1e-2, 400.0, 1e5])
def test_schedules_of_a_law_end_at_its_loss(noise):
    law = Law(2.5, 3.0, 0.3, 1.5, noise, 0.05)
    schedules = rivals(law, 1_105_920, 1024, 12_288)
    above, below = check(of_law(law, schedules, "Title")).axes
    for axes in (above, below):
        assert {line.get_label() for line in axes.lines} == {*schedules}
    for line in below.lines:
        assert line.get_xdata()[-1] == pytest.approx(1.10592)
        assert line.get_ydata()[-1] == pytest.approx(final(law, schedules[line.get_label()]))
        assert below.get_ylim()[0] < line.get_ydata()[-1] < below.get_ylim()[1]
    for line in above.lines:
        assert line.get_ydata()[0] == pytest.approx(schedules[line.get_label()][0][0])
    assert {text.get_text() for text in below.texts} == {*schedules}


def test_a_loop_looks_the_same_in_every_race():
    """Also in those that another loop is not in; the legend names each once."""
    rows = pd.DataFrame([
        {"shape": shape, "precision": "fp32", "compile": "off", "loop": loop, "round": number, "tokens_per_second": 5}
        for shape, loops in (("small", ["own", "bare", "plain"]), ("large", ["own", "plain"]))
        for loop in loops for number in range(2)])
    figure = speeds(rows, "Speeds")
    marks = [(line.get_label(), line.get_color(), line.get_marker()) for line in figure.axes[0].lines
             if line.get_label().startswith("the ")]
    assert len(marks) == 3
    assert len({*marks}) == len({colour for _, colour, _ in marks}) == 2
    assert sorted(text.get_text() for text in figure.legends[0].get_texts()) == ["the bare loop", "the plain loop"]
