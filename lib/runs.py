"""The run directory: configuration, log, metrics, metadata and trained model; many of them as data frames."""

import errno
import fcntl
import hashlib
import json
import logging
import os
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import pandas as pd
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from lib.board import Board
from lib.check import BadInput, Unwritten, require
from lib.config import ROOT, RunConfig, build, under_root
from lib.model import MiniGPT, ModelConfig

OUTCOMES = ("finished", "stream_exhausted", "diverged")  # a run with one of these is not trained again; others go on
COLUMNS = ["run", "arm", "base_tokens_per_step", "seed", "data_seed", "lr", "min_lr", "lr_schedule", "scaling_rule",
           "branch_at", "budget_kind", "budget", "clock", "status", "validation_loss", "validation_bits_per_byte",
           "train_loss", "steps", "tokens", "elapsed_seconds", "tokens_per_second", "final_lr", "clipped_share",
           "noise_scale", "stages", "setting", "environment"]
REFUSED = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO}  # by the disk
LOSSES = ["validation_loss", "validation_bits_per_byte", "train_loss"]
# What may differ between the runs of one comparison; everything else is its setting.
OF_AN_ARM = {"schedule", "tokens_per_step", "batch_dividers", "stage_length", "lr", "seed", "data_seed", "token_budget",
             "time_budget", "clock", "small_tokens_per_step", "switch_at", "alpha", "max_tokens_per_step", "stages",
             "scaling_rule", "wd_rule", "repeat"}


