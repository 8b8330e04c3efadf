"""A run while it is trained, by whatever process: what its directory shows."""

import json
import os
from dataclasses import dataclass

import matplotlib as mpl
import numpy as np
import pandas as pd
from IPython import get_ipython
from IPython.display import display
from matplotlib.figure import Figure

from lib import stats
from lib.check import BadInput
from lib.config import RunConfig, under_root
from lib.design import duration
from lib.interrupt import held
from lib.noise import noise_scale
from lib.plots import GREY, STYLE, colour
from lib.png import bundle
from lib.runs import Run
from lib.train import resolve, train

WINDOW = 0.05  # of the updates so far: what speed, time left and noise scale are of
FEWEST = 20  # updates in that window
TRAINING = "training"  # the status of a run that a process holds


def runs_begun(folder: str) -> list[Run]:
    """The runs of a folder, ended or not, those that were logged to last first."""
    changed = {}
    for path in under_root(folder).glob("*/config.json"):
        log = path.with_name("metrics.jsonl")
        changed[path.parent] = (log if log.exists() else path).stat().st_mtime_ns
    return [Run(path) for path in sorted(changed, key=changed.get, reverse=True)]


def status_of(run: Run) -> str:
    """`training` while a process holds the run's directory, else the outcome it came to, if any."""
    if held(run.path):
        return TRAINING
    return (run.meta or {}).get("status", "killed").replace("_", " ")


class Log:
    """The updates of a run, read again and again: each time only what was added since."""

    def __init__(self, run: Run):
        self.run, self._updates, self._file, self._read = run, pd.DataFrame(), None, 0

    def read(self) -> pd.DataFrame:
        """A row an update; a line that is half written is for the next time."""
        try:
            with open(self.run.path / "metrics.jsonl", "rb") as file:
                if os.fstat(file.fileno()).st_ino != self._file:  # a run that goes on begins a file anew
                    self._updates, self._file, self._read = pd.DataFrame(), os.fstat(file.fileno()).st_ino, 0
                file.seek(self._read)
                added = file.read()
        except FileNotFoundError:  # before the first update
            return pd.DataFrame()
        whole = added[: added.rfind(b"\n") + 1]
        if whole:
            self._read += len(whole)
            new = pd.DataFrame(json.loads(line) for line in whole.splitlines())
            self._updates = pd.concat([self._updates, new], ignore_index=True) if len(self._updates) else new
        return self._updates


@dataclass(frozen=True)
class View:
    """What is to be seen of a run: its status, configuration, updates, and numbers over the last of them."""

    name: str
    status: str
    config: RunConfig
    updates: pd.DataFrame
    done: float = 0.0  # share of the budget
    tokens_per_second: float | None = None
    seconds_left: float | None = None
    noise_scale: float | None = None  # tokens

    @property
    def line(self) -> str:
        """All of it in one line."""
        words = [self.status, f"{self.done:.0%}"]
        if len(self.updates):
            last = self.updates.iloc[-1]
            noise = f"{self.noise_scale:,.0f} tokens" if self.noise_scale else "–"
            words += [f"update {last['step']:,.0f}", f"{last['tokens']:,.0f} tokens", f"loss {last['loss']:.3f}",
                      f"T {last['tokens_per_step']:,.0f}", f"lr {last['lr']:.3g}", f"noise scale {noise}",
                      f"{self.tokens_per_second:,.0f} tokens/s"]
        if self.status == TRAINING and self.seconds_left is not None:
            words.append(f"{duration(self.seconds_left)} left")
        return " · ".join(words)


def look(log: Log) -> View:
    """What there is to be seen of the run now. Raises BadInput where its directory is not whole."""
    run, status, updates = log.run, status_of(log.run), log.read()
    config = run.config
    if updates.empty:
        return View(run.name, status, config, updates)
    last = updates.iloc[-max(int(WINDOW * len(updates)), FEWEST):]
    seconds = (last["tokens_per_step"] / last["tokens_per_second"]).sum()
    place = updates["tokens" if config.token_budget else "elapsed"]
    before = place.iloc[-len(last) - 1] if len(place) > len(last) else 0.0
    done, gained = place.iloc[-1] / config.budget, (place.iloc[-1] - before) / config.budget
    left = seconds * max(1 - done, 0) / gained if gained > 0 else None
    return View(run.name, status, config, updates, min(done, 1.0), last["tokens_per_step"].sum() / seconds, left,
                noise_scale(last["noise_g2"], last["noise_s"]))


