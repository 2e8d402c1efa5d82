"""Tests of the section of `hpcdist doctor` about the MLflow store, with sqlite files and local HTTP servers."""

import base64
import errno
import os
import shutil
import socket
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from hpcdist_runs import unused_port
from http_servers import serving

from hpcdist.checks import runs_folder_checks
from hpcdist.checks import store_checks as module
from hpcdist.checks.node_facts import GIB
from hpcdist.checks.runs_folder_checks import folder_checks
from hpcdist.checks.store_checks import store_checks
from hpcdist.host import storage
from hpcdist.host.check_result import Check


def last_check(uri: str, env: dict[str, str] | None = None) -> Check:
    """Return the last result; the first is about the client."""
    client, *checks = store_checks(uri, env or {})
    assert (client.name, client.level) == ("client", "ok")
    return checks[-1]


def test_database_is_not_created_or_changed(tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    missing = last_check(uri)
    assert (missing.level, missing.text) == ("ok", f"{tmp_path}/mlflow.db does not exist; the first run creates it")
    assert list(tmp_path.iterdir()) == []
    with closing(sqlite3.connect(tmp_path / "mlflow.db")) as connection:
        connection.execute("create table some (text)")
    before = (tmp_path / "mlflow.db").read_bytes()
    assert last_check(uri) == Check(name="database", level="ok", text=f"{uri} can be read")
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [before]


def test_unusable_database_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uri = f"sqlite:///{tmp_path}/text.db"
    (tmp_path / "text.db").write_text("no database\n" * 100)
    check = last_check(uri)
    assert (check.level, "cannot be read (file is not a database)" in check.text) == ("warning", True)
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    check = last_check(uri)
    assert (check.level, "cannot be written by this user" in check.text) == ("warning", True)


def test_database_of_a_killed_process_is_read(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "mlflow.db", isolation_level=None)) as connection:
        for command in ("pragma cache_size=5", "begin", "create table big (text)"):
            connection.execute(command)
        connection.executemany("insert into big values (?)", [("x" * 1000,)] * 1000)
        shutil.copytree(tmp_path, tmp_path / "killed")
    assert (tmp_path / "killed" / "mlflow.db-journal").exists()
    uri = f"sqlite:///{tmp_path}/killed/mlflow.db"
    assert last_check(uri) == Check(name="database", level="ok", text=f"{uri} can be read")


@pytest.fixture
def start_server() -> Iterator[Callable[..., str]]:
    """Return a function that starts a server with these answers and returns its URI."""
    with ExitStack() as running:

        def start(
            health: int = 200, search: Callable[[str], int] = lambda authorization: 200, version: str = "3.17.2\n"
        ) -> str:
            def answer(environ: dict[str, Any], start_response: Callable[..., object]) -> list[bytes]:
                code, text = {
                    "/health": (health, "OK"),
                    "/api/2.0/mlflow/experiments/search": (search(environ.get("HTTP_AUTHORIZATION", "")), "{}"),
                    "/version": (200, version),
                }[environ["PATH_INFO"]]
                start_response(f"{code} status", [])
                return [text.encode()]

            return running.enter_context(serving(answer))

        yield start


def test_working_server_is_ok_and_one_of_another_kind_a_warning(start_server: Callable[..., str]) -> None:
    uri = start_server()
    assert last_check(uri) == Check(name="server", level="ok", text=f"{uri} answers, MLflow 3.17.2")
    for answers, level, text in (
        ({"version": "<html>log in</html>"}, "ok", " answers, MLflow of an unknown version"),
        ({"health": 404}, "warning", "answers 404, so it is not an MLflow"),
        ({"search": lambda _: 500}, "warning", "does not list experiments (answer 500)"),
    ):
        check = last_check(start_server(**answers))
        assert (check.level, text in check.text) == (level, True), check


