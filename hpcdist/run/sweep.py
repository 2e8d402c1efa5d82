"""A sweep: axes of values, and the cells that they span. Nothing here touches the disk: see `run/sweep_folder.py`.

A cell is an ordinary run `<sweep>-<cell>`, named by its values: `tune-lr_0.1-seed_2`.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass, replace
from pathlib import Path
from typing import Any

from hpcdist.config.schema import Config
from hpcdist.config.tree import leaves, parse_value
from hpcdist.config.written import redacted
from hpcdist.errors import ConfigError

#: What says where a cell's folder is, and what all tasks of a job array have in common.
_NOT_SWEPT = ("name", "experiment", "runs_dir", "cluster", "tracking.uri")
#: How a run is launched, watched and kept; the cells of a sweep may differ in it and still be compared.
_MAY_CHANGE = ("name", "runs_dir", "cluster", "launch", "tracking", "checkpoint")
_MAX_VALUE = 24
_MAX_CELL = 100


@dataclass(frozen=True, kw_only=True)
class Axis:
    """A swept key and its values as they were typed."""

    key: str
    words: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One run of a sweep."""

    name: str  #: of the run
    label: str  #: of its MLflow run: `lr=0.1 seed=2`
    values: dict[str, Any]  #: by key, as the config has them
    config: Config


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """What a command line asks for."""

    name: str
    keys: tuple[str, ...]
    cells: tuple[Cell, ...]
    base: dict[str, Any]  #: by dotted key: what the cells share and must go on sharing

    @property
    def folder(self) -> Path:
        config = self.cells[0].config
        return Path(config.runs_dir) / config.experiment / self.name


def parse_axes(texts: Sequence[str], overrides: Sequence[str]) -> tuple[Axis, ...]:
    """Read `key=v1,v2` words; a comma inside brackets or quotes belongs to its value.

    Raises ConfigError with a line for each mistake, also for a key that is overridden as well.
    """
    problems: list[str] = []
    axes: list[Axis] = []
    given = [text.partition("=")[0] for text in overrides]
    for text in texts:
        key, equals, raw = text.partition("=")
        words = _split(raw)
        if not equals or not key or key.startswith("-"):
            problems.append(f"{text!r} is no axis: write key=value,value as in optim.lr=0.1,0.01")
        elif any(_covers(name, key) for name in _NOT_SWEPT):
            problems.append(f"{key} cannot be swept: all cells share it")
        elif any(_covers(axis.key, key) or _covers(key, axis.key) for axis in axes):
            problems.append(f"{key} is swept twice: write its values in one --sweep")
        elif any(_covers(key, name) for name in given):
            problems.append(f"{key} is both swept and overridden: remove one of them")
        elif words is None:
            problems.append(f"{key}: a bracket or quote is not closed in {raw!r}")
        elif not all(words):
            problems.append(f"{key} has an empty value in {raw!r}: write null for none, '' for an empty text")
        else:
            axes.append(Axis(key=key, words=words))
    if problems:
        raise ConfigError(problems, "--sweep")
    return tuple(axes)


def _covers(above: str, key: str) -> bool:
    return key == above or key.startswith(f"{above}.")


def _split(raw: str) -> tuple[str, ...] | None:
    """The values between commas; None where a bracket or quote stays open."""
    parts: list[str] = []
    depth, quote, start = 0, "", 0
    for index, char in enumerate(raw):
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"" and (not raw[start:index].strip() or depth):
            quote = char  # elsewhere it is an apostrophe
        elif char in "[{":
            depth += 1
        elif char in "]}":
            depth -= 1
        elif char == "," and depth == 0:
            parts.append(raw[start:index].strip())
            start = index + 1
    return None if depth or quote else (*parts, raw[start:].strip())


def make_sweep(
    axes: Sequence[Axis], load: Callable[[Sequence[str]], Config], label_of: Callable[[Config], str]
) -> Sweep:
    """Load the config of every cell, and name them.

    Args:
        load: the config with more overrides.
        label_of: begins the sweep's name where the config has none; keys and a hash of what cells share follow.

    Raises ConfigError with the mistakes of all cells, each told once.
    """
    problems: dict[str, None] = {}
    source = "--sweep"
    loaded: list[tuple[tuple[str, ...], Config]] = []
    for words in itertools.product(*(axis.words for axis in axes)):
        try:
            loaded.append((words, load([f"{axis.key}={word}" for axis, word in zip(axes, words, strict=True)])))
        except ConfigError as error:
            problems |= dict.fromkeys(error.problems)
            source = error.source or source
    if problems:
        raise ConfigError(list(problems), source)
    _check_values(axes, loaded)

    keys = tuple(axis.key for axis in axes)
    base = _base(loaded[0][1], keys)
    name = loaded[0][1].name or _derived_name(label_of(loaded[0][1]), keys, base)
    cells = [
        _cell(
            name, {axis.key: value_of(config, axis.key, word) for axis, word in zip(axes, words, strict=True)}, config
        )
        for words, config in loaded
    ]
    return Sweep(name=name, keys=keys, cells=tuple(cells), base=base)


