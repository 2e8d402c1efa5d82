"""Passes of the shipper to a real MLflow database, with failing requests, killed processes and servers."""

import math
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from report_scene import BEGAN, ReportScene, account, add_attempt
from tracking_scene import CONFIG, Scene

from hpcdist.errors import TrackingError
from hpcdist.host.json_files import write_json
from hpcdist.review import report
from hpcdist.run.folder import RunDir
from hpcdist.tracking import delivery
from hpcdist.tracking.ledger_metrics import LedgerMetrics
from hpcdist.tracking.metric_point import Point
from hpcdist.tracking.mlflow_client import MlflowRun
from hpcdist.tracking.report_writer import ReportWriter
from hpcdist.tracking.sent_points import SentPoints
from hpcdist.tracking.upload_state import SentFacts, SentFiles, state_key


def test_upload_contains_params_tags_points_and_status(scene: Scene) -> None:
    scene.log([10, 20])
    scene.file("journal/attempt-001.rank-00001.jsonl", '{"t":5,"s":1,"m":{"odd[0]":NaN,"up":Infinity}}\n{"torn')
    assert scene.shipper().ship_once() == 4
    run = scene.entity
    assert run.info.status == "RUNNING"
    assert run.info.run_name == "first"
    assert run.info.start_time == int(scene.run.read_state().created * 1000)
    assert run.data.params["optim.lr"] == "0.001"
    assert run.data.params["optim.max_grad_norm"] == "null"
    assert "name" not in run.data.params, "a tag"
    tags = run.data.tags
    assert tags["mlflow.source.git.commit"] == tags["hpcdist.git_commit"] == "abc"
    assert (tags["mlflow.user"], tags["mlflow.source.name"], tags["team"]) == ("ada", "ddp", "vision")
    assert (tags["hpcdist.versions.torch"], tags["hpcdist.state"]) == ("2", "running")
    assert scene.steps() == [10, 20]
    assert math.isnan(run.data.metrics["odd_0_--4f0c463a3ad8"])
    assert run.data.metrics["up"] > 1e308
    assert set(run.data.metrics) == {"loss", "odd_0_--4f0c463a3ad8", "up"}, "those of the code alone"
    assert scene.artifacts() == {"config.yaml", "environment.json", "report.html"}
    location = scene.client.get_experiment(run.info.experiment_id).artifact_location
    assert location == (scene.run.path.parents[2] / "mlartifacts" / "exp").as_uri()
    assert scene.shipper().ship_once() == 0


def test_status_and_end_time_are_uploaded(scene: Scene) -> None:
    live = scene.shipper()
    statuses = {"finished": "FINISHED", "failed": "FAILED", "cancelled": "KILLED", "stopped": "KILLED"}
    for attempt, (status, shown) in enumerate(statuses.items(), 1):
        scene.state(status="running", attempt=attempt, ended=None)
        live.ship_once()
        assert scene.entity.info.status == "RUNNING"
        scene.state(status=status, reason="why", restarts=2, ended=2e9 + attempt)
        live.ship_once()
        run = scene.entity
        assert (run.info.status, run.info.end_time) == (shown, 2_000_000_000_000 + 1000 * attempt)
        assert [run.data.tags[f"hpcdist.{tag}"] for tag in ("state", "reason", "restarts")] == [status, "why", "2"]


def test_duration_in_mlflow_is_the_running_time(scene: Scene) -> None:
    """The cells of a sweep are created together, and a run may be extended after a pause of days."""
    scene.state(created=BEGAN - 500)
    add_attempt(scene.run, 1, 21, [], status="stopped")
    add_attempt(scene.run, 100_001, 100_031, [], status="finished")
    scene.state(status="finished", attempt=2, ended=BEGAN + 100_031)
    scene.shipper().ship_once()
    info = scene.entity.info
    assert info.start_time == 1000 * BEGAN, "not the creation"
    assert info.end_time - info.start_time == 1000 * (21 + 31)


def test_run_that_never_started_has_no_duration(scene: Scene) -> None:
    """Such as a run that was cancelled in the queue, which `hpcdist sync` closes days later."""
    scene.state(created=BEGAN, status="cancelled", attempt=0, ended=BEGAN + 100_000)
    scene.shipper().ship_once()
    info = scene.entity.info
    assert (info.status, info.end_time - info.start_time) == ("KILLED", 0)


