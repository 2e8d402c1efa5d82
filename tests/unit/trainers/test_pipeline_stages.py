"""The trainer `pipeline` without ranks: stages and their schedules."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch
from torch import nn

from hpcdist.data.models import build_model
from hpcdist.errors import ConfigError
from hpcdist.trainers.pipeline.stages import (
    Action,
    Stage,
    cut_after,
    cut_evenly,
    ideal_bubble,
    measure_units,
    one_f_one_b,
    unit_names,
    use_onednn_for_pointwise,
)

UNITS = ["stem", *(f"layer{layer}.{block}" for layer in (1, 2, 3, 4) for block in (0, 1)), "head"]


def resnet18(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return build_model("resnet18", num_classes=10, in_channels=3, image_size=32)


def test_stages_have_the_names_and_outputs_of_the_whole_model() -> None:
    model = resnet18()
    assert unit_names(model) == UNITS
    assert len(unit_names(build_model("resnet50", num_classes=10, in_channels=3, image_size=32))) == 18
    stages = [Stage(model, units) for units in cut_after(UNITS, ["layer1.0", "layer3"])]
    names = [list(stage.state_dict()) for stage in stages]
    assert [name for part in names for name in part] == list(model.state_dict())
    assert names[1][0] == "layer1.1.conv1.weight"
    images = torch.randn(4, 3, 32, 32)
    x = images
    for stage in stages:
        assert stage.training
        x = stage.eval()(x)
    assert torch.equal(x, model.eval()(images))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_running_statistics_are_updated_once_per_micro_batch(checkpointing: bool) -> None:
    model = resnet18()
    stage = Stage(copy.deepcopy(model), UNITS, checkpointing=checkpointing)
    for images in torch.randn(3, 4, 3, 32, 32):
        for part in (model, stage):
            part(images).square().mean().backward()
    assert all(torch.equal(stage.state_dict()[name], value) for name, value in model.state_dict().items())
    assert stage.state_dict()["bn1.num_batches_tracked"] == 3
    gradients = {name: parameter.grad for name, parameter in stage.named_parameters()}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, gradients[name]), name  # type: ignore[arg-type]


def test_activation_checkpointing_saves_memory() -> None:
    def saved_bytes(stage: Stage) -> int:
        sizes: list[int] = []

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            sizes.append(tensor.nbytes)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            stage(torch.randn(4, 3, 64, 64))
        return sum(sizes)

    model = resnet18()
    assert saved_bytes(Stage(model, UNITS, checkpointing=True)) < saved_bytes(Stage(model, UNITS)) / 4


def test_pointwise_convolutions_use_onednn_for_small_batches() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(64, 128, 1), nn.ReLU(), nn.Conv2d(128, 32, 1, bias=False))
    other = copy.deepcopy(plain)
    use_onednn_for_pointwise(other)
    images = torch.randn(4, 64, 8, 8)
    for part in (plain, other):
        part(images).square().mean().backward()
    torch.testing.assert_close(other(images), plain(images))
    for found, expected in zip(other.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad)

    def operators(part: nn.Module) -> set[str]:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            part(images)
        return {event.key for event in profile.key_averages()}

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        # If this fails, torch uses oneDNN itself and `use_onednn_for_pointwise` can be removed.
        assert "aten::_slow_conv2d_forward" in operators(plain)
        assert "aten::_slow_conv2d_forward" not in operators(other)
    finally:
        torch.set_num_threads(threads)


def test_cut_after_splits_at_the_named_units() -> None:
    assert cut_after(UNITS, []) == [tuple(UNITS)]
    assert [stage[-1] for stage in cut_after(UNITS, ["layer2"])] == ["layer2.1", "head"]
    assert [stage[0] for stage in cut_after(UNITS, ["stem", "layer1.1"])] == ["stem", "layer1.0", "layer2.0"]
    with pytest.raises(
        ConfigError, match=r"pipeline.split_points: the model has no 'layer5': its units are stem, layer1.0, "
    ):
        cut_after(UNITS, ["layer5"])
    with pytest.raises(ConfigError, match=r"pipeline.split_points=\['layer3', 'layer2'\] leaves a stage empty"):
        cut_after(UNITS, ["layer3", "layer2"])
    with pytest.raises(ConfigError, match=r"leaves a stage empty: name units in the model's order"):
        cut_after(UNITS, ["head"])


def test_cut_evenly_minimises_the_maximum_cost() -> None:
    units = list("abcdef")
    assert cut_evenly(units, [1, 1, 1, 1, 1, 1], 3) == [("a", "b"), ("c", "d"), ("e", "f")]
    assert cut_evenly(units, [9, 1, 1, 1, 1, 1], 2) == [("a",), ("b", "c", "d", "e", "f")]
    assert cut_evenly(units, [1, 1, 1, 1, 1, 9], 2) == [("a", "b", "c", "d", "e"), ("f",)]
    assert (
        max(
            sum([3, 1, 4, 1, 5, 9][units.index(unit)] for unit in stage)
            for stage in cut_evenly(units, [3, 1, 4, 1, 5, 9], 3)
        )
        == 9
    )
    assert [len(stage) for stage in cut_evenly(units, [1] * 6, 6)] == [1] * 6
    with pytest.raises(ConfigError, match=r"roles.stage=7: the model can be split into 6 stages at most"):
        cut_evenly(units, [1] * 6, 7)


def test_measure_units_does_not_change_the_model() -> None:
    model = resnet18()
    before = copy.deepcopy(model.state_dict())
    seconds = measure_units(model, torch.randn(2, 3, 32, 32), repeats=1)
    assert len(seconds) == len(UNITS)
    assert min(seconds) > 0
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def simulate(forward_s: Sequence[float], backward_s: Sequence[float], num: int) -> float:
    """Return the time at which the last stage is done. Raises AssertionError for a deadlock."""
    num_stages = len(forward_s)
    todo = [one_f_one_b(stage, num_stages, num) for stage in range(num_stages)]
    clock = [0.0] * num_stages
    done: dict[tuple[int, str, int], float] = {}
    while any(todo):
        progressed = False
        for stage, actions in enumerate(todo):
            if not actions:
                continue
            kind, number = actions[0]
            is_forward = kind == "forward"
            before = (stage - 1 if is_forward else stage + 1, kind, number)
            if not is_forward and stage == num_stages - 1:
                before = (stage, "forward", number)
            if before[0] >= 0 and before not in done:
                continue
            start = max(clock[stage], done.get(before, 0.0))
            clock[stage] = start + (forward_s if is_forward else backward_s)[stage]
            done[stage, kind, number] = clock[stage]
            actions.pop(0)
            progressed = True
        assert progressed, "deadlock"
    return max(clock)


@pytest.mark.parametrize(("num_stages", "num"), [(1, 1), (1, 4), (2, 1), (2, 2), (2, 8), (3, 2), (4, 8), (5, 3)])
def test_schedule_has_each_pass_once_and_the_ideal_duration(num_stages: int, num: int) -> None:
    for stage in range(num_stages):
        actions = one_f_one_b(stage, num_stages, num)
        for kind in ("forward", "backward"):
            assert [action.micro_batch for action in actions if action.kind == kind] == list(range(num))
        for number in range(num):
            assert actions.index(Action("forward", number)) < actions.index(Action("backward", number))
    step_s = simulate([1.0] * num_stages, [2.0] * num_stages, num)
    assert step_s == 3.0 * (num_stages + num - 1)
    assert ideal_bubble(num_stages, num) == pytest.approx(1 - 3.0 * num / step_s)


def test_stage_holds_activations_of_few_micro_batches() -> None:
    def held(actions: list[Action]) -> int:
        current = maximum = 0
        for kind, _ in actions:
            current += 1 if kind == "forward" else -1
            maximum = max(maximum, current)
        return maximum

    assert [held(one_f_one_b(stage, 4, 8)) for stage in range(4)] == [4, 3, 2, 1]
