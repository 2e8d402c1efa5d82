"""Steps of a job beside its ranks: the watchdog, and the search for ranks on each node.

python -m hpcdist.job.node_steps watch JOB
python -m hpcdist.job.node_steps list|kill RUN
"""

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Literal

from hpcdist.config.slurm_notation import expand
from hpcdist.errors import HpcdistError
from hpcdist.job.srun import NODE_STEPS, watchdog_command
from hpcdist.run.folder import RunDir
from hpcdist.slurm import client
from hpcdist.slurm.on_nodes import JobNodes, announced, ask, nodes_command, print_answer
from hpcdist.slurm.output import parse_text
from hpcdist.supervisor.children import Guard
from hpcdist.supervisor.hang import family, find_ranks

log = logging.getLogger(__name__)

# The watchdog, on a node other than the batch host: from a job with `--no-kill` Slurm removes a batch host that fails,
# and leaves the job running without its batch step (seen with 22.05). The supervisor cannot request the requeue,
# because it ran on the failed node.

#: Low load for a controller, and short compared with the minutes until it declares a node down.
WATCH_EVERY_S = 20.0


def has_lost_batch_host(record: Mapping[str, str]) -> bool:
    """Return whether a job runs without the node of its batch step, by the controller's record of the job."""
    if record.get("JobState") != "RUNNING":
        return False
    host = parse_text(record.get("BatchHost"))
    nodes = parse_text(record.get("NodeList"))
    if not host or not nodes:
        return False
    return host not in expand(nodes)


def watch(job_id: str) -> None:
    """Requeue the job when it loses its batch host. Does not return: the process is killed."""
    while True:
        time.sleep(WATCH_EVERY_S)
        try:
            if has_lost_batch_host(client.job_record(job_id)):
                print(f"job {job_id} has lost its batch host: requeueing it", flush=True)
                client.requeue_job(job_id)
        except HpcdistError as error:
            print(error, flush=True)  # tried again at the next poll


@dataclass(eq=False)
class WatchdogStep:
    """The step of the watchdog, which the supervisor moves to another node if necessary."""

    job_id: str
    guard: Guard
    _: KW_ONLY
    env: Mapping[str, str]
    cwd: Path
    output: Path

    def __post_init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._node = ""

    def move(self, batch_host: str, used: Sequence[str], present: Sequence[str]) -> None:
        """Let the watchdog run on a node other than the batch host, if there is one.

        Args:
            used: nodes with ranks.
            present: nodes on which steps can run; empty if the nodes of the run do not change.
        """
        others = [node for node in present if node != batch_host]
        # Nodes with ranks are preferred: with the loss of one a new attempt begins, and with it a new watchdog.
        candidates = [node for node in others if node in used] or others
        if self._process is not None:
            has_ended = self._process.poll() is not None
            if has_ended or self._node not in candidates:
                self.close()
        if self._process is None and candidates:
            self._node = candidates[-1]
            command = watchdog_command(self.job_id, self._node)
            self._process = self.guard.start(command, env=self.env, cwd=self.cwd, output=self.output)

    def close(self) -> None:
        """End the watchdog, if it runs."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self.guard.forget(self._process.pid)
            self._process = None


# The search for ranks on each node, to list or kill them without Slurm, which cannot signal ranks after the end of
# their slurmstepd. The answer has the ranks that run; after `kill`, the ranks that have survived SIGKILL themselves or
# have a parent that has.

#: A killed process ends within this time, unless it waits for a device or a file system.
KILL_S = 5.0
#: Interval in which the processes that are left are killed again.
_KILL_EVERY_S = 0.05
#: Time limit of the step, which starts Python on each node, perhaps from a slow file system.
_SEARCH_S = 60.0


def ranks_on_nodes(
    run: RunDir, action: Literal["list", "kill"], nodes: JobNodes, env: Mapping[str, str], *, patient: bool = True
) -> dict[str, list[int]]:
    """Return the running ranks of a run by node, for the nodes that answer; after `kill` those that have survived."""
    if not nodes.names:
        return {}
    command = [sys.executable, "-P", "-m", NODE_STEPS, action, str(run.path)]
    if not patient:
        command = announced(command)
    answers = ask(nodes_command(nodes, command), nodes.names, _SEARCH_S, env=env, patient=patient)
    return {node: list(answer["ranks"]) for node, answer in answers.by_node.items()}


def kill_ranks(run: Path, node: str) -> list[int]:
    """Kill the ranks of a run on this node and their child processes; returns the ranks that survive."""
    until = time.monotonic() + KILL_S
    while True:
        processes = find_ranks(run, None, node, parents=True)
        if not processes or time.monotonic() >= until:
            return [process.rank for process in processes]
        for process in processes:
            for pid in family(process.pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(_KILL_EVERY_S)


def main(argv: Sequence[str]) -> None:
    """Run one of the commands in the description of this module."""
    action, subject = argv
    if action == "watch":
        watch(subject)
    node = os.environ.get("SLURMD_NODENAME", "")
    run = Path(subject)
    if action == "kill":
        survivors = kill_ranks(run, node)
        print_answer({"ranks": sorted(survivors)})
    else:
        ranks = [process.rank for process in find_ranks(run, None, node)]
        print_answer({"ranks": sorted(ranks)})


if __name__ == "__main__":
    main(sys.argv[1:])
