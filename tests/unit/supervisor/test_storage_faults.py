"""Faults of the file system under a supervisor: errors of single operations, and unavailable, hanging or full disks."""

from __future__ import annotations

import errno
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hpcdist_runs import wait_for
from http_servers import PATH, SECRET, Webhook, listening_webhook
from io_faults import Fault, recorded
from supervisor_scene import DONE, EXIT_0, Scene, fails

from hpcdist.config.launch_schema import NotifyConfig
from hpcdist.config.loading import load_config
from hpcdist.errors import ConfigError
from hpcdist.run.folder import RunDir
from hpcdist.run.status import close_if_lost
from hpcdist.supervisor import children, notifier
from hpcdist.supervisor.children import ShipperProcess

#: All tests of this file may start processes.
pytestmark = pytest.mark.processes

SCENE = Path(__file__).parents[2] / "support" / "supervisor_scene.py"
ENDS = {"done": "finished", "restart": "finished", "slow": "finished", "stop": "stopped", "stop by signal": "stopped"}
ERRORS = ("ESTALE", "EIO", "EACCES", "EINTR", "ENOSPC")
Cell = dict[str, Any]


class Result(NamedTuple):
    """Results of the played scenes, and the messages of all of them."""

    answers: list[dict[str, Any]]
    messages: str


