"""Paths in the output of commands."""

from __future__ import annotations

import os
from pathlib import Path


def short_path(path: str | Path) -> str:
    """Return a path relative to the current folder if it is below it, else the absolute path."""
    full = os.path.abspath(path)
    try:
        return os.path.relpath(full) if Path(full).is_relative_to(os.getcwd()) else full
    except OSError:  # the current folder was deleted
        return full
