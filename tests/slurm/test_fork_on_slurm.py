"""Ranks that a process on each node forks (`cluster.fork`), on a real Slurm."""

from __future__ import annotations

import os
import re
import signal

import psutil
import pytest
from slurm_faults import FaultScene

from hpcdist.rank.processes import PARENT_MODULE

FORK = "cluster.fork=true"
#: The GPUs of the dev cluster are not real.
CPU = "launch.device=cpu"


def parents(scene: FaultScene) -> dict[int, psutil.Process]:
    """Return the parent process of each rank, none of which may have started its rank by a command."""
    ranks = scene.runs.rank_processes(scene.name)
    found = {rank: psutil.Process(process.ppid()) for rank, process in ranks.items()}
    assert all(PARENT_MODULE in parent.cmdline() for parent in found.values())
    return found


@pytest.mark.quick_fault
def test_parents_fork_the_ranks_of_the_next_attempt(scene: FaultScene) -> None:
    """A rank is killed. The next one has the same parent, and logs as without a parent."""
    scene.submit_held("SIGKILL of a forked rank", FORK)
    before = parents(scene)
    assert sorted(before) == [0, 1, 2, 3]
    assert before[0].pid == before[1].pid
    assert before[2].pid == before[3].pid != before[0].pid, "one on each node"
    os.kill(scene.pid_of(3), signal.SIGKILL)
    scene.release()
    scene.assert_recovered_from_checkpoint()
    assert "rank 3 on n2 was killed by SIGKILL after step " in scene.runs.job_log(scene.name)
    assert (scene.num_starts(), scene.cell.attempts, scene.cell.restarts) == (1, 2, 1)
    for node, ranks in (("n1", (0, 1)), ("n2", (2, 3))):
        log = (scene.runs.attempt(scene.name).path.parent / f"rank-parent-{node}.log").read_text()
        found = re.findall(r"process (\d+) has forked process \d+ for task (\d) of attempt (\d)", log)
        parent = before[ranks[0]].pid
        assert sorted(found) == sorted((str(parent), str(rank), attempt) for rank in ranks for attempt in "12")
    for attempt in scene.runs.run_dir(scene.name).attempts():
        assert not any("imports torch itself" in attempt.log(rank).read_text() for rank in range(4))


@pytest.mark.faults
def test_requeued_job_forks_again(scene: FaultScene) -> None:
    scene.submit_held("requeue of forked ranks", FORK)
    scene.cluster.run("scontrol", "requeue", scene.job)
    scene.release()
    assert scene.wait_queued() == "everything saved (Slurm ends the job)"
    scene.runs.assert_no_process_left(scene.name)
    scene.start_now()
    scene.assert_recovered(max_lost_steps=0)
    assert (scene.num_starts(), scene.cell.attempts, scene.cell.restarts) == (2, 2, 0)


@pytest.mark.faults
def test_killed_parent_ends_its_ranks_and_has_a_successor(scene: FaultScene) -> None:
    scene.submit_held("SIGKILL of a parent of ranks", FORK)
    before = parents(scene)
    before[2].kill()
    scene.release()
    scene.assert_recovered_from_checkpoint()
    is_replaced = "the parent process of the ranks on n2 has ended and is started again" in scene.runs.job_log(
        scene.name
    )
    # With proctrack/cgroup Slurm may report the end of the parent after the ranks have been restarted.
    if os.environ.get("HPCDIST_PROCTRACK") == "cgroup" and not is_replaced:
        is_replaced = (
            "this rank imports torch itself" in (scene.runs.attempt(scene.name, 2).path / "srun.log").read_text()
        )
    assert is_replaced
    assert (scene.num_starts(), scene.cell.attempts) == (1, 2)


@pytest.mark.faults
def test_killed_supervisor_leaves_no_parent(scene: FaultScene) -> None:
    """The next supervisor ends the step of the parents, and starts its own."""
    scene.submit_held("supervisor of forked ranks killed", FORK)
    before = parents(scene)
    os.kill(scene.runs.holder_pid(scene.name), signal.SIGKILL)
    scene.assert_recovered_from_checkpoint()
    assert (scene.num_starts(), scene.cell.attempts) == (1, 2)
    assert not any(parent.is_running() for parent in before.values())


def visible_gpus(scene: FaultScene) -> dict[int, str]:
    """Return the numbers of the GPUs that Slurm shows to each rank."""
    ranks = scene.runs.rank_processes(scene.name)
    return {rank: process.environ()["CUDA_VISIBLE_DEVICES"] for rank, process in ranks.items()}


@pytest.mark.faults
def test_forked_ranks_see_the_gpus_of_their_task(scene: FaultScene) -> None:
    """Unless each task has its own, which the log says once."""
    scene.submit_held("GPUs of forked ranks", FORK, "cluster.gpus_per_node=2", CPU)
    assert sorted(parents(scene)) == [0, 1, 2, 3]
    assert visible_gpus(scene) == dict.fromkeys(range(4), "0,1")
    scene.release()
    scene.runs.assert_finished_as(scene.name, scene.job, scene.control)


@pytest.mark.faults
def test_ranks_with_gpus_of_their_own_are_not_forked(scene: FaultScene) -> None:
    scene.submit_held("GPUs of each rank", FORK, "cluster.sbatch.gpus-per-task=1", CPU)
    assert visible_gpus(scene) == {0: "0", 1: "1", 2: "0", 3: "1"}
    assert "rank-parents" not in scene.steps()
    log = scene.runs.job_log(scene.name)
    assert log.count("cluster.fork has no effect: --gpus-per-task=1 gives each rank GPUs or memory of its own") == 1
    scene.release()
    scene.assert_recovered(max_lost_steps=0)
