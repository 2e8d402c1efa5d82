"""`hpcdist doctor` with its real checks, except those that start ranks or query clusters."""

from __future__ import annotations

import functools
import json
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from command_line import Cli
from hpcdist_runs import unused_port

from hpcdist.checks import doctor as checks_doctor
from hpcdist.checks import slurm, storage
from hpcdist.checks.storage import migrations
from hpcdist.config.loading import load_config
from hpcdist.host.machine import ok
from hpcdist.run import create
from hpcdist.run.folder import RunDir

#: All tests of this file may start processes.
pytestmark = pytest.mark.processes


@pytest.fixture
def doctor(hpcdist: Cli, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Run `hpcdist doctor` in this process, on a machine without Slurm."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setattr(checks_doctor, "trial_checks", lambda *_: [ok("2 ranks, gloo", "32 checks passed")])
    monkeypatch.setattr(checks_doctor, "read_slurm", lambda: slurm.SlurmFacts(missing=slurm.NEEDED))
    which = shutil.which

    def without_slurm(name: str, *more: Any, **named: Any) -> str | None:
        return None if name == "sbatch" else which(name, *more, **named)

    monkeypatch.setattr(shutil, "which", without_slurm)
    monkeypatch.setattr(checks_doctor.host_machine, "gpu_device_files", lambda: 0)
    monkeypatch.setattr(checks_doctor, "container_runtime", lambda: "")
    return functools.partial(hpcdist, "doctor")


def checks(text: str) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the findings of the document by section and name."""
    return {(check["section"], check["name"]): check for check in json.loads(text)["checks"]}


def test_doctor_prints_sections_and_a_summary(doctor: Cli, tmp_path: Path) -> None:
    code, out, err = doctor()
    assert (code, err) == (0, ""), out
    first, *lines = out.splitlines()
    assert first.startswith("hpcdist ")
    titles = [line for line in lines if line and not line.startswith((" ", "No problem"))]
    assert titles == [
        "Software",
        "Training test",
        "GPUs",
        "Processors and memory",
        "Folder of runs",
        "MLflow",
        "Host name",
        "Slurm",
        "Containers",
    ]
    assert "  ok       2 ranks, gloo  32 checks passed" in lines
    assert f"{tmp_path}/runs" in out
    assert lines[-1].startswith("No problem found that would make a run fail;")
    assert list(tmp_path.iterdir()) == [], "nothing is left by looking"


def test_doctor_prints_json(doctor: Cli, tmp_path: Path) -> None:
    code, out, err = doctor("--json", "--runs-dir", str(tmp_path / "mine"))
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert (found["would_fail"], found["run"], found["runs_dir"]) == (False, None, f"{tmp_path}/mine")
    assert {"hpcdist", "host", "time"} <= found.keys()
    assert checks(out)["Training test", "2 ranks, gloo"]["level"] == "ok"


def test_doctor_exits_with_1_if_a_run_would_fail(doctor: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    access = storage.os.access
    # Root can write everywhere.
    monkeypatch.setattr(storage.os, "access", lambda path, mode: path != tmp_path and access(path, mode))
    code, out, _ = doctor()
    assert code == 1
    # A long path is never cut, so the line may break around it.
    words = " ".join(out.split())
    assert "FAILURE runs" in words
    assert "1 problem would make a run fail" in words
    assert f"- Folder of runs, runs: {tmp_path} belongs to" in words


def test_doctor_reports_an_unavailable_mlflow_as_a_warning(doctor: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{unused_port()}")
    code, out, _ = doctor("--json")
    assert code == 0
    server = checks(out)["MLflow", "server"]
    assert (server["level"], "Connection refused" in server["text"]) == ("warning", True)


def test_doctor_reports_an_outdated_database_without_changing_it(doctor: Cli, tmp_path: Path) -> None:
    oldest = next(revision for revision, before in migrations().items() if not before)
    (tmp_path / "runs").mkdir()
    with closing(sqlite3.connect(tmp_path / "runs" / "mlflow.db")) as connection, connection:
        connection.execute("create table alembic_version (version_num varchar(32))")
        connection.execute("insert into alembic_version values (?)", [oldest])
    before = (tmp_path / "runs" / "mlflow.db").read_bytes()
    code, out, _ = doctor("--json")
    found = checks(out)["MLflow", "database"]
    assert (code, found["level"]) == (0, "warning")
    assert found["fix"].endswith(f"`mlflow db upgrade sqlite:///{tmp_path}/runs/mlflow.db`")
    assert (tmp_path / "runs" / "mlflow.db").read_bytes() == before


def test_doctor_reports_a_tracking_uri_with_a_redacted_password(doctor: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://ada:***@mlflow.site")
    code, out, _ = doctor("--json")
    found = checks(out)["MLflow", "store"]
    assert (code, found["level"], "HPCDIST_TRACKING_URI" in found["text"]) == (0, "warning", True)


def test_doctor_checks_the_folder_of_a_local_run(doctor: Cli, tmp_path: Path) -> None:
    config = load_config("ddp_digits", ["name=first", f"runs_dir={tmp_path}/runs", "experiment=exp"])
    run = create.create_run(config, tmp_path)
    assert isinstance(run, RunDir)
    code, out, err = doctor("first", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["run"] == str(run.path)
    found = checks(out)
    assert found["Run", "state"]["text"] == "created"
    assert found["Folder of runs", "runs"]["text"] == str(run.path)
    assert found["MLflow", "database"]["text"] == f"{tmp_path}/runs/mlflow.db does not exist; the first run creates it"


def test_doctor_rejects_an_unknown_run(doctor: Cli) -> None:
    code, out, err = doctor("nope")
    assert (code, out) == (2, "")
    assert err.startswith("hpcdist: no run 'nope' under")
    assert err.count("\n") == 1
