"""The final model in MLflow's format, of the program that rank 0 has exported."""

from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from tracking_scene import Scene

from hpcdist.errors import TrackingError
from hpcdist.tracking.final_model import complete_model
from hpcdist.tracking.sync_runs import sync


@pytest.mark.processes  # torch starts ldconfig
# MLflow's code emits these warnings when it saves and loads a model.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning:mlflow")
def test_model_is_the_one_that_mlflow_itself_saves(scene: Scene, tmp_path: Path) -> None:
    import mlflow.pytorch
    import torch

    from hpcdist.checkpoint.export import export_model

    net, x = torch.nn.Linear(3, 2), torch.ones(2, 3)
    export_model(net, x, scene.run)
    complete_model(scene.run, scene.uri)
    assert not scene.run.exported.exists()
    many = torch.rand(5, 3)
    assert torch.equal(mlflow.pytorch.load_model(str(scene.run.model))(many), net(many))
    predicted = mlflow.pyfunc.load_model(str(scene.run.model)).predict(many.numpy())
    assert np.array_equal(predicted, net(many).detach().numpy())
    mlflow.pytorch.save_model(
        net,
        tmp_path / "own",
        signature=mlflow.models.infer_signature(x.numpy(), net(x).detach().numpy()),
        input_example=x.numpy(),
        pip_requirements=[f"torch=={version('torch').partition('+')[0]}"],
        serialization_format="pt2",
    )
    assert description(scene.run.model) == description(tmp_path / "own")


def description(model: Path) -> dict[str, Any]:
    """Return the text files of a model, without times, ids, sizes and the place of its program."""
    found: dict[str, Any] = yaml.safe_load((model / "MLmodel").read_text())
    for name in ("utc_time_created", "model_uuid", "model_size_bytes"):
        del found[name]
    for flavor, place in (("pytorch", "model_data"), ("python_function", "data")):
        assert (model / found["flavors"][flavor].pop(place) / "model.pt2").is_file()
    function = found["flavors"]["python_function"]
    function.pop("pickle_module_name", None)  # a program is not pickled
    for name, default in (("code", None), ("streamable", False)):
        assert function.pop(name, default) == default
    names = ("requirements.txt", "conda.yaml", "python_env.yaml", "input_example.json", "serving_input_example.json")
    return found | {name: (model / name).read_text() for name in names}


def export(scene: Scene) -> None:
    """Leave the program of a final model as rank 0 does; its content does not matter."""
    scene.file("exported/model.pt2", "program")
    arrays: dict[str, Any] = {"inputs": np.ones((2, 3), "float32"), "outputs": np.ones((2, 2), "float32")}
    np.savez(scene.run.exported / "example.npz", torch=np.array("2.15.0+cpu"), **arrays)


def model_in_mlflow(scene: Scene) -> str:
    (output,) = scene.model_outputs
    return str(scene.client.get_logged_model(output.model_id).status)