class Player:
    def __init__(self, library: Path, folder: Path) -> None:
        self._library = library
        self.folder = folder

    def play(self, cells: Sequence[Cell], *, unattended_s: float = 10.0) -> Result:
        """Play scenes in one process, each in a run folder `run-NNNN`."""
        done = subprocess.run(
            [sys.executable, str(SCENE), str(self.folder), str(unattended_s)],
            input="\n".join(map(json.dumps, cells)),
            capture_output=True,
            text=True,
            env={"PATH": os.environ["PATH"], "LD_PRELOAD": str(self._library)},
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return Result([json.loads(line) for line in done.stdout.splitlines()], done.stderr)

    def beside(self, name: str) -> Player:
        """Return a player with other run folders."""
        folder = self.folder / name
        folder.mkdir()
        return Player(self._library, folder)

    def operations(self) -> list[tuple[str, str, str]]:
        """Return operation, file and scene of each file operation of the supervisor."""
        names = ("done", "restart", "stop")
        cells = [{"scene": name, "record": str(self.folder / f"record-{name}")} for name in names]
        assert [answer["error"] for answer in self.beside("recorded").play(cells).answers] == [None] * 3
        found: dict[tuple[str, str], str] = {}
        for name in names:
            for key in sorted(recorded(self.folder / f"record-{name}")):
                found.setdefault(key, name)
        return [(operation, path, name) for (operation, path), name in found.items()]


@pytest.fixture
def player(io_faults: Path, tmp_path: Path) -> Player:
    return Player(io_faults, tmp_path)


def wrong(cells: Sequence[Cell], played: Result) -> list[str]:
    """Return the scenes that ended differently than without a fault, or in which the fault did not occur."""
    found = []
    for cell, answer in zip(cells, played.answers, strict=True):
        end = ENDS[cell["scene"]]
        as_usual = (answer["error"], answer.get("status"), answer["on_disk"][0]) == (None, end, end)
        if not as_usual or not answer["fired"] or answer["lease_left"] or answer["threads"]:
            found.append(f"{cell}: {answer}")
    return found


def each_once(operations: Sequence[tuple[str, str, str]], **fault: Any) -> list[Cell]:
    return [
        {"scene": scene, "fault": asdict(Fault(operation=operation, path=path, **fault))}
        for operation, path, scene in operations
    ]


def assert_unchanged(player: Player, cells: Sequence[Cell]) -> Result:
    """Play scenes, and repeat those in which the fault did not occur: not every poll reads a heartbeat."""
    played = player.play(cells)
    for number in range(3):
        missed = [index for index, answer in enumerate(played.answers) if not answer["fired"]]
        if not missed:
            break
        again = player.beside(f"again-{number}").play([cells[index] for index in missed])
        for index, answer in zip(missed, again.answers, strict=True):
            played.answers[index] = answer
        played = Result(played.answers, played.messages + again.messages)
    assert not (found := wrong(cells, played)), "\n".join(found)
    assert "Traceback" not in played.messages
    return played


@pytest.mark.slow
def test_one_stale_file_handle_does_not_change_the_result(player: Player) -> None:
    operations = player.operations()
    kinds = {operation for operation, _, _ in operations}
    assert kinds >= {"open", "create", "read", "write", "fsync", "rename", "stat", "unlink", "mkdir", "flock"}
    played = assert_unchanged(player, each_once(operations, error=errno.ESTALE))
    assert re.search(r"run-\d+/state\.json: Stale file handle; retrying for up to 10 s\n", played.messages)
    assert re.search(r"run-\d+/state\.json is available again after 0\.\d s\n", played.messages)


def test_error_at_the_close_of_a_log_starts_no_rank_twice(player: Player) -> None:
    closed = Fault(operation="close", path="attempts/rank-parent.log", error=errno.ESTALE)
    assert_unchanged(player, [{"scene": "done", "fault": asdict(closed)}])
    assert (player.folder / "run-0000" / "attempts" / "001" / "rank-00000.log").read_text() == "started\n"


@pytest.mark.faults
@pytest.mark.parametrize("error", [name for name in ERRORS if name != "ESTALE"])
def test_one_file_error_does_not_change_the_result(player: Player, error: str) -> None:
    assert_unchanged(player, each_once(player.operations(), error=getattr(errno, error)))


@pytest.mark.faults
def test_file_operation_of_one_minute_does_not_change_the_result(player: Player) -> None:
    launch = {"launch": {"hang_timeout_s": 10.0}}
    chosen = [item for item in player.operations() if item[:2] in HANGS]
    assert len(chosen) == len(HANGS)
    assert_unchanged(player, [cell | launch for cell in each_once(chosen, delay_ms=60_000)])


HANGS = {
    ("stat", "attempts/001/rank-00000.beat.json"),
    ("open", "attempts/001/request.json"),
    ("rename", "state.json"),
    ("opendir", "attempts/001"),
}


def test_run_folder_unavailable_for_seconds_only_delays_the_run(player: Player) -> None:
    cells = [
        {"scene": scene, "fault": asdict(Fault(operation="*", error=error, window_ms=1500))}
        for scene, error in (("done", errno.ESTALE), ("stop", errno.EIO), ("restart", errno.EACCES))
    ]
    assert_unchanged(player, cells)


@pytest.mark.slow
def test_time_without_file_system_does_not_count_as_a_hang(player: Player) -> None:
    """The ranks write no heartbeat for 3 s, and the supervisor waits for the file system most of this time."""
    beat = "attempts/001/rank-00000.beat.json"
    cells = [
        {"scene": "slow", "launch": {"hang_timeout_s": 2.9}, "fault": asdict(fault)}
        for fault in (
            # A file that can be read: the rank has written its heartbeat, and is silent from now on.
            Fault(operation="read", path=beat, delay_ms=2800),
            Fault(operation="*", path="attempts/001/*.beat.json", error=errno.ESTALE, window_ms=2800),
        )
    ]
    assert_unchanged(player, cells)


def test_ranks_get_a_signal_if_the_request_cannot_be_written(player: Player) -> None:
    full = Fault(operation="create", path="attempts/001/.request.json.*", error=errno.ENOSPC, count=0)
    cells = [{"scene": "stop by signal", "fault": asdict(full)}]
    played = player.play(cells, unattended_s=0.5)
    assert wrong(cells, played) == []
    (answer,) = played.answers
    assert answer["notes"][0] == "stopping: the ranks save a checkpoint and exit (SIGTERM to the supervisor)"
    assert answer["notes"][1].endswith("request.json: No space left on device; sending SIGTERM to the ranks")
    assert answer["on_disk"] == ["stopped", "everything saved (SIGTERM to the supervisor)"]


def test_run_folder_that_stays_unavailable_fails_the_run(player: Player) -> None:
    lasting: dict[str, Any] = {"error": errno.EIO, "count": 0}
    cells = [
        {"scene": "done", "fault": asdict(Fault(operation="readdir", path="attempts/001", **lasting))},
        {"scene": "restart", "fault": asdict(Fault(operation="mkdir", path="attempts/002", **lasting))},
        # The last state cannot be written.
        {"scene": "done", "fault": asdict(Fault(operation="rename", path="state.json", first=3, **lasting))},
    ]
    played = player.play(cells, unattended_s=0.2)
    assert "Traceback" not in played.messages
    first, second, third = played.answers
    assert [first["status"], second["status"], third["status"]] == ["failed", "failed", "finished"]
    assert re.fullmatch(r"/.*/attempts/001: Input/output error", first["reason"])
    assert re.fullmatch(r"/.*/attempts/002: Input/output error", second["reason"])
    assert [first["on_disk"], second["on_disk"]] == [["failed", first["reason"]], ["failed", second["reason"]]]
    assert third["on_disk"][0] == "running"
    assert third["notes"] == [f"{player.folder}/run-0002/state.json cannot be written: Input/output error"]
    run = RunDir(player.folder / "run-0002")
    assert close_if_lost(run) == "its supervisor died"
    assert run.read_state().status == "failed"


# --- The shipper of a supervisor with fake ranks (`support/fake_rank.py`).


@pytest.fixture
def scene(runs_dir: Path) -> Scene:
    return Scene(RunDir.create(runs_dir / "exp" / "first"))


def test_shipper_gets_run_folder_and_uri_with_password(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    stub = scene.run.path / "python"
    low = min(os.nice(0) + 10, 19)
    until = f'until cut -d " " -f 19 /proc/self/stat | grep -x {low}; do :; done'
    stub.write_text(f'#!/bin/sh\necho "$@"; echo "$HPCDIST_TRACKING_URI"; {until}; echo err >&2; cat\n')
    stub.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(stub))
    shipper = ShipperProcess(scene.run, "http://ada:s3cret@mlflow:5000", scene.env)
    wait_for(lambda: (scene.run.path / "shipper.log").read_text().endswith("err\n"), "the output of the shipper")
    assert shipper.drain(60)
    monkeypatch.undo()
    assert (scene.run.path / "shipper.log").read_text().splitlines() == [
        f"-P -m hpcdist.tracking.shipper {scene.run.path}",
        "http://ada:s3cret@mlflow:5000",
        str(low),
        "err",
        ".",  # from its standard input: the run has ended
    ]


@pytest.mark.parametrize("shipper", [["false"], ["sleep", "600"]], ids=["failed", "too slow"])
def test_report_of_missing_mlflow_records_hides_the_password(
    scene: Scene, shipper: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.tracking = {"drain_timeout_s": 0.1}
    if is_slow := shipper != ["false"]:
        monkeypatch.setattr(children, "NOTE_AFTER_S", 0.01)
    scene.shipper = shipper
    scene.tracking_uri = "http://ada:s3cret@mlflow:5000"
    scene.script(first=[[*DONE], EXIT_0])
    assert scene.supervise().status == "finished"
    assert scene.report.notes == [
        *["uploading to MLflow"] * is_slow,
        "MLflow at http://ada:***@mlflow:5000 has not received all records (see shipper.log); none are lost:"
        " `hpcdist sync first` ships the rest",
    ]


def test_final_state_is_written_before_the_wait_for_the_shipper(scene: Scene) -> None:
    """The shipper ends when `state.json` records the end of the run."""
    scene.tracking = {"drain_timeout_s": 20.0}
    scene.shipper = ["sh", "-c", f"until grep -q finished '{scene.run.path}/state.json'; do :; done"]
    scene.script(first=[[*DONE], EXIT_0])
    assert scene.supervise().status == "finished"
    assert "has not received" not in "".join(scene.report.notes)


# --- Notifications reach a real HTTP server or a command, and a receiver that fails or hangs does not affect the run.


LOST = "not all notifications were delivered (see notifier.log)"


@pytest.fixture
def webhook() -> Iterator[Webhook]:
    with listening_webhook() as server:
        yield server


@pytest.fixture
def hanging() -> Iterator[str]:
    """Yield the address of a server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}{PATH}"


@pytest.fixture
def notified(runs_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    monkeypatch.setattr(notifier, "DRAIN_S", 240.0)  # the machine may be busy
    return Scene(RunDir.create(runs_dir / "exp" / "first"))


def texts_below(folder: Path) -> str:
    return "\n".join(path.read_text(errors="replace") for path in folder.rglob("*") if path.is_file())


def test_webhook_receives_start_restart_and_end(notified: Scene, webhook: Webhook) -> None:
    notified.notify = {"webhook": webhook.url}
    notified.script(first=[DONE, fails("ValueError: boom token=abc")], second=[DONE, DONE])
    notified.run.mlflow.write_text(json.dumps({"run_id": "0a1b"}))
    webhook.statuses = [500]
    assert notified.supervise().status == "finished"
    assert [(body["event"], body["run"], body["status"], body["attempt"]) for body in webhook.bodies] == [
        ("started", "exp/first", "running", 1),
        ("restarted", "exp/first", "running", 2),
        ("ended", "exp/first", "finished", 2),
    ]
    assert "ValueError: boom token=***" in webhook.bodies[1]["reason"]
    last = webhook.bodies[2]
    assert (last["folder"], last["mlflow_run_id"]) == (str(notified.run.path), "0a1b")
    assert last["reason"] == "all epochs are done"
    assert LOST not in notified.report.notes
    assert "'started' is not delivered: HTTP status 500" in (notified.run.path / "notifier.log").read_text()
    assert SECRET not in texts_below(notified.run.path)


def test_command_receives_arguments_and_json(notified: Scene, tmp_path: Path) -> None:
    command, output = tmp_path / "notify me", tmp_path / "output"
    command.write_text(f'#!/bin/sh\necho "$@" >> {output}\ncat >> {output}\necho >> {output}\necho done\n')
    command.chmod(0o700)
    notified.notify = {"command": str(command)}
    notified.script(first=[DONE, DONE])
    assert notified.supervise().status == "finished"
    started, _, ended, facts = output.read_text().splitlines()
    assert (started, ended) == ("started exp/first running", "ended exp/first finished")
    assert json.loads(facts)["reason"] == "all epochs are done"
    assert (notified.run.path / "notifier.log").read_text() == "done\n" * 2


def test_hanging_webhook_delays_the_end_by_a_bounded_time(
    notified: Scene, hanging: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notifier, "DRAIN_S", 0.5)
    notified.notify = {"webhook": hanging}
    notified.script(first=[DONE, DONE])
    assert notified.supervise().status == "finished"
    assert LOST in notified.report.notes
    assert SECRET not in texts_below(notified.run.path)


def test_tries_of_an_event_are_bounded(notified: Scene, webhook: Webhook, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notifier, "_PAUSES_S", (0.0,) * 5)
    webhook.statuses = [302] * 4 + [404]
    with notifier.Notifier(notified.run, NotifyConfig(webhook=webhook.url), {}, notified.report.note) as sender:
        for event in ("started", "ended"):
            sender.send(event, notified.run.read_state())
    assert [body["event"] for body in webhook.bodies] == ["ended"]
    assert notified.report.notes == [LOST]
    lines = (notified.run.path / "notifier.log").read_text().splitlines()
    assert lines == [f"'started' is not delivered: HTTP status {status}" for status in (302, 302, 302, 302, 404)]


def test_reason_of_a_failure_does_not_show_the_url(
    notified: Scene, hanging: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(notifier, "DELIVERY_S", 3.0)  # in which a command fails on a busy machine
    monkeypatch.setattr(notifier, "_PAUSES_S", (0.0,))
    (fails := tmp_path / "fails").write_text("#!/bin/sh\nexit 3\n")
    fails.chmod(0o700)
    (hangs := tmp_path / "hangs").write_text("#!/bin/sh\nexec sleep 300\n")
    hangs.chmod(0o700)
    for settings in (
        *({"webhook": url} for url in (hanging, "http://127.0.0.1:1/s3cret", "http://*.h/s3cret")),
        *({"command": str(command)} for command in (fails, hangs, "/no/such/file")),
    ):
        with notifier.Notifier(notified.run, NotifyConfig(**settings), {}, notified.report.note) as sender:
            sender.send("ended", notified.run.read_state())
    prefix = "'ended' is not delivered: "
    lines = (notified.run.path / "notifier.log").read_text().splitlines()
    assert [line.partition(" timed out after")[0] for line in lines] == [
        *(prefix + reason for reason in ("ReadTimeout", "ConnectionError", "InvalidURL")),
        f"{prefix}Command '['{fails}', 'ended', 'exp/first', 'created']' returned non-zero exit status 3.",
        f"{prefix}Command '['{hangs}', 'ended', 'exp/first', 'created']'",
        f"{prefix}[Errno 2] No such file or directory: '/no/such/file'",
    ]


def test_mistakes_do_not_show_the_address(tmp_path: Path) -> None:
    (path := tmp_path / "config.yaml").write_text("trainer: ddp\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path, ["notify.webhook=example.org/s3cret", "notify.command=notify.sh"])
    assert "notify.webhook must be an address" in str(caught.value)
    assert "exclude each other" in str(caught.value)
    assert "s3cret" not in str(caught.value)
