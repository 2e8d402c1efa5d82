"""Run folders: creation, lookup, and atomic files."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

from hpcdist.errors import RunFolderError
from hpcdist.host.files import read_json, write_atomic, write_json
from hpcdist.run.folder import VARIABLE, Cause, Request, RunDir, State, Status, identity, require_same
from hpcdist.run.lookup import find_runs, resolve_run


def make(runs_dir: Path, experiment: str, name: str) -> RunDir:
    run = RunDir.create(runs_dir / experiment / name)
    run.config.write_text("experiment: x\n")
    return run


# --- files


def test_write_atomic_leaves_no_temporary_file(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    write_atomic(path, "old")
    write_atomic(path, b"new", durable=True)
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_failed_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    path = tmp_path / "state.json"
    write_atomic(path, "old")

    def disk_full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, failing, disk_full)
    with pytest.raises(OSError, match="No space left"):
        write_atomic(path, "new", durable=True)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("content", [b"", b'{"a": 1', b"[1]", b"\xff\xfe", b"null"])
def test_read_json_returns_none_for_invalid_objects(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "beat.json"
    path.write_bytes(content)
    assert read_json(path) is None


def test_read_json_returns_the_written_object(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"b": [1, "ü"]})
    assert read_json(tmp_path / "a.json") == {"b": [1, "ü"]}
    assert read_json(tmp_path / "missing.json") is None


# --- creation


def test_create_makes_a_private_folder(runs_dir: Path) -> None:
    run = RunDir.create(runs_dir / "exp" / "first")
    assert run.path.stat().st_mode & 0o777 == 0o700
    assert run.journal.is_dir()
    assert run.checkpoints.is_dir()
    assert (run.name, run.experiment) == ("first", "exp")
    state = run.read_state()
    assert (state.status, state.attempt, state.restarts) == ("created", 0, 0)
    assert state.created > 0


def test_create_rejects_an_existing_run(runs_dir: Path) -> None:
    run = make(runs_dir, "exp", "first")
    with pytest.raises(
        RunFolderError,
        match=r"first exists already: choose another `name`, or continue that run with `hpcdist resume first`$",
    ):
        RunDir.create(run.path)
    assert run.config.is_file()


@pytest.mark.parametrize("blocker", ["runs", "runs/exp", "runs/exp/first"])
def test_create_reports_a_folder_that_cannot_be_created(tmp_path: Path, blocker: str) -> None:
    """With a regular file at the folder's path, which also fails for root."""
    path = tmp_path / blocker
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("a file")
    with pytest.raises(
        RunFolderError, match=r"cannot be created \(.+\): set `runs_dir` to a folder that you can write$"
    ):
        RunDir.create(tmp_path / "runs" / "exp" / "first")
    assert path.read_text() == "a file"


