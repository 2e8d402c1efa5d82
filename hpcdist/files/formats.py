"""Format number of the JSON files in a run folder, and type-checked reading of them.

Each file holds an integer `format`; a missing number means format 0, which is otherwise equal to format 1. The number
rises when an older hpcdist would misread the file. New keys do not raise it, because readers ignore unknown keys.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import MISSING, fields
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, cast, get_args, get_origin, get_type_hints

from hpcdist.errors import RunFolderError

FORMAT = 1
KEY = "format"
#: Limit for counts, sizes and times (in seconds since 1970: the year 33658).
LARGEST = 10**12
T = TypeVar("T")


def stamped(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return `value` with the current format number."""
    return {KEY: FORMAT, **value}


def unstamped(value: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return the content of a file without its format number.

    Raises:
        RunFolderError: the format is newer than this hpcdist supports, or not an integer.
    """
    number = value.get(KEY, 0)
    if type(number) is not int or number < 0:
        raise RunFolderError(f"{path} is damaged: its format is {str(number)[:20]!r}, not an integer")
    if number > FORMAT:
        raise RunFolderError(
            f"{path} was written by a newer hpcdist (format {str(number)[:20]}; this version reads up to {FORMAT}):"
            " upgrade hpcdist"
        )
    return {key: item for key, item in value.items() if key != KEY}


def fill(kind: type[T], raw: Mapping[str, Any], path: Path) -> T:
    """Return a dataclass with the values of a file; unknown keys are ignored.

    Raises:
        RunFolderError: a key is missing or its value has the wrong type; the message names file, key and value.
    """
    values = {}
    hints = _hints(cast(Hashable, kind))
    for field in fields(kind):  # type: ignore[arg-type]
        if field.name in raw:
            if not _fits(hints[field.name], raw[field.name]):
                given = str(raw[field.name])[:40]
                raise RunFolderError(f"{path} is damaged: {field.name} cannot be {given!r}")
            values[field.name] = raw[field.name]
        elif field.default is MISSING and field.default_factory is MISSING:
            raise RunFolderError(f"{path} is damaged: it has no {field.name}")
    return kind(**values)


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def _fits(declared: Any, value: Any) -> bool:
    if isinstance(declared, UnionType):
        return any(_fits(one, value) for one in get_args(declared))
    if get_origin(declared) is Literal:
        return isinstance(value, str) and value in get_args(declared)
    if declared is NoneType:
        return value is None
    if declared is float:
        return type(value) in (int, float) and abs(value) <= LARGEST  # which NaN is not
    if declared is int:
        return type(value) is int and 0 <= value <= LARGEST
    return type(value) is (get_origin(declared) or declared)
