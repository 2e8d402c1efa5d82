"""Merging of a config file and overrides into the typed schema by OmegaConf, with all mistakes reported at once."""

from __future__ import annotations

import ast
import copy
import difflib
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, field, fields, is_dataclass, make_dataclass
from typing import TYPE_CHECKING, Any, get_type_hints

from hpcdist.config.document import MAX_DEPTH, first_line, unfit_values
from hpcdist.config.redaction import REDACTED, is_secret_name
from hpcdist.config.schema import Config, all_keys, describe, to_tree, type_mismatch
from hpcdist.config.schema.declaration import trainer_sections
from hpcdist.config.tree import expand_short_forms, insert, leaves, parse_value
from hpcdist.errors import ConfigError, shortened, shown

if TYPE_CHECKING:
    from omegaconf import DictConfig

#: Beginning of the line of a mistake in an override.
COMMAND_LINE = "command line: "
_ROLE_REQUESTS = "cluster.roles."
#: Types of keys that take strings and nothing else.
_STRINGS = ("str", "dict[str, str]")


def merge(tree: dict[str, Any], overrides: Sequence[str], source: str) -> Config:
    """Return the config of a file's plain containers, to which overrides are added, with interpolations resolved.

    Raises ConfigError with one line for every mistake found; `_apply` marks those of malformed overrides.
    """
    problems = _apply(overrides, tree)
    expand_short_forms(tree)
    if unfit := [*unfit_values(tree), *_nested_too_deep(tree)]:
        raise ConfigError([*problems, *unfit], source)
    merged = _merged(tree, problems)
    values = _values(merged, problems)
    sections = {name: values.pop(name) for name in trainer_sections() if name in values}
    try:
        Config(**{name: value for name, value in values.items() if not is_dataclass(value)})
    except ValueError as error:
        problems += str(error).splitlines()
    except (TypeError, AttributeError) as error:
        problems.append(_wrong_type("the config", error))
    if problems:
        raise ConfigError(problems, source)
    used = {name: section for name, section in sections.items() if name in tree or name == values["trainer"].target}
    config = Config(**values, sections=used)
    # OmegaConf does not check the types of interpolations, nor of escaped ones.
    if mismatch := type_mismatch(to_tree(config)):
        raise ConfigError([f"{mismatch[0]} must be {_types().get(mismatch[0])}, got {shown(mismatch[1])}"], source)
    return config


def _apply(overrides: Sequence[str], tree: dict[str, Any]) -> list[str]:
    """Add overrides to a tree; return a line that begins with COMMAND_LINE for each that is malformed."""
    problems = []
    for text in overrides:
        key, equals, raw = text.partition("=")
        if not equals or not key or key.startswith("-"):
            name = re.split(r"[:\s]", text, maxsplit=1)[0]
            redacted = f"{name} {REDACTED}" if name != text and is_secret_name(name) else text
            problems.append(f"{shown(redacted)} is no override: write key=value, as in optim.lr=0.01")
        elif key.count(".") >= MAX_DEPTH:
            problems.append(f"{key}: more than {MAX_DEPTH} levels deep")
        elif not insert(tree, key.split("."), parse_value(raw)):
            problems.append(f"{key}: a part of this path is a value already, not a section")
    given = {text.partition("=")[0] for text in overrides}
    if "cluster.nodes" in given and "cluster.min_nodes" not in given and isinstance(tree.get("cluster"), dict):
        # A new number or range of nodes replaces the old range: the config of a run folder contains both keys.
        tree["cluster"].pop("min_nodes", None)
    return [f"{COMMAND_LINE}{line}" for line in problems]


def _merged(tree: Mapping[str, Any], problems: list[str]) -> DictConfig:
    """Return the schema merged with a tree; add a line to `problems` for each key that does not fit."""
    from omegaconf import DictConfig, OmegaConf

    try:
        merged = OmegaConf.merge(_defaults(), tree)
    except _errors_of_merges():
        merged = copy.deepcopy(_defaults())
        assert isinstance(merged, DictConfig)
        known = {key.name for key in fields(_schema())}
        for name, content in tree.items():
            if name in known:
                _merge_part(merged, (name,), content, problems)
            else:  # OmegaConf would copy the schema into its error
                problems += [_sentence(".".join(path), value) for path, value in leaves({name: content})]
    assert isinstance(merged, DictConfig)
    return merged


def _merge_part(merged: DictConfig, path: tuple[str, ...], value: Any, problems: list[str]) -> None:
    """Merge a value into a copy of the schema; add a line to `problems` for each key that does not fit.

    A merge stops at the first mistake; the entries of a wrong mapping are then merged one by one.
    """
    from omegaconf import OmegaConf

    part: dict[str, Any] = {}
    insert(part, path, value)
    try:
        # In place, because copying the schema takes longer than all the rest.
        OmegaConf.unsafe_merge(merged, part)
    except _errors_of_merges() as error:
        if isinstance(value, Mapping) and value:
            for key, inner in value.items():
                _merge_part(merged, (*path, str(key)), inner, problems)
        else:
            problems.append(_sentence(".".join(path), value, first_line(error)))


