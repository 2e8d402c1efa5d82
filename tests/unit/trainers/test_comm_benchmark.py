"""The communication benchmark without ranks: file and report of results, settings, sizes and test data."""

import io
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from report_scene import row, sample
from rich.console import Console

from hpcdist.errors import RunFolderError
from hpcdist.trainers.comm import CommConfig, parse_bytes
from hpcdist.trainers.comm.operations import DTYPES, contribution, reduced
from hpcdist.trainers.comm.results import (
    ARTIFACT,
    CheckResult,
    as_text,
    read_results,
    report,
    show,
)
from hpcdist.trainers.comm.train import elements, sizes, summary

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
        ('{"version": 5, "ranks": [{"rank": 0}]}', "missing 2 required"),
    ):
        path.write_text(text)
        with pytest.raises(RunFolderError, match=expected):
            read_results(tmp_path)


def test_summary_has_passed_checks_and_rates_of_the_largest_size() -> None:
    skipped = CheckResult(operation="scatter", dtype="int32", ok=None, error="not supported")
    rows = [row("all_reduce", 1e-3, size) for size in (2**10, 2**20)]
    results = sample(2, rows=rows, checked=[*sample().checked, skipped])
    expected = "2 checks passed; 2 points measured; all_reduce of 1 MiB: 1.57 GB/s"
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
    assert "\nbarrier: median / p99 2" in as_text(sample())


def test_tables_show_selected_sizes() -> None:
    found = table(as_text(sample()), "time of one operation: median / p99")
    head, first = found[0], found[3]
    assert [line[0] for line in found[2:]] == ["reduce", "all_reduce", "broadcast"]
    assert head == ["16 B", "4 KiB", "64 KiB", "1 MiB", "16 MiB", "256 MiB"]
    assert first[:3] == ["all_reduce", "200 µs / 400 µs", "207 µs / 414 µs"]
    assert first[-1] == "448 ms / 895 ms"
    bandwidth = table(as_text(sample()), "bandwidth: ")
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


@pytest.mark.parametrize("empty", ["rows", "checked"])
def test_report_of_a_benchmark_without_a_part(empty: str) -> None:
    text = as_text(replace(sample(), **{empty: []}))  # type: ignore[arg-type]
    assert text.startswith("4 ranks on 4 nodes (n1, n2, n3, n4)")


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
        ({"operations": ["pairs"]}, "operations=pairs was removed: the preflight of a job names slow nodes"),
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
