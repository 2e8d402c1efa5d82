"""Metrics in lines that a script prints."""

from pathlib import Path

import pytest

from hpcdist.tracking import output_metrics
from hpcdist.tracking.output_metrics import Match, OutputPatterns, read_lines


def test_values_and_steps_of_lines_are_found() -> None:
    patterns = OutputPatterns(
        {
            "loss": r"iter (?P<step>\d+): loss ([0-9.]+)",
            "val": r"(?P<value>[0-9.]+) on (\w+)",
            "optional": r"lr( [0-9.]+)?",
        }
    )
    assert list(patterns.find("iter 30: loss 2.5, 0.25 on val")) == [Match("loss", 2.5, 30), Match("val", 0.25, None)]
    assert list(patterns.find("iter 30: loss 2.5.1, lr none")) == []
    assert list(patterns.find("iter 30: loss 2.5. Saved.")) == [Match("loss", 2.5, 30)]


def test_expression_that_takes_too_long_is_given_up(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_metrics, "MATCH_S", 0.05)
    patterns = OutputPatterns({"bad": "(a+)+b", "loss": "loss ([0-9.]+)"})
    for _ in range(2):
        assert list(patterns.find(f"loss 0.5 {'a' * 100}")) == [Match("loss", 0.5, None)]
    assert [record.message[:54] for record in caplog.records] == [
        "tracking.stdout_metrics.bad is not used any more: '(a+"
    ]


def test_lines_of_a_growing_log_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"one\ntwo\rthree")
    lines, offset = read_lines(log, 0, final=False)
    assert (lines, offset) == (["one", "two", ""], 8)
    assert read_lines(log, offset, final=False) == ([""], offset)
    log.write_bytes(b"one\ntwo\rthree\n" + b"x" * 5000)
    lines, offset = read_lines(log, offset, final=False)
    assert lines == ["three", ""]
    lines, offset = read_lines(log, offset, final=True)
    assert (lines, offset) == (["x" * 1000], 5014)
    assert read_lines(log, 6000, final=False) == ([], 5014)  # a part was removed
    monkeypatch.setattr(output_metrics, "CHUNK_BYTES", 10)  # a line without an end
    assert read_lines(log, 14, final=False) == (["x" * 10], 24)
