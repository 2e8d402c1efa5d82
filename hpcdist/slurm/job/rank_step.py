"""The ranks of one attempt as one srun step, and their exit codes from srun's messages and outcome files."""

from __future__ import annotations

import logging
import os
import re
import select
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Protocol

from hpcdist.containers.steps import NoContainers
from hpcdist.host.commands import last_line
from hpcdist.host.files import read_json
from hpcdist.host.log_files import PIECE_BYTES, last_lines
from hpcdist.host.nodelist import expand
from hpcdist.host.retry import retry
from hpcdist.run.folder import Attempt
from hpcdist.slurm.current_job import signal_named_steps
from hpcdist.slurm.job.srun import step_name
from hpcdist.supervisor.launcher import Guard

log = logging.getLogger(__name__)
#: `srun: error: n2: tasks 2-3: Killed`, `srun: error: n1: task 0: Exited with exit code 1`
_TASK_ENDED = re.compile(r"srun: error: (?P<host>\S+): tasks? (?P<ranks>[\d,\-]+): (?P<how>.+)")
_EXIT_CODE = re.compile(r"Exited with exit code (\d+)")
_SIGNALS = {
    "Killed": signal.SIGKILL,
    "Out Of Memory": signal.SIGKILL,
    "Terminated": signal.SIGTERM,
    "Segmentation fault": signal.SIGSEGV,
    "Aborted": signal.SIGABRT,
    "Bus error": signal.SIGBUS,
    "Alarm clock": signal.SIGALRM,
    "User defined signal 2": signal.SIGUSR2,
}
#: Time for srun to end after its tasks are killed.
END_STEP_S = 20.0
#: Time for srun to end after rank 0 has reported the end of the run; then the nodes are asked for running ranks. The
#: interval doubles each time, up to MAX_QUERY_INTERVAL_S.
REPORTED_S = 20.0
MAX_QUERY_INTERVAL_S = 600.0
#: Number of lines to search backwards for one that is not empty.
_LAST_LINES = 10
#: A file of a rank in the attempt's folder: its log, which Slurm opens when it starts the rank, or one that it wrote.
_FILE_OF_RANK = re.compile(r"\.?rank-(\d+)\.")
#: Pause after a search through the attempt's folder, as a multiple of the search's duration.
SEARCH_PAUSE = 50.0
#: Coarsest resolution of a file system's time stamps.
FOLDER_TICK_S = 2.0


def ended_tasks(messages: str, first_ranks: Mapping[str, int] | None = None) -> dict[int, tuple[str, int]]:
    """Return host and exit code (negative: signal) of each task that srun reports as failed, in the order of reports.

    Args:
        first_ranks: first rank of the component of each host; srun numbers the tasks of each component from 0.
    """
    found: dict[int, tuple[str, int]] = {}
    for match in _TASK_ENDED.finditer(messages):
        how = match["how"].strip()
        code = _EXIT_CODE.match(how)
        number = next((value for name, value in _SIGNALS.items() if how.startswith(name)), None)
        value = int(code[1]) if code else -number if number is not None else 1
        for task in expand(f"t[{match['ranks']}]"):
            rank = int(task[1:]) + (first_ranks or {}).get(match["host"], 0)
            found.setdefault(rank, (match["host"], value))
    return found


class StepNodes(Protocol):
    """The nodes of a step of ranks (`SlurmLauncher`)."""

    def end_ranks(self, attempt: Attempt) -> bool:
        """Kill the ranks without Slurm if a node may be lost; return whether Slurm cannot end the attempt's step."""
        ...

    def running_ranks(self) -> set[int] | None:
        """Return the ranks that run on the nodes; None if that is unknown."""
        ...

    def examine(self, command: Sequence[str], *, output: Path, limit_s: float, interrupted: Callable[[], bool]) -> None:
        """Run a command once on each node; see `Ranks.examine`."""
        ...


