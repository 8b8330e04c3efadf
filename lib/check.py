"""What ends a command with one line: bad input, and a disk that takes no more."""

from collections.abc import Iterable
from difflib import get_close_matches


class BadInput(ValueError):
    """A value that cannot work, found before anything is written."""


class Unwritten(Exception):
    """What was to be written could not be, as on a full disk; what was there before is whole."""


def require(condition: bool, name: str, value: object, expected: str) -> None:
    """Raise BadInput as `name = value: expected` unless the condition holds."""
    if not condition:
        raise BadInput(f"{name} = {value!r}: {expected}")


def require_known(name: object, names: Iterable[str], label: str, value: object, of: str) -> None:
    """Raise BadInput as `label = value` unless `name` is one of `names`, those of `of`; it says which is nearest."""
    names = [*names]
    if name not in names:  # looking for the nearest takes a millisecond, and most names are right
        near = get_close_matches(str(name), names, 1)
        hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(names) or 'none'}"
        raise BadInput(f"{label} = {value!r}: is not a parameter of {of}; {hint}")
