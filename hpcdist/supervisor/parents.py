"""The ranks of an attempt, started by parent processes that outlive it (`rank/parent.py` has the protocol)."""

import json
import logging
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hpcdist.config.redaction import redact_text
from hpcdist.host.cgroups import MemoryKill
from hpcdist.rank.processes import KILL_S, MARK
from hpcdist.run.folder import Attempt
from hpcdist.supervisor.children import Guard

log = logging.getLogger(__name__)

#: Time for a parent on this machine to end after its requests have ended.
LEAVE_S = 5.0
#: Time for a report from another node. A node without power never reports.
_ANSWER_S = 2.0
#: Size of a read from the channel of the parents.
_READ_BYTES = 64 * 1024
#: Limit of a damaged report in a warning.
_SHOWN_CHARS = 200


class RankParents:
    """The parents of a run's ranks: one process of this machine, or all tasks of a step, which srun connects.

    Args:
        command: of the parent, or of srun.
        output: file for the process's errors.
        num_parents: number of the parents that report.
        leave_s: time for the process to end after its requests have ended.
    """

    def __init__(
        self,
        command: Sequence[str],
        guard: Guard,
        *,
        env: Mapping[str, str],
        cwd: Path,
        output: Path,
        num_parents: int = 1,
        leave_s: float = LEAVE_S,
    ) -> None:
        self.output = output
        self.num_parents = num_parents
        self._leave_s = leave_s
        self.hosts: dict[int | None, str] = {}  #: of the parents that are ready, by their rank
        self.is_usable = True  #: whether another attempt may use them
        self.have_ended = False  #: whether the process has ended, and all its reports have been received
        self._guard = guard
        self._unread = b""
        self._channel, theirs = socket.socketpair()
        try:
            with theirs:
                self.process = guard.start(command, env=env, cwd=cwd, output=output, channel=theirs)
        except BaseException:
            self._channel.close()
            raise
        self._descriptor = os.pidfd_open(self.process.pid)

    @property
    def are_ready(self) -> bool:
        """Whether all parents have finished their imports and wait for requests."""
        return len(self.hosts) == self.num_parents

    def is_alive(self) -> bool:
        return self.process.poll() is None

    def send(self, **request: Any) -> None:
        """Send a request to all parents; does nothing after the end of the process, which `have_ended` shows."""
        with suppress(OSError):
            self._channel.sendall(f"{json.dumps(request)}\n".encode())

    def receive(self, timeout_s: float) -> list[dict[str, Any]]:
        """Wait for reports, or for the end of the process; returns the reports about ranks."""
        poll = select.poll()
        poll.register(self._channel, select.POLLIN)
        poll.register(self._descriptor, select.POLLIN)
        poll.poll(timeout_s * 1000)
        # Asked before the read, so that `have_ended` implies that all reports have been read.
        have_ended = not self.is_alive()
        self._unread += self._read()
        self.have_ended = have_ended
        *lines, self._unread = self._unread.split(b"\n")
        reports = []
        for line in lines:
            report = self._parse(line.decode(errors="replace"))
            if report is not None:
                reports.append(report)
        return reports

    def _read(self) -> bytes:
        """Return the bytes that can be read without waiting."""
        received = b""
        with suppress(BlockingIOError, ConnectionResetError):
            while data := self._channel.recv(_READ_BYTES, socket.MSG_DONTWAIT):
                received += data
        return received

    def _parse(self, line: str) -> dict[str, Any] | None:
        """Return a report about a rank; None for another line. Notes the host of a parent that reports to be ready."""
        _, mark, content = line.partition(MARK)
        if not mark:
            return None  # a message of the container or of srun
        try:
            report: dict[str, Any] = json.loads(content)
        except ValueError:
            shown_line = redact_text(line)[:_SHOWN_CHARS]
            log.warning("a report of a parent process of ranks cannot be read: %s", shown_line)
            return None
        if "ready" not in report:
            return report
        self.hosts[report["parent"]] = report["ready"]
        if report["problem"]:
            log.warning("each rank imports torch itself: %s (see %s)", report["problem"], self.output)
        return None

    def close(self) -> None:
        """End the requests, wait for the end of the process, and kill it if it does not end."""
        if self._channel.fileno() == -1:
            return  # closed already, and its successor could not be started
        self._channel.close()
        # A parent that still imports, or is stopped, does not read the end of its requests.
        leave_s = self._leave_s if self.are_ready else 0
        try:
            self.process.wait(leave_s)
        except subprocess.TimeoutExpired:
            self.is_usable = False
            self.kill()
        self._guard.forget(self.process.pid)
        os.close(self._descriptor)

    def kill(self) -> None:
        """Kill the process group of the parent, or of srun."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class ParentRanks:
    """The ranks of one attempt, which start when all parents are ready, perhaps in a later call of `wait`.

    Args:
        starts: the variables of each rank, by rank; None if each parent starts its own rank, with `env`.
    """

    def __init__(
        self,
        parents: RankParents,
        attempt: Attempt,
        num_ranks: int,
        *,
        env: Mapping[str, str],
        starts: Sequence[Mapping[str, str]] | None = None,
    ) -> None:
        self.parents = parents
        self.attempt = attempt
        self.exits: dict[int, int] = {}
        self.memory_kills: dict[int, MemoryKill] = {}
        self._num_ranks = num_ranks
        self._env, self._starts = env, starts
        self._pids: dict[int, int] = {}
        self._are_requested = False
        self._error = ""
        #: Parents without processes of this attempt.
        self._over: set[int | None] = set()
        self._start()

    @property
    def remaining(self) -> list[int]:
        return [rank for rank in range(self._num_ranks) if rank not in self.exits]

    def absent(self) -> list[int]:
        """Return the ranks that have not started."""
        return [rank for rank in range(self._num_ranks) if rank not in self._pids]

    def last_message(self, rank: int) -> str:
        """Return why a rank has not started; see `Ranks.last_message`."""
        return self._error or "their parent process has not finished its imports"

    def wait(self, timeout_s: float) -> None:
        """Start the ranks when their parents are ready; wait for reports. Updates `exits`."""
        self._receive(timeout_s)
        self._start()
        if self.parents.have_ended and self.remaining:
            self._note_end_of_parents()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the running ranks. Ranks that have not started count as ended by SIGTERM."""
        if self._are_requested:
            self.parents.send(signal=int(number))
        elif number == signal.SIGTERM:
            self.exits = dict.fromkeys(range(self._num_ranks), -number)

    def close(self) -> None:
        """Kill the ranks and their children. If some may survive, the parents are not usable any more."""
        if self._are_requested:
            self.parents.send(end=self.attempt.number)
            until = time.monotonic() + KILL_S + _ANSWER_S
            while not (self._are_over() or self.parents.have_ended or time.monotonic() > until):
                self._receive(until - time.monotonic())
                if self._over:
                    until = min(until, time.monotonic() + _ANSWER_S)
            self.parents.is_usable = self._are_over()
        for rank in self.remaining:
            self.exits[rank] = -signal.SIGKILL

    def remove_sockets(self) -> None:
        """Remove the sockets of the ranks, which have ended: many programs cannot copy a folder with a socket in it."""
        with suppress(OSError):  # another node's view of the folder may be older
            for path in self.attempt.path.iterdir():
                if path.is_socket():
                    path.unlink(missing_ok=True)

    def _are_over(self) -> bool:
        return len(self._over) == self.parents.num_parents

    def _start(self) -> None:
        if self._are_requested or not self.parents.are_ready or not self.remaining:
            return
        self._are_requested = True
        number = self.attempt.number
        if self._starts is None:
            self.parents.send(start=number, env=dict(self._env))
            return
        for rank, rank_env in enumerate(self._starts):
            self.parents.send(start=number, rank=rank, env={**self._env, **rank_env})

    def _receive(self, timeout_s: float) -> None:
        for report in self.parents.receive(max(0.0, timeout_s)):
            if report.get("over") == self.attempt.number:
                self._over.add(report["parent"])
            elif report.get("attempt") == self.attempt.number:
                self._note(report)

    def _note(self, report: Mapping[str, Any]) -> None:
        rank = report["rank"]
        if "pid" in report:
            self._pids[rank] = report["pid"]
            self._note_start(report["pid"])
        elif "code" in report:
            self.exits.setdefault(rank, report["code"])
            if report["memory_kill"] is not None:
                self.memory_kills[rank] = MemoryKill(**report["memory_kill"])
        else:
            self._error = report["error"]
            self.exits.setdefault(rank, 1)

    def _note_start(self, pid: int) -> None:
        """Called when a rank has started; its process id is valid on the node of its parent."""

    def _note_end_of_parents(self) -> None:
        """Add the exit codes of the remaining ranks. Called if their parents have ended."""
        raise NotImplementedError
