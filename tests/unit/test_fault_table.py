"""The table at the end of `make faults`."""

from __future__ import annotations

from slurm_faults import Cell, MatrixEntry, as_lines, matrix_lines


def test_columns_are_aligned_and_unknown_values_have_placeholders() -> None:
    done = Cell("a rank is killed", "ddp", 41.7, 5, 1, 2, 1, "equal", "once", "FINISHED", "ok")
    assert as_lines([done, Cell("time limit", "ddp", verdict="FAILED")]) == [
        "fault             trainer  s   steps lost  starts  attempts  restarts  weights  points  MLflow",
        "a rank is killed  ddp      42  5           1       2         1         equal    once    FINISHED  ok",
        "time limit        ddp      0   -           -       -         -         ?        ?       ?         FAILED",
    ]


def test_matrix_has_a_row_per_runtime_and_a_column_per_fault() -> None:
    entries = [("podman", "requeue", "41 s"), ("podman", "dead node", "FAILED"), ("pyxis", "requeue", "skipped")]
    assert matrix_lines([MatrixEntry(*entry) for entry in entries]) == [
        "runtime  requeue  dead node",
        "podman   41 s     FAILED",
        "pyxis    skipped  -",
    ]
