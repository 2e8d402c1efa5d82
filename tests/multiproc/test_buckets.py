"""DDP buckets: a resumed run is bit-equal to an uninterrupted one, also with more than two ranks."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from hpcdist_runs import assert_states_equal
from spawn import Rank, spawn_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hpcdist.rank.training_loop import settle_buckets

NUM_RANKS = 4
STEPS = 8
RESUMED_AT = 3


def model_of(*, static_graph: bool) -> DistributedDataParallel:
    torch.manual_seed(0)
    # Gradients arrive in another order than that of the parameters; dropout draws random numbers.
    body = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(), nn.Linear(64, 300))
    return DistributedDataParallel(body, gradient_as_bucket_view=True, static_graph=static_graph)


def steps(model: DistributedDataParallel, here: Rank, begin: int, end: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(begin, end):
        torch.manual_seed(1 + step * NUM_RANKS + here.rank)
        loss: Tensor = model(torch.randn(8, 16)).square().mean()
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()


def uninterrupted_and_resumed(here: Rank, settle: Callable[..., None], static_graph: bool) -> list[dict[str, Any]]:
    found = []
    for boundaries in ((0, STEPS), (0, RESUMED_AT, STEPS)):
        state: dict[str, Tensor] = {}
        for begin, end in pairwise(boundaries):
            model = model_of(static_graph=static_graph)
            settle(model, lambda model=model: model(torch.ones(8, 16)).sum())
            if state:
                model.module.load_state_dict(state)
            steps(model, here, begin, end)
            state = {name: value.clone() for name, value in model.module.state_dict().items()}
        found.append(state)
    return found


def final_states(here: Rank) -> dict[str, Any]:
    """Return the states after uninterrupted and resumed trainings, with and without `settle_buckets`."""

    def unsettled(model: DistributedDataParallel, loss: object) -> None:
        return None

    assert_settling_changes_no_state(model_of(static_graph=True))
    return {
        "static": uninterrupted_and_resumed(here, settle_buckets, static_graph=True),
        "dynamic": uninterrupted_and_resumed(here, settle_buckets, static_graph=False),
        "unsettled": uninterrupted_and_resumed(here, unsettled, static_graph=True),
    }


def assert_settling_changes_no_state(model: DistributedDataParallel) -> None:
    """Assert that `settle_buckets` does not change weights, buffers, gradients and random numbers."""
    before = {name: value.clone() for name, value in model.module.state_dict().items()}
    generator = torch.get_rng_state()
    settle_buckets(model, lambda: model(torch.ones(8, 16)).sum())
    assert_states_equal(dict(model.module.state_dict()), before)
    assert torch.equal(torch.get_rng_state(), generator)
    assert [parameter.grad for parameter in model.parameters()] == [None] * 6


@pytest.mark.faults
def test_resume_with_settled_buckets_is_bit_equal() -> None:
    found = spawn_ranks(final_states, num_ranks=NUM_RANKS)[0]
    for kind in ("static", "dynamic"):
        whole, resumed = found[kind]
        assert_states_equal(resumed, whole)
    whole, resumed = found["unsettled"]
    # If this no longer raises, DDP has been changed and `settle_buckets` is not needed any more.
    with pytest.raises(AssertionError, match="differs"):
        assert_states_equal(resumed, whole)
