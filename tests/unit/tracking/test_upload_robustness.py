"""Uploads with killed servers, renamed experiments, concurrent runs, thousands of artifacts and any characters."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from http_servers import mlflow_application, serving
from report_scene import ReportScene
from tracking_scene import CONFIG, Scene

from hpcdist.errors import TrackingError
from hpcdist.review import report
from hpcdist.run.folder import RunDir
from hpcdist.tracking import delivery, mlflow_client
from hpcdist.tracking.delivery import ReportWriter
from hpcdist.tracking.journal import SentFiles, mark_of


def test_run_stays_in_a_renamed_experiment(scene: Scene) -> None:
    scene.log([1, 2])
    scene.shipper().ship_once()
    experiment = scene.entity.info.experiment_id
    scene.client.rename_experiment(experiment, "renamed")
    scene.log([3])
    scene.shipper().ship_once()
    assert scene.steps() == [1, 2, 3]
    assert scene.entity.info.experiment_id == experiment
    assert {found.name for found in scene.client.search_experiments()} == {"Default", "renamed"}
    # A new run looks for the experiment by its name.
    other = RunDir.create(scene.run.path.parent / "second")
    other.config.write_text("{}")
    assert delivery.Delivery(other, scene.uri).open_run().experiment_id != experiment


@pytest.mark.processes
def test_two_runs_are_uploaded_at_the_same_time(scene: Scene) -> None:
    second = RunDir.create(scene.run.path.parent / "second")
    second.config.write_text(scene.run.config.read_text())
    second.write_state(scene.run.read_state())
    scene.log(range(2000))
    journal = "attempt-001.rank-00000.jsonl"
    (second.journal / journal).write_text((scene.run.journal / journal).read_text())
    code = (
        "import sys; from pathlib import Path; from hpcdist.run.folder import RunDir\n"
        "from hpcdist.tracking.delivery import Delivery\n"
        "Delivery(RunDir(Path(sys.argv[1])), sys.argv[2]).ship_once()"
    )
    both = [
        subprocess.Popen([sys.executable, "-c", code, str(run.path), scene.uri], stderr=subprocess.PIPE)
        for run in (scene.run, second)
    ]
    errors = [process.communicate(timeout=240)[1].decode() for process in both]
    assert [process.returncode for process in both] == [0, 0], errors
    assert len({found.experiment_id for found in scene.client.search_experiments()}) == 2
    runs = scene.client.search_runs([scene.entity.info.experiment_id])
    assert {run.info.run_name for run in runs} == {"first", "second"}
    for run in runs:
        history = scene.client.get_metric_history(run.info.run_id, "loss")
        assert sorted(metric.step for metric in history) == list(range(2000))


def test_names_values_and_files_with_any_characters(scene: Scene) -> None:
    text = "Größe 数据 🚀 עברית \u202e\u0000\ud800"
    scene.write_config({**CONFIG, "params": {"größe": "数据 🚀"}, "tracking": {"tags": {"équipe": "Zürich 🏔"}}})
    scene.log([1, 2], key="Verlust/größe 数据")
    scene.log([1], key=text)
    scene.file("artifacts/Ergebnis 数据 🚀.txt", "größe")
    scene.file("attempts/001/rank-00000.log", "größe 数据 🚀\n")
    scene.state(status="failed", reason="Gerät 数据: \udcff", ended=2e9)
    scene.shipper().ship_once()
    run = scene.entity
    assert scene.steps("Verlust/größe 数据") == [1, 2]
    assert run.data.params["params.größe"] == "数据 🚀"
    assert run.data.tags["équipe"] == "Zürich 🏔"
    assert run.data.tags["hpcdist.reason"] == "Gerät 数据: ?"
    assert len(run.data.metrics) == 2, "a name with a lone surrogate is a damaged line"
    assert {"Ergebnis 数据 🚀.txt", "logs/attempt-001/rank-00000.log"} <= scene.artifacts()
    copy = scene.client.download_artifacts(scene.run_id, "Ergebnis 数据 🚀.txt")
    assert Path(copy).read_text() == "größe"


def test_many_artifacts_delay_neither_metrics_nor_the_state(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    for number in range(300):
        scene.file(f"artifacts/samples/{number:03d}.txt", str(number))
    saves: list[int] = []
    save = SentFiles.save
    monkeypatch.setattr(SentFiles, "save", lambda self, folder: (saves.append(1), save(self, folder))[1])
    monkeypatch.setattr(delivery, "PASS_S", 0.0)
    live = scene.shipper()
    live.ship_once()
    live.ship_once()
    assert "samples/001.txt" in live.uploads.sent.artifacts
    assert "samples/002.txt" not in live.uploads.sent.artifacts
    monkeypatch.setattr(delivery, "PASS_S", 1e9)
    monkeypatch.setattr(delivery, "CHECKS_PER_S", 0.001)
    monkeypatch.setattr(delivery, "SAVE_S", 0.0)
    live.ship_once()
    assert len(scene.artifacts("samples")) == 300
    assert "300 artifacts uploaded" in caplog.text
    # The folder of a running run is not searched in each pass.
    scene.file("artifacts/late.txt", "late")
    monkeypatch.setattr(delivery, "SAVE_S", 1e9)
    live.ship_once()
    assert "late.txt" not in live.uploads.sent.artifacts
    del saves[:]
    for number in range(300):
        scene.file(f"artifacts/samples/{number:03d}.txt", f"changed {number}")
    scene.state(status="finished", ended=2e9)
    live.ship_once()
    assert "late.txt" in live.uploads.sent.artifacts
    assert len(saves) < 10, "the state is not saved for each artifact"


@pytest.mark.faults
@pytest.mark.timeout(900)
def test_ten_thousand_artifacts_through_a_server(scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(10_000):
        scene.file(f"artifacts/samples/{number // 100:03d}/{number:05d}.txt", str(number))
    scene.log([1])
    with (
        mlflow_application(tmp_path, "mlflow-artifacts:/", monkeypatch) as application,
        serving(application) as scene.uri,
    ):
        live = scene.shipper()
        live.ship_once()
        assert scene.steps() == [1]
        assert 0 < len(live.uploads.sent.artifacts) < 10_000, "a pass of a running run is bounded"
        scene.state(status="finished", ended=2e9)
        scene.shipper().ship_once()
        assert len(scene.artifacts("samples")) == 10_000
        assert scene.status() == "FINISHED"


#: Starts MLflow's server in a child again and again. Each of the first 50 is killed before, during or after a request.
KILLED_SERVER = """
import os, random, signal, socket, sys, threading
from mlflow import server
from werkzeug.serving import make_server

