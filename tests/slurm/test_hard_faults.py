"""Processes and nodes that die, hang or break without a word: at most what came after the last checkpoint is lost."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest
from hpcdist_runs import wait_for
from slurm_faults import FaultScene

from hpcdist.devcluster import nodes

#: A hang is found this soon. Four ranks that import torch on two cores take a while to show any progress.
QUICK = "launch.hang_timeout_s=30"

pytestmark = pytest.mark.timeout(400)


@pytest.mark.quick_fault
def test_a_rank_is_killed(scene: FaultScene) -> None:
    scene.submit_held("SIGKILL of a rank")
    started = scene.cluster.job(scene.job)["StartTime"]
    os.kill(scene.pid_of(3), signal.SIGKILL)
    scene.release()
    scene.conclude_hard()
    assert (scene.lives(), scene.cluster.job(scene.job)["StartTime"]) == (1, started), "restarted in place"
    assert "rank 3 on n2 was killed by SIGKILL (out of memory?) at step " in scene.runs.job_log(scene.name)
    assert (scene.cell.attempts, scene.cell.restarts) == (2, 1)


@pytest.mark.faults
def test_a_rank_is_stopped(scene: FaultScene) -> None:
    scene.submit_held("SIGSTOP of a rank", QUICK)
    victim = scene.pid_of(2)
    os.kill(victim, signal.SIGSTOP)
    wait_for(lambda: psutil.Process(victim).status() == psutil.STATUS_STOPPED, "the rank to stand still")
    scene.release()
    scene.conclude_hard()
    said = scene.runs.job_log(scene.name)
    assert "rank 2 on n2 made no progress for launch.hang_timeout_s=30 s" in said, "and not one that waits for it"
    assert "; rank 2 differs from the others: state T (stopped)" in said
    attempt = scene.runs.attempt(scene.name)
    # Both nodes have answered, and a rank that cannot run has its process to speak for it.
    for rank, node in enumerate(("n1", "n1", "n2", "n2")):
        state = "state T (stopped)" if rank == 2 else "state S (sleeping)"
        assert f"rank {rank} on {node}, process " in attempt.stacks(rank).read_text()
        assert state in attempt.stacks(rank).read_text()
        assert attempt.flight(rank).exists() == (rank != 2)
        assert rank == 2 or "ddp.py" in attempt.stacks(rank).read_text()
    assert "no snapshot of" not in attempt.stacks_summary.read_text()
    assert scene.lives() == 1, "restarted in place"
    assert not psutil.pid_exists(victim)


@pytest.mark.quick_fault
def test_the_supervisor_is_killed(scene: FaultScene) -> None:
    """The shell of the batch step starts another one in the same allocation, and that one first ends the old ranks."""
    scene.submit_held("SIGKILL of the supervisor")
    supervisor = scene.runs.holder_pid(scene.name)
    assert "submitit.core._submit" in " ".join(psutil.Process(supervisor).cmdline())
    ranks = scene.wait_until_held()
    os.kill(supervisor, signal.SIGKILL)
    scene.conclude_hard()
    assert "the supervisor was killed (exit code 137): restarting it" in scene.runs.job_log(scene.name)
    assert (scene.lives(), scene.cell.attempts) == (1, 2)
    assert not any(psutil.pid_exists(rank) for rank in ranks), "they were never released"


@pytest.mark.faults
def test_the_supervisor_is_killed_again_and_again(scene: FaultScene) -> None:
    """That ends with a job that has failed, and nothing runs on. A person may queue it again."""
    scene.cell.fault = "SIGKILL of 4 supervisors"
    name = scene.name = f"{scene.subject.name}-supervisors-killed"
    job = scene.job = scene.runs.submit(name, *scene.subject.overrides)
    killed: list[int] = []
    for _ in range(4):

        def another() -> int:
            pid = scene.runs.holder_pid(name)
            return pid if pid not in killed and psutil.pid_exists(pid) else 0

        killed.append(wait_for(another, "the next supervisor"))
        os.kill(killed[-1], signal.SIGKILL)
    scene.cluster.until(lambda: scene.cluster.job(job)["JobState"] == "FAILED", "Slurm counts the job as failed")
    scene.runs.assert_no_process_left(name)
    assert scene.runs.state(name).status == "running", "nobody was left to say otherwise"
    scene.cluster.run("scontrol", "requeue", job)
    scene.start_now()
    scene.conclude(lost_at_most=scene.subject.interval)


@pytest.mark.faults
def test_the_same_run_submitted_twice(scene: FaultScene) -> None:
    scene.submit_held("submitted twice")
    name, runs, devcluster = scene.name, scene.runs, scene.cluster
    again = runs.config(name, "cluster.tasks_per_node=2")
    code, output = runs.command("submit", *again, "--cluster", "devcluster")
    assert (code, "exists already: choose another `name`" in output) == (2, True), output
    # And past the command: a second job of the same folder meets the lease of the first.
    (script,) = (runs.run_dir(name).path / "submitit").glob("*_submission.sh")
    (pickle,) = (runs.run_dir(name).path / "submitit").glob("*_submitted.pkl")
    second = devcluster.run("sbatch", "--parsable", "--hold", str(script)).strip()
    pickle.with_name(f"{second}_submitted.pkl").write_bytes(pickle.read_bytes())
    devcluster.run("scontrol", "release", second)
    devcluster.until(lambda: devcluster.job(second)["JobState"] == "FAILED", "the second job has failed")
    assert f"run {name} is held by process " in runs.job_log(name)
    assert runs.state(name).status == "running"
    scene.release()
    scene.conclude(lost_at_most=0)
    assert scene.cell.attempts == 1


@pytest.mark.faults
@pytest.mark.parametrize("victim", ["n1", "n2"])
def test_a_node_dies_and_another_takes_its_place(scene: FaultScene, victim: str) -> None:
    """n1 is the batch host, on which the supervisor dies as well."""
    scene.submit_held("batch host dead" if victim == "n1" else "node dead for good", QUICK)
    assert scene.cluster.job(scene.job)["BatchHost"] == "n1"
    scene.kill_node(victim)
    scene.wait_second_life()
    scene.conclude_hard()
    assert victim not in scene.runs.hosts(scene.name, 2)
    # Slurm may have been quicker than the supervisor, and then has no need to be told.
    noticed_here = "; lost n2, avoided from now on" in scene.runs.job_log(scene.name)
    assert scene.cluster.job(scene.job)["ExcNodeList"] == ("n2" if noticed_here else "(null)")


@pytest.mark.faults
def test_a_node_dies_and_comes_back(scene: FaultScene) -> None:
    """Without a spare node the run waits for the one that is gone."""
    others = scene.cluster.sbatch("sleep 600", "--nodes=2", "--exclusive", "--nodelist=n3,n4")
    scene.cluster.until(lambda: scene.cluster.job(others)["JobState"] == "RUNNING", "the other nodes are taken")
    scene.submit_held("node dead, comes back", QUICK)
    scene.kill_node("n2")
    scene.cluster.until(lambda: scene.lives() == 2, "the job is queued again", within_s=120)
    nodes.start_node(scene.cluster.layout, "n2")
    scene.wait_second_life()
    scene.conclude_hard()
    assert scene.runs.hosts(scene.name, 2) == ["n1", "n1", "n2", "n2"]


@pytest.mark.faults
def test_a_node_that_answers_but_fails_its_ranks_is_avoided(scene: FaultScene, tmp_path: Path) -> None:
    (tmp_path / "n2").touch()
    scene.submit("node that fails ranks", "trainer=bad_node:train", f"params.broken={tmp_path}", "cluster.exclude=n4")
    scene.cluster.until(lambda: scene.lives() == 2, "the job is queued again")
    said = scene.runs.job_log(scene.name)
    assert "device lost" in said
    assert "; ranks on n2 have failed twice in a row, and on no other node: avoided from now on\n" in said
    assert set(scene.cluster.job(scene.job)["ExcNodeList"].split(",")) == {"n2", "n4"}, "besides the user's own"
    scene.start_now()
    scene.conclude(lost_at_most=0)
    assert scene.runs.hosts(scene.name, 3) == ["n1", "n1", "n3", "n3"]
