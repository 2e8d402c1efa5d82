"""Sweeps: one run, called a cell, for each combination of values of the swept keys; and the folder of a sweep.

A cell is an ordinary run; its name consists of the sweep's name and its values: `tune-lr_0.1-seed_2`.
"""

import hashlib
import itertools
import json
import os
import re
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, is_dataclass, replace
from pathlib import Path
from typing import Any

from hpcdist.config.document import parse_value
from hpcdist.config.record_schema import CheckpointConfig
from hpcdist.config.schema import Config, to_tree
from hpcdist.config.written import flat_values, read_section, redacted
from hpcdist.errors import ConfigError, RunFolderError, UserMistake
from hpcdist.host.json_files import fill, read_json, write_json
from hpcdist.host.ownership import require_trusted
from hpcdist.run.config_origin import Origin
from hpcdist.run.folder import ENDED, RunDir, State, Status, claim_experiment, read_record, require_record
from hpcdist.run.lease import holder

#: Keys that define the folder of a cell, or that are common to all tasks of a job array.
_NOT_SWEPT = ("name", "experiment", "runs_dir", "cluster", "tracking.uri")
#: The key that repeats a setting: cells that differ by it alone are one setting.
REPETITION = "seed"
#: Keys that do not affect results: later cells of a sweep may have other values and remain comparable.
_MAY_CHANGE = ("name", "runs_dir", "cluster", "launch", "tracking", "checkpoint")
_MAX_VALUE = 24
_MAX_CELL = 100


@dataclass(frozen=True, kw_only=True)
class Cell:
    name: str  #: name of the run
    label: str  #: name of its MLflow run: `lr=0.1 seed=2`
    values: dict[str, Any]  #: value in the config of each swept key
    config: Config


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """A sweep as requested on the command line."""

    name: str
    keys: tuple[str, ...]
    cells: tuple[Cell, ...]
    base: dict[str, Any]  #: values that all cells share, also those added later; by dotted key
    origin: Origin | None = None  #: the config of the command line

    @property
    def folder(self) -> Path:
        config = self.cells[0].config
        return Path(config.runs_dir) / config.experiment / self.name


