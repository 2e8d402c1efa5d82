"""`follow`, `--wait`, `status`, `explain` and `sync` for jobs on a real Slurm, with accounting and without."""

from __future__ import annotations

import shutil
import signal
import subprocess
from pathlib import Path

import psutil
import pytest
from hpcdist_runs import HOLD_OVERRIDES, finish
from slurm_cluster import DevCluster
from slurm_runs import NUM_RANKS, ON_FOUR_RANKS, SlurmRuns

from hpcdist.host.files import read_json, write_json

WAITING = "cluster.sbatch.begin=now+1hour"


@pytest.fixture
def without_accounting(tmp_path: Path) -> str:
    """A PATH with Slurm's commands except sacct."""
    for command in ("scontrol", "squeue", "scancel", "sbatch", "git", "sh"):
        (tmp_path / command).symlink_to(shutil.which(command) or command)
    return str(tmp_path)


class RunningCommand:
    """A running command and the lines that it has printed."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.lines: list[str] = []

    def until(self, start: str) -> str:
        """Wait for the next line with this beginning and return it."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.lines.append(line.rstrip())
            if line.startswith(start):
                return line.rstrip()
        raise AssertionError(f"no line {start!r} in {self.lines}")

    def interrupt(self) -> tuple[int, list[str]]:
        """Send SIGINT, then return the same as `end`."""
        self._process.send_signal(signal.SIGINT)
        return self.end()

    def end(self) -> tuple[int, list[str]]:
        """Wait for the end; return the exit code and the remaining lines."""
        code, output = finish(self._process)
        return code, output.splitlines()


def start_submit(runs: SlurmRuns, name: str, *arguments: str) -> tuple[RunningCommand, str]:
    """Start `hpcdist submit` with --follow or --wait; return the command and the job id."""
    config = runs.config(name, *ON_FOUR_RANKS)
    following = RunningCommand(runs.start("submit", *config, *arguments, "--cluster", "devcluster"))
    return following, following.until(f"{name} is job ").split()[3].rstrip(":")


def test_follow_shows_pending_reasons_a_requeue_and_the_end(
    slurm_runs: SlurmRuns, devcluster: DevCluster, slurm_control: str
) -> None:
    name = "followed"
    following, job = start_submit(slurm_runs, name, *HOLD_OVERRIDES, "cluster.fork=true", WAITING, "--follow")
    assert ", expected to start at 20" in following.until(f"queued: job {job} waits (BeginTime)")
    devcluster.run("scontrol", "hold", job)
    following.until(f"queued: job {job} waits (JobHeld")
    devcluster.run("scontrol", "release", job)
    slurm_runs.start_now(job)
    following.until(f"running: job {job} on n[1-2]")
    slurm_runs.wait_until_held(name, NUM_RANKS)
    devcluster.run("scontrol", "requeue", job)
    slurm_runs.release(name)
    following.until("queued: requeued (everything saved (Slurm ends the job)); job ")
    slurm_runs.start_now(job)
    code, lines = following.end()
    assert (code, lines[-1]) == (0, "finished: trained 90 steps, 2 epochs"), lines
    # `submit --follow` ships the records.
    assert slurm_runs.mlflow_status(name) == "FINISHED"
    tags = slurm_runs.tags(name)
    assert (tags["hpcdist.slurm.job_id"], tags["hpcdist.slurm.starts"]) == (job, "2")
    assert float(tags["hpcdist.slurm.queue_s"]) >= 1
    slurm_runs.assert_finished_as(name, job, slurm_control)


@pytest.mark.slow
def test_wait_reports_a_job_cancelled_in_the_queue(slurm_runs: SlurmRuns, devcluster: DevCluster) -> None:
    name = "waited-for"
    waiting, job = start_submit(slurm_runs, name, WAITING, "--wait")
    waiting.until(f"queued: job {job} waits (BeginTime)")
    code, output = slurm_runs.command("explain", name)
    assert code == 0
    assert "its requested start time is in the future, or Slurm has just requeued it (BeginTime)" in output
    devcluster.run("scancel", job)
    code, lines = waiting.end()
    assert (code, lines[-1]) == (130, f"cancelled: job {job} was cancelled in the queue"), lines
    assert slurm_runs.mlflow_status(name) == "KILLED"


