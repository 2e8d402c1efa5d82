"""What Slurm does to jobs in the course of things, and says beforehand: no step is lost."""

from __future__ import annotations

import subprocess

import pytest
from hpcdist_runs import HOLD_STEP, LAST_STEP, wait_for
from slurm_faults import FaultScene

from hpcdist.devcluster import cluster

pytestmark = pytest.mark.timeout(400)


@pytest.mark.quick_fault
def test_a_requeue(scene: FaultScene) -> None:
    scene.submit_held("requeue")
    scene.cluster.run("scontrol", "requeue", scene.job)
    scene.release()
    assert scene.wait_queued() == "stopped with everything saved (SIGTERM to the supervisor)"
    assert HOLD_STEP <= scene.runs.checkpoint_steps(scene.name)[-1] < LAST_STEP, "stopped in the middle"
    scene.start_now()
    scene.conclude(lost_at_most=0)
    assert (scene.lives(), scene.cell.attempts, scene.cell.restarts) == (2, 2, 0)


@pytest.mark.faults
def test_the_time_limit(scene: FaultScene) -> None:
    """Nobody releases the ranks: they go on once they are asked to stop, which only the time limit does.

    Slurm's own signal may come up to a minute before the supervisor's request, even before the ranks are held.
    """
    scene.submit("time limit", *scene.subject.overrides, "cluster.time_limit_min=2", "cluster.signal_lead_s=60")
    assert scene.cluster.job(scene.job)["TimeLimit"] == "00:02:00"
    reason = scene.runs.wait_status(scene.name, "queued", timeout_s=100).reason
    assert reason.partition("(")[2] in ("time limit)", "the ranks received a stop signal)")
    assert 0 < scene.runs.checkpoint_steps(scene.name)[-1] < LAST_STEP
    scene.start_now()
    scene.conclude(lost_at_most=0)
    assert scene.lives() == 2


@pytest.mark.faults
def test_slurms_own_signal_ahead_of_the_time_limit(scene: FaultScene) -> None:
    """SIGUSR2 reaches the ranks before the supervisor has asked for anything."""
    scene.submit_held("USR2 ahead of the limit")
    scene.cluster.run("scancel", "--signal=USR2", scene.job)
    scene.release()
    assert scene.wait_queued() == "stopped with everything saved (the ranks received a stop signal)"
    scene.start_now()
    scene.conclude(lost_at_most=0)


@pytest.mark.faults
@pytest.mark.parametrize("grace_s", [0, 20])
def test_preemption(scene: FaultScene, grace_s: int) -> None:
    cluster.set_grace_time(scene.cluster.layout, grace_s)
    scene.submit_held(f"preemption, grace {grace_s}")
    high = scene.cluster.sbatch("true", "--partition=high", "--nodes=4", "--exclusive")
    wait_for(scene.runs.attempt(scene.name).request.exists, "the supervisor to be told")
    scene.release()
    scene.wait_queued()
    assert scene.runs.checkpoint_steps(scene.name)[-1] >= HOLD_STEP
    scene.cluster.until(lambda: scene.cluster.job(high)["JobState"] == "COMPLETED", "the job of high has run")
    scene.start_now()
    scene.conclude(lost_at_most=0)
    assert scene.lives() == 2


@pytest.mark.faults
def test_two_requeues_at_once(scene: FaultScene) -> None:
    scene.submit_held("two requeues at once")
    command = ["scontrol", "requeue", scene.job]
    both = [subprocess.Popen(command, env=scene.cluster.env, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    scene.release()
    said = [process.communicate(timeout=60)[1] for process in both]
    assert sorted(process.returncode for process in both) in ([0, 0], [0, 1]), said
    scene.wait_queued()
    scene.start_now()
    scene.conclude(lost_at_most=0)


@pytest.mark.faults
@pytest.mark.parametrize("fault", ["USR2 during import", "requeue during import"])
def test_a_signal_before_the_process_group_exists(scene: FaultScene, fault: str) -> None:
    """The ranks have caught it long before there is anything to save, and nothing is lost if they get no time to."""
    scene.submit(fault, "trainer=held_import:train")
    scene.wait_until_held()
    if fault.startswith("USR2"):
        scene.cluster.run("scancel", "--signal=USR2", scene.job)
        scene.release()
        assert scene.wait_queued() == "stopped with everything saved (the ranks received a stop signal)"
        assert scene.runs.checkpoint_steps(scene.name)[-1] < 20, "at one of the first boundaries"
    else:
        # Slurm kills what has not ended KillWait later, 5 s here: a race that either may win.
        scene.cluster.run("scontrol", "requeue", scene.job)
        scene.release()
    scene.start_now()
    scene.conclude(lost_at_most=0)
    assert scene.lives() == 2


@pytest.mark.faults
def test_a_requeue_before_the_ranks_can_hear_it(scene: FaultScene) -> None:
    """Ranks that have not imported anything die of SIGTERM, and have nothing to lose."""
    path = f"{scene.runs.project}/before_all:{scene.runs.no_mlflow}:{scene.runs.project}"
    scene.submit("requeue before any import", f"launch.env.PYTHONPATH={path}")
    scene.wait_until_held()
    scene.cluster.run("scontrol", "requeue", scene.job)
    assert "was killed by SIGTERM" in scene.wait_queued()
    scene.start_now()
    scene.conclude(lost_at_most=0)
