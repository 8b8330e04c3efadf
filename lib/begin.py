"""Where a run begins: at its own last checkpoint, at that of another run, at a parent's weights, or at nothing."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from lib import branch, checkpoint
from lib.branch import Branch
from lib.check import require
from lib.checkpoint import Checkpoint
from lib.clock import Costs
from lib.config import RunConfig
from lib.plan import common_past
from lib.runs import Run, load_model, read_json
from lib.state import State
from lib.step import Learner
from lib.stream import PackedStream


@dataclass(frozen=True)
class Task:
    """A configuration held against its stream, device and parent."""

    asked: RunConfig  # with its device
    config: RunConfig  # with its seeds too
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
    damaged: tuple[Path, ...] = ()  # checkpoints after it


def check(task: Task) -> None:
    """Raise BadInput where the parent cannot be branched from."""
    left, parent = task.branch, task.branch.parent
    found = checkpoint.kept_at(parent, left.tokens)
    if left.weights_only:
        shape = read_json(parent.path / "model" / "config.json") or {}
        known = found.tensors["model/embed_in.weight"].shape[0] if found else shape.get("vocab_size")
        require(known in (None, task.stream.vocab_size), "stream", task.config.stream,
                f"must have the vocabulary of the parent, {known} tokens, not {task.stream.vocab_size}")
    else:
        read = found.facts["stream"] if found else (parent.meta or {}).get("stream", {"sha256": task.stream.sha256})
        require(read["sha256"] == task.stream.sha256, "stream", task.config.stream,
                "must be the parent's, for a branch with its full state")
    config = parent.config
    measured = config.token_budget is None and config.clock == "measured"
    require(found is not None or not measured or (left.weights_only and not task.config.branch_at), "branch_at",
            left.tokens, f"must be a checkpoint of {parent}: on the measured clock its past cannot be repeated")


def start(task: Task, past: tuple[Run, int] | None, say: Callable[[str], object]) -> Start:
    """Where to begin. Raises BadInput where all checkpoints of the run are damaged."""
    if own := checkpoint.latest(task.run, say):
        return Start("continued", own.path, own.damaged)
    if past and (found := checkpoint.kept_at(*past)) and found.tokens == past[1]:
        return Start("past", found.path)
    if task.branch is None:
        return Start("scratch")
    if task.branch.weights_only and task.config.branch_at == 0:
        return Start("branch")
    found = checkpoint.kept_at(task.branch.parent, task.branch.tokens)
    return Start("branch", found.path) if found else Start("repeat")


def counts(task: Task, kind: str, found: Checkpoint | None) -> State:
    """The counts of the run where it begins."""
    config, left = task.config, task.branch
    if kind == "scratch":
        return State()
    if kind == "continued":
        return found.state
    if kind == "past":
        return replace(found.state, attempts=[], past={"run": found.facts["run"], "tokens": found.tokens})
    if found is None:
        meta = left.parent.meta
        tokens, read, before = meta["tokens"], meta["stream"], meta.get("parent")
    else:
        tokens, read, before = found.tokens, found.facts["stream"], found.facts["state"]["parent"]
    reads_on = left.reads_on and read["sha256"] == task.stream.sha256
    if left.weights_only:
        state = State(origin=read["range"][1] if reads_on else 0)
    else:
        state = replace(found.state, attempts=[], past=None, began=tokens)
        alone = {"branch_from": "", "branch_at": 0, "branch_weights_only": False, "seed": 0, "data_seed": 0}
        both = [replace(each, **alone) for each in (config, left.parent.config)]
        if common_past(*both, task.costs) < tokens:
            state.stages, state.grown = [], []
        if not reads_on:
            state.origin = -tokens
    state.parent = branch.taken_over(left, tokens, read, before, has_read(task, state))
    return state


def load(task: Task, kind: str, found: Checkpoint | None, learner: Learner) -> None:
    """Put the learner where the run begins."""
    if kind == "branch" and task.branch.weights_only:
        learner.model.load_state_dict(found.part("model") if found else load_model(task.branch.parent).state_dict())
    elif found:
        found.restore(learner)


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
