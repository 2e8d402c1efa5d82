"""The model of a real run, loaded without hpcdist: exported files, and MLflow's model server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from hpcdist_runs import LAST_STEP, Runs, unused_port, wait_for

from hpcdist.checkpoint.state import load_weights
from hpcdist.data.models import build_model

pytestmark = pytest.mark.processes

#: Blocks packages in a child process, which starts with `python -I`.
BLOCK = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"{name} is blocked")
sys.meta_path.insert(0, Block())
import numpy as np
"""
#: The model's own code, as a user has it.
NETWORK = """
import torch
from torch import nn
from torch.nn import functional as F
class Network(nn.Module):
    def __init__(self, side):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 32, 3, padding=1), nn.Conv2d(32, 64, 3, padding=1)
        self.fc1, self.fc2 = nn.Linear(64 * side * side, 128), nn.Linear(128, 10)
    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return self.fc2(F.relu(self.fc1(x.flatten(1))))
images = np.load("images.npy")
def answer(weights):
    network = Network(images.shape[-1] // 4)
    network.load_state_dict(weights)
    with torch.no_grad():
        return network(torch.from_numpy(images)).numpy()
"""
LOADERS = {
    "safetensors": "from safetensors.torch import load_file\nfound = answer(load_file(sys.argv[1]))\n",
    "torch": "found = answer(torch.load(sys.argv[1], weights_only=True))\n",
    "onnx": (
        "import onnxruntime\n"
        "session = onnxruntime.InferenceSession(sys.argv[1])\n"
        "images = np.load('images.npy')\n"
        "found = session.run(None, {session.get_inputs()[0].name: images})[0]\n"
    ),
}


def expected_output(runs: Runs, name: str, step: int, images: np.ndarray) -> np.ndarray:
    """Return the output of the original model with the weights of a checkpoint."""
    model = build_model("simple_cnn", num_classes=10, in_channels=1, image_size=images.shape[-1]).eval()
    model.load_state_dict(load_weights(runs.run_dir(name).checkpoints / f"step-{step:08d}"))
    with torch.no_grad():
        found: np.ndarray = model(torch.from_numpy(images)).numpy()
    return found


def image_size(runs: Runs, name: str) -> int:
    weights = load_weights(runs.run_dir(name).checkpoints / f"step-{LAST_STEP:08d}")
    return 4 * round((weights["fc1.weight"].shape[1] / 64) ** 0.5)


@pytest.mark.parametrize(
    "kind", ["safetensors", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("torch", "onnx"))]
)
def test_exported_model_is_loaded_without_hpcdist(runs: Runs, control_run: str, tmp_path: Path, kind: str) -> None:
    step = runs.checkpoint_steps(control_run)[0]  # not the final one
    assert step < LAST_STEP
    file = tmp_path / f"model.{kind}"
    code, output = runs.command(
        "export", control_run, "--format", kind, "--checkpoint", str(step), "--output", str(file)
    )
    assert code == 0, output
    assert output == f"{file}: {file.stat().st_size:,} bytes, step {step} of {control_run}\n"
    images = np.random.default_rng(0).random((5, 1, *[image_size(runs, control_run)] * 2), dtype=np.float32)
    np.save(tmp_path / "images.npy", images)
    blocked = {"hpcdist", "mlflow", "torchvision", *({"torch"} if kind == "onnx" else ())}
    source = (
        f"BLOCKED = {blocked}{BLOCK}{'' if kind == 'onnx' else NETWORK}{LOADERS[kind]}np.save('found.npy', found)\n"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", source, str(file)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = np.load(tmp_path / "found.npy")
    np.testing.assert_allclose(found, expected_output(runs, control_run, step, images), rtol=1e-4, atol=1e-5)


@pytest.mark.faults  # up to a minute
def test_logged_model_answers_requests_of_mlflow_models_serve(runs: Runs, control_run: str, tmp_path: Path) -> None:
    images = np.random.default_rng(0).random((3, 1, *[image_size(runs, control_run)] * 2), dtype=np.float32)
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
    np.testing.assert_allclose(found, expected_output(runs, control_run, LAST_STEP, images), rtol=1e-4, atol=1e-5)


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
