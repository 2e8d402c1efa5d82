"""The base of a config's sections, and checks that several sections use. Each check returns a line per mistake."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar, cast

from hpcdist.errors import shown

#: Ranks of a run, and ranks, threads or cores on one machine: beyond any cluster, and far below what exhausts one.
MAX_RANKS, MAX_PER_NODE = 262_144, 1024
_BOUNDS = {"least": (">=", operator.ge), "above": (">", operator.gt), "most": ("<=", operator.le)}
_CONTROL = re.compile(r"[\x00-\x1f\x7f\x85\u2028\u2029]")


def number(default: Any, *, least: float | None = None, above: float | None = None, most: float | None = None) -> Any:
    """Return the field of a number with bounds; null is within them, NaN is not."""
    return field(default=default, metadata={"least": least, "above": above, "most": most})


@dataclass(frozen=True, kw_only=True)
class ConfigSection:
    """A section of a config. Its construction raises one ValueError with a line per mistake, which begins with the key;
    config/conversion.py adds the section's name.
    """

    def __post_init__(self) -> None:
        problems = []
        for one in fields(self):
            value = getattr(self, one.name)
            for name, (sign, holds) in _BOUNDS.items():
                bound = one.metadata.get(name)
                if value is not None and bound is not None and not holds(value, bound):
                    problems.append(f"{one.name} must be {sign} {bound:g}, got {value}")
        if problems := problems + self.problems():
            raise ValueError("\n".join(problems))

    def problems(self) -> list[str]:
        """Return the mistakes besides numbers beyond their bounds."""
        return []


def variables(section: object, name: str) -> list[str]:
    return [
        f"{name}: {shown(key)} is not a valid variable name: use letters, digits and '_', not starting with a digit"
        for key in getattr(section, name)
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", str(key))
    ]


def flags(section: object, *names: str) -> list[str]:
    """Return the names that are not options of Slurm, which would change the meaning of a script or command."""
    return [
        f"{name}: {shown(key)} is not an option: use its long name without dashes, such as mail-type"
        for name in names
        for key in getattr(section, name)
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]+", str(key))
    ]


def one_line(section: object, *names: str) -> list[str]:
    """Return the texts with a control character; a newline would end a line of the batch script."""
    texts: list[tuple[str, object]] = []
    for name in names:
        value = getattr(section, name)
        if isinstance(value, Mapping):
            texts += [(f"{name}.{key}", text) for key, text in value.items()]
        else:
            texts += [(name, text) for text in (value if isinstance(value, list) else [value])]
    return [
        f"{key} must be one line without control characters, got {shown(str(text))}"
        for key, text in texts
        if _CONTROL.search(str(text))
    ]


S = TypeVar("S")
#: The metadata of a field that holds a path or a list of paths. Loading a config makes them absolute.
IS_PATH = {"is_path": True}


def map_paths(section: S, prefix: str, absolute: Callable[[str, str], str]) -> S:
    """Return a section in which `absolute(key, path)` replaces each path that is not empty."""
    changes: dict[str, str | list[str]] = {}
    for one in fields(cast(Any, section)):
        value = getattr(section, one.name)
        if not one.metadata.get("is_path") or not value:
            continue
        key = f"{prefix}{one.name}"
        changes[one.name] = [absolute(key, path) for path in value] if isinstance(value, list) else absolute(key, value)
    return cast(S, replace(cast(Any, section), **changes))
