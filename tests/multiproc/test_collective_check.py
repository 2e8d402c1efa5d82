"""The all-reduce check between real ranks: correct sums pass, and a wrong sum is attributed to the faulty rank."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from hpcdist_runs import assert_states_equal
from spawn import Rank, spawn_ranks
from torch import Tensor

from hpcdist.checkpoint.state import rng_state
from hpcdist.config.topology import Topology
from hpcdist.errors import PreflightError
from hpcdist.host.files import read_json
from hpcdist.rank import collective_check
from hpcdist.rank.collective_check import Stopwatch
from hpcdist.rank.process_group import Groups
from hpcdist.run.folder import Attempt

NUM_RANKS = 3
CPU = torch.device("cpu")
FIX = "; have the node's memory, GPUs and network card tested, and leave it out by cluster.exclude until then"


def wrong_contribution(rank: int, num_ranks: int, elements: int, dtype: torch.dtype) -> Tensor:
    """Return a contribution in which one of the 8192 float16 elements of rank 1 is wrong."""
    values = contribution(rank, num_ranks, elements, dtype)
    if rank == 1 and dtype == torch.float16:
        values[0, 1 + 5 * num_ranks] += 1
    return values


contribution, expected = collective_check.contribution, collective_check.expected


def check_error(rank: int, groups: Groups, attempt: Attempt) -> str:
    """Run the check and return its error message; empty without an error."""
    topology = Topology(
        rank=rank,
        world_size=NUM_RANKS,
        local_rank=0,
        local_world_size=1,
        node_rank=rank,
        num_nodes=NUM_RANKS,
        hosts=("n1", "n2", "n3"),
        master_addr="n1",
        master_port=1,
        launcher="slurm",
        job_id="1",
        attempt=1,
    )
    before = rng_state(CPU)
    try:
        collective_check.check(
            "quick",
            topology,
            CPU,
            "gloo",
            groups,
            attempt,
            timeout_s=60,
            on_expiry=lambda error: pytest.fail(str(error)),
        )
    except PreflightError as error:
        return str(error)
    assert_states_equal(rng_state(CPU), before)
    return ""


def run_checks(here: Rank) -> dict[str, Any]:
    """Run a check without a fault and two with one; then measure."""
    control = dist.new_group(backend="gloo")
    assert isinstance(control, dist.ProcessGroup)
    groups = Groups(control, dist.HashStore())  # type: ignore[attr-defined]  # torch exports it at run time
    attempt = Attempt(here.folder / "001")
    attempt.path.mkdir(exist_ok=True)

    def damaged_on_arrival(num_ranks: int, elements: int, dtype: torch.dtype) -> Tensor:
        """Return expected sums that differ from the received ones at rank 2 only, as if these had been damaged."""
        values = expected(num_ranks, elements, dtype)
        if here.rank == 2 and dtype == torch.float64:
            values[:, :7] += 1
        return values

    errors = [check_error(here.rank, groups, attempt)]
    with patch.object(collective_check, "contribution", wrong_contribution):
        errors.append(check_error(here.rank, groups, attempt))
    with patch.object(collective_check, "expected", damaged_on_arrival):
        errors.append(check_error(here.rank, groups, attempt))
    effort = collective_check.Effort(elements=8, rounds=1, largest_bytes=2**18, budget_s=60.0)
    measured = collective_check.measure_all_reduce(Stopwatch(CPU, "gloo"), CPU, groups, effort)
    return {"errors": errors, "network": read_json(attempt.network), "measured": measured}


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return spawn_ranks(run_checks, NUM_RANKS)


def test_all_ranks_attribute_a_wrong_sum_to_the_faulty_rank(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found["errors"] == [
            "",
            "an all-reduce of float16 over gloo gives wrong sums: what rank 1 on n2 adds arrives wrong at 3 of 3 ranks"
            + FIX,
            "an all-reduce of float64 over gloo gives wrong sums at rank 2 on n3 alone" + FIX,
        ]


def test_all_ranks_return_the_same_timings_with_bandwidths_as_in_nccl_tests(ranks: list[dict[str, Any]]) -> None:
    assert all(found["measured"] == ranks[0]["measured"] for found in ranks)
    latency_s, timings = ranks[0]["measured"]
    assert latency_s > 0
    assert [timing["bytes"] for timing in timings] == [2**16, 2**18]
    for timing in timings:
        assert timing["algbw_gb_per_s"] == pytest.approx(timing["bytes"] / timing["time_s"] / 1e9)
        assert timing["busbw_gb_per_s"] == pytest.approx(timing["algbw_gb_per_s"] * 4 / 3)  # 2 (n - 1) / n


def test_rank_0_writes_the_result_file(ranks: list[dict[str, Any]]) -> None:
    network = ranks[0]["network"]
    assert (network["backend"], network["ranks"], network["nodes"], network["warnings"]) == ("gloo", 3, 3, [])
    assert network["text"].startswith("all-reduce over gloo of 3 ranks on 3 nodes is correct: ")
    assert network["all_reduce"][0]["bytes"] == 2**16
