"""The JSON Schema of a config: it is complete, it accepts the shipped configs, and docs/ publishes this version."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from hpcdist.config.describe import describe, json_schema
from hpcdist.config.shipped import shipped_configs

ROOT = Path(__file__).parents[3]
SCHEMA = json_schema()


def properties(schema: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every key that is not a section, with its schema."""
    for name, inner in schema["properties"].items():
        section = next((one for one in [inner, *inner.get("anyOf", ())] if "properties" in one), None)
        if section is None:
            yield prefix + name, inner
        else:
            yield from properties(section, f"{prefix}{name}.")


def accepts(schema: dict[str, Any], value: Any) -> bool:
    """Validate the keywords that the schema uses."""
    if "$ref" in schema:
        return isinstance(value, str) and "${" in value
    if "anyOf" in schema:
        return any(accepts(one, value) for one in schema["anyOf"])
    if "const" in schema or "enum" in schema:
        return value in schema.get("enum", [schema.get("const")])
    kinds = {"string": str, "integer": int, "number": (int, float), "boolean": bool, "null": type(None)}
    kinds |= {"array": list, "object": dict}  # type: ignore[dict-item]
    names = schema.get("type", list(kinds))
    if not any(isinstance(value, kinds[name]) for name in ([names] if isinstance(names, str) else names)):
        return False
    if isinstance(value, dict) and "properties" in schema:
        return all(key in schema["properties"] and accepts(schema["properties"][key], value[key]) for key in value)
    return True


def test_json_schema_has_every_key_with_documentation_and_default() -> None:
    found = dict(properties(SCHEMA))
    rows = {path: row for path, *row in describe() if ".ROLE." not in path}
    assert found.keys() == rows.keys()
    for path, (_, default, documentation) in rows.items():
        assert (found[path]["default"], found[path]["description"]) == (default, documentation)
    assert found["optim.name"]["anyOf"][0] == {"enum": ["adam", "adamw", "sgd"]}


@pytest.mark.parametrize("path", [*shipped_configs().values(), *sorted(ROOT.glob("examples/*/*.yaml"))], ids=str)
def test_json_schema_accepts_shipped_configs_which_refer_to_it(path: Path) -> None:
    text = path.read_text()
    assert accepts(SCHEMA, yaml.safe_load(text))
    modeline, _, target = text.splitlines()[0].partition("$schema=")
    assert modeline == "# yaml-language-server: "
    assert (path.parent / target).resolve() == ROOT / "docs" / "config.schema.json"


@pytest.mark.parametrize(
    ("text", "is_valid"),
    [
        ("{seed: 1, trainer: ddp, preflight: off}", True),
        ("{seed: '${oc.env:SEED}', cluster: {roles: {trainer: {nodes: 2}}}}", True),
        ("{seed: one}", False),
        ("{sed: 1}", False),
        ("{optim: {name: sgdd}}", False),
        ("{trainer: {targt: ddp}}", False),
    ],
)
def test_json_schema_rejects_mistakes(text: str, is_valid: bool) -> None:
    assert accepts(SCHEMA, yaml.safe_load(text)) == is_valid


def test_published_json_schema_is_current() -> None:
    text = json.dumps(SCHEMA, indent=2, ensure_ascii=False) + "\n"
    assert (ROOT / "docs" / "config.schema.json").read_text() == text, (
        "run: hpcdist config --json-schema > docs/config.schema.json"
    )
