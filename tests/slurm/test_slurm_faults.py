"""What clusters do to runs, on a real Slurm: each fault is seen to have struck, and the run ends as if it had not.

Graceful faults cost no step; hard ones at most what came after the last checkpoint.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator

import psutil
import pytest
from hpcdist_runs import HELD, HOLD_AT, LAST_STEP, wait_for
from slurm_cluster import DevCluster
from slurm_runs import SlurmRuns

from hpcdist.devcluster import cluster, nodes, processes

#: The checkpoint before the step at which the ranks are held.
LAST_SAVE = 45
#: A hang and a lost node are found this soon.
QUICK = ["launch.hang_timeout_s=15"]

pytestmark = [pytest.mark.faults, pytest.mark.timeout(400)]


@pytest.fixture(autouse=True)
def a_whole_cluster_again(devcluster: DevCluster) -> Iterator[None]:
    yield
    devcluster.cancel_all()
    cluster.set_grace_time(devcluster.layout, 0)
    for name in cluster.status(devcluster.layout).dead:
        nodes.start_node(devcluster.layout, name.removeprefix("slurmd-"))
    devcluster.until(
        lambda: {node.state for node in cluster.status(devcluster.layout).nodes} == {"idle"}, "all nodes are idle"
    )


@pytest.fixture(scope="module", autouse=True)
def table(slurm_runs: SlurmRuns) -> Iterator[list[str]]:
    """What came of each fault, printed at the end (`-s` shows it)."""
    rows: list[str] = []
    yield rows
    print("\n\nDDP, 2 nodes x 2 ranks: fault | lives of the job | attempts | resumed at | after")
    print("\n".join(rows))


def conclude(
    runs: SlurmRuns, table: list[str], name: str, job: str, control: str, resumed_at: int, attempt: int = 2
) -> None:
    """Assert that the run ended as the control run, and that the attempt went on from `resumed_at`."""
    runs.assert_finished_as(name, job, control)
    assert runs.resumed_at(name, attempt) == resumed_at
    lives = int(runs.cluster.job(job)["Restarts"]) + 1
    table.append(f"{name} | {lives} | {runs.state(name).attempt} | {resumed_at} | bit-equal, FINISHED")


def restarts(devcluster: DevCluster, job: str) -> int:
    return int(devcluster.job(job)["Restarts"])


def test_the_time_limit(slurm_runs: SlurmRuns, devcluster: DevCluster, slurm_control: str, table: list[str]) -> None:
    """Nobody releases the ranks: they go on once they are asked to stop, which only the time limit does.

    Slurm's own signal may come up to a minute before the supervisor's request, even before the ranks are held.
    """
    name = "time-limit"
    job = slurm_runs.submit(name, *HELD, "cluster.time_min=2", "cluster.signal_lead_s=60")
    assert devcluster.job(job)["TimeLimit"] == "00:02:00"
    reason = slurm_runs.wait_status(name, "queued", timeout_s=100).reason
    assert reason.partition("(")[2] in ("time limit)", "a stop signal reached the ranks)")
    saved = slurm_runs.checkpoint_steps(name)[-1]
    assert 0 < saved < LAST_STEP
    slurm_runs.start_now(job)
    conclude(slurm_runs, table, name, job, slurm_control, saved)
    assert restarts(devcluster, job) == 1


def test_slurms_own_signal_ahead_of_the_time_limit(
    slurm_runs: SlurmRuns, devcluster: DevCluster, slurm_control: str, table: list[str]
) -> None:
    """SIGUSR2 reaches the ranks before the supervisor has asked for anything."""
    name = "usr2"
    job = slurm_runs.submit_held(name)
    devcluster.run("scancel", "--signal=USR2", job)
    slurm_runs.release(name)
    reason = slurm_runs.wait_status(name, "queued").reason
    assert reason == "stopped with everything saved (a stop signal reached the ranks)"
    saved = slurm_runs.checkpoint_steps(name)[-1]
    slurm_runs.start_now(job)
    conclude(slurm_runs, table, name, job, slurm_control, saved)


@pytest.mark.parametrize("grace_s", [0, 20])
def test_preemption(
    slurm_runs: SlurmRuns, devcluster: DevCluster, slurm_control: str, table: list[str], grace_s: int
) -> None:
    name = f"preempted-grace-{grace_s}"
    cluster.set_grace_time(devcluster.layout, grace_s)
    job = slurm_runs.submit_held(name)
    high = devcluster.sbatch("true", "--partition=high", "--nodes=4", "--exclusive")
    wait_for(slurm_runs.attempt(name).request.exists, "the supervisor to be told")
    slurm_runs.release(name)
    slurm_runs.wait_status(name, "queued")
    saved = slurm_runs.checkpoint_steps(name)[-1]
    assert saved >= HOLD_AT
    devcluster.until(lambda: devcluster.job(high)["JobState"] == "COMPLETED", "the job of high has run")
    slurm_runs.start_now(job)
    conclude(slurm_runs, table, name, job, slurm_control, saved)
    assert restarts(devcluster, job) == 1


def test_two_requeues_at_once(
    slurm_runs: SlurmRuns, devcluster: DevCluster, slurm_control: str, table: list[str]
) -> None:
    name = "two-requeues"
    job = slurm_runs.submit_held(name)
    command = ["scontrol", "requeue", job]
    both = [subprocess.Popen(command, env=devcluster.env, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    slurm_runs.release(name)
    said = [process.communicate(timeout=60)[1] for process in both]
    assert sorted(process.returncode for process in both) in ([0, 0], [0, 1]), said
    slurm_runs.wait_status(name, "queued")
    saved = slurm_runs.checkpoint_steps(name)[-1]
    slurm_runs.start_now(job)
    conclude(slurm_runs, table, name, job, slurm_control, saved)


def test_a_rank_that_is_stopped(
    slurm_runs: SlurmRuns, devcluster: DevCluster, slurm_control: str, table: list[str]
) -> None:
    name = "rank-stopped"
    job = slurm_runs.submit_held(name, *QUICK)
    victim = int((slurm_runs.attempt(name).path / "held-2").read_text())
    os.kill(victim, signal.SIGSTOP)
    wait_for(lambda: psutil.Process(victim).status() == psutil.STATUS_STOPPED, "the rank to stand still")
    slurm_runs.release(name)
    conclude(slurm_runs, table, name, job, slurm_control, LAST_SAVE)
    assert "made no progress for launch.hang_timeout_s=15 s" in slurm_runs.job_log(name)
    assert restarts(devcluster, job) == 0, "restarted in place"
    assert not psutil.pid_exists(victim)


def test_the_supervisor_is_killed(
    slurm_runs: SlurmRuns, devcluster: DevCluster, slurm_control: str, table: list[str]
) -> None:
    """Slurm sees a job that failed and does not start it again: that is a person's to do, and nothing runs on."""
    name = "supervisor-killed"
    job = slurm_runs.submit_held(name)
    supervisor = slurm_runs.holder_pid(name)
    assert "submitit.core._submit" in " ".join(psutil.Process(supervisor).cmdline())
    os.kill(supervisor, signal.SIGKILL)
    devcluster.until(lambda: devcluster.job(job)["JobState"] == "FAILED", "Slurm counts the job as failed")
    slurm_runs.assert_no_process_left(name)
    assert slurm_runs.state(name).status == "running", "nobody was left to say otherwise"
    devcluster.run("scontrol", "requeue", job)
    slurm_runs.start_now(job)
    conclude(slurm_runs, table, name, job, slurm_control, LAST_SAVE)


