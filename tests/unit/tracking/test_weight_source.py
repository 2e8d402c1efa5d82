"""What `model.init_from` names, found before the run exists."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from safetensors.torch import save_file
from tracking_scene import CONFIG, Scene

from hpcdist.checkpoint.initial_weights import read_weights
from hpcdist.checkpoint.store import CheckpointStore, Snapshot
from hpcdist.config.loading import load_config
from hpcdist.config.schema import Config
from hpcdist.config.training_schema import ModelConfig
from hpcdist.errors import ConfigError, TrackingError
from hpcdist.run.checkpoint_files import PROGRAM_FILE
from hpcdist.run.folder import RunDir
from hpcdist.run.weight_files import SharedWeights, WeightOrigin, WeightSource, read_origin_of_weights
from hpcdist.tracking import mlflow_client
from hpcdist.tracking.run_tags import fixed_tags, read_config
from hpcdist.tracking.weight_source import MlflowModel, find_weights


def find(root: Path, source: str, uri: str = "") -> WeightSource:
    config = Config(runs_dir=str(root / "runs"), model=ModelConfig(init_from=source))
    found = find_weights(replace(config, tracking=replace(config.tracking, uri=uri)), {})
    assert found is not None
    return found


def origin_of(source: WeightSource, root: Path) -> WeightOrigin:
    """Copy the weights to a new run, and return their origin."""
    run = RunDir(root / "runs" / "exp" / "second")
    run.path.mkdir(parents=True)
    source.copy_to(run.init_from)
    origin = read_origin_of_weights(run)
    assert origin is not None
    return origin


def test_cells_of_a_sweep_start_from_the_same_weights(tmp_path: Path) -> None:
    path = tmp_path / "old.pt"
    torch.save({"weight": torch.ones(2)}, path)
    shared = SharedWeights(find(tmp_path, str(path)))
    shared.copy_to(tmp_path / "first")
    torch.save({"weight": torch.zeros(2)}, path)
    shared.copy_to(tmp_path / "second")
    assert read_weights(tmp_path / "second")["weight"].tolist() == [1, 1]
    shutil.rmtree(tmp_path / "first")
    with pytest.raises(ConfigError, match=r"model\.init_from: .*first cannot be copied to .*third"):
        shared.copy_to(tmp_path / "third")


def add_checkpoint(run: RunDir, step: int, accuracy: float | None) -> Path:
    metrics = {} if accuracy is None else {"eval/accuracy": accuracy}
    model = {"weight": torch.full((2,), float(step))}
    return CheckpointStore(run.checkpoints).add(
        Snapshot(step=step, model=model, trainer={}, rank_states=[None], metrics=metrics)
    )


def test_without_the_key_nothing_is_searched() -> None:
    assert find_weights(Config(), {}) is None


@pytest.mark.parametrize(("accuracies", "step"), [((0.5, 0.9, 0.7), 2), ((None, None, None), 3)])
def test_run_stands_for_the_checkpoint_that_export_chooses(
    scene: Scene, tmp_path: Path, accuracies: tuple[float | None, ...], step: int
) -> None:
    for number, accuracy in enumerate(accuracies, 1):
        add_checkpoint(scene.run, number, accuracy)
    origin = origin_of(find(tmp_path, "first"), tmp_path)
    assert (origin.step, origin.found) == (step, f"run exp/first, checkpoint of step {step}")
    copy = read_weights(tmp_path / "runs" / "exp" / "second" / "init_from")
    assert copy["weight"].tolist() == [step, step]


def test_tokenizer_of_a_run_comes_with_its_weights(scene: Scene, tmp_path: Path) -> None:
    folder = add_checkpoint(scene.run, 4, 0.5)
    tokenizer = scene.run.artifacts / "tokenizer"
    tokenizer.mkdir(parents=True)
    contents = {"tokenizer.json": "{}", "tokenizer_config.json": '{"eos_token": "<end>"}'}
    for name, content in contents.items():
        (tokenizer / name).write_text(content)
    for number, source in enumerate(["first", str(folder)]):
        copy = tmp_path / f"copy{number}"
        find(tmp_path, source).copy_to(copy)
        assert {path.name for path in copy.iterdir()} == {"model.pt", "source.json", *contents}
        assert {name: (copy / name).read_text() for name in contents} == contents
        assert read_weights(copy)["weight"].tolist() == [4, 4]
    shutil.copytree(folder, tmp_path / "elsewhere" / "copied")  # not in a run
    find(tmp_path, str(tmp_path / "elsewhere" / "copied")).copy_to(tmp_path / "copy")
    assert {path.name for path in (tmp_path / "copy").iterdir()} == {"model.pt", "source.json"}


def test_origin_of_the_weights_becomes_tags_in_mlflow(scene: Scene, tmp_path: Path) -> None:
    add_checkpoint(scene.run, 4, 0.5)
    origin = origin_of(find(tmp_path, "first"), tmp_path)
    run = RunDir(tmp_path / "runs" / "exp" / "second")
    run.config.write_text(yaml.safe_dump(CONFIG))
    tags = fixed_tags(run, read_config(run))
    assert {key: value for key, value in tags.items() if key.startswith("hpcdist.init_from.")} == {
        "hpcdist.init_from.source": "first",
        "hpcdist.init_from.found": "run exp/first, checkpoint of step 4",
        "hpcdist.init_from.step": "4",
        "hpcdist.init_from.sha256": origin.sha256,
    }


def test_damaged_files_of_a_checkpoint_are_errors(scene: Scene, tmp_path: Path) -> None:
    folder = add_checkpoint(scene.run, 4, 0.5)
    data = bytearray((folder / "model.pt").read_bytes())
    data[-1] ^= 1
    (folder / "model.pt").write_bytes(data)
    message = rf"^model.init_from: {folder}/model.pt has changed since it was written \(its SHA-256 differs\): choose "
    with pytest.raises(ConfigError, match=message):
        find(tmp_path, "first").copy_to(tmp_path / "copy")
    (folder / "manifest.json").write_text(json.dumps({"format": 1, "step": 4}))
    with pytest.raises(ConfigError, match=rf"^model.init_from: {folder}/manifest.json cannot be read \(KeyError: "):
        find(tmp_path, str(folder))
    shutil.rmtree(folder)
    with pytest.raises(ConfigError, match=r"^model.init_from: run first has no checkpoint: choose another run$"):
        find(tmp_path, "first")
    (scene.run.checkpoints / "mnist.pt").touch()
    message = r"^model.init_from: run first has no checkpoint: its script has saved mnist.pt in /.*/checkpoints: give "
    with pytest.raises(ConfigError, match=message):
        find(tmp_path, "first")


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("a.ckpt", b"", r"a.ckpt ends with '.ckpt': expected a file with .pt, .pth, .safetensors"),
        ("a", b"", r"a ends with 'no ending': expected a file with .pt"),
        ("a.pth", None, r"a.pth cannot be read: No such file or directory"),
        ("a.pt", b"<html>not found", r"a.pt is not a file of torch.save: was it downloaded completely\?"),
        ("a.safetensors", b"\xff" * 8 + b"{", r"a.safetensors is not a safetensors file: was it downloaded"),
    ],
)
def test_unusable_file_is_an_error(tmp_path: Path, name: str, content: bytes | None, problem: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=rf"^model.init_from: {tmp_path}/{problem}"):
        find(tmp_path, str(tmp_path / name))


def test_unknown_run_is_an_error_with_the_nearest_name(scene: Scene, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^model.init_from: no run 'frist' under .*: did you mean 'first'\?$"):
        find(tmp_path, "frist")


def test_copy_that_cannot_be_written_is_an_error(scene: Scene, tmp_path: Path) -> None:
    add_checkpoint(scene.run, 4, 0.5)
    message = r"^model.init_from: first cannot be copied to /.*/no/folder: No such file or directory$"
    with pytest.raises(ConfigError, match=message):
        find(tmp_path, "first").copy_to(tmp_path / "no" / "folder")


# --- Models in MLflow


def register(scene: Scene, folder: Path) -> None:
    """Register a folder as version 1 of `digits` with the alias `best`."""
    scene.shipper().open_run()
    scene.client.create_registered_model("digits")
    scene.client.create_model_version("digits", str(folder), run_id=scene.run_id)
    scene.client.set_registered_model_alias("digits", "best", "1")


@pytest.mark.parametrize("source", ["models:/digits@best", "models:/digits/1"])
def test_registered_model_is_copied_once_and_named_by_version(scene: Scene, tmp_path: Path, source: str) -> None:
    model = torch.nn.Linear(3, 2)
    folder = tmp_path / "registered" / "data" / "exported"
    folder.mkdir(parents=True)
    torch.export.save(torch.export.export(model, (torch.ones(2, 3),)), folder / PROGRAM_FILE)
    register(scene, tmp_path / "registered")
    found = find(tmp_path, source, scene.uri)
    scene.client.set_registered_model_alias("digits", "other", "1")
    origin = origin_of(found, tmp_path)
    assert origin.found == f"model digits, version 1, of MLflow run {scene.run_id}"
    copy = tmp_path / "runs" / "exp" / "second" / "init_from"
    assert torch.equal(read_weights(copy)["weight"], model.weight)
    assert sorted(path.name for path in copy.parent.iterdir()) == ["init_from"]


def test_registered_model_brings_the_tokenizer_of_its_run(scene: Scene, tmp_path: Path) -> None:
    register(scene, add_checkpoint(scene.run, 4, 0.5))
    for name in ("tokenizer.json", "tokenizer_config.json", "other.json"):
        scene.client.log_text(scene.run_id, name, f"tokenizer/{name}")
    origin_of(find(tmp_path, "models:/digits@best", scene.uri), tmp_path)
    copy = tmp_path / "runs" / "exp" / "second" / "init_from"
    assert sorted(path.name for path in copy.iterdir()) == [
        *("model.pt", "source.json", "tokenizer.json", "tokenizer_config.json"),
    ]
    assert (copy / "tokenizer.json").read_text() == "tokenizer.json"
    assert sorted(path.name for path in copy.parent.iterdir()) == ["init_from"]


@pytest.mark.parametrize("run_id", ["", "0" * 32])
def test_model_without_a_run_brings_no_tokenizer(scene: Scene, tmp_path: Path, run_id: str) -> None:
    register(scene, add_checkpoint(scene.run, 4, 0.5))
    found = find(tmp_path, "models:/digits@best", scene.uri)
    assert isinstance(found, MlflowModel)
    origin_of(replace(found, run_id=run_id), tmp_path)
    copy = tmp_path / "runs" / "exp" / "second" / "init_from"
    assert sorted(path.name for path in copy.iterdir()) == ["model.pt", "source.json"]


def test_model_of_an_unreadable_run_brings_no_tokenizer(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register(scene, add_checkpoint(scene.run, 4, 0.5))
    found = find(tmp_path, "models:/digits@best", scene.uri)

    def list_artifacts(*_: object) -> None:
        raise TrackingError("the run belongs to another user", code="PERMISSION_DENIED")

    monkeypatch.setattr(mlflow_client, "open_client", lambda uri: SimpleNamespace(list_artifacts=list_artifacts))
    origin_of(found, tmp_path)
    copy = tmp_path / "runs" / "exp" / "second" / "init_from"
    assert sorted(path.name for path in copy.iterdir()) == ["model.pt", "source.json"]


def test_registered_checkpoint_is_copied(scene: Scene, tmp_path: Path) -> None:
    register(scene, add_checkpoint(scene.run, 4, 0.5))
    origin = origin_of(find(tmp_path, "models:/digits@best", scene.uri), tmp_path)
    assert (origin.step, len(origin.sha256)) == (4, 64)


def test_logged_model_is_found_by_its_id(scene: Scene, tmp_path: Path) -> None:
    scene.shipper().open_run()
    experiment = scene.client.get_run(scene.run_id).info.experiment_id
    model = scene.client.create_logged_model(experiment, name="best", source_run_id=scene.run_id)
    scene.client.log_model_artifacts(model.model_id, str(add_checkpoint(scene.run, 4, 0.5)))
    origin = origin_of(find(tmp_path, f"models:/{model.model_id}", scene.uri), tmp_path)
    assert origin.found == f"model {model.model_id} of MLflow run {scene.run_id}"


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("models:/digits", r": models:/digits names no model: expected models:/NAME@ALIAS, models:/NAME/VERSION or"),
        ("models:/digits@none", r"=models:/digits@none: MLflow at sqlite:.*alias none not found"),
        ("models:/digits/7", r"=models:/digits/7: MLflow at sqlite:.*version=7.* not found"),
        ("models:/m-1234", r"=models:/m-1234: MLflow at sqlite:.*m-1234.* not found"),
    ],
)
def test_unknown_model_is_an_error(scene: Scene, tmp_path: Path, source: str, problem: str) -> None:
    register(scene, tmp_path)
    with pytest.raises(ConfigError, match=rf"^model.init_from{problem}"):
        find(tmp_path, source, scene.uri)


def test_model_without_readable_weights_is_an_error(scene: Scene, tmp_path: Path) -> None:
    (tmp_path / "registered").mkdir()
    (tmp_path / "registered" / "MLmodel").touch()
    register(scene, tmp_path / "registered")
    message = r"^model.init_from: models:/digits@best has neither the files of a checkpoint nor a program of torch.exp"
    with pytest.raises(ConfigError, match=message):
        origin_of(find(tmp_path, "models:/digits@best", scene.uri), tmp_path)
    source = find(tmp_path, "models:/digits@best", scene.uri)
    shutil.rmtree(tmp_path / "registered")
    (tmp_path / "copies").mkdir()
    with pytest.raises(ConfigError, match=r"^model.init_from=models:/digits@best: MLflow at sqlite:"):
        source.copy_to(tmp_path / "copies" / "init_from")


def test_folder_with_a_config_is_one_of_hugging_face(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "smol"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    save_file({"weight": torch.ones(2)}, folder / "model.safetensors")
    origin = origin_of(find(tmp_path, str(folder)), tmp_path)
    assert (origin.found, len(origin.sha256)) == (f"folder {folder}", 64)
    assert read_weights(tmp_path / "runs" / "exp" / "second" / "init_from")["weight"].tolist() == [1, 1]
    monkeypatch.chdir(tmp_path)
    assert load_config("ddp_digits", ["model.init_from=smol"]).model.init_from == str(folder)
    assert load_config("ddp_digits", ["model.init_from=first"]).model.init_from == "first"
