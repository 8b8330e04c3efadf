"""The critical batch size, measured: by the noise scale on the way, and by branches that take more tokens a step.

Branching: Merrill et al. 2025 (arXiv 2505.23971). The noise scale often lies well below what branches can bear.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from math import isfinite
from statistics import geometric_mean

import pandas as pd

from lib.check import require
from lib.config import RunConfig
from lib.noise import noise_scale
from lib.rules import scaled_lr


def branches(parent: RunConfig, name: str, places: Iterable[int], factors: Iterable[int], window: int
             ) -> list[RunConfig]:
    """From each place (tokens) of the run called `name`: k times its T at √k times its rate, for `window` tokens.

    Its rate has to be constant, so that where a branch ends does not change it. Raises BadInput where it is not, or
    where a window is no whole number of updates of k · T.
    """
    require(parent.lr_schedule == "constant", "lr_schedule", parent.lr_schedule, "must be constant, to branch from it")
    made = []
    for tokens in places:
        for k in factors:
            size = k * parent.tokens_per_step
            require(window % size == 0, "window", window, f"must be a multiple of {size:,}, one update of k = {k}")
            made.append(replace(parent, branch_from=name, branch_at=tokens, tokens_per_step=size, warmup_fraction=0.0,
                                lr=scaled_lr("sqrt-lr", parent.lr, k), token_budget=tokens + window, noise_every=0))
    return made


def critical_factor(losses: Mapping[int, float], tolerance: float) -> int:
    """The largest k whose loss exceeds that of no smaller k by more than `tolerance`; 1 where none does.

    A loss that is not finite is no candidate.
    """
    finite = {k: loss for k, loss in losses.items() if isfinite(loss)}
    return max((k for k in finite if all(finite[k] <= finite[j] + tolerance for j in finite if j < k)), default=1)


def measured(runs: pd.DataFrame, tolerance: float) -> pd.DataFrame:
    """Per seed and place of branches: `tokens`, `critical` (tokens a step), and whether the largest k tried won.

    `runs` are the branches' rows, with `branch_at` and their T as `base_tokens_per_step`.
    """
    rows = []
    for (seed, place), group in runs.groupby(["seed", "branch_at"]):
        losses = dict(zip(group["base_tokens_per_step"], group["validation_loss"], strict=True))
        smallest, largest = min(losses), max(losses)
        found = critical_factor({size // smallest: loss for size, loss in losses.items()}, tolerance) * smallest
        rows.append({"seed": seed, "tokens": place, "critical": found, "at_edge": found == largest})
    return pd.DataFrame(rows)


def noise_curve(updates: pd.DataFrame, width: float) -> pd.DataFrame:
    """B_simple of each run in bins of `width` tokens: run, the bin's middle as `tokens`, and `noise_scale`."""
    rows = []
    for (run, place), group in updates.groupby(["run", (updates["tokens"] - 1) // width]):
        scale = noise_scale(group["noise_g2"].astype(float), group["noise_s"].astype(float))
        rows.append({"run": run, "tokens": (place + 0.5) * width, "noise_scale": scale})
    return pd.DataFrame(rows)


def implied(estimates: Mapping[float, float], smallest: int, largest: int) -> list[list[float]]:
    """The schedule that estimates of the critical batch imply: T doubles wherever one has reached twice T.

    `estimates` has tokens a step by the tokens at which they were measured; the result is what `stages` takes.
    """
    stages: list[list[float]] = [[0, smallest]]
    for place, estimate in sorted(estimates.items()):
        bound = min(max(estimate, smallest), largest) * (1 + 1e-9)  # a mean of equal sizes may be a rounding below them
        size = next(smallest * 2**i for i in count() if smallest * 2 ** (i + 1) > bound)
        if size > stages[-1][1]:
            stages = [*stages, [place, size]] if place else [[0, size]]
    return stages


def typical(values: Sequence[float]) -> float:
    """The geometric mean, of sizes that double."""
    return geometric_mean(values)
