"""Parse untrusted JSON with limits on size, depth and digits; every failure is a ValueError.

An integer of 20,000 digits, 100,000 nested brackets or a file of 100 GB must neither exhaust memory nor raise an
unexpected exception.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hpcdist.files.regular_file import read_regular

#: The largest JSON files of a run folder, such as the cells of a sweep, have a few MB.
MAX_JSON_BYTES = 64 << 20
#: Limit for integers: 64 bits have 19 digits, and every integer with up to 300 digits fits a float.
_MAX_DIGITS = 300


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON document. Raises ValueError for every invalid document."""
    try:
        return _DECODER.decode(text if isinstance(text, str) else text.decode())
    except RecursionError:
        raise ValueError("its values are nested too deeply") from None


def parse_object(text: str | bytes, *keys: str) -> dict[str, Any]:
    """Return the object in a JSON document. Raises ValueError for any other document, and if it lacks one of `keys`."""
    found = parse_json(text)
    if not isinstance(found, dict):
        raise ValueError(f"it is a {type(found).__name__} instead of an object")
    if missing := set(keys) - found.keys():
        raise ValueError(f"it has no {min(missing)!r}")
    return found


def read_json_value(path: Path, max_bytes: int = MAX_JSON_BYTES) -> Any:
    """Return the value in a JSON file. Raises ValueError if the file is too large or not JSON, and OSError."""
    return parse_json(read_regular(path, max_bytes))


def _int(digits: str) -> int:
    if len(digits) > _MAX_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


_DECODER = json.JSONDecoder(parse_int=_int)
