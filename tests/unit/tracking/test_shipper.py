"""The shipper process and `sync`, with servers, supervisors and shippers that fail and restart."""

from __future__ import annotations

import errno
import fcntl
import logging
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
from http_servers import mlflow_application, serving
from tracking_scene import CONFIG, Scene

from hpcdist.errors import TrackingError
from hpcdist.host.files import read_json, write_json
from hpcdist.run import lease
from hpcdist.run.folder import RunDir, State
from hpcdist.slurm import client
from hpcdist.slurm.client import JobSnapshot
from hpcdist.slurm.output import JobInfo
from hpcdist.supervisor.children import ShipperProcess
from hpcdist.tracking import shipper
from hpcdist.tracking.delivery import Delivery
from hpcdist.tracking.points import Counts, SentPoints
from hpcdist.tracking.shipper import _Parent, _wait_for_first_step, ship_forever
from hpcdist.tracking.sync_runs import SyncReport, sync

#: Process id of a dead parent.
DEAD_PARENT = -1


def test_error_for_an_unreachable_server_contains_no_password(scene: Scene) -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        uri = f"http://me:secret@127.0.0.1:{bound.getsockname()[1]}"
        with pytest.raises(TrackingError, match=r"MLflow at http://me:\*\*\*@127") as caught:
            sync(scene.run, uri)
    assert "secret" not in str(caught.value)


def test_sync_closes_the_run_of_a_dead_supervisor(scene: Scene) -> None:
    scene.log([1, 2, 3])
    scene.log([2, 4], attempt=2)
    scene.file("journal/attempt-002.rank-00001.jsonl", "garbage")
    renewed = time.time() - 500
    write_json(
        scene.run.lease,
        {"host": socket.gethostname(), "pid": 2**22 + 1, "started": 0.0, "renewed": renewed, "acquired": 0},
    )
    report = sync(scene.run, scene.uri)
    assert report == SyncReport(
        num_points=6, num_repeated=1, num_broken=1, num_artifacts=3, closed="its supervisor died"
    )
    assert str(report) == (
        "6 points and 3 artifacts uploaded, 1 points omitted that an earlier attempt had logged,"
        " 1 damaged lines skipped; closed: its supervisor died"
    )
    state = scene.run.read_state()
    assert (state.status, state.reason, state.ended) == ("failed", "its supervisor died", renewed)
    assert (scene.entity.info.status, scene.entity.info.end_time) == ("FAILED", int(renewed * 1000))
    assert sync(scene.run, scene.uri) == SyncReport()


