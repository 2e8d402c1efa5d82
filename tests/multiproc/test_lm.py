"""The trainer `lm` through `Context`: windows, losses and weights of runs that stop and continue on other ranks."""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from context_scene import new_run, open_context, stop_at
from hpcdist_runs import assert_states_equal
from spawn import Rank, spawn_ranks

from hpcdist.checkpoint.state import load_weights
from hpcdist.config.record_schema import CheckpointConfig, TrackingConfig
from hpcdist.config.schema import Config
from hpcdist.config.training_schema import DataConfig, OptimConfig, StopConfig, TrainerConfig
from hpcdist.data.windows import TokenWindows
from hpcdist.rank.context import close
from hpcdist.run.checkpoint_files import SAMPLES_FILE
from hpcdist.run.figures import Text, read_figures
from hpcdist.run.folder import RunDir
from hpcdist.run.samples import parse_npy
from hpcdist.tracking.journal import read_records
from hpcdist.trainers.lm import LmConfig, LmMeshConfig
from hpcdist.trainers.lm import train as trainer
from hpcdist.trainers.lm.sizes import LmModelConfig

#: An epoch has two steps of 10 windows, which 3 and 4 ranks cannot divide, and one of 5.
NUM_WINDOWS, BATCH_SIZE, LENGTH = 25, 10, 8
STEPS_PER_EPOCH, NUM_STEPS = 3, 7
SIZES = LmModelConfig(
    hidden_size=16, num_layers=2, num_heads=4, num_kv_heads=2, intermediate_size=24, tie_embeddings=True
)


#: In the run folder: the weights of the final model.
EXPORTED = "exported.pt"


class Letters:
    """A tokenizer of 26 letters."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - ord("a") for letter in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(ord("a") + token) for token in ids)

    def bytes_of(self, ids: Sequence[int]) -> int:
        return len(ids)


def config(tensor: int = 1, lr: float = 0.01, log_every: int = 1) -> Config:
    lm = LmConfig(
        model=SIZES,
        mesh=LmMeshConfig(tensor=tensor),
        sequence_length=LENGTH,
        micro_batch_size=3,
        eval_every_steps=4,
    )
    return Config(
        seed=3,
        trainer=TrainerConfig(target="lm"),
        data=DataConfig(global_batch_size=BATCH_SIZE),
        optim=OptimConfig(name="adamw", lr=lr, max_grad_norm=1.0),
        stop=StopConfig(max_steps=NUM_STEPS),
        checkpoint=CheckpointConfig(monitor="eval/bits_per_byte", monitor_mode="min"),
        tracking=TrackingConfig(log_every_steps=log_every),
        sections={"lm": lm},
    )


Audit = list[tuple[int, bytes]]


def fit(
    here: Rank, path: Path, last_step: int | None, tensor: int, lr: float = 0.01, log_every: int = 1
) -> tuple[str, Audit]:
    """Train as the worker does. Returns the reason of the end, and step and content of this rank's windows."""
    cfg = config(tensor, lr, log_every)
    audit: Audit = []
    of_step = trainer.Batches.of_step

    def audited(batches: trainer.Batches, step: int, device: torch.device) -> list[trainer.Pass]:
        passes = of_step(batches, step, device)
        for part in passes:
            audit.extend((step, window.numpy().tobytes()) for window in part.windows[: part.num_windows])
        return passes

    def prepare(*_: Any) -> Any:
        tokens = np.random.default_rng(0).integers(26, size=NUM_WINDOWS * LENGTH + 1).astype(np.uint16)
        file = path / f"tokens-{here.rank}.npy"
        np.save(file, tokens)
        windows = TokenWindows(file, LENGTH, seed=cfg.seed)
        return SimpleNamespace(train=windows, held_out=windows, vocab_size=26, tokenizer=Letters())

    def export_model(model: torch.nn.Module, _: torch.Tensor) -> None:
        torch.save(model.state_dict(), path / EXPORTED)

    trainer.prepare = prepare  # type: ignore[attr-defined, assignment]
    trainer.Batches.of_step = audited  # type: ignore[method-assign, assignment]
    with open_context(here, RunDir(path), cfg) as ctx:
        stop_at(ctx, last_step)
        ctx.export_model = export_model  # type: ignore[method-assign, assignment]
        trainer.train(ctx, cfg)
        close(ctx)
        return ctx.end_reason or "stopped", audit


@dataclass(frozen=True)
class Trained:
    """A run with the windows that its ranks have computed."""

    run: RunDir
    windows: dict[int, list[bytes]]  #: by step, sorted

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return load_weights(self.run.checkpoints / f"step-{NUM_STEPS:08d}")

    def metric(self, name: str) -> list[float]:
        """Return the values of a metric in the order of the steps."""
        values: dict[int, float] = {}
        for file in sorted(self.run.journal.glob("*.jsonl")):
            for record in read_records(file)[0]:
                if name in record.metrics:
                    assert record.step not in values
                    values[record.step] = record.metrics[name]
        return [values[step] for step in sorted(values)]


