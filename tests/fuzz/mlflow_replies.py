"""A local HTTP server that repeats recorded responses of MLflow, one of which is replaced by an invalid response."""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from config_strategies import values
from http_servers import in_thread, mlflow_application, serving
from hypothesis import strategies as st

#: Method and path of a request.
Endpoint = tuple[str, str]
PAGE = b"<!DOCTYPE html><html><body>" + b"Please log in. " * 500 + b"</body></html>"
NOISE = (b"", b"{", b"{}", b"[1, 2]", b"null", b"7", b'"a"', b"\xff\xfe\0", b"NaN", b'{"runs": ' * 3000, b"[" * 10**5)


@dataclass(frozen=True)
class Reply:
    """An HTTP response.

    Attributes:
        missing: Number of bytes by which the body is shorter than its Content-Length.
    """

    status: int
    body: bytes
    headers: dict[str, str] = field(default_factory=dict)
    missing: int = 0


#: Returns the reply to send instead of a recorded one, or bytes to send instead of an HTTP response.
Fault = Callable[[Reply], "Reply | bytes"]


def _is_json(value: object) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


def _locations(tree: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of each value in a JSON document, except addresses of artifacts.

    The client would write files to an address that is a path of the file system.
    """
    pairs = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in pairs:
        if key not in ("artifact_uri", "artifact_location", "source"):
            yield (*above, key)
            yield from _locations(value, (*above, key))


def changed_value(reply: Reply, *, position: float, value: Any, remove: bool) -> Reply:
    """Replace or remove one value of a JSON document."""
    tree = json.loads(reply.body or b"{}")
    paths = list(_locations(tree))
    if not paths:
        return replace(reply, body=json.dumps(value).encode())
    *parents, last = paths[int(position * len(paths))]
    inner = tree
    for parent in parents:
        inner = inner[parent]
    if remove:
        del inner[last]
    else:
        inner[last] = value
    return replace(reply, body=json.dumps(tree).encode())


def truncated(reply: Reply, *, position: float, noise: bytes) -> Reply:
    return replace(reply, body=reply.body[: int(position * len(reply.body))] + noise)


def shorter_than_declared(reply: Reply, *, missing: int) -> Reply:
    return replace(reply, missing=missing)


def other_response(_: Reply, *, status: int, body: bytes, headers: dict[str, str]) -> Reply:
    return Reply(status, body, headers)


def not_http(_: Reply, *, data: bytes) -> bytes:
    return data


def _faults(fault: Callable[..., Reply | bytes], **arguments: st.SearchStrategy[Any]) -> st.SearchStrategy[Fault]:
    return st.builds(functools.partial, st.just(fault), **arguments)


_positions = st.floats(0, 1, exclude_max=True)
_json_values = values.filter(_is_json)
_statuses = st.sampled_from(
    [200, 201, 204, 206, 301, 302, 304, 400, 401, 403, 404, 409, 413, 418, 429, 500, 501, 502, 503, 504, 599]
)
_codes = st.sampled_from(
    ["RESOURCE_DOES_NOT_EXIST", "RESOURCE_ALREADY_EXISTS", "INVALID_PARAMETER_VALUE", "INTERNAL_ERROR", "", "x" * 999]
)
_errors = st.fixed_dictionaries(
    {}, optional={"error_code": st.one_of(_codes, _json_values), "message": _json_values}
).map(lambda error: json.dumps(error).encode())
_headers = st.sampled_from(
    [{}, {"Content-Type": "text/html"}, {"Location": "/"}, {"Location": "http://["}, {"Retry-After": "3600"},
     {"Content-Encoding": "gzip"}, {"Content-Type": "application/json; charset=x"}, {"Transfer-Encoding": "chunked"}]
)  # fmt: skip
_no_http = st.sampled_from([b"", b"SSH-2.0-OpenSSH_9.6\r\n", b"HTTP/1.1\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Le"])
faults: st.SearchStrategy[Fault] = st.one_of(
    _faults(changed_value, position=_positions, value=_json_values, remove=st.booleans()),
    _faults(truncated, position=_positions, noise=st.binary(max_size=6)),
    _faults(shorter_than_declared, missing=st.integers(1, 10**6)),
    _faults(
        other_response,
        status=_statuses,
        body=st.one_of(_errors, st.sampled_from([PAGE, *NOISE]), st.binary(max_size=40)),
        headers=_headers,
    ),
    _faults(not_http, data=st.one_of(_no_http, st.binary(min_size=1, max_size=60))),
)


class Replies(ThreadingHTTPServer):
    """Answers each request with its recorded reply, or with the expected fault."""

    daemon_threads = True

    def __init__(self, port: int, recorded: dict[Endpoint, Reply]) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self._recorded = recorded
        self._lock = threading.Lock()
        self.expect(None)

    def expect(self, fault: Fault | None, *, first_fault: int = 0, num_faults: int = 1) -> None:
        """Set the fault of the next requests; their numbers start at 0."""
        self.num_requests = 0
        self._fault = fault
        self._faulty = range(first_fault, first_fault + num_faults)

    def reply(self, endpoint: Endpoint) -> Reply | bytes:
        with self._lock:
            number = self.num_requests
            self.num_requests += 1
        recorded = self._recorded.get(endpoint) or Reply(404, b'{"error_code": "RESOURCE_DOES_NOT_EXIST"}')
        return self._fault(recorded) if self._fault is not None and number in self._faulty else recorded

    def handle_error(self, request: object, client_address: object) -> None:
        pass  # the client closed the connection

    @property
    def uri(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Replies

    def _answer(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.close_connection = True
        reply = self.server.reply((self.command, self.path.partition("?")[0]))
        if isinstance(reply, bytes):
            self.wfile.write(reply)
            return
        self.send_response(reply.status)
        for name, value in {"Content-Type": "application/json", "Connection": "close", **reply.headers}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(reply.body) + reply.missing))
        self.end_headers()
        self.wfile.write(reply.body)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _answer

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def replayed(recorded: dict[Endpoint, Reply], uri: str) -> Iterator[Replies]:
    """Repeat the replies of a server at its address: some contain it, and the client caches it by model."""
    port = int(uri.rpartition(":")[2])
    with Replies(port, recorded) as server, in_thread(server):
        yield server


@contextmanager
def recording(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, dict[Endpoint, Reply]]]:
    """Serve MLflow with a new database. Yields its address and the last (`runs/get`: first) reply to each request."""
    recorded: dict[Endpoint, Reply] = {}
    with mlflow_application(folder, "mlflow-artifacts:/", monkeypatch) as application:

        def recorder(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
            status = 0

            def start(line: str, headers: list[tuple[str, str]], *more: object) -> Any:
                nonlocal status
                status = int(line.split()[0])
                return start_response(line, headers, *more)

            body = b"".join(application(environ, start))
            endpoint, reply = (environ["REQUEST_METHOD"], environ["PATH_INFO"]), Reply(status, body)
            # The first response is about the cell, later ones about its sweep, which has other artifacts.
            if not (endpoint in recorded and endpoint[1].endswith("/runs/get")):
                recorded[endpoint] = reply
            return [body]

        with serving(recorder) as uri:
            yield uri, recorded
