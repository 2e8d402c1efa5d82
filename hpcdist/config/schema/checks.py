"""Checks that several sections use. Each returns a list with one line per mistake."""

from __future__ import annotations

import re
from collections.abc import Mapping

#: Valid names of shell variables.
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
#: Long options of Slurm. Leading dashes are reported later, together with options that cannot be set.
_FLAG = re.compile(r"-{0,2}[A-Za-z0-9][A-Za-z0-9_-]*")
#: Ranks of a run, and ranks, threads or cores on one machine: beyond any cluster, and far below what exhausts one.
MAX_RANKS, MAX_PER_NODE = 262_144, 1024
_CONTROL = re.compile(r"[\x00-\x1f\x7f\x85\u2028\u2029]")


def check(problems: list[str]) -> None:
    """Raise one ValueError with a line per mistake, to which config/merging.py adds the section's name."""
    if problems:
        raise ValueError("\n".join(problems))


def at_least(section: object, low: float, *names: str, strictly: bool = False) -> list[str]:
    """Return the mistakes in numbers with a lower bound; NaN is one, null is not."""
    values = {name: getattr(section, name) for name in names}
    return [
        f"{name} must be {'>' if strictly else '>='} {low:g}, got {value}"
        for name, value in values.items()
        if value is not None and not (value > low or (value == low and not strictly))
    ]


def at_most(section: object, high: int, *names: str) -> list[str]:
    """Return the mistakes in numbers with an upper bound; null is none."""
    values = {name: getattr(section, name) for name in names}
    return [f"{name} must be <= {high}, got {value}" for name, value in values.items() if (value or 0) > high]


def above(section: object, low: float, *names: str) -> list[str]:
    """Return a problem for each value that is not greater than `low`."""
    return at_least(section, low, *names, strictly=True)


def variables(section: object, name: str) -> list[str]:
    """Return the invalid names of environment variables."""
    return [
        f"{name}: {_short(key)} is not a valid variable name: use letters, digits and '_', not starting with a digit"
        for key in getattr(section, name)
        if not _VARIABLE.fullmatch(str(key))
    ]


def flags(section: object, *names: str) -> list[str]:
    """Return the names that are not options of Slurm, which would change the meaning of a script or command."""
    return [
        f"{name}: {_short(key)} is not an option: use its long name, such as mail-type"
        for name in names
        for key in getattr(section, name)
        if not _FLAG.fullmatch(str(key))
    ]


def one_line(section: object, *names: str) -> list[str]:
    """Return the texts with a control character; a newline would end a line of the batch script."""
    values = {name: getattr(section, name) for name in names}
    return [
        f"{key} must be one line without control characters, got {_short(text)}"
        for name, value in values.items()
        for key, text in _texts(name, value)
        if _CONTROL.search(text)
    ]


def _texts(name: str, value: object) -> list[tuple[str, str]]:
    if isinstance(value, Mapping):
        return [(f"{name}.{key}", str(text)) for key, text in value.items()]
    return [(name, str(text)) for text in (value if isinstance(value, list) else [value])]


def _short(text: object) -> str:
    shown = repr(text)
    return shown if len(shown) <= 80 else f"{shown[:77]}…"
