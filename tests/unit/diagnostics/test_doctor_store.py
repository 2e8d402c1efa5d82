"""Tests of the section of `hpcdist doctor` about the MLflow store, with sqlite files and local HTTP servers."""

from __future__ import annotations

import base64
import socket
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from hpcdist_runs import unused_port

from hpcdist.checks import storage as module
from hpcdist.checks.storage import MlflowStore, migrations, store_checks
from hpcdist.host.machine import Check
from hpcdist.tracking.uri import redact_uri, sqlite_path

KNOWN = migrations()
(HEAD,) = KNOWN.keys() - {*KNOWN.values()}
BEFORE = KNOWN[HEAD]


def last_check(uri: str, env: dict[str, str] | None = None, file_system: str = "") -> Check:
    """Return the last result; the first is about the client."""
    found = MlflowStore(uri=uri, shown=redact_uri(uri), database=sqlite_path(uri))
    client, *checks = store_checks(found, env or {}, file_system)
    assert (client.name, client.level) == ("client", "ok")
    return checks[-1]


def create_database(path: Path, revision: str) -> str:
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("create table alembic_version (version_num varchar(32))")
        if revision:
            connection.execute("insert into alembic_version values (?)", [revision])
    return f"sqlite:///{path}"


def test_migrations_are_read_from_the_installed_mlflow(tmp_path: Path) -> None:
    assert len(KNOWN) > 50
    (tmp_path / "a.py").write_text('"""first\n\nRevises:\n"""\nrevision = "aa"\ndown_revision = None\n')
    (tmp_path / "b.py").write_text("revision = 'bb'\ndown_revision = 'aa'\n")
    (tmp_path / "__init__.py").touch()
    assert migrations(tmp_path) == {"aa": "", "bb": "aa"}


# --- sqlite


def test_missing_database_is_not_created(tmp_path: Path) -> None:
    check = last_check(f"sqlite:///{tmp_path}/mlflow.db")
    assert (check.level, check.text) == ("ok", f"{tmp_path}/mlflow.db does not exist; the first run creates it")
    assert list(tmp_path.iterdir()) == []


def test_current_schema_is_ok(tmp_path: Path) -> None:
    uri = create_database(tmp_path / "mlflow.db", HEAD)
    assert last_check(uri) == Check(name="database", level="ok", text=f"{uri}, its schema is up to date")
    assert [path.name for path in tmp_path.iterdir()] == ["mlflow.db"]


def test_outdated_schema_has_the_upgrade_command(tmp_path: Path) -> None:
    uri = create_database(tmp_path / "mlflow.db", BEFORE)
    check = last_check(uri)
    assert (check.level, "an older MLflow, 1 step behind" in check.text) == ("warning", True)
    assert check.fix == f"copy the database as a backup, then `mlflow db upgrade {uri}`"
    assert (tmp_path / "mlflow.db").stat().st_size == 8192, "the check upgrades nothing"


def test_schema_of_a_newer_mlflow_is_a_warning(tmp_path: Path) -> None:
    check = last_check(create_database(tmp_path / "mlflow.db", "feedfacecafe"))
    assert (check.level, check.fix) == ("warning", "`pip install --upgrade mlflow`")
    assert "has the schema feedfacecafe of a newer MLflow than the installed one" in check.text


def test_empty_database_is_ok_and_another_file_is_a_warning(tmp_path: Path) -> None:
    check = last_check(create_database(tmp_path / "empty.db", ""))
    assert (check.level, "the first run creates its tables" in check.text) == ("ok", True)
    (tmp_path / "text.db").write_text("no database\n" * 100)
    check = last_check(f"sqlite:///{tmp_path}/text.db")
    assert (check.level, "cannot be read (file is not a database)" in check.text) == ("warning", True)


def test_database_on_a_network_file_system_is_a_note(tmp_path: Path) -> None:
    found = MlflowStore(uri="", shown="", database=tmp_path / "mlflow.db")
    _, shared, _ = store_checks(found, {}, "nfs4")
    assert (shared.level, "is on nfs4" in shared.text) == ("note", True)


def test_database_without_write_permission_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uri = create_database(tmp_path / "mlflow.db", HEAD)
    monkeypatch.setattr(module.os, "access", lambda path, mode: False)  # root may write everywhere
    check = last_check(uri)
    assert (check.level, "cannot be written by this user" in check.text) == ("warning", True)


