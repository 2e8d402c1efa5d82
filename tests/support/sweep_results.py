"""The MLflow runs of a sweep, for tests of local sweeps and of sweeps on Slurm."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import NamedTuple


class Child(NamedTuple):
    status: str
    parent: str | None  #: name of the parent run
    run_id: str


def mlflow_runs(database: Path, sweep: str) -> dict[str, Child]:
    """Return the MLflow run of the sweep and its children by name, and assert that each name is unique."""
    query = """
        select run.run_uuid, run.name, run.status, parent.name from runs run
        left join tags tag on tag.run_uuid = run.run_uuid and tag.key = 'mlflow.parentRunId'
        left join runs parent on parent.run_uuid = tag.value
        where ? in (run.name, parent.name) and run.lifecycle_stage = 'active'
    """
    connection = sqlite3.connect(database)
    try:
        rows = connection.execute(query, (sweep,)).fetchall()
    finally:
        connection.close()
    found = {name: Child(status, parent, run_id) for run_id, name, status, parent in rows}
    assert len(found) == len(rows), rows
    return found


def repair_trainer(project: Path) -> None:
    """Change the trainer of `picky.py` so that it accepts every seed."""
    path = project / "picky.py"
    path.write_text(path.read_text().replace("BAD_SEED = 2", "BAD_SEED = -1"))