@mpl.rc_context(STYLE)
def draw(view: View) -> Figure:
    """Loss, T with the noise scale, learning rate and tokens/s of a run, against its tokens, up to its last update."""
    figure = Figure(figsize=(9, 5), dpi=100)
    figure.subplots_adjust(0.08, 0.11, 0.98, 0.87, 0.22, 0.35)
    figure.suptitle(f"{view.config.arm} · lr {view.config.lr:g} · seed {view.config.seed}: {view.status}", x=0.01,
                    ha="left", fontsize=12)
    panels = figure.subplots(2, 2, sharex=True).ravel()
    for axes, words in zip(panels, ("training loss, nat", "tokens per step", "learning rate", "tokens/s"), strict=True):
        axes.set_title(words, fontsize=11)
    for axes in panels[2:]:
        axes.set_xlabel("tokens, millions")
    if view.updates.empty:
        panels[0].text(0.5, 0.5, "no update yet", ha="center", transform=panels[0].transAxes, color=GREY)
        return figure
    tint, thin = colour(view.config.arm), view.updates.iloc[:: 1 + len(view.updates) // 1000]
    x, longest = thin["tokens"] / 1e6, view.updates["tokens"].iloc[-1]
    width = max(longest / 30, view.updates["tokens_per_step"].max())
    bins = stats.bins(view.updates.assign(run=view.name), width)
    middle = ((bins["start_tokens"] + bins["end_tokens"]) / 2).clip(upper=longest) / 1e6
    panels[0].plot(x, thin["loss"], color=tint, lw=0.5, alpha=0.4)
    panels[0].plot(middle, bins["loss"], color=tint, marker="o" if len(bins) == 1 else "")
    panels[1].plot(x, thin["tokens_per_step"], color=tint, drawstyle="steps-pre", label="T")
    scale = noise_scales(view.updates)
    if scale.notna().any():
        panels[1].plot(view.updates["tokens"][scale.index] / 1e6, scale, color=GREY, lw=1, ls=":", label="noise scale")
        panels[1].legend(fontsize=9, loc="best")
    panels[1].set_yscale("log", base=2)
    panels[1].yaxis.set_major_formatter("{x:,.0f}")
    panels[2].plot(x, thin["lr"], color=tint, drawstyle="steps-pre")
    panels[3].plot(x, thin["tokens_per_second"], color=tint, lw=0.8, drawstyle="steps-pre")
    panels[3].set_ylim(bottom=0)
    panels[3].yaxis.set_major_formatter("{x:,.0f}")
    return figure


def noise_scales(updates: pd.DataFrame) -> pd.Series:
    """B_simple in tokens over a moving window of updates; NaN where it is not defined."""
    window = max(int(WINDOW * len(updates)), FEWEST)
    means = updates[["noise_g2", "noise_s"]].astype(float).rolling(window, min_periods=FEWEST // 2).mean()
    means = means.iloc[:: 1 + len(updates) // 500]
    return (means["noise_s"] / means["noise_g2"]).where((means > 0).all(axis=1), np.nan)


def watch(config: RunConfig) -> Run:
    """Train a run in a notebook, with its figure, drawn as often as the run reports, each in place of the one before.

    The figure's text says how far the run is. Elsewhere than in a notebook the run's own lines are printed.
    """
    if get_ipython() is None:
        return train(config)
    log, handle = Log(resolve(config).run), display({"text/plain": ""}, raw=True, display_id=True)

    def progress(line: str) -> None:
        try:
            view = look(log)
        except (BadInput, OSError):  # the directory comes after the first words
            handle.update({"text/plain": line}, raw=True)
            return
        data, metadata = bundle(draw(view), f"Loss, tokens per step, learning rate and speed of a run: {view.line}")
        handle.update(data, metadata=metadata, raw=True)

    try:
        return train(config, progress)
    finally:
        progress("")
