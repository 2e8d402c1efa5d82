"""Plots of a communication benchmark: which files are written, and that lines are distinguishable."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path

import pytest
from sample_comm import sample, with_links

from hpcdist.bench import report
from hpcdist.bench.results import Results
from hpcdist.trainers.comm.train import write_files


def width(path: Path) -> int:
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    return int(struct.unpack(">I", head[16:20])[0])


@pytest.mark.parametrize(
    "results",
    [
        sample(),
        pytest.param(sample(2, 1, noise=0.0), marks=pytest.mark.slow),
        pytest.param(sample(20, noise=0.01), marks=pytest.mark.slow),
        with_links(sample(2, 4), slower=lambda source, target: 100.0 if source == "n1" else 1.0),
        replace(sample(), rows=[row for row in sample().rows if row.mode == "blocking" and row.size < 16]),
        replace(sample(), rows=sample().rows[:1], pairs=sample().pairs[:1]),
    ],
    ids=["healthy", "two equal nodes", "many ranks", "large differences", "one mode", "one point"],
)
def test_all_plots_are_drawn_without_warnings(results: Results, tmp_path: Path) -> None:
    report.draw(results, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"bandwidth.png", "latency.png", "pairs.png"}
    assert all(700 <= width(path) <= 2000 for path in tmp_path.iterdir())


def test_no_plots_without_measurements(tmp_path: Path) -> None:
    report.draw(replace(sample(1), rows=[]), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_fourteen_operations_and_the_ring_have_distinct_line_styles() -> None:
    styles = [report._style(number, ring=False) for number in range(14)] + [report._style(0, ring=True)]
    colours = {(style["color"], style["linestyle"]) for style in styles}
    markers = {(style["marker"], style["linestyle"]) for style in styles}
    assert (len(colours), len(markers)) == (15, 15)


def test_report_and_csv_are_written_without_matplotlib(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with caplog.at_level("INFO"):
        write_files(sample(), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"report.txt", "results.csv"}
    assert "bottleneck: all 12 pairs have equal bandwidth" in caplog.text
    assert "no plots: " in caplog.text