def test_stop_and_cancel_remove_a_pending_job_without_accounting(
    slurm_runs: SlurmRuns, devcluster: DevCluster, without_accounting: str
) -> None:
    env = {"PATH": without_accounting}
    for action, status in (("stop", "stopped"), ("cancel", "cancelled")):
        name = f"queue-{action}"
        job = slurm_runs.submit(name, WAITING)
        code, output = slurm_runs.command("status", name, **env)
        assert f"job {job} waits (BeginTime), expected to start at " in output
        code, output = slurm_runs.command(action, name, **env)
        message = f"job {job} of {name} was taken out of the queue; `hpcdist resume {name}` submits it again\n"
        assert (code, output) == (0, message)
        assert devcluster.job(job)["JobState"] == "CANCELLED"
        assert slurm_runs.state(name).status == status
    code, output = slurm_runs.command("runs", **env)
    assert "taken out of the queue" in output


@pytest.mark.slow
def test_sync_closes_runs_whose_jobs_are_gone(
    slurm_runs: SlurmRuns, devcluster: DevCluster, without_accounting: str
) -> None:
    name = "vanished"
    job = slurm_runs.submit(name, WAITING)
    code, output = slurm_runs.command("sync", name)
    assert (code, "closed" in output) == (0, False), output
    devcluster.run("scancel", job)
    # Simulate a job that is no longer in the controller's memory, without accounting.
    path = slurm_runs.run_dir(name).path / "slurm.json"
    write_json(path, (read_json(path) or {}) | {"job_id": "99999"})
    code, output = slurm_runs.command("sync", name, PATH=without_accounting)
    reason = "Slurm no longer knows job 99999, and its supervisor did not record a status"
    assert (code, output.rstrip().partition("; ")[2]) == (0, f"closed: {reason}")
    assert slurm_runs.mlflow_status(name) == "FAILED"
    assert slurm_runs.tags(name)["hpcdist.reason"] == reason


@pytest.mark.faults
def test_follow_survives_ctrl_c_and_reports_the_job_state_of_a_killed_supervisor(slurm_runs: SlurmRuns) -> None:
    name = "followed-killed"
    following, job = start_submit(slurm_runs, name, *HOLD_OVERRIDES, "--follow")
    following.until(f"running: job {job} on n[1-2]")
    slurm_runs.wait_until_held(name, NUM_RANKS)
    code, lines = following.interrupt()
    message = f"run {name} continues: `hpcdist follow {name}` shows it again, `hpcdist stop` stops it"
    assert (code, lines[-1], slurm_runs.state(name).status) == (130, message, "running"), lines
    following = RunningCommand(slurm_runs.start("follow", name))
    following.until(f"running: job {job} on n[1-2]")
    supervisor = psutil.Process(slurm_runs.holder_pid(name))
    shell = supervisor.parent()
    assert shell is not None
    shell.kill()  # the batch script would restart the supervisor
    supervisor.kill()
    code, lines = following.end()
    assert code == 1, lines
    assert lines[-1].startswith(f"failed: job {job} ended as FAILED"), lines
    assert lines[-1].endswith(" on n[1-2]")
    assert slurm_runs.mlflow_status(name) == "FAILED"
    code, output = slurm_runs.command("explain", name)
    assert (code, len(output.splitlines()) <= 5) == (0, True)
    assert f"\nslurm:    job {job} ended as FAILED" in output
    slurm_runs.assert_no_process_left(name)


def test_explain_shows_why_a_run_was_rejected(slurm_runs: SlurmRuns, tmp_path: Path) -> None:
    name = "rejected"
    one_rank = ("cluster.nodes=1", "cluster.tasks_per_node=1", "launch.num_ranks=1")
    missing = ("data.name=mnist", f"data.root={tmp_path}/nowhere")
    waiting, job = start_submit(slurm_runs, name, *one_rank, *missing, "--wait")
    code, lines = waiting.end()
    assert code == 2, lines
    code, output = slurm_runs.command("explain", name)
    rows = {key: text.strip() for key, _, text in (line.partition(":") for line in output.splitlines())}
    assert rows["cause"] == "the configuration cannot run on these nodes"
    assert f"{tmp_path}/nowhere" in rows["evidence"] + rows["status"]
    assert rows["slurm"].startswith(f"job {job} ended as ")
