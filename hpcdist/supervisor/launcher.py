"""What the supervisor asks of whatever starts ranks, and of whoever is told how it goes."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from hpcdist.run.attempt import Attempt


class Ranks(Protocol):
    """The ranks of one attempt. They are started when this exists."""

    #: Exit codes by rank, in the order in which the ranks ended; negative ones are signals.
    exits: dict[int, int]

    @property
    def running(self) -> list[int]:
        """The ranks that have not ended."""
        ...

    def host_of(self, rank: int) -> str:
        """The host that a rank runs or ran on, as far as it is known here."""
        ...

    def wait(self, timeout_s: float) -> None:
        """Return when a rank has ended or the time is over; `exits` then has the news."""
        ...

    def absent(self) -> list[int]:
        """The ranks that have shown no sign of having been started."""
        ...

    def last_words(self) -> str:
        """The last message of whatever starts the ranks."""
        ...

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the ranks that still run."""
        ...

    def examine(self, command: Sequence[str], *, output: Path, limit_s: float, interrupted: Callable[[], bool]) -> None:
        """Run a command once on each node that holds ranks, beside them.

        Returns when it has ended everywhere, after `limit_s`, or soon after `interrupted` is true; it has ended then.
        What it says is appended to `output`.
        """
        ...

    def close(self) -> None:
        """Kill what is left of the ranks, their children included, and release everything."""
        ...


class Launcher(Protocol):
    """Starts the ranks of a run, attempt after attempt, always in the same place."""

    num_ranks: int

    def start(self, attempt: Attempt) -> Ranks:
        """Start every rank; HpcdistError when none can be, UserMistake when no retry would help."""
        ...

    def broken(self) -> str:
        """Asked after a failure: why ranks should not be started here again, or nothing when they may."""
        ...