def test_the_same_run_submitted_twice(
    slurm_runs: SlurmRuns, devcluster: DevCluster, slurm_control: str, table: list[str]
) -> None:
    name = "twice"
    job = slurm_runs.submit_held(name)
    again = slurm_runs.config(name, "cluster.tasks_per_node=2")
    code, output = slurm_runs.command("submit", *again, "--cluster", "devcluster")
    assert (code, "exists already: choose another `name`" in output) == (2, True), output
    # And past the command: a second job of the same folder meets the lease of the first.
    (script,) = (slurm_runs.run_dir(name).path / "submitit").glob("*_submission.sh")
    (pickle,) = (slurm_runs.run_dir(name).path / "submitit").glob("*_submitted.pkl")
    second = devcluster.run("sbatch", "--parsable", "--hold", str(script)).strip()
    pickle.with_name(f"{second}_submitted.pkl").write_bytes(pickle.read_bytes())
    devcluster.run("scontrol", "release", second)
    devcluster.until(lambda: devcluster.job(second)["JobState"] == "FAILED", "the second job has failed")
    assert f"run {name} is held by process " in slurm_runs.job_log(name)
    assert slurm_runs.state(name).status == "running"
    slurm_runs.release(name)
    slurm_runs.assert_finished_as(name, job, slurm_control)
    assert slurm_runs.state(name).attempt == 1
    table.append(f"{name} | 1 | 1 | - | bit-equal, FINISHED; the second is told who holds the run")


