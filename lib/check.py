"""What ends a command with one line: bad input, and a disk that takes no more."""


class BadInput(ValueError):
    """A value that cannot work, found before anything is written."""


class Unwritten(Exception):
    """What was to be written could not be, as on a full disk; what was there before is whole."""


def require(condition: bool, name: str, value: object, expected: str) -> None:
    """Raise BadInput as `name = value: expected` unless the condition holds."""
    if not condition:
        raise BadInput(f"{name} = {value!r}: {expected}")
