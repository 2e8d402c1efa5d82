"""Exported weights of real runs."""

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
