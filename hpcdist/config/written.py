"""The config in a run folder, with redacted secrets; and the parameters that a user's trainer declares.

A run folder's config is read without OmegaConf, because its import takes longer than that of all other modules of a
rank.
"""

import ast
import builtins
import dataclasses
import inspect
import json
import re
import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast, get_origin, get_type_hints

import hpcdist
from hpcdist.config import document
from hpcdist.config.conversion import (
    Mistake,
    as_written,
    convert,
    convert_section,
    default_of,
    reads_as,
    texts_of,
    with_texts,
)
from hpcdist.config.redaction import REDACTED, REDACTED_NUMBER, hidden_texts, is_redacted, redact_text, redact_tree
from hpcdist.config.removed import without_removed_defaults
from hpcdist.config.schema import Config, ParamTexts, SecretTexts, to_tree
from hpcdist.config.trainer_declaration import Trainer, find_trainer
from hpcdist.config.training_schema import TrainerConfig
from hpcdist.errors import ConfigError, shown, suggestion
from hpcdist.host.json_files import stamped, unstamped

S = TypeVar("S")
#: Limit of a run folder's config. It is larger than that of a file that a user writes, because interpolations were
#: resolved and defaults added.
_MAX_BYTES = 16 << 20


def to_yaml(config: Config) -> str:
    """Return the YAML of a config, with `***` for secrets."""
    texts = {("params", *path): text for path, text in config.param_texts.items()}
    return document.dump(redacted(config), texts)


def run_yaml(config: Config) -> str:
    """Return the content of a run folder's config: the format number, then the result of `to_yaml`."""
    return document.dump(stamped({})) + to_yaml(config)


def stored_tree(path: Path, section: str = "") -> dict[str, Any]:
    """Return a run folder's config as plain containers, without its format number and without checks of its keys.

    Args:
        section: read only this section, which is faster; the whole file is read if it has another layout than hpcdist
            writes.
    """
    tree, _ = stored_document(path, section)
    return tree


def stored_document(path: Path, section: str = "") -> tuple[dict[str, Any], ParamTexts]:
    """Return the result of `stored_tree`, and the texts of the values of `params`."""
    try:
        text = document.read_text(path, max_bytes=_MAX_BYTES)
        if section and f"\n{section}:\n" in text:
            parts = re.split(r"^(?=\S)", text, flags=re.MULTILINE)
            text = "".join(part for part in parts if part.startswith(("format:", f"{section}:")))
        tree = document.parse(text)
    except ValueError as error:
        raise ConfigError(f"cannot be read: {str(error)[:200]}", source=str(path)) from error
    if not isinstance(tree, dict):
        raise ConfigError(f"must hold keys and values, holds a {type(tree).__name__}", source=str(path))
    texts = document.parse_texts(text)
    return unstamped(as_written(tree, texts), path), dict(texts_of(tree.get("params"), texts.get("params")))


@dataclass(frozen=True, kw_only=True)
class StoredConfig:
    """The config of a run as its folder stores it, with `***` for secrets."""

    #: The config, with defaults for keys that are missing or cannot be read (`convert`).
    config: Config = field(default_factory=Config)
    values: Mapping[str, Any] = field(default_factory=dict)  #: the content of the file, by dotted key
    problem: str = ""  #: the keys that cannot be read, or why the file cannot be read; empty without a problem

    @property
    def trainer(self) -> Trainer | None:
        """The declaration of its shipped trainer; None for code of the user's own, and without a readable config."""
        if not self.values or self.config.trainer.script:
            return None
        return find_trainer(self.config.trainer.target)


def read_section(path: Path, name: str, kind: type[S]) -> S:
    """Return a section of a run folder's config, in a tenth of the time that `read_stored` takes."""
    section = stored_tree(path, name).get(name)
    if not isinstance(section, Mapping):
        section = {}
    return convert_section(kind, section, name, [])


