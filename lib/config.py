"""What a user sets: flat, typed and checked before anything is written."""

import os
import sys
import time
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from zlib import crc32

import yaml

from lib import schedule as schedules
from lib.check import BadInput, Unwritten, require, require_known
from lib.rules import SCALING_RULES, WD_RULES, Hyperparameters, rescale

ROOT = Path(__file__).resolve().parent.parent


def under_root(path: str | Path, name: str = "path") -> Path:
    """An absolute path; a relative one counts from the repository, never from the working directory.

    Raises BadInput, naming the parameter, for what cannot be a path.
    """
    require(bool(str(path).strip()), name, str(path), "must not be empty")
    try:
        full = ROOT / Path(path).expanduser()
        full.lstat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError, RuntimeError) as error:
        raise BadInput(f"{name} = {str(path)[:80]!r}: must be a usable path ({type(error).__name__})") from None
    return full


@dataclass(frozen=True)
class Preparation:
    """Data preparation: from documents to a packed stream of tokens."""

    corpus: str = "installed-python"  # or hub:OWNER/NAME/path.parquet, or a path or glob of text files
    text_column: str = "text"  # of parquet and JSON lines
    limit: int = 0  # documents to read; 0 for all
    vocab_size: int = 16_384
    validation_fraction: float = 0.01  # share of documents held out
    stream: str = "data/stream"  # folder to write

    def __post_init__(self):
        check_types(self)
        under_root(self.stream, "stream")
        require(0 <= self.limit < 2**63, "limit", self.limit, "must be a number of documents, or 0 for all")
        require(257 <= self.vocab_size <= 2**32, "vocab_size", self.vocab_size,
                "must be at least 257 (256 bytes and <|eos|>) and fit the stream's uint32")
        require(0 < self.validation_fraction < 1, "validation_fraction", self.validation_fraction,
                "must lie between 0 and 1")