def test_unreachable_or_silent_server_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    check = last_check(f"http://ada:secret@127.0.0.1:{unused_port()}")
    assert check.level == "warning", "training continues without a server"
    assert "cannot be reached ([Errno 111] Connection refused): training continues" in check.text
    assert "secret" not in check.text
    monkeypatch.setattr(module, "SERVER_TIMEOUT_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        check = last_check(f"http://127.0.0.1:{silent.getsockname()[1]}")
    assert (check.level, "cannot be reached (timed out)" in check.text) == ("warning", True)


def test_missing_and_refused_credentials_differ(start_server: Callable[..., str]) -> None:
    right = "Basic " + base64.b64encode(b"ada:right").decode()
    uri = start_server(search=lambda sent: 200 if sent == right else 401)
    ada = {"MLFLOW_TRACKING_USERNAME": "ada"}
    check = last_check(uri)
    assert (check.level, "requires a user and a password (answer 401)" in check.text) == ("warning", True)
    check = last_check(uri, {**ada, "MLFLOW_TRACKING_PASSWORD": "wrong"})
    assert (check.level, "refuses ada (answer 401)" in check.text) == ("warning", True)
    assert last_check(uri, {**ada, "MLFLOW_TRACKING_PASSWORD": "right"}).level == "ok"
    assert last_check(uri.replace("//", "//ada:right@")).level == "ok"
    assert "refuses eve" in last_check(uri.replace("//", "//eve:x@"), {"MLFLOW_TRACKING_TOKEN": "t"}).text
    assert "refuses the token" in last_check(uri, {"MLFLOW_TRACKING_TOKEN": "old"}).text


def test_file_store_is_a_warning_and_unknown_stores_are_a_note() -> None:
    for uri in ("mlruns", "file:///home/ada/mlruns"):
        check = last_check(uri)
        assert (check.level, "since 3.13" in check.text) == ("warning", True)
    for uri in ("databricks://profile", "postgresql://ada@db/mlflow"):
        assert last_check(uri).level == "note"


def checks_of(folder: Path) -> dict[str, Check]:
    checks = folder_checks(folder)
    assert len({check.name for check in checks}) == len(checks), checks
    return {check.name: check for check in checks}


@pytest.fixture
def fast_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the measurement of the speed, which writes for two seconds."""
    monkeypatch.setattr(storage, "write_speed", lambda *_: 2.0**30)


def test_folder_without_write_permission_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    (check,) = folder_checks(tmp_path)
    me = os.getuid()
    assert check.level == "failure"
    assert check.text == (
        f"{tmp_path} belongs to {tmp_path.owner()} and cannot be written by user {me}: a run would fail"
    )
    assert check.fix == "set HPCDIST_RUNS_DIR to another folder"
    (check,) = folder_checks(tmp_path, in_container=True)
    assert check.fix.startswith("start the container with --user $(id -u):$(id -g); or set HPCDIST_RUNS_DIR")


@pytest.mark.usefixtures("fast_disk")
@pytest.mark.processes
def test_folder_or_database_of_others_is_reported(tmp_path: Path) -> None:
    (tmp_path / "mlflow.db").touch(mode=0o600)
    os.chown(tmp_path, 0, 65534)
    tmp_path.chmod(0o775)
    (tmp_path / "mlflow.db").chmod(0o640)
    check = checks_of(tmp_path)["owner"]
    assert check.level == "failure"
    assert f"others may write to {tmp_path} (mode 0775)" in check.text
    assert check.fix.startswith(f"`chmod go-w {tmp_path}`")
    tmp_path.chmod(0o755)
    check = checks_of(tmp_path)["database"]
    assert (check.level, check.fix) == ("warning", f"chmod 600 {tmp_path}/mlflow.db")
    os.chown(tmp_path / "mlflow.db", 1234, 0)
    check = checks_of(tmp_path)["owner"]
    assert (check.level, check.text) == ("failure", f"{tmp_path}/mlflow.db belongs to user 1234, not to root")
    assert "share results through a tracking server" in check.fix


@pytest.mark.processes
def test_little_space_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for space, level, text in (
        ({"free": 0, "total": 100 * GIB}, "failure", "0 MB are free in"),
        ({"free": GIB // 2, "total": 100 * GIB}, "warning", "possibly too little for a checkpoint"),
        ({"free": 50 * GIB, "total": 100 * GIB, "free_files": 12}, "failure", "12 more files can be created"),
        ({"free": 50 * GIB, "total": 100 * GIB, "free_files": 10**6}, "ok", "50.0 GiB free of 100.0"),
    ):
        monkeypatch.setattr(storage, "space", lambda path, space=space: space)
        check = checks_of(tmp_path)["disk"]
        assert (check.level, text in check.text) == (level, True)


def test_missing_locks_are_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "lock_problem", lambda path: "No locks available")
    assert checks_of(tmp_path)["locks"].level == "warning"


@pytest.mark.processes
def test_slow_file_system_is_a_note_and_a_read_only_one_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path, num_bytes: int, limit_s: float) -> float:
        raise OSError(errno.EROFS, "Read-only file system")

    found = checks_of(tmp_path / "runs")
    assert {name for name, check in found.items() if check.level == "ok"} >= {"runs", "file system", "disk", "locks"}
    assert found["runs"].text == f"{tmp_path}/runs (the first run creates it)"
    assert list(tmp_path.iterdir()) == [], "the check creates nothing"
    monkeypatch.setattr(storage, "write_speed", lambda *_: 2.0**20)
    speed = checks_of(tmp_path)["writing"]
    assert (speed.level, "1 MiB/s" in speed.text) == ("note", True)
    monkeypatch.setattr(storage, "write_speed", fail)
    check = checks_of(tmp_path)["writing"]
    assert (check.level, "could not be written (Read-only file system)" in check.text) == ("failure", True)


@pytest.mark.processes
def test_file_system_that_nodes_may_not_see_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind, on_cluster, level, text in (
        ("nfs4", True, "ok", "nfs4 (server:/home): other machines may see it"),
        ("", True, "ok", "of unknown type (server:/home): unknown whether other machines see it"),
        ("ext4", False, "ok", "of this machine"),
        ("ext4", True, "warning", "Slurm's nodes must see it"),
        ("tmpfs", True, "warning", "each machine has its own: Slurm's nodes must see it"),
    ):
        monkeypatch.setattr(storage, "mount_of", lambda path, kind=kind: (kind, "server:/home"))
        check = folder_checks(tmp_path, on_cluster=on_cluster)[1]
        assert (check.level, text in check.text) == (level, True), check
    monkeypatch.setattr(storage, "mount_of", lambda path: ("overlay", "overlay"))
    for own_layer, level, fix in ((True, "warning", f"mount a folder: -v $PWD/runs:{tmp_path}"), (False, "ok", "")):
        monkeypatch.setattr(runs_folder_checks, "is_in_container_layer", lambda place, own_layer=own_layer: own_layer)
        check = folder_checks(tmp_path, in_container=True)[1]
        assert (check.level, check.fix) == (level, fix)
