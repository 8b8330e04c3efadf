"""Figures: one colour for an arm in every notebook, labels beside the lines, alternative text for each figure.

Every function but `show` returns a matplotlib Figure of its own, outside pyplot's state, so nothing is drawn twice.
"""

from collections.abc import Mapping, Sequence
from math import isfinite, log2
from re import findall, fullmatch, match
from zlib import crc32

import matplotlib as mpl
import numpy as np
import pandas as pd
from IPython.display import display
from matplotlib import colors
from matplotlib.figure import Figure

from lib import stats
from lib.check import require
from lib.png import bundle

STYLE = {"font.size": 11, "axes.titlesize": 12, "axes.titlelocation": "left", "axes.spines.top": False,
         "axes.spines.right": False, "axes.grid": True, "grid.color": "#e6e6e6", "axes.axisbelow": True,
         "lines.linewidth": 2, "legend.frameon": False, "legend.handlelength": 2.8}
GREY = "#666666"
RAMP = mpl.colormaps["viridis"]  # constants: from 512 tokens a step, dark, to 524,288, green
SMALLEST, OCTAVES = 2**9, 10
# Schedules: the warm hues of Okabe and Ito's palette for colour-blind readers, which the ramp does not touch.
HUES = {"dividers": "#d55e00", "shrinking": "#cc79a7", "seesaw": "#e69f00", "switch": "#dc267f",
        "adaptive": "#000000", "stages": "#a6761d",
        # The square-root experiment: two arms that the rule has equal share a hue.
        "A": "#0072b2", "H": "#0072b2", "B": "#d55e00", "J": "#d55e00", "I": "#56b4e9", "G": "#888888", "M": "#e69f00",
        "D": "#cc79a7", "K": "#009e73", "L": "#000000"}
MARKERS = {"o": "●", "s": "■", "D": "◆", "^": "▲", "v": "▼"}  # learning rates of one arm, in order, and in labels


def colour(arm: str) -> tuple[float, float, float]:
    """The RGB of an arm from its name alone, so that it is the same in every figure of every notebook.

    Constants lie on one ramp by log T, whatever the base, so that a larger T is always greener. Schedules have the hue
    of their kind (dividers that shrink T, such as 1,4,12, one of their own), the brighter the wider T's range; the
    name's checksum sets the tint, to tell apart those of one range.
    """
    kind, numbers = match(r"\s*([\w-]*)\s*([\d.,]*)", arm).groups()
    if kind == "constant" and numbers.strip(",."):
        octaves = log2(float(numbers.replace(",", "")) / SMALLEST)
        return RAMP(0.82 * min(max(octaves / OCTAVES, 0), 1))[:3]
    checksum, dividers = crc32(arm.encode()), [float(number) for number in findall(r"\d+\.?\d*", numbers)]
    tint, shade = checksum % 1000 / 999, 0.0
    if kind == "dividers" and dividers:
        kind = "shrinking" if dividers[-1] > dividers[0] else kind
        shade = 1 - min(log2(max(dividers) / min(dividers)) / 4, 1)
    hue = np.array(colors.to_rgb(HUES.get(kind) or list(HUES.values())[checksum % 4]))
    return tuple(float(part) for part in (hue + 0.3 * tint * (1 - hue)) * (1 - 0.6 * shade))


def line_style(arm: str) -> str | tuple:
    """Solid for constants and for the large T of the square-root experiment, long dashes for all others."""
    return "-" if fullmatch(r"(constant|[AJKL]) [\d,]+", arm) else (0, (6, 1.2))


def order(arm: str) -> tuple:
    """Sorting key of arms: constants by T, then schedules by name."""
    number = match(r"constant ([\d,]+)", arm)
    return (0, int(number[1].replace(",", "")), arm) if number else (1, 0, arm)


def show(figure: Figure, alt: str) -> None:
    """Display the figure as PNG, with alternative text in its metadata. Raises BadInput where the text is empty."""
    require(bool(alt.strip()), "alt", alt, "must say what the figure shows")
    data, metadata = bundle(figure, alt)
    display(data, metadata=metadata, raw=True)


def new_figure(rows: int = 1, height: float = 4.5, title: str = "", **options):
    """A figure and its axes, one above the other, with a title above all."""
    figure = Figure(figsize=(8, height), dpi=110, layout="constrained")
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=13)
    return figure, figure.subplots(rows, 1, **options)


def height_for(labels: int) -> float:
    """Inches that hold so many lines of labels beside the axes."""
    return max(4.5, 1.5 + 0.24 * labels)


