"""Schedules of tokens per step and learning-rate curves: pure functions of progress.

Progress runs from 0 to 1 over the horizon of a run: its token budget, or its time budget in seconds. Nothing here
counts updates, so a change of tokens per step never moves the learning rate.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, count, pairwise
from math import acos, cos, floor, pi, sqrt

from lib.check import require


@dataclass(frozen=True)
class Stage:
    """A stretch of a run with one tokens per step.

    `start` is the progress at which it begins; it ends where the next begins. `ratio` is what the scaling rule sees:
    tokens per step over the base. `level` holds the learning-rate curve at this share of its peak, after the warm-up;
    None follows it. `request` records what was asked for, for the run's metadata.
    """

    start: float
    tokens_per_step: int
    ratio: float = 1.0
    level: float | None = None
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
            request=(("divider", divider), ("relative_length", length)),
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


def seesaw(config) -> list[Stage]:
    """The falling curve as steps: where it has fallen by a further `alpha`, T grows by it (arXiv 2510.14717).

    Under the square-root rule the learning rate then falls by √alpha instead of alpha, as far as T is in whole
    micro-batches; from `max_tokens_per_step` on T stays, and the learning rate falls by alpha again.
    """
    base, alpha, largest = config.tokens_per_step, config.alpha, config.max_tokens_per_step
    require(1.01 <= alpha <= 100, "alpha", alpha, "must lie between 1.01 and 100: the curve's fall from cut to cut")
    check_cap(config)
    require(config.lr_schedule != "constant", "lr_schedule", config.lr_schedule, "must fall, for seesaw to cut it")
    cut = alpha / config.hyperparameters(Stage(0.0, base, alpha)).lr_multiplier
    require(cut >= sqrt(alpha) * (1 - 1e-9), "scaling_rule", config.scaling_rule,
            f"cuts the learning rate by {cut:g} where T grows by {alpha:g}; it is stable from {sqrt(alpha):g}, the "
            "square root, on")
    stages = []
    for level in (alpha**-i for i in count()):
        start = fallen(level, config.lr, config.min_lr, config.warmup_fraction, config.lr_schedule)
        if start is None or level < FAINTEST:
            return stages
        size = min(nearest_multiple(base / level, config.device_token_capacity), largest)
        request = (("level", level), ("requested_tokens_per_step", base / level))
        stages.append(Stage(start if stages else 0.0, size, size / base, level, request))


def adaptive(config) -> list[Stage]:
    """The stage it begins with: the run doubles T on its way, where the measured noise scale has passed twice T."""
    check_cap(config)
    require(config.noise_every > 0 or config.tokens_per_step > config.device_token_capacity, "noise_every",
            config.noise_every, "must be set where T is a single micro-batch, to measure the noise scale that decides")
    return [Stage(0.0, config.tokens_per_step)]


def by_hand(config) -> list[Stage]:
    """Stages as given: where each starts, in the budget's unit, and its tokens per step."""
    given, capacity = config.stages, config.device_token_capacity
    shown = [[f"{number:g}" for number in stage] for stage in given]
    require(len(given) > 0 and all(len(stage) == 2 for stage in given), "stages", shown,
            "must be pairs of a start and a tokens per step, such as [[0, 8192], [1_000_000, 24576]]")
    starts, sizes = zip(*given, strict=True)
    require(starts[0] == 0 and all(a < b for a, b in pairwise([*starts, config.budget])), "stages", shown,
            f"must start at 0, then each later than the one before and before the budget's end, {config.budget:,}")
    for size in sizes:
        require(size > 0 and size % capacity == 0, "stages", shown,
                f"must have tokens per step that are positive multiples of device_token_capacity {capacity:,}")
    return [Stage(start / config.budget, int(size), size / config.tokens_per_step) for start, size in given]


def check_cap(config) -> None:
    """Raise BadInput where max_tokens_per_step is no T that the schedule can grow to."""
    base, capacity = config.tokens_per_step, config.device_token_capacity
    require(config.max_tokens_per_step >= base and config.max_tokens_per_step % capacity == 0, "max_tokens_per_step",
            config.max_tokens_per_step, f"must be a multiple of device_token_capacity {capacity:,}, and at least "
            f"tokens_per_step {base:,}: T grows up to it")


SCHEDULES = {"constant": constant, "dividers": dividers, "seesaw": seesaw, "late_switch": late_switch,
             "adaptive": adaptive, "stages": by_hand}
FAINTEST = 1e-3  # of the peak: a curve that falls to 0 is cut down to here


def stage_at(stages: Sequence[Stage], progress: float) -> int:
    """Index of the stage that holds `progress`: the last that starts at or before it."""
    return max(i for i, stage in enumerate(stages) if i == 0 or stage.start <= progress)


LR_SCHEDULES = ("cosine", "quarter-cosine", "linear", "constant")


def learning_rate(progress: float, lr: float, min_lr: float, warmup_fraction: float, curve: str) -> float:
    """Base learning rate: linear warm-up from 0 to `lr`, then `curve` down to `min_lr` at 1, then constant.

    Progress is clamped to [0, 1]. "cosine" is half a wave, flat at both ends; "quarter-cosine" a quarter, flat at its
    beginning alone; "constant" stays at `lr`. The run multiplies this by the stage's multiplier.
    """
    progress = min(max(progress, 0.0), 1.0)
    if progress < warmup_fraction:
        return lr * progress / warmup_fraction
    if curve == "constant" or warmup_fraction == 1:
        return lr
    fall = (progress - warmup_fraction) / (1 - warmup_fraction)
    if curve == "cosine":
        fall = (1 - cos(pi * fall)) / 2
    if curve == "quarter-cosine":
        fall = 1 - cos(pi / 2 * fall)
    return lr * (1 - fall) + min_lr * fall  # exact at both ends


def fallen(level: float, lr: float, min_lr: float, warmup_fraction: float, curve: str) -> float | None:
    """Progress at which that curve has fallen to `level` · lr after the warm-up; None where it never does."""
    fall = (1 - level) * lr / (lr - min_lr) if lr > min_lr else 2.0
    if fall > 1 or curve == "constant":
        return None
    share = {"cosine": acos(1 - 2 * fall) / pi, "quarter-cosine": acos(1 - fall) * 2 / pi, "linear": fall}[curve]
    return warmup_fraction + share * (1 - warmup_fraction)
