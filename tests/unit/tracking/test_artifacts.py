"""Files, checkpoints and models of a run in a real MLflow database, and the alias `best` of a registered model."""

import hashlib
import json
import logging
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from mlflow.entities import LoggedModel
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import ENDPOINT_NOT_FOUND
from tracking_scene import CONFIG, Scene

from hpcdist.config.record_schema import CheckpointConfig
from hpcdist.errors import TrackingError
from hpcdist.host.json_files import read_json
from hpcdist.review import facts
from hpcdist.run.folder import RunDir
from hpcdist.tracking import artifacts, uploads
from hpcdist.tracking.artifacts import move_best
from hpcdist.tracking.mlflow_client import MlflowRun
from hpcdist.tracking.upload_state import SentFiles

ACCURACY = "eval/accuracy"
PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "export.md"


def test_changed_artifacts_are_uploaded_again(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    live = scene.shipper()
    log = scene.file("attempts/001/rank-00000.log", "one\n")
    uploaded: list[str] = []
    upload = live.open_run().upload

    def note_and_upload(source: Path, target: str) -> None:
        uploaded.append(target)
        upload(source, target)

    monkeypatch.setattr(live.open_run(), "upload", note_and_upload)
    live.ship_once()
    live.ship_once()
    first = ["config.yaml", "environment.json", "report.html", "logs/attempt-001/rank-00000.log"]
    assert uploaded == first
    uploaded.clear()
    log.write_text("one\ntwo\n")
    live.ship_once()
    assert uploaded == [], "logs are uploaded once a minute"
    outcome = {"outcome": "failed", "error": "boom", "traceback": [], "time": 2e9}
    scene.file("attempts/001/rank-00001.outcome.json", json.dumps(outcome))
    scene.state(status="failed", ended=2e9)
    live.ship_once()
    assert uploaded == ["report.html", "logs/attempt-001/rank-00000.log", "logs/attempt-001/rank-00001.outcome.json"]
    copy = scene.client.download_artifacts(scene.run_id, "logs/attempt-001/rank-00000.log")
    assert Path(copy).read_text() == "one\ntwo\n"


def with_patch(scene: Scene) -> None:
    scene.write_config({**CONFIG, "tracking": {**CONFIG["tracking"], "patch": True}})


def test_uncommitted_changes_are_uploaded_only_on_request(scene: Scene) -> None:
    scene.file("code.patch", "diff")
    scene.shipper().ship_once()
    assert "code.patch.txt" not in scene.artifacts()
    with_patch(scene)
    scene.shipper().ship_once()
    assert "code.patch.txt" in scene.artifacts()


def reported(scene: Scene, *, ended: bool) -> list[str]:
    return [item.target.removeprefix("logs/attempt-001/") for item in artifacts.reports(scene.run, ended=ended)]


def test_logs_of_the_first_outcomes_are_uploaded_with_many_ranks(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(artifacts, "MAX_RANKS", 3)
    for rank in range(6):
        scene.file(f"attempts/001/rank-{rank:05d}.log", "a line\n")
    for time_s, rank in enumerate((4, 1, 5, 3)):
        os.utime(scene.file(f"attempts/001/rank-{rank:05d}.outcome.json", "{}"), (time_s, time_s))
    names = [f"rank-0000{rank}.{kind}" for rank in (1, 4, 5) for kind in ("log", "outcome.json")]
    assert reported(scene, ended=True) == names
    for rank in (1, 3, 5):
        scene.run.attempt(1).outcome(rank).unlink()
    assert reported(scene, ended=True) == [f"rank-0000{end}" for end in ("0.log", "1.log", "4.log", "4.outcome.json")]


def test_bounded_number_of_stack_traces_is_uploaded(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(artifacts, "MAX_RANKS", 2)
    monkeypatch.setattr(artifacts, "LIVE_LOG_BYTES", 100)
    for rank in range(3):
        scene.file(f"attempts/001/rank-{rank:05d}.flight.json", "{}")
        scene.file(f"attempts/001/flight-rank-{rank}", "x" * (99 + rank))
    assert reported(scene, ended=True) == ["flight-rank-0", "flight-rank-1"], "stacks are uploaded when collected"
    scene.file("attempts/001/stacks.txt", "rank 2 differs\n")
    scene.file("attempts/001/stragglers.jsonl", "{}\n")
    records = ["rank-00000.flight.json", "rank-00001.flight.json", "flight-rank-0", "flight-rank-1"]
    assert reported(scene, ended=False) == ["stragglers.jsonl", "stacks.txt", *records]


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


@pytest.mark.processes  # torch starts ldconfig
# MLflow's code emits these warnings when it saves and loads a model.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning:mlflow")
def test_model_is_logged_and_registered_once(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    import mlflow
    import mlflow.pytorch
    import torch

    from hpcdist.checkpoint.export import export_model

    net = torch.nn.Linear(3, 2)
    x = torch.ones(2, 3)
    export_model(net, x, scene.run)
    scene.write_config({**CONFIG, "tracking": {"register_as": "digits"}})
    scene.log(range(0, 130, 10), key=ACCURACY)
    scene.shipper().ship_once()
    assert scene.entity.outputs is None or scene.model_outputs == []
    scene.state(status="finished", ended=2e9)
    scene.shipper().ship_once()
    # Without the saved state, nothing is created twice.
    live = scene.shipper()
    live.open_run()
    live.uploads.sent_files.model = {}
    live.ship_once()
    outputs = scene.model_outputs
    assert [item.step for item in outputs] == [120]
    model = scene.client.get_logged_model(outputs[0].model_id)
    assert (model.status, model.source_run_id, model.name) == ("READY", scene.run_id, "model")
    assert [version.source for version in scene.client.search_model_versions("name = 'digits'")] == [
        model.artifact_location
    ]
    assert scene.client.get_model_version_by_alias("digits", "best").tags["hpcdist.monitor_value"] == "120.0"
    assert model.tags["mlflow.modelVersions"] == '[{"name": "digits", "version": 1}]'
    assert "the best checkpoint of a run may be better" in scene.client.get_registered_model("digits").description
    monkeypatch.setenv("MLFLOW_TRACKING_URI", scene.uri)
    many = torch.rand(5, 3)
    for uri in (f"models:/{model.model_id}", f"runs:/{scene.run_id}/model", "models:/digits/1"):
        assert torch.equal(mlflow.pytorch.load_model(uri)(many), net(many))


def test_many_artifacts_delay_neither_metrics_nor_the_state(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(300):
        scene.file(f"artifacts/samples/{number:03d}.txt", str(number))
    saves: list[int] = []
    save = SentFiles.save

    def count_and_save(self: SentFiles, folder: Path) -> None:
        saves.append(1)
        save(self, folder)

    monkeypatch.setattr(SentFiles, "save", count_and_save)
    monkeypatch.setattr(uploads, "ARTIFACTS_S", 0.0)
    live = scene.shipper()
    live.ship_once()
    live.ship_once()
    assert "samples/001.txt" in live.uploads.sent_files.artifacts
    assert "samples/002.txt" not in live.uploads.sent_files.artifacts
    monkeypatch.setattr(uploads, "ARTIFACTS_S", 1e9)
    monkeypatch.setattr(uploads, "SAVE_S", 1e9)
    del saves[:]
    scene.state(status="finished", ended=2e9)
    live.ship_once()
    assert len(scene.artifacts("samples")) == 300
    assert len(saves) < 10, "the state is not saved for each artifact"


def test_links_that_leave_the_run_folder_are_not_uploaded(
    scene: Scene, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "outside").mkdir()
    secret = scene.file("../../../outside/id_rsa", "private").resolve()
    scene.file("artifacts/mine.txt", "mine")
    scene.file("checkpoints/step-00000002/manifest.json", '{"step": 2}')
    links = ("artifacts/secret.txt", "code.patch", "checkpoints/step-00000002/x")
    for name in links:
        (scene.run.path / name).symlink_to(secret)
    (scene.run.artifacts / "folder").symlink_to(secret.parent)
    (scene.run.artifacts / "same.txt").symlink_to("mine.txt")
    with_patch(scene)
    scene.state(status="finished")
    shipper = scene.shipper()
    shipper.ship_once()
    shipper.ship_once()
    uploaded = set(shipper.uploads.sent_files.artifacts)
    assert {"mine.txt", "same.txt"} <= uploaded
    assert not {"secret.txt", "folder/id_rsa", "code.patch.txt", "checkpoints/final"} & uploaded
    warnings = [record.message for record in caplog.records if "leaves the run folder" in record.message]
    assert len(warnings) == len(links), "one warning per link; linked folders are not searched"


# --- The alias `best` of a registered model in a real MLflow database.


NAME = "digits"
#: Registers a version of a run with this value of the metric, without moving the alias. Returns run and version.
Register = Callable[[float | None], tuple[MlflowRun, str]]


@pytest.fixture
def register(scene: Scene) -> Register:
    scene.client.create_registered_model(NAME)

    def create(value: float | None) -> tuple[MlflowRun, str]:
        number = len(list(scene.run.path.parent.iterdir()))
        opened = MlflowRun(RunDir.create(scene.run.path.parent / f"run-{number}"), scene.uri)
        if value is not None:
            opened.client.log_metric(opened.run_id, ACCURACY, value, step=1)
        version = opened.client.create_model_version(NAME, f"{scene.uri}/{number}", run_id=opened.run_id)
        return opened, str(version.version)

    return create


def best(scene: Scene) -> str:
    aliases = scene.client.get_registered_model(NAME).aliases
    return str(aliases.get("best", ""))


def test_alias_moves_to_strictly_better_versions_only(scene: Scene, register: Register) -> None:
    seen: list[str] = []
    for value in (0.8, 0.7, 0.8, None, float("nan"), 0.9):
        move_best(register(value)[0], NAME, str(len(seen) + 1), CheckpointConfig(monitor=ACCURACY))
        seen.append(best(scene))
    assert seen == ["1", "1", "1", "1", "1", "6"]
    move_best(register(0.1)[0], NAME, "7", CheckpointConfig(monitor=ACCURACY, monitor_mode="min"))
    assert best(scene) == "7"
    tags = scene.client.get_model_version(NAME, "6").tags
    assert tags == {"hpcdist.monitor": ACCURACY, "hpcdist.monitor_value": "0.9"}


def test_process_that_overtakes_another_is_compared_again(
    scene: Scene, register: Register, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worse version sets the alias with an outdated comparison, after a better one has set it."""
    (worse, first), (better, second) = register(0.8), register(0.9)
    set_alias, calls = MlflowClient.set_registered_model_alias, []

    def overtaken(client: MlflowClient, name: str, alias: str, version: str) -> None:
        calls.append(version)
        if len(calls) == 1:
            move_best(better, NAME, second, CheckpointConfig(monitor=ACCURACY))
            assert best(scene) == second
        set_alias(client, name, alias, version)

    monkeypatch.setattr(MlflowClient, "set_registered_model_alias", overtaken)
    move_best(worse, NAME, first, CheckpointConfig(monitor=ACCURACY))
    assert calls == [first, second, second]
    assert best(scene) == second


# --- Kept checkpoints as logged models.


@pytest.fixture(autouse=True)
def _every_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look for checkpoints in each pass, also of a running run."""
    monkeypatch.setattr(uploads, "CHECKPOINTS_INTERVAL_S", 0.0)


def save(scene: Scene, step: int, *, text: str = "weights", **metrics: float | None) -> Path:
    """Write a checkpoint of one file with a real manifest."""
    folder = scene.run.checkpoints / f"step-{step:08d}"
    folder.mkdir(parents=True, exist_ok=True)
    files = {}
    for name in ("trainer.pt", "model.pt"):
        (folder / name).write_text(f"{text} {name} {step}")
        content = (folder / name).read_bytes()
        files[name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    named = {name.replace("_", "/", 1): value for name, value in metrics.items()}
    manifest = {"format": 1, "step": step, "created": 1e9 + step, "world_size": 2, "metrics": named, "files": files}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def models(scene: Scene) -> dict[str, LoggedModel]:
    """Return the logged models by name; each name occurs once."""
    found = scene.client.search_logged_models([scene.entity.info.experiment_id])
    assert len({model.name for model in found}) == len(found)
    return {model.name: model for model in found}


def metrics(model: LoggedModel) -> dict[str, tuple[int, float]]:
    return {metric.key: (metric.step, metric.value) for metric in model.metrics or ()}


def history(scene: Scene, key: str) -> list[tuple[int, float]]:
    return sorted((point.step, point.value) for point in scene.client.get_metric_history(scene.run_id, key))


@pytest.mark.processes
def test_each_checkpoint_is_a_logged_model_with_its_metrics(scene: Scene) -> None:
    scene.log([10, 20], key=ACCURACY)
    folder = save(scene, 10, eval_accuracy=10, eval_loss=0.25)
    live = scene.shipper()
    live.ship_once()
    model = models(scene)["first step-10"]
    assert (model.status, model.source_run_id, model.model_type) == ("READY", scene.run_id, "checkpoint")
    listed = subprocess.run("sha256sum *.pt | sha256sum", shell=True, cwd=folder, check=True, capture_output=True)
    assert model.params == {"step": "10", "path": str(folder), "sha256": listed.stdout.decode().split()[0]}
    assert model.tags["mlflow.model.isExternal"] == "true"
    assert f"folder = '{folder}'\n" in model.tags["mlflow.note.content"]
    assert "hpcdist export first --checkpoint 10" in model.tags["mlflow.note.content"]
    # The run has not logged the loss. It may still do so while it runs.
    assert metrics(model) == {ACCURACY: (10, 10.0)}
    save(scene, 30)
    scene.state(status="finished", ended=2e9)
    live.ship_once()
    assert metrics(models(scene)["first step-10"]) == {ACCURACY: (10, 10.0), "eval/loss": (10, 0.25)}
    assert metrics(models(scene)["first step-30"]) == {}
    # The metrics of the models are the points of the run, not further ones.
    assert history(scene, ACCURACY) == [(10, 10.0), (20, 20.0)]


def test_script_of_the_documentation_finds_the_best_checkpoint(
    scene: Scene, capsys: pytest.CaptureFixture[str]
) -> None:
    scene.log([10, 20], key=ACCURACY)
    save(scene, 10, eval_accuracy=10)
    folder = save(scene, 20, eval_accuracy=20)
    scene.shipper().ship_once()
    # The final model often has the best value, too; it is no checkpoint.
    final = scene.client.create_logged_model(scene.entity.info.experiment_id, "model", scene.run_id)
    scene.client.log_metric(scene.run_id, ACCURACY, 20.0, step=20, model_id=final.model_id)
    _, script = PAGE.read_text().split("```python\n", 1)
    script, _ = script.split("```", 1)
    script = script.replace("sqlite:///runs/mlflow.db", scene.uri).replace('"digits"', '"exp"')
    exec(script, {})
    assert capsys.readouterr().out == f"first step-20 {folder}\n"


def test_models_have_the_values_of_the_run(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """A restart computes other values, which the run does not get."""
    live = scene.shipper()
    steps = [10, 20, 30]
    scene.log(steps, key=ACCURACY)
    live.ship_once()
    scene.state(attempt=2, restarts=1)
    scene.log(steps, key=ACCURACY, attempt=2, offset=0.5)
    for step in steps:
        save(scene, step, eval_accuracy=step + 0.5)
    read, asked = MlflowClient.get_metric_history, []

    def counted(self: MlflowClient, run_id: str, key: str) -> Any:
        asked.append(key)
        return read(self, run_id, key)

    with monkeypatch.context() as patch:
        patch.setattr(MlflowClient, "get_metric_history", counted)
        live.ship_once()
    assert asked == [ACCURACY]
    assert history(scene, ACCURACY) == [(step, float(step)) for step in steps]
    assert [metrics(models(scene)[f"first step-{step}"]) for step in steps] == [
        {ACCURACY: (s, float(s))} for s in steps
    ]


def test_models_of_removed_and_replaced_checkpoints_are_deleted(scene: Scene) -> None:
    live = scene.shipper()
    first = save(scene, 10)
    save(scene, 20)
    live.ship_once()
    replaced = models(scene)["first step-20"].model_id
    shutil.rmtree(first)
    save(scene, 20, text="other weights")
    save(scene, 30)
    live.ship_once()
    found = models(scene)
    assert set(found) == {"first step-20", "first step-30"}
    assert found["first step-20"].model_id != replaced
    shutil.rmtree(scene.run.checkpoints)
    scene.shipper().ship_once()  # another process
    assert models(scene) == {}


@pytest.mark.parametrize("call", ["create_logged_model", "log_batch", "finalize_logged_model", "delete_logged_model"])
def test_a_lost_response_creates_no_second_model(scene: Scene, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    scene.log([10, 20], key=ACCURACY)
    old = save(scene, 10, eval_accuracy=10)
    live = scene.shipper()
    live.ship_once()
    shutil.rmtree(old)
    save(scene, 20, eval_accuracy=20)
    execute = getattr(MlflowClient, call)
    lost: list[str] = []

    def lose_once(*args: Any, **options: Any) -> Any:
        answer = execute(*args, **options)
        if not lost:
            lost.append(call)
            raise ConnectionError("the response is lost")
        return answer

    live.open_run()
    monkeypatch.setattr(MlflowClient, call, lose_once)
    with pytest.raises(TrackingError, match="the response is lost"):
        live.ship_once()
    for shipper in (live, scene.shipper()):
        shipper.ship_once()
    assert lost
    assert {name: (model.status, metrics(model)) for name, model in models(scene).items()} == {
        "first step-20": ("READY", {ACCURACY: (20, 20.0)})
    }
    assert history(scene, ACCURACY) == [(10, 10.0), (20, 20.0)]


def test_model_is_created_once_even_without_the_saved_state(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    scene.log([10], key=ACCURACY)
    save(scene, 10, eval_accuracy=10)
    scene.shipper().ship_once()
    before = models(scene)["first step-10"]

    def forbidden(*_: Any, **__: Any) -> None:
        raise AssertionError("a request about models")

    with monkeypatch.context() as patch:
        patch.setattr(MlflowClient, "search_logged_models", forbidden)
        scene.shipper().ship_once()  # nothing has changed
    (scene.run.journal / "sent-files.json").unlink()
    scene.shipper().ship_once()
    after = models(scene)["first step-10"]
    assert (after.model_id, metrics(after)) == (before.model_id, {ACCURACY: (10, 10.0)})
    scene.client.delete_logged_model(after.model_id)  # by a user
    save(scene, 20)
    scene.shipper().ship_once()
    assert set(models(scene)) == {"first step-20"}


def test_incomplete_damaged_and_linked_checkpoints_are_left_out(scene: Scene, tmp_path: Path) -> None:
    scene.file("checkpoints/step-00000010/model.pt", "no manifest yet")
    for step, content in ((20, "{"), (30, "[]"), (40, '{"step": 40, "files": {"model.pt": 1}, "metrics": {}}')):
        scene.file(f"checkpoints/step-{step:08d}/manifest.json", content)
    scene.file("checkpoints/.tmp-step-00000050-ab/manifest.json", "{}")
    outside = save(scene, 60).rename(tmp_path / "outside")
    (scene.run.checkpoints / "step-00000060").symlink_to(outside)
    save(scene, 70)
    scene.shipper().ship_once()
    assert set(models(scene)) == {"first step-70"}


def test_unreadable_manifest_deletes_no_model_and_is_read_again(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    save(scene, 10)
    live = scene.shipper()
    live.ship_once()
    save(scene, 20)

    def refuse(path: Path) -> dict[str, Any] | None:
        if path.name == "manifest.json":
            raise PermissionError(13, "Permission denied", str(path))
        return read_json(path)

    with monkeypatch.context() as patch:
        patch.setattr(facts, "read_json", refuse)
        live.ship_once()
    assert set(models(scene)) == {"first step-10"}
    live.ship_once()
    assert set(models(scene)) == {"first step-10", "first step-20"}


def test_server_without_model_features_is_skipped(
    scene: Scene, register: Register, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing(*_: Any, **__: Any) -> None:
        raise MlflowException("No such endpoint", error_code=ENDPOINT_NOT_FOUND)

    caplog.set_level(logging.DEBUG)
    for call in ("set_registered_model_alias", "search_logged_models"):
        monkeypatch.setattr(MlflowClient, call, missing)
    run, version = register(0.8)
    move_best(run, NAME, version, CheckpointConfig(monitor=ACCURACY))
    save(scene, 10)
    live = scene.shipper()
    for _ in range(3):
        live.ship_once()
    lines = [record for record in caplog.records if "which this MLflow does not support" in record.message]
    assert [(record.levelname, record.message[:15]) for record in lines] == [
        ("DEBUG", "the alias best "),
        ("DEBUG", "checkpoints are"),
    ]


@pytest.mark.parametrize(("steps", "found"), [((10, 20), {ACCURACY: (20, 20.0)}), ((10,), {})])
def test_final_model_has_the_metrics_of_its_checkpoint(
    scene: Scene, steps: tuple[int, ...], found: dict[str, tuple[int, float]]
) -> None:
    scene.log([10, 20], key=ACCURACY)
    for step in steps:
        save(scene, step, eval_accuracy=step)
    scene.run.model.mkdir()
    (scene.run.model / "MLmodel").write_text("flavors: {}\n")
    scene.state(status="finished", ended=2e9)
    scene.shipper().ship_once()
    model = models(scene)["model"]
    assert metrics(model) == found
    assert f'load_model("runs:/{scene.run_id}/model")' in model.tags["mlflow.note.content"]
    assert history(scene, ACCURACY) == [(10, 10.0), (20, 20.0)], "no further points"
