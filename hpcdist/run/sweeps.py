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
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, is_dataclass, replace
from pathlib import Path
from typing import Any

from hpcdist.config.document import parse_value
from hpcdist.config.record_schema import CheckpointConfig
from hpcdist.config.schema import Config, to_tree
from hpcdist.config.written import flat_values, read_section, redacted
from hpcdist.errors import ConfigError, RunFolderError, UserMistake, plural
from hpcdist.host.json_files import fill, read_json, write_json
from hpcdist.host.ownership import require_trusted
from hpcdist.run.config_origin import Origin
from hpcdist.run.folder import ENDED, RunDir, State, Status, claim_experiment, read_record, require_record
from hpcdist.run.lease import holder

#: Keys that cannot be swept: they define the folder of a cell, or are common to all tasks of a job array.
_NOT_SWEPT = ("name", "experiment", "runs_dir", "cluster", "tracking.uri")
#: The key that repeats a setting: cells that differ by it alone are one setting.
REPETITION = "seed"
#: Keys that do not affect results: later cells of a sweep may have other values and remain comparable.
_MAY_CHANGE = ("name", "runs_dir", "cluster", "launch", "tracking", "checkpoint")
#: Limits of the characters that a value and a cell have in the name of a folder.
_MAX_VALUE = 24
_MAX_CELL = 100
#: Characters of a hash that replaces the rest of a longer text.
_HASH_LENGTH = 8


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One run of a sweep."""

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
    overridden = [text.partition("=")[0] for text in overrides]
    for text in texts:
        key, equals, raw = text.partition("=")
        words = _split(raw)
        if not equals or not key or key.startswith("-"):
            problems.append(f"{text!r} is not an axis: write key=value,value as in optim.lr=0.1,0.01")
        elif any(_covers(name, key) for name in _NOT_SWEPT):
            problems.append(f"{key} cannot be swept: all cells share it")
        elif any(_covers(other, key) or _covers(key, other) for other in axes):
            problems.append(f"{key} is swept twice: write its values in one --sweep")
        elif any(_covers(key, name) for name in overridden):
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
    arguments = list(axes or [])
    if not repeat:
        return arguments
    for word in [*(f"--sweep {axis}" for axis in arguments), *overrides]:
        if word.removeprefix("--sweep ").partition("=")[0] == REPETITION:
            raise UserMistake(f"--repeat {repeat} and {word} both set the seed: remove one of them")
    seeds = ",".join(str(seed) for seed in range(1, repeat + 1))
    return [*arguments, f"{REPETITION}={seeds}"]


def _covers(above: str, key: str) -> bool:
    """Return whether a key is `above`, or a key of the section `above`."""
    return key == above or key.startswith(f"{above}.")


def _split(raw: str) -> tuple[str, ...] | None:
    """Return the parts of a text between commas outside brackets and quotes; None if one of these is not closed."""
    parts: list[str] = []
    depth = 0  # of open brackets
    quote = ""  # the open quote
    start = 0  # of the current part
    for index, char in enumerate(raw):
        if quote:
            if char == quote:
                quote = ""
        elif char in "'\"" and (not raw[start:index].strip() or depth):
            quote = char  # in other places it is an apostrophe
        elif char in "[{":
            depth += 1
        elif char in "]}":
            depth -= 1
        elif char == "," and depth == 0:
            parts.append(raw[start:index].strip())
            start = index + 1
    if depth or quote:
        return None
    return (*parts, raw[start:].strip())


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
        arguments = [f"{key}={word}" for key, word in zip(axes, words, strict=True)]
        try:
            loaded.append((words, load(arguments)))
        except ConfigError as error:
            problems |= dict.fromkeys(error.problems)
            source = error.source or source
    if problems:
        raise ConfigError(*problems, source=source)
    _check_values(axes, loaded)

    keys = tuple(axes)
    first = loaded[0][1]
    last = loaded[-1][1]
    try:
        # A script's arguments may contain a swept key, `${params.lr}`: here all commands of a sweep get the same value.
        base = _base(load([]), keys)
    except ConfigError:  # without the swept keys, the config is not valid
        base_of_last = _base(last, keys)
        base = {name: value for name, value in _base(first, keys).items() if base_of_last.get(name, ...) == value}
    name = first.name
    if not name:
        # It depends only on config and keys, so that a later command can extend the sweep.
        shorts = [_slug(key) for key in _short_keys(keys)]
        name = "-".join([label_of(first), *shorts, _hash({"base": base, "keys": sorted(keys)})])
    cells = []
    for words, config in loaded:
        values = {key: _value_of(config, key, word) for key, word in zip(keys, words, strict=True)}
        cells.append(_cell(name, values, config))
    return Sweep(name=name, keys=keys, cells=tuple(cells), base=base)


def _check_values(axes: Mapping[str, tuple[str, ...]], loaded: Sequence[tuple[tuple[str, ...], Config]]) -> None:
    """Raise ConfigError for swept secrets, and for values that are given twice, also in another notation."""
    problems: dict[str, None] = {}
    for index, (key, texts) in enumerate(axes.items()):
        word_of_value: dict[str, str] = {}
        for words, config in loaded:
            if _walk(redacted(config), key) != _walk(to_tree(config), key):
                problems[f"{key} looks like a secret, and cells are named by their values: it cannot be swept"] = None
                continue
            word = words[index]
            value = json.dumps(_value_of(config, key, word), sort_keys=True, default=str)
            other = word_of_value.setdefault(value, word)
            if other != word:
                problems[f"{key}: {other} and {word} are the same value"] = None
        repeated = [text for text in texts if texts.count(text) > 1]
        if repeated:
            problems[f"{key}: {repeated[0]} is given twice"] = None
    if problems:
        raise ConfigError(*problems, source="--sweep")


def _value_of(config: Config, key: str, word: str) -> Any:
    """Return the value of a swept key in a cell's config, converted to the type of the key: `1` is 1.0 for a float."""
    tree: Any = config
    if key.partition(".")[0] in config.sections:
        tree = config.sections
    value = _walk(tree, key)
    if is_dataclass(value):  # a text such as `trainer=mine:train` stands for a whole section
        return parse_value(word)
    return value


