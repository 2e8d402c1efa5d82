"""What a run needs around it is gone for a while: the tracking server, room on the disk."""

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
from hpcdist.files.atomic import read_json

DOWN_S = 60.0
#: What a step takes at least, so that the run outlasts the outage.
PACE_S = 0.9

pytestmark = [pytest.mark.faults, pytest.mark.timeout(400)]


@pytest.fixture
def server(scene: FaultScene, tmp_path: Path) -> Iterator[Server]:
    """Where nodes reach it, on the database that the undisturbed run is in, too."""
    server = Server(tmp_path, scene.runs.database, host=scene.cluster.settings.addresses[HOST])
    server.start()
    yield server
    server.kill()


def test_the_tracking_server_is_down_for_a_minute(scene: FaultScene, server: Server) -> None:
    early = 4
    pace = ["trainer=gated:train", f"params.hold_at={early}", f"params.pace_s={PACE_S}"]
    scene.submit("MLflow server down 60 s", *pace, f"tracking.uri={server.uri}")
    scene.wait_until_held()
    wait_for(scene.runs.run_dir(scene.name).mlflow.exists, "the run in MLflow")
    wait_for(lambda: scene.runs.points(scene.name), "points in MLflow")
    server.kill()
    down = time.monotonic()
    scene.release()
    # Steps that are done while nobody answers are steps that have waited for nobody.
    scene.wait_step(early + math.ceil(DOWN_S / PACE_S) + 2, timeout_s=200)
    assert not server.answers()
    assert time.monotonic() - down >= DOWN_S
    assert scene.runs.state(scene.name).status == "running"
    server.start()
    scene.conclude(lost_at_most=0, sync=False)
    shipped = (scene.runs.run_dir(scene.name).path / "shipper.log").read_text()
    assert "records stay in the journal until" in shipped
    assert "is available again: no records were lost" in shipped
    assert scene.cell.attempts == 1


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[list[Path]]:
    """Folders that a test puts there get a disk of 64 MB of their own."""
    folders: list[Path] = []
    yield folders
    for folder in folders:
        subprocess.run(["umount", "--lazy", folder], check=True)


def fill(folder: Path) -> Path:
    """Fill a disk to the last byte; returns the file that takes the room."""
    ballast = folder / "ballast"
    with open(ballast, "wb", buffering=0) as file:
        for size in (2**20, 2**12, 1):
            try:
                while file.write(bytes(size)):
                    pass
            except OSError as error:
                assert error.errno == errno.ENOSPC  # noqa: PT017  (that it is full is what we want)
    assert os.statvfs(folder).f_bavail == 0
    return ballast


def test_the_disk_is_full_during_a_save(scene: FaultScene, small_disk: list[Path]) -> None:
    runs = scene.runs
    scene.submit("disk full during save", *scene.subject.overrides, "--begin=now+1hour")
    checkpoints = runs.run_dir(scene.name).checkpoints
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "none", checkpoints], check=True)
    small_disk.append(checkpoints)
    scene.start_now()
    scene.wait_until_held()
    ballast = fill(checkpoints)
    scene.release()

    state = runs.wait_end(scene.name, scene.job)
    scene.cell.lives, scene.cell.attempts = scene.lives(), state.attempt
    assert state.status == "failed"
    assert "CheckpointError" not in state.reason
    assert f"checkpoint of step 60 could not be written to {checkpoints}: No space left on device" in state.reason
    assert "older checkpoints are unchanged" in state.reason
    assert "\n" not in state.reason
    assert state.attempt == 2, "once more, and the very same again"
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
    scene.job = str((read_json(runs.run_dir(scene.name).path / "slurm.json") or {})["job_id"])
    scene.conclude(lost_at_most=scene.subject.interval)
