"""The shipper process and `sync`, with servers, supervisors and shippers that fail and restart; commands by tag."""

import fcntl
import logging
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
from hpcdist_runs import unused_port
from tracking_scene import CONFIG, Scene

from hpcdist.errors import TrackingError, UserMistake
from hpcdist.host.json_files import read_json, write_json
from hpcdist.run import lease
from hpcdist.run.lease import hold
from hpcdist.run.rank_requests import CommandResult, LiveCommand, read_command, write_result
from hpcdist.slurm import client
from hpcdist.slurm.client import JobSnapshot
from hpcdist.slurm.output import JobInfo
from hpcdist.supervisor.children import ShipperProcess
from hpcdist.tracking import command_tag, shipper, sync_runs
from hpcdist.tracking.command_tag import parse
from hpcdist.tracking.delivery import Delivery
from hpcdist.tracking.journal import EventWriter
from hpcdist.tracking.sent_points import SentPoints, is_complete
from hpcdist.tracking.shipper import _Starter, _wait_for_first_step, ship_run
from hpcdist.tracking.sync_runs import SyncReport, sync

#: Process id of a dead parent.
DEAD_PARENT = -1
#: Time limit of a wait for another process: on a busy machine a server or a shipper takes a minute to import MLflow.
WAIT_S = 300.0


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
    assert report == SyncReport(num_points=4, num_broken=1, num_artifacts=3, closed="its supervisor died")
    assert str(report) == "4 points and 3 artifacts uploaded, 1 damaged lines skipped; closed: its supervisor died"
    state = scene.run.read_state()
    assert (state.status, state.reason, state.ended) == ("failed", "its supervisor died", renewed)
    assert (scene.entity.info.status, scene.entity.info.end_time) == ("FAILED", int(renewed * 1000))
    assert sync(scene.run, scene.uri) == SyncReport()