def test_open_requires_state_and_config(runs_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDir.create(runs_dir / "exp" / "first")
    with pytest.raises(RunFolderError, match=r"first holds no run \(no state\.json and config\.yaml in it\)"):
        RunDir.open(run.path)
    run.config.touch()
    monkeypatch.chdir(runs_dir)
    assert RunDir.open(Path("exp/first")).path == run.path


def test_written_state_is_read_again(runs_dir: Path) -> None:
    run = RunDir.create(runs_dir / "exp" / "first")
    state = replace(run.read_state(), status="failed", reason="größe", attempt=3, ended=2.5, rejected=True)
    run.write_state(state)
    assert run.read_state() == state


def test_damaged_state_is_an_error(runs_dir: Path) -> None:
    run = RunDir.create(runs_dir / "exp" / "first")
    (run.path / "state.json").write_text("{")
    with pytest.raises(
        RunFolderError,
        match=r"exp/first/state\.json is damaged \(it holds no JSON object\): restore it, or remove the run folder$",
    ):
        run.read_state()


# --- attempts


def test_attempts_are_numbered_from_one(runs_dir: Path) -> None:
    run = RunDir.create(runs_dir / "exp" / "first")
    assert run.attempts() == []
    assert [run.new_attempt().number for _ in range(3)] == [1, 2, 3]
    (run.path / "attempts" / "notes").mkdir()
    assert [attempt.number for attempt in run.attempts()] == [1, 2, 3]
    assert run.new_attempt().number == 4
    assert run.attempt(2).path == run.path / "attempts" / "002"


def test_names_of_attempt_files(runs_dir: Path) -> None:
    attempt = RunDir.create(runs_dir / "exp" / "first").new_attempt()
    names = [path.name for path in (attempt.log(1), attempt.beat(12), attempt.outcome(123), attempt.request)]
    assert names == ["rank-00001.log", "rank-00012.beat.json", "rank-00123.outcome.json", "request.json"]


def test_outcomes_skip_incomplete_files(runs_dir: Path) -> None:
    attempt = RunDir.create(runs_dir / "exp" / "first").new_attempt()
    write_json(attempt.outcome(0), {"outcome": "done"})
    write_json(attempt.outcome(11), {"outcome": "failed"})
    attempt.outcome(2).write_text('{"outcome":')
    assert attempt.outcomes() == {0: {"outcome": "done"}, 11: {"outcome": "failed"}}


def test_request_file_has_action_cause_author_and_time(runs_dir: Path) -> None:
    attempt = RunDir.create(runs_dir / "exp" / "first").new_attempt()
    sent = Request(action="cancel", cause="signal", by="SIGINT")
    attempt.send_request(sent)
    request = read_json(attempt.request)
    assert request is not None
    assert (request["action"], request["cause"], request["by"]) == ("cancel", "signal", "SIGINT")
    assert attempt.read_request() == sent
    assert request["time"] > 0


@pytest.mark.parametrize("content", ["{}", "{", '{"cause": "ada"}', '{"action": "stop", "by": "growth"}'])
def test_damaged_request_file_is_a_request_to_stop(runs_dir: Path, content: str) -> None:
    attempt = RunDir.create(runs_dir / "exp" / "first").new_attempt()
    attempt.request.write_text(content)
    assert attempt.read_request() == Request(action="stop", cause="user", by="unreadable request file")


def test_causes_of_requests_become_sentences() -> None:
    assert {cause: Request(cause=cause, by="x").sentence for cause in get_args(Cause)} == {
        "user": "x",
        "signal": "x to the supervisor",
        "time_limit": "time limit",
        "preemption": "Slurm ends the job",
        "growth": "to restart on more nodes: x answers again",
        "config": "x",
    }
    assert [cause for cause in get_args(Cause) if not Request(cause=cause).ends_run] == ["growth"]


# --- lookup


def test_find_runs_sorts_by_name(runs_dir: Path) -> None:
    for experiment, name in (("b", "x"), ("a", "z"), ("a", "y")):
        make(runs_dir, experiment, name)
    RunDir.create(runs_dir / "a" / "half-made")
    (runs_dir / "a" / "notes").mkdir()
    assert [f"{run.experiment}/{run.name}" for run in find_runs(runs_dir)] == ["a/y", "a/z", "b/x"]
    assert list(find_runs(runs_dir / "nowhere")) == []


@pytest.mark.parametrize("text", ["first", "digits/first", "fi", "FOLDER", "RELATIVE"])
def test_resolve_run_by_folder_name_or_prefix(runs_dir: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    run = make(runs_dir, "digits", "first")
    make(runs_dir, "digits", "second")
    monkeypatch.chdir(runs_dir)
    text = {"FOLDER": str(run.path), "RELATIVE": "./digits/first/"}.get(text, text)
    assert resolve_run(text, runs_dir).path == run.path


def test_complete_name_takes_precedence_over_prefixes(runs_dir: Path) -> None:
    run = make(runs_dir, "digits", "first")
    make(runs_dir, "digits", "first-again")
    assert resolve_run("first", runs_dir).path == run.path


def test_ambiguous_prefix_lists_the_matches(runs_dir: Path) -> None:
    make(runs_dir, "digits", "first")
    make(runs_dir, "mnist", "fire")
    with pytest.raises(
        RunFolderError,
        match=r"^'fir' matches 2 runs \(digits/first, mnist/fire\): write more of the name, or the folder$",
    ):
        resolve_run("fir", runs_dir)


def test_name_in_two_experiments_is_ambiguous(runs_dir: Path) -> None:
    make(runs_dir, "digits", "first")
    mnist = make(runs_dir, "mnist", "first")
    with pytest.raises(RunFolderError, match=r"^'first' matches 2 runs"):
        resolve_run("first", runs_dir)
    assert resolve_run("mnist/first", runs_dir).path == mnist.path


def test_unknown_name_is_an_error(runs_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(runs_dir, "digits", "first")
    monkeypatch.chdir(runs_dir.parent)
    with pytest.raises(RunFolderError) as caught:
        resolve_run("nope", Path("runs"))
    assert str(caught.value) == f"no run 'nope' under {runs_dir}: `hpcdist runs` lists them"


# --- the code snapshot


def test_snapshot_of_returns_the_copy_of_a_file(runs_dir: Path, tmp_path: Path) -> None:
    run = RunDir.create(runs_dir / "exp" / "first")
    (run.code / "pkg").mkdir(parents=True)
    (run.code / "pkg" / "train.py").touch()
    root = tmp_path / "project"
    assert run.snapshot_of(root / "pkg" / "train.py") is None
    write_json(run.environment, {"code": {"copied": True, "root": str(root)}})
    assert run.snapshot_of(root / "pkg" / "train.py") == run.code / "pkg" / "train.py"
    assert run.snapshot_of(root / "pkg" / "other.py") is None
    assert run.snapshot_of(tmp_path / "elsewhere.py") is None
    write_json(run.environment, {"code": {"copied": False, "root": str(root)}})
    assert run.snapshot_of(root / "pkg" / "train.py") is None


def test_request_reaches_an_attempt_that_starts_meanwhile(runs_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDir.create(runs_dir / "exp" / "first")
    states = [replace(run.read_state(), attempt=number) for number in (1, 2, 2)]
    for _ in range(2):
        run.new_attempt()
    monkeypatch.setattr(run, "read_state", lambda: states.pop(0))
    run.send_request(Request(cause="user", by="ada"))
    assert [(read_json(run.attempt(number).request) or {}).get("by") for number in (1, 2)] == ["ada", "ada"]
    assert states == []


@pytest.mark.parametrize(
    ("status", "reason", "sentence"),
    [
        ("failed", "rank 1 was killed", "failed: rank 1 was killed"),
        ("stopped", "stopped nodes", "stopped: stopped nodes"),
        ("queued", "", "queued"),
    ],
)
def test_sentence_of_a_state_is_its_status_and_its_reason(status: Status, reason: str, sentence: str) -> None:
    assert State(status=status, reason=reason).sentence == sentence


# --- Processes of a run refuse a folder that another user has put in the place of the run folder.


REPLACED = "has been replaced by another one"


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir.create(tmp_path / "runs" / "exp" / "first")
    run.config.write_text("trainer: evil:train\n")
    return run


def test_identity_stays_with_the_folder(run: RunDir, tmp_path: Path) -> None:
    env = {VARIABLE: identity(run.path)}
    assert identity(run.path) == env[VARIABLE]
    assert (run.path / "identity").stat().st_mode & 0o777 == 0o600
    moved = run.path.rename(tmp_path / "moved")
    require_same(moved, env)
    require_same(tmp_path / "missing", {})
    (moved / "identity").write_text("damaged")
    with pytest.raises(RunFolderError, match=REPLACED):
        require_same(moved, env)
    assert identity(moved) != env[VARIABLE]


@pytest.mark.parametrize("kind", ["missing", "link to the file", "other run", "pipe"])
def test_another_folder_cannot_have_the_identity(run: RunDir, tmp_path: Path, kind: str) -> None:
    env = {VARIABLE: identity(run.path)}
    old = run.path.rename(tmp_path / "old")
    run.path.mkdir()
    if kind == "link to the file":
        (run.path / "identity").symlink_to(old / "identity")
    elif kind == "other run":
        identity(run.path)
    elif kind == "pipe":
        os.mkfifo(run.path / "identity")
    with pytest.raises(RunFolderError, match=REPLACED) as found:
        require_same(run.path, env)
    assert found.value.exit_code == 2


#: Puts another folder in the place of the run folder.
SWAP = "import os\nos.rename({run!r}, {old!r})\nos.rename({planted!r}, {run!r})\n"


@pytest.mark.processes
@pytest.mark.parametrize(("module", "code"), [("rank.worker", 2), ("rank.parent", 69), ("tracking.shipper", 2)])
def test_each_process_checks_the_folder_at_its_start(run: RunDir, tmp_path: Path, module: str, code: int) -> None:
    """The folder is swapped before the process starts; that of the parent of ranks while it imports torch."""
    env = {**os.environ, VARIABLE: identity(run.path), "HPCDIST_TRACKING_URI": f"sqlite:///{tmp_path}/mlflow.db"}
    env |= {f"HPCDIST_{name}": "0" for name in ("RANK", "LOCAL_RANK", "NODE_RANK")}
    env |= {f"HPCDIST_{name}": "1" for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "NUM_NODES", "ATTEMPT", "JOB_ID")}
    env |= {"HPCDIST_MASTER_ADDR": "127.0.0.1", "HPCDIST_MASTER_PORT": "1", "PYTHONPATH": str(tmp_path)}
    planted = shutil.copytree(run.path, tmp_path / "planted", ignore=shutil.ignore_patterns("identity"))
    swap = SWAP.format(run=str(run.path), old=str(tmp_path / "old"), planted=str(planted))
    (tmp_path / "evil.py").write_text("raise SystemExit('planted')\n")
    (tmp_path / "torch.py").write_text(swap)
    if module != "rank.parent":
        exec(swap)
    command = [sys.executable, "-m", f"hpcdist.{module}", str(run.path)]
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        done = subprocess.run(command, env=env, stdout=theirs, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, REPLACED in done.stderr) == (code, True), done.stderr
    assert "planted" not in done.stderr
    assert {path.name for path in run.path.iterdir()} == {
        "attempts",
        "checkpoints",
        "config.yaml",
        "journal",
        "state.json",
    }