class Run:
    """A run directory, named by the run's arm, seed and a hash of everything that decides its outcome."""

    def __init__(self, path: Path):
        self.path, self.board = path, Board()
        self._metrics = None

    @classmethod
    def of(cls, config: RunConfig, facts: Mapping[str, object]) -> "Run":
        """The directory of this configuration; `facts` hold what it means here, such as the stream's hash."""
        label = config.arm.replace(" ", "-").replace(",", "_")
        return cls(under_root(config.runs) / f"{label}-seed{config.seed}-{digest(decisive(config) | facts)}")

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def meta(self) -> dict | None:
        """run_meta.json, or None while the run has not ended."""
        return read_json(self.path / "run_meta.json")

    @property
    def ended(self) -> bool:
        """Whether the run came to an outcome that stands."""
        return (self.meta or {}).get("status") in OUTCOMES

    def metrics(self) -> pd.DataFrame:
        """A row an update; what a full disk cut off is no row."""
        return pd.DataFrame(json.loads(line) for line in self.rows().splitlines(True) if line.endswith(b"\n"))

    def __str__(self) -> str:
        """Its path, from the repository where it lies there."""
        return str(self.path.relative_to(ROOT) if self.path.is_relative_to(ROOT) else self.path)

    @contextmanager
    def hold(self, progress: Callable[[str], object]) -> Iterator[None]:
        """Hold the directory, which is made where it is missing; wait for another process that trains this run.

        The lock ends with the process, however that ends. Raises BadInput where the folder of runs cannot be written,
        and for a directory with links, which would lead writing out of it.
        """
        make_folder(self.path)
        lock = os.open(self.path, os.O_RDONLY)
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                progress(f"{self}: is being trained by another process, waiting for it")
                fcntl.flock(lock, fcntl.LOCK_EX)
            linked = next((path for path in [self.path, *self.path.rglob("*")] if path.is_symlink()), None)
            require(linked is None, "run", str(self), f"must hold files of its own; {linked} is a link")
            yield
        finally:
            os.close(lock)

    @property
    def config(self) -> RunConfig:
        """The configuration it was made with. Raises BadInput where config.json is not one."""
        values = read_json(self.path / "config.json")
        require(isinstance(values, dict), "run", str(self), "must hold a whole config.json")
        return build(RunConfig, values)

    def check(self, config: RunConfig) -> None:
        """Raise BadInput where the directory holds another configuration than this."""
        if (self.path / "config.json").exists():
            found, wanted = decisive(self.config), decisive(config)
            other = next((k for k in sorted({*found, *wanted}) if found.get(k) != wanted.get(k)), None)
            require(other is None, "run", str(self), f"holds another configuration, {other} = {found.get(other)!r}; "
                    "move it away")

    def open(self, config: RunConfig, rows: bytes) -> None:
        """Begin or continue: write config.json, and log after these rows."""
        for torn in self.path.rglob(".*.partial"):  # of a process that was killed while it wrote
            torn.unlink()
        write_json(self.path / "config.json", asdict(config))
        write_whole(self.path / "metrics.jsonl", rows)

    def rows(self) -> bytes:
        """metrics.jsonl as it stands."""
        path = self.path / "metrics.jsonl"
        return path.read_bytes() if path.exists() else b""

    @contextmanager
    def log(self, console: Callable[[str], None]) -> Iterator[logging.Logger]:
        """A logger to the console and run.log, which also take warnings; run.log keeps the traceback of a failure.

        Debug messages go to run.log alone.
        """
        logger, warnings = logging.getLogger(f"run.{self.name}"), logging.getLogger("py.warnings")
        logger.setLevel(logging.DEBUG)
        logger.propagate = False
        file, screen = logging.FileHandler(self.path / "run.log", encoding="utf-8"), logging.Handler()
        file.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
        file.handleError = lambda record: None  # a full disk is noticed, and told once, where it loses more
        screen.setLevel(logging.INFO)
        screen.emit = lambda record: console(record.getMessage())
        logger.handlers = warnings.handlers = [file, screen]
        logging.captureWarnings(True)
        try:
            yield logger
        except BaseException:
            logger.debug(traceback.format_exc())
            raise
        finally:
            logging.captureWarnings(False)
            warnings.handlers = []
            with suppress(OSError):
                file.close()

    def record(self, row: Mapping[str, object]) -> None:
        """Append one row to metrics.jsonl."""
        if self._metrics is None:
            self._metrics = open(self.path / "metrics.jsonl", "a", 1, encoding="utf-8")  # noqa: SIM115 — held for the run
        self._metrics.write(json.dumps(row, allow_nan=False) + "\n")

    def close(self, meta: Mapping[str, object]) -> None:
        """Write run_meta.json, which says that the run has ended, after everything else."""
        if self._metrics is not None:
            with suppress(OSError):  # of a line that did not fit, which was told when it was written
                self._metrics.close()
            self._metrics = None
        with suppress(OSError):
            self.board.close(meta)
        write_json(self.path / "run_meta.json", meta | {"ended": datetime.now(UTC).isoformat(timespec="seconds")})

    def save_model(self, model: MiniGPT, tokenizer: Path) -> str:
        """Write model/ (safetensors, configuration, tokenizer) and return the sha256 of the weights."""
        folder = self.path / "model"
        folder.mkdir(exist_ok=True)
        weights = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
        write_whole(folder / "model.safetensors", save(weights))
        write_json(folder / "config.json", asdict(model.config))
        write_whole(folder / "tokenizer.json", tokenizer.read_bytes())
        return weights_sha256(weights)


def decisive(config: RunConfig) -> dict:
    """What decides a run's outcome: everything set but paths and what is written on the way.

    A parameter that is off (null, 0, false, empty) is left out, so that a new one, off by default, renames no run.
    """
    return {name: value for name, value in json.loads(json.dumps(asdict(config))).items()
            if value and name not in ("stream", "runs", "checkpoint_every", "tensorboard", "branch_from")}


def digest(facts: Mapping[str, object]) -> str:
    """Twelve hex digits that name these facts."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]


def weights_sha256(weights: Mapping[str, torch.Tensor]) -> str:
    """Hash of names and values, in the order of the names."""
    sha256 = hashlib.sha256()
    for name in sorted(weights):
        sha256.update(name.encode())
        sha256.update(weights[name].numpy().tobytes())
    return sha256.hexdigest()


def make_folder(path: Path) -> None:
    """Make a folder of runs, or below one. Raises BadInput where it cannot be written."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"runs = {str(path.parent)!r}: must be a folder to write to ({error.strerror})") from None


