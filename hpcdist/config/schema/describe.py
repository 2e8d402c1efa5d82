"""The list of all keys with type, default and documentation, read from the source of the dataclasses."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from hpcdist.config.schema.cluster import RoleRequest
from hpcdist.config.schema.declaration import trainer_sections
from hpcdist.config.schema.run import Config


def describe(section: type = Config, prefix: str = "") -> list[tuple[str, str, Any, str]]:
    """Return every key as (path, type, default, documentation)."""
    # Imported here, because ranks do not need the documentation.
    import ast
    import inspect
    import textwrap

    body = ast.parse(textwrap.dedent(inspect.getsource(section))).body[0]
    assert isinstance(body, ast.ClassDef)
    documentation: dict[str, str] = {}
    annotations: dict[str, str] = {}
    for statement, following in zip(body.body, [*body.body[1:], ast.Pass()], strict=True):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            annotations[statement.target.id] = ast.unparse(statement.annotation)
            if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
                documentation[statement.target.id] = str(following.value.value)
    rows: list[tuple[str, str, Any, str]] = []
    for key in fields(section):
        if section is Config and key.name == "sections":
            for name, own in trainer_sections().items():
                rows += describe(own, f"{name}.")
            continue
        default = key.default if not callable(key.default_factory) else key.default_factory()
        if hasattr(default, "__dataclass_fields__"):
            rows += describe(type(default), f"{prefix}{key.name}.")
            continue
        rows.append((prefix + key.name, annotations[key.name], default, documentation.get(key.name, "")))
        if annotations[key.name] == f"dict[str, {RoleRequest.__name__}]":
            rows += describe(RoleRequest, f"{prefix}{key.name}.ROLE.")
    return rows
