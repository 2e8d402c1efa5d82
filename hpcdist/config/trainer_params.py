"""The parameters that a trainer of the user's own declares: `train(ctx, cfg, params: MyParams)` with a dataclass.

Login nodes may have no torch, so before a run starts only the fields of the dataclass are executed, not its module.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import sys
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast, get_origin, get_type_hints

from hpcdist.config.schema import Config, describe, unused_sections
from hpcdist.config.schema.conversion import Mistake, convert_section
from hpcdist.config.schema.describe import default_of, documented
from hpcdist.config.schema.training import TrainerConfig
from hpcdist.errors import ConfigError, shown, suggestion

#: What the fields of a dataclass may use, besides builtins.
_NAMES = {
    "Any": Any, "Literal": typing.Literal, "Optional": typing.Optional, "Union": typing.Union, "typing": typing,
    "dataclass": dataclasses.dataclass, "field": dataclasses.field, "dataclasses": dataclasses, "Path": Path,
}  # fmt: skip


def declaration(trainer: TrainerConfig, folder: Path) -> tuple[type, ast.ClassDef] | None:
    """Return the dataclass that a trainer declares, without its methods, and its source.

    None if there is none in the module of the trainer, or if it needs more than `_NAMES`: only the ranks check it then.

    Args:
        folder: where the module is searched first, before `sys.path`.
    """
    module, _, function = ("" if trainer.script else trainer.target).partition(":")
    stem = module.replace(".", "/")
    files = (one / (stem + end) for one in (folder, *map(Path, sys.path)) for end in (".py", "/__init__.py"))
    try:
        body = ast.parse(next(path for path in files if path.is_file()).read_bytes()).body
        arguments = next(node.args for node in body if isinstance(node, ast.FunctionDef) and node.name == function)
        name = ast.unparse(cast(ast.expr, (arguments.posonlyargs + arguments.args)[2].annotation)).strip("'")
        source = next(node for node in body if isinstance(node, ast.ClassDef) and node.name == name)
        source.body = [node for node in source.body if isinstance(node, ast.AnnAssign | ast.Expr)]
        names = dict(_NAMES)
        exec(compile(ast.Module([source], []), module, "exec", dont_inherit=True), names)  # noqa: S102
        kind = cast(type, names[name])
        get_type_hints(kind)
    except Exception:  # the ranks import the module, and report what is wrong with it
        return None
    return (kind, source) if dataclasses.is_dataclass(kind) else None


def with_params(config: Config, folder: Path, source: str) -> Config:
    """Return the config with `params` checked, and filled with the defaults that its trainer declares.

    Raises ConfigError with one line for each mistake.
    """
    if (found := declaration(config.trainer, folder)) is None:
        return config
    values = dataclasses.asdict(build(found[0], config.params, source))
    return dataclasses.replace(config, params=json.loads(json.dumps(values, default=str)))


def describe_trainer(config: Config, folder: Path) -> list[tuple[str, str, Any, str]]:
    """Return the keys that the trainer of a config reads, its own first, like `describe`."""
    unused = unused_sections("" if config.trainer.script else config.trainer.target)
    shared = [row for row in describe() if row[0].partition(".")[0] not in unused]
    if (found := declaration(config.trainer, folder)) is None:
        return shared
    texts, own = documented(found[1]), []
    for field in dataclasses.fields(cast(Any, found[0])):
        default = default_of(field)
        kind, text = texts[field.name]
        own.append((f"params.{field.name}", kind, "required" if default is dataclasses.MISSING else default, text))
    return own + [row for row in shared if row[0] != "params"]


def arguments_of(train: Callable[..., Any], params: Mapping[str, Any]) -> list[Any]:
    """Return the third argument for a trainer that declares its parameters, else nothing. Raises ConfigError."""
    third = [one.annotation for one in inspect.signature(train).parameters.values()][2:3]
    kinds = [eval(kind, inspect.unwrap(train).__globals__) if isinstance(kind, str) else kind for kind in third]  # noqa: S307
    return [build(kind, params) for kind in kinds if dataclasses.is_dataclass(kind) and isinstance(kind, type)]


def build(kind: type, values: Mapping[str, Any], source: str = "") -> Any:
    """Return a dataclass with the values of `params`. Raises ConfigError with one line for each mistake."""
    problems = [
        f"params.{one.name} is missing: {kind.__name__} has no default for it"
        for one in dataclasses.fields(cast(Any, kind))
        if one.init and one.name not in values and default_of(one) is dataclasses.MISSING
    ]
    made: Any = None
    mistakes: list[Mistake] = []
    try:
        made = convert_section(kind, values, "params", mistakes)
    except TypeError:  # a required key is missing or has a mistake
        if not problems and not mistakes:
            raise
    problems += [one if isinstance(one, str) else _sentence(kind, *one) for one in mistakes]
    if problems:
        raise ConfigError(problems, source)
    return made


def _sentence(kind: type, key: str, value: Any) -> str:
    """Return the line for a key that the dataclass does not have, or for a value of another type."""
    types = get_type_hints(kind)
    name = key.split(".")[1]
    if name not in types:
        return f"params has no key {shown(name)}: {suggestion(name, types, 'there are ' + ', '.join(types))}"
    declared = types[name]
    expected = declared.__name__ if get_origin(declared) is None else str(declared).replace("typing.", "")
    inner = "" if key == f"params.{name}" else f" for {key}"
    return f"params.{name} must be {expected}, got {shown(value)}{inner}"
