"""Conversion of plain containers into the frozen dataclasses of a config.

It needs the standard library alone, unless a text must be read as a number: ranks, which read the config of a run
folder, start quickly.
"""

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import Field, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from hpcdist.config.schema import Config, to_tree
from hpcdist.config.trainer_declaration import find_trainer

S = TypeVar("S")
#: A line, or the dotted key and the value of a key that is unknown or has a value of another type.
Mistake = str | tuple[str, Any]
_SCALARS = (NoneType, bool, int, float, str)


class Written:
    """A value that YAML reads from a text, and this text, until the type of its key is known: 1.1 and `1.10`."""

    def __init__(self, value: Any, text: str) -> None:
        self.value = value
        self.text = text


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


def texts_of(value: object, raw: object, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield path and text of each value that YAML reads as no text, if `str` would return another text for it.

    Args:
        raw: the same containers with the texts of the YAML.
    """
    if isinstance(value, Mapping):
        for name, entry in value.items():
            yield from texts_of(entry, _entry(raw, name), (*path, name))
    elif isinstance(value, list) and isinstance(raw, list):
        for index, (entry, text) in enumerate(zip(value, raw, strict=True)):
            yield from texts_of(entry, text, (*path, str(index)))
    elif isinstance(raw, str) and not isinstance(value, str) and str(value) != raw:
        yield path, raw


def with_texts(value: Any, texts: Mapping[tuple[str, ...], str], path: tuple[str, ...] = ()) -> Any:
    """Return containers with a `Written` in place of each value that has a text."""
    if isinstance(value, Mapping):
        return {name: with_texts(entry, texts, (*path, name)) for name, entry in value.items()}
    if isinstance(value, list):
        return [with_texts(entry, texts, (*path, str(index))) for index, entry in enumerate(value)]
    return Written(value, texts[path]) if path in texts else value


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


def reads_as(kind: Any, stored: object, value: object) -> bool:
    """Return whether a key of this type reads a stored value as `value`."""
    mistakes: list[Mistake] = []
    try:
        found = _value(kind, stored, "", mistakes)
    except TypeError:
        return False
    # As text, 1 differs from 1.0, and a text from a path.
    return not mistakes and repr(found) == repr(value)


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
        del types["sections"], types["secret_texts"], types["param_texts"]
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
    if origin in (UnionType, Union):
        return _member(arguments, value, key, mistakes)
    value = _read_for(kind, value)
    if kind is Any and type(value) in (list, dict):
        origin, arguments = type(value), (str, Any)
    elif kind in (list, dict):
        origin, arguments = kind, (str, Any)
    elif kind is tuple:
        origin, arguments = kind, (Any, ...)
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
    if origin is Literal:
        is_valid = _is_one_of(value, arguments)
    else:
        is_valid = type(value) in (_SCALARS if kind is Any else (kind,))
    if not is_valid:
        raise _MismatchError(key, value)
    return value


def _member(members: Sequence[Any], value: Any, key: str, mistakes: list[Mistake]) -> Any:
    """Return a value as the member of a union that is nearest to it. Raises _MismatchError if none accepts it."""
    partial: tuple[Any, list[Mistake]] | None = None
    for member in sorted(members, key=lambda member: _distance(member, value)):
        found: list[Mistake] = []
        try:
            result = _value(member, value, key, found)
        except TypeError:  # another type, or a section without a required key
            continue
        if not found:
            return result
        partial = partial or (result, found)
    if partial is None:
        raise _MismatchError(key, _read_for(Any, value))
    mistakes += partial[1]
    return partial[0]


def _distance(member: Any, value: Any) -> int:
    """Return how much a member of a union changes a value: 0 is the value itself, and a number as text is the most."""
    if get_origin(member) is Literal:
        return 0 if _is_one_of(_read_for(member, value), get_args(member)) else 3
    plain = _read_for(Any, value)
    if type(plain) is (get_origin(member) or member):
        return 1
    if member is float and type(plain) is int:
        return 2
    return 4 if member in (str, Path) else 3


def _read_for(kind: Any, value: Any) -> Any:
    """Return the text of a number or boolean if a key of this type takes a text, else the value."""
    text = str(value) if type(value) in (bool, int, float) else ""
    if isinstance(value, Written):
        value, text = value.value, value.text
    if get_origin(kind) is Literal:
        takes_text = text in get_args(kind) and not _is_one_of(value, get_args(kind))
    else:
        takes_text = kind in (str, Path) and value is not None
    return text if takes_text and text else value


def _is_one_of(value: Any, choices: Sequence[Any]) -> bool:
    return any(type(value) is type(choice) and value == choice for choice in choices)


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