def parse_axes(texts: Sequence[str], overrides: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return the values of each key in arguments `key=v1,v2`; a comma inside brackets or quotes is part of a value."""
    problems: list[str] = []
    axes: dict[str, tuple[str, ...]] = {}
    given = [text.partition("=")[0] for text in overrides]
    for text in texts:
        key, equals, raw = text.partition("=")
        words = _split(raw)
        if not equals or not key or key.startswith("-"):
            problems.append(f"{text!r} is not an axis: write key=value,value as in optim.lr=0.1,0.01")
        elif any(_covers(name, key) for name in _NOT_SWEPT):
            problems.append(f"{key} cannot be swept: all cells share it")
        elif any(_covers(other, key) or _covers(key, other) for other in axes):
            problems.append(f"{key} is swept twice: write its values in one --sweep")
        elif any(_covers(key, name) for name in given):
            problems.append(f"{key} is both swept and overridden: remove one of them")
        elif words is None:
            problems.append(f"{key}: a bracket or quote is not closed in {raw!r}")
        elif not all(words):
            problems.append(f"{key} has an empty value in {raw!r}: write null for none, '' for an empty text")
        else:
            axes[key] = words
    if problems:
        raise ConfigError(*problems, source="--sweep")
    return axes


def with_repetitions(axes: Sequence[str] | None, repeat: int | None, overrides: Sequence[str]) -> list[str]:
    """Return the arguments of `--sweep`, and the seeds 1 to `repeat` as one more axis."""
    given = [*(f"--sweep {axis}" for axis in axes or []), *overrides]
    for word in given if repeat else ():
        if word.removeprefix("--sweep ").partition("=")[0] == REPETITION:
            raise UserMistake(f"--repeat {repeat} and {word} both set the seed: remove one of them")
    seeds = [f"{REPETITION}={','.join(map(str, range(1, repeat + 1)))}"] if repeat else []
    return [*(axes or []), *seeds]


def _covers(above: str, key: str) -> bool:
    return key == above or key.startswith(f"{above}.")


def _split(raw: str) -> tuple[str, ...] | None:
    parts: list[str] = []
    depth, quote, start = 0, "", 0
    for index, char in enumerate(raw):
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"" and (not raw[start:index].strip() or depth):
            quote = char  # in other places it is an apostrophe
        elif char in "[{":
            depth += 1
        elif char in "]}":
            depth -= 1
        elif char == "," and depth == 0:
            parts.append(raw[start:index].strip())
            start = index + 1
    return None if depth or quote else (*parts, raw[start:].strip())


def make_sweep(
    axes: Mapping[str, tuple[str, ...]], load: Callable[[Sequence[str]], Config], label_of: Callable[[Config], str]
) -> Sweep:
    """Load the configs of all cells, and name the cells. Raises ConfigError with the mistakes of all cells.

    Args:
        load: returns the config with additional overrides.
        label_of: returns the beginning of the sweep's name, if the config sets no name.
    """
    problems: dict[str, None] = {}
    source = "--sweep"
    loaded: list[tuple[tuple[str, ...], Config]] = []
    for words in itertools.product(*axes.values()):
        try:
            loaded.append((words, load([f"{key}={word}" for key, word in zip(axes, words, strict=True)])))
        except ConfigError as error:
            problems |= dict.fromkeys(error.problems)
            source = error.source or source
    if problems:
        raise ConfigError(*problems, source=source)
    _check_values(axes, loaded)

    keys = tuple(axes)
    try:
        # A script's arguments may contain a swept key, `${params.lr}`: here all commands of a sweep get the same value.
        base = _base(load([]), keys)
    except ConfigError:  # without the swept keys, the config is not valid
        base = _base(loaded[0][1], keys)
        of_last = _base(loaded[-1][1], keys)
        base = {name: value for name, value in base.items() if of_last.get(name, ...) == value}
    # A derived name depends only on config and keys, so that a later command can extend the sweep.
    shorts = map(_slug, _short_keys(keys))
    derived = "-".join([label_of(loaded[0][1]), *shorts, _hash({"base": base, "keys": sorted(keys)})])
    name = loaded[0][1].name or derived
    cells = [
        _cell(name, {key: _value_of(config, key, word) for key, word in zip(keys, words, strict=True)}, config)
        for words, config in loaded
    ]
    return Sweep(name=name, keys=keys, cells=tuple(cells), base=base)


def _check_values(axes: Mapping[str, tuple[str, ...]], loaded: Sequence[tuple[tuple[str, ...], Config]]) -> None:
    problems: dict[str, None] = {}
    for index, (key, texts) in enumerate(axes.items()):
        seen: dict[str, str] = {}
        for words, config in loaded:
            word, value = words[index], _value_of(config, key, words[index])
            if _walk(redacted(config), key) != _walk(to_tree(config), key):
                problems[f"{key} looks like a secret, and cells are named by their values: it cannot be swept"] = None
            elif (other := seen.setdefault(json.dumps(value, sort_keys=True, default=str), word)) != word:
                problems[f"{key}: {other} and {word} are the same value"] = None
        if twice := next((text for text in texts if texts.count(text) > 1), None):
            problems[f"{key}: {twice} is given twice"] = None
    if problems:
        raise ConfigError(*problems, source="--sweep")


def _value_of(config: Config, key: str, word: str) -> Any:
    """Return a cell's value in the config, which has its type there: `1` is 1.0 for a float."""
    value = _walk(config.sections if key.partition(".")[0] in config.sections else config, key)
    # A text such as `trainer=mine:train` stands for a whole section.
    return parse_value(word) if is_dataclass(value) else value


def _walk(tree: Any, key: str) -> Any:
    for part in key.split("."):
        tree = tree[part] if isinstance(tree, Mapping) else getattr(tree, part)
    return tree


def _base(config: Config, keys: Sequence[str]) -> dict[str, Any]:
    not_shared = (*_MAY_CHANGE, *keys)
    return {
        name: value for name, value in flat_values(config).items() if not any(_covers(key, name) for key in not_shared)
    }


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return the differences between two bases; keys that a newer hpcdist has added do not count."""
    names = [name for name in {**old, **new} if (name in old and name in new) or name.startswith("params.")]
    return [f"{n} was {old.get(n)!r}, is {new.get(n)!r}" for n in names if old.get(n, ...) != new.get(n, ...)]


def _short_keys(keys: Sequence[str]) -> list[str]:
    last = [key.rpartition(".")[2] for key in keys]
    return [short if last.count(short) == 1 else key for key, short in zip(keys, last, strict=True)]


def _cell(sweep: str, values: dict[str, Any], config: Config) -> Cell:
    shorts = _short_keys(list(values))
    texts = [text_of(value) for value in values.values()]
    slug = "-".join(f"{_slug(short)}_{_slug(text)}" for short, text in zip(shorts, texts, strict=True))
    if len(slug) > _MAX_CELL:
        slug = f"{slug[: _MAX_CELL - 9]}-{_hash(values)}"
    name = f"{sweep}-{slug}"
    return Cell(name=name, label=label(values), values=values, config=replace(config, name=name))


def label(values: Mapping[str, Any]) -> str:
    pairs = zip(_short_keys(list(values)), values.values(), strict=True)
    return " ".join(f"{short}={text_of(value)}" for short, value in pairs)


def setting_of(values: Mapping[str, Any]) -> str:
    """Return the label of a cell without its seed; of a sweep over seeds alone `all seeds`."""
    return label({key: value for key, value in values.items() if key != REPETITION}) or "all seeds"


def affects_results(key: str) -> bool:
    return not any(_covers(one, key) for one in (*_MAY_CHANGE, "container", "preflight", "experiment"))


def text_of(value: Any) -> str:
    """Return a value as typed on a command line; different values have different texts."""
    if isinstance(value, str) and parse_value(value) == value:
        return value
    return json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)


def _slug(text: str) -> str:
    """Return a text for use in a folder's name; if characters are left out, a hash keeps it unique."""
    clean = re.sub(r"[^A-Za-z0-9._-]+", "-", text)
    if clean == text and len(text) <= _MAX_VALUE:
        return text
    return f"{clean[:_MAX_VALUE].strip('-')}-{_hash(text)}".lstrip("-")


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:8]


