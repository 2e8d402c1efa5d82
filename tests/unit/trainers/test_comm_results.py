"""Results of a communication benchmark: the bottleneck without false alarms, comparisons, the file and the report."""

from __future__ import annotations

import io
import math
import random
import re
from dataclasses import replace
from pathlib import Path

import pytest
from report_scene import Factor, row, sample, with_links
from rich.console import Console

from hpcdist.errors import RunFolderError
from hpcdist.trainers.comm.results import (
    ARTIFACT,
    WIDTH,
    CheckResult,
    RankPlace,
    Results,
    Row,
    as_text,
    bottleneck,
    changes,
    comparison,
    differences,
    read_results,
    report,
    sentences,
    show,
    slower,
)
from hpcdist.trainers.comm.train import summary


def at_node(node: str, factor: float = 6.0) -> Factor:
    """Slow down all links from or to a node."""
    return lambda source, target: factor if node in (source, target) and source != target else 1.0


def one_way(source: str, target: str, factor: float = 6.0) -> Factor:
    """Slow down the links from one node to another; `*` is any node."""
    return lambda here, there: factor if source in ("*", here) and target in ("*", there) and here != there else 1.0


def only(sentences: list[str]) -> str:
    (sentence,) = sentences
    return sentence


@pytest.mark.parametrize("num_nodes", [3, 4, 5, 16])
def test_node_that_is_slow_with_all_others_is_named(num_nodes: int) -> None:
    """Most pairs of three nodes include the slow node; the reported median is that of the other pairs."""
    sentence = only(bottleneck(with_links(sample(num_nodes, noise=0.02), slower=at_node("n3"))))
    match = re.fullmatch(r"n3 is (\S+)× slower than the median pair in both directions \((\d+) MB/s, .*", sentence)
    assert match, sentence
    assert 5.5 < float(match[1]) < 6.5
    assert 180 < float(match[2]) < 220
    assert sentence.endswith("1.20 GB/s): check its link and network card") or "median 1." in sentence


def between(first: str, second: str) -> Factor:
    """Slow down the links between two nodes in both directions."""
    return lambda here, there: 6.0 if {here, there} == {first, second} else 1.0


def between_racks(here: str, there: str) -> float:
    """Halve the speed of the links between the halves of eight nodes, which are the majority."""
    return 2.0 if (int(here[1:]) <= 4) != (int(there[1:]) <= 4) else 1.0


def with_slow_rank(results: Results, rank: int, factor: float, *, receives: bool = False) -> Results:
    slow = [rank in ((pair.target,) if receives else (pair.source, pair.target)) for pair in results.pairs]
    pairs = [
        replace(pair, bandwidth=pair.bandwidth / (factor if is_slow else 1))
        for pair, is_slow in zip(results.pairs, slow, strict=True)
    ]
    return replace(results, pairs=pairs)


QUICK = replace(sample(), pairs=[replace(pair, latency_s=2e-6) for pair in sample().pairs])
TWO_SLOW_NODES = with_links(
    sample(), slower=lambda here, there: max(at_node("n2", 4.5)(here, there), at_node("n4", 9.0)(here, there))
)
PAIRS = {frozenset(pair) for pair in (("n1", "n2"), ("n3", "n4"), ("n5", "n6"), ("n7", "n8"), ("n1", "n8"))}
BY_6 = r"is [5-7]\S*× slower than the median pair"
CARD = "check its card, cable and switch port"