def test_pass_is_bounded_while_the_run_keeps_logging(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "PASS_S", 0.0)
    shipper = scene.shipper()
    mlflow = shipper.open_run()
    send = mlflow.log_points
    sent: list[int] = []

    def send_and_log_more(points: list[Point]) -> int:
        sent.append(len(points))
        assert len(sent) < 5, "the pass must end although the run logs more"
        scene.log([10 * (len(sent) + 1)])
        return send(points)

    monkeypatch.setattr(mlflow, "log_points", send_and_log_more)
    scene.log([10])
    shipper.ship_once()
    assert len(sent) == 1
    assert scene.entity.data.tags["hpcdist.state"] == "running"
    scene.state(status="finished", ended=2e9)
    monkeypatch.setattr(mlflow, "log_points", send)
    shipper.ship_once()
    assert scene.steps() == [10, 20]


def test_param_changed_by_a_resume_becomes_a_tag(scene: Scene) -> None:
    scene.write_config({**CONFIG, "params": {"long": "x" * 7000}})
    scene.shipper().ship_once()
    scene.write_config({**CONFIG, "optim": {"lr": 0.1, "max_grad_norm": None}, "params": {"long": "x" * 7000}})
    scene.shipper().ship_once()
    data = scene.entity.data
    assert (data.params["optim.lr"], data.params["params.long"]) == ("0.001", "x" * 5976 + "… (cut, 7000 characters)")
    assert [tag for tag in data.tags.items() if "changed" in tag[0]] == [("hpcdist.changed.optim.lr", "0.1")]


KILLED = """
import os, signal, sys
from pathlib import Path
from hpcdist.run.folder import RunDir
from hpcdist.tracking import batches, delivery, mlflow_client
{trap}
delivery.Delivery(RunDir(Path(sys.argv[1])), sys.argv[2]).ship_once()
"""
AFTER_CREATE = """
write = mlflow_client.write_json
def trap(path, value, durable):
    if "run_id" in value:
        os.kill(os.getpid(), signal.SIGKILL)
    write(path, value, durable=durable)
mlflow_client.write_json = trap
"""
BETWEEN_SEND_AND_PERSIST = """
def trap(self, num_refused):
    os.kill(os.getpid(), signal.SIGKILL)
batches.PointBatches.commit = trap
"""


def kill_at(scene: Scene, trap: str) -> None:
    code = KILLED.format(trap=trap)
    done = subprocess.run([sys.executable, "-c", code, str(scene.run.path), scene.uri], check=False)
    assert done.returncode == -signal.SIGKILL


@pytest.mark.processes
def test_mlflow_run_is_created_once_if_its_creator_is_killed(scene: Scene) -> None:
    kill_at(scene, AFTER_CREATE)
    scene.shipper().ship_once()
    experiment = scene.client.get_experiment_by_name("exp")
    assert experiment is not None
    assert [run.info.run_id for run in scene.client.search_runs([experiment.experiment_id])] == [scene.run_id]


@pytest.mark.processes
def test_shipper_killed_after_sending_uploads_no_duplicates(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "PASS_S", math.inf)  # one pass sends everything, also on a busy machine
    scene.log(range(1500), attempt=2)
    kill_at(scene, BETWEEN_SEND_AND_PERSIST)
    assert len(scene.steps()) == 1500, "sent, but not recorded as sent"
    # Late records of the first attempt must not replace those that the killed shipper has sent.
    scene.log(range(500, 1510), attempt=1, offset=0.5)
    scene.log(range(1500, 1600), attempt=2)
    scene.shipper().ship_once()
    assert scene.steps() == list(range(1600))
    assert {metric.value % 1 for metric in scene.client.get_metric_history(scene.run_id, "loss")} == {0}


