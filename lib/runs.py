"""The run directory: configuration, log, metrics, metadata and trained model; many of them as data frames."""

import fcntl
import hashlib
import json
import logging
import os
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from itertools import count
from pathlib import Path

import pandas as pd
import torch
from safetensors.torch import load_file, save_file

from lib.check import BadInput, require
from lib.config import ROOT, RunConfig, under_root
from lib.model import MiniGPT, ModelConfig

OUTCOMES = ("finished", "stream_exhausted", "diverged")  # a run with one of these is not trained again
COLUMNS = ["run", "arm", "base_tokens_per_step", "seed", "data_seed", "lr", "min_lr", "scaling_rule", "budget_kind",
           "budget", "clock", "status", "validation_loss", "validation_bits_per_byte", "train_loss", "steps", "tokens",
           "elapsed_seconds", "tokens_per_second", "final_lr", "clipped_share", "stages", "setting", "environment"]
# What may differ between the runs of one comparison; everything else is its setting.
OF_AN_ARM = {"schedule", "tokens_per_step", "batch_dividers", "stage_length", "lr", "seed", "data_seed", "token_budget",
             "time_budget", "clock", "runs", "stream"}


class Run:
    """A run directory, named by the run's arm, seed and a hash of everything that decides its outcome."""

    def __init__(self, path: Path):
        self.path = path
        self._metrics = self._lock = None

    @classmethod
    def of(cls, config: RunConfig, facts: Mapping[str, object]) -> "Run":
        """The directory of this configuration; `facts` hold what it means here, such as the stream's hash."""
        decisive = {k: v for k, v in asdict(config).items() if k not in ("stream", "runs")} | facts
        label = config.arm.replace(" ", "-").replace(",", "_")
        return cls(under_root(config.runs) / f"{label}-seed{config.seed}-{digest(decisive)}")

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
        """A row an update."""
        with open(self.path / "metrics.jsonl", encoding="utf-8") as file:
            return pd.DataFrame(json.loads(line) for line in file)

    def __str__(self) -> str:
        return str(self.path.relative_to(ROOT) if self.path.is_relative_to(ROOT) else self.path)

    def create(self, config: RunConfig) -> None:
        """Make the directory, and hold it until `close`; what an earlier attempt left is moved aside, never deleted.

        Raises BadInput where another process is training this run, or the folder of runs cannot be written.
        """
        if self.path.exists():
            self._hold()
            attempts = (self.path.with_name(f"{self.name}.stopped-{i}") for i in count(1))
            self.path.rename(next(path for path in attempts if not path.exists()))
            os.close(self._lock)
        make_folder(self.path)
        self._hold()
        write_json(self.path / "config.json", asdict(config))

    def _hold(self) -> None:
        """Lock the directory; the lock ends with the process, however that ends."""
        self._lock = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise BadInput(f"run = {self.name!r}: is being trained by another process; wait for it") from None

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
        screen.setLevel(logging.INFO)
        screen.emit = lambda record: console(record.getMessage())
        logger.handlers = warnings.handlers = [file, screen]
        logging.captureWarnings(True)
        try:
            yield logger
        except BaseException:
            file.stream.write(traceback.format_exc())
            raise
        finally:
            logging.captureWarnings(False)
            warnings.handlers = []
            file.close()

    def record(self, row: Mapping[str, object]) -> None:
        """Append one row to metrics.jsonl."""
        if self._metrics is None:
            self._metrics = open(self.path / "metrics.jsonl", "a", 1, encoding="utf-8")  # noqa: SIM115 — held for the run
        self._metrics.write(json.dumps(row) + "\n")

    def close(self, meta: Mapping[str, object]) -> None:
        """Write run_meta.json, which says that the run has ended, after everything else."""
        if self._metrics is not None:
            self._metrics.close()
            self._metrics = None
        write_json(self.path / "run_meta.json", meta | {"ended": datetime.now(UTC).isoformat(timespec="seconds")})
        os.close(self._lock)

    def save_model(self, model: MiniGPT, tokenizer: Path) -> str:
        """Write model/ (safetensors, configuration, tokenizer) and return the sha256 of the weights."""
        folder = self.path / "model"
        folder.mkdir(exist_ok=True)
        weights = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
        save_file(weights, folder / "model.safetensors")
        write_json(folder / "config.json", asdict(model.config))
        (folder / "tokenizer.json").write_bytes(tokenizer.read_bytes())
        return weights_sha256(weights)


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
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError):
        return None


def write_json(path: Path, values: Mapping[str, object] | list) -> None:
    """Write whole or not at all: a temporary file, then a rename."""
    temporary = path.with_suffix(".partial")
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump(values, file, indent=2, ensure_ascii=False, allow_nan=False)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def load_runs(folder: str | Path = "runs") -> tuple[pd.DataFrame, pd.DataFrame]:
    """Every run that has ended in `folder`: a frame of runs, and one of all their updates (with column `run`).

    What stopped attempts left aside is not among them.
    """
    folder = under_root(folder)
    require(folder.is_dir(), "runs", str(folder), "is not a folder of runs; train something first")
    ended = [Run(meta.parent) for meta in sorted(folder.glob("*/run_meta.json")) if ".stopped-" not in str(meta)]
    return frame(ended), updates(ended)


def frame(runs: list[Run]) -> pd.DataFrame:
    """A row a run: what its metadata says in one line."""
    rows = []
    for run in runs:
        meta, config = run.meta, read_json(run.path / "config.json")
        setting = {name: value for name, value in config.items() if name not in OF_AN_ARM}
        setting |= {"stream": meta["stream"]["sha256"], "parameters": meta["parameters"]}
        rows.append(config | meta | {"run": run.name, "base_tokens_per_step": config["tokens_per_step"],
                                     "budget_kind": meta["budget"]["kind"], "budget": meta["budget"]["value"],
                                     "setting": digest(setting)})
    table = pd.DataFrame(rows, columns=COLUMNS)
    losses = ["validation_loss", "validation_bits_per_byte", "train_loss"]
    return table.astype(dict.fromkeys(losses, float))


def updates(runs: list[Run]) -> pd.DataFrame:
    """A row an update of every run."""
    tables = [run.metrics().assign(run=run.name) for run in runs if (run.path / "metrics.jsonl").exists()]
    return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame(columns=["run", "step", "tokens", "loss"])


def load_model(run: Run | str | Path) -> MiniGPT:
    """The trained model of a run, in float32 on the CPU."""
    folder = (run.path if isinstance(run, Run) else under_root(run)) / "model"
    require(folder.is_dir(), "run", str(run), "holds no trained model")
    model = MiniGPT(ModelConfig(**read_json(folder / "config.json")))
    model.load_state_dict(load_file(folder / "model.safetensors"))
    return model
