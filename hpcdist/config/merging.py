"""Merging of a config file and overrides into the typed schema, with all mistakes reported at once."""

from __future__ import annotations

import ast
import difflib
import functools
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from hpcdist.config.conversion import as_written, convert
from hpcdist.config.describe import all_keys
from hpcdist.config.document import MAX_DEPTH, first_line, parse_texts, unfit_values
from hpcdist.config.redaction import REDACTED, is_secret_name, named_secrets
from hpcdist.config.schema import Config, SecretTexts, find_trainer, to_tree, trainer_sections
from hpcdist.config.tree import expand_short_forms, insert, leaves, parse_value
from hpcdist.errors import ConfigError, shown

#: Where values come from that are not from the file: the command line or a profile, by dotted key; and the command line
#: by the line of a malformed override.
Origins = dict[str, str]
_COMMAND_LINE = "command line"
_ROLE_REQUESTS = "cluster.roles."
_CONTAINERS = ("dict[", "list[")


def merge(tree: dict[str, Any], malformed: Sequence[str], source: str) -> Config:
    """Return the config of plain containers, with interpolations resolved.

    Raises ConfigError with the lines of malformed overrides and one line for every mistake found.
    """
    problems = list(malformed)
    expand_short_forms(tree)
    if unfit := list(unfit_values(tree)):
        raise ConfigError([*problems, *unfit], source)
    merged = _overlay(_defaults(), tree)
    secret_texts: SecretTexts = {}
    config, mistakes = convert(_interpolated(merged, problems, secret_texts))
    for mistake in mistakes:
        problems += [mistake] if isinstance(mistake, str) else _sentences(*mistake)
    if problems:
        raise ConfigError(problems, source)
    used = {name: section for name, section in config.sections.items() if name in tree or name == config.trainer.target}
    config = replace(config, sections=used, secret_texts=secret_texts)
    if find_trainer(config.trainer.target) is None or config.trainer.script:
        # Nobody knows which metrics code of the user's own logs.
        monitor = (tree.get("checkpoint") or {}).get("monitor", "")
        config = replace(config, checkpoint=replace(config.checkpoint, monitor=monitor))
    return config


def add_overrides(overrides: Sequence[str], tree: dict[str, Any], origins: Origins) -> list[str]:
    """Add overrides to a tree, and their keys to `origins`; return a line for each that is malformed."""
    problems = []
    for text in overrides:
        key, equals, raw = text.partition("=")
        if not equals or not key or key.startswith("-"):
            name = re.split(r"[:\s]", text, maxsplit=1)[0]
            redacted = f"{name} {REDACTED}" if name != text and is_secret_name(name) else text
            problems.append(f"{shown(redacted)} is no override: write key=value, as in optim.lr=0.01")
        elif raw == REDACTED:
            problems.append(f"{key}: {REDACTED} stands for a redacted secret: write the value, or ${{oc.env:NAME}}")
        elif len(path := key.split(".")) > MAX_DEPTH or len(path) + _depth(_override_value(path, raw)) > MAX_DEPTH:
            problems.append(f"{shown(key)}: nested more than {MAX_DEPTH} levels deep")
        else:
            created = next((end for end in range(1, len(path)) if _at(tree, path[:end]) is None), len(path))
            origins[".".join(path[:created])] = _COMMAND_LINE
            if not insert(tree, path, _override_value(path, raw)):
                problems.append(f"{key}: a part of this path is a value already, not a section")
    given = {text.partition("=")[0] for text in overrides}
    if "cluster.nodes" in given and "cluster.min_nodes" not in given and isinstance(tree.get("cluster"), dict):
        # A new number or range of nodes replaces the old range: the config of a run folder contains both keys.
        tree["cluster"].pop("min_nodes", None)
        origins["cluster.min_nodes"] = _COMMAND_LINE
    origins.update(dict.fromkeys(problems, _COMMAND_LINE))
    return problems


def _depth(value: Any) -> int:
    """Return the number of levels of nested containers."""
    if not isinstance(value, dict | list):
        return 0
    return 1 + max(map(_depth, value.values() if isinstance(value, dict) else value), default=0)


@functools.cache
def _defaults() -> dict[str, Any]:
    """Return the values of all keys of a YAML, with those of the sections of all trainers."""
    return {**to_tree(Config()), **{name: asdict(kind()) for name, kind in trainer_sections().items()}}


