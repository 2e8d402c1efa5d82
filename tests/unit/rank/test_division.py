"""The division of a training set over ranks, and the shape of the sum over its micro-batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hpcdist.config.launch_schema import LaunchConfig
from hpcdist.config.schema import Config, DataConfig, ElasticConfig
from hpcdist.errors import ConfigError
from hpcdist.rank.elastic import (
    BufferChanges,
    Division,
    SavedDivision,
    divide,
    micro_batch_seed,
)


def division(rank: int, world_size: int, num_samples: int = 67, **changes: int) -> Division:
    fields: dict[str, Any] = {"global_batch_size": 16, "num_micro_batches": 8, "seed": 3, **changes}
    return Division(num_samples=num_samples, rank=rank, world_size=world_size, **fields)


def test_shares_of_the_last_global_batch_leave_out_empty_micro_batches() -> None:
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
    assert [len(part) for part in one.rank_samples(0)] == sizes
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
                assert [part.tolist() for part in own.rank_samples(epoch)] == [samples for _, _, samples in mine]
                assert [part.tolist() for part in own.rank_samples(epoch, 2)] == [
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


def test_impossible_divisions() -> None:
    with pytest.raises(ConfigError, match=r"data\.global_batch_size is not set: micro-batches need it"):
        divide(Config(), 100, 0, 2)
    with pytest.raises(ConfigError, match="6 ranks are more than the 4 micro-batches"):
        divide(config(), 100, 0, 6, SavedDivision(num_micro_batches=4, global_batch_size=24, num_samples=(100,)))
    with pytest.raises(ConfigError, match="cannot be divided into 5 equal micro-batches: use 25"):
        divide(config(), 100, 0, 5)
    with pytest.raises(ConfigError, match=r"2 ranks are fewer than elastic\.min_ranks=3: use more"):
        divide(config(min_ranks=3), 100, 0, 2)


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

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("assigned", torch.tensor([1.0, 2.0]))
        self.register_buffer("count", torch.tensor(5))
        self.register_buffer("seen", torch.tensor([False, False, True]))
        self.register_buffer("limits", torch.tensor([0.0, float("-inf")]))
        self.register_buffer("phases", torch.tensor([1 + 1j, 2 - 1j]))
        self.register_buffer("empty", torch.zeros(0))

    def forward(self, value: Tensor, index: int) -> None:
        self.mean += value
        self.assigned = self.assigned * 2 + value
        self.count += 1
        self.seen[index] = True
        self.phases += 1j * value[0]


def test_buffers_change_by_the_weighted_mean_of_the_micro_batches() -> None:
    model = nn.ModuleDict({"inner": Model()})
    changes, before = BufferChanges(model), dict(model.named_buffers())
    values, weights = ([1.0, 3.0], [2.0, -1.0], [4.0, 4.0]), (0.5, 0.25, 0.25)
    total = torch.zeros(changes.size)
    for number, (value, weight) in enumerate(zip(values, weights, strict=True)):
        model["inner"](torch.tensor(value), number % 2)
        total += torch.cat(changes.take(weight, torch.float32))
        assert model["inner"].seen.tolist() == [False, False, True], "reset after the micro-batch"
    changes.apply(total)
    found = dict(model.named_buffers())
    assert all(buffer is before[name] for name, buffer in found.items()), "DDP keeps the tensors"
    mean = (torch.tensor(values) * torch.tensor(weights)[:, None]).sum(0)
    assert torch.equal(found["inner.mean"], mean)
    assert torch.equal(found["inner.assigned"], torch.tensor([2.0, 4.0]) + mean)
    assert int(found["inner.count"]) == 6
    assert found["inner.seen"].tolist() == [True, True, True]
    assert found["inner.limits"].tolist() == [0.0, float("-inf")]
    assert torch.equal(found["inner.phases"], torch.tensor([1 + 1j, 2 - 1j]) + 1j * mean[0])