def read_stored(path: Path) -> StoredConfig:
    """Return a run folder's config, also if it has keys or values that this version of hpcdist does not know."""
    tree = stored_tree(path)
    document.expand_short_forms(tree)
    config, mistakes = convert(without_removed_defaults(tree))
    unknown = []
    for mistake in mistakes:
        if isinstance(mistake, str):
            unknown.append(mistake)
            continue
        key, value = mistake
        if not is_redacted(value):
            unknown.append(key)
    problem = ""
    if unknown:
        known_by = f"hpcdist {hpcdist.__version__}"
        problem = f"{path.name} has keys or values that {known_by} does not know: {', '.join(unknown)}"[:400]
    return StoredConfig(config=config, values=document.flat(tree), problem=problem)


def redacted(config: Config) -> dict[str, Any]:
    """Return the config as plain containers, with `***` for each secret, by its key, its form or its origin."""
    return redact_tree(to_tree(config), texts=config.secret_texts)


def flat_values(config: Config) -> dict[str, Any]:
    """Return the values of a config by dotted key, with `***` for secrets."""
    return document.flat(redacted(config))


def redacted_argument(text: str) -> str:
    """Return a command-line argument, with its value replaced if it is an override that sets a secret."""
    key, equals, raw = text.partition("=")
    if equals and not key.startswith("-"):
        tree: dict[str, Any] = {}
        document.insert(tree, key.split("."), document.parse_value(raw))
        if redact_tree(tree) != tree:
            text = f"{key}={REDACTED}"
    return redact_text(text)


def secret_keys(config: Config) -> list[tuple[str, ...]]:
    """Return the keys with values that the run folder's config redacts; each as the names that lead to it."""
    stored = dict(document.leaves(redacted(config)))
    return [path for path, value in document.leaves(to_tree(config)) if stored[path] != value]


def secrets_of(config: Config) -> dict[str, str]:
    """Return the environment variables from which `load_run_config` restores the redacted values.

    The variable of `notify.webhook` is HPCDIST_NOTIFY_WEBHOOK, for example.
    """
    tree = to_tree(config)
    values = dict(document.leaves(tree))
    variables = {}
    for path in secret_keys(config):
        value = values[path]
        if not isinstance(value, str):
            value = json.dumps(value)
        variables[_variable(path, tree)] = value
    return variables


def restore_secrets(
    tree: dict[str, Any], env: Mapping[str, str], *, without: set[str], require: bool, source: str
) -> SecretTexts:
    """Replace the redacted values of a config by the values of environment variables. Returns `Config.secret_texts`.

    Args:
        without: dotted keys that overrides set anyway.
        require: whether a missing variable is an error; otherwise the value stays `***`.
    """
    problems = []
    restored = {}
    for path, redacted_value in list(document.leaves(tree)):
        key = ".".join(path)
        name = _variable(path, tree)
        if not is_redacted(redacted_value) or key in without:
            continue
        if name in env:
            value: Any = env[name]
            if not isinstance(redacted_value, str) or redacted_value == REDACTED_NUMBER:
                try:
                    value = json.loads(value)  # as `secrets_of` writes it
                except ValueError:
                    raise ConfigError(f"{name} in the environment must hold JSON, such as 3 or [1, 2]") from None
            document.insert(tree, path, value)
            restored[path] = redacted_value, value
        elif require:
            problems.append(f"{key} was redacted when the run was written: set {name} in the environment")
    if problems:
        raise ConfigError(*problems, source=source)
    redacted_again = dict(document.leaves(redact_tree(tree)))
    secret_texts: SecretTexts = {}
    for path, (redacted_value, value) in restored.items():
        if redacted_again.get(path) != redacted_value:  # not a secret by its key or form
            secret_texts[path] = hidden_texts(redacted_value, value)
    return secret_texts


def _variable(path: Sequence[str], tree: Mapping[str, Any]) -> str:
    """Return the name of the environment variable that holds the value of a redacted key.

    A key of `launch.env` or `cluster.env` is itself the name of a variable. If both contain it, the variable holds the
    value of `launch.env`, because the ranks get this value.
    """
    if path[:2] == ("launch", "env"):
        return path[-1]
    launch = tree.get("launch") or {}
    if path[:2] == ("cluster", "env") and path[-1] not in (launch.get("env") or {}):
        return path[-1]
    return re.sub(r"\W", "_", "_".join(("hpcdist", *path))).upper()


