"""The ranks of one attempt as the tasks of one srun step: how they end, by what srun and they themselves say."""

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

from hpcdist.containers.node_steps import ContainerSteps
from hpcdist.files.atomic import read_json
from hpcdist.files.log_text import PIECE_BYTES, last_lines
from hpcdist.files.retry import retry
from hpcdist.machine.timed_command import last_line
from hpcdist.run.attempt import Attempt
from hpcdist.slurm.current_job import signal_named_steps
from hpcdist.slurm.job.srun import step_name
from hpcdist.slurm.nodelist import expand
from hpcdist.supervisor.process_guard import Guard

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
}


#: How long srun may take to end once its tasks are killed.
END_STEP_S = 20.0
#: srun gets this long to end once rank 0 has reported the end of the run; then the nodes are asked for ranks. The wait
#: before the next question is twice as long each time, up to `ASK_AT_MOST_S`.
REPORTED_S = 20.0
ASK_AT_MOST_S = 600.0
#: How far back to look for a line that is not empty.
_LAST_LINES = 10
#: A file of a rank's in the attempt's folder: its log, which Slurm opens as it starts the rank, or one of its own.
_FILE_OF_RANK = re.compile(r"\.?rank-(\d+)\.")
#: A search through the attempt's folder is followed by a pause of so many times what it took.
SEARCH_PAUSE = 50.0


#: No file system's time stamps are coarser.
FOLDER_TICK_S = 2.0


