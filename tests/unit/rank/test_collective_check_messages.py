"""The all-reduce check: exactness of its sums, and the messages about wrong sums and about a timeout."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from hpcdist.errors import PreflightError
from hpcdist.rank import collective_check
from hpcdist.rank.collective_check import blame, contribution, expected, largest_exact

NAMES = ["rank 0 on n1", "rank 1 on n1", "rank 2 on n2", "rank 3 on n2"]


@pytest.mark.parametrize(
    ("culprits", "finders", "message"),
    [
        ([0, 0, 3, 0], [1, 1, 0, 1], ": what rank 2 on n2 adds arrives wrong at 3 of 4 ranks; have the node's memory"),
        ([0, 1, 1, 0], [0, 1, 0, 0], " at rank 1 on n1 alone; have the node's memory"),
        ([4, 4, 4, 4], [1, 1, 1, 1], " at 4 of 4 ranks, by no single rank's fault; try another launch.backend"),
        ([0, 0, 0, 0], [1, 1, 0, 0], " at 2 of 4 ranks, by no single rank's fault; try another launch.backend"),
    ],
    ids=["one sender", "one receiver", "all ranks", "several receivers"],
)
def test_message_names_the_rank_only_if_a_single_rank_is_faulty(
    culprits: list[int], finders: list[int], message: str
) -> None:
    text = blame("nccl", "bfloat16", culprits, finders, NAMES)
    assert text.startswith(f"an all-reduce of bfloat16 over nccl gives wrong sums{message}")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64])
@pytest.mark.parametrize("num_ranks", [2, 7, 16, 40, 300])
def test_every_partial_sum_is_exact(num_ranks: int, dtype: torch.dtype) -> None:
    """Backends add in any order; here one rank after the other, in the dtype itself."""
    sums = torch.zeros((2, 700), dtype=dtype)
    for rank in range(num_ranks):
        sums += contribution(rank, num_ranks, 700, dtype)
    assert torch.equal(sums, expected(num_ranks, 700, dtype))
    assert (sums[0] > 0).all(), "an element without a contribution would hide a fault"


def test_largest_exact_number_follows_from_the_mantissa() -> None:
    dtypes = (torch.bfloat16, torch.float16, torch.float32, torch.uint8)
    assert [largest_exact(dtype) for dtype in dtypes] == [2**8, 2**11, 2**24, 255]


def test_timeout_error_names_firewall_and_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    errors: list[PreflightError] = []

    def hang(*_: Any) -> None:
        end = time.monotonic() + 30
        while not errors and time.monotonic() < end:
            time.sleep(0.01)
        raise KeyboardInterrupt  # the real process exits

    monkeypatch.setattr(collective_check, "check_sums", hang)
    fake = cast(Any, SimpleNamespace(control=object(), rank=0))
    with pytest.raises(KeyboardInterrupt):
        collective_check.check(
            "quick", fake, torch.device("cpu"), "nccl", fake, fake, timeout_s=0.01, on_expiry=errors.append
        )
    assert str(errors[0]) == (
        "the ranks are connected, but an all-reduce over nccl did not finish within 0.01 s: does a firewall block"
        " ports between the nodes, or do they have several networks? NCCL_SOCKET_IFNAME selects the interface"
    )
