"""An invalid response of a server or a proxy raises a one-line error and neither loses nor duplicates points."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from mlflow_application import mlflow_application, serving
from tracking_scene import Scene

from hpcdist.errors import TrackingError
from hpcdist.tracking.delivery import Delivery
from hpcdist.tracking.shipper import sync

# MLflow 3.17 uses a loader option that SQLAlchemy 2.1 deprecates.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning"),
    # MLflow 3.17's server imports it.
    pytest.mark.filterwarnings("ignore:starlette.middleware.wsgi is deprecated"),
]

Response = tuple[str, dict[str, str], bytes]
PAGE = b"<!DOCTYPE html><html><body>" + b"Please log in. " * 5000 + b"</body></html>"
INVALID: dict[str, tuple[Response, str]] = {
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
    "413": (("413 Request Entity Too Large", {}, PAGE), r"the request is too large .*413"),
    "429": (
        ("429 Too Many Requests", {"Retry-After": "3600"}, b"slow down"),
        r"no more requests .*429.*asks to wait 3600 s",
    ),
    "503": (("503 Service Unavailable", {}, b""), r"not available at the moment \(503\)$"),
    "error with wrong types": (("400 Bad Request", {}, b'{"error_code": [1], "message": {"a": 1}}'), r"MLflow at http"),
    "redirects": (("302 Found", {"Location": "/"}, b""), r"[Rr]edirects"),
}


#: Valid responses to requests that expect no fields.
VALID_WITHOUT_FIELDS = {"wrong types", "wrong fields"}


class Proxy:
    """A WSGI application that gives a prepared response, or passes the request on to MLflow's application.

    Attributes:
        response: The response to requests with `only` in their path; None passes all requests on.
        after: Whether MLflow receives the request before the prepared response is sent.
        largest: Length of the body above which requests are rejected.
    """

    def __init__(self, application: Callable[..., Iterable[bytes]]) -> None:
        self._application = application
        self.response: Response | None = None
        self.only = ""
        self.after = False
        self.largest = 10**9

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if int(environ.get("CONTENT_LENGTH") or 0) > self.largest:
            start_response("413 Request Entity Too Large", [])
            return [PAGE]
        if self.response is None or self.only not in environ["PATH_INFO"]:
            return self._application(environ, start_response)
        if self.after:
            list(self._application(environ, lambda *_: None))
        status, headers, body = self.response
        start_response(status, list(headers.items()))
        return [body]


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
        for proxy.only in ("runs/log-batch", "runs/get", "artifacts"):
            for proxy.after in (False, True):
                for name in sorted(INVALID.keys() - VALID_WITHOUT_FIELDS):
                    proxy.response = INVALID[name][0]
                    if proxy.only == "runs/log-batch":
                        error_of(shipper)
        proxy.response = None
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
