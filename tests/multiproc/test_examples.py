"""The examples of the repository, started with the real command."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from hpcdist_runs import Runs

from hpcdist.checkpoint.state import load_weights

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture
def examples(tmp_path: Path, empty_database: Path) -> Runs:
    """A runs folder whose project has only the files of an example."""
    return Runs(tmp_path, empty_database)


def start_in(examples: Runs, name: str) -> Path:
    shutil.rmtree(examples.project)
    shutil.copytree(EXAMPLES / name, examples.project)
    return examples.folder


@pytest.mark.slow
def test_own_trainer_is_resumed_tracked_and_exported(examples: Runs) -> None:
    examples.experiment = "own-trainer"
    start_in(examples, "own_trainer")
    uri = f"tracking.uri=sqlite:///{examples.database}"
    code, output = examples.command("run", "regression.yaml", "name=whole", uri)
    assert code == 0, output
    assert "finished: the trainer has finished" in output
    found = examples.params("whole")
    assert (found["params.hidden"], found["params.total_steps"], found["optim.lr"]) == ("32", "400", "0.01")
    assert "model.name" not in found, "a section that the trainer does not read"
    code, output = examples.command("run", "regression.yaml", "params.hiden=3")
    assert (code, "params has no key 'hiden': did you mean 'hidden'?" in output) == (2, True), output
    run = examples.run_dir("whole")
    assert (run.code / "regression.py").read_text() == (EXAMPLES / "own_trainer" / "regression.py").read_text()
    assert [step for key, step, _ in examples.points("whole") if key == "train/loss"] == list(range(20, 401, 20))
    assert (run.model / "MLmodel").is_file()

    # Stopped at step 200 and resumed: the same final weights, from the code of the first start.
    no_export = f"launch.env.PYTHONPATH={examples.no_mlflow}"
    code, output = examples.command("run", "regression.yaml", "name=halves", "params.total_steps=200", no_export, uri)
    assert code == 0, output
    (examples.project / "regression.py").write_text("raise SystemError('changed after the start')\n")
    code, output = examples.command("resume", "halves", "params.total_steps=400")
    assert code == 0, output
    whole, halves = (load_weights(examples.run_dir(name).checkpoints / "step-00000400") for name in ("whole", "halves"))
    assert whole.keys() == halves.keys()
    assert all(bool((whole[key] == halves[key]).all()) for key in whole)


@pytest.mark.slow
def test_torchrun_script_runs_unmodified(examples: Runs) -> None:
    examples.experiment = "torchrun-script"
    start_in(examples, "torchrun_script")
    code, output = examples.command(
        "run", "script.yaml", "name=first", f"tracking.uri=sqlite:///{examples.database}", "launch.device=cpu"
    )
    assert code == 0, output
    assert "step 200 of 200: loss" in output
    assert "finished: train.py ended with exit status 0" in output
    attempt = examples.attempt("first")
    for rank in range(2):
        assert f"local rank {rank} of 2 done" in attempt.log(rank).read_text()


@pytest.mark.slow
def test_script_with_roles_is_stopped_by_the_ranks_that_count_steps(examples: Runs) -> None:
    """The parameter server gets SIGTERM as well, and goes on answering until the trainers have saved."""
    examples.experiment = "parameter-server"
    start_in(examples, "parameter_server")
    uri = f"tracking.uri=sqlite:///{examples.database}"
    code, output = examples.command("run", "parameter_server.yaml", "name=first", "stop.pause_at_step=50", uri)
    assert code == 0, output
    assert "stopped: train.py obeyed hpcdist.should_stop and saved checkpoints/newest.pt" in output
    code, output = examples.command("resume", "first", "stop.pause_at_step=null")
    assert code == 0, output
    assert "finished: train.py ended with exit status 0" in output
    losses = [(step, value) for key, step, value in examples.points("first") if key == "train/loss"]
    assert [step for step, _ in losses] == list(range(1, 201))
    assert losses[50][1] < losses[0][1] / 100, "continued with the saved weights"
