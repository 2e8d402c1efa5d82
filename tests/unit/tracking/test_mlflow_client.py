"""The connection to MLflow: each error of a server in one line, the tracking URI, and a new database."""

import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from http_servers import mlflow_application, serving
from mlflow.exceptions import MlflowException
from mlflow.utils.rest_utils import MlflowHostCreds, http_request
from tracking_scene import Scene

from hpcdist.errors import TrackingError, UserMistake
from hpcdist.tracking.delivery import Delivery
from hpcdist.tracking.journal_tail import Counts
from hpcdist.tracking.mlflow_client import MlflowRun, open_client
from hpcdist.tracking.sync_runs import sync
from hpcdist.tracking.uri import choose_uri, read_credentials, sqlite_path

Response = tuple[str, dict[str, str], bytes]
PAGE = b"<!DOCTYPE html><html><body>" + b"Please log in. " * 5000 + b"</body></html>"


class Proxy:
    """A WSGI application that gives a prepared response, or passes the request on to MLflow's application.

    Attributes:
        response: The response to requests with `only` in their path; None passes all requests on.
        after: Whether MLflow receives the request before the prepared response is sent.
        largest: Length of the body above which requests are rejected.
        version: The answer to requests for the version, with `has_accounts` only to users; None for no own answer.
    """

    def __init__(self, application: Callable[..., Iterable[bytes]] | None = None) -> None:
        self._application = application
        self.uri, self.only = "", ""
        self.response: Response | None = None
        self.after = self.has_accounts = False
        self.largest = 10**9
        self.version: bytes | None = None

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        response = self.response if self.only in environ["PATH_INFO"] else None
        if int(environ.get("CONTENT_LENGTH") or 0) > self.largest:
            response = "413 Request Entity Too Large", {}, PAGE
        elif self.version is not None and environ["PATH_INFO"] == "/version":
            refused = self.has_accounts and "HTTP_AUTHORIZATION" not in environ
            response = ("401 Unauthorized", {}, b"") if refused else ("200 OK", {}, self.version)
        elif self._application is not None and (response is None or self.after):
            passed = self._application(environ, start_response if response is None else lambda *_: None)
            if response is None:
                return passed
            list(passed)
        assert response is not None
        status, headers, body = response
        start_response(status, list(headers.items()))
        return [body]


@pytest.fixture
def server() -> Iterator[Proxy]:
    """A server that gives one answer to all requests, except to those for its version."""
    found = Proxy()
    found.version = b"<html>"
    with serving(found) as found.uri:
        yield found


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))


def message(server: Proxy, status: str, body: bytes) -> str:
    """Return the error of a client that receives this answer."""
    server.response = (status, {}, body)
    with pytest.raises(TrackingError) as caught:
        open_client(server.uri)
    text = str(caught.value)
    assert "\n" not in text
    return text.removeprefix(f"MLflow at {server.uri}: ")


UNAUTHENTICATED = ("401 Unauthorized", b"You are not authenticated.")


def test_refused_credentials_name_user_and_source(
    server: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert message(server, *UNAUTHENTICATED) == (
        "the server needs a user and a password (401): set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or"
        " write them to ~/.mlflow/credentials with mode 0600"
    )
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "s3cret")
    expired = b'{"error_code": "UNAUTHENTICATED", "message": "token expired"}'
    assert message(server, "401 Unauthorized", expired) == (
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
    assert message(server, "403 Forbidden", b"Permission denied") == (
        "user bob lacks the permission for the request (403): the owner of the experiment or an administrator grants"
        " EDIT"
    )
    assert read_credentials(server.uri.replace("://", "://eve:s3cret@"), {}).user == "eve"


def test_credentials_that_others_can_read_are_refused(server: Proxy, tmp_path: Path) -> None:
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


def test_errors_of_servers_and_proxies(server: Proxy) -> None:
    for status, body, expected in (
        ("403 Forbidden", HOST_REFUSED, "its administrator allows it with `--allowed-hosts 127.0.0.1:"),
        ("404 Not Found", PAGE, "the server does not know MLflow's API (404): check the address"),
        ("500 Internal Server Error", b"oops", "the server has an internal error (500): see its log"),
    ):
        assert expected in message(server, status, body)


def test_server_of_another_version(server: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    server.version = b"2.9.2\n"
    unknown = "404 Not Found", b'{"error_code": "ENDPOINT_NOT_FOUND", "message": "no"}'
    other = "the server has MLflow 2.9.2 and does not know a request of this"
    assert message(server, *unknown).startswith(other)
    # A server with accounts gives its version to users only.
    server.has_accounts = True
    assert message(server, *unknown).startswith("the server does not know MLflow's API (404): check the address")
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "bob")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "s3cret")
    assert message(server, *unknown).startswith(other)


