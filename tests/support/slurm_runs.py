"""Runs that are submitted to the dev cluster through the real command, and what Slurm says of their jobs."""

from __future__ import annotations

import re
import time
from pathlib import Path

from hpcdist_runs import HOLD_OVERRIDES, TRAINING, Runs, assert_equals_control, wait_for
from slurm_cluster import DevCluster

from hpcdist.devcluster.processes import node_members
from hpcdist.files.atomic import read_json
from hpcdist.run.folder import ENDED, State

#: 2 nodes with 2 ranks each; the same 45 steps an epoch as two ranks with batches of 16 make.
ON_FOUR_RANKS = [*TRAINING, "data.batch_size=8", "launch.num_ranks=4"]
NUM_RANKS = 4
#: States of a job that stays where it is.
JOB_ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY")


class SlurmRuns(Runs):
    """A folder for runs on a dev cluster."""

    def __init__(self, root: Path, database: Path, cluster: DevCluster) -> None:
        super().__init__(root, database)
        self.cluster = cluster

    def env(self, **more: str) -> dict[str, str]:
        return super().env(**{"SLURM_CONF": self.cluster.env["SLURM_CONF"], **more})

    def submit(self, name: str, *overrides: str) -> str:
        """Submit a short run with four ranks on two nodes; returns the job's id."""
        arguments = [*self.config(name, *ON_FOUR_RANKS, *overrides), "--cluster", "devcluster"]
        code, output = self.command("submit", *arguments)
        assert code == 0, output
        return str((read_json(self.run_dir(name).path / "slurm.json") or {})["job_id"])

    def submit_held(self, name: str, *overrides: str) -> str:
        """The same, returning when the trainer of `gated.py` holds all ranks in the second epoch."""
        job = self.submit(name, *HOLD_OVERRIDES, *overrides)
        self.wait_until_held(name, NUM_RANKS)
        assert self.state(name).status == "running"
        return job

    def state(self, name: str) -> State:
        return self.run_dir(name).read_state()

    def wait_status(self, name: str, *wanted: str, timeout_s: float = 60) -> State:
        wait_for(lambda: self.state(name).status in wanted, f"{name} to be {wanted}", timeout_s=timeout_s)
        return self.state(name)

    def start_now(self, job: str) -> None:
        """Spare a requeued job the 120 s for which Slurm holds it."""
        self.cluster.until(lambda: self.cluster.job(job)["JobState"] == "PENDING", f"job {job} is queued again")
        # slurmd has revoked the last life's credential, and takes one of the same second for that: "Killing
        # non-startable batch job: Job credential revoked" (seen with 22.05). With the 120 s it never comes to that.
        queued = time.time()
        wait_for(lambda: time.time() > queued + 2, "another second than that of the requeue")
        self.cluster.run("scontrol", "update", f"JobId={job}", "StartTime=now")

    def wait_end(self, name: str, job: str, timeout_s: float = 120) -> State:
        """The run's last state, once its job has ended, too."""
        cluster = self.cluster
        cluster.until(lambda: cluster.job(job)["JobState"] in JOB_ENDED, f"job {job} is over", within_s=timeout_s)
        state = self.state(name)
        assert state.status in ENDED, f"{state}\n{self.job_log(name)}\n{self.said_of(job)}"
        return state

    def said_of(self, job: str) -> str:
        """What Slurm's controller has logged of a job."""
        lines = (self.cluster.layout.logs / "slurmctld.log").read_text().splitlines()
        return "\n".join(line for line in lines if re.search(rf"JobId={job}\b", line))

    def job_log(self, name: str) -> str:
        """What the batch step has said in all its lives."""
        return "".join(path.read_text() for path in sorted((self.run_dir(name).path / "submitit").glob("*.out")))

    def hosts(self, name: str, attempt: int = 1) -> list[str]:
        """The host of each rank, by what its own log says."""
        logs = [self.attempt(name, attempt).log(rank).read_text() for rank in range(NUM_RANKS)]
        found = [re.search(rf" rank {rank} on (\S+):", log) for rank, log in enumerate(logs)]
        return [match[1] if match else "" for match in found]

    def resumed_at(self, name: str, attempt: int) -> int:
        """The step that an attempt went on from, by rank 0's log; 0 where it began anew."""
        log = self.attempt(name, attempt).log(0)
        found = re.search(r"resumed at step (\d+)", log.read_text() if log.exists() else "")
        return int(found[1]) if found else 0

    def assert_finished_as(self, name: str, job: str, control: str) -> None:
        """Assert that a run has ended as the undisturbed one did, in MLflow as well, and has left no process."""
        state = self.wait_end(name, job)
        assert state.status == "finished", f"{state}\n{self.job_log(name)}"
        assert self.cluster.job(job)["JobState"] == "COMPLETED"
        code, output = self.command("sync", name)
        assert code == 0, output
        assert_equals_control(self, name, control)
        self.assert_no_process_left(name)

    def assert_no_process_left(self, name: str) -> None:
        wait_for(lambda: not self.processes(name), f"the processes of {name} to be gone", timeout_s=30)

    def processes(self, name: str) -> list[str]:
        """Commands on the nodes that name the run's folder: ranks, supervisor, srun."""
        return [command for command in self._commands() if str(self.run_dir(name).path) in command]

    def _commands(self) -> list[str]:
        """Commands of all processes on the nodes."""
        members = node_members(self.cluster.layout, self.cluster.settings)
        return [_command(pid) for pids in members.values() for pid in pids]


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:  # it has just ended
        return ""
