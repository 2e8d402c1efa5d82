"""A config out of plain containers that hold every key, each in its declared type: what a run folder keeps.

Nothing is converted and nothing filled in, so it needs no library, and ranks start by it in no time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, cast, get_args, get_origin, get_type_hints

from hpcdist.config.schema.declaration import find_trainer
from hpcdist.config.schema.run import Config

_SCALARS = (NoneType, bool, int, float, str)


def exact(tree: Mapping[str, Any]) -> Config | None:
    """The config whose `dataclasses.asdict` is `tree`; None where a key, a type or a value is not a config's."""
    try:
        return _config(tree)
    except (TypeError, ValueError):
        return None


def _config(tree: Mapping[str, Any]) -> Config:
    kinds = get_type_hints(Config)
    kinds.pop("sections")
    trainers = {name: trainer for name in tree.keys() - kinds.keys() if (trainer := find_trainer(name))}
    if tree.keys() != kinds.keys() | trainers.keys():
        raise TypeError("not the keys of a config")
    sections = {name: _value(trainers[name].section, value) for name, value in tree.items() if name in trainers}
    return Config(sections=sections, **{name: _value(kind, tree[name]) for name, kind in kinds.items()})


def _section(kind: type, tree: object) -> object:
    kinds = get_type_hints(kind)
    if type(tree) is not dict or tree.keys() != kinds.keys():
        raise TypeError(f"not the keys of {kind.__name__}")
    return kind(**{field.name: _value(kinds[field.name], tree[field.name]) for field in fields(kind)})


def _value(declared: Any, value: Any) -> Any:
    """A value of exactly the declared type. Raises TypeError for another, ValueError where a section refuses it."""
    origin, arguments = get_origin(declared), get_args(declared)
    if is_dataclass(declared):
        return _section(cast(type, declared), value)
    if origin is UnionType:  # such as `int | None`
        declared = next((one for one in arguments if type(value) is one), NoneType)
    if declared is Any and type(value) in (list, dict):
        origin, arguments = type(value), (str, Any)
    if origin in (list, dict) and type(value) is origin:
        of = arguments[-1]
        if origin is list:
            return [_value(of, entry) for entry in value]
        return {_value(str, key): _value(of, entry) for key, entry in value.items()}
    fits = value in arguments if origin is Literal else type(value) in (_SCALARS if declared is Any else (declared,))
    if not fits:
        raise TypeError(f"{value!r} is no {declared}")
    return value
