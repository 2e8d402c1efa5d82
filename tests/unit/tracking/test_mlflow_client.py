"""The connection to MLflow: each error of a server in one line, the tracking URI, and a new database."""

from __future__ import annotations

import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from http_servers import in_thread
from mlflow.exceptions import MlflowException
from mlflow.utils.rest_utils import MlflowHostCreds, http_request

from hpcdist.config.redaction import redact_text
from hpcdist.errors import TrackingError, UserMistake
from hpcdist.tracking.mlflow_client import open_client
from hpcdist.tracking.uri import choose_uri, default_uri, read_credentials, sqlite_path

Answer = tuple[int, bytes, dict[str, str]]
PAGE = b"<!DOCTYPE html><html><body>Please log in.</body></html>"


class AnsweringServer(ThreadingHTTPServer):
    """Gives one answer to all requests, except to those for its version."""

    daemon_threads = True
    answer: Answer = (200, b"{}", {})
    version = b"<html>"
    accounts = False

    @property
    def uri(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        assert isinstance(self.server, AnsweringServer)
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        status, body, headers = self.server.answer
        if self.path == "/version":
            refused = self.server.accounts and not self.headers.get("Authorization")
            status, body, headers = (401, b"", {}) if refused else (200, self.server.version, {})
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def server() -> Iterator[AnsweringServer]:
    found = AnsweringServer(("127.0.0.1", 0), _Handler)
    with in_thread(found):
        yield found
    found.server_close()


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))


def message(server: AnsweringServer, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> str:
    """Return the error of a client that receives this answer."""
    server.answer = (status, body, headers or {})
    with pytest.raises(TrackingError) as caught:
        open_client(server.uri)
    text = str(caught.value)
    assert "\n" not in text
    return text.removeprefix(f"MLflow at {server.uri}: ")


UNAUTHENTICATED = (401, b"You are not authenticated.")


def test_refused_credentials_name_user_and_source(
    server: AnsweringServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert message(server, *UNAUTHENTICATED) == (
        "the server needs a user and a password (401): set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or"
        " write them to ~/.mlflow/credentials with mode 0600"
    )
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "s3cret")
    expired = b'{"error_code": "UNAUTHENTICATED", "message": "token expired"}'
    assert message(server, 401, expired) == (
        "the server does not accept the token in MLFLOW_TRACKING_TOKEN (401), which may have expired: set a new one"
    )
    file = tmp_path / ".mlflow" / "credentials"
    file.parent.mkdir()
    file.write_text("[mlflow]\nmlflow_tracking_username = ada\nmlflow_tracking_password = s3cret\n")
    file.chmod(0o600)
    refused = "the server does not accept user {} with this password (401): check {}"
    assert message(server, *UNAUTHENTICATED) == refused.format("ada", file)
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "bob")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "s3cret")
    variables = "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
    assert message(server, *UNAUTHENTICATED) == refused.format("bob", variables)
    assert message(server, 403, b"Permission denied") == (
        "user bob lacks the permission for the request (403): the owner of the experiment or an administrator grants"
        " EDIT"
    )
    with_user = f"http://eve:s3cret@127.0.0.1:{server.server_port}"
    assert read_credentials(with_user, {}).user == "eve"


def test_credentials_that_others_can_read_are_refused(server: AnsweringServer, tmp_path: Path) -> None:
    file = tmp_path / ".mlflow" / "credentials"
    file.parent.mkdir()
    file.write_text("[mlflow]\nmlflow_tracking_username = ada\nmlflow_tracking_password = s3cret\n")
    file.chmod(0o644)
    assert message(server, *UNAUTHENTICATED) == (
        f"{file} has mode 0644, so that other users can read the credentials in it: `chmod 600 {file}`"
    )
    file.chmod(0o600)
    file.write_text("password = 50%")
    with pytest.raises(UserMistake, match=r"is not in the format of MLflow \(MissingSectionHeaderError\)"):
        read_credentials("http://mlflow", {"HOME": str(tmp_path)})


HOST_REFUSED = b"Invalid Host header - possible DNS rebinding attack detected"


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ((302, b"", {"Location": "/"}), "the server redirects without end"),
        ((403, HOST_REFUSED), "its administrator allows it with `--allowed-hosts 127.0.0.1:"),
        ((404, PAGE), "the server does not know MLflow's API (404): check the address"),
        ((500, b"oops"), "the server has an internal error (500): see its log"),
        ((502, PAGE), "the server is not available at the moment (502)"),
    ],
    ids=["redirects", "host", "404", "500", "502"],
)
def test_errors_of_servers_and_proxies(server: AnsweringServer, answer: tuple[Any, ...], expected: str) -> None:
    assert expected in message(server, *answer)


def test_server_of_another_version(server: AnsweringServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AnsweringServer, "version", b"2.9.2\n")
    unknown = b'{"error_code": "ENDPOINT_NOT_FOUND", "message": "no"}'
    assert message(server, 404, unknown).startswith("the server has MLflow 2.9.2 and does not know a request of this")
    # A server with accounts gives its version to users only.
    monkeypatch.setattr(AnsweringServer, "accounts", True)
    assert message(server, 404, unknown).startswith("the server does not know MLflow's API (404): check the address")
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "bob")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "s3cret")
    assert message(server, 404, unknown).startswith("the server has MLflow 2.9.2 and does not know a request of this")


def test_a_request_waits_for_seconds_only_whatever_the_server_asks(
    server: AnsweringServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.answer = (503, PAGE, {"Retry-After": "3600"})
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    with pytest.raises(MlflowException):  # MLflow's transfers of files are retried
        http_request(MlflowHostCreds(server.uri), "/file", "GET", max_retries=3, backoff_factor=1)
    assert len(waits) <= 3
    assert sum(waits) < 60


def test_no_server(server: AnsweringServer) -> None:
    with pytest.raises(TrackingError, match=r"the server cannot be reached \(Connection refused\): check the address"):
        open_client("http://127.0.0.1:1")


# --- Resolution and redaction of the tracking URI.


@pytest.mark.parametrize(
    ("text", "redacted"),
    [
        ("http://me:secret@host:5000", "http://me:***@host:5000"),
        ("postgresql://me:p@ss:w@host/db", "postgresql://me:***@host/db"),
        ("http://host:5000/a@b", "http://host:5000/a@b"),
        ("sqlite:////runs/mlflow.db", "sqlite:////runs/mlflow.db"),
        ("API request to http://me:secret@host/api failed", "API request to http://me:***@host/api failed"),
    ],
)
def test_password_in_a_uri_is_redacted(text: str, redacted: str) -> None:
    assert redact_text(text) == redacted
    assert redact_text(redacted) == redacted


def test_uri_precedence_is_environment_config_default_database(tmp_path: Path) -> None:
    assert choose_uri({"HPCDIST_TRACKING_URI": "http://a"}, "http://b", tmp_path) == "http://a"
    assert choose_uri({"HPCDIST_TRACKING_URI": ""}, "http://b", tmp_path) == "http://b"
    assert choose_uri({}, "", tmp_path) == default_uri(tmp_path) == f"sqlite:///{tmp_path}/mlflow.db"
    assert sqlite_path(default_uri(tmp_path)) == tmp_path / "mlflow.db"
    assert sqlite_path("http://a") is None


def test_redacted_uri_is_rejected() -> None:
    with pytest.raises(TrackingError, match=r"password of http://me:.*@host is not kept .* set HPCDIST_TRACKING_URI"):
        choose_uri({}, "http://me:***@host", Path("runs"))


# --- A process that dies while MLflow creates its tables leaves an empty database, which the next one fills.


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
