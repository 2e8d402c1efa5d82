"""Ranks as child processes of this one, each in a process group of its own."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from hpcdist.run.attempt import Attempt
from hpcdist.run.folder import RunDir
from hpcdist.supervisor.plan import Plan, code_env, free_port, rank_command
from hpcdist.supervisor.process_guard import Guard


class LocalLauncher:
    """Starts ranks on this machine. Use as a context manager: its guard lives as long.

    Args:
        env: what ranks inherit; the plan's variables come on top.
        import_path: folders that ranks import code from, before all others.
        cwd: the ranks' current folder.
    """

    def __init__(
        self, run: RunDir, plan: Plan, *, env: Mapping[str, str], import_path: Sequence[str], cwd: Path
    ) -> None:
        self.num_ranks = plan.num_ranks
        self._run = run
        self._plan = plan
        self._env = dict(env)
        self._code = code_env(import_path, plan.env.get("PYTHONPATH") or env.get("PYTHONPATH"))
        self._cwd = cwd

    def __enter__(self) -> LocalLauncher:
        self._guard = Guard()
        return self

    def __exit__(self, *_: object) -> None:
        self._guard.close()

    def broken(self) -> str:
        """This machine stands, or nobody would ask."""
        return ""

    def start(self, attempt: Attempt) -> LocalRanks:
        """Start every rank, with a port that nobody uses at this moment."""
        job_id = f"{self._run.experiment}/{self._run.name}"
        port = free_port(job_id, attempt.number)
        ranks = range(self.num_ranks)
        places = [self._plan.rank_env(rank, job_id=job_id, attempt=attempt.number, master_port=port) for rank in ranks]
        return LocalRanks(
            rank_command(self._run.path),
            [self._env | place | self._code for place in places],
            [attempt.log(rank) for rank in ranks],
            self._guard,
            cwd=self._cwd,
        )


class LocalRanks:
    """The ranks of one attempt on this machine.

    Args:
        command: what every rank executes.
        envs: each rank's whole environment, by rank.
        logs: each rank's log file, by rank; standard output and error go there.
        guard: starts them.
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
        self._cwd = cwd
        self._processes: list[subprocess.Popen[bytes]] = []
        #: Exit codes in the order in which the ranks ended; negative ones are signals.
        self.exits: dict[int, int] = {}
        try:
            for env, log in zip(envs, logs, strict=True):
                self._processes.append(guard.start(command, env=env, cwd=cwd, output=log))
            self._descriptors = [os.pidfd_open(process.pid) for process in self._processes]
        except BaseException:
            self._kill_groups()
            raise

    @property
    def running(self) -> list[int]:
        return [rank for rank in range(len(self._processes)) if rank not in self.exits]

    def host_of(self, rank: int) -> str:
        """All of them are here."""
        return socket.gethostname()

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

    def absent(self) -> list[int]:
        """None: each of them is a child of this process."""
        return []

    def last_words(self) -> str:
        return ""

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the ranks that still run (to them alone, not to what they have started)."""
        for rank in self.running:
            self._processes[rank].send_signal(number)

    def examine(self, command: Sequence[str], *, output: Path, limit_s: float, interrupted: Callable[[], bool]) -> None:
        """Run a command here, where all ranks are."""
        self._guard.run(command, env=os.environ, cwd=self._cwd, output=output, limit_s=limit_s, interrupted=interrupted)

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
