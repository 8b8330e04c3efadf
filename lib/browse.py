"""The run browser: runs chosen from lists, and their curves on any axis, or less those of a baseline."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lib import stats
from lib.check import require
from lib.config import under_root
from lib.plots import MARKERS, STYLE, colour, height_for, label_ends, line_style, new_figure, order
from lib.runs import Run, frame, runs_in, updates
from lib.sweep import sweeps

LISTS = {"sweep": "sweep", "arm": "arm", "lr": "peak learning rate", "lr_schedule": "learning-rate curve",
         "limit": "budget", "seed": "seed"}  # what runs are chosen by, in words
AXES = {"tokens": "tokens", "step": "updates", "elapsed": "time"}
ALONE = "in no sweep"
MOST = 2000  # points of a raw line


def scales(folder: str) -> list[str]:
    """This folder of runs, and those beside it that hold runs which have ended: one a scale."""
    beside = {path.parent.parent for path in under_root(folder).parent.glob("*/*/run_meta.json")}
    return [folder, *sorted(str(Path(folder).with_name(path.name)) for path in beside - {under_root(folder)})]


def catalogue(folder: str) -> pd.DataFrame:
    """A row a run that has ended or was stopped, with its budget in words, `limit`, and the titles of its sweeps."""
    runs, titles = frame(runs_in(folder)), {title: {*names} for title, names in sweeps(folder).items()}
    runs["sweep"] = [tuple(title for title in titles if run in titles[title]) or (ALONE,) for run in runs["run"]]
    runs["limit"] = [f"{budget:,.10g} {kind}"
                     for budget, kind in zip(runs["budget"], runs["budget_kind"], strict=True)]
    return runs


def options(runs: pd.DataFrame, column: str) -> list:
    """What there is to choose from in a list, in order."""
    values = {*runs[column].explode()}
    return sorted(values, key=order if column == "arm" else None)


def choose(runs: pd.DataFrame, chosen: Mapping[str, Iterable]) -> pd.DataFrame:
    """The runs that have a chosen value in every list; those of a sweep also where they belong to others."""
    for column, values in chosen.items():
        wanted = {*values}
        runs = runs[[bool(wanted & {*(value if column == "sweep" else [value])}) for value in runs[column]]]
    return runs.assign(label=labels(runs))


def labels(runs: pd.DataFrame) -> pd.Series:
    """Each run's arm, with what else tells runs of the arm apart, but for their seeds."""
    words = {"lr": "lr {:.4g}", "lr_schedule": "{}", "limit": "{}", "branch_at": "from {:,} tokens",
             "setting": "setting {:.4}"}
    texts = runs["arm"].astype(str)
    for column, form in words.items():
        within = texts if column == "setting" else runs["arm"]  # a hash only where words do not tell all apart
        several = runs[column].groupby(within).transform("nunique") > 1
        texts = texts.where(~several, texts + ", " + runs[column].map(form.format).astype(str))
    return texts


def logs_of(runs: pd.DataFrame, folder: str) -> pd.DataFrame:
    """A row an update of these runs; what was read before is not read again."""
    paths = [under_root(folder) / run for run in runs["run"]]
    changed = [(path / "metrics.jsonl").stat().st_mtime_ns for path in paths]
    logs = [read(*place) for place in zip(paths, changed, strict=True)]
    return pd.concat(logs, ignore_index=True) if logs else pd.DataFrame()


@lru_cache(maxsize=1024)
def read(path: Path, changed: int) -> pd.DataFrame:
    """The updates of one run, as of when its log was `changed` (ns)."""
    return updates([Run(path)])


class Line(NamedTuple):
    """One run on the axis that is asked for."""

    seed: int
    raw: pd.DataFrame  # every update: x, loss
    smooth: pd.DataFrame  # the same by bin of tokens

    def less(self, other: "Line | None") -> "Line":
        """This line less the smooth one of another, as far as that goes; None is nothing to take off."""
        if other is None:
            return self
        below = [np.interp(part["x"], other.smooth["x"], other.smooth["loss"], np.nan, np.nan)
                 for part in (self.raw, self.smooth)]
        return Line(self.seed, *(part.assign(loss=part["loss"] - level)
                                 for part, level in zip((self.raw, self.smooth), below, strict=True)))


