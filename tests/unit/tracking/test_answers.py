"""Invalid responses of a server or a proxy: a one-line error, and points are neither lost nor duplicated.

`Proxy` is a stand-in: it gives prepared answers first, then hands requests to MLflow's own application.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tracking_scene import Scene
from werkzeug.serving import WSGIRequestHandler, make_server

from hpcdist.errors import TrackingError
from hpcdist.tracking.delivery import Delivery
from hpcdist.tracking.mlflow_client import open_client
from hpcdist.tracking.shipper import sync

# MLflow 3.17 uses a loader option that SQLAlchemy 2.1 deprecates.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning"),
    # MLflow 3.17's server imports it.
    pytest.mark.filterwarnings("ignore:starlette.middleware.wsgi is deprecated"),
]

Answer = tuple[str, dict[str, str], bytes]
PAGE = b"<!DOCTYPE html><html><body>" + b"Please log in. " * 5000 + b"</body></html>"
BAD: dict[str, tuple[Answer, str]] = {
    "html": (("200 OK", {"Content-Type": "text/html"}, PAGE), r"The response is an HTML page: check that this is"),
    "wrong types": (
        ("200 OK", {}, b'{"experiments": 7, "run": 7, "runs": {}}'),
        r"is not MLflow's \(ParseError",
    ),
    "wrong fields": (
        ("200 OK", {}, b'{"experiments": [{"experiment_id": {}}]}'),
        r"is not MLflow's \(ParseError",
    ),
    "deep": (("200 OK", {}, b'{"experiments": ' + b"[" * 10**5 + b"]" * 10**5 + b"}"), r"MLflow at http"),
    "not json": (("200 OK", {}, b'{"experiments"'), r"not in a valid JSON format"),
    "a list": (("200 OK", {}, b"[1, 2]"), r"not in a valid JSON format"),
    "413": (("413 Request Entity Too Large", {}, PAGE), r"error code 413 != 200\. The response is an HTML page"),
    "429": (("429 Too Many Requests", {"Retry-After": "3600"}, b"slow down"), r"MLflow at http.* 429 "),
    "503": (("503 Service Unavailable", {}, b""), r"MLflow at http.*503"),
    "odd error": (("400 Bad Request", {}, b'{"error_code": [1], "message": {"a": 1}}'), r"MLflow at http"),
    "redirects": (("302 Found", {"Location": "/"}, b""), r"[Rr]edirects"),
}


#: To a request whose answer has no fields, every object is an answer.
PASSABLE = {"wrong types", "wrong fields"}


class Proxy:
    def __init__(self, application: Callable[..., Iterable[bytes]]) -> None:
        self._application = application
        #: What answers requests whose path contains `only`; None lets them through.
        self.answer: Answer | None = None
        self.only = ""
        #: Whether MLflow gets the request before the prepared answer is given.
        self.after = False
        self.largest = 10**9

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if int(environ.get("CONTENT_LENGTH") or 0) > self.largest:
            start_response("413 Request Entity Too Large", [])
            return [PAGE]
        if self.answer is None or self.only not in environ["PATH_INFO"]:
            return self._application(environ, start_response)
        if self.after:
            list(self._application(environ, lambda *_: None))
        status, headers, body = self.answer
        start_response(status, list(headers.items()))
        return [body]


class Quiet(WSGIRequestHandler):
    def log(self, *_: object) -> None:  # type: ignore[override]
        pass


@contextmanager
def served(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Proxy, str]]:
    database = f"sqlite:///{folder}/server.db"
    open_client(database)
    from mlflow import server
    from mlflow.server import handlers
    from mlflow.tracking._tracking_service import utils

    monkeypatch.setenv(server.BACKEND_STORE_URI_ENV_VAR, database)
    # The server sets both for its process; later tests must not see them.
    monkeypatch.setenv("MLFLOW_TRACKING_URI", database)
    monkeypatch.setattr(utils, "_tracking_uri", None)
    monkeypatch.setenv(server.ARTIFACT_ROOT_ENV_VAR, (folder / "server-artifacts").as_uri())
    monkeypatch.setattr(handlers, "_tracking_store", None)
    proxy = Proxy(server.app.wsgi_app)
    httpd = make_server("127.0.0.1", 0, proxy, threaded=True, request_handler=Quiet)
    thread = threading.Thread(target=httpd.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield proxy, f"http://127.0.0.1:{httpd.server_port}"
    finally:
        httpd.shutdown()
        thread.join()
        httpd.server_close()


def refused(shipper: Delivery) -> str:
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
        for answer, pattern in BAD.values():
            proxy.answer = answer
            with pytest.raises(TrackingError, match=pattern):
                sync(scene.run, scene.uri, close_dead=False)
        # An empty object parses as any response.
        for part in ("runs/create", "experiments/get-by-name"):
            proxy.answer, proxy.only = ("200 OK", {}, b"{}"), part
            assert "without an id" in refused(scene.shipper())
        proxy.answer = None
        shipper = scene.shipper()
        shipper.open_run()
        # Points with a lost response are sent again, and MLflow stores them once.
        for proxy.only in ("runs/log-batch", "runs/get", "artifacts"):
            for proxy.after in (False, True):
                for name in sorted(BAD.keys() - PASSABLE):
                    proxy.answer = BAD[name][0]
                    if proxy.only == "runs/log-batch":
                        refused(shipper)
        proxy.answer = None
        assert shipper.ship_once() == 60 + 1
        assert shipper.ship_once() == 0
        history = scene.client.get_metric_history(scene.run_id, "acc_--0a78af425a78")
        assert [point.step for point in history] == list(range(30))
        saved = json.loads((scene.run.journal / "shipped.json").read_text())
        assert (saved["num_points"], saved["num_refused"], saved["num_broken"]) == (60 + 1, 0, 0)

        # Requests are split for a proxy that limits their size.
        scene.log(range(1000), key="many")
        proxy.largest = 20_000
        assert shipper.ship_once() == 1000
        assert len(scene.steps("many")) == 1000
