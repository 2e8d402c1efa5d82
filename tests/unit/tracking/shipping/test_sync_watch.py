"""`hpcdist sync --all --watch`: a real process, with runs that come and go, one of which cannot be uploaded."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tracking_scene import CONFIG, Scene

from hpcdist.errors import RunFolderError, UserMistake
from hpcdist.run.folder import RunDir
from hpcdist.tracking.points import is_complete
from hpcdist.tracking.shipper import sync
from hpcdist.tracking.sync_runs import _only_watch

pytestmark = [
    pytest.mark.processes,
    # MLflow 3.17 uses a loader option that SQLAlchemy 2.1 deprecates.
    pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning"),
]
WAIT_S = 240.0


def wait_for(condition: Callable[[], object], log: Path) -> None:
    until = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < until, log.read_text()
        time.sleep(0.05)


@pytest.fixture
def watch(tmp_path: Path) -> Iterator[Callable[[], subprocess.Popen[bytes]]]:
    """Start the command; its output is in `watch.log`."""
    started = []

    def start() -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "hpcdist", "sync", "--all", "--watch", "--interval", "1"]
        with open(tmp_path / "watch.log", "ab") as log:
            process = subprocess.Popen(
                [*command, "--runs-dir", str(tmp_path / "runs")],
                env={**os.environ, "HPCDIST_TRACKING_URI": ""},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_watch_uploads_new_records_and_ends_on_sigterm(
    scene: Scene, tmp_path: Path, watch: Callable[[], subprocess.Popen[bytes]]
) -> None:
    scene.write_config({**CONFIG, "runs_dir": str(tmp_path / "runs"), "tracking": {"uri": scene.uri}})
    scene.state(status="stopped", ended=time.time())
    scene.log([1, 2, 3])
    broken = RunDir.create(tmp_path / "runs" / "exp" / "broken")
    broken.config.write_text(json.dumps({**CONFIG, "tracking": {"uri": "http://127.0.0.1:1"}}))
    broken.write_state(replace(broken.read_state(), status="stopped", ended=time.time()))
    log = tmp_path / "watch.log"
    first = watch()
    wait_for(lambda: "first: 4 points and" in log.read_text(), log)
    wait_for(lambda: "broken: MLflow at http://127.0.0.1:1: the server cannot be reached" in log.read_text(), log)
    assert is_complete(scene.run)
    again = watch()
    assert again.wait(WAIT_S) == 2
    assert f"hpcdist: another `hpcdist sync --watch` uploads the runs in {tmp_path}/runs: process {first.pid} on" in (
        log.read_text()
    )
    scene.log([4, 5])
    wait_for(lambda: "first: 2 points and" in log.read_text(), log)
    first.send_signal(signal.SIGTERM)
    assert first.wait(WAIT_S) == 0
    text = log.read_text()
    assert "ended by a signal; the next `hpcdist sync` uploads the rest" in text
    assert "Traceback" not in text
    assert text.count("broken: ") == 1, "a failure is logged once"
    assert scene.steps() == [1, 2, 3, 4, 5]


def test_run_is_complete_until_it_has_new_records_or_another_attempt(scene: Scene) -> None:
    scene.log([1, 2])
    sync(scene.run, scene.uri, close_dead=False)
    assert not is_complete(scene.run), "it has not ended"
    scene.state(status="stopped", ended=time.time())
    assert not is_complete(scene.run)
    sync(scene.run, scene.uri)
    assert is_complete(scene.run)
    scene.log([3])
    assert not is_complete(scene.run)
    sync(scene.run, scene.uri)
    assert is_complete(scene.run)
    scene.state(status="finished", attempt=2)
    assert not is_complete(scene.run)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make files of another user")
def test_watch_refuses_planted_locks_and_folders_of_others(tmp_path: Path) -> None:
    (runs := tmp_path / "runs").mkdir()
    (mine := tmp_path / "mine").write_text("valuable")
    (runs / ".sync.lock").symlink_to(mine)
    with pytest.raises(UserMistake, match="Too many levels of symbolic links"), _only_watch(runs):
        pass
    assert mine.read_text() == "valuable"
    # In a folder that others can write to, the lock is in a folder of one's own.
    runs.chmod(0o1777)
    with _only_watch(runs):
        assert (runs / f".hpcdist-{os.geteuid()}" / ".sync.lock").read_text().startswith("process ")
    os.chown(runs, 65534, 65534)
    with pytest.raises(RunFolderError, match="runs belongs to nobody"), _only_watch(runs):
        pass