# A trainer of the user's own may declare its parameters: `train(ctx, cfg, params: MyParams)` with a dataclass. Before a
# run starts, this dataclass is read without importing the trainer's module: login nodes may have no torch, and `config`
# and `--dry-run` must not run somebody's code. Only the statement of the dataclass is executed, without its methods,
# and only if it consists of values and types (`_is_plain`).

_VALUES = (bool, bytes, dict, float, frozenset, int, list, object, set, str, tuple)
#: The names that the fields of a dataclass may use.
_NAMES = {
    "Any": Any, "Literal": typing.Literal, "Optional": typing.Optional, "Union": typing.Union, "typing": typing,
    "dataclass": dataclasses.dataclass, "field": dataclasses.field, "dataclasses": dataclasses, "Path": Path,
    "__builtins__": {"__build_class__": builtins.__build_class__, **{kind.__name__: kind for kind in _VALUES}},
    "__name__": "params",
}  # fmt: skip
#: The syntax of values and types; its evaluation has no effects. Calls and attributes: see `_is_plain`.
_PLAIN = (
    *(ast.AnnAssign, ast.BinOp, ast.ClassDef, ast.Constant, ast.Dict, ast.Expr, ast.Lambda, ast.List, ast.Name),
    *(ast.Set, ast.Subscript, ast.Tuple, ast.UnaryOp, ast.arguments, ast.keyword),
    *(ast.expr_context, ast.operator, ast.unaryop),
)
#: Functions that may be called.
_CALLED = {"Path", "dataclass", "dataclasses.dataclass", "dataclasses.field", "field", *(k.__name__ for k in _VALUES)}


def _is_plain(source: ast.AST) -> bool:
    """Return whether the statement of a dataclass consists only of values, types and calls of `_CALLED`."""
    for node in ast.walk(source):
        if isinstance(node, ast.Call):
            if ast.unparse(node.func) not in _CALLED:
                return False
        elif isinstance(node, ast.Attribute):
            if not (isinstance(node.value, ast.Name) and node.value.id in ("typing", "dataclasses")):
                return False
        elif not isinstance(node, _PLAIN) or (isinstance(node, ast.AnnAssign) and _is_quoted(node.annotation)):
            return False
    return True


def _is_quoted(annotation: ast.AST) -> bool:
    """Return whether a type, or a part of it, is in quotes: `get_type_hints` would evaluate their content."""
    if isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) in ("Literal", "typing.Literal"):
        return False
    if isinstance(annotation, ast.Constant):
        return isinstance(annotation.value, str)
    return any(map(_is_quoted, ast.iter_child_nodes(annotation)))


def declaration(trainer: TrainerConfig, folder: Path) -> tuple[type, ast.ClassDef] | None:
    """Return the dataclass that a trainer declares, without its methods, and its statement.

    None if the trainer declares no dataclass, if one needs more than values and the types in `_NAMES`, or if the module
    cannot be read: the ranks import the module, and report what is wrong with it.

    Args:
        folder: where the module of the trainer is searched first, before `sys.path`.
    """
    if trainer.script:
        return None
    module, _, function = trainer.target.partition(":")
    try:
        body = ast.parse(_module_file(module, folder).read_bytes()).body
        arguments = next(node.args for node in body if isinstance(node, ast.FunctionDef) and node.name == function)
        third = (arguments.posonlyargs + arguments.args)[2]
        name = ast.unparse(cast(ast.expr, third.annotation)).strip("'")  # the annotation may be in quotes
        statement = next(node for node in body if isinstance(node, ast.ClassDef) and node.name == name)
        # Only fields and docstrings, without methods.
        statement.body = [node for node in statement.body if isinstance(node, ast.AnnAssign | ast.Expr)]
        if not _is_plain(statement):
            return None
        names = dict(_NAMES)
        exec(compile(ast.Module([statement], []), module, "exec", dont_inherit=True), names)  # noqa: S102
        kind = cast(type, names[name])
        get_type_hints(kind)  # fails if a type is unknown
    except Exception:  # no such module, function, argument or dataclass
        return None
    if not dataclasses.is_dataclass(kind):
        return None
    return kind, statement


