"""Generators of the config reference."""

from __future__ import annotations

import json
from collections import defaultdict

from generators.tables import ROOT, cell, code, table
from hpcdist.config.describe import describe, json_schema

SCHEMA = ROOT / "docs" / "config.schema.json"


def config_keys() -> str:
    """Return one table of keys per section.

    Raises:
        RuntimeError: docs/config.schema.json, which is published beside the page, is missing or out of date.
    """
    if not SCHEMA.exists() or json.loads(SCHEMA.read_text()) != json_schema():
        raise RuntimeError(f"{SCHEMA} is missing or stale: hpcdist config --json-schema > {SCHEMA.relative_to(ROOT)}")
    sections: dict[str, list[tuple[str, ...]]] = defaultdict(list)
    for path, kind, default, text in describe():
        section = f"`{path.partition('.')[0]}`" if "." in path else "Top level"
        sections[section].append((code(path), code(kind), _default(default), cell(text)))
    head = ("key", "type", "default", "meaning")
    return "\n\n".join(f"## {title}\n\n{table(head, rows)}" for title, rows in sections.items())


def _default(value: object) -> str:
    """Return a default as YAML."""
    if value == () or value == {} or value == []:
        return "empty"
    return code(json.dumps(value) if isinstance(value, bool | None) or value == "" else value)


def shipped_configs() -> str:
    """Return the shipped configs with their first comment."""
    rows = []
    for path in sorted((ROOT / "configs").glob("*.yaml")):
        comments = [line for line in path.read_text().splitlines() if line.startswith("# ") and "$schema" not in line]
        rows.append((code(path.stem), cell(comments[0].removeprefix("# "))))
    return table(("config", "content"), rows)