def train_on(parts: Sequence[tuple[int | None, int]], folder: Path, tensor: int = 1, log_every: int = 1) -> Trained:
    """Train on changing numbers of ranks: `parts` has the steps at which the ranks stop, and their numbers."""
    run = new_run(folder, "-".join(str(num_ranks) for _, num_ranks in parts))
    windows: dict[int, list[bytes]] = defaultdict(list)
    for last_step, num_ranks in parts:
        settings: dict[str, Any] = {"path": run.path, "last_step": last_step, "tensor": tensor, "log_every": log_every}
        for reason, audit in spawn_ranks(fit, num_ranks, **settings):
            assert reason == ("stopped" if last_step else f"trained {NUM_STEPS} steps, 2.333 epochs")
            for step, window in audit:
                windows[step].append(window)
    return Trained(run, {step: sorted(found) for step, found in windows.items()})


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return train_on([(None, 2)], tmp_path_factory.mktemp("undisturbed"))


def test_each_window_is_trained_once_an_epoch(undisturbed: Trained) -> None:
    for first in (0, STEPS_PER_EPOCH):
        epoch = [undisturbed.windows[step] for step in range(first, first + STEPS_PER_EPOCH)]
        assert [len(windows) for windows in epoch] == [10, 10, 5]
        assert len({window for windows in epoch for window in windows}) == NUM_WINDOWS
    assert len(undisturbed.metric("eval/bits_per_byte")) == 4  # after steps 3, 4, 6 and 7
    samples = sorted(path.name for path in undisturbed.run.artifacts.glob("samples/*"))
    assert samples[0] == "step-00000003.txt"
    (newest,), _ = read_figures(undisturbed.run.artifacts)
    assert isinstance(newest, Text)
    assert newest.text == (undisturbed.run.artifacts / "samples" / samples[-1]).read_text()


def test_results_of_windows_have_the_mean_that_is_compared(undisturbed: Trained) -> None:
    mean = undisturbed.metric("eval/bits_per_byte")[-1]
    raw = (undisturbed.run.checkpoints / f"step-{NUM_STEPS:08d}" / SAMPLES_FILE).read_bytes()
    results = parse_npy(raw, mean)
    assert results is not None
    assert len(results) == NUM_WINDOWS


def test_a_diverged_run_writes_no_sample(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    ((reason, _),) = spawn_ranks(fit, 1, path=run.path, last_step=None, tensor=1, lr=math.inf)
    assert reason.startswith(f"trained {NUM_STEPS} steps")
    assert not list(run.artifacts.glob("samples/*"))


def test_a_resumed_run_is_bit_equal_on_the_same_ranks(undisturbed: Trained, tmp_path: Path) -> None:
    resumed = train_on([(5, 2), (None, 2)], tmp_path)

    assert_states_equal(resumed.weights, undisturbed.weights)
    assert resumed.metric("train/loss") == undisturbed.metric("train/loss")


def test_final_model_has_the_weights_of_the_last_checkpoint(undisturbed: Trained) -> None:
    assert_states_equal(dict(torch.load(undisturbed.run.path / EXPORTED)), undisturbed.weights)


def check_equal_training(trained: Trained, undisturbed: Trained) -> None:
    """Compare windows and losses, which differ by rounding."""
    assert trained.windows == undisturbed.windows
    assert trained.metric("samples") == undisturbed.metric("samples")
    for metric in ("train/loss", "eval/loss", "eval/bits_per_byte", "train/grad_norm"):
        assert trained.metric(metric) == pytest.approx(undisturbed.metric(metric), abs=2e-4)


@pytest.mark.slow
def test_fewer_ranks_continue_with_the_same_windows(undisturbed: Trained, tmp_path: Path) -> None:
    check_equal_training(train_on([(2, 4), (5, 3), (None, 2)], tmp_path), undisturbed)


@pytest.mark.slow
def test_sums_since_the_last_log_are_kept_on_other_ranks(tmp_path: Path) -> None:
    """A stop after step 2 is between the logged steps 4 and 7."""
    trained = train_on([(2, 3), (None, 2)], tmp_path, log_every=4)
    undisturbed = train_on([(None, 1)], tmp_path, log_every=4)
    assert trained.metric("samples") == undisturbed.metric("samples") == [35, 60]
    assert trained.metric("train/loss") == pytest.approx(undisturbed.metric("train/loss"), abs=2e-4)


@pytest.mark.slow
def test_other_meshes_train_the_same_windows(undisturbed: Trained, tmp_path: Path) -> None:
    check_equal_training(train_on([(2, 4), (None, 2)], tmp_path, tensor=2), undisturbed)
    check_equal_training(train_on([(None, 1)], tmp_path), undisturbed)
