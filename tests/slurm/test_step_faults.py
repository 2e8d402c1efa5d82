"""Faults of Slurm itself: reboots that it does not notice, killed slurmstepds, restarts of its daemons."""

from __future__ import annotations

import os
import signal

import psutil
import pytest
from hpcdist_runs import wait_for
from slurm_cluster import WAIT_S
from slurm_faults import FaultScene

from hpcdist.devcluster import cluster


@pytest.mark.parametrize(
    "victim",
    [
        pytest.param("n2", marks=[pytest.mark.quick_fault, pytest.mark.slow]),
        pytest.param("n1", marks=pytest.mark.faults),
    ],
)
def test_job_is_requeued_after_unnoticed_node_reboot(scene: FaultScene, victim: str) -> None:
    """Slurm does not notice the reboot and keeps the step, so that the nodes are busy for the next attempt.

    n1 is the batch host: the supervisor dies, too; Slurm misses the batch step and requeues the job.
    """
    scene.submit_held("batch host reboots within seconds" if victim == "n1" else "node reboots within seconds")
    cluster.kill_node(scene.cluster.layout, victim)
    cluster.start_node(scene.cluster.layout, victim)
    if victim == "n2":
        assert "attempt-001" in scene.steps(), "Slurm has noticed the reboot"
    scene.release()
    scene.wait_restarted()
    scene.assert_recovered_from_checkpoint()
    assert (scene.num_starts(), scene.cell.attempts) == (2, 2)
    if victim == "n2":
        message = " (attempt-001) does not end, although none of its ranks is left (n2 has rebooted)\n"
        assert message in scene.runs.job_log(scene.name)
        assert scene.cluster.job(scene.job)["ExcNodeList"] == "(null)", "n2 is not excluded"


@pytest.mark.faults
def test_run_finishes_after_slurmstepd_is_killed(scene: FaultScene) -> None:
    """The ranks continue, but srun is not informed of their end."""
    scene.submit_held("SIGKILL of a slurmstepd")
    scene.kill_stepd("n2")
    scene.release()
    scene.assert_recovered(max_lost_steps=0)
    assert (scene.num_starts(), scene.cell.attempts) == (1, 1)
    assert "srun waits for ranks that have ended" in scene.runs.job_log(scene.name)


@pytest.mark.faults
def test_orphaned_ranks_are_killed_before_the_job_restarts(scene: FaultScene) -> None:
    """Without their slurmstepd, ranks receive no signals from Slurm and survive their job: the supervisor kills them.

    They are never released, so the end of their peers does not end them.
    """
    scene.submit_held("slurmstepd killed, then a rank")
    orphans = [scene.pid_of(2), scene.pid_of(3)]
    scene.kill_stepd("n2")
    os.kill(scene.pid_of(1), signal.SIGKILL)
    scene.wait_restarted()
    assert not any(psutil.pid_exists(pid) for pid in orphans)
    scene.assert_recovered_from_checkpoint()
    assert " (attempt-001) does not end, although none of its ranks is left\n" in scene.runs.job_log(scene.name)


@pytest.mark.faults
@pytest.mark.parametrize("daemon", ["slurmd-n2", "slurmctld"])
def test_restart_of_slurm_daemon_does_not_affect_the_run(scene: FaultScene, daemon: str) -> None:
    scene.submit_held(f"{daemon} is restarted")
    before = scene.kill_daemon(daemon)
    scene.start_daemon(daemon)
    assert scene.pid_of_daemon(daemon) not in (None, before)
    scene.release()
    scene.assert_recovered(max_lost_steps=0)
    assert (scene.num_starts(), scene.cell.attempts) == (1, 1)


@pytest.mark.faults
def test_ranks_killed_while_slurmctld_is_down_restart_when_it_is_back(scene: FaultScene) -> None:
    scene.submit_held("rank killed without slurmctld")
    scene.kill_daemon("slurmctld")
    os.kill(scene.pid_of(3), signal.SIGKILL)
    scene.release()
    # The first failure may be that of a rank that has lost its connection to the killed one.
    wait_for(lambda: " ERROR rank " in scene.runs.job_log(scene.name), "the failure", timeout_s=WAIT_S)
    scene.start_daemon("slurmctld")
    # In the next start of the job if the controller has missed the end of the step, whose processors stay in use.
    scene.assert_recovered_from_checkpoint()
    assert scene.cell.attempts == 2, scene.runs.job_log(scene.name)
