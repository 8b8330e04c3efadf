"""Where a run begins: at its own last checkpoint, at that of another run, at a parent's weights, or at nothing."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from lib import branch, checkpoint
from lib.branch import Branch
from lib.check import require
from lib.checkpoint import Checkpoint
from lib.clock import Clock, Costs
from lib.config import RunConfig
from lib.plan import common_past
from lib.runs import Run, load_model
from lib.state import State
from lib.step import Learner
from lib.stream import PackedStream


@dataclass(frozen=True)
class Task:
    """A configuration held against its stream, device and parent."""

    config: RunConfig  # seeds and device resolved
    stream: PackedStream
    costs: Costs | None  # of the modelled clock
    branch: Branch | None
    run: Run


@dataclass(frozen=True)
class Start:
    """Where a run begins: at a checkpoint of its own, of a run with the same past, or of its parent; or at nothing.

    `repeat` is a branch whose parent keeps no checkpoint there.
    """

    kind: str  # continued, past, branch, repeat or scratch
    path: Path | None = None  # of the checkpoint


def start(task: Task, past: tuple[Run, int] | None, say: Callable[[str], object]) -> Start:
    """Where to begin. Raises BadInput where checkpoints are damaged, or do not fit."""
    if own := checkpoint.latest(task.run, say):
        return Start("continued", own.path)
    if past and (found := checkpoint.kept_at(*past)) and found.tokens == past[1]:
        return Start("past", found.path)
    if task.branch is None:
        return Start("scratch")
    parent, tokens = task.branch.parent, task.branch.tokens
    if task.branch.weights_only and task.config.branch_at == 0:
        return Start("branch")
    if found := checkpoint.kept_at(parent, tokens):
        require(task.branch.weights_only or found.facts["stream"]["sha256"] == task.stream.sha256, "stream",
                task.config.stream, "must be the parent's, for a branch with its full state")
        return Start("branch", found.path)
    require(parent.config.token_budget is not None or parent.config.clock == "modelled", "branch_at", tokens,
            f"must be a checkpoint of {parent}: on the measured clock its past cannot be repeated")
    return Start("repeat")


def take_over(task: Task, kind: str, found: Checkpoint | None, learner: Learner, clock: Clock) -> State:
    """Put the learner and the clock where the run begins, and return the counts."""
    config, left = task.config, task.branch
    if kind == "continued":
        return found.restore(learner, clock)
    if kind == "past":
        state = found.restore(learner, clock)
        state.attempts, state.past = [], {"run": found.facts["run"], "tokens": found.tokens}
        return state
    if kind == "scratch":
        return State()
    if found is None:
        meta = left.parent.meta
        tokens, stream, before = meta["tokens"], meta["stream"], meta["parent"]
        weights = load_model(left.parent).state_dict()
    else:
        tokens, stream, before = found.tokens, found.facts["stream"], found.facts["state"]["parent"]
        weights = found.part("model")
    reads_on = left.reads_on and stream["sha256"] == task.stream.sha256
    if left.weights_only:
        learner.model.load_state_dict(weights)
        state = State(origin=stream["range"][1] if reads_on else 0)
    else:
        state = found.restore(learner, clock)
        alone = replace(config, branch_from="", branch_at=0)
        if common_past(alone, left.parent.config, task.costs) < tokens:
            state.stages = []
        state.attempts, state.began = [], tokens
        if not reads_on:
            state.origin = -tokens
    state.parent = branch.taken_over(left, tokens, stream, before, has_read(task, state))
    return state


def has_read(task: Task, state: State) -> dict:
    """What the run has read of its stream, as run_meta.json has it."""
    return {"sha256": task.stream.sha256, "range": [state.origin + state.began, state.cursor],
            "shuffle": {"data_seed": task.config.data_seed, "epochs": task.config.epochs}}


def opening(task: Task, kind: str, state: State) -> str:
    """The first line of an attempt."""
    config = task.config
    budget = f"{config.budget:,} tokens" if config.token_budget else f"{config.budget:g} s, {config.clock} clock"
    where = {
        "continued": f" · continued after update {state.steps:,}",
        "past": state.past and f" · from {state.tokens:,} tokens of {state.past['run']}",
        "branch": state.parent and f" · branched from {state.parent['run']} at {state.parent['tokens']:,} tokens",
    }.get(kind, "")
    return f"{config.arm} · lr {config.lr:g} · seed {config.seed} · {budget} · {task.run}{where}"
