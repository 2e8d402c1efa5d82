"""Comparison with an earlier benchmark: slowdowns beyond noise, and properties that must be equal."""

from __future__ import annotations

from dataclasses import replace

import pytest
from sample_comm import row, sample

from hpcdist.bench.results import Results, Row, changes, differences, facts, label, sentences, slower


def slow_all_reduce(factor: float, powers: range) -> Results:
    """Return the sample with a blocking all_reduce that is slower at sizes of these powers of two."""
    found = sample()

    def changed(one: Row) -> Row:
        if one.operation != "all_reduce" or one.mode != "blocking" or one.size.bit_length() - 1 not in powers:
            return one
        return replace(one, median_s=one.median_s * factor, p99_s=one.p99_s * factor, min_s=one.min_s * factor)

    return replace(found, rows=list(map(changed, found.rows)))


def comparison(now: Results, before: Results) -> list[str]:
    return list(sentences(changes(now, before)))


def test_slowdown_is_reported_with_size_and_times() -> None:
    now, before = slow_all_reduce(3.0, range(20, 24)), sample()
    (sentence,) = comparison(now, before)
    assert sentence.startswith("all_reduce[sum] is slower at 4 of 29 sizes, most at ")
    assert "3× the time (" in sentence
    assert "MiB" in sentence
    assert sentence.endswith(" ms)")


def test_equal_benchmarks_have_no_slowdown() -> None:
    assert comparison(sample(seed=1), sample(seed=2)) == [
        "nothing is slower by more than 20% beyond noise (median 1.00× the earlier time, over 175 measurements)"
    ]


def test_speedup_is_not_reported() -> None:
    assert comparison(sample(), slow_all_reduce(3.0, range(20, 24)))[0].startswith("nothing is slower")


def test_slowdown_of_a_single_size_is_noise() -> None:
    assert comparison(slow_all_reduce(3.0, range(20, 21)), sample())[0].startswith("nothing is slower")


def test_slowdown_within_the_earlier_p99_is_noise() -> None:
    """In the sample p99 is twice the median."""
    assert comparison(slow_all_reduce(1.8, range(10, 20)), sample())[0].startswith("nothing is slower")
    steady = replace(sample(), rows=[replace(one, p99_s=1.1 * one.median_s) for one in sample().rows])
    assert "is slower at 10 of 29 sizes" in comparison(slow_all_reduce(1.8, range(10, 20)), steady)[0]


def test_slowdown_within_the_roughness_of_either_benchmark_is_noise() -> None:
    """If 16 B takes five times as long as 32 B, a slowdown by three is not significant."""

    def rough(results: Results) -> Results:
        rows = [
            replace(one, median_s=5 * one.median_s) if (one.operation, one.size) == ("all_reduce", 2**4) else one
            for one in results.rows
        ]
        return replace(results, rows=rows)

    slow = slow_all_reduce(3.0, range(10, 20))
    assert comparison(rough(slow), sample())[0].startswith("nothing is slower")
    assert comparison(slow, rough(sample()))[0].startswith("nothing is slower")


def test_slowdown_below_20_percent_is_not_reported() -> None:
    steady = replace(sample(), rows=[replace(one, p99_s=1.01 * one.median_s) for one in sample().rows])
    assert comparison(slow_all_reduce(1.15, range(10, 20)), steady)[0].startswith("nothing is slower")


def test_slowdown_is_noise_if_the_fastest_iteration_is_as_fast_as_before() -> None:
    now = slow_all_reduce(3.0, range(10, 20))
    busy = replace(
        now, rows=[replace(one, min_s=0.5 * old.min_s) for one, old in zip(now.rows, sample().rows, strict=True)]
    )
    assert comparison(busy, sample())[0].startswith("nothing is slower")


def test_slowdowns_are_ordered_by_factor() -> None:
    now = slow_all_reduce(3.0, range(20, 24))
    rows = [
        replace(one, median_s=9 * one.median_s, min_s=9 * one.min_s) if one.operation == "broadcast" else one
        for one in now.rows
    ]
    found = [sentence.partition(" is ")[0] for sentence in comparison(replace(now, rows=rows), sample())]
    assert (set(found[:2]), found[2:]) == ({"broadcast", "broadcast, async"}, ["all_reduce[sum]"])


def test_operations_of_one_benchmark_only_are_omitted() -> None:
    one, other = (replace(sample(), rows=[row(name, "", "blocking", 1e-3, 8)]) for name in ("gather", "scatter"))
    assert comparison(one, other) == ["the benchmarks have no measurement in common"]


def test_operation_with_a_single_size_can_be_slower() -> None:
    found = changes(*(replace(sample(), rows=[row("barrier", "", "blocking", time_s, 0)]) for time_s in (9e-4, 1e-4)))
    ((key, (change,)),) = found.items()
    assert (key[0], slower([change])) == ("barrier", [change])
    assert change.ratio == pytest.approx(9.0)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"partition": "gpu"}, "partition main now and gpu before"),
        ({"partition": None}, "partition main now and none before"),
        ({"backend": "nccl"}, "backend gloo now and nccl before"),
        ({"world_size": 8}, "number of ranks 4 now and 8 before"),
        (
            {"nodes": ["n1", "n2"], "device": "cuda"},
            "device cpu now and cuda before, number of nodes 4 now and 2 before",
        ),
        ({"torch": "2.14"}, ""),
    ],
)
def test_differing_properties_are_listed(changed: dict[str, object], expected: str) -> None:
    before = replace(sample(), **changed)  # type: ignore[arg-type]
    assert differences(facts(sample()), facts(before)) == expected


def test_unknown_properties_are_not_differences() -> None:
    assert differences({"number of ranks": "4"}, facts(sample())) == ""


def test_label_names_variant_mode_and_group() -> None:
    assert label(row("all_reduce", "sum", "blocking", 1.0, 8)) == "all_reduce[sum]"
    assert label(row("broadcast", "", "async", 1.0, 8, group="halves")) == "broadcast, async, halves"
