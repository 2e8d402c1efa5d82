"""Interruptions that Slurm announces with a signal: requeue, time limit, preemption. No step is lost."""

from __future__ import annotations

import subprocess

import pytest
from hpcdist_runs import HOLD_STEP, LAST_STEP
from slurm_faults import FaultScene

from hpcdist.devcluster import cluster


@pytest.mark.faults  # `test_watching.py` follows a requeued run that equals the control run
def test_requeued_job_resumes_at_the_last_step(scene: FaultScene) -> None:
    scene.submit_held("requeue")
    scene.cluster.run("scontrol", "requeue", scene.job)
    scene.release()
    assert scene.wait_queued() == "everything saved (Slurm ends the job)"
    assert HOLD_STEP <= scene.runs.checkpoint_steps(scene.name)[-1] < LAST_STEP, "stopped in the middle"
    scene.start_now()
    scene.assert_recovered(max_lost_steps=0)
    assert (scene.num_starts(), scene.cell.attempts, scene.cell.restarts) == (2, 2, 0)


@pytest.mark.faults
def test_job_saves_and_requeues_itself_ahead_of_the_time_limit(scene: FaultScene) -> None:
    """The ranks are held until they are asked to stop; only the time limit causes that.

    Slurm's signal may arrive up to a minute before the supervisor's request, even before the ranks are held.
    """
    scene.submit("time limit", *scene.subject.overrides, "cluster.time_limit_min=2", "cluster.signal_lead_s=60")
    assert scene.cluster.job(scene.job)["TimeLimit"] == "00:02:00"
    reason = scene.wait_queued()
    assert reason.partition("(")[2] in ("time limit)", "the ranks received a stop signal)")
    assert 0 < scene.runs.checkpoint_steps(scene.name)[-1] < LAST_STEP
    scene.start_now()
    scene.assert_recovered(max_lost_steps=0)
    assert scene.num_starts() == 2


@pytest.mark.faults
def test_ranks_save_on_slurms_signal_before_the_supervisor_requests_a_stop(scene: FaultScene) -> None:
    scene.submit_held("USR2 ahead of the limit")
    scene.cluster.run("scancel", "--signal=USR2", scene.job)
    scene.release()
    assert scene.wait_queued() == "everything saved (the ranks received a stop signal)"
    scene.start_now()
    scene.assert_recovered(max_lost_steps=0)


@pytest.mark.faults
@pytest.mark.parametrize("grace_s", [0, 20])
def test_preempted_job_saves_and_resumes(scene: FaultScene, grace_s: int) -> None:
    cluster.set_grace_time(scene.cluster.layout, grace_s)
    scene.submit_held(f"preemption, grace {grace_s}")
    high = scene.cluster.start_high_priority_job("--nodes=4")
    scene.runs.wait_stop_request(scene.name)
    scene.release()
    scene.wait_queued()
    assert scene.runs.checkpoint_steps(scene.name)[-1] >= HOLD_STEP
    scene.cluster.wait_job_state(high, "COMPLETED")
    scene.start_now()
    scene.assert_recovered(max_lost_steps=0)
    assert scene.num_starts() == 2


@pytest.mark.faults
def test_two_simultaneous_requeues_have_the_effect_of_one(scene: FaultScene) -> None:
    scene.submit_held("two requeues at once")
    command = ["scontrol", "requeue", scene.job]
    both = [subprocess.Popen(command, env=scene.cluster.env, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    scene.release()
    errors = [process.communicate(timeout=60)[1] for process in both]
    assert sorted(process.returncode for process in both) in ([0, 0], [0, 1]), errors
    scene.wait_queued()
    scene.start_now()
    scene.assert_recovered(max_lost_steps=0)


@pytest.mark.faults
@pytest.mark.parametrize("fault", ["USR2 during import", "requeue during import"])
def test_stop_signal_before_the_process_group_exists_loses_no_step(scene: FaultScene, fault: str) -> None:
    """The ranks receive the signal during their imports, before they have anything to save."""
    scene.submit(fault, "trainer=held_import:train")
    scene.wait_until_held()
    if fault.startswith("USR2"):
        scene.cluster.run("scancel", "--signal=USR2", scene.job)
        scene.release()
        assert scene.wait_queued() == "everything saved (the ranks received a stop signal)"
        assert scene.runs.checkpoint_steps(scene.name)[-1] < 20, "stopped at one of the first steps"
    else:
        # Slurm kills the ranks after KillWait (5 s) unless they have ended by then: both outcomes are valid.
        scene.cluster.run("scontrol", "requeue", scene.job)
        scene.release()
    scene.start_now()
    scene.assert_recovered(max_lost_steps=0)
    assert scene.num_starts() == 2


@pytest.mark.faults
def test_requeue_before_signal_handlers_exist_kills_the_ranks(scene: FaultScene) -> None:
    """Ranks that have not imported anything yet die of SIGTERM and lose nothing."""
    path = f"{scene.runs.project}/before_all:{scene.runs.no_mlflow}:{scene.runs.project}"
    scene.submit("requeue before any import", f"launch.env.PYTHONPATH={path}")
    scene.wait_until_held()
    scene.cluster.run("scontrol", "requeue", scene.job)
    assert "was killed by SIGTERM" in scene.wait_queued()
    scene.start_now()
    scene.assert_recovered(max_lost_steps=0)
