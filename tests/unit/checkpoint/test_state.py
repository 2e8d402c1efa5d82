"""Clean weight names and the states of random number generators."""

from __future__ import annotations

import io
import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hpcdist.checkpoint.rng_state import rng_state, set_rng_state
from hpcdist.checkpoint.state_dict import clean_state_dict, load_clean_state_dict
from hpcdist.errors import CheckpointError

CPU = torch.device("cpu")


class Net(nn.Module):
    """Has a layer that is called like DDP's."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)
        self.head = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))


@pytest.fixture
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("process_group")
def test_names_are_those_of_the_bare_module_however_it_is_wrapped() -> None:
    torch.manual_seed(0)
    bare = Net()
    names = list(bare.state_dict())
    inner = Net()
    inner.load_state_dict(bare.state_dict())
    inner.head[0] = torch.compile(inner.head[0])
    wrapped = torch.compile(DistributedDataParallel(inner))

    assert "_orig_mod.module.head.0._orig_mod.weight" in wrapped.state_dict()
    for module in (bare, wrapped, nn.DataParallel(bare), torch.compile(bare)):
        state = clean_state_dict(module)
        assert list(state) == names
        assert all(torch.equal(state[name], bare.state_dict()[name]) for name in names)

    other = Net()
    load_clean_state_dict(other, clean_state_dict(wrapped))
    load_clean_state_dict(wrapped, {name: value + 1 for name, value in bare.state_dict().items()})
    assert torch.equal(other.head[0].weight, bare.head[0].weight)
    assert torch.equal(clean_state_dict(wrapped)["head.0.weight"], bare.head[0].weight + 1)


def test_a_state_of_another_model_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"the checkpoint does not fit the model: .*\n.*size mismatch for weight"):
        load_clean_state_dict(nn.Linear(2, 2), clean_state_dict(nn.Linear(2, 3)))
    with pytest.raises(CheckpointError, match=r"(?s)does not fit the model: .*Missing key.*head.0.weight"):
        load_clean_state_dict(Net(), {})


def draw() -> tuple[list[float], list[float], list[float]]:
    return (
        torch.rand(5).tolist(),
        [*np.random.standard_normal(3).tolist(), *np.random.rand(2).tolist()],
        [random.random(), random.gauss(0, 1), random.random()],
    )


def test_random_numbers_go_on_where_they_were() -> None:
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    random.gauss(0, 1)  # leaves a second value behind, which is part of the state
    np.random.standard_normal()

    file = io.BytesIO()
    torch.save(rng_state(CPU), file)
    expected = draw()
    assert draw() != expected
    set_rng_state(torch.load(io.BytesIO(file.getvalue()), weights_only=True), CPU)
    assert draw() == expected


def test_taking_the_state_draws_nothing() -> None:
    state = rng_state(CPU)
    expected = draw()
    set_rng_state(state, CPU)
    rng_state(CPU)
    assert draw() == expected


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_generator() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    state = rng_state(device)
    expected = torch.rand(5, device=device)
    set_rng_state(state, device)
    assert torch.equal(torch.rand(5, device=device), expected)