class RankStep:
    """The ranks of one attempt, as one srun process.

    A poll without news costs two system calls: srun's messages are read from the last position, and outcome files are
    searched only after the attempt's folder has changed.

    Args:
        hosts: the planned host of each rank, if it is known.
        first_ranks: see `ended_tasks`.
        shows_start: whether Slurm opens each rank's log when it launches the task.
    """

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        num_ranks: int,
        attempt: Attempt,
        guard: Guard,
        nodes: StepNodes,
        containers: NoContainers,
        *,
        cwd: Path,
        hosts: Sequence[str] = (),
        first_ranks: Mapping[str, int] | None = None,
        shows_start: bool = True,
    ) -> None:
        self._nodes = nodes
        self._shows_start = shows_start
        self._next_query: float | None = None
        self._query_interval_s = REPORTED_S
        self._planned_hosts = hosts
        self._first_ranks = first_ranks
        self._num_ranks = num_ranks
        self._attempt = attempt
        self._containers = containers
        self._guard = guard
        self.exits: dict[int, int] = {}
        self._running = list(range(num_ranks))
        self._hosts: dict[int, str] = {}
        self._unread = b""
        self._folder_time: int | None = None
        self._changed_at = 0.0
        self._search_again = True
        self._next_search = 0.0
        self._reported: set[int] = set()
        self._is_away = False
        self._num_read = 0
        self._messages = messages = attempt.path / "srun.log"
        # Opened before srun starts: an error here would leave srun running.
        self._log: IO[bytes] = retry(lambda: open(messages, "a+b"), messages)  # noqa: SIM115  # closed with the step
        try:
            self._process = guard.start(command, env=env, cwd=cwd, output=messages)
        except BaseException:
            self._log.close()
            raise
        self._log.seek(0)
        self._descriptor = os.pidfd_open(self._process.pid)

    @property
    def running(self) -> list[int]:
        """The ranks that have not ended."""
        if len(self._running) != self._num_ranks - len(self.exits):
            self._running = [rank for rank in range(self._num_ranks) if rank not in self.exits]
        return self._running

    def host_of(self, rank: int) -> str:
        """Return the host from srun's messages or the heartbeat; before these the planned host, or the allocation."""
        planned = self._planned_hosts[rank] if self._planned_hosts else os.environ["SLURM_JOB_NODELIST"]
        beat = read_json(self._attempt.beat(rank)) or {}
        return str(self._hosts.get(rank) or beat.get("host") or planned)

    def wait(self, timeout_s: float) -> None:
        """Return when the step has ended or the time is over.

        srun waits for the tasks of a failed node, so messages and outcome files are evaluated before it ends.
        """
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        ended = bool(poll.poll(timeout_s * 1000))
        if not ended:
            try:
                self._poll(ended=False)
            except OSError as error:
                if not self._is_away:
                    log.warning("%s: %s; the ranks continue", error.filename or self._messages, error.strerror)
                self._is_away = True
            if self._next_query is not None and time.monotonic() > self._next_query:
                self._query_running_ranks()
        else:
            retry(lambda: self._poll(ended=True), self._attempt.path)
            code = self._process.wait()
            if code != 0 and not any(self.exits.values()):
                self.exits.setdefault(0, code)
            for rank in self.running:
                self.exits[rank] = 0

    def _query_running_ranks(self) -> None:
        """Count ranks as ended if none runs on any node: srun waits forever for the tasks of a killed slurmstepd."""
        if self._nodes.running_ranks() == set():
            log.warning("srun waits for ranks that have ended: their slurmstepd has probably been killed")
            for rank in self.running:
                self.exits[rank] = 0
        self._query_interval_s = min(2 * self._query_interval_s, MAX_QUERY_INTERVAL_S)
        self._next_query = time.monotonic() + self._query_interval_s

    def absent(self) -> list[int]:
        """Return the ranks without any file in the attempt's folder, which have not been started."""
        if not self._shows_start:
            return []
        # Listing the folder refreshes a network file system's cache; opening a single file does not.
        names = retry(lambda: os.listdir(self._attempt.path), self._attempt.path)
        matches = (_FILE_OF_RANK.match(name) for name in names)
        started = {int(match[1]) for match in matches if match}
        return [rank for rank in range(self._num_ranks) if rank not in started]

    def last_message(self) -> str:
        """Return the last line of the output of srun."""
        path = self._attempt.path / "srun.log"
        lines = retry(lambda: last_lines(path, _LAST_LINES), path)
        return last_line("\n".join(text for _, text in lines)) or "no output of srun"

    def _poll(self, *, ended: bool) -> None:
        self._read_messages(to_the_end=ended)
        self._find_failures(in_any_case=ended)
        if self._is_away:
            log.warning("%s is available again", self._attempt.path)
        self._is_away = False

    def _read_log(self) -> bytes:
        try:
            text = self._log.read(PIECE_BYTES)
        except OSError:
            # A stale file handle stays stale.
            reopened = open(self._messages, "rb")  # noqa: SIM115  # closed with the step
            reopened.seek(self._num_read)
            self._log = reopened
            raise
        self._num_read += len(text)
        return text

    def _read_messages(self, *, to_the_end: bool) -> None:
        """Evaluate srun's messages since the last call, complete lines only."""
        while data := self._read_log():
            *whole, rest = (self._unread + data).split(b"\n")
            # Messages of srun are short; longer lines may be cut.
            self._unread = rest[-PIECE_BYTES:]
            self._count_exits(b"\n".join(whole))
        if to_the_end:
            self._count_exits(self._unread)
            self._unread = b""

    def _count_exits(self, text: bytes) -> None:
        for rank, (host, code) in ended_tasks(text.decode(errors="replace"), self._first_ranks).items():
            self._hosts.setdefault(rank, host)
            if rank not in self.exits:
                code = self._containers.exit_code(self._attempt, rank, host, code)
            self.exits.setdefault(rank, code)

    def _find_failures(self, *, in_any_case: bool) -> None:
        """Count ranks that have reported a failure; each outcome file is read once."""
        began = time.monotonic()
        changed = os.stat(self._attempt.path).st_mtime_ns
        if changed != self._folder_time:
            self._folder_time, self._changed_at, self._search_again = changed, began, True
        if not in_any_case and (not self._search_again or began < self._next_search):
            return
        # A further change within the resolution of the folder's time stamp does not change the time stamp.
        self._search_again = began < self._changed_at + FOLDER_TICK_S
        outcomes = self._attempt.outcomes(skip=self._reported)
        self._reported |= outcomes.keys()
        for rank, outcome in sorted(outcomes.items(), key=lambda item: float(item[1]["time"])):
            if outcome["outcome"] in ("failed", "rejected"):
                self.exits.setdefault(rank, 2 if outcome["outcome"] == "rejected" else 1)
            elif rank == 0:
                self._next_query = began + self._query_interval_s
        for rank, code in self._containers.reported_exits(self._attempt, skip=self.exits).items():
            self.exits.setdefault(rank, code)
        # While thousands of ranks create their files the folder changes all the time.
        now = time.monotonic()
        self._next_search = now + SEARCH_PAUSE * (now - began)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to every task that still runs."""
        signal_named_steps(step_name(self._attempt), number.name.removeprefix("SIG"))

    def examine(self, command: Sequence[str], *, output: Path, limit_s: float, interrupted: Callable[[], bool]) -> None:
        """Run a command once on each node of the job."""
        self._nodes.examine(command, output=output, limit_s=limit_s, interrupted=interrupted)

    def close(self) -> None:
        """End the step on every node that answers, and srun with it."""
        failed = self._process.poll() is None or any(self.exits.values())
        left = failed and self._nodes.end_ranks(self._attempt)
        if self._process.poll() is None:
            if left:
                os.killpg(self._process.pid, signal.SIGKILL)
            # Killing srun alone would leave its tasks running.
            elif not signal_named_steps(step_name(self._attempt), "KILL"):
                self._process.terminate()  # the step has not been created, or the controller does not answer
            try:
                self._process.wait(END_STEP_S)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
        self._containers.clean_up(self._attempt, failed=failed)
        self._guard.forget(self._process.pid)
        self._log.close()
        os.close(self._descriptor)
