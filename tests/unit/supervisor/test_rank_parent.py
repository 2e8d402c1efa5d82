"""Ranks that a parent forks on this machine, and parents that end, hang or cannot fork."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from forked_scene import HELD, REPORT, SOON_S, TORCH, Scene, wait_for_fork
from hpcdist_runs import wait_for
from supervisor_scene import NamedPipe

from hpcdist.errors import HpcdistError
from hpcdist.rank.processes import PARENT_MODULE
from hpcdist.supervisor.hang import find_ranks

#: All tests of this file may start processes.
pytestmark = pytest.mark.processes


def test_ranks_end_with_their_parent_which_is_replaced(
    scene: Scene, pipe: NamedPipe, caplog: pytest.LogCaptureFixture
) -> None:
    code = HELD.format(pipe=str(pipe.path))
    _, ranks = scene.start(code, code)
    wait_for_fork(ranks, pipe)
    (parent,) = scene.parents()
    os.kill(parent, signal.SIGKILL)
    while ranks.running:
        ranks.wait(SOON_S)
    ranks.close()
    assert ranks.exits == {0: -9, 1: -9}
    assert pipe.is_released(SOON_S)
    assert scene.finish("import sys; sys.exit(3)", "pass")[1] == {0: 3, 1: 0}
    assert scene.parents() not in ([], [parent])
    assert "the parent process of the ranks has ended and is started again" in caplog.text


@pytest.mark.parametrize(
    ("torch", "reason"),
    [
        (
            TORCH + "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()",
            "started 1 threads",
        ),
        (TORCH + "import threading\nthreading.Thread(target=threading.Event().wait).start()", "started 1 threads"),
        ("raise ImportError('no such library')", "ImportError: no such library"),
        ("from types import SimpleNamespace\ncuda = SimpleNamespace(_is_in_bad_fork=lambda: True)", "initialised CUDA"),
        ("print('at import')\nimport os; os._exit(0)", "at import"),
    ],
    ids=["thread", "waited-thread", "error", "cuda", "exit"],
)
def test_ranks_are_started_by_their_command_if_the_parent_cannot_fork(
    tmp_path: Path, runs_dir: Path, caplog: pytest.LogCaptureFixture, torch: str, reason: str
) -> None:
    scene = Scene(tmp_path / "code", runs_dir, torch)
    with scene.launcher:
        code = "import os, sys; sys.exit(os.getppid() % 100)"
        for _ in range(2):
            assert scene.finish(code, code)[1] == dict.fromkeys(range(2), os.getpid() % 100)
            assert scene.parents() == []
    assert [record for record in caplog.text.splitlines() if reason in record], caplog.text
    assert "is started again" not in caplog.text


def test_parent_that_is_never_ready_is_given_up(
    tmp_path: Path, runs_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    scene = Scene(tmp_path / "code", runs_dir, "import time\ntime.sleep(600)", init_timeout_s=0.5)
    with scene.launcher:
        for _ in range(2):
            assert scene.finish("import sys; sys.exit(3)", "pass")[1] == {0: 3, 1: 0}
            assert scene.parents() == []
    assert "it was not ready within launch.init_timeout_s=0.5 s" in caplog.text


def test_next_attempt_does_not_wait_for_a_parent_that_was_not_ready(tmp_path: Path, runs_dir: Path) -> None:
    scene = Scene(tmp_path / "code", runs_dir, "import time\ntime.sleep(600)")
    with scene.launcher:
        scene.start("pass", "pass")[1].close()
        assert scene.finish("import sys; sys.exit(3)", "pass")[1] == {0: 3, 1: 0}
        assert scene.parents() == []


def test_exit_codes_do_not_wait_for_the_parent(scene: Scene, pipe: NamedPipe) -> None:
    """It may be importing for a long time, or be stopped."""
    code = HELD.format(pipe=str(pipe.path))
    _, ranks = scene.start(code, code)
    wait_for_fork(ranks, pipe)
    parent = psutil.Process(*scene.parents())
    parent.suspend()
    ranks.signal(signal.SIGTERM)
    while ranks.running:
        ranks.wait(SOON_S)
    ranks.close()
    assert ranks.exits == {0: -15, 1: -15}
    parent.resume()
    assert scene.finish("import sys; sys.exit(3)", "pass")[1] == {0: 3, 1: 0}
    assert scene.parents() == [parent.pid]


def test_parent_that_cannot_fork_any_more_has_no_successor(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    assert scene.finish("pass", "pass")[1] == {0: 0, 1: 0}
    assert scene.launcher._parent is not None
    monkeypatch.setattr(scene.launcher._parent, "is_alive", lambda: True)
    os.kill(*scene.parents(), signal.SIGKILL)
    for _ in range(2):
        assert scene.finish("import sys; sys.exit(3)", "pass")[1] == {0: 3, 1: 0}
        assert scene.parents() == []


def test_launcher_does_without_a_parent_that_cannot_be_started(
    tmp_path: Path, runs_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    scene = Scene(tmp_path / "code", runs_dir)
    scene.run.path.joinpath("attempts").mkdir(exist_ok=True)
    scene.run.path.joinpath("attempts", "rank-parent.log").mkdir()
    with scene.launcher:
        assert scene.finish("import sys; sys.exit(3)", "pass")[1] == {0: 3, 1: 0}
    assert "their parent process cannot be started: [Errno 21]" in caplog.text


def test_ranks_are_started_by_their_command_if_the_parent_has_no_room_for_them(scene: Scene) -> None:
    assert scene.finish("pass", "pass")[1] == {0: 0, 1: 0}
    (parent,) = scene.parents()
    psutil.Process(parent).rlimit(psutil.RLIMIT_NOFILE, (3, 99))  # the parent cannot receive the files of a rank
    assert scene.finish("import sys; sys.exit(3)", "pass")[1] == {0: 3, 1: 0}


REFUSES = """
import json, socket
control = socket.socket(fileno=1)
while True:
    message, descriptors, _, _ = socket.recv_fds(control, 99, 1)
    if not message:
        break
    with socket.socket(fileno=descriptors[0]) as connection:
        connection.send(b"{}")
        if connection.recv(99):
            connection.send(json.dumps({"failure": "process 7 survives"}).encode())
