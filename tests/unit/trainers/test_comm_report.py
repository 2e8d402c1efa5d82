"""The text report of a communication benchmark."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console
from sample_comm import row, sample, with_links

from hpcdist.trainers.comm.report import WIDTH, as_text, compared, main_rows, report, show
from hpcdist.trainers.comm.results import CheckResult, Results


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
    assert [line[0] for line in found[2:]] == ["ring_all_reduce", "all_reduce", "broadcast"]
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


def test_tables_show_the_first_dtype() -> None:
    rows = [row("broadcast", 1e-4, 8), row("broadcast", 1e-4, 8, dtype="int64")]
    assert main_rows(sample(rows=rows)) == rows[:1]


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
    show(Console(file=page, width=WIDTH, color_system=None), compared(slow, now, "first", WIDTH))
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
