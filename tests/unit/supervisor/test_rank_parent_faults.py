"""Parents of ranks that end, hang or cannot fork, and supervisors that are killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from forked_scene import HELD, SOON_S, TORCH, Scene, wait_for_fork
from named_pipe import NamedPipe

from hpcdist.rank.processes import PARENT_MODULE

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
            parent.suspend()
        supervisor.kill()
    assert pipe.is_released(SOON_S)
    assert psutil.wait_procs([parent], SOON_S)[1] == []
