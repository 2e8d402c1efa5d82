"""The table at the end of `make faults`."""

from __future__ import annotations

from fault_table import Cell, as_lines


def test_columns_are_aligned_and_unknown_values_have_placeholders() -> None:
    done = Cell("a rank is killed", "ddp", 41.7, 5, 1, 2, 1, "equal", "once", "FINISHED", "ok")
    assert as_lines([done, Cell("time limit", "ddp", verdict="FAILED")]) == [
        "fault             trainer  s   steps lost  starts  attempts  restarts  weights  points  MLflow",
        "a rank is killed  ddp      42  5           1       2         1         equal    once    FINISHED  ok",
        "time limit        ddp      0   -           -       -         -         ?        ?       ?         FAILED",
    ]