@pytest.mark.parametrize(
    ("results", "expected"),
    [
        # Nodes and ranks.
        (with_links(sample(3, 4), slower=at_node("n2")), [f"n2 {BY_6} in both directions.*"]),
        (
            with_slow_rank(sample(2, 4), 5, 3),
            [
                r"rank 5 \(n2\) is .*",
                r"rank 5 \(n2\) is .*× slower than the median pair within a node in both directions.*",
            ],
        ),
        (with_slow_rank(sample(1, 4, noise=0.02), 2, 5, receives=True), ["rank 2 receives 4.9× slower.*"]),
        (TWO_SLOW_NODES, ["n4 is .*", "n2 is .*"]),
        # Directions and pairs.
        (
            with_links(sample(), slower=one_way("n3", "*")),
            [rf"n3 sends [56]\S*× slower than .*, and receives at full speed: {CARD}"],
        ),
        (
            with_links(sample(), slower=one_way("*", "n3")),
            [rf"n3 receives [56]\S*× slower than .*, and sends at full speed: {CARD}"],
        ),
        (
            with_links(sample(), slower=one_way("n3", "n1")),
            [rf"n3 → n1 {BY_6} \(\d+ MB/s, median .*\), but n1 → n3 is not: .*"],
        ),
        (with_links(sample(per_node=2), slower=between("n1", "n3")), [f"n1 ↔ n3 {BY_6} in both directions.*"]),
        (
            with_links(sample(8), slower=lambda here, there: 6.0 if frozenset((here, there)) in PAIRS else 1.0),
            ["10 of 56 pairs are slow. The slowest: .*"],
        ),
        # Latency.
        (
            with_links(sample(), later=at_node("n3", 8.0)),
            [r"n3 has [78]\S*× the latency of the median pair \(\d+ µs, median .* µs\) at full bandwidth.*"],
        ),
        (
            with_links(sample(), later=one_way("n1", "n2", 8.0)),
            [r"n1 → n2 has [789]\S*× the latency of the median pair.*"],
        ),
        (with_links(QUICK, later=at_node("n3", 5.0)), [".* have equal bandwidth.*"]),  # a difference of microseconds
        # No finding.
        (sample(noise=0.03), [r"all 12 pairs have equal bandwidth: 1\.\d\d GB/s, within \d%"]),
        (
            sample(2, 4, noise=0.03),  # pairs within a node are four times faster
            [
                r"all \d+ pairs have equal bandwidth: [\d.]+ GB/s, within \d+%",
                r"within a node: all \d+ pairs have equal bandwidth: [\d.]+ GB/s, within \d+%",
            ],
        ),
        (with_links(sample(8, noise=0.03), slower=between_racks), [".*no pair is an outlier.*"]),
        (sample(1), ["no pairs were measured"]),
        # Two measurements have no estimate of the noise.
        (sample(2), [r"both pairs have equal bandwidth: .*, within \d+%"]),
        (with_links(sample(2), slower=one_way("n1", "n2")), [f"n1 → n2 {BY_6}.*"]),
        (with_links(sample(2, noise=0.0), slower=one_way("n1", "n2", 1.8)), ["no pair is an outlier: .*"]),
    ],
)
def test_bottleneck_is_named_or_the_range_of_bandwidths(results: Results, expected: list[str]) -> None:
    found = bottleneck(results)
    assert len(found) == len(expected), found
    for sentence, pattern in zip(found, expected, strict=True):
        assert re.fullmatch(pattern, sentence), sentence


@pytest.mark.parametrize("num_nodes", [2, 3, 4, 8])
@pytest.mark.parametrize("noise", [0.05, 0.15, 0.25])
def test_noise_is_rarely_a_finding(num_nodes: int, noise: float) -> None:
    """Counts the false alarms in 100 benchmarks of healthy nodes."""
    alarms = [
        sentence
        for seed in range(100)
        for sentence in bottleneck(sample(num_nodes, noise=noise, seed=seed))
        if "er than" in sentence
    ]
    assert len(alarms) <= (1 if noise < 0.2 else 5), alarms


@pytest.mark.parametrize("noise", [0.05, 0.15, 0.25])
def test_slow_node_is_found_in_noise(noise: float) -> None:
    found = [bottleneck(with_links(sample(seed=seed, noise=noise), slower=at_node("n3"))) for seed in range(50)]
    missed = [sentence for sentence in found if not sentence[0].startswith("n3 is ")]
    assert len(missed) <= (0 if noise < 0.2 else 2), missed


def with_transfers(results: Results, *, tail: float = 1.2, outlier: float = 1.0) -> Results:
    """Add transfers of all sizes with p99 / median = `tail`; the one of 64 B takes longer by the factor `outlier`."""
    rows = [row("send_recv", 50e-6 + size / 1e9, size) for size in (2**power for power in range(20))]
    rows = [
        replace(one, p99_s=tail * one.median_s, median_s=one.median_s * (outlier if one.size == 64 else 1.0))
        for one in rows
    ]
    return replace(results, rows=rows)


