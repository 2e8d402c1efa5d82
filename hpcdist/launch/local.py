"""Ranks as child processes of this one, each in a process group of its own."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

#: Reads `+pgid` and `-pgid` from a pipe that only the supervisor holds open. When the supervisor dies, whatever
#: killed it, the pipe ends and the process groups still noted are killed, grandchildren included.
_GUARD = """
import os, signal, sys
groups = set()
for line in sys.stdin:
    (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
for group in groups:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        pass
"""


class Guard:
    """Kills what it was told of when this process dies without a word."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-ISc", _GUARD],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            text=True,
        )

    def watch(self, group: int) -> None:
        self._tell(f"+{group}")

    def forget(self, group: int) -> None:
        self._tell(f"-{group}")

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


class LocalRanks:
    """The ranks of one attempt on this machine.

    Args:
        command: what every rank executes.
        envs: each rank's whole environment, by rank.
        logs: each rank's log file, by rank; standard output and error go there.
        guard: told of every process group.
        cwd: every rank's current folder.
    """

    def __init__(
        self,
        command: Sequence[str],
        envs: Sequence[Mapping[str, str]],
        logs: Sequence[Path],
        guard: Guard,
        *,
        cwd: Path,
    ) -> None:
        self._guard = guard
        self._processes: list[subprocess.Popen[bytes]] = []
        #: Exit codes in the order in which the ranks ended; negative ones are signals.
        self.exits: dict[int, int] = {}
        try:
            for env, log in zip(envs, logs, strict=True):
                with open(log, "ab") as file:
                    process = subprocess.Popen(
                        command,
                        env=env,
                        cwd=cwd,
                        stdin=subprocess.DEVNULL,
                        stdout=file,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                self._processes.append(process)
                guard.watch(process.pid)
            self._descriptors = [os.pidfd_open(process.pid) for process in self._processes]
        except BaseException:
            self._kill_groups()
            raise

    @property
    def running(self) -> list[int]:
        return [rank for rank in range(len(self._processes)) if rank not in self.exits]

    def wait(self, timeout_s: float) -> None:
        """Return when a rank has ended or the time is over; `exits` then has the news."""
        poll = select.poll()
        for rank in self.running:
            poll.register(self._descriptors[rank], select.POLLIN)
        poll.poll(timeout_s * 1000)
        for rank in self.running:
            code = self._processes[rank].poll()
            if code is not None:
                self.exits[rank] = code

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the ranks that still run (to them alone, not to what they have started)."""
        for rank in self.running:
            self._processes[rank].send_signal(number)

    def close(self) -> None:
        """Kill what is left of every rank's process group and collect it."""
        self._kill_groups()
        for descriptor in self._descriptors:
            os.close(descriptor)

    def _kill_groups(self) -> None:
        for rank, process in enumerate(self._processes):
            with suppress(ProcessLookupError):
                # The group outlives its leader as long as a grandchild lives in it.
                os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
            self.exits.setdefault(rank, code)
            self._guard.forget(process.pid)
