"""Listings of the files of an environment, to find out whether it has changed or a copy is incomplete."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

#: Python writes these at any time, so they neither change nor complete an environment.
CACHE = "__pycache__"


def files_below(folder: Path, *, skip: frozenset[str] = frozenset({CACHE})) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the relative path and status of each file and symbolic link below a folder, in a fixed order.

    Args:
        skip: names of folders to leave out.
    """
    for path, folders, names in os.walk(folder):
        links = [name for name in folders if os.path.islink(os.path.join(path, name))]
        folders[:] = sorted(name for name in folders if name not in skip and name not in links)
        for name in sorted([*names, *links]):
            full = os.path.join(path, name)
            yield os.path.relpath(full, folder), os.lstat(full)


def fingerprint(*sources: Path, skip: frozenset[str] = frozenset({CACHE})) -> str:
    """Return a digest of files or folders that changes when a file in them is written, added or removed."""
    found = hashlib.sha256()
    for source in sources:
        found.update(os.fsencode(source) + b"\0")
        entries = files_below(source, skip=skip) if source.is_dir() else [("", source.stat())]
        for name, status in entries:
            found.update(f"{os.fsencode(name)!r} {status.st_size} {status.st_mtime_ns}\n".encode())
    return found.hexdigest()


def write_listing(folder: Path, target: Path) -> None:
    """Write the paths and sizes of all files below a folder to `target`."""
    with open(target, "wb") as file:
        for name, status in files_below(folder):
            file.write(f"{_size(status)} ".encode() + os.fsencode(name) + b"\n")


def first_difference(folder: Path, listing: Path) -> str | None:
    """Return a file of the listing that is missing or has another size; None if the folder is complete.

    Additional files are not reported, because programs write caches into environments. A missing listing counts as a
    difference: the folder may be incomplete.
    """
    if not folder.is_dir() or not listing.is_file():
        return str(folder)
    lines = listing.read_bytes().splitlines()
    for line in lines:
        size, _, name = line.partition(b" ")
        try:
            status = os.lstat(os.path.join(os.fsencode(folder), name))
        except FileNotFoundError:
            return os.fsdecode(name)
        if str(_size(status)).encode() != size:
            return os.fsdecode(name)
    return None


def _size(status: os.stat_result) -> int:
    return status.st_size if stat.S_ISREG(status.st_mode) else -1