def _check_values(axes: Sequence[Axis], loaded: Sequence[tuple[tuple[str, ...], Config]]) -> None:
    problems: dict[str, None] = {}
    for index, axis in enumerate(axes):
        seen: dict[str, str] = {}
        for words, config in loaded:
            word, value = words[index], value_of(config, axis.key, words[index])
            if _walk(redacted(config), axis.key) != _walk(asdict(config), axis.key):
                problems[f"{axis.key} looks like a secret, and cells are named by their values: it cannot be swept"] = (
                    None
                )
            elif (other := seen.setdefault(json.dumps(value, sort_keys=True, default=str), word)) != word:
                problems[f"{axis.key}: {other} and {word} are the same value"] = None
        if len(set(axis.words)) != len(axis.words):
            twice = next(word for word in axis.words if axis.words.count(word) > 1)
            problems[f"{axis.key}: {twice} stands there twice"] = None
    if problems:
        raise ConfigError(list(problems), "--sweep")


def value_of(config: Config, key: str, word: str) -> Any:
    """The value that a cell has for a key: `1` is 1.0 where the config holds a float."""
    value = _walk(config, key)
    # `trainer=mine:train` is short for a section.
    return parse_value(word) if is_dataclass(value) else value


def _walk(tree: Any, key: str) -> Any:
    for part in key.split("."):
        tree = tree[part] if isinstance(tree, Mapping) else getattr(tree, part)
    return tree


def _base(config: Config, keys: Sequence[str]) -> dict[str, Any]:
    flat = {".".join(path): value for path, value in leaves(redacted(config))}
    return {name: value for name, value in flat.items() if not any(_covers(key, name) for key in (*_MAY_CHANGE, *keys))}


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What two bases differ in, a line each. Keys that a newer version has added are no difference."""
    names = [name for name in {**old, **new} if (name in old and name in new) or name.startswith("params.")]
    return [f"{n} was {old.get(n)!r}, is {new.get(n)!r}" for n in names if old.get(n, ...) != new.get(n, ...)]


# --- names


def _derived_name(label: str, keys: Sequence[str], base: Mapping[str, Any]) -> str:
    """The same for the same config and keys, so that values can be added and failed cells run again."""
    shorts = [_slug(short) for short in short_keys(keys)]
    return "-".join([label, *shorts, _hash({"base": base, "keys": sorted(keys)})])


def short_keys(keys: Sequence[str]) -> list[str]:
    """The last part of each key, or all of it where others end alike."""
    last = [key.rpartition(".")[2] for key in keys]
    return [short if last.count(short) == 1 else key for key, short in zip(keys, last, strict=True)]


def reordered(sweep: Sweep, keys: Sequence[str]) -> Sweep:
    """The same cells, named by their keys in another order."""
    cells = [_cell(sweep.name, {key: cell.values[key] for key in keys}, cell.config) for cell in sweep.cells]
    return replace(sweep, keys=tuple(keys), cells=tuple(cells))


def _cell(sweep: str, values: dict[str, Any], config: Config) -> Cell:
    shorts = short_keys(list(values))
    texts = [text_of(value) for value in values.values()]
    slug = "-".join(f"{_slug(short)}_{_slug(text)}" for short, text in zip(shorts, texts, strict=True))
    if len(slug) > _MAX_CELL:
        slug = f"{slug[: _MAX_CELL - 9]}-{_hash(values)}"
    name = f"{sweep}-{slug}"
    label = " ".join(f"{short}={text}" for short, text in zip(shorts, texts, strict=True))
    return Cell(name=name, label=label, values=values, config=replace(config, name=name))


def text_of(value: Any) -> str:
    """A value as one would type it; no two values have the same text."""
    if isinstance(value, str) and parse_value(value) == value:
        return value
    return json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)


def _slug(text: str) -> str:
    """Text for a folder's name. What had to be left out is made up for by a hash, so that names stay apart."""
    clean = re.sub(r"[^A-Za-z0-9._-]+", "-", text)
    if clean == text and len(text) <= _MAX_VALUE:
        return text
    return f"{clean[:_MAX_VALUE].strip('-')}-{_hash(text)}".lstrip("-")


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:8]
