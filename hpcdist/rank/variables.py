"""Environment variables of the launchers, and a strict reader of them whose error messages end with a fix."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from hpcdist.errors import TopologyError, shortened

T = TypeVar("T")

OWN_PLACE = (
    "HPCDIST_RANK",
    "HPCDIST_WORLD_SIZE",
    "HPCDIST_LOCAL_RANK",
    "HPCDIST_LOCAL_WORLD_SIZE",
    "HPCDIST_NODE_RANK",
    "HPCDIST_NUM_NODES",
)
OWN_MEETING = (
    "HPCDIST_MASTER_ADDR",
    "HPCDIST_MASTER_PORT",
    "HPCDIST_JOB_ID",
    "HPCDIST_ATTEMPT",
)
TORCHRUN_CORE = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
TORCHRUN_PLACE = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE")
SLURM_COUNTS = (
    "SLURM_NTASKS",
    "SLURM_NPROCS",
    "SLURM_NTASKS_PER_NODE",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_NNODES",
    "SLURM_JOB_NUM_NODES",
    "SLURM_HET_SIZE",
)
"""In an allocation for one process each is at most 1; SLURM_TASKS_PER_NODE may be larger and is not in the list."""


class Variables:
    """Reads the variables of one launcher from `env`. Error messages end with `fix`.

    An empty variable counts as not set. All methods that read a value raise TopologyError.
    """

    def __init__(self, env: Mapping[str, str], fix: str) -> None:
        self.env = env
        self.fix = fix

    def has(self, name: str) -> bool:
        """Return whether a variable is set and not empty."""
        return bool(self.env.get(name))

    def first(self, *names: str) -> str:
        """Return the name of the first variable that is set."""
        for name in names:
            if self.has(name):
                return name
        raise self.error(f"{' or '.join(names)} must be set")

    def text(self, name: str, default: str | None = None) -> str:
        """Return the text of a variable, or the default. Raises TopologyError if neither exists."""
        if default is not None and not self.has(name):
            return default
        return self.env[self.first(name)]

    def number(self, name: str, default: int | None = None) -> int:
        """Return a whole number >= 0 of at most ten digits, which covers all numbers of Slurm."""
        if default is not None and not self.has(name):
            return default
        value = self.text(name)
        if re.fullmatch(r"[0-9]{1,10}", value) is None:
            raise self.error(f"{name} must be a whole number, got {shortened(value)!r}")
        return int(value)

    def parsed(self, name: str, parse: Callable[[str], T]) -> T:
        """Return the result of `parse` for a variable's text; name the variable in its TopologyError."""
        try:
            return parse(self.text(name))
        except TopologyError as error:
            raise self.error(f"{name}: {error}") from error

    def shown(self, names: Iterable[str]) -> str:
        """Return `NAME=value` of the variables that are set, for a message."""
        return ", ".join(f"{name}={shortened(self.env[name])}" for name in names if self.has(name))

    def missing(self, names: Iterable[str]) -> str:
        """Return the names of the variables that are not set, for a message."""
        return ", ".join(name for name in names if not self.has(name))

    def error(self, problem: str) -> TopologyError:
        """Return an error with the problem and the fix."""
        return TopologyError(f"{problem}; {self.fix}")
