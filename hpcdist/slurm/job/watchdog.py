"""Requeue a job whose batch host fails, where Slurm does not do so: a process on a node other than the batch host, and
the step that starts it.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpcdist.config.topology import expand
from hpcdist.errors import HpcdistError
from hpcdist.slurm import client
from hpcdist.slurm.job.srun import watchdog_command
from hpcdist.slurm.output import parse_text
from hpcdist.supervisor.launcher import Guard

# - Of a heterogeneous job Slurm requeues the first component and leaves the others running until their time limit,
#   although the job can only start as a whole. A second `scontrol requeue` fails because the job is pending, but
#   requeues the other components as well.
# - From a job with `--no-kill` Slurm removes the batch host and leaves the job running without its batch step.
#
# Both were seen with 22.05. The supervisor cannot request the requeue, because it ran on the failed node.

#: Low load for a controller, and short compared with the minutes after which it declares a node down.
POLL_EVERY_S = 20.0


def is_partly_requeued(records: Sequence[Mapping[str, str]]) -> bool:
    states = [facts.get("JobState") for facts in records]
    return bool(states) and states[0] == "PENDING" and "RUNNING" in states[1:]


def has_lost_batch_host(records: Sequence[Mapping[str, str]]) -> bool:
    if not records or records[0].get("JobState") != "RUNNING":
        return False
    host, nodes = parse_text(records[0].get("BatchHost")), parse_text(records[0].get("NodeList"))
    return bool(host and nodes) and host not in expand(nodes)


def main() -> None:
    """Poll a job, given by its id as argument, until Slurm ends this step with the job."""
    (job_id,) = sys.argv[1:]
    while True:
        time.sleep(POLL_EVERY_S)
        try:
            records = client.job_records(job_id)
            if is_partly_requeued(records):
                print(f"the first component of job {job_id} was requeued alone: requeueing the others", flush=True)
                client.requeue_job(job_id)
            if has_lost_batch_host(records):
                print(f"job {job_id} has lost its batch host: requeueing it", flush=True)
                client.requeue_job(job_id)
        except HpcdistError as error:
            print(error, flush=True)  # tried again at the next poll


class WatchdogStep:
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
        """Let the watchdog of a job whose nodes may change run on a node other than the batch host.

        Args:
            present: all nodes that answer; empty if the nodes do not change.
        """
        others = [node for node in present if node != batch_host]
        # Nodes with ranks come first: with the loss of one a new attempt begins, and with it a new watchdog.
        others = [node for node in others if node in used] or others
        if self._process is not None and self._node and (self._process.poll() is not None or self._node not in others):
            self.close()
        if self._process is None and others:
            self.start(others[-1])

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._guard.forget(self._process.pid)
            self._process = None


if __name__ == "__main__":
    main()