"""


def test_no_rank_starts_if_the_parent_refuses_all(
    tmp_path: Path, runs_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    scene = Scene(tmp_path / "code", runs_dir)
    (tmp_path / "code" / "hpcdist" / "rank" / "parent.py").write_text(REFUSES)
    with scene.launcher:
        _, ranks = scene.start("pass", "pass")
        while ranks.running:
            ranks.wait(SOON_S)
        ranks.close()
        assert (ranks.exits, ranks.absent(), ranks.last_message()) == ({0: 1, 1: 1}, [0, 1], "process 7 survives")
        with pytest.raises(HpcdistError, match="process 7 survives"):
            scene.start("pass", "pass")
    assert "imports torch itself" not in caplog.text


def test_signals_do_not_end_a_parent_that_is_starting(tmp_path: Path, runs_dir: Path) -> None:
    """Its interpreter has not reached the code that ignores them."""
    with NamedPipe(tmp_path / "starts", reopened=True) as starts:
        folder = tmp_path / "code"
        scene = Scene(folder, runs_dir)
        tell = f"open({str(starts.path)!r}, 'w').write(f'{{os.getpid()}}\\n')"
        hook = f"import os, sys\nif {PARENT_MODULE!r} in sys.orig_argv:\n    {tell}\n"
        (folder / "sitecustomize.py").write_text(hook)
        with scene.launcher:
            parent = int(starts.line())
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
                os.kill(parent, number)
            code = f"import os, sys; sys.exit(3 if os.getppid() == {parent} else 4)"
            assert scene.finish(code, "pass")[1] == {0: 3, 1: 0}


SUPERVISOR = """
import sys
from pathlib import Path
sys.path[:0] = {path!r}
from forked_scene import HELD, Scene
scene = Scene(Path(sys.argv[1]), Path(sys.argv[2]))
with scene.launcher:
    code = HELD.format(pipe=sys.argv[3])
    _, ranks = scene.start(code, code)
    while True:
        ranks.wait(600)
