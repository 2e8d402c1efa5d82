"""Temporary faults of services that a run depends on: the tracking server and the disk."""

from __future__ import annotations

import errno
import math
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hpcdist_runs import wait_for
from mlflow_server import Server
from slurm_faults import FaultScene

from hpcdist.checkpoint.store import CheckpointStore
from hpcdist.devcluster.settings import HOST
from hpcdist.host.files import read_json

DOWN_S = 60.0
#: Minimum duration of a step, so that the run outlasts the outage.
STEP_S = 0.9

pytestmark = pytest.mark.faults


@pytest.fixture
def server(scene: FaultScene, tmp_path: Path) -> Iterator[Server]:
    """A server that the nodes can reach, with the database that also holds the control run."""
    server = Server(tmp_path, scene.runs.database, host=scene.cluster.settings.addresses[HOST])
    server.start()
    yield server
    server.kill()


def test_run_continues_during_tracking_server_outage_and_loses_no_record(scene: FaultScene, server: Server) -> None:
    hold_at = 4
    slow_steps = ["trainer=gated:train", f"params.hold_at={hold_at}", f"params.pace_s={STEP_S}"]
    scene.submit("MLflow server down 60 s", *slow_steps, f"tracking.uri={server.uri}")
    scene.wait_until_held()
    mlflow = scene.runs.run_dir(scene.name).mlflow
    wait_for(lambda: "run_id" in (read_json(mlflow) or {}), "the run in MLflow")
    wait_for(lambda: scene.runs.points(scene.name), "points in MLflow")
    server.kill()
    down = time.monotonic()
    scene.release()
    # Training does not wait for the server.
    scene.wait_step(hold_at + math.ceil(DOWN_S / STEP_S) + 2)
    assert not server.answers()
    assert time.monotonic() - down >= DOWN_S
    assert scene.runs.state(scene.name).status == "running"
    server.start()
    scene.assert_recovered(max_lost_steps=0, sync=False)
    shipped = (scene.runs.run_dir(scene.name).path / "shipper.log").read_text()
    assert "records stay in the journal until" in shipped
    assert "is available again: no records were lost" in shipped
    assert scene.cell.attempts == 1


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[list[Path]]:
    """A list of mount points to which the test adds; they are unmounted afterwards."""
    folders: list[Path] = []
    yield folders
    for folder in folders:
        subprocess.run(["umount", "--lazy", folder], check=True)


def fill(folder: Path) -> Path:
    """Fill a file system completely; return the file that fills it."""
    ballast = folder / "ballast"
    with open(ballast, "wb", buffering=0) as file:
        for size in (2**20, 2**12, 1):
            try:
                while file.write(bytes(size)):
                    pass
            except OSError as error:
                assert error.errno == errno.ENOSPC  # noqa: PT017  (the expected error)
    assert os.statvfs(folder).f_bavail == 0
    return ballast


def test_full_disk_during_save_fails_the_run_and_resume_continues_it(scene: FaultScene, small_disk: list[Path]) -> None:
    runs = scene.runs
    scene.submit("disk full during save", *scene.subject.overrides, "preflight=off", "--begin=now+1hour")
    checkpoints = runs.run_dir(scene.name).checkpoints
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "none", checkpoints], check=True)
    small_disk.append(checkpoints)
    scene.start_now()
    scene.wait_until_held()
    ballast = fill(checkpoints)
    scene.release()

    state = runs.wait_end(scene.name, scene.job)
    scene.cell.starts, scene.cell.attempts = scene.num_starts(), state.attempt
    assert state.status == "failed"
    assert "CheckpointError" not in state.reason
    assert f"checkpoint of step 60 could not be written to {checkpoints}: No space left on device" in state.reason
    assert "older checkpoints are unchanged" in state.reason
    assert "\n" not in state.reason
    assert state.attempt == 2, "the same failure twice ends the run"
    assert {path.name for path in checkpoints.iterdir()} == {"ballast", "step-00000040", "step-00000045"}
    newest = CheckpointStore(checkpoints).latest()
    assert newest is not None
    assert newest.step == scene.subject.last_save
    code, output = runs.command("sync", scene.name)
    assert code == 0, output
    assert runs.mlflow_status(scene.name) == "FAILED"

    ballast.unlink()
    code, output = runs.command("resume", scene.name, "--detach")
    assert code == 0, output
    scene.job, scene.earlier_jobs = runs.job_id(scene.name), (scene.job,)
    # Training goes on until the next save, while the failed one is tried again.
    scene.assert_recovered(max_lost_steps=2 * scene.subject.interval)
