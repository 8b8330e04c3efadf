"""Kills a run anywhere, starts it again, and holds what it came to against a run that was left alone.

    python tests/torture.py [KILLS] [SEED]

A life here is a process that prepares a stream of tokens and trains a tiny model on it. Some kills are a SIGKILL from
outside at a random moment, the others strike at an exact place, such as half a file. The library knows of none of it:
Python tells of the files that it opens, renames and removes, and the kernel stops a file from growing.
"""

import json
import multiprocessing
import os
import random
import resource
import signal
import sys
import time
from fnmatch import fnmatch
from multiprocessing.context import BaseContext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch
from safetensors.torch import load_file

from lib import checkpoint
from lib.config import Preparation, RunConfig
from lib.prepare import prepare
from lib.runs import Run, weights_sha256
from lib.step import Learner
from lib.stream import read_meta
from lib.train import train

os.environ["OMP_NUM_THREADS"] = "1"
FRESH = multiprocessing.get_context("spawn")  # an interpreter of its own
FORKED = multiprocessing.get_context("forkserver")  # from a process that has imported everything and trained nothing
FORKED.set_forkserver_preload(["__main__", "lib.train", "lib.prepare", "torch._dynamo"])  # the optimizer imports that

UPDATES, CHECKPOINTS, VALIDATIONS = 128 + 64 + 32, 24, 9  # of the run below; two updates follow the last checkpoint
SETTINGS = {"seq_len": 16, "hidden_size": 16, "layers": 2, "heads": 2, "mlp_size": 32, "lr": 0.01, "device": "cpu",
            "token_budget": 24_576, "tokens_per_step": 256, "device_token_capacity": 64, "warmup_fraction": 0.1,
            "schedule": "dividers", "batch_dividers": (4, 2, 1), "stage_length": (1 / 3, 1 / 3),
            "checkpoint_every": 1000, "eval_every": 3000, "validation_tokens": 512}
MOST_LOST = SETTINGS["checkpoint_every"] + SETTINGS["tokens_per_step"]  # tokens between a kill and the last checkpoint
NEWLINE = b"\n"
LONGEST = 300.0  # seconds of a life
DEATHS = (-signal.SIGKILL, -signal.SIGXFSZ)  # the latter is the kernel's
WIDTHS = (76, 31, 10, 12, 14)
TIMINGS = ("second", "elapsed", "started", "memory")


class Place(NamedTuple):
    """Where a life ends: when an event is told of for the `number`-th time, or inside the write that follows."""

    name: str
    event: str  # of sys.audit, "write" for a file opened to write, or of `announce`
    path: str = "*"  # what the event is about, below the folder of the life
    times: int = 1  # that this happens in a run that is left alone
    grown: int | None = None  # the bytes that the file takes before the end
    number: int = 1

    def __str__(self) -> str:
        return f"{self.name} ({self.number})" if self.times > 1 else self.name


PREPARATION = [
    Place("preparation: nothing written", "os.mkdir", "/.stream.partial"),
    Place("preparation: tokens half written", "write", "*/tokens.bin", grown=60_000),
    Place("preparation: tokens written", "os.remove", "*/validation.bin"),
    Place("preparation: tokenizer half written", "os.remove", "*/validation.bin", grown=1_000),
    Place("preparation: stream.json half written", "write", "*/stream.json", grown=200),
    Place("preparation: written, not renamed", "os.rename", "/.stream.partial"),
    Place("preparation: just renamed", "open", ""),
]
TRAINING = [
    Place("run: no folder", "os.mkdir", "/runs/*"),
    Place("config.json half written", "write", "*config.json*", grown=200),
    Place("before the first update", "before accumulate"),
    Place("in the first update", "before apply"),
    Place("after the first update", "after record"),
    Place("update: gradients not clipped", "before clip", times=UPDATES),
    Place("update: weights not changed", "before apply", times=UPDATES),
    Place("update: weights changed, no row", "after apply", times=UPDATES),
    Place("row half written", "before record", "*/metrics.jsonl", UPDATES, grown=90),
    Place("row written", "after record", times=UPDATES),
    Place("validation", "before evaluate", times=VALIDATIONS),
    Place("checkpoint half written", "write", "*/checkpoints/*", CHECKPOINTS, grown=70_000),
    Place("checkpoint written, not renamed", "os.rename", "*/checkpoints/*", CHECKPOINTS),
    Place("checkpoint just renamed", "open", "*/checkpoints", CHECKPOINTS),
    Place("checkpoint: old one not dropped", "os.remove", "*/checkpoints/*", CHECKPOINTS - checkpoint.ROLLING),
]
END = [
    Place("model half written", "write", "*/model/*model.safetensors*", grown=20_000),
    Place("model: a file not renamed", "os.rename", "*/model/*", 3),
    Place("model written, no run_meta.json", "before close"),
    Place("run_meta.json half written", "write", "*run_meta.json*", grown=500),
    Place("run_meta.json written, not renamed", "os.rename", "*run_meta.json*"),
    Place("run_meta.json just renamed", "after close"),
]
PLACES = {place.name: place for place in PREPARATION + TRAINING + END}
Kill = float | Place  # seconds after the imports, or a place


