"""Rows of csv logs."""

from pathlib import Path

import pytest

from hpcdist.tracking import csv_logs
from hpcdist.tracking.csv_logs import LogRow, NotALog, read_rows


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "summary.csv"


def test_rows_of_a_growing_file_are_read_once(file: Path) -> None:
    """As timm writes it; the last line is incomplete."""
    file.write_text("epoch,train_loss,eval_top1\r\n0,2.5,10.0\r\n1,1.5,20.")
    rows, done = read_rows(file, -1, final=False)
    assert (rows, done) == ([LogRow(0, {"train_loss": 2.5, "eval_top1": 10.0})], 1)
    file.write_text("epoch,train_loss,eval_top1\r\n0,2.5,10.0\r\n1,1.5,20.5\r\n2,1.0,30")
    rows, done = read_rows(file, done, final=False)
    assert (rows, done) == ([LogRow(1, {"train_loss": 1.5, "eval_top1": 20.5})], 2)
    assert read_rows(file, done, final=True) == ([LogRow(2, {"train_loss": 1.0, "eval_top1": 30.0})], 3)


def test_file_that_is_written_again_with_more_columns(file: Path) -> None:
    """As Lightning's CSVLogger does: empty cells are no values."""
    file.write_text("epoch,step,loss\n0,9,0.5\n")
    _, done = read_rows(file, -1, final=False)
    file.write_text("epoch,step,loss,val_loss\n0,9,0.5,\n0,19,,0.25\n")
    assert read_rows(file, done, final=False) == ([LogRow(19, {"epoch": 0.0, "val_loss": 0.25})], 2)
    file.write_text("epoch,step,loss\n0,1,0.1\n")  # a new log
    assert read_rows(file, 2, final=False) == ([LogRow(1, {"epoch": 0.0, "loss": 0.1})], 1)


def test_rows_before_the_script_appended_are_left_out(file: Path) -> None:
    before = "epoch,loss\n0,2.0\n1,1.0\n"
    file.write_text(f"{before}2,0.5\n")
    assert read_rows(file, -1, start=len(before), final=False) == ([LogRow(2, {"loss": 0.5})], 3)
    assert read_rows(file, -1, end=len(before), final=False)[1] == 2


def test_rows_without_a_column_of_steps_are_numbered(file: Path) -> None:
    log = file.with_name("train_log.csv")
    log.write_text("Name,Loss,note\na,0.5,first\nb,nan?,\n")
    assert read_rows(log, -1, final=False) == ([LogRow(0, {"Loss": 0.5}), LogRow(1, {})], 2)
    log.write_text("Step,loss\n1e3,0.5\n0.5,0.25\n")
    assert [row.step for row in read_rows(log, -1, final=False)[0]] == [1000, 1]


@pytest.mark.parametrize("step", ["inf", "nan", "1e300", "2.5", "x"])
def test_row_without_a_whole_step_is_numbered(file: Path, step: str) -> None:
    file.write_text(f"step,loss\n7,1.0\n{step},0.5\n")
    assert read_rows(file, -1, final=True)[0] == [(7, {"loss": 1.0}), (1, {"loss": 0.5})]


def test_table_that_is_no_log_is_left_out(tmp_path: Path) -> None:
    table = tmp_path / "predictions.csv"
    table.write_text("id,probability\n1,0.5\n")
    with pytest.raises(NotALog, match=r"no column is called step or .* or epoch, and predictions\.csv is not"):
        read_rows(table, -1, final=True)


def test_csv_beyond_the_limits_is_refused(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text("step," + ",".join("abc") + "\n")
    monkeypatch.setattr(csv_logs, "MAX_COLUMNS", 3)
    with pytest.raises(ValueError, match="4 columns, more than 3"):
        read_rows(file, -1, final=True)
    file.write_text('step,"' + "x" * 200_000 + "\n")
    with pytest.raises(ValueError, match="field larger than field limit"):
        read_rows(file, -1, final=True)
    monkeypatch.setattr(csv_logs, "MAX_BYTES", 5)
    with pytest.raises(ValueError, match="bytes, more than 5"):
        read_rows(file, -1, final=True)