def read_json(path: Path) -> dict | list | None:
    """What the file holds; None where it is not there or not whole."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None


def write_json(path: Path, values: Mapping[str, object] | list) -> None:
    """Write JSON whole or not at all."""
    write_whole(path, json.dumps(values, indent=2, ensure_ascii=False, allow_nan=False).encode())


def write_whole(path: Path, data: bytes) -> None:
    """Write a file whole or not at all, whenever the process or the machine stops: a temporary file, then a rename."""
    temporary = path.with_name(f".{path.name}.partial")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)


@contextmanager
def unwritten(what: object, left: str = "what is there stays, and is continued when asked for again") -> Iterator[None]:
    """Raise Unwritten, in one line about `what` and what is `left`, where the disk refuses to be written."""
    try:
        yield
    except OSError as error:
        if error.errno not in REFUSED:
            raise
        raise Unwritten(f"{what}: {error.strerror}; {left}") from None


def load_runs(folder: str | Path = "runs") -> tuple[pd.DataFrame, pd.DataFrame]:
    """Every run in `folder` that has ended or was stopped: a frame of them, and one of all updates (column `run`)."""
    return frame(found := runs_in(folder)), updates(found)


def runs_in(folder: str | Path) -> list[Run]:
    """Every run in `folder` that has ended or was stopped. Raises BadInput where it is no folder."""
    folder = under_root(folder)
    require(folder.is_dir(), "runs", str(folder), "is not a folder of runs; train something first")
    return [Run(meta.parent) for meta in sorted(folder.glob("*/run_meta.json"))]


def frame(runs: list[Run]) -> pd.DataFrame:
    """A row a run: what its metadata says in one line. Raises BadInput for a run whose metadata is not whole."""
    table = pd.DataFrame([in_a_row(run) for run in runs], columns=COLUMNS)
    return table.astype(dict.fromkeys(LOSSES, float))


def in_a_row(run: Run) -> dict:
    """Configuration and metadata of a run, flat. The arm's name is made anew: a file's words reach no report."""
    config, meta = run.config, run.meta
    try:
        setting = {name: value for name, value in decisive(config).items() if name not in OF_AN_ARM}
        setting |= {"stream": meta["stream"]["sha256"], "parameters": meta["parameters"], "parent": meta.get("parent")}
        return asdict(config) | meta | {name: meta[name] and float(meta[name]) for name in LOSSES} | {
            "run": run.name, "arm": config.arm, "base_tokens_per_step": config.tokens_per_step,
            "lr_schedule": config.lr_schedule,
            "budget_kind": meta["budget"]["kind"], "budget": meta["budget"]["value"], "setting": digest(setting)}
    except (KeyError, TypeError, ValueError) as error:
        what = f"{type(error).__name__}: {error}"
        raise BadInput(f"run = {str(run)!r}: must have a whole run_meta.json ({what})") from None


def updates(runs: list[Run]) -> pd.DataFrame:
    """A row an update of every run, but of what an ancestor had read: its loss is not that of unseen text."""
    tables = []
    for run in runs:
        table = run.metrics().assign(run=run.name)
        for first, last in (run.meta.get("parent") or {}).get("reread", []) if len(table) else []:
            table = table[(table["tokens"] <= first) | (table["tokens"] - table["tokens_per_step"] >= last)]
        if len(table):
            tables.append(table)
    return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame(columns=["run", "step", "tokens", "loss"])


def load_model(run: Run | str | Path) -> MiniGPT:
    """The trained model of a run, in float32 on the CPU."""
    folder = (run.path if isinstance(run, Run) else under_root(run)) / "model"
    require(folder.is_dir(), "run", str(run), "holds no trained model")
    try:
        model = MiniGPT(ModelConfig(**read_json(folder / "config.json")))
        model.load_state_dict(load_file(folder / "model.safetensors"))
    except (OSError, SafetensorError, TypeError, RuntimeError) as error:
        raise BadInput(f"run = {str(run)!r}: holds no whole model ({' '.join(str(error).split())})") from None
    return model