def lines_of(runs: pd.DataFrame, logs: pd.DataFrame, x: str, unit: float, smoothing: float) -> dict[str, Line]:
    """Each run's line, in bins of tokens: `smoothing` × the longest run, at least an update of the largest T."""
    bins = stats.bins(logs, max(smoothing * logs["tokens"].max(), logs["tokens_per_step"].max()))
    seeds, lines = runs.set_index("run")["seed"], {}
    for run, part in bins.groupby("run"):
        log = logs[logs["run"] == run]
        middle = ((part["start_tokens"] + part["end_tokens"]) / 2).clip(upper=log["tokens"].max())
        place = np.interp(middle, np.append(0, log["tokens"]), np.append(0, log[x].astype(float))) / unit
        smooth = pd.DataFrame({"x": place, "loss": part["loss"].to_numpy()}, index=part["start_tokens"])
        raw = log.iloc[:: 1 + len(log) // MOST]
        lines[run] = Line(seeds[run], pd.DataFrame({"x": raw[x] / unit, "loss": raw["loss"]}), smooth)
    return lines


@mpl.rc_context(STYLE)
def compare_curves(runs: pd.DataFrame, logs: pd.DataFrame, x: str = "tokens", log_x: bool = False, log_y: bool = False,
                   smoothing: float = 0.02, baseline: str = "") -> Figure:
    """Training loss of the chosen runs against `tokens`, updates (`step`) or time (`elapsed`), a line a label.

    The line is the smoothed mean over seeds as far as all go, the band their range, and faint behind is every update.
    With a `baseline`, one of the labels, each run is drawn less the baseline's of the same seed at the same place.
    Raises BadInput.
    """
    require(x in AXES, "x", x, f"must be one of {', '.join(AXES)}")
    require(len(logs) > 0, "runs", len(runs), "must have logged an update: choose more in the lists")
    require(not (log_y and baseline), "log_y", log_y, "must be off for a difference, which has both signs")
    logs = logs[logs["run"].isin(runs["run"])]
    longest = logs["elapsed"].max()
    clock = ("hours", 3600) if longest >= 3600 else ("minutes", 60) if longest >= 180 else ("seconds", 1)
    unit, word = {"tokens": (1e6, "tokens, millions"), "step": (1, "updates")}.get(x, (clock[1], f"time, {clock[0]}"))
    lines, level, title = lines_of(runs, logs, x, unit, smoothing), {}, "Training loss"
    runs = runs[runs["run"].isin(lines)]
    if baseline:
        level = {lines[run].seed: lines[run] for run in runs["run"][runs["label"] == baseline]}
        require(bool(level), "baseline", baseline, "must be one of the chosen arms")
        without = {*runs["label"]} - {*runs["label"][runs["seed"].isin(level)]}
        runs, title = runs[runs["seed"].isin(level)], f"Training loss less that of {baseline}, seed by seed"
        title += "".join(f"\nwithout {label}, which shares no seed" for label in sorted(without))
    figure, axes = new_figure(height=height_for(runs["label"].nunique()))
    several, drawn = runs.groupby("arm")["label"].nunique(), Counter()
    ends, seen = [], []
    for label, members in sorted(runs.groupby("label"), key=lambda group: order(group[0])):
        arm, parts = members["arm"].iloc[0], [lines[run].less(level.get(lines[run].seed)) for run in members["run"]]
        drawn[arm] += 1
        marker = [*MARKERS][(drawn[arm] - 1) % len(MARKERS)] if several[arm] > 1 else ""
        for part in parts:  # many would hide what is before them
            axes.plot(part.raw["x"], part.raw["loss"], color=colour(arm), lw=0.4, alpha=min(0.2, 1 / len(runs)),
                      zorder=1)
        mean = draw_mean(axes, parts, color=colour(arm), ls=line_style(arm), label=label, marker=marker,
                         first=len(ends) % 4)
        lost = stats.unfinished(members)
        if len(mean):
            words = f"{MARKERS.get(marker, '')} {label}".strip() + (f" (of {len(members)}: {lost})" if lost else "")
            ends.append((*mean.iloc[-1], words, colour(arm)))
            seen.append(mean)
    axes.set(title=title, xlabel=word, ylabel="difference, nat" if baseline else "training loss, nat",
             xscale="log" if log_x else "linear", yscale="log" if log_y else "linear")
    limit(axes, seen, log_x)
    label_ends(axes, ends)
    return figure


def draw_mean(axes: Axes, parts: Sequence[Line], marker: str, first: int, color: str, **options: object
              ) -> pd.DataFrame:
    """Draw the mean of smooth lines as far as all go, over the band of their range; returns it. `first` is marked."""
    of_bin = pd.concat([part.smooth for part in parts]).groupby(level=0)
    mean = of_bin.mean()[of_bin["loss"].count() == len(parts)]
    if len(parts) > 1:
        axes.fill_between(mean["x"], of_bin["loss"].min()[mean.index], of_bin["loss"].max()[mean.index], color=color,
                          alpha=0.2, lw=0)
    axes.plot(mean["x"], mean["loss"], color=color, zorder=3, mec="white", markevery=(first, max(len(mean) // 5, 1)),
              marker=marker or ("o" if len(mean) == 1 else ""), **options)
    return mean


def limit(axes: Axes, seen: Sequence[pd.DataFrame], log_x: bool) -> None:
    """Show the losses from a tenth of the run on, of a hundredth on a logarithmic axis: the first fall is steep."""
    if not log_x:
        axes.set_xlim(left=0)
    if seen:
        seen = pd.concat(seen)
        late = seen["loss"][seen["x"] >= (0.01 if log_x else 0.1) * seen["x"].max()]
        low, high = late.min(), late.quantile(0.99)
        pad = 0.06 * (high - low) or 0.1
        axes.set_ylim(low - pad, high + pad)
