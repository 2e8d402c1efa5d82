"""A process that dies while MLflow creates its tables leaves an empty database, which the next one fills."""

from __future__ import annotations

import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from hpcdist.tracking.mlflow_client import open_client

#: Kills itself before alembic's last migrations: some tables exist, others are missing.
KILLED = """
import os, signal, sys
from alembic.runtime import migration
from hpcdist.tracking.mlflow_client import open_client

number = 0
update = migration.HeadMaintainer.update_to_step

def update_to_step(self, step):
    global number
    number += 1
    if number == 10:
        os.kill(os.getpid(), signal.SIGKILL)
    update(self, step)

migration.HeadMaintainer.update_to_step = update_to_step
open_client(sys.argv[1])
"""


@pytest.mark.processes
@pytest.mark.slow
def test_database_of_a_killed_process_is_created_by_the_next_one(tmp_path: Path) -> None:
    database = tmp_path / "mlflow.db"
    done = subprocess.run([sys.executable, "-c", KILLED, f"sqlite:///{database}"], check=False, timeout=240)
    assert done.returncode == -signal.SIGKILL
    assert database.stat().st_size == 0
    (left,) = tmp_path.glob(".mlflow.db.*")
    with sqlite3.connect(left) as connection:
        assert connection.execute("select count(*) from sqlite_master").fetchone()[0] > 5, "killed in the middle"
    client = open_client(f"sqlite:///{database}")
    assert client.create_run(client.create_experiment("digits")).info.run_id
    assert database.stat().st_mode & 0o777 == 0o600


def test_failure_leaves_no_file_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(uri: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("hpcdist.tracking.mlflow_client._connected", fail)
    with pytest.raises(Exception, match="No space left on device"):
        open_client(f"sqlite:///{tmp_path}/mlflow.db")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mlflow.db", "mlflow.db.lock"]
