"""Uploads to a real MLflow database, with failing requests and killed processes."""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import ENDPOINT_NOT_FOUND
from report_scene import BEGAN, add_attempt
from tracking_scene import CONFIG, Scene

from hpcdist.config.launch_schema import CheckpointConfig
from hpcdist.errors import TrackingError
from hpcdist.host.files import write_json
from hpcdist.run.folder import RunDir
from hpcdist.run.status import CHECKS_PER_S
from hpcdist.tracking import artifacts, delivery
from hpcdist.tracking.artifacts import move_best
from hpcdist.tracking.delivery import Delivery
from hpcdist.tracking.journal import SentFacts, SentFiles, upload_progress
from hpcdist.tracking.mlflow_client import MlflowRun
from hpcdist.tracking.points import Point, SentPoints


def test_upload_contains_params_tags_points_and_status(scene: Scene) -> None:
    scene.log([10, 20])
    scene.file(
        "journal/attempt-001.rank-00001.jsonl",
        '{"t":5,"s":1,"m":{"odd[0]":NaN,"up":Infinity}}\n{"torn',
    )
    assert scene.shipper().ship_once() == 5
    run = scene.entity
    assert run.info.status == "RUNNING"
    assert run.info.run_name == "first"
    assert run.info.start_time == int(scene.run.read_state().created * 1000)
    assert run.data.params["optim.lr"] == "0.001"
    assert run.data.params["optim.max_grad_norm"] == "null"
    assert run.data.params["name"] == ""
    tags = run.data.tags
    assert tags["mlflow.source.git.commit"] == tags["hpcdist.git_commit"] == "abc"
    assert (tags["mlflow.user"], tags["mlflow.source.name"], tags["team"]) == ("ada", "ddp", "vision")
    assert (tags["hpcdist.versions.torch"], tags["hpcdist.state"]) == ("2", "running")
    assert scene.steps() == [10, 20]
    assert math.isnan(run.data.metrics["odd_0_--4f0c463a3ad8"])
    assert run.data.metrics["up"] > 1e308
    assert run.data.metrics["attempt"] == 1
    assert scene.artifacts() == {"config.yaml", "environment.json", "names.json", "report.html"}
    location = scene.client.get_experiment(run.info.experiment_id).artifact_location
    assert location == (scene.run.path.parents[2] / "mlartifacts" / "exp").as_uri()
    assert scene.shipper().ship_once() == 0


@pytest.mark.parametrize(
    ("status", "shown"),
    [("finished", "FINISHED"), ("failed", "FAILED"), ("cancelled", "KILLED"), ("stopped", "KILLED")],
)
def test_status_and_end_time_are_uploaded(scene: Scene, status: Any, shown: str) -> None:
    scene.shipper().ship_once()
    scene.state(status=status, reason="why", restarts=2, ended=2e9)
    scene.shipper().ship_once()
    run = scene.entity
    assert (run.info.status, run.info.end_time) == (shown, 2_000_000_000_000)
    assert [run.data.tags[f"hpcdist.{tag}"] for tag in ("state", "reason", "restarts")] == [status, "why", "2"]
    scene.state(status="running", attempt=2, ended=None)
    scene.shipper().ship_once()
    assert scene.entity.info.status == "RUNNING"
    scene.state(status=status, ended=2.1e9)
    scene.shipper().ship_once()
    assert (scene.entity.info.status, scene.entity.info.end_time) == (shown, 2_100_000_000_000)


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


def test_pass_is_bounded_while_the_run_keeps_logging(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "PASS_S", 0.0)
    shipper = scene.shipper()
    mlflow = shipper.open_run()
    send, sent = mlflow.log_points, []

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