NUM_KILLS = 50

def kill():
    os.kill(os.getpid(), signal.SIGKILL)

def serve(number, listening):
    draw = random.Random(number)
    left, kind = draw.randrange(1, 5), draw.choice(("before", "during", "during", "after"))
    def application(environ, start_response):
        nonlocal left
        if number < NUM_KILLS and environ["PATH_INFO"].endswith("log-batch"):
            left -= 1
        if left or number >= NUM_KILLS:
            return server.app.wsgi_app(environ, start_response)
        if kind == "before":
            kill()
        if kind == "during":
            threading.Timer(draw.uniform(0, 0.03), kill).start()
        reply = server.app.wsgi_app(environ, start_response)
        kill()
    make_server("127.0.0.1", 0, application, threaded=True, fd=listening.fileno()).serve_forever()

with socket.create_server(("127.0.0.1", 0)) as listening:
    print(listening.getsockname()[1], flush=True)
    for number in range(NUM_KILLS + 1):
        if (child := os.fork()) == 0:
            serve(number, listening)
        os.waitpid(child, 0)
        with open(sys.argv[1], "a") as file:
            file.write("killed\\n")
"""


@pytest.mark.faults
@pytest.mark.timeout(1800)
def test_server_killed_50_times_gets_each_of_10_000_records_once(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mlflow_client, "_MAX_METRICS", 60)
    database, kills = scene.uri, tmp_path / "kills"
    env = {
        **os.environ,
        "_MLFLOW_SERVER_FILE_STORE": database,
        "_MLFLOW_SERVER_ARTIFACT_ROOT": "mlflow-artifacts:/",
        "_MLFLOW_SERVER_ARTIFACT_DESTINATION": str(tmp_path / "store"),
        "_MLFLOW_SERVER_SERVE_ARTIFACTS": "true",
        "MLFLOW_TRACKING_URI": database,
    }
    scene.log(range(10_000))
    command = [sys.executable, "-W", "ignore", "-c", KILLED_SERVER, str(kills)]
    with (
        open(tmp_path / "server.log", "wb") as output,
        subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=output, start_new_session=True) as server,
    ):
        try:
            assert server.stdout is not None
            scene.uri = f"http://127.0.0.1:{int(server.stdout.readline())}"
            num_failures = ship_until_done(scene)
        finally:
            os.killpg(server.pid, 9)
    assert kills.read_text().count("killed") == 50
    assert num_failures >= 40, "a request whose connection is not accepted yet may reach the next server"
    scene.uri = database
    assert scene.steps() == list(range(10_000))
    assert scene.status() == "FINISHED"


def ship_until_done(scene: Scene) -> int:
    """Upload the run with a shipper that is sometimes replaced. Returns the number of failed passes."""
    failures: Counter[str] = Counter()
    scene.state(status="finished", ended=2e9)
    live: Any = None
    for _ in range(1000):
        try:
            live = live or scene.shipper()
            live.ship_once()
        except TrackingError as error:
            failures[str(error)[:60]] += 1
            if failures.total() % 5 == 0:
                live = None
        else:
            return failures.total()
    raise AssertionError(f"the upload does not end: {failures}")


# --- When the shipper writes the report of a run, and that a failure of the report does not stop the upload.


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the list of the runs whose report was written, which grows."""
    found: list[str] = []
    monkeypatch.setattr(report, "write_report", lambda run, series: found.append(run.name))
    return found


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    scene = ReportScene(tmp_path)
    scene.state(status="running", ended=None)
    return scene.run


