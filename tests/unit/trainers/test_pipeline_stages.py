"""The trainer `pipeline` without ranks: stages and their schedules."""

import copy
from itertools import accumulate

import pytest
import torch
from torch import nn

from hpcdist.config.loading import load_config
from hpcdist.data.datasets import build_model
from hpcdist.errors import ConfigError
from hpcdist.trainers.pipeline.engine import ideal_bubble, one_f_one_b
from hpcdist.trainers.pipeline.stages import (
    cut_after,
    cut_evenly,
    measure_units,
    use_onednn_for_pointwise,
)

UNITS = ["stem", *(f"layer{layer}.{block}" for layer in (1, 2, 3, 4) for block in (0, 1)), "head"]


def resnet18(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return build_model("resnet18", num_classes=10, in_channels=3, image_size=32)


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
        activities = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities, acc_events=True) as profile:  # else, torch 2.10 warns
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


def test_cut_evenly_minimises_the_maximum_cost() -> None:
    units = list("abcdef")
    assert cut_evenly(units, [1, 1, 1, 1, 1, 1], 3) == [("a", "b"), ("c", "d"), ("e", "f")]
    assert cut_evenly(units, [9, 1, 1, 1, 1, 1], 2) == [("a",), ("b", "c", "d", "e", "f")]
    assert cut_evenly(units, [1, 1, 1, 1, 1, 9], 2) == [("a", "b", "c", "d", "e"), ("f",)]
    assert cut_evenly(units, [3, 1, 4, 1, 5, 9], 3)[2] == ("f",)
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


def test_schedule_has_each_pass_once_and_holds_few_activations() -> None:
    held = []
    for stage in range(4):
        actions = one_f_one_b(stage, 4, 8)
        for kind in ("forward", "backward"):
            assert [micro_batch for each, micro_batch in actions if each == kind] == list(range(8))
        held.append(max(accumulate(1 if kind == "forward" else -1 for kind, _ in actions)))
    assert held == [4, 3, 2, 1]
    assert ideal_bubble(4, 8) == pytest.approx(3 / 11)


def test_invalid_configs_name_the_key_and_the_fix() -> None:
    message = (
        r"model.name=simple_cnn has no stages: trainer pipeline cuts ResNets, such as resnet50(.|\n)*"
        r"data.batch_size=65 cannot be cut into 2 equal parts \(pipeline.num_micro_batches\): use 64"
    )
    with pytest.raises(ConfigError, match=message):
        load_config("pipeline_resnet50", ["data.batch_size=65", "model.name=simple_cnn"])
