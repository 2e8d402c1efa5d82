"""The parameters that a trainer of the user's own declares: `train(ctx, cfg, params: MyParams)` with a dataclass.

Login nodes may have no torch, so before a run starts the dataclass is read from the source of the trainer's module,
without importing it. What cannot be read this way is checked when the ranks import the module.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import enum
import inspect
import json
import math
import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast, get_origin, get_type_hints

from hpcdist.config.schema import Config, describe, unused_sections
from hpcdist.config.schema.conversion import Mistake, convert_section
from hpcdist.config.schema.describe import default_of, documented
from hpcdist.errors import ConfigError, shown


class _Unknown:
    """Default of a field whose value only the import of the module gives."""


class Declared(NamedTuple):
    """A dataclass that was read from source."""

    kind: type
    keys: Mapping[str, tuple[str, str]]  #: annotation and documentation of its own fields


def declared_params(target: str, folder: Path) -> Declared | None:
    """Return the parameters that `package.module:function` declares; None if there are none, or they cannot be read.

    Args:
        folder: where the module is searched first, before `sys.path`.
    """
    module, _, function = target.partition(":")
    try:
        names = _Source(_file(module, [folder, *map(Path, sys.path)]), folder)
        train = next(node for node in names.body if isinstance(node, ast.FunctionDef) and node.name == function)
        declared = names.evaluate(_unquoted((train.args.posonlyargs + train.args.args)[2].annotation))
        return Declared(cast(type, declared), names.keys_of[declared.__name__])
    except Exception:  # whatever an expression of the user's raises; the ranks import the module and report it
        return None


def with_params(config: Config, folder: Path, source: str) -> Config:
    """Return the config with `params` checked, and filled with the defaults that its trainer declares.

    Raises ConfigError with one line for each mistake.
    """
    target = config.trainer.target
    declared = declared_params(target, folder) if ":" in target and not config.trainer.script else None
    if declared is None:
        return config
    filled = build(declared.kind, config.params, source)
    known = dataclasses.asdict(filled, dict_factory=lambda pairs: {k: v for k, v in pairs if v is not _Unknown})
    return dataclasses.replace(config, params=json.loads(json.dumps(known, default=str)))


def describe_trainer(config: Config, folder: Path) -> list[tuple[str, str, Any, str]]:
    """Return the keys that the trainer of a config reads, its own first, like `describe`."""
    target = "" if config.trainer.script else config.trainer.target
    unused, found = unused_sections(target), declared_params(target, folder)
    shared = [row for row in describe() if row[0].partition(".")[0] not in unused]
    if found is None:
        return shared
    own = []
    for field in dataclasses.fields(found.kind):
        default = default_of(field)
        if default is dataclasses.MISSING or default is _Unknown:
            default = "required" if default is dataclasses.MISSING else "computed by the module"
        own.append((f"params.{field.name}", *found.keys.get(field.name, ("", "")), default))
    return [(key, kind, default, text) for key, kind, text, default in own] + [r for r in shared if r[0] != "params"]


def arguments_of(train: Callable[..., Any], params: Mapping[str, Any]) -> list[Any]:
    """Return the third argument for a trainer that declares its parameters, else nothing. Raises ConfigError."""
    third = [one.annotation for one in inspect.signature(train).parameters.values()][2:3]
    kinds = [eval(kind, inspect.unwrap(train).__globals__) if isinstance(kind, str) else kind for kind in third]  # noqa: S307
    return [build(kind, params) for kind in kinds if dataclasses.is_dataclass(kind) and isinstance(kind, type)]


def build(kind: type, values: Mapping[str, Any], source: str = "") -> Any:
    """Return a dataclass with the values of `params`. Raises ConfigError with one line for each mistake."""
    missing = (dataclasses.MISSING, dataclasses.MISSING)
    required = [f.name for f in dataclasses.fields(kind) if f.init and (f.default, f.default_factory) == missing]
    problems = [
        f"params.{name} is missing: {kind.__name__} has no default for it" for name in required if name not in values
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


def _sentence(kind: Any, key: str, value: Any) -> str:
    """Return the line for a key that the dataclass does not have, or for a value of another type."""
    above = "params"
    for name in key.split(".")[1:]:
        if not dataclasses.is_dataclass(kind):
            break  # an entry of a list
        types = get_type_hints(kind)
        if name not in types:
            near = difflib.get_close_matches(name, types, n=1)
            hint = f"did you mean {f'{above}.{near[0]}'!r}?" if near else f"there are {', '.join(types)}"
            return f"{key} is not a key: {hint}"
        kind, above = types[name], f"{above}.{name}"
    expected = kind.__name__ if get_origin(kind) is None else str(kind).replace("typing.", "")
    return f"{above} must be {expected}, got {shown(value)}{'' if above == key else f' for {key}'}"


class _Source(dict[str, Any]):
    """The names of a module, evaluated from its source when they are looked up: types, constants and dataclasses."""

    def __init__(self, path: Path, folder: Path) -> None:
        super().__init__(
            vars(typing) | {kind.__name__: kind for kind in (bool, int, float, str, list, dict, tuple, Path)}
        )
        self.update(typing=typing, dataclasses=dataclasses, field=dataclasses.field, enum=enum, math=math)
        self.body = ast.parse(path.read_bytes()).body
        self.keys_of: dict[str, dict[str, tuple[str, str]]] = {}
        self._path, self._folder = path, folder

    def evaluate(self, node: ast.expr | None) -> Any:
        """Return the value of an expression. Raises any exception."""
        return eval(compile(ast.Expression(cast(ast.expr, node)), str(self._path), "eval"), {"__builtins__": {}}, self)  # noqa: S307

    def __missing__(self, name: str) -> Any:
        for node in self.body:
            if isinstance(node, ast.ClassDef) and node.name == name:
                return self.setdefault(name, self._dataclass(node))
            if isinstance(node, ast.Assign) and any(
                isinstance(one, ast.Name) and one.id == name for one in node.targets
            ):
                return self.evaluate(node.value)
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        own = self._path.parents[node.level - 1] if node.level else None
                        other = _Source(
                            _file(node.module or "__init__", [own] if own else [self._folder, *map(Path, sys.path)]),
                            self._folder,
                        )
                        found = other[alias.name]
                        self.keys_of |= other.keys_of
                        return found
        raise NameError(name)

    def _dataclass(self, node: ast.ClassDef) -> type:
        if not any("dataclass" in ast.unparse(one) for one in node.decorator_list):
            raise NameError(node.name)
        self.keys_of[node.name] = documented(node)
        keys = []
        for one in node.body:
            if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
                kind, default = self._known(_unquoted(one.annotation), Any), self._known(one.value, _Unknown)
                keys.append((one.target.id, kind, *([] if one.value is None else [default])))
        return dataclasses.make_dataclass(node.name, keys, bases=tuple(map(self.evaluate, node.bases)), kw_only=True)

    def _known(self, node: ast.expr | None, otherwise: Any) -> Any:
        """Return the value of an expression, or `otherwise` if only the import of the module gives it."""
        try:
            return self.evaluate(node)
        except Exception:  # of any expression of the user's
            return otherwise


def _unquoted(annotation: ast.expr | None) -> ast.expr | None:
    """Return an annotation, also if the source has it as a string."""
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        return ast.parse(annotation.value, mode="eval").body
    return annotation


def _file(module: str, folders: Sequence[Path]) -> Path:
    """Return the file of a module. Raises StopIteration if no folder has it."""
    stem = module.replace(".", "/")
    return next(path for one in folders for end in (".py", "/__init__.py") if (path := one / (stem + end)).is_file())