def test_overlapping_attempts_are_uploaded_as_one_series(scene: Scene) -> None:
    live = scene.shipper()
    scene.log(range(0, 100, 10))
    live.ship_once()
    scene.state(attempt=2, restarts=1)
    scene.log(range(50, 200, 10), attempt=2, offset=0.5)
    live.ship_once()
    history = {metric.step: metric.value for metric in scene.client.get_metric_history(scene.run_id, "loss")}
    assert scene.steps() == list(range(0, 200, 10))
    assert history == {step: step + (0.5 if step > 90 else 0) for step in range(0, 200, 10)}
    marks = [(metric.step, metric.value) for metric in scene.client.get_metric_history(scene.run_id, "attempt")]
    assert sorted(marks) == [(0, 1), (50, 2)]
    assert scene.entity.data.tags["hpcdist.attempts"] == "2"


def test_param_changed_by_a_resume_becomes_a_tag(scene: Scene) -> None:
    scene.shipper().ship_once()
    scene.write_config({**CONFIG, "optim": {"lr": 0.1, "max_grad_norm": None}, "params": {"new": "x" * 7000}})
    scene.shipper().ship_once()
    run = scene.entity
    assert run.data.params["optim.lr"] == "0.001"
    assert run.data.tags["hpcdist.changed.optim.lr"] == "0.1"
    assert run.data.params["params.new"] == "x" * 6000
    scene.shipper().ship_once()
    assert "hpcdist.changed.params.new" not in scene.entity.data.tags, "a shortened value is not a change"


KILLED = """
import os, signal, sys
from pathlib import Path
from hpcdist.run.folder import RunDir
from hpcdist.tracking import delivery
from hpcdist.tracking import mlflow_client
from hpcdist.tracking import points
{trap}
shipper = delivery.Delivery(RunDir(Path(sys.argv[1])), sys.argv[2])
shipper.ship_once()
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
points.Batches.commit = trap
"""


def kill_at(scene: Scene, trap: str) -> None:
    code = KILLED.format(trap=trap)
    done = subprocess.run([sys.executable, "-c", code, str(scene.run.path), scene.uri], check=False, timeout=60)
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


