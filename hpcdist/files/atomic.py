"""Atomic file writes, and JSON files with a format number."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from hpcdist.errors import RunFolderError
from hpcdist.files import formats, retry
from hpcdist.files.bounded_json import MAX_JSON_BYTES, parse_json, read_json_value
from hpcdist.files.regular_file import read_regular


def write_atomic(
    path: Path, data: bytes | str, *, durable: bool = False, mode: int = 0o666, within_s: float | None = None
) -> None:
    """Replace a file atomically: a reader sees either the old or the new content.

    Args:
        durable: also wait until content and name are on disk (fsync).
        mode: permissions of the new file, reduced by the umask.
        within_s: how long to retry transient errors, see `retry.retry`.
    """
    raw = data.encode() if isinstance(data, str) else data
    retry.retry(lambda: _write_once(path, raw, durable=durable, mode=mode), path, within_s=within_s)


def _write_once(path: Path, raw: bytes, *, durable: bool, mode: int) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(temporary, flags, mode), "wb") as file:
            file.write(raw)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        retry.discard(temporary)
        raise
    if durable:
        fsync_folder(path.parent)


def fsync_folder(folder: Path) -> None:
    """Flush a folder to disk, so that renames inside it survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, value: Mapping[str, Any], *, durable: bool = False, within_s: float | None = None) -> None:
    """Write a JSON file with the current format number, atomically."""
    text = json.dumps(formats.stamped(value), indent=2, sort_keys=True) + "\n"
    write_atomic(path, text, durable=durable, within_s=within_s)


def read_json(path: Path, *, within_s: float | None = None) -> dict[str, Any] | None:
    """Return the object in a JSON file, or None if the file is missing, not regular, or does not hold an object.

    Args:
        within_s: how long to retry transient errors, see `retry.retry`.

    Raises:
        RunFolderError: a newer hpcdist has written the file.
    """
    try:
        value = retry.retry(lambda: read_json_value(path), path, within_s=within_s)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, ValueError):
        return None
    return formats.unstamped(value, path) if isinstance(value, dict) else None


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects in the complete lines of a file, without damaged lines; empty like `read_json` is None."""
    try:
        lines = retry.retry(lambda: read_regular(path, MAX_JSON_BYTES), path).split(b"\n")[:-1]
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, ValueError):
        return []
    found = []
    for line in lines:
        with suppress(ValueError):
            found.append(parse_json(line))
    return [value for value in found if isinstance(value, dict)]


def read_if_valid(kind: type[formats.T], path: Path) -> formats.T | None:
    """Return a dataclass with the values of a JSON file; None if the file is missing, damaged or cannot be read."""
    try:
        raw = read_json(path)
        return None if raw is None else formats.fill(kind, raw, path)
    except (RunFolderError, OSError):
        return None