# The life: in a process of its own.

def live(folder: Path, place: Place | None = None) -> None:
    """Prepare a stream and train on it, and die at the place on the way."""
    torch.set_num_threads(1)
    if place:
        die_at(place, folder)
    corpus, stream = folder.parent / "texts" / "*.txt", str(folder / "stream")
    prepare(Preparation(corpus=str(corpus), vocab_size=400, validation_fraction=0.1, stream=stream), progress=quiet)
    train(RunConfig(**SETTINGS, stream=stream, runs=str(folder / "runs")), progress=quiet)


def quiet(line: str = "") -> None:
    pass


def die_at(place: Place, folder: Path) -> None:
    """Let this process end there, with no chance to clean up."""
    for name in ("accumulate", "clip", "apply", "evaluate"):
        announce(Learner, name)
    for name in ("record", "close"):
        announce(Run, name)
    seen = 0

    def hear(event: str, arguments: tuple) -> None:
        nonlocal seen
        if event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR):
            event = "write"
        if event == place.event and fnmatch(str(arguments[0]).removeprefix(str(folder)), place.path):
            seen += 1
            if seen == place.number:
                if place.grown is None:
                    os.kill(os.getpid(), signal.SIGKILL)
                stop_growth(Path(arguments[0]), place.grown)

    sys.addaudithook(hear)


def announce(owner: type, name: str) -> None:
    """Let a method tell when it begins and ends, and of the file that a run writes its rows to."""
    method = getattr(owner, name)

    def told(self: object, *arguments: object) -> object:
        path = self.path / "metrics.jsonl" if owner is Run else ""
        sys.audit(f"before {name}", path)
        result = method(self, *arguments)
        sys.audit(f"after {name}", path)
        return result

    setattr(owner, name, told)


def stop_growth(path: Path, size: int) -> None:
    """Let the kernel end this process in the write that takes a file past what is there and `size` bytes."""
    limit = size + (path.stat().st_size if path.exists() else 0)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python ignores it, and would be told of a full disk
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))


# What is seen from outside.

def spend(folder: Path, kill: Kill | None = None, context: BaseContext = FORKED) -> int:
    """A life in this folder, until its end or the kill; returns its exit status."""
    process = context.Process(target=live, args=(folder, kill if isinstance(kill, Place) else None))
    process.start()
    process.join(kill if isinstance(kill, float) else LONGEST)
    process.kill()
    process.join()
    return process.exitcode


def write_texts(folder: Path) -> None:
    """Forty documents of words that are frequent and rare."""
    chance = random.Random(0)
    words = ["".join(chance.choices("abcdefghijklmnopąęśżź", k=chance.randint(2, 9))) for _ in range(300)]
    folder.mkdir()
    for number in range(40):
        text = " ".join(chance.choices(words, weights=range(300, 0, -1), k=450))
        (folder / f"{number:02}.txt").write_text(text, encoding="utf-8")