@pytest.mark.parametrize("busy", [{"tail": 12.0}, {"outlier": 12.0}])
def test_differences_within_the_noise_of_transfers_are_not_findings(busy: dict[str, float]) -> None:
    slow = with_links(sample(), slower=at_node("n3"))
    assert bottleneck(with_transfers(slow))[0].startswith("n3 is ")
    sentence = bottleneck(with_transfers(slow, **busy))
    assert sentence[0].startswith("no pair is an outlier: ")
    assert sentence[1:] == ["the measurements are noisy: transfers differ by up to 12×, which hides smaller faults"]
    much = with_links(sample(), slower=at_node("n3", 50.0))
    assert bottleneck(with_transfers(much, **busy))[0].startswith("n3 is ")


def test_nearly_dead_link_is_found_in_any_noise() -> None:
    dead = with_transfers(with_links(sample(), slower=at_node("n3", 50.0)), tail=1000.0)
    assert bottleneck(dead)[0].startswith("n3 is ")


def test_pairs_without_a_bandwidth_are_ignored() -> None:
    found = with_links(sample(6, noise=0.02), slower=at_node("n5"))
    chance = random.Random(1)
    pairs = [replace(pair, bandwidth=0.0) if chance.random() < 0.2 else pair for pair in found.pairs]
    sentence = only(bottleneck(replace(found, pairs=pairs)))
    assert sentence.startswith("n5 is ")
    assert math.isfinite(float(sentence.split()[2].rstrip("×")))


def test_nodes_are_named_only_if_they_differ() -> None:
    found = sample(2)
    same = [RankPlace(rank=0, node="n1", device="cpu"), RankPlace(rank=1, node="n1", device="cpu")]
    slow = with_links(replace(found), slower=one_way("n1", "n2", 9.0))
    assert bottleneck(slow)[0].startswith("n1 → n2")
    assert bottleneck(replace(slow, ranks=same))[0].startswith("rank 0 → rank 1")


# --- Comparison with an earlier benchmark: slowdowns beyond noise, and properties that must be equal.


def slow_all_reduce(factor: float, powers: range) -> Results:
    """Return the sample with an all_reduce that is slower at sizes of these powers of two."""
    found = sample()

    def changed(one: Row) -> Row:
        if one.operation != "all_reduce" or one.size.bit_length() - 1 not in powers:
            return one
        return replace(one, median_s=one.median_s * factor, p99_s=one.p99_s * factor, min_s=one.min_s * factor)

    return replace(found, rows=list(map(changed, found.rows)))


def compared(now: Results, before: Results) -> list[str]:
    return list(sentences(changes(now, before)))


def test_slowdown_is_reported_with_size_and_times() -> None:
    (sentence,) = compared(slow_all_reduce(3.0, range(20, 24)), sample())
    pattern = r"all_reduce is slower at 4 of 29 sizes, most at \d+ MiB: \S*3\S*× the time \(.* ms, before .* ms\)"
    assert re.fullmatch(pattern, sentence), sentence


def steady(p99: float) -> Results:
    """Return the sample with p99 = `p99` medians instead of two."""
    return replace(sample(), rows=[replace(one, p99_s=p99 * one.median_s) for one in sample().rows])


def rough(results: Results) -> Results:
    """Let 16 B take five times as long as 32 B."""
    rows = [
        replace(one, median_s=5 * one.median_s) if (one.operation, one.size) == ("all_reduce", 2**4) else one
        for one in results.rows
    ]
    return replace(results, rows=rows)


SLOW = slow_all_reduce(3.0, range(10, 20))
BUSY = replace(
    SLOW, rows=[replace(one, min_s=0.5 * old.min_s) for one, old in zip(SLOW.rows, sample().rows, strict=True)]
)


@pytest.mark.parametrize(
    ("now", "before", "expected"),
    [
        (sample(seed=1), sample(seed=2), "nothing is slower by more than 20% beyond noise (median 1.00× the earlier"),
        (sample(), SLOW, "nothing is slower"),
        (slow_all_reduce(3.0, range(20, 21)), sample(), "nothing is slower"),
        (slow_all_reduce(1.8, range(10, 20)), sample(), "nothing is slower"),
        (slow_all_reduce(1.8, range(10, 20)), steady(1.1), "all_reduce is slower at 10 of 29 sizes"),
        (slow_all_reduce(1.15, range(10, 20)), steady(1.01), "nothing is slower"),
        (rough(SLOW), sample(), "nothing is slower"),
        (SLOW, rough(sample()), "nothing is slower"),
        (BUSY, sample(), "nothing is slower"),
    ],
    ids=[
        *("equal", "faster", "one size", "within p99", "above p99", "below 20 %", "rough now", "rough before"),
        "fastest iteration as before",
    ],
)
def test_slowdowns_within_noise_are_not_reported(now: Results, before: Results, expected: str) -> None:
    assert compared(now, before)[0].startswith(expected)