def kill_node(devcluster: DevCluster, runs: SlurmRuns, name: str, node: str) -> None:
    """A power cut, with the ranks released so that those that are left run into it."""
    nodes.kill_node(devcluster.layout, node)
    assert processes.node_members(devcluster.layout, devcluster.settings)[node] == []
    runs.release(name)


def wait_second_life(devcluster: DevCluster, runs: SlurmRuns, job: str) -> None:
    """The job runs again, by whoever's decision; Slurm's own hold of it is cut short."""

    def runs_again() -> bool:
        facts = devcluster.job(job)
        if facts["JobState"] == "PENDING" and facts["Reason"] == "BeginTime":
            runs.start_now(job)
        return facts["JobState"] == "RUNNING" and int(facts["Restarts"]) > 0

    devcluster.until(runs_again, f"job {job} runs again", within_s=150)


@pytest.mark.parametrize("victim", ["n1", "n2"])
def test_a_node_dies_and_another_takes_its_place(
    slurm_runs: SlurmRuns, devcluster: DevCluster, slurm_control: str, table: list[str], victim: str
) -> None:
    """n1 is the batch host, on which the supervisor dies as well."""
    name = f"dead-{victim}"
    job = slurm_runs.submit_held(name, *QUICK)
    assert devcluster.job(job)["BatchHost"] == "n1"
    kill_node(devcluster, slurm_runs, name, victim)
    wait_second_life(devcluster, slurm_runs, job)
    conclude(slurm_runs, table, name, job, slurm_control, LAST_SAVE)
    assert victim not in slurm_runs.hosts(name, 2)


def test_a_node_dies_and_comes_back(
    slurm_runs: SlurmRuns, devcluster: DevCluster, slurm_control: str, table: list[str]
) -> None:
    """Without a spare node the run waits for the one that is gone."""
    name = "node-back"
    others = devcluster.sbatch("sleep 600", "--nodes=2", "--exclusive", "--nodelist=n3,n4")
    devcluster.until(lambda: devcluster.job(others)["JobState"] == "RUNNING", "the other nodes are taken")
    job = slurm_runs.submit_held(name, *QUICK)
    kill_node(devcluster, slurm_runs, name, "n2")
    devcluster.until(lambda: restarts(devcluster, job) == 1, "the job is queued again", within_s=120)
    nodes.start_node(devcluster.layout, "n2")
    wait_second_life(devcluster, slurm_runs, job)
    conclude(slurm_runs, table, name, job, slurm_control, LAST_SAVE)
    assert slurm_runs.hosts(name, 2) == ["n1", "n1", "n2", "n2"]