def test_model_of_a_killed_shipper_is_completed(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    export(scene)
    scene.state(status="stopped", ended=2e9)
    scene.shipper().ship_once()
    assert not scene.run.model.exists(), "only a finished run has a final model"
    scene.state(status="finished", ended=2e9)

    def kill(*_: object) -> None:
        raise SystemExit

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", kill)
        with pytest.raises(SystemExit):
            scene.shipper().ship_once()
    (scene.run.path / ".model-killed").mkdir()  # what SIGKILL leaves
    assert sync(scene.run, scene.uri).kind == "uploaded"
    assert (scene.run.model / "data/exported/model.pt2").read_text() == "program"
    assert model_in_mlflow(scene) == "READY"
    assert not (scene.run.path / ".model-killed").exists()
    assert sync(scene.run, scene.uri).kind == "unchanged"


def test_model_that_cannot_be_written_is_an_error(scene: Scene, tmp_path: Path) -> None:
    def description() -> str:
        return str(scene.entity.data.tags["mlflow.note.content"])

    scene.log([1])
    export(scene)
    example = scene.run.exported / "example.npz"
    content = example.read_bytes()
    example.write_text("damaged")
    scene.state(status="finished", ended=2e9)
    shipper = scene.shipper()
    with pytest.raises(TrackingError, match=r"^the final model of first cannot be written in MLflow's format: "):
        shipper.ship_once()
    assert (scene.steps(), scene.status()) == ([1], "FINISHED"), "everything else is uploaded"
    assert "load_model" not in description()
    example.write_bytes(content)
    (scene.run.exported / "linked").symlink_to(tmp_path)
    with pytest.raises(TrackingError, match=r"exported/linked is a symbolic link that leaves the run folder: the"):
        shipper.ship_once()
    (scene.run.exported / "linked").unlink()
    shipper.ship_once()
    assert model_in_mlflow(scene) == "READY"
    assert "load_model" in description()


@pytest.mark.processes  # torch starts ldconfig
def test_model_that_cannot_be_exported_does_not_end_the_training(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    import torch
    from torch import nn

    from hpcdist.checkpoint.export import export_model

    class Two(nn.Linear):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
            return x, x

    class Broken(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError("no batches of two")

    for net, problem in (
        (Two(1, 1), "returns a tuple, but MLflow's format needs one tensor"),
        (Broken(1, 1), "of two"),
    ):
        caplog.clear()
        export_model(net, torch.rand(2, 1), scene.run)
        assert caplog.messages == ["the final model is only in checkpoints/, not in MLflow's format:"]
        assert problem in caplog.text
        assert not scene.run.exported.exists()


@pytest.mark.processes  # torch starts ldconfig
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning:mlflow")
def test_model_takes_other_image_sizes_if_the_network_does(scene: Scene) -> None:
    import mlflow.pyfunc
    import torch

    from hpcdist.checkpoint.export import export_model
    from hpcdist.data.datasets import build_model

    net = build_model("resnet18", num_classes=3, in_channels=3, image_size=32).eval()
    export_model(net, torch.rand(2, 3, 32, 32), scene.run)
    complete_model(scene.run, scene.uri)
    model = mlflow.pyfunc.load_model(str(scene.run.model))
    assert model.metadata.signature.inputs.inputs[0].shape == (-1, 3, -1, -1)
    for images in (torch.rand(1, 3, 32, 32), torch.rand(3, 3, 96, 40)):
        assert np.allclose(model.predict(images.numpy()), net(images).detach().numpy(), atol=1e-4)
    of_one_size = build_model("simple_cnn", num_classes=3, in_channels=1, image_size=28)
    export_model(of_one_size, torch.rand(2, 1, 28, 28), scene.run)
    complete_model(scene.run, scene.uri)
    assert mlflow.pyfunc.load_model(str(scene.run.model)).metadata.signature.inputs.inputs[0].shape == (-1, 1, 28, 28)


@pytest.mark.processes  # torch starts ldconfig
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning:mlflow")
def test_language_model_takes_texts_of_any_length(scene: Scene) -> None:
    import mlflow.pyfunc
    import torch

    from hpcdist.checkpoint.export import export_model
    from hpcdist.trainers.lm.model import Decoder
    from hpcdist.trainers.lm.sizes import LmModelConfig
    from hpcdist.trainers.rnn import RnnConfig
    from hpcdist.trainers.rnn.train import LanguageModel

    sizes = LmModelConfig(hidden_size=16, num_layers=1, intermediate_size=16, tie_embeddings=True)
    decoder = Decoder(sizes, vocab_size=20)
    tokens = torch.arange(16).view(2, 8)
    export_model(decoder, tokens, scene.run)
    complete_model(scene.run, scene.uri)
    model = mlflow.pyfunc.load_model(str(scene.run.model))
    assert model.metadata.signature.inputs.inputs[0].shape == (-1, -1)
    for others in (tokens[:1, :1], tokens.view(1, 16), tokens.view(8, 2)):
        assert np.allclose(model.predict(others.numpy()), decoder(others).detach().numpy(), atol=1e-5)
    recurrent = LanguageModel(RnnConfig(embedding_size=8, hidden_size=8, num_layers=1), 20)
    export_model(recurrent, tokens, scene.run)
    complete_model(scene.run, scene.uri)
    signature = mlflow.pyfunc.load_model(str(scene.run.model)).metadata.signature
    assert signature.inputs.inputs[0].shape == (-1, 8), "torch.export fixes the length of an LSTM"