def test_slowdowns_are_ordered_by_factor() -> None:
    now = slow_all_reduce(3.0, range(20, 24))
    rows = [
        replace(one, median_s=9 * one.median_s, min_s=9 * one.min_s) if one.operation == "broadcast" else one
        for one in now.rows
    ]
    found = [sentence.partition(" is ")[0] for sentence in compared(replace(now, rows=rows), sample())]
    assert found == ["broadcast", "all_reduce"]


def test_operations_of_one_benchmark_only_are_omitted() -> None:
    one, other = (replace(sample(), rows=[row(name, 1e-3, 8)]) for name in ("gather", "scatter"))
    assert compared(one, other) == ["the benchmarks have no measurement in common"]


def test_operation_with_a_single_size_can_be_slower() -> None:
    found = changes(*(replace(sample(), rows=[row("barrier", time_s, 0)]) for time_s in (9e-4, 1e-4)))
    ((key, (change,)),) = found.items()
    assert (key, slower([change])) == ("barrier", [change])
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
    assert differences(sample(), before) == expected


# --- The results file of a communication benchmark.


def test_results_are_read_back_unchanged(tmp_path: Path) -> None:
    with pytest.raises(
        RunFolderError, match=r"comm/results.json does not exist: is this a run of `hpcdist bench comm`"
    ):
        read_results(tmp_path)
    path = tmp_path / ARTIFACT
    path.parent.mkdir()
    results = sample(notes=["reduce: nothing above 1 MiB"])
    path.write_text(results.to_json())
    assert read_results(tmp_path) == results


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "results \\[\\]"),
        ('{"version": 1, "overlap": []}', "results.overlap cannot be .*; results.version cannot be 1|version.*overlap"),
        ('{"version": 3}', "missing"),
        ('{"version": 3, "pairs": [{"source": 0}]}', "missing 4 required"),
        ("{", "cannot be read"),
    ],
)
def test_invalid_results_are_rejected(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / ARTIFACT
    path.parent.mkdir()
    path.write_text(text)
    with pytest.raises(RunFolderError, match=message):
        read_results(tmp_path)


def test_summary_counts_passed_checks_and_names_the_rates_at_the_largest_size() -> None:
    skipped = CheckResult(operation="scatter", group="world", dtype="int32", ok=None, error="not supported")
    rows = [row("all_reduce", 1e-3, size) for size in (2**10, 2**20)]
    results = sample(2, rows=rows, checked=[*sample().checked, skipped])
    expected = "2 checks passed; 2 points and 2 pairs of ranks measured; all_reduce of 1 MiB: 1.57 GB/s"
    assert summary(results) == expected


# --- The text report.


def table(text: str, title: str) -> list[list[str]]:
    """Return the lines of a table of the report, split into cells at two spaces or more."""
    lines = text.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith(title))
    found = []
    for line in lines[start + 2 :]:
        if not line.strip():
            break
        found.append([cell.strip() for cell in line.strip().split("  ") if cell.strip()])
    return found


def test_heading_describes_ranks_nodes_and_versions() -> None:
    text = as_text(sample())
    assert text.startswith("4 ranks on 4 nodes (n1, n2, n3, n4), gloo on cpu, partition main, torch 2.15.0\n")
    assert "correct on every rank: 2 operations × 2 dtypes (float32, int32)\n" in text
    many = as_text(sample(9, per_node=2, partition=None, nccl="2.30"))
    assert many.startswith("18 ranks on 9 nodes (n1, n2, … n9), gloo on cpu, torch 2.15.0, NCCL 2.30\n")