def test_request_waits_seconds_whatever_the_server_asks(server: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    server.response = ("503 Service Unavailable", {"Retry-After": "3600"}, PAGE)
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    with pytest.raises(MlflowException):  # MLflow's transfers of files are retried
        http_request(MlflowHostCreds(server.uri), "/file", "GET", max_retries=3, backoff_factor=1)
    assert len(waits) <= 3
    assert sum(waits) < 60


# --- Resolution and redaction of the tracking URI.


def test_uri_precedence_is_environment_config_default_database(tmp_path: Path) -> None:
    assert choose_uri({"HPCDIST_TRACKING_URI": "http://a"}, "http://b", tmp_path) == "http://a"
    assert choose_uri({"HPCDIST_TRACKING_URI": ""}, "http://b", tmp_path) == "http://b"
    assert (default := choose_uri({}, "", tmp_path)) == f"sqlite:///{tmp_path}/mlflow.db"
    assert sqlite_path(default) == tmp_path / "mlflow.db"
    assert sqlite_path("http://a") is None
    with pytest.raises(TrackingError, match=r"password of http://me:.*@host is not kept .* set HPCDIST_TRACKING_URI"):
        choose_uri({}, "http://me:***@host", tmp_path)


@pytest.mark.parametrize("uri", ["databricks", "databricks://profile", "https://mlflow.site"])
def test_server_chooses_the_place_of_artifacts(scene: Scene, uri: str) -> None:
    opened = MlflowRun(scene.run, scene.uri)
    assert str(opened._artifact_location("exp")).endswith("/mlartifacts/exp")
    opened.uri = uri
    assert opened._artifact_location("exp") is None


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


# --- An invalid response of a server or a proxy raises a one-line error and neither loses nor duplicates points.


INVALID: dict[str, tuple[Response, str]] = {
    "html": (("200 OK", {"Content-Type": "text/html"}, PAGE), r"The response is an HTML page: check that this is"),
    "wrong types": (("200 OK", {}, b'{"experiments": [{"experiment_id": {}}]}'), r"is not MLflow's \(ParseError"),
    "deep": (("200 OK", {}, b'{"experiments": ' + b"[" * 10**5 + b"]" * 10**5 + b"}"), r"MLflow at http"),
    "not json": (("200 OK", {}, b'{"experiments"'), r"not in a valid JSON format"),
    "413": (("413 Request Entity Too Large", {}, PAGE), r"the request is too large .*413"),
    "429": (("429 Too Many Requests", {"Retry-After": "3600"}, b"slow down"), r"no more requests .*429"),
    "503": (("503 Service Unavailable", {}, b""), r"not available at the moment \(503\)$"),
    "error with wrong types": (("400 Bad Request", {}, b'{"error_code": [1], "message": {"a": 1}}'), r"MLflow at http"),
    "redirects": (("302 Found", {"Location": "/"}, b""), r"[Rr]edirects"),
}


@contextmanager
def served(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Proxy, str]]:
    """Serve MLflow behind a proxy. Yields the proxy and its address."""
    with mlflow_application(folder, (folder / "server-artifacts").as_uri(), monkeypatch) as application:
        proxy = Proxy(application)
        with serving(proxy) as uri:
            yield proxy, uri


def error_of(shipper: Delivery) -> str:
    """Return the message of an upload that fails."""
    with pytest.raises(TrackingError) as caught:
        shipper.ship_once()
    text = str(caught.value)
    assert "\n" not in text
    assert len(text) < 500
    assert text.startswith(f"MLflow at {shipper.uri}: ")
    return text


def test_invalid_responses_lose_no_point(scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scene.log(range(30), key="acc%")
    scene.log(range(30), key="acc#")
    with served(tmp_path, monkeypatch) as (proxy, scene.uri):
        for response, pattern in INVALID.values():
            proxy.response = response
            with pytest.raises(TrackingError, match=pattern):
                sync(scene.run, scene.uri, close_dead=False)
        # An empty object parses as any response.
        for part in ("runs/create", "experiments/get-by-name"):
            proxy.response, proxy.only = ("200 OK", {}, b"{}"), part
            assert "without an id" in error_of(scene.shipper())
        proxy.response = None
        shipper = scene.shipper()
        shipper.open_run()
        # Points with a lost response are sent again, and MLflow stores them once.
        proxy.only = "runs/log-batch"
        for proxy.after in (False, True):
            for name in sorted(INVALID.keys() - {"wrong types"}):  # valid for a request that expects no fields
                proxy.response = INVALID[name][0]
                error_of(shipper)
        proxy.response = None
        assert shipper.ship_once() == 60
        assert shipper.ship_once() == 0
        assert shipper.batches.counts == Counts(num_points=60)
        history = scene.client.get_metric_history(scene.run_id, "acc_--0a78af425a78")
        assert [point.step for point in history] == list(range(30))

        # Requests are split for a proxy that limits their size.
        scene.log(range(1000), key="many")
        proxy.largest = 20_000
        assert shipper.ship_once() == 1000
        assert len(scene.steps("many")) == 1000