def _overlay(defaults: Mapping[str, Any], tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a tree, with defaults for the keys that it lacks."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        default = defaults.get(name)
        found[name] = _overlay(default, value) if isinstance(default, Mapping) and isinstance(value, Mapping) else value
    return {**found, **{name: value for name, value in defaults.items() if name not in tree}}


def _interpolated(tree: Mapping[str, Any], problems: list[str], secrets: SecretTexts) -> dict[str, Any]:
    """Return a tree with its interpolations resolved; add to `secrets` those that the interpolations have read.

    A line is added to `problems` for each mistake, and its key is omitted.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import GrammarParseError, OmegaConfBaseException
    from omegaconf.resolvers import oc

    read: list[str] = []

    def env(name: str, *default: Any) -> Any:
        value = oc.env(name, *default)
        read.extend([value] if value and is_secret_name(name) else [])
        return value

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # OmegaConf 2.4 has another name for it, which differs in 2.3
        OmegaConf.register_new_resolver("oc.env", env, replace=True)  # the same, but it notes what it reads
    found: dict[str, Any] = {}
    for path, value in leaves(tree):
        try:
            if "${" in str(value):
                OmegaConf.create([value])
            insert(found, path, value)
        except GrammarParseError:  # its message repeats the text
            problems.append(f"{'.'.join(path)}: malformed interpolation")
    config = OmegaConf.create(found)
    resolved: dict[str, Any] = {}
    own = named_secrets(found)
    for path, value in leaves(found):
        if "${" in str(value):
            key = ".".join(path)
            try:
                read.clear()
                value = functools.reduce(lambda node, part: node[part], path, config)
                if OmegaConf.is_config(value):
                    value = OmegaConf.to_container(value, resolve=True)
                if texts := (*read, *(text for text in own if text in str(value))):
                    secrets[path] = texts
            except (OmegaConfBaseException, RecursionError) as error:
                is_endless = isinstance(error, RecursionError)
                problems.append(f"{key}: {'Recursive interpolation detected' if is_endless else first_line(error)}")
                continue
            if isinstance(value, dict) and _at(_defaults(), path):
                problems.append(f"{key} is a section: give it keys, got {shown(value)}")
                continue
        insert(resolved, path, value)
    return resolved


def _override_value(path: Sequence[str], text: str) -> Any:
    value = parse_value(text)
    texts = text if isinstance(value, str) else parse_texts(text)
    for part in reversed(path):
        value, texts = {part: value}, {part: texts}
    return _at(as_written(value, texts), path)


def _at(tree: object, path: Sequence[str]) -> Any:
    """Return the value of nested mappings at a path; None without one."""
    return functools.reduce(lambda node, part: node.get(part) if isinstance(node, Mapping) else None, path, tree)


@functools.cache
def _types() -> dict[str, str]:
    """Return the type of every key as its source spells it."""
    return {path: str(key.type) for path, _, key in all_keys()}


def _sentences(key: str, value: object) -> list[str]:
    """Return a line with key, value, expectation and fix for a key, or for each key below it."""
    known = {_for_role(path, key): kind for path, kind in _types().items()}
    holder = next((path for path in known if key.startswith(f"{path}.") and known[path].startswith(_CONTAINERS)), "")
    if holder and not key.startswith(_ROLE_REQUESTS):
        known[key] = known[holder].partition("[")[2].removeprefix("str, ").removesuffix("]")
    elif isinstance(value, Mapping) and value and not known.get(key, "").startswith(_CONTAINERS):
        return [line for name, inner in value.items() for line in _sentences(f"{key}.{name}", inner)]
    if known.get(key, "").startswith("Literal["):
        choices = ast.literal_eval(known[key].removeprefix("Literal"))
        return [f"{key} must be one of {', '.join(choices)}, got {shown(value)}"]
    if key in known:
        # A shell removes one pair of quotes.
        is_empty = value is None and known[key] == "str"
        fix = """: write '' for an empty string ("''" in a shell)""" if is_empty else ""
        if known[key].startswith("list[") and isinstance(value, str) and value:
            words = value.split() if key == "trainer.script" else [value]
            fix = f": write [{', '.join(words)}]"
        return [f"{key} must be {known[key]}, got {shown(value)}{fix}"]
    if any(path.startswith(f"{key}.") for path in known):
        return [f"{key} is a section: give it keys, got {shown(value)}"]
    leaf = key.rpartition(".")[2]
    same_leaf = [path for path in known if path.rpartition(".")[2] == leaf]
    sections = {path.partition(".")[0] for path in known if "." in path}
    near = difflib.get_close_matches(key, same_leaf or {*known, *sections}, n=1, cutoff=0.0 if same_leaf else 0.6)
    hint = f"did you mean {near[0]!r}?" if near else "`hpcdist config --schema` lists all keys"
    return [f"{key if key.isprintable() else shown(key)} is not a key: {hint}"]


def _for_role(path: str, key: str) -> str:
    """Return a key of the schema for the role in `key`, if both concern the resources of a role."""
    if not key.startswith(_ROLE_REQUESTS):
        return path
    return path.replace(
        f"{_ROLE_REQUESTS}ROLE.", f"{_ROLE_REQUESTS}{key.removeprefix(_ROLE_REQUESTS).partition('.')[0]}."
    )
