"""Protocols of the classes that start ranks, locally or on Slurm."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from hpcdist.run.attempt import Attempt
from hpcdist.run.attempt_times import Resources


class Ranks(Protocol):
    """The started ranks of one attempt."""

    #: Exit codes by rank, in the order in which the ranks ended; negative ones are signals.
    exits: dict[int, int]

    @property
    def running(self) -> list[int]:
        """The ranks that have not ended."""
        ...

    def host_of(self, rank: int) -> str:
        """Return the host of a rank, if known."""
        ...

    def wait(self, timeout_s: float) -> None:
        """Wait until a rank has ended or the time is over; updates `exits`."""
        ...

    def absent(self) -> list[int]:
        """Return the ranks that show no sign of a start."""
        ...

    def last_message(self) -> str:
        """Return the last message of the program that starts the ranks."""
        ...

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the running ranks."""
        ...

    def examine(self, command: Sequence[str], *, output: Path, limit_s: float, interrupted: Callable[[], bool]) -> None:
        """Run a command once on each node of the ranks, and wait for its end.

        The command is ended after `limit_s`, or soon after `interrupted` returns true. Its output is appended to
        `output`.
        """
        ...

    def close(self) -> None:
        """Kill the remaining ranks and their children, and release all resources."""
        ...


class NodeChanges(Protocol):
    """Changes of the nodes of a run that continues after node failures (`slurm/job/elastic_nodes.py`)."""

    def detect_lost(self) -> tuple[int, str] | None:
        """Return the first rank on a node that does not answer any more, and the node; None if all answer."""
        ...

    def replace_lost(self) -> str:
        """Choose the nodes of the next attempt after a failure.

        Return a sentence if they differ from those of the last attempt, which explains the failure; otherwise "".
        """
        ...

    def detect_returned(self) -> str:
        """Return the names of the nodes for which the ranks should be restarted now, or "". Called often."""
        ...

    def use_returned(self) -> None:
        """Choose more nodes for the next attempt, after `detect_returned` and the end of the ranks."""
        ...


class Launcher(Protocol):
    """Starts the ranks of each attempt of a run."""

    @property
    def num_ranks(self) -> int:
        """The number of ranks of the running or next attempt."""
        ...

    @property
    def resources(self) -> Resources:
        """The GPUs or cores of the ranks, by node."""
        ...

    def start(self, attempt: Attempt) -> Ranks:
        """Start all ranks. Raises HpcdistError if that fails, UserMistake if a retry cannot help."""
        ...

    def broken(self) -> str:
        """Return, after a failure, why ranks must not be restarted on these nodes; empty if they may be."""
        ...
