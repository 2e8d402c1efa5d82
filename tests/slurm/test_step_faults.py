"""Faults of Slurm itself: steps that it loses track of, and daemons that are restarted under a run."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest
from hpcdist_runs import wait_for
from slurm_faults import FaultScene

from hpcdist.devcluster import nodes

pytestmark = pytest.mark.timeout(400)


@pytest.mark.parametrize(
    "victim", [pytest.param("n2", marks=pytest.mark.quick_fault), pytest.param("n1", marks=pytest.mark.faults)]
)
def test_a_node_reboots_within_seconds(scene: FaultScene, victim: str) -> None:
    """Slurm has not noticed that the node was away and keeps the step, so that the nodes stay busy for the next one.

    n1 is the batch host, on which the supervisor dies as well; Slurm misses the batch step and queues the job again.
    """
    scene.submit_held("batch host reboots within seconds" if victim == "n1" else "node reboots within seconds")
    nodes.kill_node(scene.cluster.layout, victim)
    nodes.start_node(scene.cluster.layout, victim)
    if victim == "n2":
        assert "attempt-001" in scene.steps(), "Slurm has noticed nothing"
    scene.release()
    scene.wait_second_life()
    scene.conclude_hard()
    assert (scene.lives(), scene.cell.attempts) == (2, 2)
    if victim == "n2":
        left = " (attempt-001) does not end, although none of its ranks is left (n2 has rebooted)\n"
        assert left in scene.runs.job_log(scene.name)
        assert scene.cluster.job(scene.job)["ExcNodeList"] == "(null)", "n2 itself is well"


@pytest.mark.faults
def test_a_slurmstepd_is_killed(scene: FaultScene) -> None:
    """Its ranks go on, and nobody tells srun when they have ended."""
    scene.submit_held("SIGKILL of a slurmstepd")
    scene.kill_stepd("n2")
    scene.release()
    scene.conclude(lost_at_most=0)
    assert (scene.lives(), scene.cell.attempts) == (1, 1)
    assert "srun waits for ranks that have ended" in scene.runs.job_log(scene.name)


@pytest.mark.faults
def test_a_slurmstepd_is_killed_and_then_a_rank(scene: FaultScene) -> None:
    """The ranks that have lost their slurmstepd hear no signal of Slurm's, and survive their job: the supervisor ends
    them before another life of the job can start beside them."""
    scene.submit_held("slurmstepd killed, then a rank")
    orphans = [scene.pid_of(2), scene.pid_of(3)]
    scene.kill_stepd("n2")
    os.kill(scene.pid_of(1), signal.SIGKILL)
    # They are never released: they do not run into the end of their peers.
    scene.wait_second_life()
    assert not any(psutil.pid_exists(pid) for pid in orphans)
    scene.conclude_hard()
    assert " (attempt-001) does not end, although none of its ranks is left\n" in scene.runs.job_log(scene.name)


@pytest.mark.faults
@pytest.mark.parametrize("daemon", ["slurmd-n2", "slurmctld"])
def test_a_daemon_is_restarted(scene: FaultScene, daemon: str) -> None:
    """Ranks, srun and supervisor do without it."""
    scene.submit_held(f"{daemon} is restarted")
    before = scene.kill_daemon(daemon)
    scene.start_daemon(daemon)
    assert scene.pid_of_daemon(daemon) not in (None, before)
    scene.release()
    scene.conclude(lost_at_most=0)
    assert (scene.lives(), scene.cell.attempts) == (1, 1)


@pytest.mark.faults
def test_a_rank_is_killed_while_the_controller_is_away(scene: FaultScene) -> None:
    """The nodes are there all the same: the ranks are started again when the controller is back."""
    scene.submit_held("rank killed without slurmctld")
    scene.kill_daemon("slurmctld")
    os.kill(scene.pid_of(3), signal.SIGKILL)
    scene.release()
    log = Path(scene.runs.run_dir(scene.name).path / "submitit")
    wait_for(lambda: any("SIGKILL" in path.read_text() for path in log.glob("*.out")), "the failure", timeout_s=150)
    scene.start_daemon("slurmctld")
    scene.conclude_hard()
    assert (scene.lives(), scene.cell.attempts) == (1, 2)
