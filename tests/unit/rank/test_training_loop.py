"""The parts of training loops: meter, progress with its stop rules, optimizers, schedules, and elastic divisions."""

import dataclasses
import time
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, Literal, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hpcdist.config.launch_schema import LaunchConfig
from hpcdist.config.record_schema import CheckpointConfig
from hpcdist.config.schema import Config
from hpcdist.config.training_schema import DataConfig, ElasticConfig, OptimConfig, ScheduleConfig, StopConfig
from hpcdist.errors import ConfigError
from hpcdist.rank.micro_batches import BatchDivision, BufferChanges, SavedDivision, divide, micro_batch_seed
from hpcdist.rank.step_loop import Steps
from hpcdist.rank.training_loop import Meter, Progress, build_optimizer, lr_factor, settle_buckets


def test_meter_excludes_pauses_also_after_a_restore(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = iter([10.0, 12.0, 15.0, 16.0, 20.0, 22.0, 100.0, 101.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    meter = Meter({"loss": torch.tensor(1.0), "num_steps": 3}, torch.device("cpu"))
    meter.add(loss=torch.tensor(0.5), num_steps=1)
    assert meter.sums == {"loss": torch.tensor(1.5), "num_steps": 4}
    with meter.paused():  # from 12 to 15
        pass
    assert meter.elapsed_s == 3.0
    meter.reset()  # at 20
    assert meter.state_dict() == {}
    meter.add(num_steps=4)
    with meter.paused():  # from 22 on: the checkpoint of an evaluated step
        restored = Meter(meter.state_dict())  # at 100
        assert restored.sums == {"num_steps": 4}
        assert restored.elapsed_s == 3.0
        monkeypatch.undo()


# --- The position in training, and the stop rules.


def evaluated(cfg: Config, metrics: Mapping[str, float], goal: tuple[float, str] | None = None) -> Progress:
    """Return the progress after one epoch of 10 steps and its evaluation."""
    progress = Progress(cfg, 10, {"step": 10, "step_in_epoch": 10, "steps_per_epoch": 10}, goal=goal)
    progress.end_epoch(metrics)
    return progress


def part_of_a_loop(progress: Progress) -> Steps:
    """Return steps that only count, from the step of the progress on."""
    return cast(Steps, SimpleNamespace(until=lambda end: range(progress.step, end)))


def end_reasons(cfg: Config, values: list[float]) -> list[str]:
    """Return the reason to end training after each evaluation; empty while training continues."""
    cfg = dataclasses.replace(cfg, stop=dataclasses.replace(cfg.stop, max_epochs=10))
    progress, reasons = Progress(cfg, 10), []
    for value in values:
        for _ in progress.until_evaluation(part_of_a_loop(progress)):
            assert progress.end_reason == "", "training ends only after an evaluation"
        progress.end_epoch({"eval/loss": value, "eval/accuracy": value})
        reasons.append(progress.end_reason)
    return reasons


@pytest.mark.parametrize(
    ("stop", "checkpoint", "values", "reason"),
    [
        (StopConfig(threshold=0.8), CheckpointConfig(), [0.5, 0.79, 0.8],
         "eval/accuracy reached 0.8 (stop.threshold=0.8)"),
        (StopConfig(patience=2), CheckpointConfig(), [0.5, 0.6, 0.6, 0.5], "no better eval/accuracy in 2 evaluations"),
        (StopConfig(max_epochs=10), CheckpointConfig(), [0.5] * 10, "trained 100 steps, 10 epochs"),
    ],
)  # fmt: skip
def test_training_ends_by_each_stop_rule(
    stop: StopConfig, checkpoint: CheckpointConfig, values: list[float], reason: str
) -> None:
    *before, last = end_reasons(Config(stop=stop, checkpoint=checkpoint), values)
    assert before == [""] * len(before)
    assert last.startswith(reason)


def test_monitored_metric_must_be_measured() -> None:
    with pytest.raises(ConfigError, match=r"checkpoint\.monitor='f1' is not measured: use one of eval/loss"):
        end_reasons(Config(checkpoint=CheckpointConfig(monitor="f1")), [0.5])


def test_goal_of_the_task_applies_if_the_config_has_no_threshold() -> None:
    checkpoint = CheckpointConfig(monitor="eval/return")
    goal = (475.0, "the environment's own threshold")
    reason = "eval/return reached 480 (the environment's own threshold=475) at step 10"
    assert evaluated(Config(checkpoint=checkpoint), {"eval/return": 480.0}, goal).end_reason == reason
    higher = Config(checkpoint=checkpoint, stop=StopConfig(threshold=490.0))
    assert evaluated(higher, {"eval/return": 480.0}, goal).end_reason == ""


def test_resumed_run_continues_at_its_position() -> None:
    def resumed(steps_per_epoch: int, **stop: int) -> Progress:
        cfg = Config(stop=StopConfig(max_epochs=3, **stop))
        return Progress(
            cfg, steps_per_epoch, {"step": 15, "epoch": 1, "step_in_epoch": 5, "steps_per_epoch": 10, "samples": 480}
        )

    assert resumed(10).total_steps == 30
    shortened = resumed(10, max_steps=12)
    assert (shortened.total_steps, shortened.steps_until_evaluation) == (15, 0)
    halved = resumed(20)  # batches of half the size
    assert (halved.step_in_epoch, halved.epochs, halved.total_steps) == (10, 1.5, 15 + 50 - 20)


def test_evaluations_within_an_epoch_end_no_epoch() -> None:
    cfg = Config(stop=StopConfig(max_epochs=2))
    progress = Progress(cfg, 10, evaluate_every=4)
    steps_between = []
    while not progress.end_reason:
        num_steps = progress.steps_until_evaluation
        steps_between.append(num_steps)
        progress.step += num_steps
        progress.step_in_epoch += num_steps
        progress.end_epoch({"eval/accuracy": 0.5})
    assert steps_between == [4, 4, 2, 2, 4, 4]
    assert progress.end_reason == "trained 20 steps, 2 epochs"


def test_a_checkpoint_holds_all_counters() -> None:
    cfg = Config(stop=StopConfig(patience=2))
    progress = evaluated(cfg, {"eval/accuracy": 0.5})
    progress.add_samples(640)
    restored = Progress(cfg, 10, progress.state_dict())
    assert vars(restored) == vars(progress)
    restored.end_epoch({"eval/accuracy": 0.4})
    restored.end_epoch({"eval/accuracy": 0.4})
    assert restored.end_reason == "no better eval/accuracy in 2 evaluations (stop.patience) at step 10"


# --- Optimizers and learning rate schedules.


@pytest.mark.parametrize("name", ["adam", "adamw", "sgd"])
def test_a_resumed_optimizer_has_the_options_of_the_config(name: Literal["adam", "adamw", "sgd"]) -> None:
    def optimizer(**options: float) -> torch.optim.Optimizer:
        weight.grad = torch.ones(2)
        return build_optimizer([weight], OptimConfig(name=name, **options))

    weight = nn.Parameter(torch.ones(2))
    before = optimizer()
    before.step()
    after = optimizer(lr=0.5, weight_decay=0.1, momentum=0.8)
    options = after.param_groups[0] | {"params": None}
    after.load_state_dict(before.state_dict())
    assert after.param_groups[0] | {"params": None} == options
    assert after.state_dict()["state"].keys() == {0}
    torch.testing.assert_close(after.state_dict()["state"], before.state_dict()["state"], rtol=0, atol=0)
    after.step()


def test_learning_rate_warms_up_and_decays_as_a_cosine() -> None:
    cfg = ScheduleConfig(name="cosine", warmup_steps=4)
    factors = [lr_factor(step, 14, cfg) for step in range(15)]
    assert factors[:5] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])
    assert factors[9] == pytest.approx(0.5)
    assert factors[14] == pytest.approx(0.0)
    assert factors[4:] == sorted(factors[4:], reverse=True)
    assert lr_factor(99, 14, cfg) == pytest.approx(0.0), "constant after the last step"
    constant = ScheduleConfig(warmup_steps=2)
    assert [lr_factor(step, 9, constant) for step in range(4)] == [0.5, 1.0, 1.0, 1.0]
    assert lr_factor(5, 5, ScheduleConfig(name="cosine", warmup_steps=5)) == 1.0


def test_wsd_is_constant_and_falls_linearly_at_the_end() -> None:
    cfg = ScheduleConfig(name="wsd", warmup_steps=2, decay_fraction=0.4)
    factors = [lr_factor(step, 10, cfg) for step in range(11)]
    assert factors[:2] == pytest.approx([0.5, 1.0])
    assert factors[2:7] == [1.0] * 5
    assert factors[7:] == pytest.approx([0.75, 0.5, 0.25, 0.0])


# --- The division of a training set over ranks, and the buffers of a model over its micro-batches.


def division(rank: int, world_size: int, num_samples: int = 67, **changes: int) -> BatchDivision:
    fields: dict[str, Any] = {"global_batch_size": 16, "num_micro_batches": 8, "seed": 3, **changes}
    return BatchDivision(num_samples=num_samples, rank=rank, world_size=world_size, **fields)


def test_last_global_batch_has_no_shares_of_empty_micro_batches() -> None:
    """Four samples: two micro-batches."""
    last = [division(rank, 3, 68) for rank in range(3)]
    assert [list(each.share(4)) for each in last] == [[0, 1], [], []]
    assert [each.batch_size(4) for each in last] == [4, 4, 4]
    order = last[0].order(0)
    assert torch.equal(torch.cat([last[0].samples(order, 4, number) for number in last[0].share(4)]), order[64:])


@pytest.mark.parametrize(("num_samples", "sizes"), [(67, [2] * 32 + [3]), (65, [2] * 31 + [3]), (3, [3]), (1, [1])])
def test_last_micro_batch_takes_a_single_sample_that_is_left(num_samples: int, sizes: list[int]) -> None:
    """Batch normalisation cannot train on one sample. Of 65 samples, the last global batch takes 17."""
    one = division(0, 1, num_samples)
    assert [len(part) for part in one.rank_indices(0)] == sizes
    assert one.steps_per_epoch == -(-len(sizes) // 8)
    assert sum(one.batch_size(step) for step in range(one.steps_per_epoch)) == num_samples


@pytest.mark.parametrize("num_samples", [1, 16, 67, 80])
def test_every_number_of_ranks_has_the_same_micro_batches(num_samples: int) -> None:
    for epoch in range(2):
        found = []
        for world_size in range(1, 9):
            parts: dict[tuple[int, int], list[int]] = {}
            for rank in range(world_size):
                own = division(rank, world_size, num_samples)
                order = own.order(epoch)
                mine = [
                    (step, number, own.samples(order, step, number).tolist())
                    for step in range(own.steps_per_epoch)
                    for number in own.share(step)
                ]
                parts |= {(step, number): samples for step, number, samples in mine}
                assert [part.tolist() for part in own.rank_indices(epoch)] == [samples for _, _, samples in mine]
                assert [part.tolist() for part in own.rank_indices(epoch, 2)] == [
                    samples for step, _, samples in mine if step >= 2
                ]
            found.append(dict(sorted(parts.items())))
        assert all(each == found[0] for each in found)
        assert sorted(sample for samples in found[0].values() for sample in samples) == list(range(num_samples))


def test_epochs_have_different_orders() -> None:
    assert not torch.equal(division(0, 1).order(0), division(0, 1).order(1))
    assert not torch.equal(division(0, 1).order(0), division(0, 1, seed=4).order(0))


def config(**elastic: Any) -> Config:
    return Config(
        data=DataConfig(global_batch_size=24), elastic=ElasticConfig(**elastic), launch=LaunchConfig(num_ranks=4)
    )


def test_number_of_micro_batches() -> None:
    """From the config, else from the checkpoint, else the largest number of ranks."""
    assert divide(config(), 100, 0, 2).num_micro_batches == 4
    assert divide(config(), 100, 0, 6).num_micro_batches == 6
    saved = SavedDivision(num_micro_batches=8, global_batch_size=24, num_samples=(100,))
    assert divide(config(), 100, 0, 2, saved).num_micro_batches == 8
    assert divide(config(micro_batches=12), 100, 0, 2, saved).num_micro_batches == 12


def test_fitted_micro_batches_are_halves_of_the_saved_ones() -> None:
    saved = SavedDivision(num_micro_batches=4, global_batch_size=24, num_samples=(100,))
    for number in (None, 4):
        assert saved.problems(config(micro_batches=number), 100, 8) == []
        assert divide(config(micro_batches=number), 100, 0, 2, saved, 8).num_micro_batches == 8
    saved_later = SavedDivision(num_micro_batches=8, global_batch_size=24, num_samples=(100,))
    assert saved_later.problems(config(micro_batches=4), 100, 8) == [], "a checkpoint after the decision"
    (problem,) = saved.problems(config(micro_batches=8), 100)
    assert problem.startswith("elastic.micro_batches=8, but the checkpoint was saved with 4"), "without a decision"
    whole, halves = divide(config(), 100, 0, 1, saved), divide(config(), 100, 0, 1, saved, 8)
    assert halves.steps_per_epoch == whole.steps_per_epoch
    for step in range(whole.steps_per_epoch):
        before = torch.cat([whole.samples(whole.order(0), step, number) for number in whole.share(step)])
        after = torch.cat([halves.samples(halves.order(0), step, number) for number in halves.share(step)])
        assert torch.equal(before, after)


def test_impossible_divisions() -> None:
    with pytest.raises(ConfigError, match=r"data\.global_batch_size is not set: micro-batches need it"):
        divide(Config(), 100, 0, 2)
    with pytest.raises(ConfigError, match="6 ranks are more than the 4 micro-batches"):
        divide(config(), 100, 0, 6, SavedDivision(num_micro_batches=4, global_batch_size=24, num_samples=(100,)))
    with pytest.raises(ConfigError, match="cannot be divided into 5 equal micro-batches: use 25"):
        divide(config(), 100, 0, 5)


def test_seeds_of_micro_batches_differ() -> None:
    seeds = {micro_batch_seed(seed, step, number) for seed in (0, 1) for step in range(20) for number in range(-1, 8)}
    assert len(seeds) == 2 * 20 * 9
    assert all(0 <= seed < 2**63 for seed in seeds)


class Model(nn.Module):
    """Changes buffers of each kind, in place and by assignment."""

    mean: Tensor
    assigned: Tensor
    count: Tensor
    seen: Tensor
    phases: Tensor
    level: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("assigned", torch.tensor([1.0, 2.0]))
        self.register_buffer("count", torch.tensor(5))
        self.register_buffer("seen", torch.tensor([False, False, True]))
        self.register_buffer("limits", torch.tensor([0.0, float("-inf")]))
        self.register_buffer("phases", torch.tensor([1 + 1j, 2 - 1j]))
        self.register_buffer("empty", torch.zeros(0))
        self.register_buffer("level", torch.tensor([5], dtype=torch.uint8))

    def forward(self, value: Tensor, index: int) -> None:
        self.mean += value
        self.assigned = self.assigned * 2 + value
        self.count += 1
        self.seen[index] = True
        self.phases += 1j * value[0]
        self.level -= 2


def test_buffers_change_by_the_weighted_mean_of_micro_batches() -> None:
    inner = Model()
    model = nn.ModuleDict({"inner": inner})
    changes, before = BufferChanges(model), dict(model.named_buffers())
    values, weights = ([1.0, 3.0], [2.0, -1.0], [4.0, 4.0]), (0.5, 0.25, 0.25)
    total = torch.zeros(changes.size)
    for number, (value, weight) in enumerate(zip(values, weights, strict=True)):
        inner(torch.tensor(value), number % 2)
        total += torch.cat(changes.take(weight, torch.float32))
        assert inner.seen.tolist() == [False, False, True], "reset after the micro-batch"
    changes.apply(total)
    found = dict(model.named_buffers())
    assert all(buffer is before[name] for name, buffer in found.items()), "DDP keeps the tensors"
    mean = (torch.tensor(values) * torch.tensor(weights)[:, None]).sum(0)
    assert torch.equal(found["inner.mean"], mean)
    assert torch.equal(found["inner.assigned"], torch.tensor([2.0, 4.0]) + mean)
    assert int(found["inner.count"]) == 6
    assert found["inner.seen"].tolist() == [True, True, True]
    assert found["inner.limits"].tolist() == [0.0, float("-inf")]
    assert found["inner.level"].tolist() == [3]
    assert torch.equal(found["inner.phases"], torch.tensor([1 + 1j, 2 - 1j]) + 1j * mean[0])


def test_settled_buckets_leave_gpu_random_numbers_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    states: list[tuple[Any, int]] = []
    gpu = SimpleNamespace(get_rng_state=lambda device: 7, set_rng_state=lambda *state: states.append(state))
    monkeypatch.setattr(torch, "xpu", gpu)
    linear = nn.Linear(1, 1)
    model = SimpleNamespace(device_type="xpu", device_ids=[1], buffers=linear.buffers, zero_grad=linear.zero_grad)
    settle_buckets(cast(DistributedDataParallel, model), lambda: linear(torch.ones(1)).sum())
    assert states == [(7, 1)]
