"""The shipper of a supervisor with fake ranks (`support/fake_rank.py`)."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from hpcdist_runs import wait_for
from supervisor_scene import DONE, EXIT_0, Scene

from hpcdist.run.folder import RunDir
from hpcdist.supervisor import children
from hpcdist.supervisor.children import ShipperProcess
from hpcdist.tracking.points import SentFiles

#: All tests of this file may start processes.
pytestmark = pytest.mark.processes


@pytest.fixture
def scene(runs_dir: Path) -> Scene:
    return Scene(RunDir.create(runs_dir / "exp" / "first"))


def test_shipper_gets_run_folder_and_uri_with_password(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    stub = scene.run.path / "python"
    stub.write_text(
        '#!/bin/sh\necho "$@"; echo "$HPCDIST_TRACKING_URI"; cut -d " " -f 19 /proc/self/stat; echo err >&2; cat\n'
    )
    stub.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(stub))
    shipper = ShipperProcess(scene.run, "http://ada:s3cret@mlflow:5000", scene.env)
    wait_for(lambda: (scene.run.path / "shipper.log").read_text().endswith("err\n"), "the output of the shipper")
    assert shipper.drain(60)
    monkeypatch.undo()
    assert (scene.run.path / "shipper.log").read_text().splitlines() == [
        f"-P -m hpcdist.tracking.shipper {scene.run.path}",
        "http://ada:s3cret@mlflow:5000",
        str(min(os.nice(0) + 10, 19)),
        "err",
    ]


@pytest.mark.skipif(not Path("/proc/self/autogroup").exists(), reason="the kernel has no autogroups")
def test_shipper_has_normal_priority_after_the_end_of_the_ranks(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    log = scene.run.path / "shipper.log"
    stub = scene.run.path / "python"
    stub.write_text('#!/bin/sh\ncat /proc/$$/autogroup; until grep -q " nice 0$" /proc/$$/autogroup; do :; done\n')
    stub.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(stub))
    shipper = ShipperProcess(scene.run, "http://mlflow:5000", scene.env)
    wait_for(lambda: log.read_text().endswith(" nice 10\n"), "a shipper with low priority")
    assert shipper.drain(60)


@pytest.mark.parametrize("shipper", [["false"], ["sleep", "600"]], ids=["failed", "too slow"])
def test_missing_records_in_mlflow_are_reported_without_the_password(scene: Scene, shipper: list[str]) -> None:
    scene.tracking = {"drain_timeout_s": 0.1}
    scene.shipper = shipper
    scene.tracking_uri = "http://ada:s3cret@mlflow:5000"
    scene.script(first=[[*DONE], EXIT_0])
    assert scene.supervise().status == "finished"
    assert scene.report.notes == [
        "MLflow at http://ada:***@mlflow:5000 has not received all records (see shipper.log); none are lost:"
        " `hpcdist sync first` ships the rest"
    ]


def test_final_state_is_written_before_the_wait_for_the_shipper(scene: Scene) -> None:
    """The shipper ends when `state.json` records the end of the run."""
    scene.tracking = {"drain_timeout_s": 20.0}
    scene.shipper = ["sh", "-c", f"until grep -q finished '{scene.run.path}/state.json'; do :; done"]
    scene.script(first=[[*DONE], EXIT_0])
    assert scene.supervise().status == "finished"
    assert "has not received" not in "".join(scene.report.notes)


def test_progress_of_a_longer_upload_is_noted(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "FIRST_NOTE_S", 0.01)
    monkeypatch.setattr(children, "NOTE_EVERY_S", 0.01)
    released = scene.run.path / "released"
    scene.tracking = {"drain_timeout_s": 60.0}
    scene.shipper = ["sh", "-c", f"until [ -e '{released}' ]; do sleep 0.01; done"]
    saved = scene.run.journal / SentFiles.FILE

    def continue_upload(text: str) -> None:
        scene.report.notes.append(text)
        if saved.exists():
            released.touch()
        else:
            SentFiles(artifacts={"config.yaml": "1"}, left=2).save(scene.run.journal)

    monkeypatch.setattr(scene.report, "note", continue_upload)
    scene.script(first=[[*DONE], EXIT_0])
    assert scene.supervise().status == "finished"
    assert scene.report.notes == ["uploading to MLflow", "uploading to MLflow: 1 of 3 files"]
