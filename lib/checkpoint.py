"""Checkpoints: all that a run needs to go on between two updates, in one file whose name holds its hash.

A file holds tensors only (safetensors: nothing in it is ever executed): weights, AdamW's moments, the states of random
generators, and, as bytes, the rows logged so far and the counts as JSON.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from lib.check import BadInput, require
from lib.runs import Run, write_whole
from lib.state import State
from lib.step import Learner

ROLLING = 2  # the last ones, to continue an interrupted run from
DIGITS = 16  # of the hash, in the name


@dataclass
class Checkpoint:
    """What a file held when it was read whole: tensors by name, and `facts`, the rest."""

    path: Path
    tensors: dict[str, Tensor]
    facts: dict
    rows: bytes  # of metrics.jsonl
    damaged: tuple[Path, ...] = ()  # those after it that are not whole

    @property
    def tokens(self) -> int:
        return self.facts["state"]["tokens"]

    @property
    def last(self) -> dict:
        """The last row."""
        return json.loads(self.rows.splitlines()[-1])

    def part(self, name: str) -> dict[str, Tensor]:
        """The tensors below `name`."""
        return {key.removeprefix(f"{name}/"): tensor for key, tensor in self.tensors.items()
                if key.startswith(f"{name}/")}

    @property
    def state(self) -> State:
        """The counts."""
        updates = [tuple(row.get(name) for name in ("tokens_per_step", "loss", "noise_g2", "noise_s"))
                   for row in map(json.loads, self.rows.splitlines())]
        return State(updates=updates, **self.facts["state"])

    def restore(self, learner: Learner) -> None:
        """Put the learner, and the random generators, where they were."""
        learner.model.load_state_dict(self.part("model"))
        moments = {}
        for key, tensor in self.part("optimizer").items():
            number, name = key.split("/")
            moments.setdefault(int(number), {})[name] = tensor
        groups = learner.optimizer.state_dict()["param_groups"]
        learner.optimizer.load_state_dict({"state": moments, "param_groups": groups})
        if self.facts["scaler"] and learner.scaler.is_enabled():
            learner.scaler.load_state_dict(self.facts["scaler"])
        for device, value in self.part("random").items():
            if device == "cpu":
                torch.set_rng_state(value)
            elif learner.device.type == device:
                torch.get_device_module(device).set_rng_state(value, learner.device)


def write(run: Run, learner: Learner, state: State, readings: dict, stream: dict, kept: bool = False) -> None:
    """Write a checkpoint of the run, and drop its rolling ones but the last two; a `kept` one stays.

    `readings` are the clock's, `stream` what run_meta.json says of what was read.
    """
    tensors = {f"model/{name}": tensor for name, tensor in learner.model.state_dict().items()}
    for number, moments in learner.optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer/{number}/{name}": tensor for name, tensor in moments.items()}
    tensors["random/cpu"] = torch.get_rng_state()
    if learner.device.type == "cuda":
        tensors["random/cuda"] = torch.cuda.get_rng_state(learner.device)
    counts = {name: value for name, value in asdict(state).items() if name != "updates"}  # the rows have them
    facts = {"run": run.name, "state": counts, "clock": readings, "scaler": learner.scaler.state_dict(),
             "stream": stream}
    tensors["rows"] = as_tensor(run.rows())
    tensors["facts"] = as_tensor(json.dumps(facts).encode())
    data = save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})
    folder = run.path / "checkpoints" / ("kept" if kept else "")
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / f"{state.tokens:015d}-{sha256(data).hexdigest()[:DIGITS]}.safetensors", data)
    if not kept:
        for old in sorted(path for path in written(run) if path.parent == folder)[:-ROLLING]:
            old.unlink()


def as_tensor(data: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(data, np.uint8).copy())


def read(path: Path) -> Checkpoint:
    """The checkpoint in this file. Raises BadInput where the file is not as it was written, or cannot be read."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise BadInput(f"checkpoint = {str(path)!r}: cannot be read ({error.strerror})") from None
    if sha256(data).hexdigest()[:DIGITS] != path.stem.rpartition("-")[2]:
        raise BadInput(f"checkpoint = {str(path)!r}: is damaged, its hash is not the one in its name")
    try:
        tensors = load(data)
        rows, facts = (tensors.pop(name).numpy().tobytes() for name in ("rows", "facts"))
        return Checkpoint(path, tensors, json.loads(facts), rows)
    except (SafetensorError, KeyError, ValueError) as error:
        raise BadInput(f"checkpoint = {str(path)!r}: is no checkpoint of a run ({error})") from None


def written(run: Run) -> list[Path]:
    """The checkpoints of a run, kept ones too, from the last to the first."""
    found = (run.path / "checkpoints").glob(f"**/{'[0-9]' * 15}-*.safetensors")
    return sorted(found, key=lambda path: path.name, reverse=True)


def tokens_of(path: Path) -> int:
    """The tokens a checkpoint was written after, by its name."""
    return int(path.name.partition("-")[0])


def latest(run: Run, say: Callable[[str], object]) -> Checkpoint | None:
    """The last checkpoint that is whole; None where the run has written none.

    Says which ones are damaged, and raises BadInput where all are.
    """
    bad = []
    for path in written(run):
        try:
            found = read(path)
            require(found.facts["run"] == run.name, "checkpoint", str(path), "is of another run")
            return replace(found, damaged=tuple(bad))
        except BadInput as error:
            say(f"{error}; falling back to the one before it")
            bad.append(path)
    if bad:
        raise BadInput(f"run = {run.name!r}: cannot be continued, its checkpoints are damaged "
                       f"({', '.join(path.name for path in bad)}); move {run} away to train it from the beginning")
    return None


def kept_at(run: Run, tokens: int) -> Checkpoint | None:
    """The checkpoint of the update that brought the run to so many tokens; None where there is none that is whole."""
    for path in reversed(written(run)):
        if tokens_of(path) >= tokens:
            try:
                found = read(path)
            except BadInput:
                continue
            if found.tokens - found.last["tokens_per_step"] < tokens:
                return found
    return None
