"""Keys that hold paths."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, TypeVar, cast

S = TypeVar("S")
#: The metadata of a field that holds a path or a list of paths. Loading a config makes them absolute.
IS_PATH = {"is_path": True}


def map_paths(section: S, prefix: str, absolute: Callable[[str, str], str]) -> S:
    """Return a section in which `absolute(key, path)` replaces each path that is not empty."""
    changes: dict[str, str | list[str]] = {}
    for field in fields(cast(Any, section)):
        value = getattr(section, field.name)
        if not field.metadata.get("is_path") or not value:
            continue
        key = f"{prefix}{field.name}"
        changes[field.name] = [absolute(key, one) for one in value] if isinstance(value, list) else absolute(key, value)
    return cast(S, replace(cast(Any, section), **changes))
