"""Documentation of all keys of a config, with type and default: as a list, and as the JSON Schema for editors."""

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, cast, get_args, get_origin, get_type_hints

from hpcdist.config.cluster_schema import RoleRequest
from hpcdist.config.conversion import default_of
from hpcdist.config.document import NODE_RANGE, SHORT_FORMS, TYPED_GPUS
from hpcdist.config.schema import NO_KEYS, Config, is_unused
from hpcdist.config.trainer_declaration import trainer_sections
from hpcdist.config.written import declaration


def all_keys(section: type = Config, prefix: str = "") -> Iterator[tuple[str, type, Field[Any]]]:
    """Yield every key as (path, dataclass that declares it, its field), without reading any source."""
    for key in fields(section):
        if section is Config and key.name == "sections":
            for name, trainer_section in trainer_sections().items():
                yield from all_keys(trainer_section, f"{name}.")
            continue
        if key.name in NO_KEYS:
            continue
        nested = default_of(key)
        if hasattr(nested, "__dataclass_fields__"):
            yield from all_keys(type(nested), f"{prefix}{key.name}.")
            continue
        yield prefix + key.name, section, key
        if key.type == f"dict[str, {RoleRequest.__name__}]":
            yield from all_keys(RoleRequest, f"{prefix}{key.name}.ROLE.")


def describe() -> list[tuple[str, str, Any, str]]:
    """Return dotted key, type, default and documentation of every key."""
    sources: dict[type, dict[str, tuple[str, str]]] = {}
    rows: list[tuple[str, str, Any, str]] = []
    for path, section, key in all_keys():
        if section not in sources:
            body = ast.parse(textwrap.dedent(inspect.getsource(section))).body[0]
            assert isinstance(body, ast.ClassDef)
            sources[section] = documented(body)
        kind, documentation = sources[section][key.name]
        rows.append((path, declared_type(section, kind), default_of(key), documentation))
    return rows


def declared_type(section: type, kind: str) -> str:
    """Return the type of a key as its section declares it, with the choices in place of the name of a Literal."""
    module = sys.modules[section.__module__]

    def choices(name: re.Match[str]) -> str:
        value = getattr(module, name[0], None)
        if get_origin(value) is Literal:
            return f"Literal{list(get_args(value))}"
        return name[0]

    return re.sub(r"\b[A-Z]\w*", choices, kind)


def documented(body: ast.ClassDef) -> dict[str, tuple[str, str]]:
    """Return type and documentation of each field of a dataclass; the documentation is the string under the field."""
    rows: dict[str, tuple[str, str]] = {}
    for statement, following in zip(body.body, [*body.body[1:], ast.Pass()], strict=True):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            text = ""
            if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
                text = str(following.value.value)
            rows[statement.target.id] = ast.unparse(statement.annotation), text
    return rows


def describe_trainer(config: Config, folder: Path) -> list[tuple[str, str, Any, str]]:
    """Return the keys that the trainer of a config reads, its own first, like `describe`."""
    shared = describe()
    if not config.trainer.script:
        shared = [row for row in shared if not is_unused(config.trainer.target, row[0])]
    declared = declaration(config.trainer, folder)
    if declared is None:
        return shared
    params, source = declared
    texts = documented(source)
    rows = []
    for key in fields(cast(Any, params)):
        default = default_of(key)
        if default is MISSING:
            default = "required"
        kind, text = texts[key.name]
        rows.append((f"params.{key.name}", kind, default, text))
    return rows + [row for row in shared if row[0] != "params"]


# The JSON Schema of a config file, with which editors complete and check keys (`hpcdist config --json-schema`).

_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", NoneType: "null"}
#: JSON Schema's keyword → name of the bound in the metadata of a field (`section.number`).
_BOUNDS = {"minimum": "least", "exclusiveMinimum": "above", "maximum": "most"}
_INTERPOLATION = {"$ref": "#/$defs/interpolation"}


def json_schema() -> dict[str, Any]:
    """Return the schema as plain containers, with documentation, types, defaults and allowed values of every key."""
    documentation = {path: text for path, _, _, text in describe()}
    schema = _section(Config, "", documentation)
    schema["properties"].pop("sections")
    for name, section in trainer_sections().items():
        schema["properties"][name] = _section(section, f"{name}.", documentation)
    for name, key in SHORT_FORMS.items():
        full = schema["properties"][name]
        short = dict(full["properties"][key])
        if "off" in short.get("anyOf", [{}])[0].get("enum", ()):
            short["anyOf"] = [*short["anyOf"], {"type": "boolean"}]  # YAML 1.1 reads `off` and `on` so
        schema["properties"][name] = {"description": full["description"], "anyOf": [short, full]}
    cluster = schema["properties"]["cluster"]["properties"]
    cluster["nodes"]["anyOf"].append({"type": "string", "pattern": NODE_RANGE})
    cluster["gpus_per_node"]["anyOf"].append({"type": "string", "pattern": TYPED_GPUS})
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "hpcdist config",
        **schema,
        "$defs": {"interpolation": {"type": "string", "pattern": r"\$\{"}},
    }


def _section(kind: type[Any], prefix: str, documentation: dict[str, str]) -> dict[str, Any]:
    types = get_type_hints(kind)
    keys = [key for key in fields(kind) if key.name not in NO_KEYS]
    properties: dict[str, Any] = {}
    for key in keys:
        declared = types[key.name]
        path = prefix + key.name
        if is_dataclass(declared):
            properties[key.name] = {"description": "", **_section(cast(type, declared), f"{path}.", documentation)}
            continue
        schema: dict[str, Any] = {"description": documentation.get(path, ""), "default": default_of(key)}
        for keyword, bound in _BOUNDS.items():
            if key.metadata.get(bound) is not None:
                schema[keyword] = key.metadata[bound]
        properties[key.name] = schema | _value(declared, path, documentation)
    section = {"type": "object", "additionalProperties": False, "properties": properties}
    description = " ".join((kind.__doc__ or "").split())
    # The generated signature of a dataclass without a docstring documents nothing.
    if description.startswith(f"{kind.__name__}("):
        return section
    return {"description": description, **section}


def _value(declared: Any, path: str, documentation: dict[str, str]) -> dict[str, Any]:
    origin, arguments = get_origin(declared), get_args(declared)
    if declared is Any:
        return {}
    if is_dataclass(declared):
        return _section(cast(type, declared), f"{path}.ROLE.", documentation)
    schema: dict[str, Any]
    if origin is list:
        schema = {"type": "array", "items": _value(arguments[0], path, documentation)}
    elif origin is dict:
        schema = {"type": "object", "additionalProperties": _value(arguments[1], path, documentation)}
    elif origin is Literal:
        schema = {"enum": list(arguments)}
    elif origin is UnionType:
        names = [_TYPES[kind] for kind in arguments]
        if str in arguments:
            return _text_schema(names)
        schema = {"type": names}
    elif declared is str:
        return _text_schema(["string"])
    else:
        schema = {"type": _TYPES[declared]}
    return {"anyOf": [schema, _INTERPOLATION]}


def _text_schema(names: list[str]) -> dict[str, Any]:
    """Return the schema of a key that takes a text: a number or boolean is converted to text."""
    return {"type": sorted({*names, "string", "number", "boolean"})}
