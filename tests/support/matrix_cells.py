"""Cells of the matrix of container runtimes and faults that root and an ordinary user run alike."""

from __future__ import annotations

import os

import psutil
from hpcdist_runs import HOLD_OVERRIDES, HOLD_STEP, LAST_STEP
from runtime_cases import RuntimeCase, assert_nothing_left
from slurm_faults import DDP, FaultScene, Subject


def subject_of(runtime: RuntimeCase) -> Subject:
    """Return the subject of fault injection whose ranks are in containers of a runtime."""
    return Subject(
        name=runtime.name,
        overrides=(*HOLD_OVERRIDES, *runtime.overrides),
        hold_at=HOLD_STEP,
        last_save=DDP.last_save,
        interval=DDP.interval,
        last_step=LAST_STEP,
    )


def assert_inside(scene: FaultScene, ranks: dict[int, psutil.Process]) -> None:
    """Assert that all ranks run in a root file system of their own, on the expected nodes, as the run's owner."""
    assert sorted(ranks) == [0, 1, 2, 3]
    here, owner = os.stat("/"), scene.runs.run_dir(scene.name).path.stat().st_uid
    for rank, process in ranks.items():
        there = os.stat(f"/proc/{process.pid}/root")
        assert (here.st_dev, here.st_ino) != (there.st_dev, there.st_ino)
        assert process.uids().real == owner
        assert process.environ()["SLURMD_NODENAME"] == f"n{rank // 2 + 1}"


def plain(boxed: FaultScene, runtime: RuntimeCase) -> None:
    boxed.submit("plain", *runtime.overrides)
    boxed.assert_recovered(max_lost_steps=0)
    assert boxed.cell.attempts == 1
    assert_nothing_left(runtime, boxed.runs, boxed.name)


def requeue(boxed: FaultScene, runtime: RuntimeCase) -> None:
    boxed.submit_held("requeue")
    assert_inside(boxed, boxed.runs.rank_processes(boxed.name))
    with boxed.cluster.kill_wait(30):
        boxed.cluster.run("scontrol", "requeue", boxed.job)
        boxed.release()
        boxed.wait_queued()
    assert HOLD_STEP <= boxed.runs.checkpoint_steps(boxed.name)[-1] < LAST_STEP
    assert_nothing_left(runtime, boxed.runs, boxed.name)
    boxed.start_now()
    boxed.assert_recovered(max_lost_steps=0)
    assert (boxed.num_starts(), boxed.cell.attempts, boxed.cell.restarts) == (2, 2, 0)
    assert_nothing_left(runtime, boxed.runs, boxed.name)


def killed_rank(boxed: FaultScene, runtime: RuntimeCase) -> None:
    boxed.submit_held("killed rank")
    boxed.runs.rank_processes(boxed.name)[3].kill()
    boxed.release()
    boxed.assert_recovered_from_checkpoint()
    assert "rank 3 on n2 was killed by SIGKILL after step " in boxed.runs.job_log(boxed.name)
    assert (boxed.num_starts(), boxed.cell.attempts, boxed.cell.restarts) == (1, 2, 1)
    assert_nothing_left(runtime, boxed.runs, boxed.name)