def _errors_of_merges() -> tuple[type[Exception], ...]:
    from omegaconf.errors import OmegaConfBaseException

    return (OmegaConfBaseException, ValueError, TypeError)


def _values(merged: DictConfig, problems: list[str]) -> dict[str, Any]:
    """Return the sections and top-level values; add a line to `problems` for each that is not valid."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    values: dict[str, Any] = {}
    for key in fields(_schema()):
        name = key.name
        try:
            node = merged[name]
            values[name] = OmegaConf.to_object(node) if OmegaConf.is_config(node) else node
        except OmegaConfBaseException as error:
            problems.append(f"{error.full_key or name}: {first_line(error)}")
        except ValueError as error:
            problems += [f"{name}.{line}" for line in str(error).splitlines()]
        except (TypeError, AttributeError) as error:
            problems.append(_wrong_type(name, error))
        else:
            if is_dataclass(key.type) and not is_dataclass(values[name]):
                problems.append(f"{name} is a section: give it keys, got {shown(values[name])}")
    return values


@functools.cache
def _defaults() -> DictConfig:
    """Return the schema with its defaults; creating it takes most of the time of loading a config."""
    from omegaconf import OmegaConf

    found: DictConfig = OmegaConf.structured(_schema())
    return found


@functools.cache
def _schema() -> Any:
    """Return a dataclass with the keys of the whole YAML: those of Config, and the sections of all trainers."""
    types = get_type_hints(Config)
    keys: list[Any] = []
    for one in fields(Config):
        if one.name == "sections":
            keys += [(name, kind, field(default_factory=kind)) for name, kind in trainer_sections().items()]
        elif one.default is not MISSING:
            keys.append((one.name, types[one.name], field(default=one.default)))
        else:
            keys.append((one.name, types[one.name], field(default_factory=one.default_factory)))
    return make_dataclass("Keys", keys)


@functools.cache
def _types() -> dict[str, str]:
    """Return the type of every key as its source spells it."""
    return {path: kind for path, kind, _, _ in describe()}


def _nested_too_deep(tree: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each container in a dict or list of single values, which OmegaConf does not detect."""
    for key, _, declared in all_keys():  # not `_types`, which reads the source of the schema: a tenth of a second
        of = str(declared.type).partition("[")[2].removeprefix("str, ").removesuffix("]")
        value: Any = tree
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if of not in ("int", "str", "float") or not isinstance(value, Mapping | list):
            continue
        for name, entry in value.items() if isinstance(value, Mapping) else enumerate(value):
            if isinstance(entry, Mapping | list):
                yield f"{key}.{name} must be {'a string' if of == 'str' else of}, got {shown(entry)}"


def _wrong_type(key: str, error: Exception) -> str:
    """Return a line for a value of a wrong type by an interpolation, which OmegaConf does not check."""
    return f"{key}: an interpolation gives a value of another type than its key has ({shortened(first_line(error))})"


def _sentence(key: str, value: object, detail: str = "") -> str:
    """Return one line with key, value, expectation and fix for a key that is unknown or has a value of a wrong type.

    Args:
        detail: the error of OmegaConf for a known key.
    """
    known = {_for_role(path, key): kind for path, kind in _types().items()}
    if known.get(key, "").startswith("Literal["):
        choices = ast.literal_eval(known[key].removeprefix("Literal"))
        return f"{key} must be one of {', '.join(choices)}, got {shown(value)}"
    if key in known:
        reason = f" ({detail})" if len(detail) <= 120 else ""  # a long one repeats the value
        return f"{key} must be {known[key]}, got {shown(value)}{_fix(known[key], value) or reason}"
    if any(path.startswith(f"{key}.") for path in known):
        return f"{key} is a section: give it keys, got {shown(value)}"
    holder = next((path for path in known if key.startswith(f"{path}.") and known[path].startswith("dict")), None)
    if holder and not key.startswith(_ROLE_REQUESTS):
        return f"{holder} must be {known[holder]}, got {shown(value)} for {key}{_fix(known[holder], value)}"
    leaf = key.rpartition(".")[2]
    same_leaf = [path for path in known if path.rpartition(".")[2] == leaf]
    sections = {path.partition(".")[0] for path in known if "." in path}
    near = difflib.get_close_matches(key, same_leaf or {*known, *sections}, n=1, cutoff=0.0 if same_leaf else 0.6)
    hint = f"did you mean {near[0]!r}?" if near else "`hpcdist config --schema` lists all keys"
    return f"{key} is not a key: {hint}"


def _fix(kind: str, value: object) -> str:
    """Return how to write an empty string, if a string is missing; else an empty text."""
    # A shell removes one pair of quotes.
    return """: write '' for an empty string ("''" in a shell)""" if value is None and kind in _STRINGS else ""


def _for_role(path: str, key: str) -> str:
    """Return a key of the schema for the role in `key`, if both concern the resources of a role."""
    if not key.startswith(_ROLE_REQUESTS):
        return path
    return path.replace(
        f"{_ROLE_REQUESTS}ROLE.", f"{_ROLE_REQUESTS}{key.removeprefix(_ROLE_REQUESTS).partition('.')[0]}."
    )