def label_ends(axes, ends: Sequence[tuple[float, float, str, tuple]]) -> None:
    """Write each line's name right of the axes, near its end (x, y), spread so that none overlaps another."""
    ends = sorted((end for end in ends if isfinite(end[1])), key=lambda end: end[1])
    axes.get_ylim()  # settles the limits that the places below are relative to
    wanted = np.array([(axes.transScale + axes.transLimits).transform(end[:2])[1] for end in ends]).clip(0, 1)
    gap = 0.24 * axes.get_subplotspec().get_gridspec().nrows / (axes.figure.get_figheight() - 1.2)
    steps = gap * np.arange(len(ends))
    up = np.maximum.accumulate(wanted - steps)  # each pushed above the one below it …
    down = np.minimum.accumulate((wanted - steps)[::-1])[::-1]  # … or below the one above it; their mean keeps the gap
    places = np.clip((up + down) / 2, 0, max(1 - gap * (len(ends) - 1), 0)) + steps
    for (x, y, text, tint), place in zip(ends, places, strict=True):
        axes.annotate(text, (x, y), (1.03, place), textcoords="axes fraction", color=tint, va="center", fontsize=10,
                      annotation_clip=False, arrowprops={"arrowstyle": "-", "color": tint, "lw": 0.6, "alpha": 0.6,
                                                         "shrinkA": 1, "shrinkB": 2})


def variants(runs: pd.DataFrame) -> list[tuple[str, str, str, pd.DataFrame]]:
    """(arm, label, marker, its runs) for each arm and learning rate; the rate is named where an arm has several."""
    found = []
    for arm in sorted(runs["arm"].unique(), key=order):
        rates = sorted(runs.loc[runs["arm"] == arm, "lr"].unique())
        for i, lr in enumerate(rates):
            label, marker = (f"{arm}, lr {lr:g}", list(MARKERS)[i % len(MARKERS)]) if len(rates) > 1 else (arm, "")
            found.append((arm, label, marker, runs[(runs["arm"] == arm) & (runs["lr"] == lr)]))
    return found