def _walk(tree: Any, key: str) -> Any:
    """Return the value at a dotted key of nested mappings and dataclasses."""
    for part in key.split("."):
        tree = tree[part] if isinstance(tree, Mapping) else getattr(tree, part)
    return tree


def _base(config: Config, keys: Sequence[str]) -> dict[str, Any]:
    """Return the values that all cells of a sweep share, without those that do not affect results."""
    not_shared = (*_MAY_CHANGE, *keys)
    base = {}
    for name, value in flat_values(config).items():
        if not any(_covers(key, name) for key in not_shared):
            base[name] = value
    return base


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return the differences between two bases; keys that a newer hpcdist has added do not count."""
    differences = []
    for name in {**old, **new}:
        is_comparable = (name in old and name in new) or name.startswith("params.")
        if is_comparable and old.get(name, ...) != new.get(name, ...):
            differences.append(f"{name} was {old.get(name)!r}, is {new.get(name)!r}")
    return differences


def _short_keys(keys: Sequence[str]) -> list[str]:
    """Return the last part of each dotted key, or the whole key if another one has the same last part."""
    last_parts = [key.rpartition(".")[2] for key in keys]
    short_keys = []
    for key, part in zip(keys, last_parts, strict=True):
        if last_parts.count(part) == 1:
            short_keys.append(part)
        else:
            short_keys.append(key)
    return short_keys


def _cell(sweep: str, values: dict[str, Any], config: Config) -> Cell:
    shorts = _short_keys(list(values))
    texts = [text_of(value) for value in values.values()]
    slug = "-".join(f"{_slug(short)}_{_slug(text)}" for short, text in zip(shorts, texts, strict=True))
    if len(slug) > _MAX_CELL:
        suffix = f"-{_hash(values)}"
        slug = slug[: _MAX_CELL - len(suffix)] + suffix
    name = f"{sweep}-{slug}"
    return Cell(name=name, label=label(values), values=values, config=replace(config, name=name))


def label(values: Mapping[str, Any]) -> str:
    """Return the swept keys and values of a cell, such as `lr=0.1 seed=2`."""
    pairs = zip(_short_keys(list(values)), values.values(), strict=True)
    return " ".join(f"{short}={text_of(value)}" for short, value in pairs)


def setting_of(values: Mapping[str, Any]) -> str:
    """Return the label of a cell without its seed; `all seeds` for a sweep over seeds alone."""
    without_seed = {key: value for key, value in values.items() if key != REPETITION}
    return label(without_seed) or "all seeds"


def affects_results(key: str) -> bool:
    """Return whether a key of the config may change the results of a run."""
    without_effect = (*_MAY_CHANGE, "container", "preflight", "notify", "experiment")
    return not any(_covers(section, key) for section in without_effect)


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
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:_HASH_LENGTH]


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
        record = require_record(self.file)
        fill(_Saved, record, self.file)
        for cell in record["cells"]:
            if not _is_cell(cell):
                raise RunFolderError(f"{self.file} is damaged: {str(cell)[:40]!r} is not a cell")
            name = cell["name"]
            if Path(name).name != name or name in ("", "..", "."):
                raise RunFolderError(f"{self.file} is damaged: {name[:40]!r} is not a name of a run")
        return record

    def cells(self) -> list[RunDir]:
        """Return the folders of all cells, which may be missing."""
        return [RunDir(self.path.parent / cell["name"]) for cell in self.read()["cells"]]

    def read_state(self) -> State:
        """Return the state of the sweep, from the states of its cells. Does not query Slurm."""
        cells = self.cells()
        is_active = holder(self) is not None
        created = float(self.read()["created"])
        states: list[State] = []
        counts: Counter[str] = Counter()
        is_live = False
        for run in cells:
            if not os.path.lexists(run.path / "state.json"):
                counts["missing"] += 1
                continue
            try:
                is_held = holder(run) is not None  # a supervisor records the end before it releases the run
                state = run.read_state()
            except RunFolderError:
                counts["unreadable"] += 1
                continue
            states.append(state)
            counts[state.status] += 1
            if state.status not in ENDED:
                # A created cell is live if it waits for its turn in an active sweep, or in Slurm's queue.
                waits = is_held if state.status == "running" else is_active
                is_live = is_live or waits or run.slurm.exists()
        status: Status
        ended = None
        if not is_live:
            status = _end_of(counts)
            ended = max((state.ended or state.created for state in states), default=time.time())
        elif any(state.attempt for state in states):
            status = "running"
        else:
            status = "queued"
        reason = plural(len(cells), "cell")
        if set(counts) != {status}:
            reason += ": " + ", ".join(f"{number} {name}" for name, number in sorted(counts.items()))
        return State(
            status=status,
            reason=reason,
            created=created,
            ended=ended,
            attempt=sum(state.attempt for state in states),
        )


def _is_cell(cell: object) -> bool:
    if not isinstance(cell, dict) or not isinstance(cell.get("values"), dict):
        return False
    return isinstance(cell.get("name"), str) and isinstance(cell.get("label"), str)


def _end_of(counts: Collection[str]) -> Status:
    """Return the status of a sweep without live cells, from the statuses of its cells."""
    # A cell that is neither live nor ended has lost its supervisor.
    if "failed" in counts or "running" in counts:
        return "failed"
    if "cancelled" in counts:
        return "cancelled"
    if set(counts) == {"finished"}:
        return "finished"
    return "stopped"


def checkpoint_config(cells: Iterable[RunDir]) -> CheckpointConfig:
    """Return the section `checkpoint` of the first cell with a readable config, else the defaults."""
    for cell in cells:
        with suppress(ConfigError, RunFolderError):
            return read_section(cell.config, "checkpoint", CheckpointConfig)
    return CheckpointConfig()


def sweep_of(run: RunDir) -> SweepDir | None:
    """Return the sweep of a cell; None for an ordinary run, or if the sweep's folder is missing."""
    record = read_json(run.path / "cell.json") or {}
    name = record.get("sweep")
    if not isinstance(name, str) or Path(name).name != name:
        return None
    sweep = SweepDir(run.path.parent / name)
    if not sweep.file.is_file():
        return None
    return sweep


