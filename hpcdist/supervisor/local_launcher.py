"""Launcher of ranks as child processes, each in its own process group."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from hpcdist.machine.facts import num_cores
from hpcdist.run.attempt import Attempt
from hpcdist.run.attempt_times import NodeShare, Resources
from hpcdist.run.folder import RunDir
from hpcdist.supervisor.plan import Plan, code_env, free_port, rank_command
from hpcdist.supervisor.process_guard import Guard


class LocalLauncher:
    """Starts ranks on this machine. A context manager, which owns the process guard.

    Args:
        env: environment of the ranks; variables of the plan take precedence.
        import_path: folders that precede all others in the ranks' import path.
        cwd: working directory of the ranks.
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

    @property
    def resources(self) -> Resources:
        """One GPU for each rank on a GPU; without GPUs, the cores of all threads of the ranks."""
        if gpu_ranks := [rank for rank in range(self.num_ranks) if self._plan.device_of(rank) == "cuda"]:
            own = NodeShare(allocated=len(gpu_ranks), share=1, ranks=gpu_ranks)
            return Resources(unit="GPU", nodes={socket.gethostname(): own})
        cores = min(num_cores(), self.num_ranks * self._plan.threads)
        own = NodeShare(allocated=cores, share=cores / self.num_ranks, ranks=list(range(self.num_ranks)))
        return Resources(nodes={socket.gethostname(): own})

    def broken(self) -> str:
        """Return an empty reason: ranks can always be restarted on this machine."""
        return ""

    def start(self, attempt: Attempt) -> LocalRanks:
        """Start all ranks, with a free port."""
        job_id = f"{self._run.experiment}/{self._run.name}"
        port = free_port(job_id, attempt.number)
        ranks = range(self.num_ranks)
        envs = [self._plan.rank_env(rank, job_id=job_id, attempt=attempt.number, master_port=port) for rank in ranks]
        return LocalRanks(
            rank_command(self._run.path),
            [self._env | env | self._code for env in envs],
            [attempt.log(rank) for rank in ranks],
            self._guard,
            cwd=self._cwd,
        )


class LocalRanks:
    """The ranks of one attempt on this machine.

    Args:
        command: command of every rank.
        envs: complete environments, by rank.
        logs: files for standard output and error, by rank.
        guard: starts the processes.
        cwd: working directory of the ranks.
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
        """Return the name of this host."""
        return socket.gethostname()

    def wait(self, timeout_s: float) -> None:
        """Wait until a rank has ended or the time is over; updates `exits`."""
        poll = select.poll()
        for rank in self.running:
            poll.register(self._descriptors[rank], select.POLLIN)
        poll.poll(timeout_s * 1000)
        for rank in self.running:
            code = self._processes[rank].poll()
            if code is not None:
                self.exits[rank] = code

    def absent(self) -> list[int]:
        """Return no ranks: all are child processes and have been started."""
        return []

    def last_message(self) -> str:
        return ""

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the running ranks, but not to their children."""
        for rank in self.running:
            self._processes[rank].send_signal(number)

    def examine(self, command: Sequence[str], *, output: Path, limit_s: float, interrupted: Callable[[], bool]) -> None:
        """Run a command on this machine."""
        self._guard.run(command, env=os.environ, cwd=self._cwd, output=output, limit_s=limit_s, interrupted=interrupted)

    def close(self) -> None:
        """Kill all process groups and wait for their leaders."""
        self._kill_groups()
        for descriptor in self._descriptors:
            os.close(descriptor)

    def _kill_groups(self) -> None:
        for rank, process in enumerate(self._processes):
            with suppress(ProcessLookupError):
                # A group outlives its leader as long as a grandchild is alive.
                os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
            self.exits.setdefault(rank, code)
            self._guard.forget(process.pid)
