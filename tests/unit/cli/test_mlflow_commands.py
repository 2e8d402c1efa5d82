"""`hpcdist sync` and `hpcdist ui`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from command_line import Cli, Result
from hpcdist_runs import unused_port

from hpcdist.errors import TrackingError
from hpcdist.files.atomic import write_json
from hpcdist.run.folder import RunDir
from hpcdist.run.lease import hold
from hpcdist.tracking.server import ui

#: These tests may start processes.
pytestmark = pytest.mark.processes


def test_sync_uploads_runs_that_have_no_shipper(
    hpcdist: Cli, make: Callable[..., RunDir], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shipped: list[tuple[str, str]] = []

    def ship(run: RunDir, uri: str) -> str:
        if run.name == "down":
            raise TrackingError("the server does not answer")
        shipped.append((run.name, uri))
        return "3 points shipped"

    monkeypatch.setitem(sys.modules, "hpcdist.tracking.shipping.shipper", SimpleNamespace(sync=ship))
    make("first")
    second = make("second", "tracking.uri=http://ada:s3cret@mlflow", "launch.env.API_KEY=s3cret")
    assert hpcdist("sync", "second").code == 0
    second.write_state(replace(second.read_state(), status="finished"))
    busy = make("third")
    uri = f"sqlite:///{tmp_path}/runs/mlflow.db"
    with hold(busy):
        assert hpcdist("sync", "first") == Result(0, "first: 3 points shipped\n", "")
        result = hpcdist("sync")
    assert result.code == 1
    assert result.out.splitlines()[0] == "first: 3 points shipped"
    assert result.out.splitlines()[1].startswith(f"third: its supervisor runs (process {os.getpid()} on ")
    assert result.err == (
        "second: the password of http://ada:***@mlflow is not kept in the run folder:"
        " set HPCDIST_TRACKING_URI to the whole URI\n"
    )
    monkeypatch.setenv("HPCDIST_TRACKING_URI", "http://ada:s3cret@mlflow")
    assert hpcdist("sync", "second").code == 0
    with_password = ("second", "http://ada:s3cret@mlflow")
    assert shipped == [with_password, ("first", uri), ("first", uri), with_password]
    make("down")
    assert hpcdist("sync", "down") == Result(1, "", "down: the server does not answer\n")


def test_ui_prints_links_with_a_token_and_starts_mlflow(
    hpcdist: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started: list[list[str]] = []
    masks: list[int] = []
    for name in ("MLFLOW_SERVER_ENABLE_JOB_EXECUTION", "MLFLOW_BACKEND_STORE_URI", "HPCDIST_UI_TOKEN_FILE"):
        monkeypatch.setenv(name, "from the caller")  # restored after the test
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "false")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(os, "execv", lambda path, arguments: started.append(arguments))
    monkeypatch.setattr(os, "umask", lambda mask: masks.append(mask))
    store = f"sqlite:///{tmp_path}/runs/mlflow.db"
    run = RunDir.create(tmp_path / "runs" / "exp" / "first")
    run.config.write_text("{}")
    write_json(run.mlflow, {"experiment_id": "7", "uri": store, "views": ["hpcdist-cost"]})
    port = unused_port()
    result = hpcdist("ui", "--port", str(port))
    (file,) = tmp_path.glob("state/hpcdist/ui/*.token")
    address = f"http://127.0.0.1:{port}"
    assert result == Result(
        0,
        f"all experiments: {address}/?token={file.read_text()}#/experiments?workflowType=machine_learning\n"
        f"exp: {address}/?token={file.read_text()}#/experiments/7/runs?workflowType=machine_learning\n"
        f"  Cost: {address}/?token={file.read_text()}#/experiments/7/runs?workflowType=machine_learning"
        "&viewStateShareKey=hpcdist-cost\n"
        f"scripts: MLFLOW_TRACKING_URI={address} MLFLOW_TRACKING_TOKEN=$(cat {file})\n"
        "MLflow is starting: the links work after it prints `Uvicorn running`\n",
        "",
    )
    assert os.environ["MLFLOW_DISABLE_TELEMETRY"] == "true"
    assert os.environ["MLFLOW_BACKEND_STORE_URI"] == store
    assert os.environ["HPCDIST_UI_TOKEN_FILE"] == str(file)
    assert started == [ui.command(port)]
    assert masks == [0o077]


def test_ui_rejects_an_invalid_port(hpcdist: Cli) -> None:
    result = hpcdist("ui", "--port", "70000")
    assert result.code == 2
    assert "Invalid value for '--port'" in result.err


def test_ui_prints_the_links_to_an_existing_server(
    hpcdist: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(os, "execv", lambda *_: pytest.fail("MLflow was started"))
    run = RunDir.create(tmp_path / "runs" / "exp" / "first")
    run.config.write_text("{}")
    write_json(run.mlflow, {"experiment_id": "7", "uri": "http://ada:***@mlflow", "views": ["hpcdist-cost"]})
    listing = "http://mlflow/#/experiments/7/runs?workflowType=machine_learning"
    assert hpcdist("ui", "--tracking-uri", "http://ada:s3cret@mlflow").out == (
        "the UI of this MLflow server is at http://mlflow\n"
        f"exp: {listing}\n"
        f"  Cost: {listing}&viewStateShareKey=hpcdist-cost\n"
    )
    monkeypatch.delenv("HPCDIST_TRACKING_URI")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://other")
    assert hpcdist("ui").out == "the UI of this MLflow server is at https://other\n"
