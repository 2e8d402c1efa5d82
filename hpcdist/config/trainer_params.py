"""The parameters that a trainer of the user's own declares: `train(ctx, cfg, params: MyParams)` with a dataclass.

Login nodes may have no torch, so before a run starts only the fields of the dataclass are executed, not its module.
A dataclass that needs more is checked when the ranks import the module.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast, get_origin, get_type_hints

from hpcdist.config.schema import Config, describe, unused_sections
from hpcdist.config.schema.conversion import Mistake, convert_section
from hpcdist.config.schema.describe import default_of, documented
from hpcdist.errors import ConfigError, shown


def declared_params(target: str, folder: Path) -> type | None:
    """Return the dataclass that `package.module:function` declares; None if it declares none, or it cannot be read.

    Args:
        folder: where the module is searched first, before `sys.path`.
    """
    module, _, function = target.partition(":")
    try:
        path = _file(module, [folder, *map(Path, sys.path)])
        trains = [node for node in ast.parse(path.read_bytes()).body if isinstance(node, ast.FunctionDef)]
        arguments = next(node.args for node in trains if node.name == function)
        name = ast.unparse(cast(ast.expr, (arguments.posonlyargs + arguments.args)[2].annotation)).strip("'")
        found = _names(path, folder, {name})[name]
    except Exception:  # the ranks import the module, and report what is wrong with it
        return None
    return found if dataclasses.is_dataclass(found) and isinstance(found, type) else None


def _names(path: Path, folder: Path, wanted: set[str], seen: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Return the constants and dataclasses of a module, without calls, methods and imports of other packages."""
    if path in seen:
        raise ImportError(path)
    names: dict[str, Any] = {}
    body = ast.parse(path.read_bytes()).body
    for node in body:
        if isinstance(node, ast.ClassDef):
            node.body = [one for one in node.body if isinstance(one, ast.AnnAssign | ast.Expr)] or [ast.Pass()]
            wanted = wanted | {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}
    for node in body:
        with suppress(Exception):  # what needs a name that is left out here
            if isinstance(node, ast.ImportFrom) and node.module not in sys.stdlib_module_names:
                # Of the module's own package, or from the folder of the user's code.
                other = _file(node.module or "", [path.parents[node.level - 1] if node.level else folder])
                for alias in node.names:
                    if (name := alias.asname or alias.name) in wanted:
                        names[name] = _names(other, folder, {alias.name}, (*seen, path))[alias.name]
            elif _is_executed(node):
                exec(compile(ast.Module([node], []), str(path), "exec", dont_inherit=True), names)  # noqa: S102
                if isinstance(node, ast.ClassDef):
                    names[node.name].__source__ = node
    return names


def _is_executed(node: ast.stmt) -> bool:
    if isinstance(node, ast.ClassDef):
        return any("dataclass" in ast.unparse(one) for one in node.decorator_list)
    if isinstance(node, ast.Import):
        return all(alias.name.partition(".")[0] in sys.stdlib_module_names for alias in node.names)
    is_constant = isinstance(node, ast.Assign) and not any(isinstance(one, ast.Call) for one in ast.walk(node))
    return is_constant or isinstance(node, ast.ImportFrom)


def _file(module: str, folders: Sequence[Path]) -> Path:
    """Return the file of a module. Raises StopIteration if no folder has it."""
    stem = module.replace(".", "/")
    return next(path for one in folders for end in (".py", "/__init__.py") if (path := one / (stem + end)).is_file())


def with_params(config: Config, folder: Path, source: str) -> Config:
    """Return the config with `params` checked, and filled with the defaults that its trainer declares.

    Raises ConfigError with one line for each mistake.
    """
    target = config.trainer.target
    kind = declared_params(target, folder) if ":" in target and not config.trainer.script else None
    if kind is None:
        return config
    values = dataclasses.asdict(build(kind, config.params, source))
    return dataclasses.replace(config, params=json.loads(json.dumps(values, default=str)))


def describe_trainer(config: Config, folder: Path) -> list[tuple[str, str, Any, str]]:
    """Return the keys that the trainer of a config reads, its own first, like `describe`."""
    target = "" if config.trainer.script else config.trainer.target
    unused, kind = unused_sections(target), declared_params(target, folder)
    shared = [row for row in describe() if row[0].partition(".")[0] not in unused]
    if kind is None:
        return shared
    texts, own = documented(vars(kind)["__source__"]), []
    for field in dataclasses.fields(kind):
        default = default_of(field)
        shown_default = "required" if default is dataclasses.MISSING else default
        declared, text = texts.get(field.name, ("", ""))
        own.append((f"params.{field.name}", declared, shown_default, text))
    return own + [row for row in shared if row[0] != "params"]


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
