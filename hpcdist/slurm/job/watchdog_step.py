"""The step of the watchdog (`job_watchdog.py`), which ends a job after the death of its batch host."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpcdist.slurm.job.srun import watchdog_command
from hpcdist.supervisor.process_guard import Guard


class WatchdogStep:
    """Runs the watchdog on one node at a time.

    Args:
        job_id: the job that it ends.
        env: environment of steps.
        cwd: working directory.
        output: file for the output.
    """

    def __init__(self, job_id: str, guard: Guard, *, env: Mapping[str, str], cwd: Path, output: Path) -> None:
        self._job_id = job_id
        self._guard = guard
        self._env = env
        self._cwd = cwd
        self._output = output
        self._process: subprocess.Popen[bytes] | None = None
        self._node: str | None = None

    def start(self, node: str | None = None) -> None:
        """Start the watchdog on a node, or on one of the second component of a heterogeneous job."""
        self._node = node
        command = watchdog_command(self._job_id, node)
        self._process = self._guard.start(command, env=self._env, cwd=self._cwd, output=self._output)

    def move(self, batch_host: str, used: Sequence[str], present: Sequence[str]) -> None:
        """Let the watchdog run on a node other than the batch host.

        Args:
            used: nodes with ranks, which come first.
            present: all nodes that answer.
        """
        others = [node for node in present if node != batch_host]
        # With the loss of a node that runs ranks a new attempt begins, and with it a new watchdog.
        others = [node for node in others if node in used] or others
        if self._process is not None and (self._process.poll() is not None or self._node not in others):
            self.close()
        if self._process is None and others:
            self.start(others[-1])

    def close(self) -> None:
        """End srun; the step's task ends with the job."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._guard.forget(self._process.pid)
            self._process = None
