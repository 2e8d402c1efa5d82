"""Buffers over the micro-batches of a step: every way in which a forward pass changes them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hpcdist.rank.elastic import BufferChanges


class Inner(nn.Module):
    """Changes buffers in place and by assignment."""

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


class Model(nn.Module):
    """Has the buffers in a submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, value: Tensor, index: int) -> None:
        self.inner(value, index)


VALUES = [torch.tensor([1.0, 3.0]), torch.tensor([2.0, -1.0]), torch.tensor([4.0, 4.0])]
WEIGHTS = [0.5, 0.25, 0.25]


def after_step(shares: list[list[int]]) -> list[dict[str, Tensor]]:
    """Return the buffers of each rank after one step with these micro-batches."""
    models = [Model() for _ in shares]
    objects = [dict(model.named_buffers()) for model in models]
    changes = [BufferChanges(model) for model in models]
    total = torch.zeros(changes[0].size)
    for model, change, share in zip(models, changes, shares, strict=True):
        for number in share:
            model(VALUES[number], number % 2)
            total += torch.cat(change.take(WEIGHTS[number], torch.float32))
    for change in changes:
        change.apply(total)
    for model, before in zip(models, objects, strict=True):
        assert all(buffer is before[name] for name, buffer in model.named_buffers()), "DDP keeps the tensors"
    return [{name: buffer.clone() for name, buffer in model.named_buffers()} for model in models]


def test_buffers_do_not_depend_on_the_shares_of_the_ranks() -> None:
    (alone,) = after_step([[0, 1, 2]])
    for shares in ([[0], [1, 2]], [[0, 1], [], [2]]):
        for found in after_step(shares):
            assert found.keys() == alone.keys()
            for name, value in found.items():
                assert torch.equal(value, alone[name]), name


def test_buffers_change_by_the_weighted_mean() -> None:
    (found,) = after_step([[0, 1, 2]])
    mean = torch.stack([weight * value for weight, value in zip(WEIGHTS, VALUES, strict=True)]).sum(0)
    assert torch.equal(found["inner.mean"], mean)
    assert torch.equal(found["inner.assigned"], torch.tensor([2.0, 4.0]) + mean)
    assert int(found["inner.count"]) == 6
    assert found["inner.seen"].tolist() == [True, True, True]
    assert found["inner.limits"].tolist() == [0.0, float("-inf")]
    assert torch.equal(found["inner.phases"], torch.tensor([1 + 1j, 2 - 1j]) + 1j * mean[0])


def test_values_of_type_bool_change_only_if_a_micro_batch_changes_them() -> None:
    model = Model()
    changes = BufferChanges(model)
    model(VALUES[0], 1)
    total = torch.cat(changes.take(1.0, torch.float32))
    assert model.inner.seen.tolist() == [False, False, True], "reset after the micro-batch"
    changes.apply(total)
    assert model.inner.seen.tolist() == [False, True, True]