# The folder of a sweep, and its relation to the folders of its cells.
#
#     runs/<experiment>/<sweep>/
#         sweep.json  mlflow.json  lease
#         request.json                       request to stop or cancel a sweep that runs its cells one after the other
#         submitit/                          batch script and logs of its job arrays
#     runs/<experiment>/<sweep>-<cell>/      an ordinary run, with a file `cell.json`
#
# The state of a sweep is derived from the states of its cells and not stored.


@dataclass(frozen=True, kw_only=True)
class _Saved:
    """The content of `sweep.json`."""

    uid: str
    created: float
    keys: list[str]
    base: dict[str, Any]
    cells: list[dict[str, Any]]


class SweepDir(RunDir):
    """The folder of a sweep: like a run's folder, but without a config and a state file."""

    kind = "sweep"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.file = path / "sweep.json"
        self.request = path / "request.json"

    def read(self) -> dict[str, Any]:
        """Return the content of `sweep.json`. Raises RunFolderError if it is missing or damaged."""
        found = require_record(self.file)
        fill(_Saved, found, self.file)
        for cell in found["cells"]:
            known = isinstance(cell, dict) and isinstance(cell.get("values"), dict)
            if not known or not all(isinstance(cell.get(key), str) for key in ("name", "label")):
                raise RunFolderError(f"{self.file} is damaged: {str(cell)[:40]!r} is not a cell")
            if Path(cell["name"]).name != cell["name"] or cell["name"] in ("", "..", "."):
                raise RunFolderError(f"{self.file} is damaged: {cell['name'][:40]!r} is not a name of a run")
        return found

    def cells(self) -> list[RunDir]:
        return [RunDir(self.path.parent / cell["name"]) for cell in self.read()["cells"]]

    def read_state(self) -> State:
        """Return the state of the sweep, from the states of its cells. Does not query Slurm."""
        cells, active, created = self.cells(), holder(self) is not None, float(self.read()["created"])
        states: list[State] = []
        num_live, num_unreadable = 0, 0
        existing = [run for run in cells if os.path.lexists(run.path / "state.json")]
        for run in existing:
            try:
                is_held = holder(run) is not None  # a supervisor records the end before it releases the run
                states.append(state := run.read_state())
            except RunFolderError:
                num_unreadable += 1
                continue
            # A created cell is live if it waits for its turn in an active sweep, or in Slurm's queue.
            waits = is_held if state.status == "running" else active
            num_live += state.status not in ENDED and (waits or run.slurm.exists())
        odd = ["missing"] * (len(cells) - len(existing)) + ["unreadable"] * num_unreadable
        counts = Counter([state.status for state in states] + odd)
        status: Status
        if num_live:
            status = "running" if any(state.attempt for state in states) else "queued"
        else:
            # A cell that is neither live nor ended has lost its supervisor.
            found_ends = {"failed" if name == "running" else name for name in counts}
            alone: Status = "finished" if found_ends == {"finished"} else "stopped"
            status = "failed" if "failed" in found_ends else "cancelled" if "cancelled" in found_ends else alone
        return State(
            status=status,
            reason=f"{len(cells)} cells: {', '.join(f'{number} {name}' for name, number in sorted(counts.items()))}",
            created=created,
            ended=None if num_live else max((state.ended or state.created for state in states), default=time.time()),
            attempt=sum(state.attempt for state in states),
        )


