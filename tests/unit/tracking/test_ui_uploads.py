"""Uploads while `hpcdist ui` is open; tests/browser shows them with a server."""

import errno
import os
import signal
from pathlib import Path

import pytest
from tracking_scene import Scene

from hpcdist.errors import TrackingError
from hpcdist.run.folder import RunDir
from hpcdist.tracking import ui_uploads
from hpcdist.tracking.sync_runs import SyncReport
from hpcdist.tracking.ui_uploads import RunUploads, main


def test_new_records_of_a_run_without_a_supervisor_are_uploaded(scene: Scene) -> None:
    env = {"HPCDIST_TRACKING_URI": scene.uri}
    scene.log([1, 2])
    scene.state(status="finished", ended=2.0)
    uploads = RunUploads(env)
    uploads.upload([scene.run])
    assert (scene.entity.info.status, scene.steps()) == ("FINISHED", [1, 2])
    scene.log([3])
    uploads.upload([scene.run])
    assert scene.steps() == [1, 2, 3]


def test_problem_of_a_run_is_printed_once(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other = RunDir.create(scene.run.path.with_name("second"))
    asked = []

    def fail(run: RunDir, env: object) -> SyncReport:
        asked.append(run.name)
        raise PermissionError("not yours") if run is other else TrackingError("the server does not answer")

    monkeypatch.setattr(ui_uploads, "sync_run", fail)
    uploads = RunUploads({})
    for _ in range(2):
        uploads.upload([other, scene.run, other])
    assert asked == ["second", "first"] * 2, "the others wait if the store fails"
    assert capsys.readouterr().err == "second: not yours\nfirst: the server does not answer\n"


def test_uploads_go_on_without_the_folder_until_the_server_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server, init = 7, 1
    found: list[Path] = []

    def find_runs(runs_dir: Path) -> list[RunDir]:
        found.append(runs_dir)
        if len(found) < 3:
            raise OSError(errno.ESTALE, "Stale file handle")
        return []

    monkeypatch.setattr(os, "getppid", lambda: init if len(found) == 3 else server)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(ui_uploads, "find_runs", find_runs)
    for name in ("PAUSE_S", "_PAUSE_FACTOR", "_POLL_S"):
        monkeypatch.setattr(ui_uploads, name, 0.0)
    main([str(tmp_path), str(server)], {})
    assert found == [tmp_path] * 3
    assert capsys.readouterr().err == f"{tmp_path}: Stale file handle\n"
