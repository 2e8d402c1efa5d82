"""The list of all keys with type, default and documentation, read from the source of the dataclasses."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import Field, fields
from typing import Any

from hpcdist.config.schema.cluster import RoleRequest
from hpcdist.config.schema.declaration import trainer_sections
from hpcdist.config.schema.run import Config


def all_keys(section: type = Config, prefix: str = "") -> Iterator[tuple[str, type, Field[Any]]]:
    """Yield every key as (path, dataclass that declares it, its field), without reading any source."""
    for key in fields(section):
        if section is Config and key.name == "sections":
            for name, own in trainer_sections().items():
                yield from all_keys(own, f"{name}.")
            continue
        if section is Config and key.name == "secret_texts":
            continue
        nested = default_of(key)
        if hasattr(nested, "__dataclass_fields__"):
            yield from all_keys(type(nested), f"{prefix}{key.name}.")
            continue
        yield prefix + key.name, section, key
        if key.type == f"dict[str, {RoleRequest.__name__}]":
            yield from all_keys(RoleRequest, f"{prefix}{key.name}.ROLE.")


def default_of(key: Field[Any]) -> Any:
    """Return the default of a key."""
    return key.default_factory() if callable(key.default_factory) else key.default


def describe() -> list[tuple[str, str, Any, str]]:
    """Return every key as (path, type, default, documentation)."""
    sources: dict[type, dict[str, tuple[str, str]]] = {}
    rows: list[tuple[str, str, Any, str]] = []
    for path, section, key in all_keys():
        if section not in sources:
            sources[section] = _read_source(section)
        kind, documentation = sources[section][key.name]
        rows.append((path, kind, default_of(key), documentation))
    return rows


def _read_source(section: type) -> dict[str, tuple[str, str]]:
    """Return annotation and docstring of every field of a dataclass, by its name."""
    body = ast.parse(textwrap.dedent(inspect.getsource(section))).body[0]
    assert isinstance(body, ast.ClassDef)
    return documented(body)


def documented(body: ast.ClassDef) -> dict[str, tuple[str, str]]:
    """Return annotation and docstring of every field in the source of a dataclass, by its name."""
    found: dict[str, tuple[str, str]] = {}
    for statement, following in zip(body.body, [*body.body[1:], ast.Pass()], strict=True):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            is_text = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
            text = str(following.value.value) if is_text else ""  # type: ignore[attr-defined]
            found[statement.target.id] = ast.unparse(statement.annotation), text
    return found
