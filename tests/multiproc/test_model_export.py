"""Models of real runs: exported weights, and reruns of each trainer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hpcdist_runs import Runs

from hpcdist.checkpoint.state import load_weights

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
        *("rnn.hidden_size=16", "rnn.batch_size=8", "rnn.bptt=16"),
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
