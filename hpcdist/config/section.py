"""The base of a config's sections, and checks that several sections use. Each check returns a line per mistake."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar, cast
from urllib.parse import urlsplit

from hpcdist.errors import shown

#: Limit of the ranks of a run. No cluster has as many GPUs; a mistyped number fails before it exhausts the memory.
MAX_RANKS = 262_144
#: Limit of the ranks, threads or GPUs on one machine, for the same reason.
MAX_PER_NODE = 1024
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
        for key in fields(self):
            value = getattr(self, key.name)
            if value is None:
                continue
            for name, (sign, holds) in _BOUNDS.items():
                bound = key.metadata.get(name)
                if bound is not None and not holds(value, bound):
                    problems.append(f"{key.name} must be {sign} {bound:g}, got {value}")
        problems += self.problems()
        if problems:
            raise ValueError("\n".join(problems))

    def problems(self) -> list[str]:
        """Return the mistakes besides numbers beyond their bounds."""
        return []


def variables(section: object, name: str) -> list[str]:
    """Return a mistake for each key of the mapping `name` that is not a valid name of an environment variable."""
    return [
        f"{name}: {shown(key)} is not a valid variable name: use letters, digits and '_', not starting with a digit"
        for key in getattr(section, name)
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", str(key))
    ]


def flags(section: object, *names: str) -> list[str]:
    """Return a mistake for each key of the mappings `names` that is not the name of an option of Slurm.

    Other text would change the meaning of a script or command.
    """
    problems = []
    for name in names:
        for key in getattr(section, name):
            if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]+", str(key)):
                problems.append(
                    f"{name}: {shown(key)} is not an option: use its long name without dashes, such as mail-type"
                )
    return problems


def one_line(section: object, *names: str) -> list[str]:
    """Return a mistake for each text with a control character; a newline would end a line of the batch script.

    Args:
        names: keys of the section that hold a text, a list or a mapping of texts.
    """
    texts: list[tuple[str, object]] = []
    for name in names:
        value = getattr(section, name)
        if isinstance(value, Mapping):
            texts += [(f"{name}.{key}", text) for key, text in value.items()]
        elif isinstance(value, list):
            texts += [(name, text) for text in value]
        else:
            texts.append((name, value))
    problems = []
    for key, text in texts:
        if _CONTROL.search(str(text)):
            problems.append(f"{key} must be one line without control characters, got {shown(str(text))}")
    return problems


def address_problem(address: str) -> str:
    """Return the mistake in an address that begins with http:// or https://, for use after its key; empty if valid.

    The text does not contain the address, which may hold a password.
    """
    try:
        parts = urlsplit(address)
        has_host = bool(parts.hostname)
        has_port = parts.port != 0  # raises ValueError for one out of range
    except ValueError:
        has_host = has_port = False
    if has_host and has_port:
        return ""
    return "has no valid host and port: expected such as http://host:5000"


S = TypeVar("S")
#: The metadata of a field that holds a path or a list of paths. Loading a config makes them absolute.
IS_PATH = {"is_path": True}


def map_paths(section: S, prefix: str, absolute: Callable[[str, str], str]) -> S:
    """Return a section in which `absolute(key, path)` replaces each path that is not empty."""
    changes: dict[str, str | list[str]] = {}
    for field_ in fields(cast(Any, section)):
        value = getattr(section, field_.name)
        if not field_.metadata.get("is_path") or not value:
            continue
        key = f"{prefix}{field_.name}"
        if isinstance(value, list):
            changes[field_.name] = [absolute(key, path) for path in value]
        else:
            changes[field_.name] = absolute(key, value)
    return cast(S, replace(cast(Any, section), **changes))
