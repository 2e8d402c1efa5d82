"""Conversion of plain containers into the frozen dataclasses of a config.

It needs the standard library alone, unless a text must be read as a number: ranks, which read the config of a run
folder, start quickly.
"""

import enum
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
#: A message; or dotted key and value, if the key is unknown or its value has another type.
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

    Texts are converted for keys that take a number, and numbers for keys that take a text. A key with a mistake keeps
    its default. If the check of a section's values fails, all keys of the section keep their defaults.
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
    if mistakes or _text(to_tree(config)) != _text(tree):
        return None
    return config


def as_written(tree: dict[str, Any], raw: object) -> dict[str, Any]:
    """Return a tree with the text of the YAML, as in `raw`, for each key that takes a text: `010`, not 8."""
    types = _keys(tree)
    return {name: _as_written(types.get(name, Any), value, _entry(raw, name)) for name, value in tree.items()}


def texts_of(value: object, raw: object, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield path and text of each number, boolean or null in YAML for which `str` would return another text.

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
    if path not in texts:
        return value
    return Written(value, texts[path])


def convert_section(kind: type[S], tree: object, key: str, mistakes: list[Mistake]) -> S:
    """Return the dataclass `kind` with the values of a mapping, and add the mistakes in it to `mistakes`.

    Raises TypeError if `tree` is not a mapping, or lacks a key without a default.

    Args:
        key: dotted key of the section.
    """
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
        converted = _value(kind, stored, "", mistakes)
    except TypeError:
        return False
    # As text, 1 differs from 1.0, and a text from a path.
    return not mistakes and repr(converted) == repr(value)


def default_of(key: Field[Any]) -> Any:
    """Return the default of a field; `dataclasses.MISSING` if it has none."""
    if callable(key.default_factory):
        return key.default_factory()
    return key.default


def _keys(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the type of each key of a config, with those of the trainers' sections that the tree contains."""
    types = dict(_types(Config))
    for name in tree:
        if name in types:
            continue
        trainer = find_trainer(name)
        if trainer is not None and trainer.section is not None:
            types[name] = trainer.section
    return types


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
        entries = value
        if origin is list:
            entries = {str(index): entry for index, entry in enumerate(value)}
        converted = _entries(dict.fromkeys(entries, arguments[-1]), entries, f"{key}.", mistakes)
        if origin is list:
            return list(converted.values())
        return converted
    if origin is tuple and type(value) in (list, tuple):
        kinds = arguments
        if arguments[-1] is ...:
            kinds = arguments[:1] * len(value)
        if len(kinds) == len(value):
            pairs = zip(kinds, value, strict=True)
            return tuple(_value(entry_kind, entry, key, mistakes) for entry_kind, entry in pairs)
    if kind is Path and type(value) is str:
        return Path(value)
    if kind in (int, float, bool) and type(value) is str:
        from hpcdist.config.document import parse_value  # YAML, which completions do not need

        value = parse_value(value)
    if type(value) is int and (kind is float or (kind is bool and value in (0, 1))):
        try:
            return kind(value)
        except OverflowError:
            raise _MismatchError(key, value) from None
    if origin is Literal:
        is_valid = _is_one_of(value, arguments)
    elif kind is Any:
        is_valid = type(value) in _SCALARS
    else:
        is_valid = type(value) is kind
    if not is_valid:
        raise _MismatchError(key, value)
    return value


def _member(members: Sequence[Any], value: Any, key: str, mistakes: list[Mistake]) -> Any:
    """Return a value as the member of a union that is nearest to it. Raises _MismatchError if none accepts it."""
    partial: tuple[Any, list[Mistake]] | None = None
    for member in sorted(members, key=lambda member: _distance(member, value)):
        member_mistakes: list[Mistake] = []
        try:
            result = _value(member, value, key, member_mistakes)
        except TypeError:  # another type, or a section without a required key
            continue
        if not member_mistakes:
            return result
        partial = partial or (result, member_mistakes)
    if partial is None:
        raise _MismatchError(key, _read_for(Any, value))
    result, member_mistakes = partial
    mistakes += member_mistakes
    return result


class _Distance(enum.IntEnum):
    """How much the conversion to a member of a union changes a value."""

    LITERAL = 0
    SAME_TYPE = 1
    INT_TO_FLOAT = 2
    OTHER_TYPE = 3
    TO_TEXT = 4


def _distance(member: Any, value: Any) -> _Distance:
    """Return how much a member of a union changes a value."""
    if get_origin(member) is Literal:
        is_choice = _is_one_of(_read_for(member, value), get_args(member))
        return _Distance.LITERAL if is_choice else _Distance.OTHER_TYPE
    plain = _read_for(Any, value)
    if type(plain) is (get_origin(member) or member):
        return _Distance.SAME_TYPE
    if member is float and type(plain) is int:
        return _Distance.INT_TO_FLOAT
    if member in (str, Path):
        return _Distance.TO_TEXT
    return _Distance.OTHER_TYPE


def _read_for(kind: Any, value: Any) -> Any:
    """Return the text of a number or boolean if a key of this type takes a text, else the value."""
    text = ""
    if isinstance(value, Written):
        text = value.text
        value = value.value
    elif type(value) in (bool, int, float):
        text = str(value)
    if get_origin(kind) is Literal:
        takes_text = text in get_args(kind) and not _is_one_of(value, get_args(kind))
    else:
        takes_text = kind in (str, Path) and value is not None
    if takes_text and text:
        return text
    return value


def _is_one_of(value: Any, choices: Sequence[Any]) -> bool:
    return any(type(value) is type(choice) and value == choice for choice in choices)


def _as_written(kind: Any, value: Any, raw: object) -> Any:
    """Return the part of the result of `as_written` for a key of type `kind`."""
    origin, arguments = get_origin(kind), get_args(kind)
    if isinstance(value, dict):
        types: dict[str, Any] = {}
        if is_dataclass(kind):
            types = _types(cast(Any, kind))
        elif arguments:
            types = dict.fromkeys(value, arguments[-1])
        return {name: _as_written(types.get(name, Any), entry, _entry(raw, name)) for name, entry in value.items()}
    if isinstance(value, list) and isinstance(raw, list) and origin is list:
        entries = []
        for entry, text in zip(value, raw, strict=True):
            if entry is None and text and arguments == (str,):  # an argument `null` of a script
                entries.append(text)
            else:
                entries.append(_as_written(arguments[0], entry, text))
        return entries
    takes_text = kind is str or origin is Literal or (origin is UnionType and arguments[0] is str)
    if takes_text and isinstance(raw, str) and type(value) in (bool, int, float):
        return raw
    return value


def _entry(raw: object, name: str) -> object:
    if not isinstance(raw, Mapping):
        return None
    return raw.get(name)


def _text(tree: Mapping[str, Any]) -> str | None:
    try:
        return json.dumps(tree, sort_keys=True)
    except (TypeError, ValueError):  # a date in an edited file
        return None
