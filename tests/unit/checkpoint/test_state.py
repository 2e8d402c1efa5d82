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

from hpcdist.checkpoint.state import clean_state_dict, rng_state, set_rng_state

CPU = torch.device("cpu")


class Net(nn.Module):
    """A model with a layer named `module`, as in DistributedDataParallel."""

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
def test_clean_state_dict_has_names_of_bare_module_under_any_wrapper() -> None:
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


def draw() -> tuple[list[float], list[float], list[float]]:
    return (
        torch.rand(5).tolist(),
        [*np.random.standard_normal(3).tolist(), *np.random.rand(2).tolist()],
        [random.random(), random.gauss(0, 1), random.random()],
    )


def test_restored_generators_continue_the_same_sequence() -> None:
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    random.gauss(0, 1)  # keeps a second value, which is part of the state
    np.random.standard_normal()

    file = io.BytesIO()
    torch.save(rng_state(CPU), file)
    expected = draw()
    assert draw() != expected
    set_rng_state(torch.load(io.BytesIO(file.getvalue()), weights_only=True), CPU)
    assert draw() == expected


def test_rng_state_does_not_advance_the_generators() -> None:
    state = rng_state(CPU)
    expected = draw()
    set_rng_state(state, CPU)
    rng_state(CPU)
    assert draw() == expected


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_restored_cuda_generator_continues_the_same_sequence() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    state = rng_state(device)
    expected = torch.rand(5, device=device)
    set_rng_state(state, device)
    assert torch.equal(torch.rand(5, device=device), expected)
