"""`hpcdist sync` and `hpcdist ui`."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from command_line import Cli, Result
from hpcdist_runs import unused_port

from hpcdist.errors import TrackingError
from hpcdist.host.files import write_json
from hpcdist.run.folder import RunDir
from hpcdist.run.lease import hold
from hpcdist.tracking import ui

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

    monkeypatch.setitem(sys.modules, "hpcdist.tracking.shipper", SimpleNamespace(sync=ship))
    make("first")
    second = make("second", "tracking.uri=http://ada:s3cret@mlflow", "launch.env.API_KEY=s3cret")
    assert hpcdist("sync", "second").code == 0
    second.write_state(replace(second.read_state(), status="finished"))
    busy = make("third")
    uri = f"sqlite:///{tmp_path}/runs/mlflow.db"
    with hold(busy):
        assert hpcdist("sync", "first") == Result(0, "first: 3 points shipped\n", "")
        result = hpcdist("sync")
    assert result.code == 2
    assert result.out.splitlines()[0] == "first: 3 points shipped"
    assert result.out.splitlines()[1].startswith(f"third: its supervisor runs (process {os.getpid()} on ")
    assert result.out.splitlines()[2:] == ["3 runs: 1 uploaded, 1 failed, 1 running"]
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


def ship_all(monkeypatch: pytest.MonkeyPatch, *new: str) -> None:
    """Replace the upload: the runs in `new` have records that MLflow lacks."""

    def ship(run: RunDir, uri: str) -> str:
        return "3 points shipped" if run.name in new else "0 points and 0 artifacts uploaded"

    monkeypatch.setitem(sys.modules, "hpcdist.tracking.shipper", SimpleNamespace(sync=ship))


def test_sync_of_all_runs_prints_news_and_a_summary(
    hpcdist: Cli, make: Callable[..., RunDir], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("first", "second", "third"):
        make(name, status="finished")
    ship_all(monkeypatch, "second")
    assert hpcdist("sync") == Result(0, "second: 3 points shipped\n3 runs: 2 unchanged, 1 uploaded\n", "")
    assert hpcdist("sync", "third").out == "third: 0 points and 0 artifacts uploaded\n", "named by the user"


def test_ui_uploads_and_starts_mlflow_which_prints_one_link(
    hpcdist: Cli, make: Callable[..., RunDir], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started: list[list[str]] = []
    masks: list[int] = []
    store = f"sqlite:///{tmp_path}/runs/mlflow.db"
    for name in ui.variables(store, tmp_path, ""):
        monkeypatch.setenv(name, "from the caller")  # restored after the test
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "false")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))

    def execv(path: str, arguments: list[str]) -> None:
        # A link has been printed or follows at once: the port is held from now on, for uvicorn.
        with socket.socket(fileno=os.dup(stdin)) as listener:
            assert listener.getsockname() == ("127.0.0.1", port)
            assert listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        started.append(arguments)

    stdin = os.open(os.devnull, os.O_RDONLY)  # in place of that of the tests
    dup2 = os.dup2
    monkeypatch.setattr(os, "dup2", lambda descriptor, _: dup2(descriptor, stdin))
    monkeypatch.setattr(os, "execv", execv)
    monkeypatch.setattr(os, "umask", lambda mask: masks.append(mask))
    ship_all(monkeypatch, "first")
    run = make("first", status="finished")
    write_json(run.mlflow, {"experiment_id": "7", "uri": store, "views": ["hpcdist-overview", "hpcdist-cost"]})
    port = unused_port()
    result = hpcdist("ui", "--port", str(port))
    (file,) = tmp_path.glob("state/hpcdist/ui/*.token")
    address = f"http://127.0.0.1:{port}"
    starting = "first: 3 points shipped\nMLflow is starting, and prints its link then; Ctrl-C ends it\n"
    assert result == Result(0, starting, "")
    listing = "#/experiments/7/runs?workflowType=machine_learning"
    overview = f"{listing}&viewStateShareKey=hpcdist-overview"
    assert os.environ["HPCDIST_UI_LINK"] == f"{address}/?token={file.read_text()}{overview}"
    assert os.environ["MLFLOW_DISABLE_TELEMETRY"] == "true"
    assert os.environ["MLFLOW_BACKEND_STORE_URI"] == store
    assert os.environ["HPCDIST_UI_TOKEN_FILE"] == str(file)
    assert started == [ui.command(port)]
    assert masks == [0o077]
    os.close(stdin)  # the second start has the port
    stdin = os.open(os.devnull, os.O_RDONLY)
    assert hpcdist("ui", "--port", str(port), "--links").out.splitlines()[1:] == [
        f"all experiments: {address}/?token={file.read_text()}#/experiments?workflowType=machine_learning",
        f"exp: {address}/?token={file.read_text()}{listing}",
        f"  Overview: {address}/?token={file.read_text()}{overview}",
        f"  Cost: {address}/?token={file.read_text()}{listing}&viewStateShareKey=hpcdist-cost",
        f"scripts: MLFLOW_TRACKING_URI={address} MLFLOW_TRACKING_TOKEN=$(cat {file})",
        "MLflow is starting, and prints its link then; Ctrl-C ends it",
    ]


def test_ui_rejects_an_invalid_port(hpcdist: Cli) -> None:
    result = hpcdist("ui", "--port", "70000")
    assert result.code == 2
    assert "Invalid value for '--port'" in result.err


def test_ui_prints_the_link_to_an_existing_server(
    hpcdist: Cli, make: Callable[..., RunDir], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "execv", lambda *_: pytest.fail("MLflow was started"))
    ship_all(monkeypatch)
    run = make("first", status="finished")
    write_json(run.mlflow, {"experiment_id": "7", "uri": "http://ada:***@mlflow", "views": ["hpcdist-cost"]})
    listing = "http://mlflow/#/experiments/7/runs?workflowType=machine_learning"
    assert hpcdist("ui", "--tracking-uri", "http://ada:s3cret@mlflow") == (0, f"review in MLflow: {listing}\n", "")
    assert hpcdist("ui", "--tracking-uri", "http://ada:s3cret@mlflow", "--links").out == (
        f"exp: {listing}\n  Cost: {listing}&viewStateShareKey=hpcdist-cost\nreview in MLflow: {listing}\n"
    )
    monkeypatch.delenv("HPCDIST_TRACKING_URI")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://other")
    page = "https://other/#/experiments?workflowType=machine_learning"
    assert hpcdist("ui").out == f"review in MLflow: {page}\n"


def test_ui_asks_a_server_that_does_not_answer_only_once(
    hpcdist: Cli, make: Callable[..., RunDir], monkeypatch: pytest.MonkeyPatch
) -> None:
    def ship(run: RunDir, uri: str) -> str:
        raise TrackingError("the server does not answer")

    monkeypatch.setitem(sys.modules, "hpcdist.tracking.shipper", SimpleNamespace(sync=ship))
    for name in ("first", "second"):
        make(name, status="finished")
    result = hpcdist("ui", "--tracking-uri", "http://mlflow")
    assert (result.code, result.err) == (0, "first: the server does not answer\n")


def test_report_is_written_and_its_path_printed(
    hpcdist: Cli, make: Callable[..., RunDir], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", lambda address: not opened.append(address))
    run = make("first", status="finished", created=1.0)
    newer = make("second", status="finished", created=2.0)
    assert hpcdist("report", "first") == Result(0, "runs/exp/first/report.html\n", "")
    assert "first" in run.report.read_text()
    assert opened == []
    run.report.write_text("stale")
    assert hpcdist("report", "first", "--open").code == 0
    assert run.report.read_text() != "stale"
    assert opened == [run.report.as_uri()]
    assert hpcdist("report").out == "runs/exp/second/report.html\n"
    assert newer.report.is_file()
    monkeypatch.setattr("webbrowser.open", lambda address: False)
    assert "no browser was found: open /" in hpcdist("report", "--open").err
    assert "report       runs/exp/first/report.html" in hpcdist("status", "first").out
