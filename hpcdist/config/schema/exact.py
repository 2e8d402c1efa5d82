"""Reading of a config from plain containers with every key in its declared type, as a run folder stores it.

Values are neither converted nor filled in, so reading needs only the standard library, and ranks start quickly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, cast, get_args, get_origin, get_type_hints

from hpcdist.config.schema.declaration import find_trainer
from hpcdist.config.schema.run import Config

_SCALARS = (NoneType, bool, int, float, str)


class _MismatchError(TypeError):
    """A value of another type than its key declares: args are the dotted key and the value."""


def exact(tree: Mapping[str, Any]) -> Config | None:
    """Return the config of a tree that `to_tree` returned, or None if a key, a type or a value does not match."""
    try:
        return _config(tree)
    except (TypeError, ValueError):
        return None


def type_mismatch(tree: Mapping[str, Any]) -> tuple[str, Any] | None:
    """Return the first dotted key with a value of another type than declared, and the value; None without one."""
    try:
        _config(tree)
    except _MismatchError as error:
        return cast("tuple[str, Any]", error.args)
    return None


def _config(tree: Mapping[str, Any]) -> Config:
    types = get_type_hints(Config)
    types.pop("sections")
    trainers = {name: trainer for name in tree.keys() - types.keys() if (trainer := find_trainer(name))}
    if tree.keys() != types.keys() | trainers.keys():
        raise TypeError("not the keys of a config")
    sections = {name: _value(trainers[name].section, value, name) for name, value in tree.items() if name in trainers}
    return Config(sections=sections, **{name: _value(kind, tree[name], name) for name, kind in types.items()})


def _section(kind: type, tree: object, key: str) -> object:
    types = get_type_hints(kind)
    if type(tree) is not dict or tree.keys() != types.keys():
        raise _MismatchError(key, tree)
    values = {one.name: _value(types[one.name], tree[one.name], f"{key}.{one.name}") for one in fields(kind)}
    return kind(**values)


def _value(declared: Any, value: Any, key: str) -> Any:
    """Return a value of exactly the declared type. Raises TypeError or ValueError for any other."""
    origin, arguments = get_origin(declared), get_args(declared)
    if is_dataclass(declared):
        return _section(cast(type, declared), value, key)
    if origin is UnionType:  # such as `int | None`
        declared = next((one for one in arguments if type(value) is one), NoneType)
    if declared is Any and type(value) in (list, dict):
        origin, arguments = type(value), (str, Any)
    if origin in (list, dict) and type(value) is origin:
        of = arguments[-1]
        if origin is list:
            return [_value(of, entry, key) for entry in value]
        return {_value(str, name, key): _value(of, entry, f"{key}.{name}") for name, entry in value.items()}
    fits = value in arguments if origin is Literal else type(value) in (_SCALARS if declared is Any else (declared,))
    if not fits:
        raise _MismatchError(key, value)
    return value
