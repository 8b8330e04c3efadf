"""Figures of what a choice does to the loss: a switch point, a critical batch, an arm among all arms."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import log2

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from lib import stats
from lib.plots import GREY, STYLE, colour, height_for, label_ends, line_style, new_figure, order
from lib.theory import Law, along

PALETTE = ["#0072b2", "#d55e00", "#009e73", "#cc79a7"]  # of Okabe and Ito, for lines that are no arms


@mpl.rc_context(STYLE)
def against(lines: Mapping[str, pd.DataFrame], title: str, xlabel: str, ylabel: str,
            levels: Mapping[str, tuple[float, float, float]] | None = None, doubling: bool = False) -> Figure:
    """Means with intervals against a choice: frames of x, middle, low and high, a line each.

    `levels` are arms to compare with that make no such choice: mean, low and high, drawn across. `doubling` has the
    vertical axis in powers of two.
    """
    levels = levels or {}
    figure, axes = new_figure(height=height_for(len(lines) + len(levels)))
    ends, last = [], max(line["x"].max() for line in lines.values())
    for (name, (mean, low, high)), style in zip(levels.items(), [":", "-."] * len(levels), strict=False):
        axes.axhline(mean, color=colour(name), lw=1.5, ls=style)
        axes.axhspan(low, high, color=colour(name), alpha=0.12, lw=0)
        ends.append((last, mean, name, colour(name)))
    for (name, line), tint, marker in zip(lines.items(), PALETTE * len(lines), "osD^" * len(lines), strict=False):
        axes.plot(line["x"], line["middle"], color=tint, marker=marker if len(line) <= 12 else "", mec="white", ms=7)
        axes.vlines(line["x"], line["low"], line["high"], color=tint, lw=1.5, alpha=0.7)
        seen = line[np.isfinite(line["middle"].astype(float))]
        if len(seen):
            ends.append((seen["x"].iloc[-1], seen["middle"].iloc[-1], name, tint))
    if doubling:
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.set(title=title, xlabel=xlabel, ylabel=ylabel)
    label_ends(axes, ends)
    return figure


@mpl.rc_context(STYLE)
def at_each_size(lines: Mapping[str, pd.DataFrame], updates: pd.Series, title: str, ylabel: str) -> Figure:
    """Means with intervals against T, a line a name, with the updates that each T had on an axis above.

    Lines are frames of x, middle, low and high, whose x is T; `updates` are by T.
    """
    figure, axes = new_figure(height=height_for(len(lines)) + 0.4)
    axes.set_xscale("log", base=2)
    sizes, ends = sorted(updates.index), []
    for (name, line), tint, marker in zip(lines.items(), PALETTE, "osD^", strict=False):
        axes.plot(line["x"], line["middle"], color=tint, marker=marker, mec="white", ms=8)
        axes.vlines(line["x"], line["low"], line["high"], color=tint, lw=1.5, alpha=0.7)
        ends.append((line["x"].iloc[-1], line["middle"].iloc[-1], name, tint))
    above = axes.secondary_xaxis("top")
    for side, texts in ((axes, [f"{size:,}" for size in sizes]), (above, [f"{updates[size]:,.0f}" for size in sizes])):
        side.set_xticks(sizes, texts)
        side.xaxis.set_minor_locator(mpl.ticker.NullLocator())
    axes.set(title=title, xlabel="tokens per step", ylabel=ylabel)
    above.set_xlabel("updates in the time")
    label_ends(axes, ends)
    return figure


@mpl.rc_context(STYLE)
def capacities(tries: pd.DataFrame, chosen: int) -> Figure:
    """Speed and memory against the tokens of a micro-batch; a cross where it did not fit, a line at the chosen one.

    `tries` are of `capacity.search`.
    """
    figure, (above, below) = new_figure(2, 6, "Speed and memory of a micro-batch", sharex=True)
    fits, fails = tries[tries["fits"]], tries[~tries["fits"]]
    above.plot(fits["capacity"], fits["tokens_per_second"], color=PALETTE[0], marker="o")
    below.plot(fits["capacity"], fits["peak_memory"] / 1e6, color=PALETTE[1], marker="s")
    for axes in (above, below):
        axes.set_xscale("log", base=2)
        axes.set_ylim(0, 1.1 * axes.get_ylim()[1])
        axes.axvline(chosen, color=GREY, lw=1, ls=":")
        if len(fails):
            axes.plot(fails["capacity"], [0.05] * len(fails), "x", color="black", ms=9, mew=2,
                      transform=axes.get_xaxis_transform())
    sizes = sorted(2 ** round(log2(size)) for size in tries["capacity"] if log2(size) == round(log2(size)))
    below.set_xticks(sizes, [f"{size:,}" for size in sizes], rotation=45 if len(sizes) > 8 else 0)
    below.xaxis.set_minor_locator(mpl.ticker.NullLocator())
    above.set_ylabel("tokens/s")
    below.set(ylabel="peak memory, MB",
              xlabel=f"tokens in a micro-batch (dotted: {chosen:,}, proposed; cross: too large)")
    return figure


@mpl.rc_context(STYLE)
def catch_up(runs: pd.DataFrame, updates: pd.DataFrame, constant: str, title: str) -> Figure:
    """Training loss against updates after the switch, a panel an arm, with the constant large arm from there on.

    `runs` are late switches and the arm called `constant`; lines are means over the seeds.
    """
    arms = sorted(set(runs["arm"]) - {constant}, key=order)
    figure, panels = new_figure(len(arms), 1 + 1.7 * len(arms), title, sharex=True)
    updates = updates.merge(runs[["run", "arm"]], on="run")
    for axes, arm in zip(np.atleast_1d(panels), arms, strict=True):
        tail = updates[(updates["arm"] == arm) & (updates["stage"] == 1)]
        begin = (tail["tokens"] - tail["tokens_per_step"]).min()
        size = tail["tokens_per_step"].iloc[0]
        whole = updates[(updates["arm"] == constant) & (updates["tokens"] > begin)]
        for name, rows in ((constant, whole), (arm, tail)):
            place = np.ceil((rows["tokens"] - begin) / size).astype(int)
            mean = rows["loss"].groupby(place).mean()
            axes.plot(mean.index, mean, color=colour(name), ls=line_style(name), label=name)
        axes.set_ylabel("loss, nat")
        axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1), fontsize=9)
    np.atleast_1d(panels)[-1].set_xlabel("updates after the switch")
    return figure


@mpl.rc_context(STYLE)
def fronts(summary: pd.DataFrame, title: str) -> Figure:
    """Loss against tokens, updates and time of each arm, with the front of those that no other beats on both.

    `summary` has a row an arm and budget: budget_kind, arm, validation_loss, tokens, steps and elapsed_seconds. Runs
    with a time budget are hollow.
    """
    costs = {"tokens": ("tokens, millions", 1e6), "steps": ("updates", 1), "elapsed_seconds": ("time, seconds", 1)}
    figure = Figure(figsize=(8, 4 + 0.17 * len(summary)), dpi=110, layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontsize=13)
    panels = figure.subplots(1, 3, sharey=True)
    markers = {arm: "osD^v"[place % 5] for place, arm in enumerate(sorted(set(summary["arm"]), key=order))}
    summary = summary.sort_values("arm", key=lambda arms: arms.map(order)).reset_index(drop=True)
    for axes, (cost, (words, unit)) in zip(panels, costs.items(), strict=True):
        x, y = summary[cost].to_numpy(float) / unit, summary["validation_loss"].to_numpy(float)
        best = stats.front(x, y)
        axes.plot(x[best], y[best], color=GREY, lw=1, drawstyle="steps-post", zorder=1)
        for place, row in enumerate(summary.itertuples()):
            hollow = row.budget_kind == "seconds"
            axes.plot(x[place], y[place], markers[row.arm], color=colour(row.arm), ms=8, mew=1.5, zorder=2,
                      mfc="white" if hollow else None, label=row.arm + (", fixed time" if hollow else ""))
        axes.set_xlabel(words)
        if cost != "tokens":
            axes.set_xscale("log")
    panels[0].set_ylabel("validation loss, nat")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower left", fontsize=9, ncols=2)
    return figure


@mpl.rc_context(STYLE)
def overlay(curves: pd.DataFrame, reference: str, title: str, xlabel: str, excluded: float = 0.0) -> Figure:
    """Loss of each arm, and below it less that of the `reference` arm at the same place.

    `curves` has a row a place and arm: x, arm, loss. What lies before `excluded` counts in no comparison: hatched, and
    with no say in the range. A line is broken where it lacks more than a few places.
    """
    wide = curves.pivot(index="x", columns="arm", values="loss")
    step = np.median(np.diff(wide.index))
    figure, (above, below) = new_figure(2, 7.5, title, sharex=True)
    for axes, table in ((above, wide), (below, wide.sub(wide[reference], axis="index"))):
        counted, ends = table[table.index >= excluded], []
        for arm in sorted(table, key=order):
            line = table[arm].dropna()
            holes = [(a + b) / 2 for a, b in pairwise(line.index) if b - a > 6 * step]  # too wide to be drawn across
            drawn = pd.concat([line, pd.Series(np.nan, holes)]).sort_index()
            axes.plot(drawn.index, drawn, color=colour(arm), ls=line_style(arm), label=arm)
            if len(line):
                ends.append((line.index[-1], line.iloc[-1], arm, colour(arm)))
        low, high = counted.min().min(), counted.max().max()
        if low < high:
            axes.set_ylim(low - 0.08 * (high - low), high + 0.08 * (high - low))
        if excluded > wide.index.min():
            axes.axvspan(wide.index.min(), excluded, facecolor="none", edgecolor=GREY, hatch="///", lw=0, alpha=0.4)
        label_ends(axes, ends)
    above.set_ylabel("loss, nat")
    below.set(ylabel=f"less that of {reference}, nat", xlabel=xlabel)
    return figure


@mpl.rc_context(STYLE)
def of_law(law: Law, schedules: Mapping[str, Sequence[tuple[float, float]]], title: str) -> Figure:
    """T, and the loss that the law has for it, against tokens, for schedules as stages (tokens per step, tokens).

    Margins are fixed: to have them computed takes as long again as all else.
    """
    figure = Figure(figsize=(8, 5), dpi=100)
    figure.subplots_adjust(0.1, 0.11, 0.8, 0.92, hspace=0.12)
    above, below = figure.subplots(2, 1, sharex=True)
    ends, losses = [], []
    for name, stages in schedules.items():
        sizes, tokens = np.transpose(stages)
        tint, style = (colour(name), "-") if name.startswith("constant") else (PALETTE[0], (0, (6, 1.2)))
        bounds, places = np.append(0, np.cumsum(tokens)), np.linspace(0, tokens.sum(), 200)[1:]
        loss = along(law, stages, places)
        above.plot(bounds / 1e6, np.append(sizes, sizes[-1]), color=tint, ls=style, drawstyle="steps-post",
                   label=name, zorder=3 if style != "-" else 2)
        below.plot(places / 1e6, loss, color=tint, ls=style, label=name, zorder=3 if style != "-" else 2)
        ends.append((places[-1] / 1e6, loss[-1], name, tint))
        losses.append(loss[len(loss) // 10:])
    above.set_yscale("log", base=2)
    above.yaxis.set_major_locator(mpl.ticker.LogLocator(2, numticks=6))
    above.yaxis.set_major_formatter("{x:,.0f}")
    above.set(title=title, ylabel="tokens per step")
    low, high = np.min(losses), np.max(losses)
    below.set(xlabel="tokens, millions", ylabel="loss by the law, nat", xlim=(0, None),
              ylim=(low - 0.06 * (high - low), high + 0.06 * (high - low)))
    label_ends(below, ends)
    return figure


@mpl.rc_context(STYLE)
def savings(times: pd.DataFrame, title: str) -> Figure:
    """Share of the time that each shape of T saves against devices: over its start, and over the best constant T.

    `times` are of `fleet.compare_times`; a row of panels a number of parameters.
    """
    words = {"from_start": "over the constant T it starts from,\nif tokens are equal",
             "at_best": "over the best constant T,\nif T costs tokens"}
    sizes = sorted(set(times["parameters"]))
    figure = Figure(figsize=(8, 1.6 + 1.7 * len(sizes)), dpi=110, layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontsize=13)
    panels = figure.subplots(len(sizes), 2, sharex=True, sharey="row", squeeze=False)
    for row, parameters in zip(panels, sizes, strict=True):
        of_size = times[times["parameters"] == parameters]
        for axes, (column, heading) in zip(row, words.items(), strict=True):
            for arm, line in of_size.groupby("arm", sort=False):
                axes.plot(line["devices"], line[column], color=colour(arm), label=arm,
                          ls=(0, (2, 1)) if "root" in arm else "-")
            axes.axhline(0, color=GREY, lw=1)
            axes.set_xscale("log", base=2)
            axes.yaxis.set_major_formatter(mpl.ticker.PercentFormatter(1, decimals=0))
            if row is panels[0]:
                axes.set_title(heading, fontsize=10)
        row[0].set_ylabel(f"{parameters / 1e6:,.3g}M" if parameters < 1e9 else f"{parameters / 1e9:.3g}B")
    for axes in panels[-1]:
        axes.set_xlabel("devices")
        axes.xaxis.set_major_formatter("{x:,.0f}")
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside lower left", fontsize=9, ncols=2)
    return figure


@mpl.rc_context(STYLE)
def speeds(rows: pd.DataFrame, title: str) -> Figure:
    """The own loop's tokens/s over each other loop's: a row a case, the median with its lowest and highest round.

    `rows` are of `race.race`, with shape, precision and compile.
    """
    cases = [*rows.groupby(["shape", "precision", "compile"], sort=False)]
    others = [loop for loop in rows["loop"].unique() if loop != "own"]
    figure, axes = new_figure(height=1.5 + 0.45 * len(cases))
    for place, (_, group) in enumerate(cases):
        turns = group.pivot(index="round", columns="loop", values="tokens_per_second")
        for number, (loop, tint) in enumerate(zip(others, PALETTE, strict=False)):
            if loop in turns:
                ratios, at = turns["own"] / turns[loop], place + 0.2 * number
                axes.hlines(at, ratios.min(), ratios.max(), color=tint)
                axes.plot(ratios.median(), at, "os^D"[number], color=tint, ms=7, label=f"the {loop} loop")
    axes.axvline(1, color=GREY, lw=1)
    axes.set_yticks(range(len(cases)), [f"{shape}, {precision}" + ("" if mode == "off" else ", compiled")
                                        for (shape, precision, mode), _ in cases])
    axes.invert_yaxis()
    axes.set(title=title, xlabel="tokens/s of the own loop over those of another")
    named = dict(zip(*axes.get_legend_handles_labels()[::-1], strict=True))
    figure.legend(named.values(), named, loc="outside lower left", fontsize=9, ncols=4)
    return figure


@mpl.rc_context(STYLE)
def roofline(account: pd.DataFrame, title: str) -> Figure:
    """Time of each kind of operation, and within it the least that this machine's limits allow.

    `account` is of `roofline.account`.
    """
    figure, axes = new_figure(height=1.5 + 0.42 * len(account))
    places = range(len(account))
    axes.barh(places, 1e3 * account["seconds"], color="#c8d8e8", label="taken")
    axes.barh(places, 1e3 * account["limit"], height=0.4, color=PALETTE[0], label="least, at the machine's limits")
    for place, (share, bound) in enumerate(zip(account["limit"] / account["seconds"], account["seconds"], strict=True)):
        axes.text(1e3 * bound, place, f"  {share:.0%} of the limit", va="center", fontsize=9)
    axes.set_yticks(places, account.index)
    axes.margins(x=0.25)
    axes.invert_yaxis()
    axes.set(title=title, xlabel="milliseconds of one update")
    figure.legend(loc="outside lower left", fontsize=9, ncols=2)
    return figure
