"""The format number of the files that a run folder keeps, and typed reading of them.

Every such file holds `format`, a whole number; a file without it has format 0, which was written before the number
existed and differs in nothing else. The number rises when an older hpcdist would misread a file. New keys do not raise
it: a reader ignores keys that it does not know.
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
#: Larger numbers cannot be a count, a size or a time (in seconds since 1970: the year 33658).
LARGEST = 10**12
T = TypeVar("T")


def stamped(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return `value` with the present format in it."""
    return {KEY: FORMAT, **value}


def unstamped(value: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return the content of a file without its format.

    Raises RunFolderError when the format is newer than this hpcdist reads, or is no whole number.
    """
    number = value.get(KEY, 0)
    if type(number) is not int or number < 0:
        raise RunFolderError(f"{path} is damaged: its format is {str(number)[:20]!r}, not a whole number")
    if number > FORMAT:
        raise RunFolderError(
            f"{path} was written by a newer hpcdist (format {str(number)[:20]}; this one reads up to {FORMAT}):"
            " upgrade hpcdist"
        )
    return {key: item for key, item in value.items() if key != KEY}


def fill(kind: type[T], raw: Mapping[str, Any], path: Path) -> T:
    """Return a dataclass filled from the content of a file; unknown keys are ignored.

    Raises RunFolderError, which names the file, the key and the value, when a key is missing or has another type.
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
