"""What a run will do, update by update, and how far two runs do the same."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil

from lib.clock import Clock, Costs
from lib.config import RunConfig
from lib.rules import Hyperparameters
from lib.schedule import stage_at

WRITTEN = {"runs", "checkpoint_every", "tensorboard"}  # what acts on no update
# What acts on a run through its updates alone, so that runs that differ here may still have a past in common.
PLANNED = WRITTEN | {
    "schedule", "tokens_per_step", "batch_dividers", "stage_length", "small_tokens_per_step", "switch_at", "lr",
    "min_lr", "warmup_fraction", "lr_schedule", "beta1", "beta2", "eps", "weight_decay", "scaling_rule", "wd_rule",
    "token_budget", "time_budget", "alpha", "max_tokens_per_step", "stages"}
WINDOW = 0.05  # of the horizon: what the adaptive arm averages the noise scale over


@dataclass(frozen=True)
class Update:
    """One update: the stage it begins in, the tokens it takes, and what the optimizer takes."""

    stage: int
    tokens: int
    lr: float
    hyperparameters: Hyperparameters


class Plan:
    """The updates of a configuration, as a function of the position at which each begins."""

    def __init__(self, config: RunConfig, grown: Sequence[Sequence[float]] = ()):
        self.config, self.stages = config, config.resolved(grown)
        self.by_tokens = config.token_budget is not None

    def stage(self, position: float) -> int:
        """The stage of an update that begins here: tokens, or seconds of a time budget."""
        return stage_at(self.stages, position / self.config.budget)

    def update(self, position: float, seconds: Callable[[int], float]) -> Update | None:
        """The update that begins here; None where the budget holds no more. `seconds` of micro-batches are expected.

        A token budget is never overshot; a time budget ends with the first update completed at or after the deadline.
        """
        index, budget = self.stage(position), self.config.budget
        stage = self.stages[index]
        size = stage.tokens_per_step
        if position + size > budget if self.by_tokens else position >= budget:
            return None
        # The rate is that of the update's end, for every T alike, so that it ends at min_lr and no update is at 0.
        reached = position + (size if self.by_tokens else seconds(size // self.config.device_token_capacity))
        lr = self.config.learning_rate(reached / budget, stage)
        return Update(index, size, lr, self.config.hyperparameters(stage))

    def grow(self, position: float, noise_scale: Callable[[float], float | None]) -> list[tuple[float, int]]:
        """The adaptive arm: a stage of twice the tokens from here on, where the noise scale has passed twice T.

        `noise_scale` takes a share of the tokens so far, the last ones, and gives B_simple there: that of the last
        WINDOW of the run, once the stage has lasted so long. Returns the start and T of the stage, if there is one.
        Rule: Merrill et al. 2025 (arXiv 2505.23971).
        """
        progress, stage, config = position / self.config.budget, self.stages[-1], self.config
        size = 2 * stage.tokens_per_step
        if config.schedule != "adaptive" or progress < stage.start + WINDOW or size > config.max_tokens_per_step:
            return []
        if (noise_scale(WINDOW / progress) or 0.0) <= size:
            return []
        self.stages.append(*config.resolved([(progress, size)])[1:])
        return [(progress, size)]


def updates(config: RunConfig, costs: Costs | None) -> Iterator[Update]:
    """Every update of the run, unless its stream ends before: nothing for a time budget on the measured clock.

    An adaptive arm is taken as it begins: what it grows to is not known before.
    """
    plan, clock, tokens = Plan(config), Clock(costs), 0
    if not plan.by_tokens and costs is None:
        return
    while update := plan.update(tokens if plan.by_tokens else clock.elapsed, clock.expected):
        yield update
        clock.update(update.tokens // config.device_token_capacity, 0.0)
        if not tokens:
            clock.start()
        tokens += update.tokens


@dataclass(frozen=True)
class Totals:
    """What a run comes to: updates, tokens, and the seconds after its warm-up update, None where costs are unknown."""

    updates: int
    tokens: int
    seconds: float | None


def totals(config: RunConfig, costs: Costs | None) -> Totals | None:
    """The sum of `updates`, in a time that does not grow with their number; None for a time budget without costs."""
    by_tokens, budget, stages = config.token_budget is not None, config.budget, config.resolved()
    if not by_tokens and costs is None:
        return None
    expected = Clock(costs).expected
    first = stages[0].tokens_per_step  # the warm-up update, before the clock starts
    count, tokens, seconds = 1, first, 0.0
    position = first if by_tokens else 0.0
    for stage, end in zip(stages, [*(stage.start for stage in stages[1:]), 1.0], strict=True):
        size = stage.tokens_per_step
        cost = expected(size // config.device_token_capacity)
        step = size if by_tokens else cost
        begun = max(ceil((end * budget - position) / step), 0)  # inside the stage, but for what rounding moves
        begun -= begun > 0 and (position + (begun - 1) * step) / budget >= end
        begun += (position + begun * step) / budget < end
        fits = min(begun, int((budget - position) // size)) if by_tokens else begun
        count, tokens, seconds = count + fits, tokens + fits * size, seconds + fits * cost
        position += fits * step
        if fits < begun:
            break
    return Totals(count, tokens, seconds if costs else None)


def common_past(a: RunConfig, b: RunConfig, costs: Costs | None) -> int:
    """Tokens up to which both runs do the same to the same weights with the same tokens; their seeds are resolved.

    An adaptive arm has a past in common with its like alone.
    """
    planned = PLANNED if "adaptive" not in (a.schedule, b.schedule) else WRITTEN
    ours, theirs = ({k: v for k, v in vars(config).items() if k not in planned} for config in (a, b))
    tokens = 0
    if ours == theirs and not a.branch_from:
        for mine, other in zip(updates(a, costs), updates(b, costs), strict=False):
            if mine != other:
                break
            tokens += mine.tokens
    return tokens