def named_setting(sweep: SweepDir, values: object) -> str:
    """Return the setting of a cell with the name of its sweep, `tune lr=0.1`; empty if the sweep has no seeds.

    Args:
        values: of the cell by swept key, as `cell.json` has them.
    """
    if not isinstance(values, dict) or REPETITION not in values:
        return ""
    return f"{sweep.name} {setting_of(values)}"


def mark(run: RunDir, sweep: SweepDir, cell: Cell) -> None:
    """Record in `cell.json` that a run is a cell of a sweep."""
    write_json(run.path / "cell.json", {"sweep": sweep.name, "label": cell.label, "values": cell.values})


def match(sweep: Sweep) -> Sweep:
    """Return a sweep with the order of keys of its folder, if there is one. Writes nothing.

    Raises RunFolderError if the folder holds a run, or a sweep over other keys or with another config.
    """
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
    differences = changes(old["base"], sweep.base)
    if differences:
        raise RunFolderError(
            f"sweep {sweep.name} was started with another config ({'; '.join(differences[:3])}): its cells could not be"
            " compared; choose another `name`"
        )
    # The names of cells depend on the order of the keys.
    keys = old["keys"]
    cells = [_cell(sweep.name, {key: cell.values[key] for key in keys}, cell.config) for cell in sweep.cells]
    return replace(sweep, keys=tuple(keys), cells=tuple(cells))


def write_sweep(sweep: Sweep) -> SweepDir:
    """Create the sweep's folder, or add new cells to it. Call `match` first."""
    folder = SweepDir(sweep.folder)
    claim_experiment(folder.path.parent)
    folder.path.mkdir(mode=0o700, exist_ok=True)
    record = read_record(folder.file)
    if not record:
        record = {"uid": uuid.uuid4().hex, "created": time.time(), "keys": list(sweep.keys), "cells": []}
    known_names = {cell["name"] for cell in record["cells"]}
    cells = list(record["cells"])
    for cell in sweep.cells:
        if cell.name not in known_names:
            cells.append({"name": cell.name, "label": cell.label, "values": cell.values})
    if not folder.mlflow.exists():
        # The first shipper creates the MLflow run; all others find it by this id.
        write_json(folder.mlflow, {"run_uid": record["uid"]}, durable=True)
    base = sweep.base | record.get("base", {})
    write_json(folder.file, record | {"base": base, "cells": cells}, durable=True)
    return folder
