"""JSON files with a format number, read with limits and type checks.

Files may be damaged, or written by others: an integer of 20,000 digits, 100,000 nested brackets or a file of 100 GB
must neither exhaust memory nor raise another exception than ValueError.

Each file of a run folder holds an integer `format`; a missing number means format 0, which is otherwise equal to format
1. The number rises when an older hpcdist would misread the file. New keys do not raise it, because readers ignore
unknown keys.
"""

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import MISSING, fields
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from hpcdist.errors import RunFolderError
from hpcdist.host import retry
from hpcdist.host.files import read_regular, write_atomic

#: The largest JSON files of a run folder, such as the cells of a sweep, have a few MB.
MAX_JSON_BYTES = 64 << 20
#: 64 bits have 19 digits, and every integer with up to 300 digits fits a float.
_MAX_DIGITS = 300


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text. Raises ValueError for any damaged text."""
    if isinstance(text, bytes):
        text = text.decode()
    try:
        return _DECODER.decode(text)
    except RecursionError:
        raise ValueError("its values are nested too deeply") from None


def parse_object(text: str | bytes, *keys: str) -> dict[str, Any]:
    """Return a JSON object. Raises ValueError if the text is damaged, no object, or has none of one of `keys`."""
    value = parse_json(text)
    if not isinstance(value, dict):
        raise ValueError(f"it is a {type(value).__name__} instead of an object")
    missing = set(keys) - value.keys()
    if missing:
        raise ValueError(f"it has no {min(missing)!r}")
    return value


def read_json_value(path: Path, max_bytes: int = MAX_JSON_BYTES) -> Any:
    """Return the value of a JSON file, once, without retries. Raises ValueError if it is damaged, and OSError."""
    return parse_json(read_regular(path, max_bytes))


def _int(digits: str) -> int:
    if len(digits) > _MAX_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


_DECODER = json.JSONDecoder(parse_int=_int)
FORMAT = 1
KEY = "format"
#: Limit for counts, sizes and times (in seconds since 1970: the year 33658).
LARGEST = 10**12
T = TypeVar("T")
_hints: Callable[[type], dict[str, Any]] = cache(get_type_hints)


def stamped(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a file with its format number."""
    return {KEY: FORMAT, **value}


def unstamped(value: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return the content of a file without its format number. Raises RunFolderError if this hpcdist cannot read it."""
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
    """Return a dataclass with the values of `raw`; unknown keys are ignored, missing ones get their defaults.

    Raises RunFolderError, with `path` in its message, if a value has another type or a value without default is
    missing. Counts, sizes and times are between 0 and LARGEST.
    """
    values = {}
    hints = _hints(kind)
    for field in fields(kind):  # type: ignore[arg-type]
        if field.name in raw:
            value = raw[field.name]
            if not _fits(hints[field.name], value):
                given = str(value)[:40]
                raise RunFolderError(f"{path} is damaged: {field.name} cannot be {given!r}")
            values[field.name] = value
        elif field.default is MISSING and field.default_factory is MISSING:
            raise RunFolderError(f"{path} is damaged: it has no {field.name}")
    return kind(**values)


def _fits(declared: Any, value: Any) -> bool:
    if isinstance(declared, UnionType):
        return any(_fits(member, value) for member in get_args(declared))
    if get_origin(declared) is Literal:
        return isinstance(value, str) and value in get_args(declared)
    if declared is NoneType:
        return value is None
    if declared is float:
        return type(value) in (int, float) and abs(value) <= LARGEST  # which NaN is not
    if declared is int:
        return type(value) is int and 0 <= value <= LARGEST
    return type(value) is (get_origin(declared) or declared)


def write_json(path: Path, value: Mapping[str, Any], *, durable: bool = False, within_s: float | None = None) -> None:
    """Replace a JSON file atomically, with the format number; see `write_atomic`."""
    text = json.dumps(stamped(value), indent=2, sort_keys=True) + "\n"
    write_atomic(path, text, durable=durable, within_s=within_s)


def read_json(path: Path, *, within_s: float | None = None) -> dict[str, Any] | None:
    """Return the object in a JSON file, or None if the file is missing, not regular, or does not hold an object."""
    try:
        value = retry.retry(lambda: read_json_value(path), path, within_s=within_s)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, ValueError):
        return None
    if not isinstance(value, dict):
        return None
    return unstamped(value, path)


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects in the complete lines of a file; damaged lines are left out.

    The list is empty if the file is missing or not regular.
    """
    try:
        lines = retry.retry(lambda: read_regular(path, MAX_JSON_BYTES), path).split(b"\n")[:-1]
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, ValueError):
        return []
    values = []
    for line in lines:
        with suppress(ValueError):
            values.append(parse_json(line))
    return [value for value in values if isinstance(value, dict)]


def read_if_valid(kind: type[T], path: Path) -> T | None:
    """Return a dataclass with the values of a JSON file; None if the file is missing, damaged or cannot be read."""
    try:
        raw = read_json(path)
        if raw is None:
            return None
        return fill(kind, raw, path)
    except (RunFolderError, OSError):
        return None
