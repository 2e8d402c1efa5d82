"""Invalid responses of an MLflow server or a proxy end in a TrackingError of one line and lose no record."""

from __future__ import annotations

import functools
import json
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from config_strategies import json_values
from fuzzing import check_message, fuzz
from http_servers import in_thread, mlflow_application, serving
from hypothesis import strategies as st

from hpcdist.checks.site import store_checks
from hpcdist.config.loading import load_config
from hpcdist.config.written import to_yaml
from hpcdist.errors import TrackingError
from hpcdist.host.files import read_json
from hpcdist.run.folder import RunDir
from hpcdist.run.sweeps import make_sweep, mark, parse_axes, write_sweep
from hpcdist.tracking.journal import SentFiles
from hpcdist.tracking.points import SentPoints
from hpcdist.tracking.sync_runs import sync

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


#: A reply, or bytes that are no HTTP response, to send instead of a recorded reply; or a change of that.
Fault = Reply | bytes | Callable[[Reply], Reply]


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


def _changes(fault: Callable[..., Reply], **arguments: st.SearchStrategy[Any]) -> st.SearchStrategy[Fault]:
    return st.builds(functools.partial, st.just(fault), **arguments)


_positions = st.floats(0, 1, exclude_max=True)
_statuses = st.sampled_from(
    [200, 201, 204, 206, 301, 302, 304, 400, 401, 403, 404, 409, 413, 418, 429, 500, 501, 502, 503, 504, 599]
)
_codes = st.sampled_from(
    ["RESOURCE_DOES_NOT_EXIST", "RESOURCE_ALREADY_EXISTS", "INVALID_PARAMETER_VALUE", "INTERNAL_ERROR", "", "x" * 999]
)
_errors = st.fixed_dictionaries(
    {}, optional={"error_code": st.one_of(_codes, json_values), "message": json_values}
).map(lambda error: json.dumps(error).encode())
_headers = st.sampled_from(
    [{}, {"Content-Type": "text/html"}, {"Location": "/"}, {"Location": "http://["}, {"Retry-After": "3600"},
     {"Content-Encoding": "gzip"}, {"Content-Type": "application/json; charset=x"}, {"Transfer-Encoding": "chunked"}]
)  # fmt: skip
_no_http = st.sampled_from([b"", b"SSH-2.0-OpenSSH_9.6\r\n", b"HTTP/1.1\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Le"])
faults: st.SearchStrategy[Fault] = st.one_of(
    _changes(changed_value, position=_positions, value=json_values, remove=st.booleans()),
    _changes(truncated, position=_positions, noise=st.binary(max_size=6)),
    _changes(replace, missing=st.integers(1, 10**6)),
    st.builds(
        Reply, _statuses, st.one_of(_errors, st.sampled_from([PAGE, *NOISE]), st.binary(max_size=40)), headers=_headers
    ),
    st.one_of(_no_http, st.binary(min_size=1, max_size=60)),
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
        if self._fault is None or number not in self._faulty:
            return recorded
        return self._fault(recorded) if callable(self._fault) else self._fault

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


NUM_STEPS = 20


@dataclass(frozen=True)
class Upload:
    """The finished cell of a sweep with metrics, an artifact, a checkpoint and a model; and the server to upload to."""

    server: Replies
    run: RunDir
    num_requests: int  #: of one upload
    num_points: int

    def reset(self) -> None:
        """Remove the records of earlier uploads."""
        for folder in (self.run.path, self.run.path.parent / "tune"):
            (folder / "mlflow.json").unlink(missing_ok=True)
        for path in self.run.journal.glob("sent-*.json"):
            path.unlink()


def make_cell(folder: Path) -> RunDir:
    """Make the run folder of a finished cell of a sweep."""
    config = folder / "run.yaml"
    config.write_text(
        f"{{experiment: exp, name: tune, runs_dir: {folder}/runs, tracking: {{register_as: digits}},"
        " checkpoint: {monitor: loss, monitor_mode: min}}\n"
    )
    sweep = make_sweep(parse_axes(["seed=1"], []), lambda more: load_config(config, more), lambda _: "ddp")
    sweep_dir = write_sweep(sweep)
    (cell,) = sweep.cells
    run = RunDir.create(sweep_dir.path.parent / cell.name)
    run.config.write_text(to_yaml(cell.config))
    mark(run, sweep_dir, cell)
    records = [json.dumps({"t": step, "s": step, "m": {"loss": 0.5}}) + "\n" for step in range(NUM_STEPS)]
    (run.journal / "attempt-001.rank-00000.jsonl").write_text("".join(records))
    run.artifacts.mkdir(exist_ok=True)
    (run.artifacts / "report.txt").write_text("accuracy 0.9")
    checkpoint = run.checkpoints / f"step-{NUM_STEPS - 1:08d}"
    checkpoint.mkdir()
    file = {"bytes": 3, "sha256": "ab"}
    manifest = {"step": NUM_STEPS - 1, "created": 1e9, "world_size": 1, "metrics": {"loss": 0.5}}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest | {"files": {"model.pt": file}}))
    run.model.mkdir(exist_ok=True)
    (run.model / "MLmodel").write_text(yaml.safe_dump({"flavors": {}}))
    run.write_state(replace(run.read_state(), status="finished", attempt=1, ended=1e9, world_size=1))
    return run


