"""Models of real runs, loaded without hpcdist: exported files of each trainer, and MLflow's model server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from hpcdist_runs import LAST_STEP, Runs, unused_port, wait_for
from torch import nn

from hpcdist.checkpoint.state import load_weights
from hpcdist.data.loading import build_model
from hpcdist.trainers.hybrid.train import ClickModel
from hpcdist.trainers.rl.policy import Policy
from hpcdist.trainers.rnn.train import LanguageModel

pytestmark = pytest.mark.processes

#: Loads an exported file with the library of its format alone, and writes its weights.
LOADERS = {
    "safetensors": "from safetensors.numpy import load_file\nnp.savez('found.npz', **load_file(sys.argv[1]))\n",
    "torch": (
        "import torch\n"
        "weights = torch.load(sys.argv[1], weights_only=True)\n"
        "np.savez('found.npz', **{name: weight.numpy() for name, weight in weights.items()})\n"
    ),
}


def assert_export_has_the_weights(runs: Runs, name: str, kind: str, model: nn.Module, folder: Path) -> None:
    """Export the first checkpoint of a run, and load it into the model without hpcdist."""
    step, *_, last = runs.checkpoint_steps(name)
    assert step < last
    file = folder / f"model.{kind}"
    done, output = runs.command("export", name, "--format", kind, "--checkpoint", str(step), "--output", str(file))
    assert done == 0, output
    assert output == f"{file}: {file.stat().st_size:,} bytes, step {step} of {name}\n"
    blocked = ["hpcdist", "mlflow", *([] if kind == "torch" else ["torch", "torchvision"])]
    code = f"import sys\nsys.modules.update(dict.fromkeys({blocked}))\nimport numpy as np\n{LOADERS[kind]}"
    loaded = subprocess.run(
        [sys.executable, "-I", "-c", code, file], cwd=folder, capture_output=True, text=True, check=False
    )
    assert loaded.returncode == 0, loaded.stderr
    found = np.load(folder / "found.npz")
    model.load_state_dict(load_weights(runs.run_dir(name).checkpoints / f"step-{step:08d}"))
    assert found.keys() == model.state_dict().keys()
    assert all(np.array_equal(found[key], weight.numpy()) for key, weight in model.state_dict().items())


def images_and_network(runs: Runs, name: str) -> tuple[np.ndarray, nn.Module]:
    weights = load_weights(runs.run_dir(name).checkpoints / f"step-{LAST_STEP:08d}")
    size = 4 * round((weights["fc1.weight"].shape[1] / 64) ** 0.5)
    images = np.random.default_rng(0).random((5, 1, size, size), dtype=np.float32)
    return images, build_model("simple_cnn", num_classes=10, in_channels=1, image_size=size)


def test_exported_model_is_loaded_without_hpcdist(runs: Runs, control_run: str, tmp_path: Path) -> None:
    _, network = images_and_network(runs, control_run)
    assert_export_has_the_weights(runs, control_run, "safetensors", network, tmp_path)


@pytest.mark.faults  # up to a minute
def test_logged_model_answers_requests_of_mlflow_models_serve(runs: Runs, control_run: str, tmp_path: Path) -> None:
    images, network = images_and_network(runs, control_run)
    log = tmp_path / "serve.log"
    with model_server(runs, f"runs:/{runs.mlflow_id(control_run)}/model", log) as url:
        request = urllib.request.Request(
            f"{url}/invocations",
            json.dumps({"inputs": images.tolist()}).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                found = np.array(json.load(answer)["predictions"])
        except urllib.error.HTTPError as error:
            pytest.fail(f"{error}: {error.read().decode()[:2000]}\n{log.read_text()}")
    network.eval().load_state_dict(load_weights(runs.run_dir(control_run).checkpoints / f"step-{LAST_STEP:08d}"))
    with torch.no_grad():
        expected = network(torch.from_numpy(images)).numpy()
    assert expected.std() > 0
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@contextmanager
def model_server(runs: Runs, model_uri: str, log: Path) -> Iterator[str]:
    """Start `mlflow models serve` on an unused port. Yields its address when it answers."""
    port = unused_port()
    # MLflow executes `uvicorn`, which it finds by PATH.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    options = ["--env-manager", "local", "--host", "127.0.0.1", "--port", str(port)]
    with open(log, "wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "mlflow", "models", "serve", "--model-uri", model_uri, *options],
            cwd=log.parent,
            env=runs.env(PATH=path, MLFLOW_TRACKING_URI=f"sqlite:///{runs.database}", MLFLOW_DISABLE_TELEMETRY="true"),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )

    def is_up() -> bool:
        assert process.poll() is None, log.read_text()
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/ping", timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False

    try:
        wait_for(is_up, "the model server to answer", timeout_s=240)
        yield f"http://127.0.0.1:{port}"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=60)


# --- The models of the trainers besides ddp, half a minute each.


@dataclass(frozen=True, kw_only=True)
class Case:
    """A short run of a trainer, and its model."""

    config: str
    overrides: tuple[str, ...]
    model: Callable[[], nn.Module]


CASES = {
    "rl": Case(
        config="rl_cartpole",
        overrides=(
            *("rl.num_envs=8", "rl.updates_per_epoch=5", "rl.num_eval_episodes=3"),
            *("stop.max_epochs=2", "stop.threshold=1000", "checkpoint.every_steps=4"),
        ),
        model=lambda: Policy(num_inputs=4, num_outputs=2, hidden=[64], is_discrete=True, activation="relu"),
    ),
    "rnn": Case(
        config="rnn_lm",
        overrides=(
            *("roles.trainer=2", "rnn.max_corpus_mb=0.05", "rnn.vocab_size=300", "rnn.embedding_size=16"),
            *("rnn.hidden_size=16", "rnn.batch_size=8", "rnn.bptt=16", "rnn.num_sample_tokens=0"),
            *("stop.max_epochs=1", "stop.max_steps=20", "checkpoint.every_steps=5"),
        ),
        model=lambda: LanguageModel(vocab_size=300, embedding=16, hidden=16, layers=1),
    ),
    "pipeline": Case(
        config="pipeline_resnet50",
        overrides=(
            *("model.name=resnet18", "data.image_size=16", "data.batch_size=64", "data.eval_batch_size=64"),
            *("stop.max_epochs=1", "checkpoint.every_steps=15"),
        ),
        model=lambda: build_model("resnet18", num_classes=10, in_channels=3, image_size=16),
    ),
    "hybrid": Case(
        config="hybrid_clicks",
        overrides=(
            *("hybrid.tables={user: 60, item: 30, tag: 5}", "hybrid.num_samples=6400", "hybrid.batch_size=128"),
            *("hybrid.num_numeric_columns=2", "stop.max_epochs=1", "checkpoint.every_steps=10"),
        ),
        model=lambda: ClickModel({"user": 60, "item": 30, "tag": 5}, dim=8, num_numeric=2, hidden=[32], bag_size=3),
    ),
}


@pytest.fixture(scope="module", params=CASES)
def trainer(request: pytest.FixtureRequest, runs: Runs) -> str:
    """Name of a trainer whose run `repeated-TRAINER` has finished."""
    name: str = request.param
    case = CASES[name]
    settings = ("tracking.drain_timeout_s=300", "launch.num_threads=1", f"experiment={runs.experiment}")
    arguments = runs.config(f"repeated-{name}", *settings, *case.overrides, export=True)[1:]
    code, output = runs.command("run", case.config, *arguments)
    assert code == 0, output
    return name


@pytest.mark.faults
def test_export_is_loaded_by_the_target_library_alone(runs: Runs, trainer: str, tmp_path: Path) -> None:
    for kind in LOADERS:
        assert_export_has_the_weights(runs, f"repeated-{trainer}", kind, CASES[trainer].model(), tmp_path)


@pytest.mark.faults
def test_rerun_repeats_every_value(runs: Runs, trainer: str) -> None:
    code, output = runs.command("rerun", f"repeated-{trainer}")
    assert code == 0, output
    assert output.splitlines()[-1].startswith("no value differs: "), output
    assert "not restored: " not in output, "the same machine, code and packages"
