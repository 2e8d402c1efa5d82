"""HTTP servers in which tests look: MLflow, its application in this process, and a webhook."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hpcdist_runs import unused_port, wait_for
from werkzeug.serving import WSGIRequestHandler, make_server


class Server:
    """An MLflow server of one worker.

    Args:
        root: folder of its log and its artifacts.
        database: its store, created if missing; by default `mlflow.db` in `root`.
        host: address to listen on.
    """

    def __init__(self, root: Path, database: Path | None = None, host: str = "127.0.0.1") -> None:
        self._root = root
        self._port = unused_port()
        self.uri = f"http://{host}:{self._port}"
        store = ["--backend-store-uri", f"sqlite:///{database or root / 'mlflow.db'}"]
        store += ["--artifacts-destination", f"{root}/artifacts"]
        self._options = ["server", *store, "--host", host, "--port", str(self._port)]
        self._env = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with open(self._root / "server.log", "ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "mlflow", *self._options, "--workers", "1"],
                env={**os.environ, **self._env},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        wait_for(self.answers, "the MLflow server to answer", timeout_s=600)

    def answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.uri}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False

    def kill(self) -> None:
        """Kill the server and its workers with SIGKILL."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            assert self._process.wait(30) == -signal.SIGKILL
            self._process = None


class AccountServer(Server):
    """A server with accounts on a database, as docs/how-to/mlflow-server.md starts it. It ends with the block."""

    PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "mlflow-server.md"
    ADMIN: ClassVar = {"MLFLOW_TRACKING_USERNAME": "admin", "MLFLOW_TRACKING_PASSWORD": "of the administrator"}

    def __init__(self, root: Path, store: str) -> None:
        super().__init__(root)
        settings = re.search(r"```ini\n(# basic_auth.ini.*?)```", self.PAGE.read_text(), re.DOTALL)
        command = re.search(r"mlflow (server --app-name .*)", self.PAGE.read_text())
        assert settings is not None
        assert command is not None
        ini = root / "basic_auth.ini"
        ini.write_text(settings[1].replace("postgresql+psycopg2://mlflow@/mlflow", store.replace("%", "%%")))
        self._options = command[1].replace("$PWD", str(root)).replace("5000", str(self._port)).split()
        self._env |= {
            "MLFLOW_AUTH_CONFIG_PATH": str(ini),
            "MLFLOW_BACKEND_STORE_URI": store,
            "MLFLOW_AUTH_ADMIN_PASSWORD": self.ADMIN["MLFLOW_TRACKING_PASSWORD"],
            "MLFLOW_FLASK_SERVER_SECRET_KEY": "of the server",
        }

    def __enter__(self) -> AccountServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


# --- MLflow's server application in the process of the test.


Application = Callable[..., Iterable[bytes]]


@contextmanager
def mlflow_application(folder: Path, artifact_root: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Application]:
    """Yield the WSGI application of MLflow's server, with a new database in `folder`."""
    from mlflow import server
    from mlflow.server import constants, handlers
    from mlflow.tracking._model_registry import utils as registry_utils
    from mlflow.tracking._tracking_service import utils

    from hpcdist.tracking.mlflow_client import open_client  # starts a thread, which files with forked ranks must not

    database = f"sqlite:///{folder}/server.db"
    open_client(database)
    # MLflow's server reads and sets these variables for its process; they are restored after the test.
    for name, value in (
        (constants.BACKEND_STORE_URI_ENV_VAR, database),
        ("MLFLOW_TRACKING_URI", database),
        ("MLFLOW_REGISTRY_URI", database),
        (constants.ARTIFACT_ROOT_ENV_VAR, artifact_root),
        (constants.ARTIFACTS_DESTINATION_ENV_VAR, str(folder / "artifacts")),
        (constants.SERVE_ARTIFACTS_ENV_VAR, "true"),
    ):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(utils, "_tracking_uri", None)
    monkeypatch.setattr(handlers, "_tracking_store", None)
    # Left set, they would let a later test of this process look up `models:/` in this server's registry.
    monkeypatch.setattr(registry_utils, "_registry_uri", None)
    monkeypatch.setattr(handlers, "_model_registry_store", None)
    yield server.app.wsgi_app


class _Silent(WSGIRequestHandler):
    def log(self, *_: object) -> None:
        pass


@contextmanager
def serving(application: Application) -> Iterator[str]:
    """Serve an application on a free port. Yields its address."""
    server = make_server("127.0.0.1", 0, application, threaded=True, request_handler=_Silent)
    with in_thread(server):
        yield f"http://127.0.0.1:{server.server_port}"
    server.server_close()


@contextmanager
def in_thread(server: Any) -> Iterator[None]:
    """Run a server of the standard library or werkzeug in a thread."""
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()


# --- A real HTTP server that receives the events of runs.


PATH = "/services/T00/B00/s3cretpath"
#: The part of the address that no other user may see.
SECRET = "s3cretpath"


class Webhook(ThreadingHTTPServer):
    """Records the bodies of POST requests, and answers with the next of `statuses`, then with 200."""

    daemon_threads = True

    def __init__(self, host: str) -> None:
        super().__init__((host, 0), _Handler)
        self.bodies: list[dict[str, Any]] = []
        self.statuses: list[int] = []
        self.url = f"http://{host}:{self.server_port}{PATH}"


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        assert isinstance(self.server, Webhook)
        assert self.path == PATH
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        status = self.server.statuses.pop(0) if self.server.statuses else 200
        if status == 200:
            self.server.bodies.append(body)
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.send_header("Location", "/elsewhere")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def listening_webhook(host: str = "127.0.0.1") -> Iterator[Webhook]:
    """Listen on an address of this machine."""
    with Webhook(host) as server, in_thread(server):
        yield server
