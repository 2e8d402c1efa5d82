"""The communication benchmark without ranks: bottlenecks, file and report of results; sizes and pairs."""

import io
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from report_scene import Factor, row, sample, with_links
from rich.console import Console

from hpcdist.errors import RunFolderError
from hpcdist.trainers.comm import CommConfig, parse_bytes
from hpcdist.trainers.comm.operations import DTYPES, contribution, reduced
from hpcdist.trainers.comm.results import (
    ARTIFACT,
    CheckResult,
    RankPlace,
    Results,
    as_text,
    bottleneck,
    read_results,
    report,
    show,
)
from hpcdist.trainers.comm.train import MAX_ALL_PAIRS, elements, pair_rounds, sizes, summary, tournament_links


def at_node(node: str, factor: float = 6.0) -> Factor:
    """Slow down all links from or to a node."""
    return lambda source, target: factor if node in (source, target) and source != target else 1.0


def one_way(source: str, target: str, factor: float = 6.0) -> Factor:
    """Slow down the links from one node to another; `*` is any node."""
    return lambda here, there: factor if source in ("*", here) and target in ("*", there) and here != there else 1.0


def between(first: str, second: str) -> Factor:
    """Slow down the links between two nodes in both directions."""
    return lambda here, there: 6.0 if {here, there} == {first, second} else 1.0


def with_slow_rank(results: Results, rank: int, factor: float, *, receives: bool = False) -> Results:
    slow = [rank in ((pair.target,) if receives else (pair.source, pair.target)) for pair in results.pairs]
    pairs = [
        replace(pair, bandwidth=pair.bandwidth / (factor if is_slow else 1))
        for pair, is_slow in zip(results.pairs, slow, strict=True)
    ]
    return replace(results, pairs=pairs)


def without_some_bandwidths(results: Results) -> Results:
    pairs = [replace(one, bandwidth=one.bandwidth * (n % 5 > 0)) for n, one in enumerate(results.pairs)]
    return replace(results, pairs=pairs)


SAME_NODE = [RankPlace(rank=rank, node="n1", device="cpu") for rank in (0, 1)]
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
        # Directions and pairs.
        (with_links(sample(), slower=one_way("n3", "*")),
         [rf"n3 sends [56]\S*× slower than .*, and receives at full speed: {CARD}"]),
        (with_links(sample(), slower=one_way("*", "n3")),
         [rf"n3 receives [56]\S*× slower than .*, and sends at full speed: {CARD}"]),
        (with_links(sample(), slower=one_way("n3", "n1")),
         [rf"n3 → n1 {BY_6} \(\d+ MB/s, median .*\), but n1 → n3 is not: .*"]),
        (with_links(sample(per_node=2), slower=between("n1", "n3")), [f"n1 ↔ n3 {BY_6} in both directions.*"]),
        (with_links(sample(8), slower=lambda here, there: 6.0 if frozenset((here, there)) in PAIRS else 1.0),
         ["10 of 56 pairs are slow. The slowest: .*"]),
        # Latency.
        (with_links(sample(), later=at_node("n3", 8.0)),
         [r"n3 has [78]\S*× the latency of the median pair \(\d+ µs, median .* µs\) at full bandwidth.*"]),
        (with_links(sample(), later=one_way("n1", "n2", 8.0)),
         [r"n1 → n2 has [789]\S*× the latency of the median pair.*"]),
        # No finding.
        (sample(noise=0.03), [r"all 12 pairs have equal bandwidth: 1\.\d\d GB/s, within \d%"]),
        (
            sample(2, 4, noise=0.03),  # pairs within a node are four times faster
            [
                r"all \d+ pairs have equal bandwidth: [\d.]+ GB/s, within \d+%",
                r"within a node: all \d+ pairs have equal bandwidth: [\d.]+ GB/s, within \d+%",
            ],
        ),
        (sample(1), ["no pairs were measured"]),
        (without_some_bandwidths(with_links(sample(6, noise=0.02), slower=at_node("n5"))), ["n5 is [0-9].*"]),
        (replace(with_links(sample(2), slower=one_way("n1", "n2", 9.0)), ranks=SAME_NODE), ["rank 0 → rank 1 .*"]),
        # Two measurements have no estimate of the noise.
        (sample(2), [r"both pairs have equal bandwidth: .*, within \d+%"]),
        (with_links(sample(2), slower=one_way("n1", "n2")), [f"n1 → n2 {BY_6}.*"]),
        (with_links(sample(2, noise=0.0), slower=one_way("n1", "n2", 1.8)), ["no pair is an outlier: .*"]),
    ],
)  # fmt: skip
def test_bottleneck_is_named_or_the_range_of_bandwidths(results: Results, expected: list[str]) -> None:
    found = bottleneck(results)
    assert len(found) == len(expected), found
    for sentence, pattern in zip(found, expected, strict=True):
        assert re.fullmatch(pattern, sentence), sentence