def test_tables_show_selected_sizes() -> None:
    found = table(as_text(sample(noise=0.0)), "time of one operation: median / p99")
    head, first = found[0], found[3]
    assert [line[0] for line in found[2:]] == ["reduce", "all_reduce", "broadcast"]
    assert head == ["16 B", "4 KiB", "64 KiB", "1 MiB", "16 MiB", "256 MiB"]
    assert first == [
        "all_reduce",
        "200 µs / 400 µs",
        "207 µs / 414 µs",
        "309 µs / 618 µs",
        "1.95 ms / 3.90 ms",
        "28.2 ms / 56.3 ms",
        "448 ms / 895 ms",
    ]
    bandwidth = table(as_text(sample(noise=0.0)), "bandwidth: ")
    assert bandwidth[3][-1] == "600 / 900 MB/s"
    few = replace(sample(), rows=[row("broadcast", 1e-3, 2**power) for power in range(4)])
    assert table(as_text(few), "time of one")[0] == ["1 B", "2 B", "4 B", "8 B"]


def test_narrow_report_has_fewer_columns() -> None:
    page = io.StringIO()
    show(Console(file=page, width=100, color_system=None), report(sample(notes=["word " * 100]), 100))
    text = page.getvalue()
    assert table(text, "time of one operation")[0] == ["16 B", "64 KiB", "256 MiB"]
    assert "…" not in text
    assert "note: " + "word " * 99 in text


def test_wrong_skipped_and_incomplete_results_are_reported() -> None:
    checked = [
        CheckResult(operation="reduce", group="halves", dtype="int32", ok=False, error="rank 3, element 7: 28, got 27"),
        CheckResult(operation="all_to_all", group="world", dtype="int32", ok=None, error="gloo has none"),
        CheckResult(operation="scatter", group="world", dtype="int32", ok=None, error="gloo has none"),
    ]
    text = as_text(sample(checked=checked, complete=False, notes=["broadcast: stopped at 4 B"]))
    assert "WRONG: reduce of int32 in halves: rank 3, element 7: 28, got 27\n" in text
    assert "skipped: all_to_all, scatter: gloo has none\n" in text
    assert "did not run to its end" in text
    assert "note: broadcast: stopped at 4 B\n" in text
    assert "correct on every rank" not in text


def test_report_contains_barrier_and_pairs() -> None:
    text = as_text(with_links(sample(), slower=lambda source, target: 6.0 if "n3" in (source, target) else 1.0))
    assert "\nbarrier: median / p99 2" in text
    assert [line[0] for line in table(text, "bandwidth of pairs")[2:]] == ["n1", "n2", "n3", "n4"]
    assert text.splitlines()[-1].startswith("bottleneck: n3 is ")


def test_groups_have_separate_tables() -> None:
    rows = [row("all_reduce", 1e-4, size, group="halves", group_size=2) for size in (8, 1024)]
    text = as_text(sample(rows=rows))
    assert table(text, "time of one operation in groups of 2 (halves): median / p99")[2][0] == "all_reduce"


def test_comparison_marks_slower_operations() -> None:
    now = sample(noise=0.0)
    slow = replace(
        now,
        rows=[
            replace(one, median_s=3 * one.median_s, min_s=3 * one.min_s) if one.operation == "broadcast" else one
            for one in now.rows
        ],
    )
    page = io.StringIO()
    show(Console(file=page, width=WIDTH, color_system=None), comparison(slow, now, "first", WIDTH))
    found = table(page.getvalue(), "time relative to first; ! slower beyond noise")
    assert [line[1] for line in found[2:]] == ["1.00", "1.00", "3.00 !"]
    assert "compared with first: broadcast is slower at 29 of 29 sizes, " in page.getvalue()


@pytest.mark.parametrize("empty", ["rows", "pairs", "checked"])
def test_report_of_a_benchmark_without_a_part(empty: str) -> None:
    text = as_text(replace(sample(), **{empty: []}))  # type: ignore[arg-type]
    assert text.startswith("4 ranks on 4 nodes (n1, n2, n3, n4)")
    assert "\nbottleneck: " in text


def test_report_of_a_benchmark_without_results() -> None:
    empty = Results(
        backend="gloo", device="cpu", world_size=1, torch="2", nccl=None, partition=None, nodes=["n1"], ranks=[]
    )
    assert as_text(empty).startswith("1 rank on 1 node (n1), gloo on cpu, torch 2\n")