"""


@pytest.mark.parametrize("stopped", [False, True], ids=["", "stopped-parent"])
def test_ranks_and_parent_end_with_a_killed_supervisor(
    tmp_path: Path, runs_dir: Path, pipe: NamedPipe, stopped: bool
) -> None:
    """Also if the parent is stopped, and cannot notice the death of the supervisor."""
    program = SUPERVISOR.format(path=sys.path)
    words = [sys.executable, "-c", program, str(tmp_path / "code"), str(runs_dir), str(pipe.path)]
    with subprocess.Popen(words) as supervisor:
        assert [pipe.line() for _ in range(2)] == ["up"] * 2
        (parent,) = [child for child in psutil.Process(supervisor.pid).children() if PARENT_MODULE in child.cmdline()]
        if stopped:
            # Until it waits for the next request, it may hold the guard's pipe of the last rank.
            wait_for(lambda: parent.status() == psutil.STATUS_SLEEPING, "the parent to wait for a request")
            parent.suspend()
        supervisor.kill()
    assert pipe.is_released(SOON_S)
    assert psutil.wait_procs([parent], SOON_S)[1] == []


# --- forked ranks have what started ranks have


def test_exit_codes_and_signals_are_those_of_the_ranks(scene: Scene) -> None:
    """A rank that is killed does not affect the parent, which also forks the next attempt."""
    assert scene.finish("import sys; sys.exit(5)", "import os; os.kill(os.getpid(), 9)")[1] == {0: 5, 1: -9}
    (parent,) = scene.parents()
    code = "import os; assert os.getppid() == {}; os.kill(os.getpid(), {})"
    assert scene.finish(code.format(parent, "15"), code.format(parent, "10"))[1] == {0: -15, 1: -10}
    assert scene.finish("raise ValueError('of the rank')", "pass")[1] == {0: 1, 1: 0}
    assert scene.parents() == [parent]


def test_forked_rank_has_what_a_started_one_has(scene: Scene) -> None:
    """Environment, folder, log, session, signals and descriptors equal those of ranks that a command starts."""
    forked_attempt, exits = scene.finish(REPORT, REPORT)
    assert exits == {0: 0, 1: 0}
    scene.launcher.fork = False
    scene.launcher._close_parent()
    started_attempt, exits = scene.finish(REPORT, REPORT)
    assert exits == {0: 0, 1: 0}
    for rank in range(2):
        reports = []
        for attempt in (forked_attempt, started_attempt):
            line, *others = attempt.log(rank).read_text().splitlines()
            assert others == ["error"]
            report = json.loads(line)
            assert report["env"].pop("HPCDIST_RANK") == str(rank)
            assert report["env"].pop("HPCDIST_ATTEMPT") == str(attempt.number)
            report["env"].pop("HPCDIST_MASTER_PORT")
            assert report["is_leader"]
            del report["pid"], report["parent"]
            reports.append(report)
        assert reports[0] == reports[1]
        assert reports[0]["env"]["INHERITED"] == "as it was"


def test_ps_shows_the_rank_but_not_its_parent(scene: Scene, pipe: NamedPipe) -> None:
    code = HELD.format(pipe=str(pipe.path))
    attempt, ranks = scene.start(code, code)
    try:
        wait_for_fork(ranks, pipe)
        found = find_ranks(scene.run.path, attempt.number)
        assert [(process.rank, process.pid) for process in found] == [
            (rank, process.pid) for rank, process in enumerate(ranks._processes)
        ]
        assert psutil.Process(found[1].pid).name() == f"rank-1/{attempt.number}"
    finally:
        ranks.close()
    assert ranks.exits == {0: -9, 1: -9}
    assert pipe.is_released(SOON_S)


def test_stop_before_the_ranks_are_forked(scene: Scene) -> None:
    """A signal ends ranks that are being started, whatever their parent is doing."""
    _, ranks = scene.start("pass", "pass")
    assert (ranks.running, ranks.absent(), ranks._processes) == ([0, 1], [], [])
    ranks.signal(signal.SIGUSR1)
    assert ranks.running == [0, 1]
    ranks.signal(signal.SIGTERM)
    assert (ranks.running, ranks.exits) == ([], {0: -15, 1: -15})
    ranks.close()
    _, ranks = scene.start("pass", "pass")
    ranks.close()
    assert ranks.exits == {0: -9, 1: -9}