def write_if_due(writer: ReportWriter, run: RunDir, last: str = "", *, new: bool = False) -> bool:
    return writer.write_if_due(run.read_state(), last, has_new_points=new)


def test_report_is_written_after_each_change_of_state(run: RunDir, written: list[str]) -> None:
    writer = ReportWriter(run)
    assert [write_if_due(writer, run, new=True) for _ in range(3)] == [True, False, False]
    ReportScene.state_of(run, status="running", attempt=2, ended=None)
    assert write_if_due(writer, run)
    ReportScene.state_of(run, status="finished", attempt=2)
    assert [write_if_due(writer, run) for _ in range(3)] == [True, False, False]
    # Another process, such as `hpcdist sync`, does not write it again, unless records arrive after the end.
    again, last = ReportWriter(run), mark_of(run.read_state())
    assert not write_if_due(again, run, last)
    assert write_if_due(again, run, last, new=True)
    assert len(written) == 4


def test_a_running_run_gets_a_new_report_now_and_then(
    run: RunDir, written: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr("hpcdist.tracking.delivery.time.monotonic", lambda: now[0])
    writer = ReportWriter(run)
    for seconds, expected in ((0, 1), (299, 1), (2, 2), (299, 2), (2, 3)):
        now[0] += seconds
        write_if_due(writer, run)
        assert len(written) == expected


def test_failure_of_a_report_is_logged_once(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(run: RunDir, series: object) -> None:
        raise ZeroDivisionError("in a chart")

    monkeypatch.setattr(report, "write_report", fail)
    writer = ReportWriter(run)
    ReportScene.state_of(run, status="failed")
    assert not any(write_if_due(writer, run) for _ in range(3))
    assert caplog.text.count("the report of first cannot be written") == 1
    assert "ZeroDivisionError: in a chart" in caplog.text