def ended_tasks(messages: str, first_ranks: Mapping[str, int] | None = None) -> dict[int, tuple[str, int]]:
    """Host and exit code (negative: signal) of every task that srun reports as ended badly, in its order.

    Args:
        first_ranks: first rank of the component that a host belongs to; srun counts a component's tasks from 0.
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


class Beside(Protocol):
    """Runs a command once on each node of the job, as `Ranks.examine` is described."""

    def __call__(
        self, command: Sequence[str], *, output: Path, limit_s: float, interrupted: Callable[[], bool]
    ) -> None: ...


class Living(Protocol):
    """Names the ranks of the run that live on any node of the job; None where a node does not answer."""

    def __call__(self) -> set[int] | None: ...


class RankStep:
    """The ranks of one attempt, as one srun process.

    A look at them costs two system calls as long as nothing happens: srun's messages are read on from where they
    ended, and outcome files are looked for when the attempt's folder has changed.

    Args:
        living: asks the nodes for ranks, when srun goes on after rank 0's report of the end.
        shows_start: whether each rank's log is opened as soon as Slurm launches its task.
    """

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        num_ranks: int,
        attempt: Attempt,
        guard: Guard,
        *,
        cwd: Path,
        hosts: Sequence[str] = (),
        first_ranks: Mapping[str, int] | None = None,
        containers: ContainerSteps | None = None,
        beside: Beside | None = None,
        living: Living | None = None,
        shows_start: bool = True,
    ) -> None:
        self._beside = beside
        self._living = living
        self._shows_start = shows_start
        self._ask_at: float | None = None
        self._ask_after_s = REPORTED_S
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
        # Opened before there is an srun, which an error here would leave behind.
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
        if len(self._running) != self._num_ranks - len(self.exits):
            self._running = [rank for rank in range(self._num_ranks) if rank not in self.exits]
        return self._running

    def host_of(self, rank: int) -> str:
        """What srun or the rank itself said of it; before that where it was placed, or only the allocation."""
        planned = self._planned_hosts[rank] if self._planned_hosts else os.environ["SLURM_JOB_NODELIST"]
        beat = read_json(self._attempt.beat(rank)) or {}
        return str(self._hosts.get(rank) or beat.get("host") or planned)

    def wait(self, timeout_s: float) -> None:
        """Return when the step has ended or the time is over.

        srun goes on waiting for the tasks of a dead node, so what it and the ranks have said so far counts as well.
        """
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        ended = bool(poll.poll(timeout_s * 1000))
        if not ended:
            try:
                self._look(ended=False)
            except OSError as error:
                if not self._is_away:
                    log.warning("%s: %s; the ranks go on", error.filename or self._messages, error.strerror)
                self._is_away = True
            if self._ask_at is not None and time.monotonic() > self._ask_at:
                self._ask_who_lives()
        else:
            retry(lambda: self._look(ended=True), self._attempt.path)
            code = self._process.wait()
            if code != 0 and not any(self.exits.values()):
                self.exits.setdefault(0, code)
            for rank in self.running:
                self.exits[rank] = 0

    def _ask_who_lives(self) -> None:
        """Count ranks as ended that no node has any more: srun waits for ever for those of a slurmstepd that died."""
        if self._living is not None and self._living() == set():
            log.warning("srun still waits for ranks that have ended: their slurmstepd has died, it seems")
            for rank in self.running:
                self.exits[rank] = 0
        self._ask_after_s = min(2 * self._ask_after_s, ASK_AT_MOST_S)
        self._ask_at = time.monotonic() + self._ask_after_s

    def absent(self) -> list[int]:
        """Ranks that have left no sign of having been started."""
        if not self._shows_start:
            return []
        # Listing the folder makes a network file system look anew, which asking for one file does not.
        names = retry(lambda: os.listdir(self._attempt.path), self._attempt.path)
        matches = (_FILE_OF_RANK.match(name) for name in names)
        there = {int(match[1]) for match in matches if match}
        return [rank for rank in range(self._num_ranks) if rank not in there]

    def last_message(self) -> str:
        path = self._attempt.path / "srun.log"
        lines = retry(lambda: last_lines(path, _LAST_LINES), path)
        return last_line("\n".join(text for _, text in lines)) or "srun said nothing"

    def _look(self, *, ended: bool) -> None:
        self._read_messages(to_the_end=ended)
        self._find_failures(in_any_case=ended)
        if self._is_away:
            log.warning("%s is available again", self._attempt.path)
        self._is_away = False

    def _read_log(self) -> bytes:
        try:
            news = self._log.read(PIECE_BYTES)
        except OSError:
            # A handle that is stale stays so.
            anew = open(self._messages, "rb")  # noqa: SIM115  # closed with the step
            anew.seek(self._num_read)
            self._log = anew
            raise
        self._num_read += len(news)
        return news

    def _read_messages(self, *, to_the_end: bool) -> None:
        """Count what srun has said since the last time, whole lines alone."""
        while data := self._read_log():
            *whole, rest = (self._unread + data).split(b"\n")
            # srun's own lines are short; what is not may be cut.
            self._unread = rest[-PIECE_BYTES:]
            self._count(b"\n".join(whole))
        if to_the_end:
            self._count(self._unread)
            self._unread = b""

    def _count(self, news: bytes) -> None:
        for rank, (host, code) in ended_tasks(news.decode(errors="replace"), self._first_ranks).items():
            self._hosts.setdefault(rank, host)
            if self._containers is not None and rank not in self.exits:
                code = self._containers.exit_code(self._attempt, rank, host, code)
            self.exits.setdefault(rank, code)

    def _find_failures(self, *, in_any_case: bool) -> None:
        """Count ranks that have reported a failure; each report is read once."""
        began = time.monotonic()
        changed = os.stat(self._attempt.path).st_mtime_ns
        if changed != self._folder_time:
            self._folder_time, self._changed_at, self._search_again = changed, began, True
        if not in_any_case and (not self._search_again or began < self._next_search):
            return
        # What changes the folder in the same tick of its clock as the last change is not seen in its time.
        self._search_again = began < self._changed_at + FOLDER_TICK_S
        outcomes = self._attempt.outcomes(skip=self._reported)
        self._reported |= outcomes.keys()
        for rank, outcome in sorted(outcomes.items(), key=lambda item: float(item[1]["time"])):
            if outcome["outcome"] in ("failed", "rejected"):
                self.exits.setdefault(rank, 2 if outcome["outcome"] == "rejected" else 1)
            elif rank == 0:
                self._ask_at = began + self._ask_after_s
        # While thousands of ranks make their files the folder changes all the time.
        now = time.monotonic()
        self._next_search = now + SEARCH_PAUSE * (now - began)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to every task that still runs."""
        signal_named_steps(step_name(self._attempt), number.name.removeprefix("SIG"))

    def examine(self, command: Sequence[str], *, output: Path, limit_s: float, interrupted: Callable[[], bool]) -> None:
        """Run a command once on each node of the job."""
        if self._beside is not None:
            self._beside(command, output=output, limit_s=limit_s, interrupted=interrupted)

    def close(self) -> None:
        """End the step on every node that answers, and srun with it."""
        if self._process.poll() is None:
            # Killing srun alone would leave its tasks running.
            if not signal_named_steps(step_name(self._attempt), "KILL"):
                self._process.terminate()  # it waits for a step still, or Slurm's controller is away
            try:
                self._process.wait(END_STEP_S)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
        if self._containers is not None:
            self._containers.remove_containers()
        self._guard.forget(self._process.pid)
        self._log.close()
        os.close(self._descriptor)
