"""Schedules of tokens per step and learning-rate curves: pure functions of progress.

Progress runs from 0 to 1 over the horizon of a run: its token budget, or its time budget in seconds. Nothing here
counts updates, so a change of tokens per step never moves the learning rate.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import cos, floor, pi

from lib.check import require


@dataclass(frozen=True)
class Stage:
    """A stretch of a run with one tokens per step.

    `start` is the progress at which it begins; it ends where the next begins. `ratio` is what the scaling rule sees:
    the requested tokens per step over the base. `request` records what was asked for, for the run's metadata.
    """

    start: float
    tokens_per_step: int
    ratio: float = 1.0
    request: tuple[tuple[str, float | None], ...] = ()


def nearest_multiple(value: float, unit: int) -> int:
    """The positive multiple of `unit` nearest to `value`; ties go upward."""
    return max(1, floor(value / unit + 0.5)) * unit


# An arm is a function from a run's configuration to its stages.


def constant(config) -> list[Stage]:
    """One stage at the base tokens per step."""
    return [Stage(0.0, config.tokens_per_step)]


def dividers(config) -> list[Stage]:
    """Stages of T / divider, rounded to the micro-batch; the last one takes what the relative lengths leave over."""
    wanted, lengths = config.batch_dividers, config.stage_length
    require(len(wanted) > 0 and all(1e-6 <= d <= 1e6 for d in wanted), "batch_dividers", list(wanted),
            "must be numbers between a millionth and a million, such as [12, 4, 1]")
    require(len(lengths) == len(wanted) - 1, "stage_length", list(lengths),
            f"must give {len(wanted) - 1} lengths for {len(wanted)} batch_dividers; the last stage takes the rest")
    require(all(length > 0 for length in lengths) and sum(lengths) < 1, "stage_length", list(lengths),
            "must be positive fractions of the budget that leave a rest below 1")
    starts = accumulate(lengths, initial=0.0)
    return [
        Stage(
            start,
            nearest_multiple(config.tokens_per_step / divider, config.device_token_capacity),
            1 / divider,
            (("divider", divider), ("relative_length", length)),
        )
        for start, divider, length in zip(starts, wanted, [*lengths, None], strict=True)
    ]


def late_switch(config) -> list[Stage]:
    """Two stages: the small tokens per step, and from the progress `switch_at` on the large."""
    small, large, capacity = config.small_tokens_per_step, config.tokens_per_step, config.device_token_capacity
    require(small > 0 and small % capacity == 0, "small_tokens_per_step", small,
            f"must be a positive multiple of device_token_capacity {capacity:,}")
    require(0 < config.switch_at < 1, "switch_at", config.switch_at, "must lie between 0 and 1")
    return [Stage(0.0, small, small / large), Stage(config.switch_at, large)]


SCHEDULES = {arm.__name__: arm for arm in (constant, dividers, late_switch)}


def stage_at(stages: Sequence[Stage], progress: float) -> int:
    """Index of the stage that holds `progress`: the last that starts at or before it."""
    return max(i for i, stage in enumerate(stages) if i == 0 or stage.start <= progress)


LR_SCHEDULES = ("cosine", "linear", "constant")


def learning_rate(progress: float, lr: float, min_lr: float, warmup_fraction: float, curve: str) -> float:
    """Base learning rate: linear warm-up from 0 to `lr`, then `curve` down to `min_lr` at 1, then constant.

    Progress is clamped to [0, 1]. "constant" stays at `lr`. The run multiplies this by the stage's multiplier.
    """
    progress = min(max(progress, 0.0), 1.0)
    if progress < warmup_fraction:
        return lr * progress / warmup_fraction
    if curve == "constant" or warmup_fraction == 1:
        return lr
    fall = (progress - warmup_fraction) / (1 - warmup_fraction)
    if curve == "cosine":
        fall = (1 - cos(pi * fall)) / 2
    return lr * (1 - fall) + min_lr * fall  # exact at both ends