def _module_file(module: str, folder: Path) -> Path:
    """Return the source file of a module in a folder, else in `sys.path`. Raises FileNotFoundError without one."""
    stem = module.replace(".", "/")
    for place in (folder, *map(Path, sys.path)):
        for ending in (".py", "/__init__.py"):
            path = place / (stem + ending)
            if path.is_file():
                return path
    raise FileNotFoundError(module)


def with_params(config: Config, folder: Path, source: str) -> Config:
    """Return the config with `params` checked, and filled with the defaults that its trainer declares."""
    declared = declaration(config.trainer, folder)
    if declared is None:
        return config
    kind, _ = declared
    params = build(kind, with_texts(config.params, config.param_texts), source)
    # The values now have the declared types, so their texts are no longer needed.
    return dataclasses.replace(config, params=_stored(params, config.params), param_texts={})


def _stored(section: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a dataclass as JSON has them, without defaults that a rank would read as other values."""
    values = {}
    types = get_type_hints(type(section))
    for key in dataclasses.fields(section):
        if not key.init:
            continue
        value = getattr(section, key.name)
        if dataclasses.is_dataclass(value) and types[key.name] is type(value):
            values[key.name] = _stored(value, given.get(key.name, {}))
            continue
        plain = dataclasses.asdict(section)[key.name]
        stored = json.loads(json.dumps(plain, default=str))
        if key.name in given or reads_as(types[key.name], stored, value):
            values[key.name] = stored
    return values


def arguments_of(
    train: Callable[..., Any], params: Mapping[str, Any], texts: Mapping[tuple[str, ...], str] | None = None
) -> list[Any]:
    """Return the third argument for a trainer that declares its parameters, else nothing. Raises ConfigError.

    Args:
        texts: see `Config.param_texts`.
    """
    params = with_texts(params, texts or {})
    for parameter in list(inspect.signature(train).parameters.values())[2:3]:
        kind = parameter.annotation
        if isinstance(kind, str):
            kind = eval(kind, inspect.unwrap(train).__globals__)  # noqa: S307
        if dataclasses.is_dataclass(kind) and isinstance(kind, type):
            return [build(kind, params)]
    return []


def build(kind: type, values: Mapping[str, Any], source: str = "") -> Any:
    """Return a dataclass with the values of `params`. Raises ConfigError with one line for each mistake."""
    problems = []
    for field_ in dataclasses.fields(cast(Any, kind)):
        if field_.init and field_.name not in values and default_of(field_) is dataclasses.MISSING:
            problems.append(f"params.{field_.name} is missing: {kind.__name__} has no default for it")
    params: Any = None
    mistakes: list[Mistake] = []
    try:
        params = convert_section(kind, values, "params", mistakes)
    except TypeError:  # a required key is missing or has a mistake
        if not problems and not mistakes:
            raise
    types = get_type_hints(kind)
    for mistake in mistakes:
        if isinstance(mistake, str):
            problems.append(mistake)
            continue
        key, value = mistake
        name = key.split(".")[1]
        declared = types.get(name)
        if declared is None:
            hint = suggestion(name, types, "there are " + ", ".join(types))
            problems.append(f"params.{name} is not a key: {hint}")
            continue
        expected = str(declared).replace("typing.", "")
        if get_origin(declared) is None:
            expected = declared.__name__
        inner_key = ""
        if key != f"params.{name}":
            inner_key = f" for {key}"
        problems.append(f"params.{name} must be {expected}, got {shown(value)}{inner_key}")
    if problems:
        raise ConfigError(*problems, source=source)
    return params
