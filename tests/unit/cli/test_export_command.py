"""`hpcdist export` in the process of the test."""

from __future__ import annotations

import builtins
from collections.abc import Callable
from typing import Any

import pytest
import torch
from command_line import Cli, one_line

from hpcdist.checkpoint.folder import Snapshot
from hpcdist.checkpoint.store import CheckpointStore
from hpcdist.run.folder import RunDir

pytestmark = pytest.mark.processes  # runs are created with the commit that git reports


@pytest.fixture
def run(make: Callable[..., RunDir]) -> RunDir:
    run = make("first", "checkpoint.monitor=eval/loss", "checkpoint.monitor_mode=min")
    for step, loss in ((10, 0.1), (20, 0.2)):
        weights = {"w": torch.full((2,), float(step))}
        metrics = {"eval/loss": loss}
        CheckpointStore(run.checkpoints).write(
            Snapshot(step=step, model=weights, trainer={}, rank_states=[None], metrics=metrics)
        )
    return run


def test_best_checkpoint_is_written_to_a_file_named_by_the_run(hpcdist: Cli, run: RunDir, tmp_path: Any) -> None:
    result = hpcdist("export", run.name, "--format", "torch")
    file = tmp_path / "first-step-10.pt"
    assert (result.code, result.out) == (0, f"first-step-10.pt: {file.stat().st_size:,} bytes, step 10 of first\n")
    assert torch.load(file, weights_only=True)["w"].tolist() == [10, 10]
    result = hpcdist("export", run.name, "--format", "torch", "--checkpoint", "final", "--output", "final.pt")
    assert result.code == 0
    assert torch.load(tmp_path / "final.pt", weights_only=True)["w"].tolist() == [20, 20]
    assert "exists: remove it" in one_line(hpcdist("export", run.name, "--format", "torch"))


def test_run_without_the_monitored_metric_exports_the_final_checkpoint_by_default(
    hpcdist: Cli, make: Callable[..., RunDir]
) -> None:
    """The tutorial's own trainer logs a loss only."""
    for name, monitor in (("own", "trainer=mine:train"), ("set", "checkpoint.monitor=eval/f1")):
        run = make(name, monitor)
        for step in (10, 20):
            CheckpointStore(run.checkpoints).write(
                Snapshot(step=step, model={"w": torch.ones(2)}, trainer={}, rank_states=[None], metrics={})
            )
    result = hpcdist("export", "own", "--format", "torch")
    assert (result.code, result.err) == (0, "the final checkpoint, step 20: checkpoint.monitor is empty\n")
    assert result.out.endswith("step 20 of own\n")
    assert (
        hpcdist("export", "set", "--format", "torch").err
        == "the final checkpoint, step 20: no checkpoint has eval/f1\n"
    )
    message = one_line(hpcdist("export", "own", "--format", "torch", "--checkpoint", "best"))
    assert message.startswith("no checkpoint of own has the metric of checkpoint.monitor (empty): choose --checkpoint")


def test_mistakes_are_one_line(hpcdist: Cli, run: RunDir) -> None:
    message = one_line(hpcdist("export", run.name, "--format", "keras"))
    assert message == "--format keras: expected safetensors, onnx, torch"
    assert "--format" in one_line(hpcdist("export", run.name))
    assert "no run 'second'" in one_line(hpcdist("export", "second", "--format", "torch"))
    assert "has no checkpoint of step 5: it has 10, 20" in one_line(
        hpcdist("export", run.name, "--format", "torch", "--checkpoint", "5")
    )


def test_onnx_of_a_folder_that_others_can_write_is_refused(hpcdist: Cli, run: RunDir) -> None:
    run.path.chmod(0o770)
    assert "is writable by group or others" in one_line(hpcdist("export", run.name, "--format", "onnx"))


def test_missing_torch_is_one_line(hpcdist: Cli, run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    load = builtins.__import__

    def without_torch(name: str, *args: Any) -> Any:
        if name == "hpcdist.checkpoint":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")
        return load(name, *args)

    monkeypatch.setattr(builtins, "__import__", without_torch)
    message = one_line(hpcdist("export", run.name, "--format", "torch"))
    assert message == "export needs torch: run `pip install '.[train,export]'` in a checkout of hpcdist"