@pytest.mark.parametrize("num_nodes", [2, 3, 8])
@pytest.mark.parametrize("noise", [0.15, 0.25])
def test_noise_is_rarely_a_finding_and_rarely_hides_a_slow_node(num_nodes: int, noise: float) -> None:
    healthy = [sample(num_nodes, noise=noise, seed=seed) for seed in range(100)]
    alarms = [sentence for found in healthy for sentence in bottleneck(found) if "er than" in sentence]
    assert len(alarms) <= (1 if noise < 0.2 else 5), alarms
    if num_nodes == 8:
        slow = [bottleneck(with_links(found, slower=at_node("n3")))[0] for found in healthy]
        missed = [sentence for sentence in slow if not sentence.startswith("n3 is ")]
        assert len(missed) <= (0 if noise < 0.2 else 4), missed


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
    assert bottleneck(with_transfers(much, tail=1000.0))[0].startswith("n3 is ")


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
    for text, expected in (
        ("{", "cannot be read"),
        ("[]", "results \\[\\]"),
        ('{"version": 1}', "version"),
        ('{"version": 4, "pairs": [{"source": 0}]}', "missing 4 required"),
    ):
        path.write_text(text)
        with pytest.raises(RunFolderError, match=expected):
            read_results(tmp_path)


def test_summary_counts_passed_checks_and_names_the_rates_at_the_largest_size() -> None:
    skipped = CheckResult(operation="scatter", dtype="int32", ok=None, error="not supported")
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
    text = as_text(with_links(sample(), slower=at_node("n3")))
    assert "\nbarrier: median / p99 2" in text
    assert [line[0] for line in table(text, "bandwidth of pairs")[2:]] == ["n1", "n2", "n3", "n4"]
    assert text.splitlines()[-1].startswith("bottleneck: n3 is ")


def test_tables_show_selected_sizes() -> None:
    found = table(as_text(sample(noise=0.0)), "time of one operation: median / p99")
    head, first = found[0], found[3]
    assert [line[0] for line in found[2:]] == ["reduce", "all_reduce", "broadcast"]
    assert head == ["16 B", "4 KiB", "64 KiB", "1 MiB", "16 MiB", "256 MiB"]
    assert first[:3] == ["all_reduce", "200 µs / 400 µs", "207 µs / 414 µs"]
    assert first[-1] == "448 ms / 895 ms"
    bandwidth = table(as_text(sample(noise=0.0)), "bandwidth: ")
    assert bandwidth[3][-1] == "600 / 900 MB/s"
    rows = [row("broadcast", 1e-4, size) for size in (1, 2, 4, 8)]
    few = table(as_text(sample(rows=rows)), "time of one operation: median / p99")
    assert few[0] == ["1 B", "2 B", "4 B", "8 B"]
    page = io.StringIO()
    show(Console(file=page, width=100, color_system=None), report(sample(notes=["word " * 100]), 100))
    assert table(page.getvalue(), "time of one operation")[0] == ["16 B", "64 KiB", "256 MiB"]
    assert "note: " + "word " * 99 in page.getvalue()


def test_wrong_skipped_and_incomplete_results_are_reported() -> None:
    checked = [
        CheckResult(operation="reduce", dtype="int32", ok=False, error="rank 3, element 7: 28, got 27"),
        CheckResult(operation="all_to_all", dtype="int32", ok=None, error="gloo has none"),
        CheckResult(operation="scatter", dtype="int32", ok=None, error="gloo has none"),
    ]
    text = as_text(sample(checked=checked, complete=False, notes=["broadcast: stopped at 4 B"]))
    assert "WRONG: reduce of int32: rank 3, element 7: 28, got 27\n" in text
    assert "skipped: all_to_all, scatter: gloo has none\n" in text
    assert "did not run to its end" in text
    assert "note: broadcast: stopped at 4 B\n" in text
    assert "correct on every rank" not in text


