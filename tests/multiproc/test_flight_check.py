"""The all-reduce before training: right sums pass, a wrong one is pinned on the rank that it comes from."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hpcdist_runs import assert_states_equal
from spawn import Rank, spawn_ranks
from torch import Tensor

from hpcdist.checkpoint.rng_state import rng_state
from hpcdist.errors import PreflightError
from hpcdist.files.atomic import read_json
from hpcdist.rank import collective_check
from hpcdist.rank.network.process_group import Groups
from hpcdist.rank.topology import Topology
from hpcdist.run.attempt import Attempt

NUM_RANKS = 3
FIX = "; have the node's memory, GPUs and network card tested, and leave it out by cluster.exclude until then"


def one_rank(here: Rank) -> dict[str, Any]:
    """A good check and two with a fault: what a rank says of each; and what it has measured."""
    topology = Topology(
        rank=here.rank,
        world_size=NUM_RANKS,
        local_rank=0,
        local_world_size=1,
        node_rank=here.rank,
        num_nodes=NUM_RANKS,
        hosts=("n1", "n2", "n3"),
        master_addr="n1",
        master_port=1,
        launcher="slurm",
        job_id="1",
        attempt=1,
    )
    control = dist.new_group(backend="gloo")
    assert isinstance(control, dist.ProcessGroup)
    groups = Groups(control, dist.HashStore())  # type: ignore[attr-defined]  # torch exports it at run time
    attempt = Attempt(here.folder / "001")
    attempt.path.mkdir(exist_ok=True)

    def check() -> str:
        before = rng_state(torch.device("cpu"))
        try:
            collective_check.check(
                "quick",
                topology,
                torch.device("cpu"),
                "gloo",
                groups,
                attempt,
                timeout_s=60,
                on_expiry=lambda error: pytest.fail(str(error)),
            )
        except PreflightError as error:
            return str(error)
        assert_states_equal(rng_state(torch.device("cpu")), before)
        return ""

    said = [check()]
    right = collective_check.contribution

    def with_fault(rank: int, num_ranks: int, elements: int, dtype: torch.dtype) -> Tensor:
        values = right(rank, num_ranks, elements, dtype)
        if rank == 1 and dtype == torch.float16:
            values[0, 1 + 5 * num_ranks] += 1  # one element of 8192
        return values

    collective_check.contribution = with_fault
    said.append(check())
    collective_check.contribution = right

    wanted = collective_check.expected

    def misread(num_ranks: int, elements: int, dtype: torch.dtype) -> Tensor:
        values = wanted(num_ranks, elements, dtype)
        if here.rank == 2 and dtype == torch.float64:
            values[:, :7] += 1  # as if what arrives here was damaged on its way
        return values

    collective_check.expected = misread
    said.append(check())
    collective_check.expected = wanted

    effort = collective_check.Effort(elements=8, rounds=1, largest_bytes=2**18, budget_s=60.0)
    latency_s, timings = collective_check.measure(torch.device("cpu"), control, effort)
    return {"said": said, "network": read_json(attempt.network), "latency_s": latency_s, "timings": timings}


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return spawn_ranks(one_rank, NUM_RANKS)


def test_a_wrong_sum_is_pinned_on_its_rank_and_all_ranks_say_the_same(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found["said"] == [
            "",
            "an all-reduce of float16 over gloo gives wrong sums: what rank 1 on n2 adds arrives wrong at 3 of 3 ranks"
            + FIX,
            "an all-reduce of float64 over gloo gives wrong sums at rank 2 on n3 alone" + FIX,
        ]


def test_all_ranks_have_the_same_timings_by_the_convention_of_nccl_tests(ranks: list[dict[str, Any]]) -> None:
    timings = ranks[0]["timings"]
    assert all((found["timings"], found["latency_s"]) == (timings, ranks[0]["latency_s"]) for found in ranks)
    assert [timing.bytes for timing in timings] == [2**16, 2**18]
    for timing in timings:
        assert timing.algbw_gb_per_s == pytest.approx(timing.bytes / timing.time_s / 1e9)
        assert timing.busbw_gb_per_s == pytest.approx(timing.algbw_gb_per_s * 4 / 3)  # 2 (n - 1) / n


def test_rank_0_leaves_what_was_measured(ranks: list[dict[str, Any]]) -> None:
    network = ranks[0]["network"]
    assert (network["backend"], network["ranks"], network["nodes"], network["warnings"]) == ("gloo", 3, 3, [])
    assert network["text"].startswith("all-reduce over gloo of 3 ranks on 3 nodes is correct: ")
    assert network["all_reduce"][0]["bytes"] == 2**16
