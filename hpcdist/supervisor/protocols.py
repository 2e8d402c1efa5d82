"""Protocols of a launcher and its ranks, for the supervisor.

`local_launcher.py` and `job/launcher.py` implement them.
"""

import signal
from collections.abc import Callable, Sequence
from typing import Protocol

from hpcdist.host.cgroups import MemoryKill
from hpcdist.run.attempt_times import Resources
from hpcdist.run.folder import Attempt


class Ranks(Protocol):
    """The ranks of one attempt. Some may start only during a later `wait`."""

    #: Exit codes by rank, in the order in which the ranks ended; negative ones are signals.
    exits: dict[int, int]
    #: By rank, the processes of its control group that the kernel has killed for lack of memory until the rank ended.
    memory_kills: dict[int, MemoryKill]

    @property
    def remaining(self) -> list[int]:
        """The ranks that have not ended, including those that have not started yet."""

    def host_of(self, rank: int) -> str:
        """Return the name of the host on which a rank runs or will run."""

    def wait(self, timeout_s: float) -> None:
        """Start ranks that are not started yet; wait until one has ended or the time is over. Updates `exits`."""

    def absent(self) -> list[int]:
        """Return the ranks that show no sign of a start."""

    def last_message(self, rank: int) -> str:
        """Return the last message about a rank that has not started, of the program that should start it."""

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to all running ranks."""

    def examine(self, command: Sequence[str], *, limit_s: float, interrupted: Callable[[], bool]) -> str:
        """Run a command on each node and return its output; end it after `limit_s`, or soon after `interrupted`."""

    def close(self) -> None:
        """Kill the remaining ranks and their children, and release all resources."""


class NodeChanges:
    """Changes of the nodes of a run between its attempts.

    This class makes no changes. `job/elastic_nodes.py` has the changes of elastic runs.
    """

    def detect_lost(self) -> tuple[int, str] | None:
        """Return the first rank on a node that does not answer any more, and the node; None if all answer."""
        return None

    def replace_lost(self) -> str:
        """Choose the nodes after a failure; returns a sentence on the change of nodes, or "" if they stay the same."""
        return ""

    def detect_returned(self) -> str:
        """Return the names of the nodes for which the ranks should be restarted now, or "". Called often."""
        return ""

    def use_returned(self) -> None:
        """Choose more nodes for the next attempt, after `detect_returned` and the end of the ranks."""


class Launcher(Protocol):
    """Starts the ranks of each attempt of a run."""

    @property
    def num_ranks(self) -> int:
        """The number of ranks of the running or next attempt."""

    @property
    def resources(self) -> Resources:
        """The GPUs or cores of the running or next attempt."""

    def start(self, attempt: Attempt) -> Ranks:
        """Start all ranks, or leave it to `Ranks.wait`.

        Raises HpcdistError if that fails, UserMistake if a retry cannot help.
        """

    def broken(self) -> str:
        """Return, after a failure, why ranks must not be restarted on these nodes; empty if they may be."""
