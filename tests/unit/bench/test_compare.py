"""A benchmark beside an earlier one: what got slower is told, noise is not, and what cannot be compared is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from sample_comm import row, sample

from hpcdist.bench.compare import changes, differences, facts, label, sentences, slower
from hpcdist.bench.results import Results, Row


def sized(factor: float, sizes: range) -> Results:
    """A healthy benchmark in which all_reduce is slower at sizes of these powers."""
    found = sample()

    def changed(one: Row) -> Row:
        if one.operation != "all_reduce" or one.mode != "blocking" or one.size.bit_length() - 1 not in sizes:
            return one
        return replace(one, median_s=one.median_s * factor, p99_s=one.p99_s * factor, min_s=one.min_s * factor)

    return replace(found, rows=list(map(changed, found.rows)))


def said(now: Results, before: Results) -> list[str]:
    return list(sentences(changes(now, before)))


def test_what_got_slower_is_told_with_size_and_times() -> None:
    now, before = sized(3.0, range(20, 24)), sample()
    (sentence,) = said(now, before)
    assert sentence.startswith("all_reduce[sum] is slower at 4 of 29 sizes, most at ")
    assert "3× the time (" in sentence
    assert "MiB" in sentence
    assert sentence.endswith(" ms)")


def test_nothing_got_slower() -> None:
    assert said(sample(seed=1), sample(seed=2)) == [
        "nothing is slower by more than 20% beyond noise (median 1.00× the earlier time, over 175 measurements)"
    ]


def test_faster_is_not_slower() -> None:
    assert said(sample(), sized(3.0, range(20, 24)))[0].startswith("nothing is slower")


def test_one_size_alone_is_chance() -> None:
    assert said(sized(3.0, range(20, 21)), sample())[0].startswith("nothing is slower")


def test_slower_within_what_was_usual_before_is_noise() -> None:
    """p99 was twice the median: 1.8 times as long is what an iteration takes now and then."""
    assert said(sized(1.8, range(10, 20)), sample())[0].startswith("nothing is slower")
    steady = replace(sample(), rows=[replace(one, p99_s=1.1 * one.median_s) for one in sample().rows])
    assert "is slower at 10 of 29 sizes" in said(sized(1.8, range(10, 20)), steady)[0]


def test_sizes_that_differ_without_an_order_differ_by_chance() -> None:
    """Where 16 B took five times as long as 32 B, three times is no change."""
    slow = sized(3.0, range(10, 20))
    rows = [
        replace(one, median_s=5 * one.median_s) if (one.operation, one.size) == ("all_reduce", 2**4) else one
        for one in slow.rows
    ]
    assert said(replace(slow, rows=rows), sample())[0].startswith("nothing is slower")
    assert said(
        slow,
        replace(
            sample(),
            rows=[
                replace(one, median_s=5 * one.median_s) if (one.operation, one.size) == ("all_reduce", 2**4) else one
                for one in sample().rows
            ],
        ),
    )[0].startswith("nothing is slower")


def test_by_less_than_a_fifth_is_not_worth_a_word() -> None:
    steady = replace(sample(), rows=[replace(one, p99_s=1.01 * one.median_s) for one in sample().rows])
    assert said(sized(1.15, range(10, 20)), steady)[0].startswith("nothing is slower")


def test_a_machine_that_still_reaches_its_best_is_busy_not_slow() -> None:
    now = sized(3.0, range(10, 20))
    busy = replace(
        now, rows=[replace(one, min_s=0.5 * old.min_s) for one, old in zip(now.rows, sample().rows, strict=True)]
    )
    assert said(busy, sample())[0].startswith("nothing is slower")


def test_the_worst_comes_first() -> None:
    now = sized(3.0, range(20, 24))
    rows = [
        replace(one, median_s=9 * one.median_s, min_s=9 * one.min_s) if one.operation == "broadcast" else one
        for one in now.rows
    ]
    found = [sentence.partition(" is ")[0] for sentence in said(replace(now, rows=rows), sample())]
    assert (set(found[:2]), found[2:]) == ({"broadcast", "broadcast, async"}, ["all_reduce[sum]"])


def test_what_only_one_has_measured_is_left_out() -> None:
    one, other = (replace(sample(), rows=[row(name, "", "blocking", 1e-3, 8)]) for name in ("gather", "scatter"))
    assert said(one, other) == ["the benchmarks have no measurement in common"]


def test_an_operation_of_a_single_size() -> None:
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
def test_what_cannot_be_compared_says_why(changed: dict[str, object], expected: str) -> None:
    before = replace(sample(), **changed)  # type: ignore[arg-type]
    assert differences(facts(sample()), facts(before)) == expected


def test_what_is_not_known_yet_is_no_difference() -> None:
    assert differences({"number of ranks": "4"}, facts(sample())) == ""


def test_labels() -> None:
    assert label(row("all_reduce", "sum", "blocking", 1.0, 8)) == "all_reduce[sum]"
    assert label(row("broadcast", "", "async", 1.0, 8, group="halves")) == "broadcast, async, halves"
