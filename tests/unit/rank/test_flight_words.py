"""The all-reduce before training: who is to blame for a wrong sum, and what is said where none comes back."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from hpcdist.errors import PreflightError
from hpcdist.rank import collective_check
from hpcdist.rank.collective_check import blame, contribution, expected

NAMES = ["rank 0 on n1", "rank 1 on n1", "rank 2 on n2", "rank 3 on n2"]


@pytest.mark.parametrize(
    ("culprits", "finders", "said"),
    [
        ([0, 0, 3, 0], [1, 1, 0, 1], ": what rank 2 on n2 adds arrives wrong at 3 of 4 ranks; have the node's memory"),
        ([0, 1, 1, 0], [0, 1, 0, 0], " at rank 1 on n1 alone; have the node's memory"),
        ([4, 4, 4, 4], [1, 1, 1, 1], " at 4 of 4 ranks, by no single rank's fault; try another launch.backend"),
        ([0, 0, 0, 0], [1, 1, 0, 0], " at 2 of 4 ranks, by no single rank's fault; try another launch.backend"),
    ],
)
def test_who_is_to_blame(culprits: list[int], finders: list[int], said: str) -> None:
    text = blame("nccl", "bfloat16", culprits, finders, NAMES)
    assert text.startswith(f"an all-reduce of bfloat16 over nccl gives wrong sums{said}")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64])
@pytest.mark.parametrize("num_ranks", [2, 7, 16, 40, 300])
def test_every_partial_sum_is_exact(num_ranks: int, dtype: torch.dtype) -> None:
    """In whatever order a backend adds: here one after the other, in the dtype itself."""
    sums = torch.zeros((2, 700), dtype=dtype)
    for rank in range(num_ranks):
        sums += contribution(rank, num_ranks, 700, dtype)
    assert torch.equal(sums, expected(num_ranks, 700, dtype))
    assert (sums[0] > 0).all(), "an element that nobody fills would hide a fault"


def test_an_all_reduce_that_does_not_end_is_told_with_what_to_look_at(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[PreflightError] = []

    def hang(*_: Any) -> None:
        end = time.monotonic() + 30
        while not said and time.monotonic() < end:
            time.sleep(0.01)
        raise KeyboardInterrupt  # the process would have ended

    monkeypatch.setattr(collective_check, "check_sums", hang)
    fake = cast(Any, SimpleNamespace(control=object(), rank=0))
    with pytest.raises(KeyboardInterrupt):
        collective_check.check(
            "quick", fake, torch.device("cpu"), "nccl", fake, fake, timeout_s=0.01, on_expiry=said.append
        )
    assert str(said[0]) == (
        "the ranks are connected, but an all-reduce over nccl did not finish within 0.01 s: does a firewall block"
        " ports between the nodes, or do they have several networks? NCCL_SOCKET_IFNAME selects the interface"
    )
