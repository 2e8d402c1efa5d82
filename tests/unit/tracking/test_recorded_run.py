"""What `hpcdist rerun` reads of a run: its folder, or MLflow alone."""

from __future__ import annotations

import os
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest
from tracking_scene import Scene

from hpcdist.errors import RunFolderError, TrackingError, UserMistake
from hpcdist.host.files import read_json, write_json
from hpcdist.run.records import DatasetRecord, TrainingRecord, write_training
from hpcdist.run.snapshot import CodeState
from hpcdist.tracking.mlflow_client import open_client
from hpcdist.tracking.recorded_run import RecordedRun, find_recorded
from hpcdist.tracking.shipper import sync

CODE = CodeState(cwd="/src/sub", root="/src", git_commit="abc", git_dirty=True, copied=True, num_untracked=0)


@pytest.fixture
def shipped(scene: Scene) -> str:
    """A run with code, data, metrics and an image in MLflow; returns its id."""
    facts = {"host": "n1", "user": "ada", "launcher": "local", "git_commit": "abc", "code": asdict(CODE)}
    write_json(scene.run.environment, {**facts, "image": "img", "image_digest": "sha256:1a"})
    scene.file("code.patch", "+x\n")
    scene.run.new_attempt()
    write_training(scene.run.attempt(1), TrainingRecord(datasets=(DatasetRecord(name="digits", digest="1a2b"),)))
    scene.log(range(1, 4))
    scene.log(range(1, 4), key="train/samples_per_s", attempt=1)
    scene.state(status="finished", ended=9e8, world_size=2)
    sync(scene.run, scene.uri)
    return str((read_json(scene.run.mlflow) or {})["run_id"])


def find(scene: Scene, text: str, tmp_path: Path) -> RecordedRun:
    scratch = tmp_path / "scratch"
    scratch.mkdir(exist_ok=True)
    runs_dir = scene.run.path.parent.parent
    return find_recorded(text, runs_dir, {**os.environ, "MLFLOW_TRACKING_URI": scene.uri}, scratch)


def test_a_run_is_found_by_name_id_and_link(scene: Scene, shipped: str, tmp_path: Path) -> None:
    for text in ("first", shipped, f"http://h:5000/#/experiments/1/runs/{shipped}?workflowType=machine_learning"):
        found = find(scene, text, tmp_path)
        assert found.folder is not None
        assert found.folder.path == scene.run.path
        assert (found.name, found.run_id, found.uri, found.code) == ("first", shipped, "", CODE)
    values = find(scene, "first", tmp_path).values()
    assert values["loss"] == {1: 1.0, 2: 2.0, 3: 3.0}


def test_mlflow_alone_describes_a_run(scene: Scene, shipped: str, tmp_path: Path) -> None:
    elsewhere = find(scene, shipped, tmp_path)
    scene.run.path.rename(tmp_path / "gone")
    found = find(scene, shipped, tmp_path)
    assert (found.folder, found.run_id, found.uri) == (None, shipped, scene.uri)
    assert found.config.read_text() == (tmp_path / "gone" / "config.yaml").read_text()
    for name in ("name", "experiment", "code", "patch", "world_size", "image", "image_digest"):
        assert getattr(found, name) == getattr(elsewhere, name), name
    assert found.environment["launcher"] == "local"
    assert [(one.name, one.split, one.digest) for one in found.datasets] == [("digits", "train", "1a2b")]
    assert found.values() == {"loss": {1: 1.0, 2: 2.0, 3: 3.0}}, "without measured values"


def test_the_folder_that_mlflow_names_is_used(scene: Scene, shipped: str, tmp_path: Path) -> None:
    env = {**os.environ, "MLFLOW_TRACKING_URI": scene.uri}
    found = find_recorded(shipped, tmp_path / "other-runs", env, tmp_path)
    assert found.folder is not None
    write_json(scene.run.mlflow, {"run_id": "0" * 32})
    found = find_recorded(shipped, tmp_path / "other-runs", env, tmp_path)
    assert found.folder is None, "the folder is that of another run now"


def test_a_run_that_is_not_there_or_not_complete_is_an_error(scene: Scene, shipped: str, tmp_path: Path) -> None:
    with pytest.raises(UserMistake, match=f"no run {'0' * 32} in MLflow at sqlite:.*: name its store with --tracking"):
        find(scene, "0" * 32, tmp_path)
    with pytest.raises(RunFolderError, match="no run 'none' under "):
        find(scene, "none", tmp_path)
    client = open_client(scene.uri)
    bare = client.create_run(client.create_experiment("other")).info.run_id
    with pytest.raises(UserMistake, match=r"has no artifact config\.yaml: it was not started by hpcdist"):
        find(scene, bare, tmp_path)
    client.log_text(bare, "experiment: exp\n", "config.yaml")
    client.log_text(bare, "[", "environment.json")
    with pytest.raises(UserMistake, match=r"the artifact environment\.json of the run in MLflow is damaged"):
        find(scene, bare, tmp_path)
    client.log_text(bare, '{"code": {"cwd": "/a/../b", "root": "/a", "copied": true}}', "environment.json")
    with pytest.raises(RunFolderError, match=r"environment\.json is damaged"):
        find(scene, bare, tmp_path)


def test_a_failure_of_mlflow_is_one_line(scene: Scene, shipped: str, tmp_path: Path) -> None:
    found = find_recorded(shipped, tmp_path / "other-runs", {"MLFLOW_TRACKING_URI": scene.uri}, tmp_path)
    assert found.folder is not None
    write_json(scene.run.mlflow, {"run_id": "0" * 32})
    client = open_client(scene.uri)
    artifacts = Path(str(client.get_run(shipped).info.artifact_uri).removeprefix("file://"))
    shutil.rmtree(artifacts)
    with pytest.raises((UserMistake, TrackingError), match=r"has no artifact config\.yaml|MLflow at sqlite"):
        find_recorded(shipped, tmp_path / "other-runs", {"MLFLOW_TRACKING_URI": scene.uri}, tmp_path)
