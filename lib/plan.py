"""What a run will do, update by update, and how far two runs do the same."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from lib.clock import Clock, Costs
from lib.config import RunConfig
from lib.rules import Hyperparameters
from lib.schedule import stage_at

# What acts on a run through its updates alone, so that runs that differ here may still have a past in common.
PLANNED = {"schedule", "tokens_per_step", "batch_dividers", "stage_length", "small_tokens_per_step", "switch_at", "lr",
           "min_lr", "warmup_fraction", "lr_schedule", "beta1", "beta2", "eps", "weight_decay", "scaling_rule",
           "wd_rule", "token_budget", "time_budget", "runs", "checkpoint_every"}


@dataclass(frozen=True)
class Update:
    """One update: the stage it begins in, the tokens it takes, and what the optimizer takes."""

    stage: int
    tokens: int
    lr: float
    hyperparameters: Hyperparameters


class Plan:
    """The updates of a configuration, as a function of the position at which each begins."""

    def __init__(self, config: RunConfig):
        self.config, self.stages = config, config.stages()
        self.hyperparameters = [config.hyperparameters(stage) for stage in self.stages]
        self.by_tokens = config.token_budget is not None

    def stage(self, position: float) -> int:
        """The stage of an update that begins here: tokens, or seconds of a time budget."""
        return stage_at(self.stages, position / self.config.budget)

    def update(self, position: float, seconds: Callable[[int], float]) -> Update | None:
        """The update that begins here; None where the budget holds no more. `seconds` of micro-batches are expected.

        A token budget is never overshot; a time budget ends with the first update completed at or after the deadline.
        """
        index, budget = self.stage(position), self.config.budget
        size = self.stages[index].tokens_per_step
        if position + size > budget if self.by_tokens else position >= budget:
            return None
        # The rate is that of the update's end, for every T alike, so that it ends at min_lr and no update is at 0.
        reached = position + (size if self.by_tokens else seconds(size // self.config.device_token_capacity))
        hyperparameters = self.hyperparameters[index]
        lr = self.config.learning_rate(reached / budget) * hyperparameters.lr_multiplier
        return Update(index, size, lr, hyperparameters)


def updates(config: RunConfig, costs: Costs | None) -> Iterator[Update]:
    """Every update of the run, unless its stream ends before: nothing for a time budget on the measured clock."""
    plan, clock, tokens = Plan(config), Clock(costs), 0
    if not plan.by_tokens and costs is None:
        return
    while update := plan.update(tokens if plan.by_tokens else clock.elapsed, clock.expected):
        yield update
        clock.update(update.tokens // config.device_token_capacity, 0.0)
        if not tokens:
            clock.start()
        tokens += update.tokens


def common_past(a: RunConfig, b: RunConfig, costs: Costs | None) -> int:
    """Tokens up to which both runs do the same to the same weights with the same tokens; their seeds are resolved."""
    ours, theirs = ({k: v for k, v in vars(config).items() if k not in PLANNED} for config in (a, b))
    tokens = 0
    if ours == theirs and not a.branch_from:
        for mine, other in zip(updates(a, costs), updates(b, costs), strict=False):
            if mine != other:
                break
            tokens += mine.tokens
    return tokens