def alone(folder: Path, context: BaseContext = FORKED) -> dict:
    """What a run comes to that is left alone; the texts for all lives are written beside it."""
    write_texts(folder.parent / "texts")
    folder.mkdir()
    assert spend(folder, context=context) == 0
    found = outcome(folder)
    assert [row["step"] for row in found["rows"]] == list(range(1, UPDATES + 1))
    assert found["metadata"]["status"] == "finished"
    assert found["sha256 in run_meta.json"]
    return found


class Death(NamedTuple):
    """What a kill left on the disk."""

    reached: str
    saved: int | None  # the update of the last checkpoint that is whole, 0 for none; None where the run had ended
    wrong: list[str]


class Result(NamedTuple):
    """A row of the table; `wrong` names what was not as it should be, "weights" among it."""

    killed: str
    reached: str
    resumed: str
    wrong: list[str]


def die(folder: Path, kill: Kill, expected: dict) -> Death:
    """A life until this kill."""
    status, run, wrong = spend(folder, kill), run_in(folder), damaged(folder)
    if isinstance(kill, Place) and status not in DEATHS:
        wrong.append(f"exit status {status} and no death at: {kill}")
    if run and run.ended:
        return Death("the end", None, wrong)
    whole_ones = [path for path in checkpoint.written(run) if whole(path)] if run else []
    saved = checkpoint.read(whole_ones[0]).facts["state"]["steps"] if whole_ones else 0
    done, sizes = rows_in(folder).count(NEWLINE), [row["tokens_per_step"] for row in expected["rows"]]
    if sum(sizes[saved:done]) > MOST_LOST:
        wrong.append(f"no checkpoint after update {saved}")
    return Death(reached(folder), saved, wrong)


def torture(folder: Path, kills: list[Kill], expected: dict) -> Result:
    """Kill a life at each of these in turn, then let it go on to its end, and hold that against what is expected."""
    folder.mkdir()
    deaths = [die(folder, kill, expected) for kill in kills]
    wrong = [what for death in deaths for what in death.wrong]
    if status := spend(folder):
        wrong.append(f"exit status {status}")
    try:
        found, begun = outcome(folder), beginnings(folder)
    except Exception as error:  # what is broken may raise anything
        found, begun, wrong = {}, [], [*wrong, f"{type(error).__name__}: {error}"]
    wrong += damaged(folder) + [name for name in expected if found.get(name) != expected[name]]
    saved = [0, *(death.saved for death in deaths if death.saved is not None)]
    if begun != sorted(set(saved)):
        wrong.append(f"begun after the updates {begun}, where checkpoints were of {saved}")
    resumed = "had ended" if deaths[-1].saved is None else f"update {begun[-1]}" if begun else "never"
    return Result(" · ".join(map(in_words, kills)), " · ".join(death.reached for death in deaths), resumed, wrong)


def in_words(kill: Kill) -> str:
    """A kill for the table."""
    return f"{kill:.2f} s" if isinstance(kill, float) else str(kill)


def run_in(folder: Path) -> Run | None:
    """The run of a life; None before it has a folder."""
    path = next(folder.glob("runs/*"), None)
    return path and Run(path)


def rows_in(folder: Path) -> bytes:
    """The rows of a life's run, the last one perhaps torn."""
    run = run_in(folder)
    return run.rows() if run else b""


def reached(folder: Path) -> str:
    """How far a killed life had come, by what lies on the disk."""
    if not (folder / "stream").exists():
        return "preparation"
    rows = rows_in(folder)
    if not rows:
        return "before update 1"
    if not rows.endswith(NEWLINE):
        return f"update {rows.count(NEWLINE)}, half a row"
    return f"update {rows.count(NEWLINE)}" + (", model" if (run_in(folder).path / "model").exists() else "")


def beginnings(folder: Path) -> list[int]:
    """The updates after which the lives of a run began; of several that began after the same one, the last tells."""
    return [attempt["after"] for attempt in run_in(folder).meta["attempts"]]


def damaged(folder: Path) -> list[str]:
    """The files that are not whole, temporary ones and rows aside."""
    return [str(path) for path in files(folder) if not temporary(path) and not whole(folder / path)]


def files(folder: Path) -> list[Path]:
    """All files below the folder, as paths from there."""
    return sorted(path.relative_to(folder) for path in folder.glob("**/*") if path.is_file())