def test_failed_request_is_repeated(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    scene.log(range(1500))
    live = scene.shipper()
    opened = live.open_run()
    send = opened._log_batch
    calls: list[int] = []

    def flaky(metrics: list[Any]) -> int:
        calls.append(len(metrics))
        if len(calls) == 2:
            raise TrackingError("no answer")
        return send(metrics)

    monkeypatch.setattr(opened, "_log_batch", flaky)
    with pytest.raises(TrackingError, match="no answer"):
        live.ship_once()
    assert live.ship_once() == 1501
    assert scene.steps() == list(range(1500))
    assert calls == [1000, 501, 1000, 501]


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
    with pytest.raises(TrackingError, match=f"run {run_id} is deleted .*`mlflow runs restore --run-id {run_id}`"):
        live.ship_once()
    scene.client.restore_run(run_id)
    assert live.ship_once() == 4

    other = RunDir.create(scene.run.path.parent / "second")
    other.config.write_text("{}")
    scene.client.delete_experiment(experiment)
    with pytest.raises(TrackingError, match=f"exp is deleted .*experiments restore --experiment-id {experiment}`, or"):
        delivery.Delivery(other, scene.uri).open_run()


def test_missing_run_is_recreated_in_another_store_only(scene: Scene, empty_database: Path, tmp_path: Path) -> None:
    scene.log(range(20))
    scene.shipper().ship_once()
    first = scene.run_id
    write_json(scene.run.mlflow, {"uri": scene.uri, "run_id": "0" * 32, "run_uid": "x"})
    with pytest.raises(TrackingError, match=r"is no longer in MLflow at .*: .* remove .*mlflow\.json"):
        scene.shipper().open_run()
    (tmp_path / "other").mkdir()
    scene.uri = f"sqlite:///{tmp_path}/other/mlflow.db"
    (tmp_path / "other" / "mlflow.db").write_bytes(empty_database.read_bytes())
    scene.shipper().ship_once()
    assert scene.run_id != first
    assert scene.steps() == list(range(20))


def test_unreadable_files_are_reported_and_retried(scene: Scene) -> None:
    live = scene.shipper()
    unreadable = scene.run.journal / "attempt-001.rank-00007.jsonl"
    unreadable.mkdir()
    with pytest.raises(TrackingError, match=r"the journal of first cannot be read: .*Is a directory"):
        live.ship_once()
    unreadable.rmdir()
    scene.log([1])
    assert live.ship_once() == 2


def test_concurrently_created_experiment_is_used(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    scene.client.create_experiment("exp")
    find = MlflowClient.get_experiment_by_name
    answers: list[Any] = [None]
    monkeypatch.setattr(MlflowClient, "get_experiment_by_name", lambda *args: answers.pop() if answers else find(*args))
    assert scene.shipper().open_run().run_id == scene.run_id

    monkeypatch.setattr(MlflowClient, "get_experiment_by_name", lambda *_: None)
    scene.run.mlflow.unlink()
    with pytest.raises(TrackingError, match="experiment exp cannot be created in MLflow at sqlite"):
        scene.shipper().open_run()


def test_unreadable_config_raises_tracking_error(scene: Scene) -> None:
    for text, reason in (("[1]", "must hold keys and values, holds a list"), ("{", "cannot be read")):
        scene.run.config.write_text(text)
        with pytest.raises(TrackingError, match=rf"config\.yaml:? {reason}"):
            scene.shipper()


def test_changed_artifacts_are_uploaded_again(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    live = scene.shipper()
    scene.file("code.patch", "diff")
    log = scene.file("attempts/001/rank-00000.log", "one\n")
    uploaded: list[str] = []
    upload = live.open_run().upload
    monkeypatch.setattr(
        live.open_run(), "upload", lambda source, target: (uploaded.append(target), upload(source, target))
    )
    live.ship_once()
    live.ship_once()
    first = ["config.yaml", "code.patch.txt", "environment.json", "report.html", "logs/attempt-001/rank-00000.log"]
    assert uploaded == first
    uploaded.clear()
    log.write_text("one\ntwo\n")
    live.ship_once()
    assert uploaded == [], "logs are uploaded once a minute"
    scene.file("attempts/001/rank-00001.outcome.json", '{"outcome": "failed"}')
    scene.state(status="failed", ended=2e9)
    live.ship_once()
    assert uploaded == ["report.html", "logs/attempt-001/rank-00000.log", "logs/attempt-001/rank-00001.outcome.json"]
    copy = scene.client.download_artifacts(scene.run_id, "logs/attempt-001/rank-00000.log")
    assert Path(copy).read_text() == "one\ntwo\n"


def test_logs_of_the_first_outcomes_are_uploaded_with_many_ranks(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(artifacts, "MAX_RANKS", 3)
    for rank in range(6):
        scene.file(f"attempts/001/rank-{rank:05d}.log", "a line\n")
    for time_s, rank in enumerate((4, 1, 5, 3)):
        os.utime(scene.file(f"attempts/001/rank-{rank:05d}.outcome.json", "{}"), (time_s, time_s))
    uploaded = [
        item.target.removeprefix("logs/attempt-001/rank-0000") for item in artifacts.reports(scene.run, ended=True)
    ]
    assert uploaded == ["1.log", "1.outcome.json", "4.log", "4.outcome.json", "5.log", "5.outcome.json"]
    for rank in (1, 3, 5):
        scene.run.attempt(1).outcome(rank).unlink()
    uploaded = [
        item.target.removeprefix("logs/attempt-001/rank-0000") for item in artifacts.reports(scene.run, ended=True)
    ]
    assert uploaded == ["0.log", "1.log", "4.log", "4.outcome.json"]


def test_bounded_number_of_stack_traces_is_uploaded(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(artifacts, "MAX_RANKS", 2)
    monkeypatch.setattr(artifacts, "LIVE_LOG_BYTES", 100)
    for rank in range(3):
        scene.file(f"attempts/001/rank-{rank:05d}.stacks.txt", "a stack\n")
        scene.file(f"attempts/001/rank-{rank:05d}.flight.json", "{}")
        scene.file(f"attempts/001/flight-rank-{rank}", "x" * (99 + rank))
    first = [item.target.removeprefix("logs/attempt-001/") for item in artifacts.reports(scene.run, ended=True)]
    assert first == ["flight-rank-0", "flight-rank-1"], "stacks are uploaded after their collection"
    scene.file("attempts/001/stacks.txt", "rank 2 differs\n")
    scene.file("attempts/001/stragglers.jsonl", "{}\n")
    uploaded = [item.target.removeprefix("logs/attempt-001/") for item in artifacts.reports(scene.run, ended=False)]
    stacks = ["rank-00000.stacks.txt", "rank-00001.stacks.txt"]
    records = ["rank-00000.flight.json", "rank-00001.flight.json", "flight-rank-0", "flight-rank-1"]
    assert uploaded == ["stragglers.jsonl", "stacks.txt", *stacks, *records]


def test_journals_of_many_nodes_are_polled_less_often(scene: Scene) -> None:
    for node in range(16):
        (scene.run.journal / f"attempt-001.rank-{node:05d}.jsonl").write_text("")
    live = scene.shipper()
    live.ship_once()
    assert live.pause_s == 16 / CHECKS_PER_S


def test_best_and_final_checkpoints_are_uploaded_at_the_end(scene: Scene) -> None:
    for step, accuracy in ((10, 0.8), (20, 0.9), (25, 0.9), (28, None), (30, 0.85)):
        scene.file(f"checkpoints/step-{step:08d}/model.pt", f"weights {step}")
        scene.file(f"checkpoints/step-{step:08d}/manifest.json", json.dumps({"metrics": {"eval/accuracy": accuracy}}))
    scene.file("checkpoints/step-00000040/model.pt", "incomplete: no manifest")
    live = scene.shipper()
    for status in ("running", "stopped"):
        scene.state(status=status, ended=2e9)
        live.ship_once()
        assert not any(name.startswith("checkpoints") for name in scene.artifacts())
    scene.state(status="finished")
    live.ship_once()
    for name, step in (("best", 25), ("final", 30)):
        copy = scene.client.download_artifacts(scene.run_id, f"checkpoints/{name}/model.pt")
        assert Path(copy).read_text() == f"weights {step}"
    least = CheckpointConfig(monitor="eval/accuracy", monitor_mode="min")
    assert [item.source.name for item in artifacts.checkpoints(scene.run, least)] == ["step-00000030", "step-00000010"]
    other = CheckpointConfig(monitor="eval/loss")
    assert [item.target for item in artifacts.checkpoints(scene.run, other)] == ["checkpoints/final"]


def test_number_of_files_that_are_left_is_recorded_at_the_end(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(3):
        scene.file(f"artifacts/{number}.txt", "text")
    live = scene.shipper()
    upload, shown = live.open_run().upload, []

    def upload_and_read(source: Path, target: str) -> None:
        shown.append(upload_progress(scene.run))
        upload(source, target)

    monkeypatch.setattr(live.open_run(), "upload", upload_and_read)
    monkeypatch.setattr(delivery, "SAVE_S", 0.0)
    scene.state(status="finished", ended=2e9)
    live.ship_once()
    total = len(shown)
    assert shown == [f"uploading to MLflow: {done} of {total} files" for done in range(total)]
    assert total > 3
    assert upload_progress(scene.run) == "uploading to MLflow"


def test_status_is_uploaded_if_artifacts_cannot_be_stored_or_read(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    live = scene.shipper()
    with monkeypatch.context() as patch:
        patch.setattr(live.open_run().client, "log_artifact", refuse)
        with pytest.raises(TrackingError, match=r"MLflow at sqlite.*No space left"):
            live.ship_once()
    assert scene.entity.info.status == "RUNNING"
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


@pytest.mark.processes  # torch starts ldconfig
# MLflow's code emits these warnings when it saves and loads a model.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning:mlflow")
def test_model_is_logged_and_registered_once(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    import mlflow
    import mlflow.pytorch
    import torch

    net = torch.nn.Linear(3, 2)
    x = torch.ones(1, 3)
    mlflow.pytorch.save_model(net, str(scene.run.model), input_example=x.numpy(), pip_requirements=[])
    scene.write_config({**CONFIG, "tracking": {"register_as": "digits"}})
    scene.log(range(0, 130, 10))
    scene.shipper().ship_once()
    assert scene.entity.outputs is None or scene.entity.outputs.model_outputs == []
    scene.state(status="finished", ended=2e9)
    scene.shipper().ship_once()
    # Without the saved state, nothing is created twice.
    live = scene.shipper()
    live.open_run()
    live.uploads.sent.model = {}
    live.ship_once()
    outputs = scene.entity.outputs.model_outputs
    assert [item.step for item in outputs] == [120]
    model = scene.client.get_logged_model(outputs[0].model_id)
    assert (model.status, model.source_run_id, model.name) == ("READY", scene.run_id, "model")
    assert [version.source for version in scene.client.search_model_versions("name = 'digits'")] == [
        model.artifact_location
    ]
    assert model.tags["mlflow.modelVersions"] == '[{"name": "digits", "version": 1}]'
    assert "It is not the best checkpoint of a run" in scene.client.get_registered_model("digits").description
    monkeypatch.setenv("MLFLOW_TRACKING_URI", scene.uri)
    for uri in (f"models:/{model.model_id}", f"runs:/{scene.run_id}/model", "models:/digits/1"):
        assert torch.equal(mlflow.pytorch.load_model(uri)(x), net(x))


def test_newest_preflight_reports_are_uploaded(scene: Scene) -> None:
    first, second = scene.run.new_attempt(), scene.run.new_attempt()
    for path in (first.preflight, first.network, second.network):
        path.write_text("{}")
    found = {item.target: item.source for item in artifacts.preflight(scene.run)}
    assert found == {"preflight.json": first.preflight, "network.json": second.network}


@pytest.mark.parametrize(
    "name", ["artifacts/secret.txt", "artifacts/folder", "code.patch", "checkpoints/step-00000002/x"]
)
def test_links_that_leave_the_run_folder_are_not_uploaded(
    scene: Scene, tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "id_rsa").write_text("private")
    link = scene.run.path / name
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(outside if name.endswith("folder") else outside / "id_rsa")
    inside = scene.run.artifacts / "mine.txt"
    inside.parent.mkdir(exist_ok=True)
    inside.write_text("mine")
    (scene.run.artifacts / "same.txt").symlink_to("mine.txt")
    if name.startswith("checkpoints"):
        write_json(link.with_name("manifest.json"), {"step": 2})
    scene.state(status="finished")
    shipper = scene.shipper()
    shipper.ship_once()
    shipper.ship_once()
    uploaded = set(shipper.uploads.sent.artifacts)
    assert {"mine.txt", "same.txt"} <= uploaded
    assert not {"secret.txt", "folder/id_rsa", "code.patch.txt", "checkpoints/final"} & uploaded
    warnings = [record.message for record in caplog.records if "leaves the run folder" in record.message]
    assert upload_progress(scene.run) == "uploading to MLflow", "nothing is left"
    assert len(warnings) == (not name.endswith("folder")), "one warning per link; linked folders are not searched"


# --- The alias `best` of a registered model in a real MLflow database.


NAME = "digits"
METRIC = "eval/accuracy"
#: Registers a version of a run with this value of the metric, without moving the alias. Returns run and version.
Register = Callable[[float | None], tuple[MlflowRun, str]]


@pytest.fixture
def register(scene: Scene) -> Register:
    scene.client.create_registered_model(NAME)

    def create(value: float | None) -> tuple[MlflowRun, str]:
        number = len(list(scene.run.path.parent.iterdir()))
        opened = MlflowRun(RunDir.create(scene.run.path.parent / f"run-{number}"), scene.uri)
        if value is not None:
            opened.client.log_metric(opened.run_id, METRIC, value, step=1)
        version = opened.client.create_model_version(NAME, f"{scene.uri}/{number}", run_id=opened.run_id)
        return opened, str(version.version)

    return create


def best(scene: Scene) -> str:
    aliases = scene.client.get_registered_model(NAME).aliases
    return str(aliases.get("best", ""))


def test_alias_moves_to_strictly_better_versions_only(scene: Scene, register: Register) -> None:
    seen = []
    for value in (0.8, 0.7, 0.8, None, float("nan"), 0.9):
        move_best(*register(value)[:1], NAME, str(_newest(scene)), CheckpointConfig(monitor=METRIC))
        seen.append(best(scene))
    assert seen == ["1", "1", "1", "1", "1", "6"]
    move_best(register(0.1)[0], NAME, "7", CheckpointConfig(monitor=METRIC, monitor_mode="min"))
    assert best(scene) == "7"
    tags = scene.client.get_model_version(NAME, "6").tags
    assert tags == {"hpcdist.monitor": METRIC, "hpcdist.monitor_value": "0.9"}


def test_alias_that_a_user_has_set_is_compared_by_its_run(scene: Scene, register: Register) -> None:
    _, strong = register(0.95)  # registered without hpcdist: no tags
    _, unknown = register(None)
    scene.client.set_registered_model_alias(NAME, "best", strong)
    run, version = register(0.9)
    move_best(run, NAME, version, CheckpointConfig(monitor=METRIC))
    assert best(scene) == strong
    scene.client.set_registered_model_alias(NAME, "best", unknown)
    move_best(run, NAME, version, CheckpointConfig(monitor=METRIC))
    assert best(scene) == version


def test_process_that_overtakes_another_is_compared_again(
    scene: Scene, register: Register, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worse version sets the alias with an outdated comparison, after a better one has set it."""
    (worse, first), (better, second) = register(0.8), register(0.9)
    set_alias, calls = MlflowClient.set_registered_model_alias, []

    def overtaken(client: MlflowClient, name: str, alias: str, version: str) -> None:
        calls.append(version)
        if len(calls) == 1:
            move_best(better, NAME, second, CheckpointConfig(monitor=METRIC))
            assert best(scene) == second
        set_alias(client, name, alias, version)

    monkeypatch.setattr(MlflowClient, "set_registered_model_alias", overtaken)
    move_best(worse, NAME, first, CheckpointConfig(monitor=METRIC))
    assert calls == [first, second, second]
    assert best(scene) == second


def test_alias_that_never_settles_ends_with_a_warning(
    scene: Scene, register: Register, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run, version = register(0.8)
    monkeypatch.setattr(MlflowClient, "set_registered_model_alias", lambda *_: None)
    move_best(run, NAME, version, CheckpointConfig(monitor=METRIC))
    assert "the alias best of digits is moved by other processes all the time" in caplog.text


def test_server_without_aliases_is_skipped_with_a_debug_line(
    scene: Scene, register: Register, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing(*_: Any) -> None:
        raise MlflowException("No such endpoint", error_code=ENDPOINT_NOT_FOUND)

    monkeypatch.setattr(MlflowClient, "set_registered_model_alias", missing)
    caplog.set_level(logging.DEBUG)
    run, version = register(0.8)
    move_best(run, NAME, version, CheckpointConfig(monitor=METRIC))
    assert [record.levelname for record in caplog.records if "alias best is not moved" in record.message] == ["DEBUG"]


def test_delivery_registers_the_model_and_sets_the_alias(scene: Scene) -> None:
    config = {**CONFIG, "checkpoint": {"monitor": "eval/loss", "monitor_mode": "min"}}
    config["tracking"] = {"register_as": NAME}
    for number, loss in enumerate((3, 2, 4), start=1):
        run = scene.run = RunDir.create(scene.run.path.parent / f"number-{number}")
        scene.write_config(config)
        scene.log([loss], key="eval/loss")
        scene.file("model/MLmodel", json.dumps({"flavors": {}, "number": number}))
        scene.state(status="finished", attempt=1, ended=2e9)
        Delivery(run, scene.uri).ship_once()
    version = scene.client.get_model_version_by_alias(NAME, "best")
    assert (int(version.version), version.tags["hpcdist.monitor_value"]) == (2, "2.0")


def _newest(scene: Scene) -> int:
    return max(int(version.version) for version in scene.client.search_model_versions(f"name = '{NAME}'"))
