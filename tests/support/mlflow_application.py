"""MLflow's server application in the process of the test."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from werkzeug.serving import WSGIRequestHandler, make_server

from hpcdist.tracking.mlflow_client import open_client

Application = Callable[..., Iterable[bytes]]


@contextmanager
def mlflow_application(folder: Path, artifact_root: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Application]:
    """Yield the WSGI application of MLflow's server, with a new database in `folder`."""
    from mlflow import server
    from mlflow.server import handlers
    from mlflow.tracking._model_registry import utils as registry_utils
    from mlflow.tracking._tracking_service import utils

    database = f"sqlite:///{folder}/server.db"
    open_client(database)
    # MLflow's server reads and sets these variables for its process; they are restored after the test.
    for name, value in (
        (server.BACKEND_STORE_URI_ENV_VAR, database),
        ("MLFLOW_TRACKING_URI", database),
        ("MLFLOW_REGISTRY_URI", database),
        (server.ARTIFACT_ROOT_ENV_VAR, artifact_root),
        (server.ARTIFACTS_DESTINATION_ENV_VAR, str(folder / "artifacts")),
        (server.SERVE_ARTIFACTS_ENV_VAR, "true"),
    ):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(utils, "_tracking_uri", None)
    monkeypatch.setattr(handlers, "_tracking_store", None)
    # Left set, they would let a later test of this process look up `models:/` in this server's registry.
    monkeypatch.setattr(registry_utils, "_registry_uri", None)
    monkeypatch.setattr(handlers, "_model_registry_store", None)
    yield server.app.wsgi_app


class _Silent(WSGIRequestHandler):
    def log(self, *_: object) -> None:  # type: ignore[override]
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
