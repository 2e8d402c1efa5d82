"""Runs that tests submit to the dev cluster with the real `hpcdist submit`."""

import re
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from hpcdist_runs import HOLD_OVERRIDES, TRAINING, Runs, assert_equals_control, wait_for
from slurm_cluster import WAIT_S, DevCluster

from hpcdist.host.json_files import read_json
from hpcdist.rank.processes import shown_place
from hpcdist.review.ledger import Ledger, read_ledger
from hpcdist.run.folder import ENDED, State

#: 2 nodes with 2 ranks each; 45 steps per epoch, as with two ranks and batches of 16.
ON_FOUR_RANKS = [*TRAINING, "data.batch_size=8", "launch.num_ranks=4"]
NUM_RANKS = 4
#: Until a command ends them. Such ranks start in a third of the time of ranks that train.
TWO_COUNTING_RANKS = (
    *("trainer=counting:train", "params.until=1000000"),
    *("cluster.tasks_per_node=1", "launch.num_ranks=2"),
)
#: Final job states.
JOB_ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY")


class SlurmRuns(Runs):
    """A folder of runs on a dev cluster."""

    def __init__(self, root: Path, database: Path, cluster: DevCluster) -> None:
        super().__init__(root, database)
        self.cluster = cluster

    def env(self, **more: str) -> dict[str, str]:
        return super().env(**{"SLURM_CONF": self.cluster.env["SLURM_CONF"], **more})

    def submit(self, name: str, *overrides: str) -> str:
        """Submit a short run of four ranks on two nodes and return its job id.

        Without `preflight=on` there is no preflight, in which each node imports torch.
        """
        arguments = [*self.config(name, *ON_FOUR_RANKS, "preflight=off", *overrides), "--cluster", "devcluster"]
        code, output = self.command("submit", *arguments)
        assert code == 0, output
        return self.job_id(name)

    def submit_held(self, name: str, *overrides: str) -> str:
        """Submit a run and return its job id once `gated.py` holds all ranks in the second epoch."""
        job = self.submit(name, *HOLD_OVERRIDES, *overrides)
        self.wait_until_held(name, NUM_RANKS)
        assert self.state(name).status == "running"
        return job

    def job_id(self, name: str) -> str:
        return str((read_json(self.run_dir(name).path / "slurm.json") or {})["job_id"])

    def state(self, name: str) -> State:
        return self.run_dir(name).read_state()

    def wait_stop_request(self, name: str) -> None:
        """Wait until the supervisor has asked the ranks of the first attempt to stop, or Slurm is about to.

        With proctrack/cgroup only the ranks receive Slurm's signal; the supervisor writes no request before their end.
        """
        job = self.job_id(name)

        def is_requested() -> bool:
            fields = self.cluster.job(job)
            by_slurm = fields["JobState"] != "RUNNING" or fields["PreemptTime"] != "None"
            return by_slurm or self.attempt(name).request.exists()

        wait_for(is_requested, "the supervisor or Slurm to request a stop", timeout_s=WAIT_S)

    def wait_requeued(self, name: str) -> State:
        """Wait until a run is queued again after its first attempt; return its state."""

        def is_requeued() -> bool:
            state = self.state(name)  # a new run is queued as well
            return state.status == "queued" and state.attempt > 0

        wait_for(is_requeued, f"{name} to be queued again", timeout_s=WAIT_S)
        return self.state(name)

    def wait_queued_again(self, name: str) -> int:
        """Wait until a stopped run is queued again; return the step of its newest checkpoint."""
        self.wait_requeued(name)
        return self.checkpoint_steps(name)[-1]

    def start_now(self, job: str) -> None:
        """Skip the 120 s for which Slurm holds a requeued job."""
        self.cluster.wait_job_state(job, "PENDING")
        # slurmd has revoked the credential of the previous start, and rejects a new credential of the same second
        # ("Killing non-startable batch job: Job credential revoked"). A supervisor that lives waits long enough itself.
        queued = time.time()
        wait_for(lambda: time.time() > queued + 2, "the second after the requeue")
        self.cluster.run("scontrol", "update", f"JobId={job}", "StartTime=now")

    def wait_restarted(self, job: str) -> None:
        """Wait until Slurm has requeued and restarted a job."""

        def is_restarted() -> bool:
            fields = self.cluster.job(job)
            if fields["JobState"] == "PENDING" and fields["Reason"] == "BeginTime":
                self.start_now(job)
            return fields["JobState"] == "RUNNING" and int(fields["Restarts"]) > 0

        self.cluster.wait_until(is_restarted, f"job {job} is running again")

    def wait_end(self, name: str, job: str) -> State:
        """Wait for the end of the job; return the run's final state."""
        self.cluster.wait_job_state(job, *JOB_ENDED)
        state = self.state(name)
        assert state.status in ENDED, f"{state}\n{self.job_log(name)}\n{self.controller_log(job)}"
        return state

    def controller_log(self, job: str) -> str:
        """Return the lines of slurmctld.log about a job."""
        lines = (self.cluster.layout.logs / "slurmctld.log").read_text().splitlines()
        return "\n".join(line for line in lines if re.search(rf"JobId={job}\b", line))

    def job_log(self, name: str) -> str:
        """Return the batch step's output of all starts of the job."""
        return "".join(path.read_text() for path in sorted((self.run_dir(name).path / "submitit").glob("*.out")))

    def hosts(self, name: str, attempt: int = 1) -> list[str]:
        """Return the host of each rank, read from the ranks' logs."""
        logs = [self.attempt(name, attempt).log(rank).read_text() for rank in range(NUM_RANKS)]
        found = [re.search(rf" rank {rank} on (\S+):", log) for rank, log in enumerate(logs)]
        return [match[1] if match else "" for match in found]

    def resumed_at(self, name: str, attempt: int) -> int:
        """Return the step of the checkpoint that an attempt loaded, read from rank 0's log; 0 if it loaded none."""
        log = self.attempt(name, attempt).log(0)
        found = re.search(r"resumed at step (\d+)", log.read_text() if log.exists() else "")
        return int(found[1]) if found else 0

    def assert_finished_as(self, name: str, job: str, control: str) -> None:
        """Assert that a run ends with the results of the control run, on disk and in MLflow, and leaves no process."""
        state = self.wait_end(name, job)
        assert state.status == "finished", f"{state}\n{self.job_log(name)}"
        assert self.cluster.job(job)["JobState"] == "COMPLETED"
        code, output = self.command("sync", name)
        assert code == 0, output
        assert_equals_control(self, name, control)
        self.assert_no_process_left(name)

    def accounted_core_s(self, job: str) -> float:
        """Return the core-seconds of all starts of an ended job, from accounting."""
        options = ("--duplicates", "--allocations", "-nP", "--format=End,ElapsedRaw,AllocCPUS,State")
        rows: list[list[str]] = []

        def is_complete() -> bool:
            text = self.cluster.run("sacct", f"--jobs={job}", *options)
            # A line without cores is a time in which the job only waited.
            rows[:] = [line.split("|") for line in text.splitlines() if line.split("|")[2] not in ("", "0")]
            # A job that has given nodes back has a further line for its first size.
            starts = [row for row in rows if row[3] != "RESIZING"]
            num_starts = int(self.cluster.job(job)["Restarts"]) + 1
            return len(starts) == num_starts and all(row[0] != "Unknown" for row in rows)

        wait_for(is_complete, f"all starts of job {job} in accounting", timeout_s=WAIT_S)
        return sum(float(elapsed) * float(cores) for _, elapsed, cores, _ in rows)

    def ledger(self, name: str, *jobs: str) -> Ledger:
        """Return the ledger of a run without running jobs; it equals accounting within 1 %."""
        accounted = sum(self.accounted_core_s(job) for job in jobs)
        code, output = self.command("cost", name)
        assert code == 0, output
        ledger = read_ledger(self.run_dir(name))
        assert ledger.allocated_s == pytest.approx(accounted, rel=0.01)
        return ledger

    def assert_no_process_left(self, name: str) -> None:
        wait_for(lambda: not self.processes(name), f"the processes of {name} to end")

    def rank_processes(self, name: str) -> dict[int, psutil.Process]:
        """Return the ranks' processes in the host's process table, also those in containers, by rank."""
        found = {}
        for process in psutil.process_iter(["cmdline", "name"]):
            words = process.info["cmdline"] or []
            if str(self.run_dir(name).path) not in words:
                continue
            if words[1:4] == ["-P", "-m", "hpcdist.rank.worker"]:
                found[int(process.environ()["SLURM_PROCID"])] = process
            elif (place := shown_place(process.info["name"])) is not None:  # forked
                found[place[0]] = process
        return found

    def processes(self, name: str) -> list[str]:
        """Return the command lines on the nodes that contain the run's folder: ranks, supervisor, srun."""
        members = self.cluster.node_members()
        commands = [_command(pid) for pids in members.values() for pid in pids]
        return [command for command in commands if str(self.run_dir(name).path) in command]


def _command(pid: int) -> str:
    with suppress(OSError):  # the process has just ended
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return ""
