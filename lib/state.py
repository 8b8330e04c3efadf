"""How far a run has come, and what it says about itself in run_meta.json."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import zip_longest

from lib.clock import Clock
from lib.config import RunConfig
from lib.noise import noise_scale
from lib.rules import lr_multiplier
from lib.schedule import Stage

NOTHING = {"updates": 0, "clipped": 0, "ended": "not reached"}  # what a stage has seen at its beginning


@dataclass
class State:
    """Counts of a run between two updates."""

    steps: int = 0  # rows of metrics.jsonl: the updates taken, and those that fp16 skipped
    skipped: int = 0
    tokens: int = 0
    origin: int = 0  # where the stream's order stood at token 0 of this run
    began: int = 0  # tokens taken over with a parent's full state
    parent: dict | None = None  # of a branch: the run, where it was left, and what had been read of streams by then
    past: dict | None = None  # the run with the same past, and the tokens up to which it was taken over
    lr: float = 0.0  # of the last update
    clipped: int = 0  # updates
    warmup_tokens: int = 0
    warmup_seconds: float = 0.0
    stages: list[dict] = field(default_factory=list)
    grown: list[Sequence[float]] = field(default_factory=list)  # starts and T of the stages that an adaptive run added
    updates: list[tuple] = field(default_factory=list)  # of each: tokens, loss, noise_g2 and noise_s
    validation: list[dict] = field(default_factory=list)  # periodic
    attempts: list[dict] = field(default_factory=list)  # when the run was begun or continued, and after which row

    @property
    def cursor(self) -> int:
        """Where the next update begins to read, in tokens of the stream's order."""
        return self.origin + self.tokens

    def enter(self, index: int, seconds: float) -> None:
        """Be in stage `index`; a stage that no update fell into is passed."""
        while len(self.stages) <= index:
            seen = bool(self.stages) and self.stages[-1]["end_update"] > self.stages[-1]["start_update"]
            self.leave("boundary" if seen else "passed")
            here = {"tokens": self.tokens, "seconds": seconds, "update": self.steps}
            self.stages.append(
                {f"{end}_{unit}": value for end in ("start", "end") for unit, value in here.items()} | NOTHING)

    def leave(self, why: str) -> None:
        """Record why the present stage ended."""
        if self.stages:
            self.stages[-1]["ended"] = why

    def count(self, size: int, loss: float, noise: tuple, clipped: bool, skipped: bool, elapsed: float, seconds: float
              ) -> None:
        """Add one update of `size` tokens, which took `seconds`, to the stage that it began in."""
        if not self.steps:
            self.warmup_tokens, self.warmup_seconds = size, seconds
        self.steps += 1
        self.skipped += skipped
        self.tokens += size
        self.clipped += clipped
        self.updates.append((size, loss, *noise))
        stage = self.stages[-1]
        stage.update(end_tokens=self.tokens, end_seconds=elapsed, end_update=self.steps)
        stage["updates"] += not skipped
        stage["clipped"] += clipped

    @property
    def train_loss(self) -> float | None:
        """Mean loss over the updates that hold the last 5 % of the tokens, weighted by tokens."""
        last = self.last(0.05)
        return sum(size * loss for size, loss, _, _ in last) / sum(size for size, *_ in last) if last else None

    def noise_scale(self, share: float) -> float | None:
        """B_simple in tokens over the updates that hold the last share of the tokens; None where it is not defined."""
        last = self.last(share)
        return noise_scale([g2 for *_, g2, _ in last], [s for *_, s in last])

    def last(self, share: float) -> list[tuple]:
        """The updates that hold the last share of the tokens, from the last on."""
        tokens, found = 0, []
        for update in reversed(self.updates):
            if tokens >= share * self.tokens:
                break
            tokens += update[0]
            found.append(update)
        return found


def describe(config: RunConfig, stage: Stage) -> dict:
    """A stage as planned: what was asked for, and what it resolved to."""
    hyperparameters = asdict(config.hyperparameters(stage))
    return dict(stage.request) | {
        "boundary": stage.start,
        "tokens_per_step": stage.tokens_per_step,
        "resolved_lr_multiplier": lr_multiplier(config.scaling_rule, stage.tokens_per_step / config.tokens_per_step),
    } | hyperparameters


def metadata(config: RunConfig, state: State, clock: Clock, flops_per_token: int | None) -> dict:
    """The part of run_meta.json that follows from the configuration and the counts."""
    stages = [describe(config, planned) | (seen or NOTHING)
              for planned, seen in zip_longest(config.resolved(state.grown), state.stages)]
    taken = state.steps - state.skipped
    sizes = [stage["tokens_per_step"] for stage in stages]
    per_stage = (lambda values: values[0]) if config.schedule == "constant" else (lambda values: values)
    measured_tokens, by_tokens = state.tokens - state.warmup_tokens, config.token_budget is not None
    rate = measured_tokens / clock.measured if measured_tokens and clock.measured else None
    return {
        "arm": config.arm,
        "seed": config.seed,
        "data_seed": config.data_seed,
        "tokens_per_step": per_stage(sizes),
        "seq_len": config.seq_len,
        "effective_batch_size": per_stage([size // config.seq_len for size in sizes]),
        "device_batch_size": config.device_token_capacity // config.seq_len,
        "accumulation_steps": per_stage([size // config.device_token_capacity for size in sizes]),
        "budget": {"kind": "tokens" if by_tokens else "seconds", "value": config.budget, "clock": config.clock},
        "steps": taken,
        "skipped_steps": state.skipped,
        "tokens": state.tokens,
        "measured_steps": max(state.steps - 1, 0),
        "measured_tokens": measured_tokens,
        "warmup_elapsed_seconds": state.warmup_seconds,
        "elapsed_seconds": clock.elapsed,
        "measured_elapsed_seconds": clock.measured,
        "modelled_costs": asdict(clock.costs) if clock.costs else None,
        "overshoot_seconds": None if by_tokens else max(0.0, clock.elapsed - config.budget),
        "paused_seconds": clock.paused,
        "tokens_per_second": rate,
        "model_flops_per_second": rate and flops_per_token and rate * flops_per_token,
        "flops_per_token": flops_per_token,
        "train_loss": state.train_loss,
        "validation_loss": None,
        "validation_bits_per_byte": None,
        "periodic_validation_loss": state.validation,
        "skip_validation": config.skip_validation,
        "lr_schedule": {
            "coordinate": "tokens" if by_tokens else "seconds", "horizon": config.budget, "curve": config.lr_schedule,
            "lr": config.lr, "min_lr": config.min_lr, "warmup_fraction": config.warmup_fraction,
        },
        "final_lr": state.lr,
        "stages": stages,
        "noise_scale": state.noise_scale(0.2),
        "clipped_share": state.clipped / taken if taken else None,
        "parent": state.parent,
        "past": state.past,
        "attempts": state.attempts,
    }
