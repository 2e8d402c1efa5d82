"""Kept checkpoints as logged models in a real MLflow database."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from mlflow.entities import LoggedModel
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import ENDPOINT_NOT_FOUND
from tracking_scene import Scene

from hpcdist.errors import TrackingError
from hpcdist.tracking import artifacts, delivery

ACCURACY = "eval/accuracy"


@pytest.fixture(autouse=True)
def _every_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look for checkpoints in each pass, also of a running run."""
    monkeypatch.setattr(delivery, "CHECKPOINTS_INTERVAL_S", 0.0)


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
    model = models(scene)["step-00000010"]
    assert (model.status, model.source_run_id, model.model_type) == ("READY", scene.run_id, "checkpoint")
    listed = subprocess.run("sha256sum *.pt | sha256sum", shell=True, cwd=folder, check=True, capture_output=True)
    sha, size = listed.stdout.decode().split()[0], sum(path.stat().st_size for path in folder.glob("*.pt"))
    assert model.params == {
        "step": "10",
        "path": str(folder),
        "sha256": sha,
        "bytes": str(size),
        "world_size": "2",
    }
    assert model.tags["mlflow.model.isExternal"] == "true"
    assert f"folder = '{folder}'\n" in model.tags["mlflow.note.content"]
    assert "hpcdist export first --checkpoint 10" in model.tags["mlflow.note.content"]
    # The run has not logged the loss. It may still do so while it runs.
    assert metrics(model) == {ACCURACY: (10, 10.0)}
    save(scene, 30)
    scene.state(status="finished", ended=2e9)
    live.ship_once()
    assert metrics(models(scene)["step-00000010"]) == {ACCURACY: (10, 10.0), "eval/loss": (10, 0.25)}
    assert metrics(models(scene)["step-00000030"]) == {}
    # The metrics of the models are the points of the run, not further ones.
    assert history(scene, ACCURACY) == [(10, 10.0), (20, 20.0)]
    best = scene.client.search_logged_models(
        [scene.entity.info.experiment_id], order_by=[{"field_name": f"metrics.{ACCURACY}", "ascending": False}]
    )
    assert best[0].name == "step-00000010"


def test_metrics_that_are_added_later_are_logged(scene: Scene) -> None:
    live = scene.shipper()
    save(scene, 10)
    live.ship_once()
    scene.log([10], key=ACCURACY)
    save(scene, 10, eval_accuracy=10, eval_nothing=None)
    live.ship_once()
    assert metrics(models(scene)["step-00000010"]) == {ACCURACY: (10, 10.0)}
    assert history(scene, ACCURACY) == [(10, 10.0)]


def test_value_of_the_run_is_kept_if_a_restart_computes_another(scene: Scene) -> None:
    live = scene.shipper()
    scene.log([10], key=ACCURACY)
    live.ship_once()
    scene.state(attempt=2, restarts=1)
    scene.log([10], key=ACCURACY, attempt=2, offset=0.5)
    save(scene, 10, eval_accuracy=10.5)
    live.ship_once()
    assert history(scene, ACCURACY) == [(10, 10.0)]
    assert metrics(models(scene)["step-00000010"]) == {ACCURACY: (10, 10.0)}


def test_models_of_removed_and_replaced_checkpoints_are_deleted(scene: Scene) -> None:
    live = scene.shipper()
    first = save(scene, 10)
    save(scene, 20)
    live.ship_once()
    replaced = models(scene)["step-00000020"].model_id
    shutil.rmtree(first)
    save(scene, 20, text="other weights")
    save(scene, 30)
    live.ship_once()
    found = models(scene)
    assert set(found) == {"step-00000020", "step-00000030"}
    assert found["step-00000020"].model_id != replaced
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
        "step-00000020": ("READY", {ACCURACY: (20, 20.0)})
    }
    assert history(scene, ACCURACY) == [(10, 10.0), (20, 20.0)]


def test_nothing_is_created_twice_without_the_saved_state(scene: Scene) -> None:
    scene.log([10], key=ACCURACY)
    save(scene, 10, eval_accuracy=10)
    scene.shipper().ship_once()
    before = models(scene)["step-00000010"]
    (scene.run.journal / "sent-files.json").unlink()
    scene.shipper().ship_once()
    after = models(scene)["step-00000010"]
    assert (after.model_id, len(after.metrics or ())) == (before.model_id, 1)


def test_model_that_a_user_deletes_is_not_created_again(scene: Scene) -> None:
    save(scene, 10)
    scene.shipper().ship_once()
    scene.client.delete_logged_model(models(scene)["step-00000010"].model_id)
    save(scene, 20)
    scene.shipper().ship_once()
    assert set(models(scene)) == {"step-00000020"}


def test_unchanged_checkpoints_cause_no_requests(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    save(scene, 10)
    scene.shipper().ship_once()

    def forbidden(*_: Any, **__: Any) -> None:
        raise AssertionError("a request about models")

    monkeypatch.setattr(MlflowClient, "search_logged_models", forbidden)
    scene.shipper().ship_once()


def test_incomplete_damaged_and_linked_checkpoints_are_left_out(scene: Scene, tmp_path: Path) -> None:
    scene.file("checkpoints/step-00000010/model.pt", "no manifest yet")
    for step, content in ((20, "{"), (30, "[]"), (40, '{"step": 40, "files": {"model.pt": 1}, "metrics": {}}')):
        scene.file(f"checkpoints/step-{step:08d}/manifest.json", content)
    scene.file("checkpoints/.tmp-step-00000050-ab/manifest.json", "{}")
    outside = save(scene, 60).rename(tmp_path / "outside")
    (scene.run.checkpoints / "step-00000060").symlink_to(outside)
    save(scene, 70)
    scene.shipper().ship_once()
    assert set(models(scene)) == {"step-00000070"}


def test_unreadable_manifest_is_an_error_and_deletes_no_model(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    save(scene, 10)
    live = scene.shipper()
    live.ship_once()
    save(scene, 20)

    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(artifacts, "read_json_value", refuse)
        with pytest.raises(TrackingError, match=r"a file of first cannot be uploaded: .*Permission denied"):
            live.ship_once()
    assert set(models(scene)) == {"step-00000010"}
    live.ship_once()
    assert set(models(scene)) == {"step-00000010", "step-00000020"}


def test_server_without_logged_models_is_skipped_with_a_debug_line(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing(*_: Any, **__: Any) -> None:
        raise MlflowException("No such endpoint", error_code=ENDPOINT_NOT_FOUND)

    monkeypatch.setattr(MlflowClient, "search_logged_models", missing)
    save(scene, 10)
    caplog.set_level(logging.DEBUG)
    live = scene.shipper()
    for _ in range(3):
        live.ship_once()
    lines = [record for record in caplog.records if "are not logged as models" in record.message]
    assert [record.levelname for record in lines] == ["DEBUG"]


@pytest.mark.parametrize(("steps", "found"), [((10, 20), {ACCURACY: (20, 20.0)}), ((10,), {}), ((), {})])
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