def temporary(path: Path) -> bool:
    """Whether the file, or the folder that it lies in, is one that was being written: its name begins with a dot."""
    return any(part.startswith(".") for part in path.parts)


def whole(path: Path) -> bool:
    """Whether the file is as it was meant to be, as far as can be told from itself."""
    try:
        if path.parent.name == "checkpoints":
            checkpoint.read(path)
        elif path.suffix == ".safetensors":
            load_file(path)
        elif path.suffix == ".json":
            json.loads(path.read_text(encoding="utf-8"))
        elif path.name == "tokens.bin":
            read_meta(path.parent)
    except Exception:  # a damaged file may raise anything
        return False
    return True


def outcome(folder: Path) -> dict:
    """All that a life came to, but for what differs between two lives that do the same."""
    run, stream = run_in(folder), read_meta(folder / "stream")
    weights = weights_sha256(load_file(run.path / "model" / "model.safetensors"))
    meta = run.meta | dict.fromkeys(("ended", "attempts", "environment"))
    return {
        "weights": weights,
        "rows": [untimed(parsed(line)) for line in run.rows().splitlines(True)],
        "metadata": untimed(meta),
        "sha256 in run_meta.json": meta["sha256"] == weights,
        "stream": [stream["sha256"], (folder / "stream" / "tokenizer.json").read_bytes()],
        "model": [path.read_bytes() for path in sorted((run.path / "model").glob("*.json"))],
        "files": [path for path in files(folder) if path.parent.name != "checkpoints" or temporary(path)],
    }


def parsed(line: bytes) -> dict | None:
    """A row of metrics.jsonl; None where the line is no whole one."""
    try:
        return json.loads(line) if line.endswith(NEWLINE) else None
    except ValueError:
        return None


def untimed(value: object) -> object:
    """Rows and metadata without their timings."""
    if isinstance(value, list):
        return [untimed(item) for item in value]
    if isinstance(value, dict):
        return {name: untimed(item) for name, item in value.items() if not any(word in name for word in TIMINGS)}
    return value


# The table.

def draw(chance: random.Random, count: int, life: float) -> list[list[Kill]]:
    """Two double kills, then moments and places at random; every place comes before one comes again."""

    def some(places: list[Place]) -> Place:
        place = chance.choice(places)
        return place._replace(number=chance.randint(1, place.times))

    cases, left = [[some(PREPARATION), some(TRAINING)], [chance.uniform(0, life / 2), some(END)]], []
    while len(cases) < count:
        left = left or chance.sample(list(PLACES.values()), len(PLACES))
        cases.append([chance.uniform(0, life) if chance.random() < 0.4 else some([left.pop()])])
    return cases[:count]


def length_of_a_life(folder: Path) -> float:
    """Seconds of a life that is left alone, once there is a process to fork it from."""
    folder.mkdir()
    first = FORKED.Process(target=quiet)
    first.start()
    first.join()
    begin = time.perf_counter()
    assert spend(folder) == 0
    return time.perf_counter() - begin


def main(count: int = 30, seed: int = 0) -> int:
    """Print a table of so many kills; returns the exit status."""

    def show(*cells: str) -> None:
        print("|", " | ".join(cell.ljust(width) for cell, width in zip(cells, WIDTHS, strict=True)), "|", flush=True)

    with TemporaryDirectory() as name:
        folder = Path(name).resolve()
        expected, begin = alone(folder / "alone", FRESH), time.perf_counter()
        life, results = length_of_a_life(folder / "timed"), []
        show("kill point", "killed at", "resumed at", "sha256 equal", "all else equal")
        for number, kills in enumerate(draw(random.Random(seed), count, life), 1):
            result = torture(folder / f"{number}", kills, expected)
            show(result.killed, result.reached, result.resumed, "NO" if "weights" in result.wrong else "yes",
                 ", ".join(result.wrong) or "yes")
            results.append(result)
    equal = sum(not result.wrong for result in results)
    print(f"{equal} of {count} killed runs came to what the run came to that was left alone, bit for bit; "
          f"{time.perf_counter() - begin:.0f} s")
    return int(equal < count)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
