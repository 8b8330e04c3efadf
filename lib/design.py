"""A schedule as it is typed: its fields, what is wrong with one, what it comes to, and its params file."""

import os
import typing
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import yaml

from lib.check import BadInput, require
from lib.clock import Costs
from lib.config import OF_SCHEDULES, RunConfig, convert, under_root
from lib.plan import totals
from lib.runs import write_whole

# The fields of the designer, in order, with what they count in.
UNITS = {
    "schedule": "", "token_budget": "tokens", "time_budget": "seconds", "clock": "", "tokens_per_step": "tokens",
    "small_tokens_per_step": "tokens", "switch_at": "share of budget", "batch_dividers": "list",
    "stage_length": "shares of budget", "alpha": "factor", "max_tokens_per_step": "tokens", "stages": "[start, T], …",
    "noise_every": "updates", "device_token_capacity": "tokens", "lr": "peak", "min_lr": "at the end",
    "warmup_fraction": "share of budget", "lr_schedule": "", "scaling_rule": "", "seed": "",
}
KINDS = typing.get_type_hints(RunConfig)
DEFAULTS = {field.name: field.default for field in fields(RunConfig)}


def shown(schedule: str, timed: bool) -> list[str]:
    """The fields that this schedule uses, and a budget in seconds (`timed`) or tokens."""
    hidden = {name for name, owners in OF_SCHEDULES.items() if schedule not in owners}
    hidden |= {"token_budget"} if timed else {"time_budget", "clock"}
    hidden |= set() if schedule == "adaptive" else {"noise_every"}
    return [name for name in UNITS if name not in hidden]


def suggested(base: RunConfig) -> dict[str, str]:
    """What the fields hold at first: the base's values, and where it has none, such as run with it."""
    large, small = base.tokens_per_step, base.device_token_capacity
    values = {"time_budget": 60.0, "small_tokens_per_step": small, "switch_at": 0.75, "batch_dividers": (4, 2, 1),
              "stage_length": (0.25, 0.25), "alpha": 2.0, "max_tokens_per_step": 4 * large,
              "stages": ((0, small), (base.budget // 2, large)), "token_budget": 100 * large}
    return {name: as_text(getattr(base, name) or values.get(name, getattr(base, name))) for name in UNITS}


def as_text(value: object) -> str:
    """A value as one types it."""
    if isinstance(value, tuple):
        return ", ".join(f"[{as_text(item)}]" if isinstance(item, tuple) else as_text(item) for item in value)
    return f"{value:_}" if isinstance(value, int) else str(value)


def typed_value(name: str, text: str) -> object:
    """What is typed in a field, as the parameter takes it: `1e6` too, and lists without brackets. Raises BadInput."""
    kind = KINDS[name]
    if kind is str:
        return text
    if typing.get_origin(kind) is not tuple:
        value = number(text.strip())
        require(not isinstance(value, str), name, text, "must be a number")
        return convert(name, value, kind)
    try:
        value = yaml.safe_load(f"[{text}]")
    except yaml.YAMLError:
        raise BadInput(f"{name} = {text!r}: must be a list") from None
    inner = typing.get_origin(typing.get_args(kind)[0]) is tuple
    if len(value) == 1 and isinstance(value[0], list) and (not inner or isinstance([*value[0], 0][0], list)):
        value = value[0]  # it had brackets of its own
    return convert(name, value, kind)


def number(text: str) -> int | float | str:
    """The number that the text is; a whole one as int. Text that is none stays."""
    try:
        value = float(text)
    except ValueError:
        return text
    return int(text) if text.lstrip("+-").replace("_", "").isdigit() else int(value) if value.is_integer() else value


@dataclass(frozen=True)
class Draft:
    """What the fields come to: a configuration, or what is wrong, by field; under "" what belongs to none of them."""

    config: RunConfig | None
    problems: dict[str, str]


def draft(base: RunConfig, typed: Mapping[str, str], timed: bool) -> Draft:
    """The base with what is typed in the fields that are shown; fields that are hidden are off."""
    values, problems = {name: DEFAULTS[name] for name in UNITS}, {}
    for name in shown(typed["schedule"], timed):
        try:
            values[name] = typed_value(name, typed[name])
        except BadInput as error:
            problems[name] = reason(error)
    if not problems:
        try:
            return Draft(replace(base, **values), {})
        except BadInput as error:
            name = str(error).partition(" = ")[0]
            problems = {name: reason(error)} if name in shown(typed["schedule"], timed) else {"": str(error)}
    return Draft(None, problems)


def reason(error: BadInput) -> str:
    """What would be right, without the parameter's name and value, beside which it stands."""
    return str(error).partition(" = ")[2].partition(": ")[2]


def in_words(config: RunConfig, costs: Costs | None, stream_tokens: int) -> str:
    """What the schedule comes to: updates, tokens, time on this machine, and whether the stream has so many tokens."""
    sums = totals(config, costs)
    if sums is None:
        return f"{config.arm}: as many updates as {config.budget:g} s hold"
    words = f"{config.arm}: {sums.updates:,} updates, {sums.tokens:,} tokens"
    if sums.seconds is not None:
        words += f", about {duration(sums.seconds)} on this machine"
    if config.schedule == "adaptive":
        words += ", if T never grows"
    if sums.tokens > stream_tokens:
        words += f"; the stream's {stream_tokens:,} tokens end it before"
    return words


def duration(seconds: float) -> str:
    """A time in two units at most: 42 s, 3 min 5 s, 2 h 10 min, 3 d 4 h."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for large, unit, small, rest in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= large:
            return f"{whole // large} {unit} {whole % large // small} {rest}"
    return f"{whole} s"


def params_text(config: RunConfig, words: str = "") -> str:
    """A params file for `python -m lib.train`: what differs from the defaults, with `words` as its comment."""
    values = {name: [*map(list, value)] if name == "stages" else list(value) if isinstance(value, tuple) else value
              for name, value in asdict(config).items() if value != DEFAULTS[name]}
    return "".join(f"# {line}\n" for line in words.splitlines()) + yaml.safe_dump(values, sort_keys=False)


def save(config: RunConfig, file: str, words: str = "") -> Path:
    """Write the params file. Raises BadInput, naming `file`, where something is there already, or nothing can be."""
    path = under_root(file, "file")
    require(path.suffix in (".yaml", ".yml"), "file", file, "must end in .yaml")
    require(not os.path.lexists(path), "file", file, "is there already, and stays; choose another name")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, params_text(config, words).encode())
    except OSError as error:
        raise BadInput(f"file = {file!r}: must be a file that can be written ({error.strerror})") from None
    return path