def checkpoint_config(cells: Iterable[RunDir]) -> CheckpointConfig:
    """Return the section `checkpoint` of the first cell whose config can be read, else the defaults."""
    for cell in cells:
        with suppress(ConfigError, RunFolderError):
            return read_section(cell.config, "checkpoint", CheckpointConfig)
    return CheckpointConfig()


def sweep_of(run: RunDir) -> SweepDir | None:
    """Return the sweep of a cell; None for an ordinary run, or if the sweep's folder is missing."""
    name = (read_json(run.path / "cell.json") or {}).get("sweep")
    if not isinstance(name, str) or Path(name).name != name:
        return None
    found = SweepDir(run.path.parent / name)
    return found if found.file.is_file() else None


def mark(run: RunDir, sweep: SweepDir, cell: Cell) -> None:
    write_json(run.path / "cell.json", {"sweep": sweep.name, "label": cell.label, "values": cell.values})


def match(sweep: Sweep) -> Sweep:
    """Return a sweep with the order of keys of its folder, if there is one. Writes nothing."""
    folder = SweepDir(sweep.folder)
    if folder.path.exists():
        require_trusted(folder.path, "run --sweep")
    if not folder.file.is_file():
        if (folder.path / "state.json").exists():
            raise RunFolderError(f"{folder.path} is a run, not a sweep: choose another `name`")
        return sweep
    old = folder.read()
    if set(old["keys"]) != set(sweep.keys):
        raise RunFolderError(
            f"sweep {sweep.name} is over {', '.join(old['keys'])}, not over {', '.join(sweep.keys)}: values can be"
            " added to it, keys cannot; choose another `name`"
        )
    if differences := changes(old["base"], sweep.base):
        raise RunFolderError(
            f"sweep {sweep.name} was started with another config ({'; '.join(differences[:3])}): its cells could not be"
            " compared; choose another `name`"
        )
    # The names of cells depend on the order of the keys.
    cells = [_cell(sweep.name, {key: one.values[key] for key in old["keys"]}, one.config) for one in sweep.cells]
    return replace(sweep, keys=tuple(old["keys"]), cells=tuple(cells))


def write_sweep(sweep: Sweep) -> SweepDir:
    """Create the sweep's folder, or add new cells to it. Call `match` first."""
    folder = SweepDir(sweep.folder)
    claim_experiment(folder.path.parent)
    folder.path.mkdir(mode=0o700, exist_ok=True)
    fresh: dict[str, Any] = {"uid": uuid.uuid4().hex, "created": time.time(), "keys": list(sweep.keys), "cells": []}
    known = read_record(folder.file) or fresh
    names = {cell["name"] for cell in known["cells"]}
    new = [cell for cell in sweep.cells if cell.name not in names]
    added = [{"name": cell.name, "label": cell.label, "values": cell.values} for cell in new]
    if not folder.mlflow.exists():
        # The first shipper creates the MLflow run; all others find it by this id.
        write_json(folder.mlflow, {"run_uid": known["uid"]}, durable=True)
    base = sweep.base | known.get("base", {})
    write_json(folder.file, known | {"base": base, "cells": [*known["cells"], *added]}, durable=True)
    return folder
