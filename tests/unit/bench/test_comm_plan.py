"""What a communication benchmark measures: sizes, groups, ways between ranks, bandwidths. No rank is started."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from hpcdist.bench import rpc_calls
from hpcdist.bench.comm_config import COMM_DTYPES, COMM_OPERATIONS, CommConfig, parse_bytes
from hpcdist.bench.groups import cuts
from hpcdist.bench.measurement import Timing
from hpcdist.bench.measurement_plan import CorrectnessCheck, Measurement, elements, points, sizes
from hpcdist.bench.operations import OPERATIONS
from hpcdist.bench.pairs import MAX_ALL_PAIRS, rounds, tournament_links
from hpcdist.bench.patterns import DTYPES, NEVER, REDUCTIONS, contribution, message, reduced


def test_names_in_the_schema_are_those_of_the_code() -> None:
    assert list(COMM_OPERATIONS) == list(OPERATIONS)
    assert list(COMM_DTYPES) == list(DTYPES)


@pytest.mark.parametrize(
    ("text", "size"),
    [(1, 1), ("64", 64), ("64K", 1 << 16), ("64 KiB", 1 << 16), ("256m", 1 << 28), ("1.5G", 3 << 29), ("1tb", 1 << 40)],
)
def test_a_number_of_bytes_is_read(text: int | str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "M", "0", "-1", "1.5", "12X", "1e6", True, "256 M B"])
def test_what_is_no_number_of_bytes_is_told(text: int | str) -> None:
    with pytest.raises(ValueError, match="is not a number of bytes: write for example 65536, 64K, 256M or 1G"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"max_bytes": "0.5K5"}, "max_bytes: '0.5K5' is not a number of bytes"),
        ({"operations": ["all_reduc"]}, "operations: 'all_reduc' is unknown: did you mean 'all_reduce'"),
        ({"operations": []}, "operations must name at least one of send_recv"),
        ({"dtypes": ["float8"]}, "dtypes: 'float8' is unknown"),
        ({"dtypes": ["x"]}, "dtypes: 'x' is unknown: known are uint8, int8"),
        ({"longest_s": 0.0}, "longest_s must be > 0, got 0.0"),
        ({"budget_s": -1.0}, "budget_s must be >= 0, got -1.0"),
    ],
)
def test_mistakes_are_told_with_key_and_fix(wrong: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        CommConfig(**wrong)  # type: ignore[arg-type]


def test_sizes_are_powers_of_two() -> None:
    assert sizes(1) == [1]
    assert sizes(9) == sizes(8) == [1, 2, 4, 8]
    assert sizes(1 << 28)[-1] == 1 << 28
    assert len(sizes(1 << 28)) == 29


def test_a_size_is_rounded_up_to_equal_parts() -> None:
    assert [elements(size, "uint8", 3) for size in (1, 3, 4, 1024)] == [3, 3, 6, 1026]
    assert [elements(size, "float32", 1) for size in (1, 4, 7, 1024)] == [1, 1, 1, 256]


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
        ("barrier", None),
    ],
)
def test_bus_bandwidth_is_that_of_nccl_tests(operation: str, factor: float | None) -> None:
    """https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md, for four ranks."""
    assert OPERATIONS[operation].bus_factor(4) == factor


def test_times_are_values_that_were_measured() -> None:
    timing = Timing.of([5.0, 1.0, 2.0, 4.0, 3.0], divided_by=2)
    assert timing == Timing(iterations=5, median_s=1.5, p99_s=2.5, min_s=0.5)
    assert Timing.of([float(value) for value in range(1, 201)]).p99_s == 198


# --- patterns


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8, 150])
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_reductions_are_exact_in_every_dtype(dtype: str, num_ranks: int) -> None:
    """Whatever the order: no partial sum or product leaves what the dtype holds exactly."""
    kind, count = DTYPES[dtype], 40
    for reduction in REDUCTIONS:
        given = [contribution(reduction, rank, num_ranks, count, kind) for rank in range(num_ranks)]
        exact = torch.stack([one.double() for one in given])
        expected = reduced(reduction, num_ranks, count, kind).double()
        found = {"sum": exact.sum(0), "product": exact.prod(0), "max": exact.amax(0), "min": exact.amin(0)}
        assert torch.equal(found[reduction], expected), reduction
        limit = {"uint8": 127, "int8": 127, "bfloat16": 256, "float16": 2048}.get(dtype, 1 << 20)
        assert 0 <= expected.min() <= expected.max() <= limit
        assert num_ranks == 1 or len(expected.unique()) > 1, "a function of the place"


def test_a_message_tells_who_sent_it_and_where_it_is() -> None:
    one, other = message(0, 1000, torch.int8), message(1, 1000, torch.int8)
    assert not bool((one == other).any())
    for shift in (1, 64, 256, 512):
        assert not torch.equal(one[shift:], one[:-shift])
    assert NEVER not in one.tolist()


# --- groups and ways


def test_the_world_is_cut_by_nodes_and_by_rank() -> None:
    assert cuts(["n1"]) == cuts(["n1", "n1"]) == cuts(["n1", "n2"]) == {}
    assert cuts(["n1"] * 4) == {"halves": [[0, 1], [2, 3]], "even and odd": [[0, 2], [1, 3]]}
    assert cuts(["n1", "n2", "n3", "n4"]) == {"halves": [[0, 1], [2, 3]], "even and odd": [[0, 2], [1, 3]]}
    assert cuts(["n1", "n1", "n2", "n2"]) == {"within nodes": [[0, 1], [2, 3]], "across nodes": [[0, 2], [1, 3]]}
    assert cuts(["n1", "n1", "n2"]) == {
        "within nodes": [[0, 1], [2]],
        "across nodes": [[0, 2], [1]],
        "halves": [[0], [1, 2]],
    }


@pytest.mark.parametrize("num", [2, 3, 4, 5, 8, 17])
def test_in_a_tournament_each_meets_each_and_nobody_plays_twice_at_once(num: int) -> None:
    found = tournament_links(range(10, 10 + num))
    for ways in found:
        busy = [rank for way in ways for rank in way]
        assert len(busy) == len(set(busy))
    met = Counter(way for ways in found for way in ways)
    assert met == {(a, b): 1 for a in range(10, 10 + num) for b in range(10, 10 + num) if a != b}
    assert len(found) == 2 * (num - 1 + num % 2)


def test_few_ranks_measure_every_way_alone_and_many_one_rank_a_node() -> None:
    assert rounds(["n1"]) == []
    few = rounds(["n1"] * MAX_ALL_PAIRS)
    assert len(few) == MAX_ALL_PAIRS * (MAX_ALL_PAIRS - 1)
    assert all(len(ways) == 1 for ways in few)
    nodes = [f"n{rank // 4}" for rank in range(64)]
    ways = [way for one in rounds(nodes) for way in one]
    between = {way for way in ways if nodes[way[0]] != nodes[way[1]]}
    assert between == {(a, b) for a in range(0, 64, 4) for b in range(0, 64, 4) if a != b}
    assert set(ways) - between == {(a, b) for a in range(4) for b in range(4) if a != b}
    assert len(rounds([f"n{rank}" for rank in range(64)])) == 2 * 63


def test_calls_go_to_every_node_before_they_go_to_more_of_its_ranks() -> None:
    assert rpc_calls.targets(["n1"]) == []
    assert rpc_calls.targets(["n1", "n1", "n2", "n2"]) == [1, 2, 3]
    assert rpc_calls.targets([f"n{rank // 4}" for rank in range(64)]) == [4, 8, 12, 16, 20, 24, 28, 32]
    assert rpc_calls.targets([f"n{rank // 8}" for rank in range(16)]) == [1, 2, 3, 4, 5, 6, 7, 8]


# --- the plan


def test_everything_is_checked_before_anything_is_measured() -> None:
    found = points(CommConfig(), ["n1"] * 4)
    kinds = [isinstance(point, CorrectnessCheck) for point in found]
    assert kinds == sorted(kinds, reverse=True)
    checked = {(point.variant.title, point.team) for point in found if isinstance(point, CorrectnessCheck)}
    measured = {(one.series.variant.title, one.series.team) for one in found if isinstance(one, Measurement)}
    assert measured <= checked
    assert {team for _, team in checked} == {"world", "halves", "even and odd"}
    assert {title for title, _ in measured} == {title for title, _ in checked}


def test_only_what_is_named_is_measured() -> None:
    cfg = CommConfig(operations=["barrier"], max_bytes=1024)
    assert [type(point).__name__ for point in points(cfg, ["n1", "n1"])] == ["CorrectnessCheck", "Measurement"]
    cfg = CommConfig(operations=["all_reduce"], max_bytes=64, dtypes=["float64", "uint8"])
    measured = [one for one in points(cfg, ["n1", "n1"]) if isinstance(one, Measurement)]
    dense = [(one.series.dtype, one.size) for one in measured if one.series.variant.reduction == "sum"]
    assert dense == [("float64", size) for size in (8, 16, 32, 64)] + [("uint8", 1 << power) for power in range(7)]
    assert [one.size for one in measured if one.is_last][:2] == [64, 64]


def test_a_world_of_one_has_no_ways_and_no_calls() -> None:
    kinds = {type(point).__name__ for point in points(CommConfig(), ["n1"])}
    assert kinds == {"CorrectnessCheck", "Measurement"}
