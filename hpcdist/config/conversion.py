"""Conversion of plain containers into the frozen dataclasses of a config.

It needs the standard library alone, unless a text must be read as a number: ranks, which read the config of a run
folder, start quickly.
"""

import functools
import json
from collections.abc import Mapping
from dataclasses import Field, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from hpcdist.config.schema import Config, find_trainer, to_tree

S = TypeVar("S")
#: A line, or the dotted key and the value of a key that is unknown or has a value of another type.
Mistake = str | tuple[str, Any]
_SCALARS = (NoneType, bool, int, float, str)


class _MismatchError(TypeError):
    """A value of another type than its key declares: args are the dotted key and the value."""


def convert(tree: Mapping[str, Any]) -> tuple[Config, list[Mistake]]:
    """Return the config of plain containers, with defaults for missing keys, and all mistakes.

    Texts are converted for keys that take a number, and numbers for keys that take a text. A key with a mistake has its
    default, as have all keys of a section whose check of its values fails.
    """
    mistakes: list[Mistake] = []
    types = _keys(tree)
    values = _entries(types, tree, "", mistakes)
    sections = {name: values.pop(name) for name in list(values) if name not in _types(Config)}
    try:
        return Config(**values, sections=sections), mistakes
    except ValueError as error:
        return Config(), [*mistakes, *str(error).splitlines()]


def exact(tree: Mapping[str, Any]) -> Config | None:
    """Return the config of a tree that `to_tree` returned, or None if a key, a type or a value does not match."""
    config, mistakes = convert(tree)
    # As text, 1 differs from 1.0 and from true.
    return config if not mistakes and _text(to_tree(config)) == _text(tree) else None


def as_written(tree: dict[str, Any], raw: object) -> dict[str, Any]:
    """Return a tree with the text of the YAML, as in `raw`, for each key that takes a text: `010`, not 8."""
    return {name: _as_written(_keys(tree).get(name, Any), value, _entry(raw, name)) for name, value in tree.items()}


def convert_section(kind: type[S], tree: object, key: str, mistakes: list[Mistake]) -> S:
    """Return a dataclass of a mapping; add its mistakes. Raises TypeError with key and value for no mapping."""
    if not isinstance(tree, Mapping):
        raise _MismatchError(key, tree)
    values = _entries(_types(cast(Any, kind)), tree, f"{key}.", mistakes)
    try:
        return kind(**values)
    except ValueError as error:
        mistakes += [f"{key}.{line}" for line in str(error).splitlines()]
        return kind()


def default_of(key: Field[Any]) -> Any:
    return key.default_factory() if callable(key.default_factory) else key.default


def _keys(tree: Mapping[str, Any]) -> dict[str, Any]:
    types = _types(Config)
    trainers = {name: trainer for name in tree if name not in types and (trainer := find_trainer(name))}
    return {**types, **{name: trainer.section for name, trainer in trainers.items() if trainer.section}}


@functools.cache
def _types(section: type) -> dict[str, Any]:
    types = get_type_hints(section)
    if section is Config:
        del types["sections"], types["secret_texts"]
    return types


def _entries(types: Mapping[str, Any], tree: Mapping[str, Any], prefix: str, mistakes: list[Mistake]) -> dict[str, Any]:
    values = {}
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if name not in types or not isinstance(name, str):
            mistakes.append((key, value))
            continue
        try:
            values[name] = _value(types[name], value, key, mistakes)
        except _MismatchError as error:
            mistakes.append(cast("tuple[str, Any]", error.args))
    return values


def _value(kind: Any, value: Any, key: str, mistakes: list[Mistake]) -> Any:
    origin, arguments = get_origin(kind), get_args(kind)
    if is_dataclass(kind):
        return convert_section(cast(type, kind), value, key, mistakes)
    if origin in (UnionType, Union):  # such as `int | None`
        kind = type(value) if type(value) in arguments else arguments[0]
    if kind is Any and type(value) in (list, dict):
        origin, arguments = type(value), (str, Any)
    if origin in (list, dict) and type(value) is origin:
        entries = value if origin is dict else {str(index): entry for index, entry in enumerate(value)}
        found = _entries(dict.fromkeys(entries, arguments[-1]), entries, f"{key}.", mistakes)
        return found if origin is dict else list(found.values())
    if origin is tuple and type(value) in (list, tuple):
        kinds = arguments[:1] * len(value) if arguments[-1] is ... else arguments
        if len(kinds) == len(value):
            return tuple(_value(one, entry, key, mistakes) for one, entry in zip(kinds, value, strict=True))
    if kind is Path and type(value) is str:
        return Path(value)
    if kind in (int, float, bool) and type(value) is str:
        from hpcdist.config.document import parse_value  # YAML, which completions do not need

        value = parse_value(value)
    if (kind is float and type(value) is int) or (kind is bool and type(value) is int and value in (0, 1)):
        try:
            return kind(value)
        except OverflowError:
            raise _MismatchError(key, value) from None
    if kind is str and type(value) in (bool, int, float):
        return str(value)
    if not (value in arguments if origin is Literal else type(value) in (_SCALARS if kind is Any else (kind,))):
        raise _MismatchError(key, value)
    return value


def _as_written(kind: Any, value: Any, raw: object) -> Any:
    origin, arguments = get_origin(kind), get_args(kind)
    if isinstance(value, dict):
        one = arguments[-1] if arguments else Any
        types = _types(cast(Any, kind)) if is_dataclass(kind) else dict.fromkeys(value, one)
        return {name: _as_written(types.get(name, Any), entry, _entry(raw, name)) for name, entry in value.items()}
    if isinstance(value, list) and isinstance(raw, list) and origin is list:
        # An argument `null` of a script is a text as well.
        return [
            text if entry is None and arguments == (str,) and text else _as_written(arguments[0], entry, text)
            for entry, text in zip(value, raw, strict=True)
        ]
    takes_text = kind is str or origin is Literal or (origin is UnionType and arguments[0] is str)
    return raw if takes_text and isinstance(raw, str) and type(value) in (bool, int, float) else value


def _entry(raw: object, name: str) -> object:
    return raw.get(name) if isinstance(raw, Mapping) else None


def _text(tree: Mapping[str, Any]) -> str | None:
    try:
        return json.dumps(tree, sort_keys=True)
    except (TypeError, ValueError):  # a date in an edited file
        return None