@pytest.mark.processes
def test_database_of_a_killed_process_is_read(tmp_path: Path) -> None:
    uri = create_database(tmp_path / "mlflow.db", HEAD)
    code = """
import os, sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("pragma cache_size=5")
connection.execute("begin")
connection.execute("create table big (text)")
connection.executemany("insert into big values (?)", [("x" * 1000,)] * 1000)
os._exit(0)
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "mlflow.db")], check=True)
    assert (tmp_path / "mlflow.db-journal").exists()
    assert last_check(uri) == Check(name="database", level="ok", text=f"{uri}, its schema is up to date")


# --- servers


class FakeServer(HTTPServer):
    """A server that answers paths with a code and a text."""

    def __init__(self, answers: dict[str, Callable[[str], tuple[int, str]]]) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                path = self.path.partition("?")[0]
                code, text = answers[path](self.headers.get("Authorization", ""))
                self.send_response(code)
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *_: object) -> None:
                pass

        super().__init__(("127.0.0.1", 0), Handler)
        self.uri = f"http://127.0.0.1:{self.server_port}"


@pytest.fixture
def start_server() -> Iterator[Callable[..., str]]:
    """Return a function that starts a server and returns its URI."""
    running: list[FakeServer] = []

    def start(
        health: int = 200,
        search: Callable[[str], tuple[int, str]] = lambda _: (200, "{}"),
        version: str = "3.17.2\n",
    ) -> str:
        server = FakeServer(
            {
                "/health": lambda _: (health, "OK"),
                "/api/2.0/mlflow/experiments/search": search,
                "/version": lambda _: (200, version),
            }
        )
        running.append(server)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        return server.uri

    yield start
    for server in running:
        server.shutdown()
        server.server_close()


def test_working_server_is_ok(start_server: Callable[..., str]) -> None:
    uri = start_server()
    assert last_check(uri) == Check(name="server", level="ok", text=f"{uri} answers, MLflow 3.17.2")
    assert last_check(start_server(version="<html>log in</html>")).text.endswith(
        " answers, MLflow of an unknown version"
    )


def test_unreachable_server_is_a_warning() -> None:
    uri = f"http://ada:secret@127.0.0.1:{unused_port()}"
    check = last_check(uri)
    assert check.level == "warning", "training continues without a server"
    assert "cannot be reached ([Errno 111] Connection refused): training continues" in check.text
    assert "secret" not in check.text


def test_silent_server_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SERVER_TIMEOUT_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        check = last_check(f"http://127.0.0.1:{silent.getsockname()[1]}")
    assert (check.level, "cannot be reached (timed out)" in check.text) == ("warning", True)


def test_server_of_another_kind_is_a_warning(start_server: Callable[..., str]) -> None:
    check = last_check(start_server(health=404))
    assert (check.level, "answers 404, so it is no MLflow" in check.text) == ("warning", True)
    check = last_check(start_server(search=lambda _: (500, "")))
    assert (check.level, "does not list experiments (answer 500)" in check.text) == ("warning", True)


def test_missing_and_refused_credentials_differ(start_server: Callable[..., str]) -> None:
    right = "Basic " + base64.b64encode(b"ada:right").decode()
    uri = start_server(search=lambda sent: (200, "{}") if sent == right else (401, ""))
    ada = {"MLFLOW_TRACKING_USERNAME": "ada"}
    check = last_check(uri)
    assert (check.level, "requires a user and a password (answer 401)" in check.text) == ("warning", True)
    check = last_check(uri, {**ada, "MLFLOW_TRACKING_PASSWORD": "wrong"})
    assert (check.level, "refuses ada (answer 401)" in check.text) == ("warning", True)
    assert last_check(uri, {**ada, "MLFLOW_TRACKING_PASSWORD": "right"}).level == "ok"
    assert last_check(uri.replace("//", "//ada:right@")).level == "ok"
    assert "refuses eve" in last_check(uri.replace("//", "//eve:x@"), {"MLFLOW_TRACKING_TOKEN": "t"}).text
    assert "refuses the token" in last_check(uri, {"MLFLOW_TRACKING_TOKEN": "old"}).text


# --- other stores


def test_file_store_is_a_warning_and_unknown_stores_are_a_note() -> None:
    for uri in ("mlruns", "file:///home/ada/mlruns"):
        check = last_check(uri)
        assert (check.level, "since 3.13" in check.text) == ("warning", True)
    assert last_check("databricks://profile").level == "note"


@pytest.mark.processes
def test_unusable_database_server_is_a_warning_without_its_password() -> None:
    port = unused_port()
    check = last_check(f"postgresql+nosuchdriver://ada:secret@127.0.0.1:{port}/mlflow")
    assert (check.level, "secret" in check.text + check.fix) == ("warning", False)
    check = last_check(f"postgresql+pg8000://ada:secret@127.0.0.1:{port}/mlflow")
    assert check.level == "warning"
    assert "`pip install pg8000`" in check.text or "cannot be used" in check.text
    assert "secret" not in check.text + check.fix
