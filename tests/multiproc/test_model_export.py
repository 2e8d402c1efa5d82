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
from hpcdist.data.models import build_model
from hpcdist.trainers.hybrid.train import ClickModel
from hpcdist.trainers.rl.policy import Policy
from hpcdist.trainers.rnn.train import LanguageModel

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
inputs = np.load("inputs.npy")
"""
#: Each defines `answer(weights, x)`: the model's own code, as a user has it.
NETWORK = """
import torch
from torch.nn import functional as F
def answer(weights, x):
    x = F.max_pool2d(F.relu(F.conv2d(x, weights["conv1.weight"], weights["conv1.bias"], padding=1)), 2)
    x = F.max_pool2d(F.relu(F.conv2d(x, weights["conv2.weight"], weights["conv2.bias"], padding=1)), 2)
    x = F.relu(F.linear(x.flatten(1), weights["fc1.weight"], weights["fc1.bias"]))
    return F.linear(x, weights["fc2.weight"], weights["fc2.bias"])
"""
POLICY = """
import torch
from torch import nn
def answer(weights, x):
    actor = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 2))
    actor.load_state_dict({name.removeprefix("actor."): w for name, w in weights.items() if name.startswith("actor.")})
    return actor(x)
"""
LANGUAGE = """
import torch
from torch import nn
def answer(weights, x):
    lstm = nn.LSTM(16, 16, batch_first=True)
    lstm.load_state_dict({name.removeprefix("lstm."): w for name, w in weights.items() if name.startswith("lstm.")})
    hidden, _ = lstm(nn.functional.embedding(x, weights["encoder.weight"]))
    return nn.functional.linear(hidden, weights["decoder.weight"], weights["decoder.bias"])
"""
RESNET = """
import torch
from torchvision.models import resnet18
def answer(weights, x):
    model = resnet18(num_classes=10).eval()
    model.load_state_dict(weights)
    return model(x)
"""
CLICKS = """
import torch
from torch import nn
def answer(weights, x):
    numeric, ids = x[:, :2].float(), x[:, 2:].long().unflatten(1, (3, 3))
    pooled = [
        (weights[f"tables.{name}.weight"][ids[:, n].clamp(min=0)] * (ids[:, n] >= 0).unsqueeze(2)).sum(1)
        for n, name in enumerate(("user", "item", "tag"))
    ]
    dense = nn.Sequential(nn.Linear(3 * 8 + 2, 32), nn.ReLU(), nn.Linear(32, 1))
    dense.load_state_dict({name.removeprefix("dense."): w for name, w in weights.items() if name.startswith("dense.")})
    return dense(torch.cat([*pooled, numeric], 1)).squeeze(1).sigmoid()
"""
LOADERS = {
    "safetensors": "from safetensors.torch import load_file\nweights = load_file(sys.argv[1])\n",
    "torch": "weights = torch.load(sys.argv[1], weights_only=True)\n",
    "onnx": (
        "import onnxruntime\n"
        "session = onnxruntime.InferenceSession(sys.argv[1])\n"
        "found = session.run(None, {session.get_inputs()[0].name: inputs})[0]\n"
    ),
}


def answer_without_hpcdist(kind: str, file: Path, code: str, inputs: np.ndarray) -> np.ndarray:
    """Return the output of an exported model, loaded in a process by the library of its format alone."""
    np.save(file.parent / "inputs.npy", inputs)
    blocked = ["hpcdist", "mlflow", *(["torch", "torchvision"] if kind == "onnx" else [])]
    call = "with torch.no_grad():\n    found = answer(weights, torch.from_numpy(inputs)).numpy()\n"
    parts = [LOADERS[kind]] if kind == "onnx" else [code, LOADERS[kind], call]
    source = "".join([f"BLOCKED = {blocked}\n", BLOCK, *parts, "np.save('found.npy', found)\n"])
    done = subprocess.run(
        [sys.executable, "-I", "-c", source, file], cwd=file.parent, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found: np.ndarray = np.load(file.parent / "found.npy")
    return found


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
    found = answer_without_hpcdist(kind, file, NETWORK, images)
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


# --- The models of the trainers besides ddp, half a minute each.


def language_model() -> nn.Module:
    return LanguageModel(vocab_size=300, embedding=16, hidden=16, layers=1)


def click_model() -> nn.Module:
    return ClickModel({"user": 60, "item": 30, "tag": 5}, dim=8, num_numeric=2, hidden=[32], bag_size=3)


def policy() -> nn.Module:
    return Policy(num_inputs=4, num_outputs=2, hidden=[64], is_discrete=True, activation="relu")


def resnet() -> nn.Module:
    return build_model("resnet18", num_classes=10, in_channels=3, image_size=16)


def samples(draw: np.random.Generator) -> np.ndarray:
    """Return numeric features and ids; -1 stands for no id."""
    ids = [draw.integers(-1, rows, (6, 3)) for rows in (60, 30, 5)]
    return np.concatenate([draw.random((6, 2)), *ids], axis=1)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A short run of a trainer, and its model."""

    config: str
    overrides: tuple[str, ...]
    model: Callable[[], nn.Module]
    code: str
    inputs: Callable[[np.random.Generator], np.ndarray]


