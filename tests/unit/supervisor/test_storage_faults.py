"""Faults of the file system under a supervisor: errors of single operations, and unavailable, hanging or full disks."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from io_faults import Fault, recorded

from hpcdist.run.folder import RunDir
from hpcdist.run.status import close_if_lost

#: All tests of this file may start processes.
pytestmark = pytest.mark.processes

SCENE = Path(__file__).parents[2] / "support" / "storage_scene.py"
ENDS = {"done": "finished", "restart": "finished", "slow": "finished", "stop": "stopped", "stop by signal": "stopped"}
ERRORS = ("ESTALE", "EIO", "EACCES", "EINTR", "ENOSPC")
Cell = dict[str, Any]


class Result:
    """Results of the played scenes, and the messages of all of them."""

    def __init__(self, answers: list[dict[str, Any]], messages: str) -> None:
        self.answers = answers
        self.messages = messages


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
        played.messages += again.messages
    assert not (found := wrong(cells, played)), "\n".join(found)
    assert "Traceback" not in played.messages
    return played


@pytest.mark.slow
def test_one_stale_handle_in_any_file_operation_does_not_change_the_result(player: Player) -> None:
    operations = player.operations()
    kinds = {operation for operation, _, _ in operations}
    assert kinds >= {
        "open",
        "create",
        "read",
        "write",
        "fsync",
        "rename",
        "stat",
        "unlink",
        "mkdir",
        "opendir",
        "flock",
    }
    played = assert_unchanged(player, each_once(operations, error=errno.ESTALE))
    assert re.search(r"run-\d+/state\.json: Stale file handle; retrying for up to 10 s\n", played.messages)
    assert re.search(r"run-\d+/state\.json is available again after 0\.\d s\n", played.messages)


@pytest.mark.faults
@pytest.mark.parametrize("error", [name for name in ERRORS if name != "ESTALE"])
def test_one_error_in_any_file_operation_does_not_change_the_result(player: Player, error: str) -> None:
    assert_unchanged(player, each_once(player.operations(), error=getattr(errno, error)))


@pytest.mark.faults
def test_short_reads_and_writes_do_not_change_the_result(player: Player) -> None:
    transfers = [item for item in player.operations() if item[0] in ("read", "write")]
    assert len(transfers) > 5
    assert_unchanged(player, each_once(transfers, short=True, count=0))


@pytest.mark.faults
def test_one_minute_of_delay_in_a_file_operation_does_not_change_the_result(player: Player) -> None:
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
            Fault(operation="stat", path=beat, delay_ms=2800),
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
    lasting = {"error": errno.EIO, "count": 0}
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
    assert [first["on_disk"], second["on_disk"]] == [
        ["failed", first["reason"]],
        ["failed", second["reason"]],
    ]
    assert third["on_disk"][0] == "running"
    assert third["notes"] == [f"{player.folder}/run-0002/state.json cannot be written: Input/output error"]
    run = RunDir(player.folder / "run-0002")
    assert close_if_lost(run) == "its supervisor died"
    assert run.read_state().status == "failed"
