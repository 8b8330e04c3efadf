"""Bad input: one line that names the parameter, its value and what would be right."""


class BadInput(ValueError):
    """A value that cannot work, found before anything is written."""


def require(condition: bool, name: str, value: object, expected: str) -> None:
    """Raise BadInput as `name = value: expected` unless the condition holds."""
    if not condition:
        raise BadInput(f"{name} = {value!r}: {expected}")