def test_sync_of_an_ended_run_follows_another_upload(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    scene.state(status="finished")
    uploads: list[str] = []
    is_waiting = threading.Event()
    monkeypatch.setattr(sync_runs, "say", lambda *_, **__: is_waiting.set())
    monkeypatch.setattr(sync_runs, "_upload", lambda *_, **__: uploads.append("of sync"))
    with shipper.only_shipper(scene.run) as only:
        assert only
        assert sync(scene.run, scene.uri).kind == "busy", "the control: `hpcdist sync` without names goes on"
        thread = threading.Thread(target=sync, args=(scene.run, scene.uri), kwargs={"waits": True})
        thread.start()
        assert is_waiting.wait(60)
        thread.join(0.5)  # without the lock it would upload now
        uploads.append("of the other process")
    thread.join(60)
    assert uploads == ["of the other process", "of sync"]


def test_sync_does_not_close_running_and_created_runs(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with lease.hold(scene.run):
        assert not sync(scene.run, scene.uri).closed
    scene.state(status="created", attempt=0)
    assert not sync(scene.run, scene.uri).closed
    with open(scene.run.journal / ".shipper.lock", "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        report = sync(scene.run, scene.uri)
        assert not ship_run(scene.run, scene.uri, DEAD_PARENT), "waits, and exits with its parent"
    assert "another shipper uploads first" in caplog.text
    assert report.kind == "busy"
    assert str(report) == "another process uploads it at the moment"


def test_sync_closes_the_run_of_an_ended_job_with_slurms_reason(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    write_json(scene.run.path / "slurm.json", {"job_id": "12", "cluster": "c"})
    queued = {str(number): {"began": 1000.0, "nodes": "n2", "queue_s": s} for number, s in enumerate((3.4, 100.0))}
    write_json(scene.run.path / "job.json", {"job_id": "12", "starts": queued})
    scene.state(status="queued", attempt=1)
    facts = JobInfo(id="12", state="PENDING", reason="BeginTime")
    monkeypatch.setattr(client, "take_snapshot", lambda job, history=False: JobSnapshot(info=facts))
    assert sync(scene.run, scene.uri).closed == ""
    assert scene.entity.info.status == "SCHEDULED"
    facts = JobInfo(id="12", state="CANCELLED", nodes="n2", ended=2e9)
    assert sync(scene.run, scene.uri).closed == "job 12 ended as CANCELLED on n2"
    run = scene.entity
    assert (run.info.status, run.info.end_time) == ("KILLED", int(2e12))
    assert {key: run.data.tags[f"hpcdist.{key}"] for key in ("reason", "slurm.cluster", "slurm.starts")} == {
        "reason": "job 12 ended as CANCELLED on n2",
        "slurm.cluster": "c",
        "slurm.starts": "2",
    }
    tags = [run.data.tags[f"hpcdist.slurm.{key}"] for key in ("job_id", "nodes", "queue_s")]
    assert tags == ["12", "n2", "103"]


def test_sync_does_not_wait_for_the_end_of_a_requeued_job(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    waited = []
    monkeypatch.setattr(sync_runs, "sync", lambda *_, waits: waited.append(waits))
    monkeypatch.setattr(sync_runs, "update_job_starts", lambda run: None)
    scene.state(status="stopped", attempt=1, ended=2e9)
    sync_runs.sync_run(scene.run, {}, complete=True)
    write_json(scene.run.path / "slurm.json", {"job_id": "12"})
    for job_state in ("PENDING", "CANCELLED"):
        snapshot = JobSnapshot(info=JobInfo(id="12", state=job_state))
        monkeypatch.setattr(client, "take_snapshot", lambda job, history=False, snapshot=snapshot: snapshot)
        sync_runs.sync_run(scene.run, {}, complete=True)
    assert waited == [True, False, True]


@pytest.mark.processes
def test_shipper_of_a_follower_continues_through_requeues(scene: Scene) -> None:
    scene.log([1, 2])
    scene.state(status="stopped", attempt=1, ended=2e9)
    process = ShipperProcess(scene.run, scene.uri, os.environ, through_queue=True)
    wait_until(lambda: "run_id" in (read_json(scene.run.mlflow) or {}) and scene.status() == "KILLED")
    # The job is requeued and runs again.
    scene.log([3], attempt=2)
    scene.state(status="running", attempt=2, ended=None)
    wait_until(lambda: scene.status() == "RUNNING")
    scene.state(status="finished", ended=2e9)
    assert process.drain(WAIT_S)
    assert (scene.steps(), scene.status()) == ([1, 2, 3], "FINISHED")


def test_shipper_fails_only_the_run_of_a_dead_supervisor(scene: Scene) -> None:
    scene.log([1, 2])
    scene.state(status="queued")
    assert not ship_run(scene.run, scene.uri, DEAD_PARENT, through_queue=True), "of a command that follows a job"
    scene.state(status="running")
    with lease.hold(scene.run):
        assert not ship_run(scene.run, scene.uri, DEAD_PARENT), "of another supervisor"
    assert not scene.run.mlflow.exists()
    scene.state(status="queued", attempt=1)
    assert ship_run(scene.run, scene.uri, os.getppid()), "the next job has its own shipper"
    assert (scene.steps(), scene.status()) == ([1, 2], "SCHEDULED")
    scene.state(status="running")
    assert ship_run(scene.run, scene.uri, DEAD_PARENT)
    run = scene.entity
    assert run.info.status == "FAILED"
    assert run.data.tags["hpcdist.reason"].startswith("the supervisor died before the end of the run: `hpcdist resume")
    assert scene.run.read_state().status == "running", "only a supervisor or a command writes the state"


def test_error_of_an_unreachable_server_hides_the_password(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    scene.write_config({**CONFIG, "tracking": {"drain_timeout_s": 0}})
    scene.state(status="finished", ended=2e9)
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        uri = f"http://me:secret@127.0.0.1:{bound.getsockname()[1]}"
        assert not ship_run(scene.run, uri, os.getppid())
        with pytest.raises(TrackingError, match=r"MLflow at http://me:\*\*\*@127") as caught:
            sync(scene.run, uri)
    assert "`hpcdist sync first` uploads the rest" in caplog.text
    assert "secret" not in f"{caught.value} {caplog.text}"


@pytest.mark.processes
def test_shipper_process_reports_a_missing_run_in_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code = (
        "import sys; from hpcdist.tracking.shipper import main\nprint(main([sys.argv[1]], {}), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout == "2 False\n"
    assert "holds no run" in done.stderr


#: A shipper in a long pass, such as the upload of a large model. Its parent has ended.
LONG_PASS = f"""
import os, sys, time
from hpcdist.tracking import delivery, shipper
def ship_once(self, state):
    print("in a pass", flush=True)
    time.sleep(600)
delivery.Delivery.ship_once = ship_once
shipper.POLL_S = 0.05
shipper.main(sys.argv[1:], {{**os.environ, "HPCDIST_SUPERVISOR_PID": "{DEAD_PARENT}"}})
"""


@pytest.mark.processes
def test_orphaned_shipper_ends_when_the_run_is_resumed(scene: Scene) -> None:
    scene.state(status="running", attempt=1)
    process = subprocess.Popen(
        [sys.executable, "-c", LONG_PASS, str(scene.run.path)],
        env={**os.environ, "HPCDIST_TRACKING_URI": scene.uri},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "in a pass\n"
        assert process.poll() is None, "it marks the run as failed if nobody resumes it"
        with lease.hold(scene.run):
            assert process.wait(WAIT_S) == 1


@contextmanager
def server(root: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """Start `mlflow server`, and kill it with its workers at the end."""
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{root}/mlflow.db", "--artifacts-destination", str(root / "store")]
    env = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    with open(root / "server.log", "ab") as output:
        process = subprocess.Popen(command, env=env, start_new_session=True, stdout=output, stderr=output)
    try:
        with socket.socket() as probe:
            wait_until(lambda: probe.connect_ex(("127.0.0.1", port)) == 0)
        yield process
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_until(condition: Any) -> None:
    """Poll until another process has fulfilled the condition."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, f"no result within {WAIT_S:g} s"
        signal.sigtimedwait([signal.SIGTERM], 0.1)


@pytest.mark.processes
def test_killed_server_causes_no_loss_and_no_duplicates(scene: Scene, tmp_path: Path) -> None:
    port = unused_port()
    scene.uri = f"http://127.0.0.1:{port}"
    # A busy server may need longer than the 20 s of CONFIG for the rest.
    scene.write_config(CONFIG | {"tracking": {**CONFIG["tracking"], "drain_timeout_s": WAIT_S}})
    scene.log(range(2000))
    scene.file("journal/attempt-001.rank-00001.jsonl", '{"t":5,"s":1,"m":{"nan":NaN,"up":Infinity}}\n')
    journal_paths = list(scene.run.journal.glob("*.jsonl"))
    command = [sys.executable, "-P", "-m", "hpcdist.tracking.shipper", str(scene.run.path)]
    env = {**os.environ, "HPCDIST_TRACKING_URI": scene.uri}
    output = open(tmp_path / "shipper.log", "wb")  # noqa: SIM115 (closed below)
    with server(tmp_path, port):
        process = subprocess.Popen(command, env=env, stderr=output)
        wait_until(lambda: all(SentPoints.load(scene.run.journal).offsets.get(path.name) for path in journal_paths))
        scene.log(range(2000, 3000))
    scene.log(range(3000, 3500))
    wait_until(lambda: b"records stay" in (tmp_path / "shipper.log").read_bytes())
    scene.file("attempts/001/rank-00000.log", "a line\n")
    with server(tmp_path, port):
        scene.state(status="finished", ended=2e9)
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_S) == 0
        output.close()
        assert scene.steps() == list(range(3500))
        assert scene.entity.info.status == "FINISHED"
        assert math.isnan(scene.entity.data.metrics["nan"])
        assert scene.entity.data.metrics["up"] > 1e308
        assert "logs/attempt-001/rank-00000.log" in scene.artifacts()
    log = (tmp_path / "shipper.log").read_text()
    assert log.count("records stay in the journal") == 1
    assert log.count("is available again") == 1


# --- The shipper imports MLflow, which takes seconds of CPU time, when the ranks have started to train.


class Parent:
    """A supervisor of a run that changes at each poll."""

    def __init__(self, *actions: Callable[[], object]) -> None:
        self.actions = list(actions)
        self.gone = False

    def wait(self, _seconds: float) -> bool:
        return self.actions.pop(0)() is True

    def leave(self) -> None:
        self.gone = True


def beat(scene: Scene, step: int, age_s: float = 0.0) -> None:
    write_json(scene.run.attempt(1).beat(0), {"step": step, "time": time.time() - age_s, "metrics": {}})


def test_shipper_waits_for_the_first_step(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    scene.run.new_attempt()
    beat(scene, 7, age_s=60.0)  # of an earlier start of the supervisor
    leaving = Parent(lambda: None)
    leaving.actions.append(leaving.leave)
    for parent in (
        Parent(lambda: False, lambda: True),  # a signal
        leaving,
        Parent(lambda: None, lambda: beat(scene, 0), lambda: beat(scene, 1, age_s=-1.0)),
    ):
        _wait_for_first_step(scene.run, cast(_Starter, parent))
        assert parent.actions == []
    beat(scene, 7, age_s=60.0)
    for status in ("finished", "failed", "cancelled", "queued"):
        parent = Parent(partial(scene.state, status=status), lambda: scene.state(status="running"))
        _wait_for_first_step(scene.run, cast(_Starter, parent))
        assert len(parent.actions) == 1, status
        scene.state(status="running")
    monkeypatch.setattr(shipper, "IMPORT_WITHIN_S", 0.0)  # scripts may report no steps
    _wait_for_first_step(scene.run, cast(_Starter, Parent()))


@pytest.mark.processes
def test_run_is_complete_until_new_records_or_another_attempt(scene: Scene) -> None:
    def log_tag() -> None:
        with EventWriter(scene.run.journal, 1, 0) as events:
            events.record("tag", {"stage": "late"})

    scene.log([1, 2])
    sync(scene.run, scene.uri, close_dead=False)
    assert not is_complete(scene.run), "it has not ended"
    for change in (
        lambda: scene.state(status="stopped", ended=time.time()),
        lambda: scene.log([3]),
        log_tag,
        lambda: scene.state(status="finished", attempt=2),
    ):
        change()
        assert not is_complete(scene.run)
        sync(scene.run, scene.uri)
        assert is_complete(scene.run)


# --- The tag `hpcdist.command`; the ranks are replaced.


class Live:
    """A running run with a config that allows commands."""

    def __init__(self, scene: Scene, *allowed: str) -> None:
        self.scene = scene
        scene.write_config(CONFIG | {"tracking": {**CONFIG["tracking"], "commands": list(allowed)}})
        self.attempt = scene.run.new_attempt()
        scene.state(world_size=4)
        self.shipper = scene.shipper()
        self.shipper.ship_once()

    def set(self, text: str) -> None:
        self.scene.client.set_tag(self.scene.run_id, "hpcdist.command", text)

    def tags(self) -> dict[str, str]:
        return dict(self.scene.entity.data.tags)

    def result(self) -> str:
        """Return the result of the last command, without its time."""
        return self.tags().get("hpcdist.command.result", "").partition(" UTC ")[2]

    def ship(self) -> None:
        """Upload in a pass that reads the tag once."""
        if self.shipper._command is not None:
            self.shipper._command._next = -math.inf
        self.shipper.ship_once()

    def obey(self, text: str) -> str:
        self.set(text)
        self.ship()
        return self.result()


@pytest.fixture
def live(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> Iterator[Live]:
    monkeypatch.setattr(command_tag, "INTERVAL_S", 3600.0)
    with hold(scene.run):
        yield Live(scene, "stop", "save", "profile")


def test_results_of_the_ranks_follow(live: Live) -> None:
    text = "profile steps=3 ranks=2,0"
    assert live.obey(text) == f"{text}: sent to the ranks"
    command = read_command(live.attempt, 1)
    assert command == LiveCommand(
        action="profile",
        by="the tag hpcdist.command in MLflow",
        num_steps=3,
        ranks=[0, 2],
        time=command.time if command else 0.0,
        key=command.key if command else "",
    )
    write_result(live.attempt, 1, 0, CommandResult(step=8, num_steps=3, path="artifacts/a"))
    live.ship()
    assert live.result() == f"{text}: sent to the ranks"
    write_result(live.attempt, 1, 2, CommandResult(error="no space"))
    Delivery(live.scene.run, live.scene.uri).ship_once()  # another process continues
    assert live.result() == f"{text}: rank 0: profiled 3 steps from step 8 on: artifacts/a; rank 2: no space"
    assert live.obey("save") == "save: sent to the ranks"
    live.scene.state(status="finished", ended=1.0)
    live.shipper = live.scene.shipper()
    live.ship()
    assert live.result() == "save: rank 0: attempt 1 ended before it was done"


def test_invalid_and_forbidden_commands_are_refused(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command_tag, "INTERVAL_S", 3600.0)
    with hold(scene.run):
        live = Live(scene, "save", "profile")
        text = "profile ranks=4"
        assert live.obey(text) == f"{text}: refused: run first has no rank 4: its ranks are 0 to 3"
        assert live.obey("halt").startswith("halt: refused: 'halt' is not a command: set stop, save or profile")
        refused = "stop: refused: tracking.commands allows save, profile, not stop: add it to the config"
        assert live.obey("stop") == refused
        assert "hpcdist.command" not in live.tags()
        assert not live.attempt.request.exists()
        scene.write_config(CONFIG)
        live.shipper = scene.shipper()
        live.obey("save")
    assert live.tags()["hpcdist.command"] == "save", "without allowed commands the tag is not read"
    assert not live.attempt.command(1).exists()


def test_command_to_an_ended_run_does_not_stop_its_resume(live: Live) -> None:
    live.set("stop")
    live.scene.state(status="stopped", ended=1.0)
    live.ship()
    assert live.result() == "stop: ignored, since the run has ended: it is stopped"
    live.set("stop")
    live.scene.state(status="running", ended=None, attempt=2)
    live.scene.run.new_attempt()
    live.shipper = live.scene.shipper()
    live.ship()
    assert live.result() == "stop: ignored, since it was set before the run was resumed"
    assert not live.scene.run.attempt(2).request.exists()
    assert live.obey("stop").startswith("stop: first will save and stop")


def test_crash_after_the_tag_was_read(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(*_: object) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("hpcdist.tracking.mlflow_client.MlflowRun.delete_tag", crash)
        with pytest.raises(KeyboardInterrupt):
            live.obey("save")
    live.shipper = live.scene.shipper()
    live.ship()
    assert live.result() == "save: sent to the ranks"
    assert live.attempt.command(1).exists()
    with monkeypatch.context() as patch:
        patch.setattr("hpcdist.tracking.mlflow_client.MlflowRun.delete_tag", crash)
        with pytest.raises(KeyboardInterrupt):
            live.obey("stop")
    live.scene.state(attempt=2)
    live.scene.run.new_attempt()
    live.shipper = live.scene.shipper()
    live.ship()
    assert live.result() == "stop: ignored, since it was set during attempt 1"


@pytest.mark.parametrize("text", ["save", "profile", "stop"])
def test_command_is_obeyed_once_if_the_shipper_dies_after_it(
    live: Live, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    note = command_tag.CommandTag._note

    def crash_before_the_result(self: command_tag.CommandTag, command: command_tag.SentCommand) -> None:
        if command.result:
            raise KeyboardInterrupt
        note(self, command)

    with monkeypatch.context() as patch:
        patch.setattr(command_tag.CommandTag, "_note", crash_before_the_result)
        with pytest.raises(KeyboardInterrupt):
            live.obey(text)
    live.shipper = live.scene.shipper()
    live.ship()
    assert not live.attempt.command(2).exists()
    if text == "stop":
        request = read_json(live.attempt.request) or {}
        assert [request[key] for key in ("action", "cause", "by")] == ["stop", "user", command_tag.AUTHOR]
        assert live.result() == "stop: first will save and stop; `hpcdist status first` shows its progress"
    else:
        assert live.result() == f"{text}: sent to the ranks"
        assert live.attempt.command(1).exists()
        assert live.obey(text) == f"{text}: sent to the ranks", "another command with the same text"
        assert live.attempt.command(2).exists()


def test_commands_are_parsed() -> None:
    assert parse("stop") is None
    assert parse(" save ") == LiveCommand(action="save", by=command_tag.AUTHOR)
    profile = LiveCommand(action="profile", by=command_tag.AUTHOR)
    assert parse("profile") == profile
    assert parse("profile ranks=3,1 steps=20") == replace(profile, num_steps=20, ranks=[1, 3])
    for text, message in (
        ("stop now", "'stop now' is not a command: set stop, save or profile, such as 'profile steps=10 ranks=0,3'"),
        ("profile depth=2", "'profile depth=2' is not a command"),
        ("profile steps=ten", "steps=ten: expected a number"),
        ("profile ranks=a", "ranks 'a': expected ranks, separated by commas, such as 0,3"),
    ):
        with pytest.raises(UserMistake, match=message):
            parse(text)
