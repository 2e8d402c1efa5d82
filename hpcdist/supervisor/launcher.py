"""Protocols of the launchers, which start the ranks of an attempt and wait for their end, and the guard, which ends
processes whose parent has died. The launchers are in `supervisor/local.py` and `slurm/job/launcher.py`.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from hpcdist.run.folder import Attempt
from hpcdist.run.records import Resources


class Ranks(Protocol):
    """The ranks of one attempt; those of a local run may be started only by a `wait`."""

    #: Exit codes by rank, in the order in which the ranks ended; negative ones are signals.
    exits: dict[int, int]

    @property
    def running(self) -> list[int]:  # those that have not ended
        ...
    def host_of(self, rank: int) -> str: ...

    def wait(self, timeout_s: float) -> None:
        """Start ranks that are not started yet; wait until one has ended or the time is over. Updates `exits`."""

    def absent(self) -> list[int]:
        """Return the ranks that show no sign of a start."""

    def last_message(self) -> str:
        """Return the last message of the program that starts the ranks."""

    def signal(self, number: signal.Signals) -> None: ...
    def examine(self, command: Sequence[str], *, limit_s: float, interrupted: Callable[[], bool]) -> str:
        """Run a command on each node and return its output; end it after `limit_s`, or soon after `interrupted`."""

    def close(self) -> None:
        """Kill the remaining ranks and their children, and release all resources."""


class NodeChanges:
    """Changes of the nodes of a run between its attempts: none. `slurm/job/elastic.py` has a run with changes."""

    def detect_lost(self) -> tuple[int, str] | None:
        """Return the first rank on a node that does not answer any more, and the node; None if all answer."""
        return None

    def replace_lost(self) -> str:
        """Choose the nodes after a failure; returns a sentence that explains it by their change, or ""."""
        return ""

    def detect_returned(self) -> str:
        """Return the names of the nodes for which the ranks should be restarted now, or "". Called often."""
        return ""

    def use_returned(self) -> None:
        """Choose more nodes for the next attempt, after `detect_returned` and the end of the ranks."""


class Launcher(Protocol):
    """Starts the ranks of each attempt of a run."""

    @property
    def num_ranks(self) -> int: ...  # of the running or next attempt
    @property
    def resources(self) -> Resources: ...
    def start(self, attempt: Attempt) -> Ranks:
        """Start all ranks, or leave it to `Ranks.wait`.

        Raises HpcdistError if that fails, UserMistake if a retry cannot help.
        """

    def broken(self) -> str:
        """Return, after a failure, why ranks must not be restarted on these nodes; empty if they may be."""


# Process guard: child processes end when the supervisor dies, also by SIGKILL.

#: Reads `+pgid` and `-pgid` from a pipe whose other end the supervisor holds, and each process only until it has
#: registered. When the supervisor dies, the pipe ends, and the guard kills all registered process groups, grandchildren
#: included.
_GUARD = """
import os, signal, sys
for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
    signal.signal(number, signal.SIG_IGN)  # Slurm sends SIGTERM to everything that a job has started
groups = set()
for line in sys.stdin:
    (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
for group in groups:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        pass
"""
#: A child registers its own group with the guard, through its standard input, before it executes the command. If the
#: supervisor did this after the start, a supervisor killed in between would leave an orphan. The child then closes the
#: pipe. The write is in a subshell, because SIGPIPE kills the writer if the guard is dead.
_REGISTER_AND_EXEC = '(echo "+$$" >&0); exec "$@" </dev/null'


class Guard:
    """Starts children as leaders of process groups, which it kills when this process dies."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-ISc", _GUARD],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            text=True,
        )
        assert self._process.stdin is not None
        self._pipe = self._process.stdin

    def start(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: Path,
        output: Path,
        stdout: socket.socket | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start a child in a new session; `output` gets its standard output, unless `stdout` does, and its errors."""
        with open(output, "ab") as file:
            return subprocess.Popen(
                ["/bin/sh", "-c", _REGISTER_AND_EXEC, "sh", *command],
                env=env,
                cwd=cwd,
                stdin=self._pipe,
                stdout=file if stdout is None else stdout.fileno(),
                stderr=file,
                start_new_session=True,
            )

    def fileno(self) -> int:
        return self._pipe.fileno()

    def forget(self, group: int) -> None:
        """Unregister the process group of an ended child, because the kernel may reuse its id."""
        # A run continues without its guard.
        with suppress(BrokenPipeError):
            self._pipe.write(f"-{group}\n")
            self._pipe.flush()

    def close(self) -> None:
        """End the guard as the death of this process does: it kills the groups that are still registered."""
        with suppress(BrokenPipeError):
            self._pipe.close()
        self._process.wait()
