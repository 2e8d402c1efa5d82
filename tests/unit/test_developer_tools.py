"""The session of a GPU machine, test sessions beside each other, and the names of tests."""

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from types import ModuleType

import pytest
import session_locks
import slurm_cluster
from containers import CHECKOUT
from hpcdist_runs import wait_for
from session_locks import lock_in_turn

from hpcdist.devcluster.settings import Layout, Settings

MAX_NAME_LENGTH = 60


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Return the module `gpu_session` of benchmarks/, which is no package."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(CHECKOUT / "benchmarks"))
    import gpu_session

    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield gpu_session
    for number, handler in handlers.items():  # `main` sets its own, and later tests use this process
        signal.signal(number, handler)
    for name in {"gpu_session", "gpu_stages", "gpu_checks"} - before:
        sys.modules.pop(name, None)


def stage(session: ModuleType, name: str, code: str, *, limit_s: float = 60.0, needs: tuple[str, ...] = ()) -> object:
    return session.Stage(
        name=name, purpose=name, limit_s=limit_s, needs=needs, command=lambda device, folder: ["-c", code]
    )


def run(session: ModuleType, monkeypatch: pytest.MonkeyPatch, folder: Path, stages: list[object], *options: str) -> int:
    monkeypatch.setattr(session, "STAGES", tuple(stages))
    monkeypatch.setattr(sys, "argv", ["gpu_session.py", "--device", "cpu", "--results", str(folder), *options])
    code: int = session.main()
    return code


def results(folder: Path) -> dict[str, dict[str, object]]:
    return {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}


@pytest.mark.processes
def test_failed_stage_does_not_stop_the_others(
    session: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stages = [
        stage(session, "bad", "print('{\"first\": 1}'); raise SystemExit('no memory')"),
        stage(session, "lacking", "", needs=("no_such_package", "json")),
        stage(session, "good", "print('{\"rate\": 2.5}'); print('some text'); print('{\"size\": \"1 MiB\"}')"),
    ]
    assert run(session, monkeypatch, tmp_path, stages) == 1
    found = results(tmp_path)
    assert (found["bad"]["status"], found["bad"]["reason"]) == ("failed", "no memory")
    assert found["bad"]["figures"] == {"first": 1}, "kept from before the failure"
    assert found["lacking"] == {"status": "not run", "reason": "not installed: no_such_package"}
    assert found["good"]["figures"] == {"rate": 2.5, "size": "1 MiB"}
    table = (tmp_path / "summary.md").read_text().splitlines()
    assert "| bad | failed: no memory |" in "\n".join(table)
    assert "| | | | size | 1 MiB |  |" in table


@pytest.mark.processes
def test_stage_is_ended_at_its_limit_and_keeps_its_figures(
    session: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The limit passes once the stage has printed a figure; the stage and its child are ended."""

    class Impatient(subprocess.Popen[bytes]):
        def wait(self, timeout: float | None = None) -> int:
            if timeout is None:
                return super().wait()
            assert timeout <= 60
            wait_for(lambda: "child" in (tmp_path / "long.log").read_text(), "the figure of the stage")
            raise subprocess.TimeoutExpired("stage", timeout)

    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)'])\n"
        "print('{\"child\": %d}' % child.pid, flush=True)\n"
        "time.sleep(1000)\n"
    )
    monkeypatch.setattr(session.subprocess, "Popen", Impatient)
    assert run(session, monkeypatch, tmp_path, [stage(session, "long", code, limit_s=15)]) == 1
    found = results(tmp_path)["long"]
    assert (found["status"], found["reason"]) == ("time limit", "stopped after 60 s")
    child = found["figures"]["child"]  # type: ignore[index]

    def has_ended() -> bool:
        try:
            return Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        except (FileNotFoundError, ProcessLookupError):
            return True

    wait_for(has_ended, "the child of the stage to end")


@pytest.mark.processes
def test_next_session_runs_only_what_has_no_result(
    session: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    code = f"open({str(tmp_path / 'starts')!r}, 'a').write('NAME ')"
    stages = [
        stage(session, "first", code.replace("NAME", "first")),
        stage(session, "second", code.replace("NAME", "second") + "; raise SystemExit(3)"),
    ]
    folder = tmp_path / "results"
    assert run(session, monkeypatch, folder, stages) == 1
    assert run(session, monkeypatch, folder, stages) == 1
    assert (tmp_path / "starts").read_text() == "first second second "
    run(session, monkeypatch, folder, stages, "--only", "first")
    assert (tmp_path / "starts").read_text() == "first second second first "
    assert run(session, monkeypatch, folder / "spent", stages, "--minutes", "0") == 0
    assert (tmp_path / "starts").read_text() == "first second second first "


def test_real_stages_name_existing_scripts_and_tests(session: ModuleType, tmp_path: Path) -> None:
    import gpu_checks

    assert [name for name in gpu_checks.GPU_TESTS if not (CHECKOUT / "tests" / name).is_file()] == []
    for one in session.STAGES:
        for device in ("cuda", "cpu"):
            script, *options = one.command(device, tmp_path)
            assert Path(script).is_file()
            assert all(isinstance(option, str) for option in options)


def test_one_test_session_uses_the_dev_cluster_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm_cluster, "TURN", tmp_path / "lock")
    monkeypatch.setattr(
        slurm_cluster, "take_turn", slurm_cluster.take_turn.__wrapped__
    )  # this session may have taken it
    with slurm_cluster.take_turn(), (tmp_path / "lock").open("w") as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_session_that_waits_for_another_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "lock"
    with path.open("w") as other, path.open("w") as own:
        lock_in_turn(other)
        assert capsys.readouterr().err == ""
        # The other session ends once this one has said that it waits.
        unlock = ExitStack()
        unlock.callback(fcntl.flock, other, fcntl.LOCK_UN)
        monkeypatch.setattr(session_locks, "uncaptured", lambda: unlock)
        lock_in_turn(own)
    assert capsys.readouterr().err == f"\nwaiting for another test session, which has locked {path}\n"


def test_cluster_of_a_killed_session_is_not_that_of_a_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm_cluster, "TURN", tmp_path / "lock")
    layout = Layout(first=tmp_path / "state")
    layout.state.mkdir()

    starts = count(1)

    def up(*_: object, **__: object) -> Settings:
        layout.settings_file.touch()
        os.utime(layout.settings_file, times=(0, next(starts)))
        return Settings()

    up()
    assert not slurm_cluster.is_left_over(layout)
    monkeypatch.setattr("hpcdist.devcluster.cluster.up", up)
    slurm_cluster.start_cluster(layout, {})
    assert slurm_cluster.is_left_over(layout)
    up()
    assert not slurm_cluster.is_left_over(layout), "a user has replaced it"


def test_names_of_tests_have_at_most_60_characters() -> None:
    """A longer name describes several behaviours, or one in an unusual way."""
    found = []
    for path in sorted((CHECKOUT / "tests").rglob("test_*.py")):
        for name in re.findall(r"^ *def (test_\w+)", path.read_text(), re.MULTILINE):
            if len(name) > MAX_NAME_LENGTH:
                found.append(f"{path.relative_to(CHECKOUT)}: {name}")
    assert found == []
