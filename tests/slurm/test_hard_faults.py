"""Processes and nodes that die or hang without warning: at most the steps since the last checkpoint are lost."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest
from hpcdist_runs import wait_for
from slurm_faults import FaultScene

from hpcdist.devcluster import cluster

#: A short timeout, but long enough for four ranks to import torch on two cores.
SHORT_TIMEOUT = "launch.hang_timeout_s=60"


@pytest.mark.faults  # test_fork_on_slurm.py kills a forked rank, test_elastic_on_slurm.py restarts ranks in place
def test_killed_rank_restarts_the_ranks_in_place(scene: FaultScene) -> None:
    scene.submit_held("SIGKILL of a rank")
    started = scene.cluster.job(scene.job)["StartTime"]
    os.kill(scene.pid_of(3), signal.SIGKILL)
    scene.release()
    scene.assert_recovered_from_checkpoint()
    assert (scene.num_starts(), scene.cluster.job(scene.job)["StartTime"]) == (1, started), "the same allocation"
    assert "rank 3 on n2 was killed by SIGKILL after step " in scene.runs.job_log(scene.name)
    assert (scene.cell.attempts, scene.cell.restarts) == (2, 1)


@pytest.mark.faults
def test_stopped_rank_is_found_by_the_hang_timeout(scene: FaultScene) -> None:
    scene.submit_held("SIGSTOP of a rank", SHORT_TIMEOUT)
    victim = scene.pid_of(2)
    os.kill(victim, signal.SIGSTOP)
    wait_for(lambda: psutil.Process(victim).status() == psutil.STATUS_STOPPED, "the rank to stop")
    scene.release()
    scene.assert_recovered_from_checkpoint()
    log = scene.runs.job_log(scene.name)
    assert "rank 2 on n2 made no progress for launch.hang_timeout_s=60 s" in log, "not a rank that waits for it"
    assert "; rank 2 differs from the others: state T (stopped)" in log
    attempt = scene.runs.attempt(scene.name)
    # A stopped rank cannot write its own stack; the process state is recorded in its place.
    for rank, node in enumerate(("n1", "n1", "n2", "n2")):
        state = "state T (stopped)" if rank == 2 else "state S (sleeping)"
        assert f"rank {rank} on {node}, process " in attempt.stacks(rank).read_text()
        assert state in attempt.stacks(rank).read_text()
        assert attempt.flight(rank).exists() == (rank != 2)
        assert rank == 2 or "ddp/train.py" in attempt.stacks(rank).read_text()
    assert "no snapshot of" not in attempt.stacks_summary.read_text()
    assert scene.num_starts() == 1, "the same allocation"
    assert not psutil.pid_exists(victim)


@pytest.mark.slow
@pytest.mark.quick_fault
def test_killed_supervisor_is_restarted_by_the_batch_script(scene: FaultScene) -> None:
    """The new supervisor, in the same allocation, first kills the old ranks."""
    scene.submit_held("SIGKILL of the supervisor")
    supervisor = scene.runs.holder_pid(scene.name)
    assert "submitit.core._submit" in " ".join(psutil.Process(supervisor).cmdline())
    ranks = scene.wait_until_held()
    os.kill(supervisor, signal.SIGKILL)
    scene.assert_recovered_from_checkpoint()
    assert "the supervisor was killed (exit code 137): restarting it" in scene.runs.job_log(scene.name)
    assert (scene.num_starts(), scene.cell.attempts) == (1, 2)
    assert not any(psutil.pid_exists(rank) for rank in ranks), "ranks that were never released are killed"


@pytest.mark.faults
def test_job_fails_after_repeated_kills_of_the_supervisor_and_can_be_requeued(scene: FaultScene) -> None:
    scene.cell.fault = "SIGKILL of 4 supervisors"
    name = scene.name = f"{scene.subject.name}-supervisors-killed"
    job = scene.job = scene.runs.submit(name, *scene.subject.overrides)
    killed: list[int] = []
    for _ in range(4):

        def next_supervisor() -> int:
            pid = scene.runs.holder_pid(name)
            return pid if pid not in killed and psutil.pid_exists(pid) else 0

        killed.append(wait_for(next_supervisor, "the next supervisor"))
        os.kill(killed[-1], signal.SIGKILL)
    scene.cluster.wait_job_state(job, "FAILED")
    scene.runs.assert_no_process_left(name)
    assert scene.runs.state(name).status == "running", "no process was left to record the failure"
    scene.cluster.run("scontrol", "requeue", job)
    scene.start_now()
    scene.assert_recovered(max_lost_steps=scene.subject.interval)


@pytest.mark.faults
def test_second_job_of_a_held_run_fails_without_effect_on_the_first(scene: FaultScene) -> None:
    scene.submit_held("submitted twice")
    name, runs, devcluster = scene.name, scene.runs, scene.cluster
    again = runs.config(name, "cluster.tasks_per_node=2")
    code, output = runs.command("submit", *again, "--cluster", "devcluster")
    assert (code, "exists already: choose another `name`" in output) == (2, True), output
    # A second job submitted with sbatch itself fails because the first holds the run's lease.
    (script,) = (runs.run_dir(name).path / "submitit").glob("*_submission.sh")
    (pickle,) = (runs.run_dir(name).path / "submitit").glob("*_submitted.pkl")
    second = devcluster.run("sbatch", "--parsable", "--hold", str(script)).strip()
    pickle.with_name(f"{second}_submitted.pkl").write_bytes(pickle.read_bytes())
    devcluster.run("scontrol", "release", second)
    devcluster.wait_job_state(second, "FAILED")
    assert f"run {name} is held by process " in runs.job_log(name)
    assert runs.state(name).status == "running"
    scene.release()
    scene.assert_recovered(max_lost_steps=0)
    assert scene.cell.attempts == 1


@pytest.mark.faults
@pytest.mark.parametrize("victim", ["n1", "n2"])
def test_dead_node_is_replaced_by_a_spare_node(scene: FaultScene, victim: str) -> None:
    """n1 is the batch host: the supervisor dies, too."""
    scene.submit_held("batch host dead" if victim == "n1" else "node dead for good", SHORT_TIMEOUT)
    assert scene.cluster.job(scene.job)["BatchHost"] == "n1"
    scene.kill_node(victim)
    scene.wait_restarted()
    scene.assert_recovered_from_checkpoint()
    assert victim not in scene.runs.hosts(scene.name, 2)
    # The supervisor excludes the node unless Slurm itself notices the failure first.
    is_excluded = "; lost n2, avoided from now on" in scene.runs.job_log(scene.name)
    assert scene.cluster.job(scene.job)["ExcNodeList"] == ("n2" if is_excluded else "(null)")


@pytest.mark.faults
def test_run_waits_for_the_dead_node_where_no_spare_exists(scene: FaultScene) -> None:
    others = scene.cluster.sbatch("sleep 3600", "--nodes=2", "--exclusive", "--nodelist=n3,n4")
    scene.cluster.wait_job_state(others, "RUNNING")
    scene.submit_held("node dead, comes back", SHORT_TIMEOUT)
    scene.kill_node("n2")
    scene.cluster.wait_until(lambda: scene.num_starts() == 2, "the job is queued again")
    cluster.start_node(scene.cluster.layout, "n2")
    scene.wait_restarted()
    scene.assert_recovered_from_checkpoint()
    assert scene.runs.hosts(scene.name, 2) == ["n1", "n1", "n2", "n2"]


@pytest.mark.faults
def test_node_on_which_ranks_fail_twice_is_excluded(scene: FaultScene, tmp_path: Path) -> None:
    (tmp_path / "n2").touch()
    scene.submit("node that fails ranks", "trainer=bad_node:train", f"params.broken={tmp_path}", "cluster.exclude=n4")
    scene.cluster.wait_until(lambda: scene.num_starts() == 2, "the job is queued again")
    log = scene.runs.job_log(scene.name)
    assert "device lost" in log
    assert "; ranks on n2 have failed twice in a row, and on no other node: avoided from now on\n" in log
    assert set(scene.cluster.job(scene.job)["ExcNodeList"].split(",")) == {"n2", "n4"}, "n4: cluster.exclude"
    scene.start_now()
    scene.assert_recovered(max_lost_steps=0)
    assert scene.runs.hosts(scene.name, 3) == ["n1", "n1", "n3", "n3"]