@pytest.mark.parametrize("empty", ["rows", "pairs", "checked"])
def test_report_of_a_benchmark_without_a_part(empty: str) -> None:
    text = as_text(replace(sample(), **{empty: []}))  # type: ignore[arg-type]
    assert text.startswith("4 ranks on 4 nodes (n1, n2, n3, n4)")
    assert "\nbottleneck: " in text


# --- Settings.


@pytest.mark.parametrize(
    ("text", "size"),
    [(1, 1), ("64", 64), ("64K", 1 << 16), ("64 KiB", 1 << 16), ("256m", 1 << 28), ("1.5G", 3 << 29), ("1tb", 1 << 40)],
)
def test_parse_bytes_accepts_units(text: int | str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        *(
            ({"max_bytes": text}, "max_bytes: .* is not a number of bytes: write for example 65536, 64K, 256M or 1G")
            for text in ("", "M", "0", "1.5", "12X", True)
        ),
        ({"operations": ["all_reduc"]}, "operations: 'all_reduc' is unknown: did you mean 'all_reduce'"),
        ({"operations": []}, "operations must name at least one of send_recv"),
        ({"operations": ["x"]}, "operations: 'x' is unknown: known are send_recv, isend_irecv"),
    ],
)
def test_invalid_setting_is_reported_with_key_and_fix(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CommConfig(**settings)  # type: ignore[arg-type]


# --- Sizes and times.


def test_sizes_are_powers_of_two_from_one_element_up() -> None:
    assert sizes(1, torch.uint8) == [1]
    assert sizes(9, torch.uint8) == sizes(8, torch.uint8) == [1, 2, 4, 8]
    assert sizes(8, torch.float32) == [4, 8]
    assert sizes(1 << 28, torch.uint8) == [1 << power for power in range(29)]
    assert [elements(size, torch.uint8, 3) for size in (1, 3, 4, 1024)] == [3, 3, 6, 1026], "three equal parts"


# --- Test data.


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8, 150])
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_sums_of_test_data_are_exact_in_every_dtype(dtype: str, num_ranks: int) -> None:
    kind, count = DTYPES[dtype], 40
    given = [contribution(rank, num_ranks, count, kind).to(kind) for rank in range(num_ranks)]
    expected = reduced(num_ranks, count, kind).double()
    assert torch.equal(torch.stack([one.double() for one in given]).sum(0), expected)
    limit = {"uint8": 255, "int8": 127, "bfloat16": 256, "float16": 2048}.get(dtype, 1 << 20)
    assert 0 <= expected.min() <= expected.max() <= limit
    assert num_ranks == 1 or len(expected.unique()) > 1, "differs by index"


# --- Pairs of ranks.


@pytest.mark.parametrize("num", [2, 3, 8, 17])
def test_tournament_measures_each_link_once_and_each_rank_once_at_a_time(num: int) -> None:
    ranks = range(10, 10 + num)
    found = tournament_links(ranks)
    for links in found:
        busy = [rank for link in links for rank in link]
        assert len(busy) == len(set(busy))
    assert Counter(link for links in found for link in links) == {(a, b): 1 for a in ranks for b in ranks if a != b}
    assert len(found) == 2 * (num - 1 + num % 2)


def test_many_ranks_measure_between_the_first_ranks_of_nodes_and_within_the_first_node() -> None:
    nodes = [f"n{rank // 4}" for rank in range(64)]
    links = {link for found in pair_rounds(nodes) for link in found}
    between = {link for link in links if nodes[link[0]] != nodes[link[1]]}
    assert between == {(a, b) for a in range(0, 64, 4) for b in range(0, 64, 4) if a != b}
    assert links - between == {(a, b) for a in range(4) for b in range(4) if a != b}
    assert len(pair_rounds([f"n{rank}" for rank in range(64)])) == 2 * 63
    few = pair_rounds(["n1"] * MAX_ALL_PAIRS)
    assert len(few) == MAX_ALL_PAIRS * (MAX_ALL_PAIRS - 1)
    assert all(len(links) == 1 for links in few), "few ranks measure each link alone"
    assert pair_rounds(["n1"]) == []
