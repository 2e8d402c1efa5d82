"""Read JSON that something else may have written: bounded in size, depth and digits, and every failure a ValueError.

A whole number of 20,000 digits, 100,000 nested brackets or a file of 100 GB must not cost memory or raise what no
caller expects.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

#: The largest documents of a run folder are a sweep's cells and a rank's last collectives: a few MB.
MAX_JSON_BYTES = 64 << 20
#: Of a whole number: 64 bits have 19, and every number with up to 300 digits has a float.
_MAX_DIGITS = 300


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON document. Raises ValueError for anything else, whatever is wrong with it."""
    try:
        return _DECODER.decode(text if isinstance(text, str) else text.decode())
    except RecursionError:
        raise ValueError("its values are nested too deeply") from None


def read_json_value(path: Path, max_bytes: int = MAX_JSON_BYTES) -> Any:
    """Return the value in a JSON file. Raises OSError, and ValueError for a file that is too large or not JSON."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise ValueError(f"{size} bytes, more than {max_bytes}")
    return parse_json(data)


def _int(digits: str) -> int:
    if len(digits) > _MAX_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


_DECODER = json.JSONDecoder(parse_int=_int)