@dataclass(frozen=True)
class RunConfig:
    """One training run. Names, units and defaults are those of the README's table of parameters."""

    # data
    stream: str = "data/stream"
    seq_len: int = 1024
    validation_tokens: int | None = None  # the whole validation split where null
    # model
    hidden_size: int = 448
    layers: int = 10
    heads: int = 7
    mlp_size: int = 1792
    rope_theta: float = 10_000.0
    # budget: exactly one
    token_budget: int | None = None
    time_budget: float | None = None  # seconds after the warm-up update
    clock: str = "measured"
    # tokens per step
    schedule: str = "constant"
    tokens_per_step: int = 245_760
    device_token_capacity: int = 20_480  # tokens in a micro-batch
    batch_dividers: tuple[float, ...] = ()
    stage_length: tuple[float, ...] = ()
    small_tokens_per_step: int = 0
    switch_at: float = 0.0  # progress
    alpha: float = 0.0  # the fall of the learning-rate curve at which seesaw cuts it
    max_tokens_per_step: int = 0  # that seesaw and adaptive grow to
    stages: tuple[tuple[float, ...], ...] = ()  # by hand: [start, T], the start in tokens or seconds as the budget
    # learning rate
    lr: float = 1e-3
    min_lr: float = 0.0
    warmup_fraction: float = 0.02
    lr_schedule: str = "cosine"
    # optimizer
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    grad_clip: float = 1.0  # largest gradient norm; 0 is off
    scaling_rule: str = "sqrt-lr"
    wd_rule: str = "none"
    # system
    device: str = "auto"
    precision: str = "fp32"
    compile: str = "off"
    fullgraph: bool = False  # compile in one piece, or fail where that cannot be
    matmul_precision: str = "highest"
    activation_checkpointing: bool = False  # compute a block's activations again in the backward pass: less memory
    skip_gc: bool = False  # no garbage collection while it trains
    # order
    seed: int = 0
    data_seed: int | None = None  # the seed's where null
    epochs: int = 1
    repeat: int = 0  # tells apart runs that are otherwise the same: what differs between them is the machine's doing
    # checks
    eval_every: int = 0  # tokens; 0 is off
    skip_validation: bool = False
    checkpoint_every: int = 5_000_000  # tokens; 0 is off
    noise_every: int = 0  # updates between two in which a single micro-batch is split, for the noise scale; 0 is off
    # branch
    branch_from: str = ""  # a run's folder, or its name in `runs`
    branch_at: int = 0  # tokens of that run; 0 is where it ended
    branch_weights_only: bool = False  # and a cold optimizer, instead of everything
    # output
    runs: str = "runs"
    tensorboard: bool = False  # writes event files, too

    def __post_init__(self):
        check_types(self)
        for name in ("stream", "runs"):
            under_root(getattr(self, name), name)
        for name in ("seq_len", "hidden_size", "layers", "heads", "mlp_size", "rope_theta", "tokens_per_step",
                     "device_token_capacity", "lr", "eps", "epochs"):
            require(getattr(self, name) > 0, name, getattr(self, name), "must be positive")
        for name in ("min_lr", "weight_decay", "grad_clip", "seed", "eval_every", "checkpoint_every", "branch_at",
                     "noise_every", "repeat"):
            require(getattr(self, name) >= 0, name, getattr(self, name), "must not be negative")
        for name in ("beta1", "beta2"):
            require(0 <= getattr(self, name) < 1, name, getattr(self, name), "must be at least 0 and below 1")
        for name, known in CHOICES.items():
            require(getattr(self, name) in known, name, getattr(self, name), f"must be one of {', '.join(known)}")
        require(self.data_seed is None or self.data_seed >= 0, "data_seed", self.data_seed, "must not be negative")
        require(self.seq_len >= 2, "seq_len", self.seq_len, "must be at least 2, to have a next token to predict")
        require(self.hidden_size % (2 * self.heads) == 0, "heads", self.heads,
                f"must divide hidden_size {self.hidden_size:,} into heads of an even size, which RoPE rotates in pairs")
        require(self.min_lr <= self.lr, "min_lr", self.min_lr, f"must not be above lr {self.lr:g}")
        require(0 <= self.warmup_fraction <= 1, "warmup_fraction", self.warmup_fraction, "must lie in [0, 1]")
        require(self.validation_tokens is None or self.validation_tokens >= self.seq_len, "validation_tokens",
                self.validation_tokens, f"must hold at least one row of seq_len {self.seq_len:,}, or be null for all")
        for name in ("branch_at", "branch_weights_only"):
            require(not getattr(self, name) or bool(self.branch_from), name, getattr(self, name),
                    "needs branch_from, the run to branch from")
        self._check_budget()
        self._check_tokens_per_step()

    def _check_budget(self):
        both = {"token_budget": self.token_budget, "time_budget": self.time_budget}
        given = {name: value for name, value in both.items() if value is not None}
        require(len(given) == 1, "token_budget, time_budget", tuple(both.values()), "set exactly one of the two")
        for name, value in given.items():
            require(value > 0, name, value, "must be positive")

    def _check_tokens_per_step(self):
        capacity, row = self.device_token_capacity, self.seq_len
        require(capacity >= row, "device_token_capacity", capacity, f"must hold at least one row of seq_len {row:,}")
        require(capacity % row == 0, "device_token_capacity", capacity, f"must be a multiple of seq_len {row:,}")
        require(self.tokens_per_step % capacity == 0, "tokens_per_step", self.tokens_per_step,
                f"must be a multiple of device_token_capacity {capacity:,}; "
                f"the nearest is {schedules.nearest_multiple(self.tokens_per_step, capacity):,}")
        first = self.resolved()[0].tokens_per_step
        require(not self.fullgraph or self.compile != "off", "fullgraph", self.fullgraph, "needs compile")
        require(not self.noise_every or capacity > row, "noise_every", self.noise_every,
                f"needs a device_token_capacity of more than one row of {row:,}, to split it")
        require(self.token_budget is None or self.token_budget >= first, "token_budget", self.token_budget,
                f"must hold at least one update of {first:,} tokens")
        for stage in self.resolved():
            self.hyperparameters(stage)
        for name, owners in OF_SCHEDULES.items():
            value = getattr(self, name)
            require(not value or self.schedule in owners, name, list(value) if isinstance(value, tuple) else value,
                    f"belongs to schedule {' or '.join(owners)}, but schedule is {self.schedule}")

    @property
    def budget(self) -> float:
        """The horizon of the run, in tokens or in seconds."""
        return self.time_budget if self.token_budget is None else self.token_budget

    @property
    def arm(self) -> str:
        """The schedule in words, the same for every seed, learning rate and budget."""
        if self.schedule == "constant":
            return f"constant {self.tokens_per_step:,}"
        rule = {"sqrt-lr": "", "none": ", lr unscaled"}.get(self.scaling_rule, f", {self.scaling_rule}")
        return self._schedule_in_words() + rule + (", decay per token" if self.wd_rule == "per-token" else "")

    def _schedule_in_words(self) -> str:
        stages = self.resolved()
        starts, sizes = [stage.start for stage in stages], [stage.tokens_per_step for stage in stages]
        at = f" at {', '.join(f'{start:.3g}' for start in starts[1:])}"
        if self.schedule == "late_switch":
            return f"switch {sizes[0]:,} to {sizes[1]:,} at {self.switch_at:g}"
        if self.schedule == "dividers":
            words = f"dividers {','.join(f'{d:g}' for d in self.batch_dividers)} of {self.tokens_per_step:,}"
            even = all(abs(start - i / len(starts)) <= 0.01 for i, start in enumerate(starts))
            return words if even else f"{words} at {', '.join(f'{start:.3g}' for start in starts)}"
        if self.schedule == "seesaw" and self.max_tokens_per_step == self.tokens_per_step:
            return f"constant {self.tokens_per_step:,}, lr in steps of {self.alpha:g}"
        if self.max_tokens_per_step:
            by = f" by {self.alpha:g}" if self.alpha else ""
            return f"{self.schedule} {self.tokens_per_step:,} to {self.max_tokens_per_step:,}{by}"
        if len(stages) <= 4:
            return f"{self.schedule} {' · '.join(f'{size:,}' for size in sizes)}{at if len(stages) > 1 else ''}"
        told = crc32(repr([(f"{start:.4g}", size) for start, size in zip(starts, sizes, strict=True)]).encode())
        return f"{self.schedule} {sizes[0]:,} to {sizes[-1]:,} in {len(stages)}, no. {told % 10_000:04}"

    def resolved(self, grown: Sequence[Sequence[float]] = ()) -> list[schedules.Stage]:
        """The schedule as data: what the loop follows. `grown` are the starts and T that an adaptive run has added."""
        added = [schedules.Stage(start, int(size), size / self.tokens_per_step) for start, size in grown]
        return schedules.SCHEDULES[self.schedule](self) + added

    def hyperparameters(self, stage: schedules.Stage) -> Hyperparameters:
        """What AdamW takes in this stage, under the run's scaling rule."""
        base = Hyperparameters(1.0, self.beta1, self.beta2, self.eps, self.weight_decay)
        return rescale(self.scaling_rule, stage.ratio, base, self.wd_rule)

    def learning_rate(self, progress: float, stage: schedules.Stage) -> float:
        """What an update of this stage takes that ends at this progress."""
        held = stage.level is not None and progress >= self.warmup_fraction
        base = self.lr * stage.level if held else schedules.learning_rate(
            progress, self.lr, self.min_lr, self.warmup_fraction, self.lr_schedule)
        return base * self.hyperparameters(stage).lr_multiplier