def test_rejected_points_do_not_block_other_points(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    opened = scene.shipper().open_run()
    points = [Point("a", float(step), step, step) for step in range(7)]
    assert opened.log_points([*points[:3], Point("no\nname", 1.0, 3, 3), *points[3:]]) == 1
    assert scene.steps("a") == list(range(7))
    assert "metric no\nname of step 3 is omitted" in caplog.text


def test_lost_shipping_state_causes_no_duplicates(scene: Scene) -> None:
    scene.log(range(50))
    scene.shipper().ship_once()
    for sent in (SentPoints, SentFiles, SentFacts):
        (scene.run.journal / sent.FILE).write_text("{broken")
    scene.shipper().ship_once()
    assert scene.steps() == list(range(50))


def test_error_for_deleted_runs_names_the_restore_command(scene: Scene) -> None:
    scene.shipper().ship_once()
    run_id, experiment = scene.run_id, scene.entity.info.experiment_id
    live = scene.shipper()
    live.open_run()
    scene.client.delete_run(run_id)
    scene.log(range(3))
    command = re.escape(f"`MLFLOW_TRACKING_URI={scene.uri} mlflow")
    with pytest.raises(TrackingError, match=f"run {run_id} is deleted .*{command} runs restore --run-id {run_id}`"):
        live.ship_once()
    scene.client.restore_run(run_id)
    assert live.ship_once() == 3

    other = RunDir.create(scene.run.path.parent / "second")
    other.config.write_text("{}")
    scene.client.delete_experiment(experiment)
    of_experiment = f"exp is deleted .*{command} experiments restore --experiment-id {experiment}`, or"
    with pytest.raises(TrackingError, match=of_experiment):
        delivery.Delivery(other, scene.uri).open_run()
    with pytest.raises(TrackingError, match=of_experiment):
        scene.shipper().ship_once()
    scene.client.restore_run(run_id)  # alone, which leaves the experiment deleted
    with pytest.raises(TrackingError, match=of_experiment):
        scene.shipper().ship_once()
    scene.client.restore_experiment(experiment)
    scene.log(range(3, 5))
    assert scene.shipper().ship_once() == 2


def test_run_that_is_missing_in_its_store_is_an_error(scene: Scene) -> None:
    write_json(scene.run.mlflow, {"uri": scene.uri, "run_id": "0" * 32, "run_uid": "x"})
    with pytest.raises(TrackingError, match=r"is no longer in MLflow at .*: .* remove .*mlflow\.json"):
        scene.shipper().open_run()


def test_unreadable_files_are_reported_and_retried(scene: Scene) -> None:
    live = scene.shipper()
    unreadable = scene.run.journal / "attempt-001.rank-00007.jsonl"
    unreadable.mkdir()
    with pytest.raises(TrackingError, match=r"the journal of first cannot be read: .*Is a directory"):
        live.ship_once()
    unreadable.rmdir()
    scene.log([1])
    assert live.ship_once() == 1


def test_concurrently_created_experiment_is_used(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    scene.client.create_experiment("exp")
    find = MlflowClient.get_experiment_by_name
    answers: list[Any] = [None]
    monkeypatch.setattr(MlflowClient, "get_experiment_by_name", lambda *args: answers.pop() if answers else find(*args))
    assert scene.shipper().open_run().run_id == scene.run_id


def test_unreadable_config_raises_tracking_error(scene: Scene) -> None:
    for text, reason in (("[1]", "must hold keys and values, holds a list"), ("{", "cannot be read")):
        scene.run.config.write_text(text)
        with pytest.raises(TrackingError, match=rf"config\.yaml:? {reason}"):
            scene.shipper()


def test_status_is_uploaded_if_artifacts_cannot_be_read(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    live = scene.shipper()
    search = Path.rglob

    def fail(folder: Path, pattern: str) -> Iterator[Path]:
        if folder == scene.run.artifacts:
            raise PermissionError(13, "Permission denied", str(folder))
        return search(folder, pattern)

    monkeypatch.setattr(Path, "rglob", fail)
    for status, shown in (("running", "RUNNING"), ("finished", "FINISHED")):
        scene.state(status=status, ended=2e9)
        with pytest.raises(TrackingError, match=r"a file of first cannot be uploaded: .*denied: .*artifacts"):
            live.ship_once()
        assert scene.entity.info.status == shown


def test_names_values_and_files_with_any_characters(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    text = "Größe 数据 🚀 עברית \u202e\u0000\ud800"
    scene.write_config(
        {**CONFIG, "params": {"größe": "数据 🚀", "lr[0]": 1}, "tracking": {"tags": {"équipe": "Zürich 🏔"}}}
    )
    scene.log([1, 2], key="Verlust/größe 数据")
    scene.log([1], key=text)
    scene.file("artifacts/Ergebnis 数据 🚀.txt", "größe")
    scene.file("attempts/001/rank-00000.log", "größe 数据 🚀\n")
    scene.state(status="failed", reason="Gerät 数据: \udcff", ended=2e9)
    scene.shipper().ship_once()
    run = scene.entity
    assert scene.steps("Verlust/größe 数据") == [1, 2]
    assert run.data.params["params.größe"] == "数据 🚀"
    warned = [one for one in caplog.messages if one.startswith("MLflow does not accept the name")]
    assert [one.split("'")[1] for one in warned] == ["params.lr[0]"], "no name of a tag that no resume has changed"
    assert run.data.tags["équipe"] == "Zürich 🏔"
    assert run.data.tags["hpcdist.reason"] == "Gerät 数据: ?"
    assert len(run.data.metrics) == 1, "a name with a lone surrogate is a damaged line"
    assert {"Ergebnis 数据 🚀.txt", "logs/attempt-001/rank-00000.log"} <= scene.artifacts()
    copy = scene.client.download_artifacts(scene.run_id, "Ergebnis 数据 🚀.txt")
    assert Path(copy).read_text() == "größe"


# --- When the shipper writes the report of a run, and that a failure of the report does not stop the upload.


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the runs with a new report; the list grows."""
    found: list[str] = []
    monkeypatch.setattr(report, "write_report", lambda run, series, last_values: found.append(run.name))
    return found


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    scene = ReportScene(tmp_path)
    scene.state(status="running", ended=None)
    return scene.run


def write_if_due(writer: ReportWriter, run: RunDir, last: str = "", *, new: bool = False) -> bool:
    return writer.write_if_due(run.read_state(), last, has_new_points=new)


def test_report_is_written_after_state_changes_and_in_intervals(
    run: RunDir, written: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    writer = ReportWriter(run)
    assert [write_if_due(writer, run, new=True) for _ in range(3)] == [True, False, False]
    for seconds, is_due in ((299, False), (2, True), (299, False)):
        now += seconds
        assert write_if_due(writer, run) == is_due
    ReportScene.state_of(run, status="running", attempt=2, ended=None)
    assert write_if_due(writer, run)
    ReportScene.state_of(run, status="finished", attempt=2)
    assert [write_if_due(writer, run) for _ in range(3)] == [True, False, False]
    # Another process, such as `hpcdist sync`, does not write it again, unless records arrive after the end.
    again, last = ReportWriter(run), state_key(run.read_state())
    assert not write_if_due(again, run, last)
    assert write_if_due(again, run, last, new=True)
    assert len(written) == 5


def test_failure_of_a_report_is_logged_once(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(run: RunDir, series: object, last_values: object) -> None:
        raise ZeroDivisionError("in a chart")

    monkeypatch.setattr(report, "write_report", fail)
    writer = ReportWriter(run)
    ReportScene.state_of(run, status="failed")
    assert not any(write_if_due(writer, run) for _ in range(3))
    assert caplog.text.count("the report of first cannot be written") == 1
    assert "ZeroDivisionError: in a chart" in caplog.text


# --- The ledger of a run as metrics of MLflow.


def test_ledger_of_an_ended_run_is_logged_again_after_accounting(scene: Scene) -> None:
    add_attempt(scene.run, 1, 37, [account(1, 37)] * 4)
    scene.state(status="finished", ended=BEGAN + 40, created=BEGAN - 10)
    for _ in range(2):
        scene.shipper().ship_once()
    logged = {key: value for key, value in scene.entity.data.metrics.items() if key.startswith("usage/")}
    # Few digits: MLflow's list of runs shows all of them.
    assert logged == {"usage/allocated_hours": 0.05139, "usage/queue_hours": 0.0, "usage/goodput": 0.7568}
    start = {"began": BEGAN, "ended": BEGAN + 36.04, "energy_j": 1.8e6}
    write_json(scene.run.path / "job.json", {"job_id": "1", "starts": {"0": start}})
    for _ in range(2):
        scene.shipper().ship_once()
    points = [(p.step, p.timestamp) for p in scene.client.get_metric_history(scene.run_id, "usage/allocated_hours")]
    ended_ms = int((BEGAN + 37) * 1000)
    assert sorted(points) == [(7, ended_ms), (8, ended_ms + 1)], "the last training step, and the next one"
    metrics = scene.entity.data.metrics
    assert metrics["usage/allocated_hours"] == 0.05006
    assert metrics["usage/energy_kwh"] == pytest.approx(0.5)


def test_ledger_of_a_running_run_is_logged_in_intervals(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    mlflow, ledger = scene.shipper().open_run(), LedgerMetrics(scene.run)
    scene.state(created=BEGAN)
    numbers = []
    for now in (30, 61, 90, 121):
        add_attempt(scene.run, 1 + now, 21 + now, [account(1 + now, 21 + now)] * 4)
        ledger.ship(scene.run.read_state(), mlflow)
        numbers.append(len(scene.client.get_metric_history(scene.run_id, "usage/allocated_hours")))
    assert numbers == [0, 1, 1, 2]
    scene.state(status="failed", ended=BEGAN + 200)
    for _ in range(2):
        ledger.ship(scene.run.read_state(), mlflow)
    history = scene.client.get_metric_history(scene.run_id, "usage/allocated_hours")
    times = {point.timestamp for point in history}
    assert len(times) == len(history) == 2, "each time once, and nothing for an equal ledger"
    assert {point.step for point in history} == {7, 8}, "each step once"


def test_ledger_is_logged_once_through_an_outage(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    add_attempt(scene.run, 1, 37, [account(1, 37)] * 4)
    scene.state(status="stopped", ended=BEGAN + 40)
    mlflow, ledger = scene.shipper().open_run(), LedgerMetrics(scene.run)

    def send_without_response(points: Sequence[Point]) -> int:
        MlflowRun.log_points(mlflow, points)
        raise TrackingError("the server does not answer")

    with monkeypatch.context() as patch:
        patch.setattr(mlflow, "log_points", send_without_response)
        with pytest.raises(TrackingError, match="does not answer"):
            ledger.ship(scene.run.read_state(), mlflow)
    # The record has arrived, and accounting changes the ledger before the next pass.
    write_json(scene.run.path / "job.json", {"job_id": "1", "starts": {"0": {"began": BEGAN, "ended": BEGAN + 36.04}}})
    ledger.ship(scene.run.read_state(), mlflow)
    history = scene.client.get_metric_history(scene.run_id, "usage/allocated_hours")
    assert sorted(point.step for point in history) == [7, 8]


def test_steps_of_the_ledger_survive_a_failed_read(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    add_attempt(scene.run, 1, 37, [account(1, 37)] * 4)
    scene.state(status="stopped", ended=BEGAN + 40)
    mlflow = scene.shipper().open_run()
    LedgerMetrics(scene.run).ship(scene.run.read_state(), mlflow)
    write_json(scene.run.path / "job.json", {"job_id": "1", "starts": {"0": {"began": BEGAN, "ended": BEGAN + 36.04}}})
    ledger = LedgerMetrics(scene.run)

    def fail(run_id: str, key: str) -> None:
        raise OSError("the server does not answer")

    with monkeypatch.context() as patch:
        patch.setattr(mlflow.client, "get_metric_history", fail)
        with pytest.raises(TrackingError, match="does not answer"):
            ledger.ship(scene.run.read_state(), mlflow)
    ledger.ship(scene.run.read_state(), mlflow)
    history = scene.client.get_metric_history(scene.run_id, "usage/allocated_hours")
    assert sorted(point.step for point in history) == [7, 8]


def test_run_without_a_ledger_has_no_metrics_of_it(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    scene.log([1])
    scene.state(status="finished", ended=BEGAN + 40)
    scene.shipper().ship_once()
    write_json(scene.run.path / "job.json", {"format": 99})
    LedgerMetrics(scene.run).ship(scene.run.read_state(), scene.shipper().open_run())
    assert "the ledger of first is not uploaded" in caplog.text
    assert not [key for key in scene.entity.data.metrics if key.startswith("usage/")]