@pytest.fixture(scope="module")
def upload(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Upload]:
    folder = tmp_path_factory.mktemp("mlflow")
    run = make_cell(folder)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.chdir(folder)  # an invalid artifact location may be a relative path
        with recording(folder, monkeypatch) as (uri, recorded):
            sync(run, uri, close_dead=False)
        with replayed(recorded, uri) as server:
            ready = Upload(server, run, 0, 0)
            ready.reset()
            num_points = sync(run, server.uri, close_dead=False).num_points
            yield replace(ready, num_requests=server.num_requests, num_points=num_points)
    shutil.rmtree(folder)


def test_replayed_responses_give_a_complete_upload(upload: Upload) -> None:
    assert upload.num_points == NUM_STEPS + 1
    assert upload.num_requests > 20
    assert "registered" in SentFiles.load(upload.run.journal).model


@pytest.mark.slow
@fuzz(share=0.5, fault=faults, position=st.floats(0, 1, exclude_max=True), num_faults=st.sampled_from([1, 2, 1000]))
def test_upload_survives_invalid_responses(upload: Upload, fault: Fault, position: float, num_faults: int) -> None:
    upload.reset()
    upload.server.expect(fault, first_fault=int(position * upload.num_requests), num_faults=num_faults)
    try:
        report = sync(upload.run, upload.server.uri, close_dead=False)
    except TrackingError as error:
        check_message(error)

    else:
        assert report.num_points + report.num_refused == upload.num_points
    # The saved state allows the next upload to continue.
    assert isinstance((read_json(upload.run.mlflow) or {}).get("run_id", ""), str)
    state = SentPoints.load(upload.run.journal)
    (journal,) = upload.run.journal.glob("*.jsonl")
    assert state.offsets.get(journal.name, 0) in (0, journal.stat().st_size)
    upload.server.expect(None)
    try:
        sync(upload.run, upload.server.uri, close_dead=False)
    except TrackingError as error:
        check_message(error)  # such as an id in mlflow.json that the server does not know
    else:
        assert SentPoints.load(upload.run.journal).offsets == {journal.name: journal.stat().st_size}


@fuzz(share=2, fault=faults, first_fault=st.integers(0, 2))
def test_doctor_survives_invalid_responses(upload: Upload, fault: Fault, first_fault: int) -> None:
    upload.server.expect(fault, first_fault=first_fault)
    uri = upload.server.uri
    checks = store_checks(uri, {})
    assert [check.name for check in checks] == ["client", "server"]
    assert all(len(check.text) <= 500 for check in checks)
