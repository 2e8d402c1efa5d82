"""The declaration of a shipped trainer, through which the packages above this one use it.

The declarations import no torch.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

#: A check of a whole `Config`; the module of that class imports this one.
Check = Callable[[Any], list[str]]
#: A check of a whole `Config` and of the number of ranks of a new run.
RankCheck = Callable[[Any, int], list[str]]


def _no_problems(config: object) -> list[str]:
    return []


def _fits_any_ranks(config: object, num_ranks: int) -> list[str]:
    return []


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """A shipped trainer: the attribute `TRAINER` of its package. Its `train` module holds `train(ctx, cfg)`."""

    section: type | None = None
    """The dataclass of its own config section; the key of the section is the trainer's name."""
    shared_sections: tuple[str, ...] = ()
    """The sections for several trainers that this one reads: some of model, data, optim, schedule and precision."""
    unread_keys: tuple[str, ...] = ()
    """The dotted keys of these sections that it does not read."""
    roles: Mapping[str, int] = field(default_factory=dict)
    """Its roles in rank order, each with an example of a count; empty if it has none."""
    single_roles: tuple[str, ...] = ()
    """The roles that have exactly one rank."""
    is_elastic: bool = False
    """Whether the trainer supports `data.global_batch_size`."""
    divides_batches: bool = False
    """Whether it divides global batches among any number of ranks itself, instead of into equal micro-batches."""
    check: Check = _no_problems
    """Return the mistakes in a config of this trainer that no section can detect alone."""
    check_ranks: RankCheck = _fits_any_ranks
    """Return the reasons why a new run cannot have a number of ranks, before any of them starts."""
    check_host: Check = _no_problems
    """Return the problems that only the host of the supervisor can detect, such as missing files."""
    fixed_keys: tuple[str, ...] = ()
    """The keys that a resume cannot change, because they determine the content of a checkpoint."""
    module_key: str = ""
    """A key of its section that may be `module:name`, with a module of the user's own; empty if there is none."""
    values_of_weights: Callable[[Mapping[str, Any]], dict[str, Any]] | None = None
    """Return the values of its section that the `config.json` of a model in Hugging Face's format determines."""
    hugging_face_config: Callable[[Any, Any, Mapping[str, Any]], dict[str, Any]] | None = None
    """Return the `config.json` of its model in Hugging Face's format, from `Config`, `RunDir` and exported weights."""
    exported_weights: Callable[[Any, Any], Any] | None = None
    """Return the `StoredWeights` of an export from `Config` and those of a checkpoint; None exports the latter."""
    charts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Its charts in the report of a run: title → the metrics in the chart, where `*` stands for any text."""
    is_benchmark: bool = False
    """Whether a run ends with a report for `hpcdist bench show` instead of final metrics, and saves no checkpoints."""


def trainer_names() -> tuple[str, ...]:
    """Return the names of the shipped trainers in the order of the documentation; the first one is the default."""
    return cast("tuple[str, ...]", importlib.import_module("hpcdist.trainers").NAMES)


def default_trainer() -> str:
    return trainer_names()[0]


@functools.cache
def find_trainer(name: str) -> Trainer | None:
    """Return the declaration of a shipped trainer, or None if `name` is not the name of one."""
    if name not in trainer_names():
        return None
    return cast(Trainer, importlib.import_module(f"hpcdist.trainers.{name}").TRAINER)


def trainer_sections() -> dict[str, type]:
    """Return the dataclass of each shipped trainer's own section, by the key of the section."""
    sections = {}
    for name in trainer_names():
        trainer = find_trainer(name)
        if trainer is not None and trainer.section is not None:
            sections[name] = trainer.section
    return sections


def shared_sections() -> set[str]:
    """Return the keys of the sections that several shipped trainers read."""
    sections: set[str] = set()
    for name in trainer_names():
        trainer = find_trainer(name)
        if trainer is not None:
            sections.update(trainer.shared_sections)
    return sections