@mpl.rc_context(STYLE)
def curves(runs: pd.DataFrame, updates: pd.DataFrame, x: str = "tokens", title: str = "Training loss",
           reference: tuple[float, str] | None = None) -> Figure:
    """Training loss against `tokens` or `elapsed` time; `reference` is a loss (nat) and its label, drawn across.

    All runs are smoothed over the same bins of tokens: the largest update's, between a 60th and a 15th of the longest
    run. Faint behind is every update. The line is the mean over an arm's seeds as far as all go, the band their range.
    """
    require(x in ("tokens", "elapsed"), "x", x, "must be tokens or elapsed")
    lasts = updates["elapsed"].max()
    clock = ("hours", 3600) if lasts >= 3600 else ("minutes", 60) if lasts >= 180 else ("seconds", 1)
    unit, word = {"tokens": (1e6, "tokens, millions"), "elapsed": (clock[1], f"time, {clock[0]}")}[x]
    longest = updates["tokens"].max()
    smooth = stats.bins(updates, np.clip(updates["tokens_per_step"].max(), longest / 60, longest / 15))
    groups = variants(runs)
    figure, axes = new_figure(height=height_for(len(groups)))
    ends, seen = [], []
    for i, (arm, label, marker, members) in enumerate(groups):
        lines = []
        for run in members["run"]:
            log, bins = updates[updates["run"] == run], smooth[smooth["run"] == run]
            axes.plot(log[x] / unit, log["loss"], color=colour(arm), lw=0.5, alpha=0.15, zorder=1)
            middle = bins["end_tokens"] - (bins["end_tokens"] - bins["start_tokens"]) / 2
            middle = middle.clip(upper=log["tokens"].max()) if len(log) else middle
            place = middle if x == "tokens" else np.interp(middle, log["tokens"], log[x])
            lines.append(np.array([place / unit, bins["loss"]]))
        lines = [line for line in lines if line.shape[1]] or [np.full((2, 1), np.nan)]  # lost at the first update
        lines = [line[:, : min(line.shape[1] for line in lines)] for line in lines]
        (across, loss), losses = np.mean(lines, axis=0), [line[1] for line in lines]
        finite = np.isfinite(loss)
        if len(lines) > 1:
            axes.fill_between(across, np.min(losses, 0), np.max(losses, 0), color=colour(arm), alpha=0.2, lw=0)
        axes.plot(across, loss, color=colour(arm), ls=line_style(arm), label=label, zorder=3, mec="white",
                  marker=marker or ("o" if finite.sum() == 1 else ""), markevery=(i % 4, max(len(loss) // 5, 1)))
        label = f"{MARKERS.get(marker, '')} {label}".strip()
        label += f" (of {len(members)}: {lost})" if (lost := stats.unfinished(members)) else ""
        if not finite.any():
            ends.append((0, axes.get_ylim()[1], label, colour(arm)))
        else:
            ends.append((across[finite][-1], loss[finite][-1], label, colour(arm)))
            seen += list(zip(across[finite], loss[finite], strict=True))
    if reference is not None:
        axes.axhline(reference[0], color=GREY, lw=1, ls=":")
        ends.append((axes.get_xlim()[1], *reference, GREY))
    if seen:  # from the tenth part on: the fall from ln(vocabulary) would press the rest flat
        across, loss = np.transpose(seen)
        late = loss[across >= 0.1 * across.max()]
        values = [*([reference[0]] if reference else []), late.min(), np.quantile(late, 0.99)]
        pad = 0.06 * (max(values) - min(values)) or 0.5
        axes.set_ylim(min(values) - pad, max(values) + pad)
    axes.set(title=title, xlabel=word, ylabel="training loss, nat")
    axes.set_xlim(left=0)
    label_ends(axes, ends)
    return figure


@mpl.rc_context(STYLE)
def trajectories(configs: Sequence, title: str = "Planned schedules") -> Figure:
    """T, learning rate and cumulative updates of RunConfigs over their budget; no updates where it is in seconds.

    Raises BadInput where token and time budgets are mixed.
    """
    timed = {config.token_budget is None for config in configs}
    require(len(timed) == 1, "configs", len(configs), "must be at least one, all with the same kind of budget")
    timed = timed.pop()
    panels = panels_for(title, "time, seconds" if timed else "tokens, millions", updates=not timed)
    plans = pd.DataFrame([{"arm": config.arm, "lr": config.lr, "config": config} for config in configs])
    for arm, label, marker, members in variants(plans):
        config = members["config"].iloc[0]  # seeds plan the same
        stages, points = config.resolved(), []
        count = 0.0
        for stage, end in zip(stages, [*(stage.start for stage in stages[1:]), 1.0], strict=True):
            for progress in np.linspace(stage.start, end, 80):
                lr = config.learning_rate(progress, stage)
                done = count + (progress - stage.start) * config.budget / stage.tokens_per_step
                points.append((progress * config.budget / (1 if timed else 1e6), stage.tokens_per_step, lr, done))
            count = done
        draw_panels(panels, arm, label, marker, *np.transpose(points))
    return finish_panels(panels)


@mpl.rc_context(STYLE)
def measured_trajectories(runs: pd.DataFrame, updates: pd.DataFrame, title: str = "Schedules as run") -> Figure:
    """T, learning rate and cumulative updates as logged, over tokens; one run for each arm and learning rate."""
    panels = panels_for(title, "tokens, millions")
    for arm, label, marker, members in variants(runs):
        logs = [updates[updates["run"] == run] for run in members["run"]]
        log = max(logs, key=len).sort_values("step")  # the longest: a diverged seed stops short
        if log.empty:
            continue
        begins = np.append(log["tokens"] - log["tokens_per_step"], log["tokens"].iloc[-1]) / 1e6
        held = log[["tokens_per_step", "lr"]].iloc[[*range(len(log)), -1]]  # the last update's hold until its end
        draw_panels(panels, arm, label, marker, begins, held["tokens_per_step"], held["lr"],
                    np.append(log["step"] - 1, log["step"].iloc[-1]))
    return finish_panels(panels)


def panels_for(title: str, xlabel: str, updates: bool = True):
    """Panels sharing x: tokens per step (log), learning rate and, where wanted, updates."""
    names = ["tokens per step", "learning rate", "updates"][: 3 if updates else 2]
    _, panels = new_figure(len(names), 2 * len(names), title, sharex=True)
    for axes, name in zip(panels, names, strict=True):
        axes.set_ylabel(name)
    panels[0].set_yscale("log", base=2)
    panels[-1].set_xlabel(xlabel)
    return panels


def draw_panels(panels, arm: str, label: str, marker: str, x, *series) -> None:
    """One line a panel; the first, T, in steps."""
    for axes, y, draw in zip(panels, series, ("steps-post", "default", "default"), strict=False):
        axes.plot(x, y, color=colour(arm), ls=line_style(arm), drawstyle=draw, label=label, mec="white",
                  marker=marker, markevery=max(len(x) // 5, 1))


def finish_panels(panels) -> Figure:
    """Name the ticks of T, and put the legend beside the panels unless the title is the only name in it."""
    figure, shown = panels[0].figure, sorted({value for line in panels[0].lines for value in line.get_ydata()})
    far = [value for i, value in enumerate(shown) if i == 0 or value / shown[i - 1] > 1.3]
    panels[0].set_yticks(far if len(far) <= 6 else far[:: len(far) // 4], minor=False)
    panels[0].yaxis.set_major_formatter("{x:,.0f}")
    panels[0].yaxis.set_minor_locator(mpl.ticker.NullLocator())
    handles, labels = panels[0].get_legend_handles_labels()
    if labels != [figure.get_suptitle()]:
        figure.legend(handles, labels, loc="outside right upper", fontsize=10)
    figure.align_ylabels()
    return figure


@mpl.rc_context(STYLE)
def differences(comparisons: Mapping[str, stats.Comparison], margin: float, title: str = "Paired differences",
                unit: str = "nat") -> Figure:
    """Forest plot: paired differences with their intervals, 0, the ±margin band, and each verdict beside its row."""
    figure, axes = new_figure(height=max(2.4, 1.5 + 0.45 * len(comparisons)))
    axes.axvspan(-margin, margin, color="#dddddd", lw=0)
    axes.axvline(0, color=GREY, lw=1)
    for row, (name, comparison) in enumerate(comparisons.items()):
        axes.plot(comparison.interval, [row, row], color=colour(name), lw=2.5, solid_capstyle="butt")
        axes.plot(comparison.difference, row, "o", color=colour(name), ms=8)
        lost = f", {comparison.lost} lost" if comparison.lost else ""
        axes.annotate(f"{comparison.verdict} (n = {comparison.n}{lost})", (1.02, row), va="center", fontsize=10,
                      xycoords=("axes fraction", "data"), annotation_clip=False)
    level = {f"{100 * comparison.confidence:g} %" for comparison in comparisons.values()}
    axes.set_yticks(range(len(comparisons)), list(comparisons))
    axes.set(title=title, ylim=(len(comparisons) - 0.5, -0.5),
             xlabel=f"paired difference, {unit} (negative is better)\n"
                    f"bar: {', '.join(sorted(level))} interval · grey: margin ±{margin:g}")
    axes.grid(visible=False, axis="y")
    return figure


@mpl.rc_context(STYLE)
def tuning(runs: pd.DataFrame, title: str = "Learning rate of each arm") -> Figure:
    """Validation loss against learning rate, a line an arm; a star marks the best, a cross at the top what failed."""
    arms = sorted(runs["arm"].unique(), key=order)
    figure, axes = new_figure(height=height_for(len(arms)))
    winners, ends, top = stats.best(runs).set_index("arm"), [], axes.get_xaxis_transform()
    for i, arm in enumerate(arms):
        members = runs[runs["arm"] == arm]
        loss = members["validation_loss"].where(stats.completed(members)).groupby(members["lr"]).mean(skipna=False)
        axes.plot(loss.index, loss, color=colour(arm), ls=line_style(arm), marker="o", ms=5, label=arm)
        failed = loss.index[loss.isna()]
        axes.plot(failed, [1 - 0.04 * i] * len(failed), "x", color=colour(arm), ms=8, mew=2, transform=top)
        winner, found = winners.loc[arm], loss.dropna()
        axes.plot(winner["lr"], winner["validation_loss"], "*", color=colour(arm), ms=17, mec="white", zorder=4)
        if len(found):
            edge = ", best at an edge" if winner["at_edge"] else ""
            ends.append((found.index[-1], found.iloc[-1], f"{arm}{edge}", colour(arm)))
    rates = sorted(runs["lr"].unique())
    axes.set_xscale("log")
    axes.set_xticks(rates[:: 1 + len(rates) // 9], [f"{lr:g}" for lr in rates[:: 1 + len(rates) // 9]])
    axes.xaxis.set_minor_locator(mpl.ticker.NullLocator())
    axes.set(title=title, xlabel="learning rate (star: best, cross: did not finish)", ylabel="validation loss, nat")
    label_ends(axes, ends)
    return figure


@mpl.rc_context(STYLE)
def lengths(counts: Sequence[int], title: str = "Document lengths") -> Figure:
    """Documents by length in tokens: entry k counts those of 2^k to 2^(k+1) − 1."""
    figure, axes = new_figure(height=3.5)
    axes.bar(range(len(counts)), counts, width=1, align="edge", color="#0072b2", edgecolor="white")
    powers = range(0, len(counts) + 1, 1 + (len(counts) + 1) // 12)
    axes.set_xticks(powers, [f"{2**power:,}" for power in powers])
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.set(title=f"{title}: {sum(counts):,} documents", xlabel="document length, tokens (bins double)",
             ylabel="documents")
    return figure
