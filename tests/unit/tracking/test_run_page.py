"""Description, datasets, primary metric, name, parameters and tags of a run in MLflow."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import INTERNAL_ERROR, PERMISSION_DENIED
from tracking_scene import CONFIG, Scene

from hpcdist.config.launch_schema import TrackingConfig
from hpcdist.config.loading import load_config
from hpcdist.config.schema import Config, TrainerConfig, trainer_sections
from hpcdist.config.tree import flat
from hpcdist.config.written import StoredConfig, flat_values
from hpcdist.errors import TrackingError
from hpcdist.host.files import write_json
from hpcdist.run.folder import RunDir
from hpcdist.run.records import PLAIN_SCRIPT, DatasetRecord, Origin, TrainingRecord, write_origin, write_training
from hpcdist.tracking import pages
from hpcdist.tracking.journal import is_allowed
from hpcdist.tracking.pages import MARK, NOTE_TAG
from hpcdist.tracking.run_metadata import MAX_RUN_NAME, fixed_tags, names, params, run_name

PRIMARY = "mlflow.experiment.primaryMetric.name"
DATA = (
    DatasetRecord(name="digits", num_samples=9, digest="ab", source="/data"),
    DatasetRecord(name="digits", split="test"),
)


def note(scene: Scene) -> str:
    return str(scene.entity.data.tags[NOTE_TAG])


def beat(scene: Scene, step: int, **metrics: float) -> None:
    attempt = scene.run.attempt(1)
    attempt.path.mkdir(exist_ok=True)
    attempt.beat(0).write_text(json.dumps({"time": 1.0, "step": step, "metrics": metrics}))


def evaluate(scene: Scene) -> None:
    folder = scene.run.checkpoints / "step-00000010"
    folder.mkdir()
    write_json(folder / "manifest.json", {"created": 1.0, "metrics": {"eval/accuracy": 0.75}})


def experiment_tags(scene: Scene) -> dict[str, str]:
    return dict(scene.client.get_experiment(scene.entity.info.experiment_id).tags)


def test_description_follows_the_state_and_is_final_at_the_end(scene: Scene) -> None:
    beat(scene, 10)
    shipper = scene.shipper()
    shipper.ship_once()
    assert note(scene).startswith(f"{MARK}\n\n**running**\n")
    assert "step 10;" in note(scene)
    beat(scene, 20)
    shipper.ship_once()
    assert "step 10;" in note(scene), "at most one change per minute"
    scene.state(status="finished", reason="trained 20 steps", ended=2.0)
    shipper.ship_once()
    assert "**finished**: trained 20 steps" in note(scene)


def test_live_description_changes_after_a_minute(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "INTERVAL_S", 0.0)
    shipper = scene.shipper()
    for step in (10, 20):
        beat(scene, step)
        shipper.ship_once()
        assert f"step {step};" in note(scene)


def test_text_of_the_user_is_kept(scene: Scene) -> None:
    scene.shipper().ship_once()
    run_id = scene.entity.info.run_id
    scene.client.set_tag(run_id, NOTE_TAG, f"see the *wiki*\n{MARK}\n\nold")
    scene.state(status="stopped", reason="why")
    scene.shipper().ship_once()
    assert note(scene).startswith(f"see the *wiki*\n\n{MARK}\n\n**stopped**: why")
    scene.client.set_tag(run_id, NOTE_TAG, "only my text" + "x" * 7900)
    scene.state(status="running", reason="")
    scene.shipper().ship_once()
    assert note(scene).startswith("only my textxxx")
    assert MARK in note(scene)
    assert len(note(scene)) == 8000


def test_configured_description_precedes_the_generated_one(scene: Scene) -> None:
    tracking = CONFIG["tracking"] | {"tags": {NOTE_TAG: "see the wiki"}}
    scene.write_config(CONFIG | {"tracking": tracking})
    scene.shipper().ship_once()
    assert note(scene).startswith(f"see the wiki\n\n{MARK}\n\n**running**")
    scene.state(status="finished")
    scene.shipper().ship_once()
    assert note(scene).startswith(f"see the wiki\n\n{MARK}\n\n**finished**")


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
    found = sorted(scene.entity.inputs.dataset_inputs, key=lambda item: str(item.tags[0].value))
    assert [(item.dataset.name, [(tag.key, tag.value) for tag in item.tags]) for item in found] == [
        ("digits", [("mlflow.data.context", "test")]),
        ("digits", [("mlflow.data.context", "train")]),
    ]
    train = found[1].dataset
    assert (train.digest, json.loads(train.source), json.loads(train.profile)) == (
        "ab", {"uri": "/data"}, {"num_rows": 9}
    )  # fmt: skip
    assert len(found[0].dataset.digest) == 8, "MLflow requires a digest"


def test_splits_with_one_digest_are_inputs_each(scene: Scene) -> None:
    write_training(
        scene.run.new_attempt(),
        TrainingRecord(
            datasets=tuple(DatasetRecord(name="clicks", digest="7e8e", split=split) for split in ("train", "test"))
        ),
    )
    scene.shipper().ship_once()
    found = {item.dataset.digest: item.tags[0].value for item in scene.entity.inputs.dataset_inputs}
    assert found == {"7e8e-train": "train", "7e8e-test": "test"}


def test_primary_metric_is_set_once_it_is_measured(scene: Scene) -> None:
    scene.shipper().ship_once()
    assert PRIMARY not in experiment_tags(scene)
    evaluate(scene)
    scene.state(status="finished")
    scene.shipper().ship_once()
    tags = experiment_tags(scene)
    assert (tags[PRIMARY], tags["mlflow.experiment.primaryMetric.greaterIsBetter"]) == ("eval/accuracy", "True")


def test_primary_metric_of_the_user_is_kept(scene: Scene) -> None:
    scene.shipper().ship_once()
    scene.client.set_experiment_tag(scene.entity.info.experiment_id, PRIMARY, "mine")
    evaluate(scene)
    scene.state(status="finished")
    scene.shipper().ship_once()
    assert experiment_tags(scene)[PRIMARY] == "mine"


def test_primary_metric_needs_no_permission_for_the_rest(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(*_: Any) -> None:
        raise MlflowException("not yours", error_code=PERMISSION_DENIED)

    def fail(*_: Any) -> None:
        raise MlflowException("broken", error_code=INTERNAL_ERROR)

    evaluate(scene)
    shipper = scene.shipper()
    client = shipper.open_run().client
    client.set_experiment_tag = fail  # type: ignore[method-assign]
    with pytest.raises(TrackingError, match="broken"):
        shipper.ship_once()
    client.set_experiment_tag = refuse  # type: ignore[method-assign]
    shipper.ship_once()
    assert "the primary metric of the experiment is not set: " in caplog.text
    assert scene.entity.data.tags["hpcdist.state"] == "running"


def test_unreadable_attempts_are_reported(scene: Scene) -> None:
    (scene.run.path / "attempts").rmdir()
    with pytest.raises(TrackingError, match="attempts is missing: restore it"):
        scene.shipper().ship_once()


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        ("mine", {"optim.lr": 0.1, "seed": 1}, "mine"),
        ("ddp-20261122-121700-1a2b", {"optim.lr": 0.1, "seed": 0}, "lr=0.1 (ddp-20261122-121700-1a2b)"),
        ("ddp-20261122-121700-1a2b", {"launch.num_ranks": 2, "tracking.uri": "x"}, "ddp-20261122-121700-1a2b"),
        (
            "ddp-20261122-121700-1a2b",
            {"optim.lr": 0.1, "seed": 5, "data.lr": 1, "data.a": 1, "data.b": 2, "data.c": 3},
            "optim.lr=0.1 seed=5 data.lr=1 a=1 +2 (ddp-20261122-121700-1a2b)",
        ),
    ],
)
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


def test_long_run_name_is_cut(scene: Scene) -> None:
    run = RunDir.create(scene.run.path.with_name("ddp-20261122-121700-1a2b"))
    write_origin(run, Origin(config="x", values={"params.a": 1}))
    found = run_name(run, StoredConfig(values={"params.a": "y" * 500}))
    assert len(found) == MAX_RUN_NAME
    assert found.endswith("y (ddp-20261122-121700-1a2b)")


# --- Parameters and tags of a run.


@pytest.mark.parametrize(
    ("config", "used"),
    [
        (["ddp_digits"], {"model", "data", "optim", "schedule", "precision"}),
        (["rl_cartpole"], {"rl", "optim", "schedule"}),
    ],
)
def test_params_contain_only_sections_that_the_trainer_uses(config: list[str], used: set[str], tmp_path: Path) -> None:
    loaded = load_config(config[0], config[1:])
    stored = StoredConfig(config=loaded, values=flat_values(loaded))
    found = {key.partition(".")[0] for key in params(RunDir(tmp_path), stored)}
    trained = {*trainer_sections(), "model", "data", "optim", "schedule", "precision"}
    assert found & trained == used
    assert {"seed", "trainer", "stop", "checkpoint", "launch"} <= found


def test_tags_contain_the_image_of_the_container(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert not [tag for tag in fixed_tags(run, StoredConfig()) if "image" in tag or "container" in tag]
    facts = {"runtime": "podman", "image": "hpcdist:0.1.0", "image_digest": "sha256:ab", "torch": "2.15", "cuda": None}
    write_json(run.container, facts)
    found = {key: text for key, text in fixed_tags(run, StoredConfig()).items() if "image" in key or "container" in key}
    assert found == {
        "hpcdist.image": "hpcdist:0.1.0",
        "hpcdist.image_digest": "sha256:ab",
        "hpcdist.container.runtime": "podman",
        "hpcdist.container.torch": "2.15",
    }


def test_cores_of_the_machine_that_created_the_run_are_not_taken_for_those_of_the_run(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    write_json(run.environment, {"cores": 2, "host": "login1"})
    found = {
        key: text for key, text in fixed_tags(run, StoredConfig()).items() if "cores" in key or key == "hpcdist.host"
    }
    assert found == {"hpcdist.host": "login1", "hpcdist.host_cores": "2"}


def test_cleaned_params_and_tags_stay_unique(tmp_path: Path) -> None:
    long = "k" * 249
    env, own = {"A%": "1", "A#": "2", "A_": "3"}, {"owner%": "x", "owner#": "y", "owner_": "z"}
    config = StoredConfig(
        config=Config(trainer=TrainerConfig(target="mine:train"), tracking=TrackingConfig(tags=own)),
        values=flat({"launch": {"env": env}, "tracking": {"tags": own}}),
    )
    found = params(RunDir(tmp_path), config)
    assert sorted(text for key, text in found.items() if key.startswith("launch.env.")) == ["1", "2", "3"]
    run = RunDir(tmp_path)
    write_json(run.environment, {long: "1", f"{long}2": "2"})
    tags = fixed_tags(run, config)
    assert sorted(text for key, text in tags.items() if key.startswith("owner")) == ["x", "y", "z"]
    assert sorted(text for key, text in tags.items() if key.startswith("hpcdist.kkk")) == ["1", "2"]
    assert all(is_allowed(key) for key in {**found, **tags})
    changed = {key for key, clean in names(RunDir(tmp_path), config) if key != clean}
    assert changed >= {"launch.env.A%", "launch.env.A#", "owner%", "owner#", "tracking.tags.owner%"}