OF_SCHEDULES = {"batch_dividers": ["dividers"], "stage_length": ["dividers"], "small_tokens_per_step": ["late_switch"],
                "switch_at": ["late_switch"], "alpha": ["seesaw"], "max_tokens_per_step": ["seesaw", "adaptive"],
                "stages": ["stages"]}
CHOICES = {
    "clock": ("measured", "modelled"),
    "schedule": schedules.SCHEDULES,
    "lr_schedule": schedules.LR_SCHEDULES,
    "scaling_rule": SCALING_RULES,
    "wd_rule": WD_RULES,
    "precision": ("fp32", "bf16", "fp16"),
    "compile": ("off", "default", "reduce-overhead", "max-autotune"),
    "matmul_precision": ("highest", "high", "medium"),
}


def check_types(config) -> None:
    """Hold every field against its annotation; lists become tuples, and whole numbers floats where a float is meant."""
    for name, kind in typing.get_type_hints(type(config)).items():
        object.__setattr__(config, name, convert(name, getattr(config, name), kind))


def convert(name: str, value: object, kind) -> object:
    """The value as `kind`, or BadInput that says what the parameter takes."""
    kinds = typing.get_args(kind) if typing.get_origin(kind) is not tuple else ()
    if type(None) in kinds:
        if value is None:
            return None
        kind = next(k for k in kinds if k is not type(None))
    if typing.get_origin(kind) in (tuple, list):
        require(isinstance(value, list | tuple), name, value, "must be a list")
        return tuple(convert(name, item, typing.get_args(kind)[0]) for item in value)
    number = hasattr(value, "__index__") and not isinstance(value, bool)
    if kind is int and number:
        require(abs(int(value)) < 2**63, name, value, "must be below 2^63")
        return int(value)
    if kind is float and (number or isinstance(value, float)):
        require(abs(value) < 1e300, name, value, "must be a finite number")  # not true of NaN
        return float(value)
    hint = "; YAML reads 6e-4 as text, write 6.0e-4" if kind is float and isinstance(value, str) else ""
    words = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}[kind]
    require(kind in (str, bool) and isinstance(value, kind), name, value, f"must be {words}{hint}")
    return value


