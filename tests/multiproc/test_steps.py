"""`Context.steps`: a loop that is stopped or killed continues exactly, and one that forgets something fails at once."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from context_scene import SINGLE_RANK, new_run, open_context, stop_at
from hpcdist_runs import assert_states_equal
from spawn import Rank, spawn_ranks
from torch import nn
from torch.optim.lr_scheduler import StepLR

from hpcdist.checkpoint.store import CheckpointStore
from hpcdist.config.record_schema import CheckpointConfig, TrackingConfig
from hpcdist.config.schema import Config
from hpcdist.errors import TrainerError
from hpcdist.rank.context import Context, close
from hpcdist.rank.step_loop import Steps
from hpcdist.run.folder import RunDir
from hpcdist.tracking.journal import read_records

CONFIG = Config(checkpoint=CheckpointConfig(every_steps=4), tracking=TrackingConfig(log_every_steps=5))
NUM_STEPS = 12


class Sampler:
    """Draws samples of a rank; its state is the number of those that it has drawn."""

    def __init__(self, first: int) -> None:
        self.number = first

    def draw(self) -> torch.Tensor:
        self.number += 1
        return torch.full((4, 3), float(self.number)) + torch.rand(4, 3)

    def state_dict(self) -> dict[str, int]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.number = state["number"]


def train(ctx: Context, rank: int, *, fail_in: int | None = None) -> Steps:
    """Train a model with dropout, a schedule and a sampler for each rank; raise RuntimeError in a step."""
    model = ctx.wrap(nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.3), nn.Linear(8, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    scheduler = StepLR(optimizer, 3)
    sampler = Sampler(10 * rank)
    steps = ctx.steps(NUM_STEPS, model=model, optimizer=optimizer, scheduler=scheduler, local=sampler)
    for step in steps:
        if step == fail_in:
            raise RuntimeError("killed")
        loss = model(sampler.draw()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        ctx.log({"train/loss": loss})
    return steps


def train_in_attempts(here: Rank, path: Path, attempts: list[dict[str, int]]) -> list[tuple[int, bool]]:
    """Train in attempts that end by a stop after a step or by an error; return the last step of each."""
    ends = []
    for attempt in attempts:
        with open_context(here, RunDir(path), CONFIG) as ctx:
            stop_at(ctx, attempt.get("stop"))
            try:
                steps = train(ctx, here.rank, fail_in=attempt.get("fail"))
                ends.append((steps.step, steps.is_stopped))
                close(ctx)
            except RuntimeError:
                ctx._saves.close()
    return ends


def logged(run: RunDir, name: str) -> list[int]:
    (file,) = sorted(run.journal.glob("attempt-001.*.jsonl"))
    return [record.step for record in read_records(file)[0] if name in record.metrics]


def test_stopped_and_killed_loops_end_bit_equal(tmp_path: Path) -> None:
    whole, broken = new_run(tmp_path / "whole"), new_run(tmp_path / "broken")
    assert spawn_ranks(train_in_attempts, 2, path=whole.path, attempts=[{}]) == [[(12, False)]] * 2
    attempts = [{"stop": 5}, {"fail": 10}, {}]
    assert spawn_ranks(train_in_attempts, 2, path=broken.path, attempts=attempts) == [[(5, True), (12, False)]] * 2
    for run in (whole, broken):
        assert sorted(folder.name for folder in run.checkpoints.iterdir()) == ["step-00000008", "step-00000012"]
    expected, found = (
        CheckpointStore(run.checkpoints, CONFIG.checkpoint).load(run.checkpoints / "step-00000012")
        for run in (whole, broken)
    )
    assert_states_equal(found.model, expected.model)
    assert_states_equal(found.trainer, expected.trainer)
    assert [state["local"] for state in found.rank_states] == [{"number": 12}, {"number": 22}]
    assert_states_equal(found.rank_states[1]["rng"]["torch"], expected.rank_states[1]["rng"]["torch"])
    # The first point, since no step before it had one, each fifth, and the last.
    assert logged(whole, "train/loss") == [1, 5, 10, 12]


# --- one rank


def bare() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(1, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def test_tensors_are_read_when_a_point_is_due(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    wrong = torch.zeros(2)
    with open_context(SINGLE_RANK, run, CONFIG) as ctx:
        with pytest.raises(TrainerError, match=r"ctx\.log: pass the step, ctx\.log\(metrics, step\), except in a loop"):
            ctx.log({"train/loss": 1.0})
        for step in ctx.steps(11, model=nn.Linear(1, 1)):
            ctx.log({"train/loss": wrong if step + 1 in (2, 3, 4, 9) else torch.tensor(1.0)})
            if step in (2, 7):
                ctx.log({"eval/loss": 1.0})
            if step == 4:
                with pytest.raises(TrainerError, match=r"ctx\.log: train/x is a tensor of 2 elements: pass one number"):
                    ctx.log({"train/x": wrong})
        close(ctx)
    assert logged(run, "train/loss") == [1, 5, 10, 11]
    assert logged(run, "eval/loss") == [3, 8]


def test_metrics_of_an_evaluation_are_saved_with_its_step(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    config = Config(checkpoint=CheckpointConfig(every_steps=4, monitor="eval/loss"))
    with open_context(SINGLE_RANK, run, config) as ctx:
        steps = ctx.steps(10, model=nn.Linear(1, 1))
        for step in steps.until(4):
            if step == 1:
                steps.save({"eval/loss": 1.5})  # in the body: saved at the end of the step
        steps.save({"eval/loss": 0.5})
        for step in steps:
            if step == 6:
                steps.end("good enough")
        assert (steps.step, ctx.end_reason) == (7, "good enough")
        close(ctx)
    saved = {save.step: save.metrics for save in CheckpointStore(run.checkpoints, config.checkpoint).all()}
    assert saved == {2: {"eval/loss": 1.5}, 4: {"eval/loss": 0.5}, 7: {}}
    assert logged(run, "eval/loss") == [2, 4]


def test_resume_loads_what_a_checkpoint_has(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = new_run(tmp_path)
    with open_context(SINGLE_RANK, run, CONFIG) as ctx:
        model, optimizer = bare()
        for _ in ctx.steps(3, model=model, optimizer=optimizer):
            pass
        close(ctx)
    with (
        open_context(SINGLE_RANK, run, CONFIG) as ctx,
        pytest.raises(TrainerError, match=r"step 3 has the state of optimizer, which is not passed: pass it under"),
    ):
        ctx.steps(6, model=nn.Linear(1, 1))
    with (
        open_context(SINGLE_RANK, run, CONFIG) as ctx,
        pytest.raises(TrainerError, match=r"total_steps=2, but the checkpoint has 3 steps: pass 3 or more, or start"),
    ):
        ctx.steps(2, model=model, optimizer=optimizer)
    with open_context(SINGLE_RANK, run, CONFIG) as ctx:
        assert ctx.restore() is not None
        torch.rand(5)  # does not change the numbers of the loop
        again, optimizer = bare()
        steps = ctx.steps(3, model=again, optimizer=optimizer, ema=nn.Linear(1, 1))
        assert list(steps) == [], "the training was at its end"
        assert_states_equal(again.state_dict(), model.state_dict())
        close(ctx)
    assert "the checkpoint of step 3 has no state of ema, which begins anew" in caplog.text


# --- mistakes


def steps_twice(ctx: Context) -> None:
    ctx.steps(2, model=nn.Linear(1, 1))
    ctx.steps(2, model=nn.Linear(1, 1))


def no_model(ctx: Context) -> None:
    ctx.steps(2)


def no_restore(ctx: Context) -> None:
    ctx.steps(2, save=lambda step, metrics: None)


def no_state(ctx: Context) -> None:
    ctx.steps(2, model=nn.Linear(1, 1), epoch=3)  # type: ignore[arg-type]


def another_module(ctx: Context) -> None:
    model, _ = bare()
    _, optimizer = bare()
    ctx.steps(2, model=model, optimizer=optimizer)


def no_scheduler(ctx: Context) -> None:
    model, optimizer = bare()
    scheduler = StepLR(optimizer, 1)
    ctx.steps(2, model=model, optimizer=optimizer)
    del scheduler


def no_optimizer(ctx: Context) -> None:
    model, optimizer = bare()
    for step in ctx.steps(2, model=model):
        assert step == 0, "found after the first step"
        optimizer.step()


def late_optimizer(ctx: Context) -> None:
    model, optimizer = bare()
    for step in ctx.steps(9, model=model):
        assert step < 4, "found at the first save"
        if step == 2:
            optimizer.step()


def left(ctx: Context) -> None:
    for step in ctx.steps(9, model=nn.Linear(1, 1)):
        if step == 2:
            break
    close(ctx)


def short_data(ctx: Context) -> None:
    for _ in zip(ctx.steps(9, model=nn.Linear(1, 1)), range(3)):  # noqa: B905
        pass
    close(ctx)


def in_loop(call: Callable[[Context], Any]) -> Callable[[Context], None]:
    def train(ctx: Context) -> None:
        for _ in ctx.steps(2, model=nn.Linear(1, 1)):
            call(ctx)

    return train


@pytest.mark.parametrize(
    ("train", "message"),
    [
        (steps_twice, "ctx.steps: a trainer has one loop: for a second part use steps.until"),
        (no_model, "ctx.steps: pass either the model, model=…, or a function that saves"),
        (no_restore, "ctx.steps: with save=… call ctx.restore() before"),
        (no_state, "ctx.steps: epoch is of type int, which has no state_dict and load_state_dict"),
        (another_module, "ctx.steps: optimizer updates 2 of 2 tensors that are not parameters of model"),
        (no_scheduler, "ctx.steps: the learning rate of optimizer has a scheduler, which is not passed"),
        (no_optimizer, "ctx.steps: the loop uses an optimizer (SGD) that is not passed"),
        (late_optimizer, "ctx.steps: the loop uses an optimizer (SGD) that is not passed"),
        (left, "the loop of ctx.steps was left in step 3 of 9, by break, return or the end of the data"),
        (short_data, "the loop of ctx.steps was left in step 4 of 9, by break, return or the end of the data"),
        (in_loop(lambda ctx: ctx.save(1, model=None, trainer={})), "ctx.save in the loop of ctx.steps: leave out"),
        (in_loop(lambda ctx: ctx.should_stop(1)), "ctx.should_stop in the loop of ctx.steps: leave out the call"),
        (in_loop(lambda ctx: ctx.restore()), "ctx.restore: ctx.steps has restored the checkpoint: leave out"),
    ],
)
def test_mistakes_in_a_loop(train: Callable[[Context], None], message: str, tmp_path: Path) -> None:
    with (
        open_context(SINGLE_RANK, new_run(tmp_path), CONFIG) as ctx,
        pytest.raises(TrainerError, match=f"^{re.escape(message)}"),
    ):
        train(ctx)


def train_differently(ctx: Context, model: nn.Module, sampler: Sampler) -> None:
    """Train on other samples than the other ranks."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in ctx.steps(9, model=model, optimizer=optimizer, sampler=sampler):
        model(torch.rand(4, 3)).sum().backward()
        optimizer.step()


def errors_of_two_ranks(here: Rank, path: Path) -> list[str]:
    """Return the error of a loop that does not wrap its model, and of one whose sampler differs."""
    messages = []
    for number in range(2):
        with open_context(here, RunDir(path / str(number)), CONFIG) as ctx:
            wrapped = ctx.wrap(nn.Linear(3, 1))
            model = (wrapped.module, wrapped)[number]
            with pytest.raises(TrainerError) as error:
                train_differently(ctx, model, Sampler(number * here.rank))
            messages.append(str(error.value))
    return messages


def test_ranks_that_would_differ_after_a_resume_are_found(tmp_path: Path) -> None:
    for number in range(2):
        RunDir.create(tmp_path / str(number))
    for unwrapped, sampler in spawn_ranks(errors_of_two_ranks, 2, path=tmp_path):
        assert unwrapped.startswith("ctx.steps: the ranks have different weights, and a checkpoint would have those of")
        assert sampler.endswith("would have that of one rank alone: pass it as local=sampler")
