"""Polling intervals: bounded load and timely heartbeats for any number of ranks."""

from __future__ import annotations

import pytest

from hpcdist.run import status

SIZES = [1, 2, 63, 64, 65, 1000, 4096, 28_000]
DEFAULT_HANG_S = 1800.0


@pytest.mark.parametrize("num_ranks", SIZES)
def test_heartbeat_rate_of_all_ranks_is_bounded(num_ranks: int) -> None:
    rates = [1 / status.beat_interval_s(rank, num_ranks, DEFAULT_HANG_S) for rank in range(num_ranks)]
    assert sum(rates) <= status.WRITES_PER_S + 1
    assert rates[0] == 1, "heartbeats of rank 0 show the progress"


def test_ranks_of_small_runs_write_once_per_second() -> None:
    assert {status.beat_interval_s(rank, 64, DEFAULT_HANG_S) for rank in range(64)} == {1.0}


@pytest.mark.parametrize("hang_timeout_s", [0.5, 60.0, DEFAULT_HANG_S])
@pytest.mark.parametrize("num_ranks", SIZES)
def test_heartbeat_is_read_within_half_the_hang_timeout(num_ranks: int, hang_timeout_s: float) -> None:
    written = status.beat_interval_s(num_ranks - 1, num_ranks, hang_timeout_s)
    poll_s = min(0.2, hang_timeout_s / 8)
    num_polls = -(-num_ranks // status.num_due_ranks(num_ranks, poll_s, hang_timeout_s))
    assert written + num_polls * poll_s <= 0.51 * hang_timeout_s + 2 * poll_s


@pytest.mark.parametrize("num_ranks", SIZES)
def test_number_of_due_ranks_is_bounded_and_reaches_all(num_ranks: int) -> None:
    assert status.num_due_ranks(num_ranks, 0.2, DEFAULT_HANG_S) <= max(1, 0.2 * status.CHECKS_PER_S + 1)
    assert status.num_due_ranks(num_ranks, 0.0, DEFAULT_HANG_S) == 1, "also directly after the last check"
    assert status.num_due_ranks(num_ranks, 1e6, DEFAULT_HANG_S) == num_ranks


def test_rate_of_system_metrics_is_bounded() -> None:
    assert status.system_interval_s(10.0, 512) == 10.0
    assert 10_000 / status.system_interval_s(10.0, 10_000) <= status.WRITES_PER_S
    assert status.system_interval_s(0.0, 10_000) == 0.0, "turned off"