def build(kind: type, values: Mapping[str, object]):
    """The configuration with these values; BadInput for a name it does not have, with the nearest one it has."""
    names = [field.name for field in fields(kind)]
    for name, value in values.items():
        require_known(name, names, str(name), value, kind.__name__)
    return kind(**values)


def read_yaml(path: str | Path) -> dict:
    """A flat params file as a dictionary. Raises BadInput where it is not one."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        values = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise BadInput(f"{path}: not a readable YAML file ({' '.join(str(error).split())})") from None
    require(isinstance(values, dict | None), str(path), type(values).__name__, "must hold name: value lines")
    names = [name.value for name, _ in yaml.compose(text).value] if values else []
    for name in names:
        require(names.count(name) == 1, f"{path}: {name}", values.get(name), "is set more than once")
    return values or {}


def read_arguments(kind: type, arguments: Sequence[str]):
    """The configuration of `FILE.yaml [name=value …]`; later values win, and each is read as YAML."""
    values = {}
    for argument in arguments:
        name, sign, text = argument.partition("=")
        if sign:
            try:
                values[name] = yaml.safe_load(text)
            except yaml.YAMLError:
                raise BadInput(f"{name} = {text!r}: must be a YAML value") from None
        else:
            values |= read_yaml(argument)
    return build(kind, values)


def command(main: Callable[[Sequence[str]], object]) -> None:
    """Run a command line: bad input ends it with one line on stderr and exit status 2, a failed write with 1."""
    status, words = 2, ""
    try:
        main(sys.argv[1:])
        return
    except BadInput as error:
        words = f"error: {error}"
    except Unwritten as error:
        status, words = 1, f"error: {error}"
    except KeyboardInterrupt:
        status, words = 130, "interrupted; the same command continues it"
    if os.environ.get("RANK", "0") == "0":
        print(words, file=sys.stderr)
    else:  # under torchrun, which ends all as soon as one ends, the first is to say it
        time.sleep(2)
    sys.exit(status)