CASES = {
    "rl": Case(
        config="rl_cartpole",
        overrides=(
            *("rl.num_envs=8", "rl.updates_per_epoch=5", "rl.num_eval_episodes=3"),
            *("stop.max_epochs=2", "stop.threshold=1000", "checkpoint.every_steps=4"),
        ),
        model=policy,
        code=POLICY,
        inputs=lambda draw: draw.standard_normal((6, 4), dtype=np.float32),
    ),
    "rnn": Case(
        config="rnn_lm",
        overrides=(
            *("roles.trainer=2", "rnn.max_corpus_mb=0.05", "rnn.vocab_size=300", "rnn.embedding_size=16"),
            *("rnn.hidden_size=16", "rnn.batch_size=8", "rnn.bptt=16", "rnn.num_sample_tokens=0"),
            *("stop.max_epochs=1", "stop.max_steps=20", "checkpoint.every_steps=5"),
        ),
        model=language_model,
        code=LANGUAGE,
        inputs=lambda draw: draw.integers(0, 300, (6, 16)),
    ),
    "pipeline": Case(
        config="pipeline_resnet50",
        overrides=(
            *("model.name=resnet18", "data.image_size=16", "data.batch_size=64", "data.eval_batch_size=64"),
            *("stop.max_epochs=1", "checkpoint.every_steps=15"),
        ),
        model=resnet,
        code=RESNET,
        inputs=lambda draw: draw.random((6, 3, 16, 16), dtype=np.float32),
    ),
    "hybrid": Case(
        config="hybrid_clicks",
        overrides=(
            *("hybrid.tables={user: 60, item: 30, tag: 5}", "hybrid.num_samples=6400", "hybrid.batch_size=128"),
            *("hybrid.num_numeric_columns=2", "stop.max_epochs=1", "checkpoint.every_steps=10"),
        ),
        model=click_model,
        code=CLICKS,
        inputs=samples,
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
    name, case = f"repeated-{trainer}", CASES[trainer]
    step = runs.checkpoint_steps(name)[0]
    assert step < runs.checkpoint_steps(name)[-1], "not the final one"
    inputs = case.inputs(np.random.default_rng(0))
    model = case.model().eval()
    weights = load_weights(runs.run_dir(name).checkpoints / f"step-{step:08d}")
    model.load_state_dict(weights)
    with torch.no_grad():
        expected = model(torch.from_numpy(inputs)).numpy()
    assert expected.std() > 0
    for kind in LOADERS:
        file = tmp_path / f"model.{kind}"
        code, output = runs.command("export", name, "--format", kind, "--checkpoint", str(step), "--output", str(file))
        assert code == 0, output
        found = answer_without_hpcdist(kind, file, case.code, inputs)
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-5, err_msg=kind)


@pytest.mark.faults
def test_rerun_repeats_every_value(runs: Runs, trainer: str) -> None:
    code, output = runs.command("rerun", f"repeated-{trainer}")
    assert code == 0, output
    assert output.splitlines()[-1].startswith("no value differs: "), output
    assert "not restored: " not in output, "the same machine, code and packages"
