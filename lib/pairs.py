"""The square-root experiment: operating points at a large and at a small T, and what each part of the rule does.

Arms and their letters are those of Fast-LLM pull request 539; rules: Malladi et al. (arXiv 2205.10287), Marek et al.
(arXiv 2507.07101).
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import sqrt

import numpy as np
import pandas as pd

from lib.check import require
from lib.config import RunConfig
from lib.rules import Hyperparameters, rescale, scaled_lr
from lib.runs import Run

SMALL = {  # at the small T: the rule of the learning rate, and that of the betas
    "H": ("sqrt-lr", "half-life-both"),
    "I": ("sqrt-lr", "half-life"),
    "G": ("sqrt-lr", "none"),
    "B": ("none", "half-life"),
    "M": ("none", "half-life-both"),
    "D": ("none", "none"),
}
LETTERS = ("A", "H", "I", "G", "B", "M", "D", "J", "K", "L")
EFFECTS = {  # what tells two arms apart
    "the rule, scaling A down": ("H", "A"),
    "the rule, scaling B up": ("J", "B"),
    "β1, at the scaled rate": ("H", "I"),
    "β1, at the same rate": ("M", "B"),
    "β2, at the scaled rate": ("I", "G"),
    "β2, at the same rate": ("B", "D"),
    "the rate alone": ("G", "D"),
    "fp16": ("L", "A"),
}


def arms(large: RunConfig, ratio: int, faster: float, scale_eps: bool = False) -> dict[str, RunConfig]:
    """Each arm by its letter; `large` is A, the small T is its T / `ratio`, and K has `faster` times its rate.

    `scale_eps` has H scale ε as the full rule does. A micro-batch is `large`'s, or the small T where that holds less.
    Raises BadInput where the ratio does not divide T, or K would be J.
    """
    size = large.tokens_per_step
    require(ratio > 1 and size % ratio == 0, "ratio", ratio, f"must be above 1 and divide the large T, {size:,}")
    require(abs(faster - sqrt(ratio)) > 1e-3, "faster", faster, f"must not be √r, {sqrt(ratio):g}: that is arm J")
    base = Hyperparameters(1.0, large.beta1, large.beta2, large.eps, large.weight_decay)
    made = {"A": large, "J": replace(large, lr=scaled_lr("sqrt-lr", large.lr, ratio)),
            "K": replace(large, lr=float(f"{faster * large.lr:.6g}")), "L": replace(large, precision="fp16")}
    for letter, (of_rate, of_betas) in SMALL.items():
        at = rescale(of_betas, 1 / ratio, base)
        eps = large.eps * sqrt(ratio) if scale_eps and letter == "H" else large.eps
        made[letter] = replace(large, tokens_per_step=size // ratio, lr=scaled_lr(of_rate, large.lr, 1 / ratio),
                               beta1=at.beta1, beta2=at.beta2, eps=eps,
                               device_token_capacity=min(large.device_token_capacity, size // ratio))
    return {letter: made[letter] for letter in LETTERS}


def named(letter: str, config: RunConfig) -> str:
    """The arm in figures and tables: its letter and T."""
    return f"{letter} {config.tokens_per_step:,}"


def opening(runs: Iterable[Run], stated: int, budget: int) -> int:
    """The token from which on runs of this budget are compared: the stated one, or where the last stops re-reading.

    Raises BadInput where that leaves nothing to compare.
    """
    begin = max([stated, *(last for run in runs for _, last in (run.meta.get("parent") or {}).get("reread", []))])
    require(begin < budget, "budgets", budget, f"must go on after {begin:,} tokens, from where on arms are compared")
    return begin


def spread(losses: Mapping[str, pd.Series]) -> pd.Series:
    """How far the two operating points lie apart, by seed: mean of B and J less mean of A and H."""
    return (losses["B"] + losses["J"] - losses["A"] - losses["H"]) / 2


def deviation(losses: Iterable[float]) -> float:
    """Standard deviation of successive losses about whatever slow course they take: √(mean squared difference / 2).

    Source: von Neumann 1941, The mean square successive difference.
    """
    return float(np.sqrt(np.mean(np.diff(np.asarray([*losses], float)) ** 2) / 2))
