"""Models of real runs: exported weights, MLflow's model server, and reruns of each trainer."""

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
from hpcdist.data.loading import build_model

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


@pytest.mark.parametrize("kind", ["safetensors", pytest.param("torch", marks=pytest.mark.slow)])
def test_exported_weights_are_loaded_without_hpcdist(runs: Runs, control_run: str, tmp_path: Path, kind: str) -> None:
    """Tests of each trainer compare the merged weights of a checkpoint with those of its model."""
    step, *_, last = runs.checkpoint_steps(control_run)
    assert step < last
    file = tmp_path / f"model.{kind}"
    arguments = ("--format", kind, "--checkpoint", str(step), "--output", str(file))
    done, output = runs.command("export", control_run, *arguments)
    assert done == 0, output
    assert output == f"{file}: {file.stat().st_size:,} bytes, step {step} of {control_run}\n"
    blocked = ["hpcdist", "mlflow", *([] if kind == "torch" else ["torch", "torchvision"])]
    code = f"import sys\nsys.modules.update(dict.fromkeys({blocked}))\nimport numpy as np\n{LOADERS[kind]}"
    loaded = subprocess.run(
        [sys.executable, "-I", "-c", code, file], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert loaded.returncode == 0, loaded.stderr
    found, weights = np.load(tmp_path / "found.npz"), checkpoint_weights(runs, control_run, step)
    assert found.keys() == weights.keys()
    assert all(np.array_equal(found[key], weight.numpy()) for key, weight in weights.items())


def checkpoint_weights(runs: Runs, name: str, step: int) -> dict[str, torch.Tensor]:
    return load_weights(runs.run_dir(name).checkpoints / f"step-{step:08d}")


@pytest.mark.faults  # up to a minute
def test_logged_model_answers_requests_of_mlflow_models_serve(runs: Runs, control_run: str, tmp_path: Path) -> None:
    weights = checkpoint_weights(runs, control_run, LAST_STEP)
    size = 4 * round((weights["fc1.weight"].shape[1] / 64) ** 0.5)
    images = np.random.default_rng(0).random((5, 1, size, size), dtype=np.float32)
    network = build_model("simple_cnn", num_classes=10, in_channels=1, image_size=size)
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
    network.eval().load_state_dict(weights)
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


# --- Repeated runs of the trainers besides ddp, half a minute each.


CASES = {
    "rl": (
        "rl_cartpole",
        *("rl.num_envs=8", "rl.updates_per_epoch=5", "rl.num_eval_episodes=3"),
        *("stop.max_epochs=2", "stop.threshold=1000", "checkpoint.every_steps=4"),
    ),
    "rnn": (
        "rnn_lm",
        *("roles.trainer=2", "rnn.max_corpus_mb=0.05", "rnn.vocab_size=300", "rnn.embedding_size=16"),
        *("rnn.hidden_size=16", "rnn.batch_size=8", "rnn.bptt=16", "rnn.num_sample_tokens=0"),
        *("stop.max_epochs=1", "stop.max_steps=20", "checkpoint.every_steps=5"),
    ),
    "pipeline": (
        "pipeline_resnet50",
        *("model.name=resnet18", "data.image_size=16", "data.batch_size=64", "data.eval_batch_size=64"),
        *("stop.max_epochs=1", "checkpoint.every_steps=15"),
    ),
    "hybrid": (
        "hybrid_clicks",
        *("hybrid.tables={user: 60, item: 30, tag: 5}", "hybrid.num_samples=6400", "hybrid.batch_size=128"),
        *("hybrid.num_numeric_columns=2", "stop.max_epochs=1", "checkpoint.every_steps=10"),
    ),
}


@pytest.mark.faults
@pytest.mark.parametrize("trainer", CASES)
def test_rerun_repeats_every_value_and_the_model_has_its_program(runs: Runs, trainer: str) -> None:
    config, *overrides = CASES[trainer]
    name = f"repeated-{trainer}"
    settings = ("tracking.drain_timeout_s=300", "launch.num_threads=1", f"experiment={runs.experiment}")
    code, output = runs.command("run", config, *runs.config(name, *settings, *overrides, export=True)[1:])
    assert code == 0, output
    torch.export.load(runs.run_dir(name).model / "data" / "model.pt2")
    code, output = runs.command("rerun", name)
    assert code == 0, output
    assert output.splitlines()[-1].startswith("no value differs: "), output
    assert "not restored: " not in output, "the same machine, code and packages"
