"""Schedules and bandwidths that preflight, ranks and benchmark share."""

from __future__ import annotations

import pytest

from hpcdist.host.network import amount, bandwidths, find_slow_links, rate, seconds, times, tournament


@pytest.mark.parametrize("num_players", [2, 3, 4, 9, 16, 33, 64])
@pytest.mark.parametrize("num_rounds", [1, 3, 7, 64])
def test_tournament_pairs_each_player_with_a_new_partner_in_each_round(num_players: int, num_rounds: int) -> None:
    rounds = tournament(num_players, num_rounds)
    assert len(rounds) == min(num_rounds, num_players - 1 + num_players % 2)
    for partners in rounds:
        assert all(partners[other] == player for player, other in enumerate(partners) if other is not None)
        assert sum(other is None for other in partners) == num_players % 2
    for player in range(num_players):
        met = [partners[player] for partners in rounds if partners[player] is not None]
        assert len(met) == len(set(met))


@pytest.mark.parametrize(
    ("operation", "factor"),
    [
        ("all_reduce", 2 * 3 / 4),
        ("ring_all_reduce", 2 * 3 / 4),
        ("reduce_scatter", 3 / 4),
        ("all_gather", 3 / 4),
        ("all_to_all", 3 / 4),
        ("scatter", 3 / 4),
        ("gather", 3 / 4),
        ("broadcast", 1),
        ("reduce", 1),
        ("send_recv", 1),
        ("isend_irecv", 1),
    ],
)
def test_bandwidths_of_four_ranks_equal_those_of_nccl_tests(operation: str, factor: float) -> None:
    """https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md"""
    assert bandwidths(operation, 1000, 0.5, 4) == (2000, 2000 * factor)


def test_slow_link_is_a_slow_pair_if_each_end_has_a_single_partner() -> None:
    links = {(rank, (rank + 1) % 6): 1e9 for rank in range(6)} | {(2, 3): 1e8}
    found = find_slow_links(links, 1.5)
    assert (found.sends, found.receives, found.pairs) == (set(), set(), {(2, 3)})
    assert found.usual == 1e9


def test_units() -> None:
    assert [amount(value) for value in (1, 1000, 1024, 1536, 2**28, 2**40)] == [
        "1 B", "1000 B", "1 KiB", "1.5 KiB", "256 MiB", "1024 GiB",
    ]  # fmt: skip
    assert [seconds(value) for value in (8.31e-6, 1.2e-4, 9.999e-4, 0.5, 75.0, 1234.0)] == [
        "8.31 µs", "120 µs", "1.00 ms", "500 ms", "75.0 s", "1234 s",
    ]  # fmt: skip
    assert [rate(value) for value in (0.0, 512, 2.51e7, 9.999e8, 1.2e11)] == [
        "0.00 B/s", "512 B/s", "25.1 MB/s", "1.00 GB/s", "120 GB/s",
    ]  # fmt: skip
    assert rate(9.8e8, 1.31e9) == "0.980 / 1.31 GB/s"
    assert [times(value) for value in (1.0, 1.55, 6.02, 23.4, 123.0)] == ["1×", "1.6×", "6×", "23×", "120×"]
