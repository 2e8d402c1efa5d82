"""A communication benchmark without ranks: settings, sizes, groups, pairs of ranks and test data."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from hpcdist.rank.collective_check import Timing
from hpcdist.trainers.comm import COMM_OPERATIONS, CommConfig, parse_bytes
from hpcdist.trainers.comm.operations import DTYPES, NEVER, OPERATIONS, REDUCTIONS, contribution, cuts, message, reduced
from hpcdist.trainers.comm.train import MAX_ALL_PAIRS, elements, pair_rounds, sizes, tournament_links

# --- settings


def test_config_section_names_all_operations() -> None:
    assert list(COMM_OPERATIONS) == list(OPERATIONS)


@pytest.mark.parametrize(
    ("text", "size"),
    [(1, 1), ("64", 64), ("64K", 1 << 16), ("64 KiB", 1 << 16), ("256m", 1 << 28), ("1.5G", 3 << 29), ("1tb", 1 << 40)],
)
def test_parse_bytes_accepts_units(text: int | str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "M", "0", "-1", "1.5", "12X", "1e6", True, "256 M B"])
def test_parse_bytes_rejects_other_values(text: int | str) -> None:
    with pytest.raises(ValueError, match="is not a number of bytes: write for example 65536, 64K, 256M or 1G"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_bytes": "0.5K5"}, "max_bytes: '0.5K5' is not a number of bytes"),
        ({"operations": ["all_reduc"]}, "operations: 'all_reduc' is unknown: did you mean 'all_reduce'"),
        ({"operations": []}, "operations must name at least one of send_recv"),
        ({"operations": ["x"]}, "operations: 'x' is unknown: known are send_recv, isend_irecv"),
    ],
)
def test_invalid_setting_is_reported_with_key_and_fix(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CommConfig(**settings)  # type: ignore[arg-type]


# --- sizes and times


def test_sizes_are_powers_of_two_from_one_element_up() -> None:
    assert sizes(1, torch.uint8, "world") == [1]
    assert sizes(9, torch.uint8, "world") == sizes(8, torch.uint8, "world") == [1, 2, 4, 8]
    assert sizes(8, torch.float32, "world") == [4, 8]
    assert sizes(1 << 28, torch.uint8, "world") == [1 << power for power in range(29)]
    assert sizes(1 << 28, torch.float32, "halves") == [1 << power for power in (4, 8, 12, 16, 20, 24)]


def test_size_is_rounded_up_to_equal_parts() -> None:
    assert [elements(size, torch.uint8, 3) for size in (1, 3, 4, 1024)] == [3, 3, 6, 1026]
    assert [elements(size, torch.float32, 1) for size in (1, 4, 7, 1024)] == [1, 1, 1, 256]


def test_quantiles_are_measured_values() -> None:
    timing = Timing.of([5.0, 1.0, 2.0, 4.0, 3.0], divided_by=2)
    assert timing == Timing(iterations=5, median_s=1.5, p99_s=2.5, min_s=0.5)
    assert Timing.of([float(value) for value in range(1, 201)]).p99_s == 198


# --- test data


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8, 150])
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_reductions_of_test_data_are_exact_in_every_dtype(dtype: str, num_ranks: int) -> None:
    kind, count = DTYPES[dtype], 40
    for reduction in REDUCTIONS:
        given = [contribution(reduction, rank, num_ranks, count, kind) for rank in range(num_ranks)]
        exact = torch.stack([one.double() for one in given])
        expected = reduced(reduction, num_ranks, count, kind).double()
        results = {"sum": exact.sum(0), "product": exact.prod(0), "max": exact.amax(0), "min": exact.amin(0)}
        assert torch.equal(results[reduction], expected), reduction
        limit = {"uint8": 255, "int8": 127, "bfloat16": 256, "float16": 2048}.get(dtype, 1 << 20)
        assert 0 <= expected.min() <= expected.max() <= limit
        assert num_ranks == 1 or len(expected.unique()) > 1, "differs by index"


def test_messages_differ_by_rank_and_by_index() -> None:
    one, other = message(0, 1000, torch.int8), message(1, 1000, torch.int8)
    assert not bool((one == other).any())
    for shift in (1, 64, 256, 512):
        assert not torch.equal(one[shift:], one[:-shift])
    assert NEVER not in one.tolist()


# --- groups and pairs


def test_ranks_are_partitioned_by_node_and_by_number() -> None:
    assert cuts(["n1"]) == cuts(["n1", "n1"]) == cuts(["n1", "n2"]) == {}
    assert cuts(["n1"] * 4) == {"halves": [[0, 1], [2, 3]], "even and odd": [[0, 2], [1, 3]]}
    assert cuts(["n1", "n2", "n3", "n4"]) == {"halves": [[0, 1], [2, 3]], "even and odd": [[0, 2], [1, 3]]}
    assert cuts(["n1", "n1", "n2", "n2"]) == {"within nodes": [[0, 1], [2, 3]], "across nodes": [[0, 2], [1, 3]]}
    assert cuts(["n1", "n1", "n2"]) == {
        "within nodes": [[0, 1], [2]],
        "across nodes": [[0, 2], [1]],
        "halves": [[0], [1, 2]],
    }


@pytest.mark.parametrize("num", [2, 3, 8, 17])
def test_tournament_measures_each_link_once_and_each_rank_once_at_a_time(num: int) -> None:
    ranks = range(10, 10 + num)
    found = tournament_links(ranks)
    for links in found:
        busy = [rank for link in links for rank in link]
        assert len(busy) == len(set(busy))
    assert Counter(link for links in found for link in links) == {(a, b): 1 for a in ranks for b in ranks if a != b}
    assert len(found) == 2 * (num - 1 + num % 2)


def test_few_ranks_measure_each_link_alone() -> None:
    assert pair_rounds(["n1"]) == []
    found = pair_rounds(["n1"] * MAX_ALL_PAIRS)
    assert len(found) == MAX_ALL_PAIRS * (MAX_ALL_PAIRS - 1)
    assert all(len(links) == 1 for links in found)


def test_many_ranks_measure_between_the_first_ranks_of_nodes_and_within_the_first_node() -> None:
    nodes = [f"n{rank // 4}" for rank in range(64)]
    links = {link for found in pair_rounds(nodes) for link in found}
    between = {link for link in links if nodes[link[0]] != nodes[link[1]]}
    assert between == {(a, b) for a in range(0, 64, 4) for b in range(0, 64, 4) if a != b}
    assert links - between == {(a, b) for a in range(4) for b in range(4) if a != b}
    assert len(pair_rounds([f"n{rank}" for rank in range(64)])) == 2 * 63