def test_sync_does_not_close_running_and_created_runs(scene: Scene) -> None:
    with lease.hold(scene.run):
        assert not sync(scene.run, scene.uri).closed
    scene.state(status="created", attempt=0)
    assert not sync(scene.run, scene.uri).closed
    with open(scene.run.journal / ".shipper.lock", "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        report = sync(scene.run, scene.uri)
    assert report.kind == "busy"
    assert str(report) == "another process uploads it at the moment"


@pytest.mark.parametrize(
    ("state", "status"), [("CANCELLED", "KILLED"), ("NODE_FAIL", "FAILED"), ("OUT_OF_MEMORY", "FAILED")]
)
def test_sync_closes_the_run_of_an_ended_job_with_the_reason_of_slurm(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, state: str, status: str
) -> None:
    write_json(scene.run.path / "slurm.json", {"job_id": "12", "cluster": "c"})
    starts = {
        "0": {"began": 1000.0, "nodes": "n1", "queue_s": 3.4},
        "1": {"began": 1200.0, "nodes": "n2", "queue_s": 100.0},
    }
    write_json(scene.run.path / "job.json", {"job_id": "12", "starts": starts})
    scene.state(status="queued", attempt=1)
    facts = JobInfo(id="12", state="PENDING", reason="BeginTime")
    monkeypatch.setattr(client, "take_snapshot", lambda job, history=False: JobSnapshot(info=facts))
    assert sync(scene.run, scene.uri).closed == ""
    assert scene.entity.info.status == "SCHEDULED"
    facts = JobInfo(id="12", state=state, nodes="n2", ended=2e9)
    assert sync(scene.run, scene.uri).closed == f"job 12 ended as {state} on n2"
    run = scene.entity
    assert (run.info.status, run.info.end_time) == (status, int(2e12))
    tags = {key: value for key, value in run.data.tags.items() if key.startswith(("hpcdist.slurm", "hpcdist.reason"))}
    assert tags == {
        "hpcdist.reason": f"job 12 ended as {state} on n2",
        "hpcdist.slurm.job_id": "12",
        "hpcdist.slurm.cluster": "c",
        "hpcdist.slurm.starts": "2",
        "hpcdist.slurm.nodes": "n2",
        "hpcdist.slurm.queue_s": "103",
    }


@pytest.mark.processes
def test_shipper_of_a_follower_continues_through_requeues(scene: Scene) -> None:
    scene.log([1, 2])
    scene.state(status="stopped", attempt=1, ended=2e9)
    shipper = ShipperProcess(scene.run, scene.uri, os.environ, through_queue=True)
    wait_until(lambda: "run_id" in (read_json(scene.run.mlflow) or {}) and scene.status() == "KILLED", 60)
    # The job is requeued and runs again.
    scene.log([3], attempt=2)
    scene.state(status="running", attempt=2, ended=None)
    wait_until(lambda: scene.status() == "RUNNING", 60)
    scene.state(status="finished", ended=2e9)
    assert shipper.drain(60)
    assert (scene.steps(), scene.status()) == ([1, 2, 3], "FINISHED")


def test_exit_of_a_follower_does_not_close_the_run(scene: Scene) -> None:
    scene.state(status="queued")
    assert not ship_forever(scene.run, scene.uri, DEAD_PARENT, through_queue=True)
    assert not scene.run.mlflow.exists()


def test_shipper_of_a_job_exits_when_the_run_is_requeued(scene: Scene) -> None:
    scene.log([1, 2])
    scene.state(status="queued", attempt=1)
    assert ship_forever(scene.run, scene.uri, os.getppid())
    assert (scene.steps(), scene.status()) == ([1, 2], "SCHEDULED")


def test_shipper_marks_the_run_of_a_dead_supervisor_as_failed(scene: Scene) -> None:
    scene.log([1, 2])
    assert ship_forever(scene.run, scene.uri, DEAD_PARENT)
    run = scene.entity
    assert run.info.status == "FAILED"
    assert run.data.tags["hpcdist.reason"].startswith("the supervisor died before the end of the run: `hpcdist resume")
    assert scene.steps() == [1, 2]
    assert scene.run.read_state().status == "running", "only a supervisor or a command writes the state"


def test_shipper_of_a_dead_supervisor_leaves_a_held_run_unchanged(scene: Scene) -> None:
    with lease.hold(scene.run):
        assert not ship_forever(scene.run, scene.uri, DEAD_PARENT)
    assert not scene.run.mlflow.exists()


def test_second_shipper_waits_and_exits_with_its_parent(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with open(scene.run.journal / ".shipper.lock", "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert not ship_forever(scene.run, scene.uri, DEAD_PARENT)
    assert "another shipper uploads first" in caplog.text


def test_shipper_runs_on_a_file_system_without_locks(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    scene.shipper().ship_once()
    flock = fcntl.flock

    def flock_without_locks(file: Any, flags: int) -> None:
        if file.name.endswith(".shipper.lock"):
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
        flock(file, flags)

    monkeypatch.setattr(fcntl, "flock", flock_without_locks)
    scene.state(status="finished", ended=2e9)
    assert ship_forever(scene.run, scene.uri, os.getppid())
    assert "first/journal/.shipper.lock cannot be locked (no flock)" in caplog.text


def test_lock_is_awaited_after_a_transient_error(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    flock, failures = fcntl.flock, [OSError(errno.EIO, os.strerror(errno.EIO))]

    def fail_once(file: Any, flags: int) -> None:
        if failures and file.name.endswith(".shipper.lock"):
            raise failures.pop()
        flock(file, flags)

    scene.state(status="finished", ended=2e9)
    with open(scene.run.journal / ".shipper.lock", "a") as file:
        flock(file, fcntl.LOCK_EX)
        monkeypatch.setattr(fcntl, "flock", fail_once)
        assert sync(scene.run, scene.uri).busy
    assert not failures


def test_drain_ends_after_its_timeout(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    scene.write_config({**CONFIG, "tracking": {"drain_timeout_s": 0}})
    scene.state(status="finished", ended=2e9)
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        uri = f"http://127.0.0.1:{bound.getsockname()[1]}"
        assert not ship_forever(scene.run, uri, os.getppid())
    assert "`hpcdist sync first` uploads the rest" in caplog.text


@pytest.mark.processes
def test_shipper_process_reports_a_missing_run_in_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code = (
        "import sys; from hpcdist.tracking.shipper import main\nprint(main([sys.argv[1]], {}), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout == "2 False\n"
    assert "holds no run" in done.stderr


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def server(root: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """Start `mlflow server`, and kill it with its workers at the end."""
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{root}/mlflow.db", "--artifacts-destination", str(root / "store")]
    env = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    with open(root / "server.log", "ab") as output:
        process = subprocess.Popen(command, env=env, start_new_session=True, stdout=output, stderr=output)
    try:
        wait_until(lambda: answers(port), 60)
        yield process
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def wait_until(condition: Any, timeout_s: float) -> None:
    """Poll until another process has fulfilled the condition."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"no result within {timeout_s:g} s"
        signal.sigtimedwait([signal.SIGTERM], 0.1)


@pytest.mark.processes
@pytest.mark.timeout(180)
def test_killed_server_causes_no_loss_and_no_duplicates(scene: Scene, tmp_path: Path) -> None:
    port = free_port()
    scene.uri = f"http://127.0.0.1:{port}"
    scene.log(range(2000))
    scene.file("journal/attempt-001.rank-00001.jsonl", '{"t":5,"s":1,"m":{"nan":NaN,"up":Infinity}}\n')
    journal_paths = list(scene.run.journal.glob("*.jsonl"))
    command = [sys.executable, "-P", "-m", "hpcdist.tracking.shipper", str(scene.run.path)]
    env = {**os.environ, "HPCDIST_TRACKING_URI": scene.uri}
    output = open(tmp_path / "shipper.log", "wb")  # noqa: SIM115 (closed below)
    with server(tmp_path, port):
        process = subprocess.Popen(command, env=env, stderr=output)
        wait_until(lambda: all(SentPoints.load(scene.run.journal).offsets.get(path.name) for path in journal_paths), 60)
        scene.log(range(2000, 3000))
    scene.log(range(3000, 3500))
    wait_until(lambda: b"records stay" in (tmp_path / "shipper.log").read_bytes(), 60)
    scene.file("attempts/001/rank-00000.log", "a line\n")
    with server(tmp_path, port):
        scene.state(status="finished", ended=2e9)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        output.close()
        assert scene.steps() == list(range(3500))
        assert scene.entity.info.status == "FINISHED"
        assert math.isnan(scene.entity.data.metrics["nan"])
        assert scene.entity.data.metrics["up"] > 1e308
        assert "logs/attempt-001/rank-00000.log" in scene.artifacts()
    log = (tmp_path / "shipper.log").read_text()
    assert log.count("records stay in the journal") == 1
    assert log.count("is available again") == 1


# --- An invalid response of a server or a proxy raises a one-line error and neither loses nor duplicates points.


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
        r"no more requests .*429",
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
        assert shipper.batches.counts == Counts(num_points=60 + 1)
        history = scene.client.get_metric_history(scene.run_id, "acc_--0a78af425a78")
        assert [point.step for point in history] == list(range(30))

        # Requests are split for a proxy that limits their size.
        scene.log(range(1000), key="many")
        proxy.largest = 20_000
        assert shipper.ship_once() == 1000
        assert len(scene.steps("many")) == 1000


# --- The shipper imports MLflow, which takes seconds of CPU time, when the ranks have started to train.


class Parent:
    """A supervisor that does something at each poll."""

    def __init__(self, *actions: Callable[[], bool | None]) -> None:
        self.actions = list(actions)
        self.gone = False
        self.num_polls = 0

    def wait(self, _seconds: float) -> bool:
        self.num_polls += 1
        return bool(self.actions.pop(0)()) if self.actions else False

    def leave(self) -> None:
        self.gone = True


def num_polls(run: RunDir, parent: Parent) -> int:
    _wait_for_first_step(run, cast(_Parent, parent))
    return parent.num_polls


@pytest.fixture
def run(runs_dir: Path) -> RunDir:
    run = RunDir.create(runs_dir / "exp" / "run")
    run.new_attempt()
    run.write_state(State(status="running", attempt=1))
    return run


def beat(run: RunDir, step: int, age_s: float = 0.0) -> None:
    write_json(run.attempt(1).beat(0), {"step": step, "time": time.time() - age_s, "metrics": {}})


def test_shipper_waits_for_the_first_step(run: RunDir) -> None:
    """A step of an earlier start of the supervisor does not count."""
    beat(run, 7, age_s=60.0)
    parent = Parent(lambda: None, lambda: beat(run, 0), lambda: beat(run, 1, age_s=-1.0))
    assert num_polls(run, parent) == 3


@pytest.mark.parametrize("status", ["finished", "failed", "cancelled", "queued"])
def test_shipper_does_not_wait_after_the_end_of_the_run(run: RunDir, status: str) -> None:
    parent = Parent(lambda: run.write_state(State(status=status, attempt=1)))  # type: ignore[arg-type]
    assert num_polls(run, parent) == 1


def test_signal_and_the_end_of_the_supervisor_end_the_wait(run: RunDir) -> None:
    assert num_polls(run, Parent(lambda: False, lambda: True)) == 2
    parent = Parent()
    parent.actions = [lambda: None, parent.leave]
    assert num_polls(run, parent) == 2


def test_wait_has_a_limit(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts may report no steps."""
    monkeypatch.setattr(shipper, "IMPORT_WITHIN_S", 0.0)
    assert num_polls(run, Parent()) == 0
