"""The programs of examples/tutorials, alone and with `hpcdist run`."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hpcdist_runs import Runs, unused_port
from tutorials import FOLDER, TUTORIALS, Tutorial

from hpcdist.checkpoint.initial_weights import fitted, read_weights, wanted_shapes
from hpcdist.data.datasets import build_model
from hpcdist.run.weight_files import weight_file


@pytest.mark.parametrize("tutorial", TUTORIALS, ids=lambda tutorial: tutorial.name)
@pytest.mark.slow
def test_program_alone(tutorial: Tutorial, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(FOLDER / f"{tutorial.name}.py"), *tutorial.arguments],
        cwd=tmp_path,
        env={**os.environ, "MASTER_PORT": str(unused_port()), "GLOO_SOCKET_IFNAME": "lo", "TP_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert tutorial.output in done.stdout
    file = tmp_path / "checkpoints" / tutorial.weights
    assert torch.load(file, weights_only=True)
    if tutorial.name in SHIPPED_MODELS:
        assert fitting(file, tutorial.name, tmp_path) == wanted_shapes(SHIPPED_MODELS[tutorial.name]()).keys()


#: The shipped models that start from the weights of a tutorial.
SHIPPED_MODELS = {
    "ddp_mnist": lambda: build_model("simple_cnn", num_classes=10, in_channels=1, image_size=28),
    "pipeline_resnet50": lambda: build_model("resnet50", num_classes=10, in_channels=3, image_size=32),
}


def fitting(file: Path, name: str, folder: Path) -> set[str]:
    """Return the names of the weights in a tutorial's file that the shipped model starts from."""
    source = weight_file(str(file))
    source.copy_to(folder / "init_from")
    weights = read_weights(folder / "init_from")
    return set(fitted(weights, wanted_shapes(SHIPPED_MODELS[name]()), [], source.origin))


@pytest.mark.parametrize("name", SHIPPED_MODELS)
def test_weights_of_a_tutorial_fit_the_shipped_model(name: str, tmp_path: Path) -> None:
    """The test above does the same with the file that the program writes."""
    program = runpy.run_path(str(FOLDER / f"{name}.py"))
    if name == "ddp_mnist":
        parts = {"epoch": 1, "model": program["Network"]().state_dict(), "optimizer": {"state": {}}}
    else:
        parts = program["Stage"](0).state_dict() | program["Stage"](1).state_dict()
    torch.save(parts, tmp_path / "weights.pt")
    assert fitting(tmp_path / "weights.pt", name, tmp_path) == wanted_shapes(SHIPPED_MODELS[name]()).keys()


@pytest.mark.parametrize(
    "tutorial",
    [
        pytest.param(tutorial, id=tutorial.name, marks=[] if tutorial.name == "ddp_with_rpc" else [pytest.mark.slow])
        for tutorial in TUTORIALS
    ],
)
def test_program_with_hpcdist_run(tutorial: Tutorial, tmp_path: Path, empty_database: Path) -> None:
    runs = Runs(tmp_path, empty_database, experiment="tutorials")
    uri = f"tracking.uri=sqlite:///{runs.database}"
    overrides = [tutorial.script, uri, "tracking.system_interval_s=0", "tracking.drain_timeout_s=300"]
    code, output = runs.command("run", f"tutorial_{tutorial.name}", f"name={tutorial.name}", *overrides)
    assert code == 0, output
    assert tutorial.output in output
    assert tutorial.metric in {key for key, _, _ in runs.points(tutorial.name)}
    run = runs.run_dir(tutorial.name)
    assert torch.load(run.checkpoints / tutorial.weights, weights_only=True)
    ranks = sorted(path.name for path in run.attempt(1).path.glob("rank-*.log"))
    assert len(ranks) == tutorial.num_ranks
