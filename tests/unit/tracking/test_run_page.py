"""Description, datasets, name, parameters and tags of a run in MLflow."""

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from tracking_scene import CONFIG, Scene

from hpcdist.config.schema import Config, TrainerConfig
from hpcdist.config.written import StoredConfig
from hpcdist.errors import RunFolderError, UserMistake
from hpcdist.host.files import read_json, write_json
from hpcdist.run.folder import RunDir
from hpcdist.run.records import PLAIN_SCRIPT, DatasetRecord, Origin, TrainingRecord, write_origin, write_training
from hpcdist.run.snapshot import CodeState
from hpcdist.tracking import pages
from hpcdist.tracking.mlflow_client import open_client
from hpcdist.tracking.pages import MARK, NOTE_TAG, run_name
from hpcdist.tracking.recorded_run import RecordedRun, find_recorded
from hpcdist.tracking.sync_runs import sync

DATA = (
    DatasetRecord(name="digits", num_samples=9, digest="ab", source="/data"),
    DatasetRecord(name="digits", split="test"),
    *(DatasetRecord(name="clicks", digest="7e8e", split=split) for split in ("train", "test")),
)


def note(scene: Scene) -> str:
    return str(scene.entity.data.tags[NOTE_TAG])


def beat(scene: Scene, step: int, **metrics: float) -> None:
    attempt = scene.run.attempt(1)
    attempt.path.mkdir(exist_ok=True)
    attempt.beat(0).write_text(json.dumps({"time": 1.0, "step": step, "metrics": metrics}))


def test_description_follows_the_state_and_is_final_at_the_end(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    beat(scene, 10)
    shipper = scene.shipper()
    shipper.ship_once()
    assert note(scene).startswith(f"{MARK}\n\n**running**\n")
    assert "step 10;" in note(scene)
    beat(scene, 20)
    shipper.ship_once()
    assert "step 10;" in note(scene), "at most one change per minute"
    monkeypatch.setattr(shipper._page, "_next", 0.0)
    shipper.ship_once()
    assert "step 20;" in note(scene)
    scene.state(status="finished", reason="trained 20 steps", ended=2.0)
    shipper.ship_once()
    assert "**finished**: trained 20 steps" in note(scene)


def test_text_of_the_user_is_kept(scene: Scene) -> None:
    scene.write_config(CONFIG | {"tracking": CONFIG["tracking"] | {"tags": {NOTE_TAG: "see the wiki"}}})
    scene.shipper().ship_once()
    assert note(scene).startswith(f"see the wiki\n\n{MARK}\n\n**running**")
    run_id = scene.entity.info.run_id
    scene.client.set_tag(run_id, NOTE_TAG, f"see the *wiki*, api_key=mine\n{MARK}\n\nold")
    scene.state(status="stopped", reason="why")
    scene.shipper().ship_once()
    assert note(scene).startswith(f"see the *wiki*, api_key=mine\n\n{MARK}\n\n**stopped**: why")
    scene.client.set_tag(run_id, NOTE_TAG, "only my text" + "x" * 7900)
    scene.state(status="running", reason="")
    scene.shipper().ship_once()
    assert note(scene).startswith("only my textxxx")
    assert MARK in note(scene)
    assert len(note(scene)) == 8000


def test_datasets_are_inputs_once(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "INTERVAL_S", 0.0)
    attempt = scene.run.new_attempt()
    shipper = scene.shipper()
    shipper.ship_once()
    assert scene.entity.inputs.dataset_inputs == [], "none is declared yet"
    write_training(attempt, TrainingRecord(datasets=DATA))
    for _ in range(2):
        shipper.ship_once()
    scene.shipper().ship_once()
    found = {(item.dataset.name, item.tags[0].value): item.dataset for item in scene.entity.inputs.dataset_inputs}
    assert len(scene.entity.inputs.dataset_inputs) == len(found) == 4
    train = found["digits", "train"]
    assert (train.digest, json.loads(train.source), json.loads(train.profile)) == (
        "ab", {"uri": "/data"}, {"num_rows": 9}
    )  # fmt: skip
    assert len(found["digits", "test"].digest) == 8, "MLflow requires a digest"
    splits = [found["clicks", split].digest for split in ("train", "test")]
    assert splits == ["7e8e-train", "7e8e-test"], "MLflow takes equal digests for one dataset"


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        ("mine", {"optim.lr": 0.1, "seed": 1}, "mine"),
        ("ddp-20261122-121700-1a2b", {"optim.lr": 0.1, "seed": 0}, "lr=0.1 (ddp-20261122-121700-1a2b)"),
        ("ddp-20261122-121700-1a2b", {"optim.lr": 0.1, "seed": 5, "data.lr": 1, "data.a": 1, "data.b": 2, "data.c": 3},
         "optim.lr=0.1 seed=5 data.lr=1 a=1 +2 (ddp-20261122-121700-1a2b)"),
        ("ddp-20261122-121700-1a2b", {"optim.lr": 0.001, "seed": 0, "params.a": "y" * 500},
         f"a={'y' * 221} (ddp-20261122-121700-1a2b)"),
    ],
)  # fmt: skip
def test_generated_run_name_says_what_differs(scene: Scene, name: str, values: dict[str, Any], expected: str) -> None:
    run = RunDir.create(scene.run.path.with_name(name))
    write_origin(run, Origin(config="ddp_digits", values={"optim.lr": 0.001, "seed": 0}))
    assert run_name(run, StoredConfig(values=values)) == expected


def test_run_of_a_script_without_a_config_is_named_by_its_arguments(scene: Scene) -> None:
    run = RunDir.create(scene.run.path.with_name("train-20261122-121700-1a2b"))
    write_origin(run, Origin(config=PLAIN_SCRIPT, values={"experiment": "hpcdist", "trainer.script": ["train.py"]}))
    script = ["/home/train.py", "--lr", "0.1", "--api-key", "s3cret"]
    config = Config(experiment="train", trainer=TrainerConfig(script=script))
    found = run_name(run, StoredConfig(config=config, values={"experiment": "train", "trainer.script": script}))
    assert found == "lr=0.1 api_key=*** (train-20261122-121700-1a2b)"


# --- What `hpcdist rerun` reads of a run: its folder, or MLflow alone.


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
    with pytest.raises(UserMistake, match=r"environment\.json of run .* in MLflow is damaged"):
        find(scene, bare, tmp_path)
    client.log_text(bare, '{"code": {"cwd": "/a/../b", "root": "/a", "copied": true}}', "environment.json")
    with pytest.raises(RunFolderError, match=r"environment\.json is damaged"):
        find(scene, bare, tmp_path)
