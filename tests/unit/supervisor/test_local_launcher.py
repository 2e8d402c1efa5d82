"""Ranks on this machine: started by their command or forked by a parent, and the guard of their processes.

Named pipes show which processes are alive.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from forked_scene import HELD, REPORT, TORCH, Scene, wait_for_fork
from hpcdist_runs import wait_for
from supervisor_scene import NamedPipe

from hpcdist.errors import HpcdistError
from hpcdist.rank.processes import PARENT_MODULE
from hpcdist.supervisor.children import Guard
from hpcdist.supervisor.local import LocalRanks

#: All tests of this file may start processes.
pytestmark = pytest.mark.processes

SOON_S = 20.0
#: A grandchild that ignores signals and lives until it is killed.
STUBBORN = "trap '' TERM INT HUP; echo alive >&3; exec sleep 600"


@pytest.fixture
def guard() -> Iterator[Guard]:
    guard = Guard()
    yield guard
    guard.close()


class Shell:
    """Starts shell commands as ranks of one attempt."""

    def __init__(self, folder: Path, guard: Guard) -> None:
        self.folder = folder
        self.guard = guard
        self.started: list[LocalRanks] = []

    def start(self, *commands: str) -> LocalRanks:
        envs = [{"PATH": "/usr/bin:/bin", "COMMAND": command} for command in commands]
        logs = [self.folder / f"rank-{rank}.log" for rank in range(len(commands))]
        ranks = LocalRanks(["sh", "-c", 'eval "$COMMAND"'], envs, logs, self.guard, cwd=self.folder)
        self.started.append(ranks)
        return ranks

    def close(self, ranks: LocalRanks) -> None:
        self.started.remove(ranks)
        ranks.close()

    def log(self, rank: int) -> str:
        return (self.folder / f"rank-{rank}.log").read_text()


@pytest.fixture
def shell(tmp_path: Path, guard: Guard) -> Iterator[Shell]:
    shell = Shell(tmp_path, guard)
    yield shell
    for ranks in shell.started:
        ranks.close()


@pytest.fixture
def pipe(tmp_path: Path) -> Iterator[NamedPipe]:
    with NamedPipe(tmp_path / "pipe") as pipe:
        yield pipe


def wait_for_all(ranks: LocalRanks) -> dict[int, int]:
    while ranks.remaining:
        ranks.wait(SOON_S)
    return ranks.exits


# --- ranks


def test_exits_are_in_the_order_in_which_ranks_end(shell: Shell, tmp_path: Path) -> None:
    for rank in range(3):
        os.mkfifo(tmp_path / f"go-{rank}")
    ranks = shell.start("read x < go-0; exit 5", "read x < go-1; kill -9 $$", "read x < go-2")
    for rank in (2, 0, 1):
        (tmp_path / f"go-{rank}").write_text("go\n")
        while rank in ranks.remaining:
            ranks.wait(SOON_S)
    assert list(ranks.exits.items()) == [(2, 0), (0, 5), (1, -9)]
    assert ranks.remaining == []


def test_close_kills_all_process_groups_with_grandchildren(shell: Shell, pipe: NamedPipe) -> None:
    """One rank still runs and ignores SIGTERM; the other one has ended, but its grandchild has not."""
    ranks = shell.start(
        f"exec 3> {pipe.path}; trap '' TERM; sh -c \"{STUBBORN}\"; :",
        f'exec 3> {pipe.path}; sh -c "{STUBBORN}" & exit 0',
    )
    assert [pipe.line(), pipe.line()] == ["alive", "alive"]
    while 1 in ranks.remaining:
        ranks.wait(SOON_S)
    assert ranks.exits == {1: 0}
    shell.close(ranks)
    assert pipe.is_released(SOON_S)
    assert list(ranks.exits.items()) == [(1, 0), (0, -9)]


def test_no_rank_remains_if_one_cannot_be_started(tmp_path: Path, guard: Guard, pipe: NamedPipe) -> None:
    logs = [tmp_path / "rank-0.log", tmp_path / "missing" / "rank-1.log"]
    command = ["sh", "-c", f"exec 3> {pipe.path}; echo ready >&3; exec sleep 600"]
    with pytest.raises(FileNotFoundError, match="missing"):
        LocalRanks(command, [{}, {}], logs, guard, cwd=tmp_path)

    def commands() -> list[str]:
        return [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]

    # The shell's child that registers the rank is killed, too, but nobody waits for it.
    wait_for(lambda: not [command for command in commands() if str(pipe.path) in command], "the end of the rank")


# --- descriptors


def test_rank_inherits_only_its_log(shell: Shell) -> None:
    """If a rank inherited the guard's pipe, the guard would not notice the end of the supervisor."""
    held = os.open(os.devnull, os.O_RDONLY)
    os.set_inheritable(held, True)
    try:
        wait_for_all(shell.start("ls /proc/self/fd", "ls /proc/self/fd"))
    finally:
        os.close(held)
    for rank in range(2):
        # `ls` opens the folder as descriptor 3.
        assert shell.log(rank).split() == ["0", "1", "2", "3"]


# --- the guard


def sleepers(guard: Guard, folder: Path, count: int) -> list[subprocess.Popen[bytes]]:
    """Start children, and return when each of them executes its command."""
    env = {"PATH": os.environ["PATH"]}
    processes = [guard.start(["sleep", "600"], env=env, cwd=folder, output=folder / "log") for _ in range(count)]
    while any(Path(f"/proc/{process.pid}/comm").read_text() != "sleep\n" for process in processes):
        assert all(process.poll() is None for process in processes)
    return processes


def test_guard_kills_registered_groups_only(tmp_path: Path) -> None:
    """A child registers before it executes its command: it ends even if the supervisor dies right after the start."""
    guard = Guard()
    processes = sleepers(guard, tmp_path, 3)
    guard.forget(processes[1].pid)
    processes[2].kill()
    processes[2].wait()
    last = guard.start(["/bin/sleep", "600"], env={}, cwd=tmp_path, output=tmp_path / "log")
    guard.close()  # at once
    assert [process.wait(SOON_S) for process in (processes[0], last)] == [-9, -9]
    assert processes[1].poll() is None
    processes[1].kill()
    assert processes[1].wait() == -9


# --- Ranks that a parent forks, and parents that end, hang or cannot fork.


@pytest.fixture
def scene(tmp_path: Path, runs_dir: Path) -> Iterator[Scene]:
    scene = Scene(tmp_path / "code", runs_dir)
    with scene.launcher:
        yield scene
    assert scene.parents() == []


def test_ranks_end_with_their_parent_which_is_replaced(
    scene: Scene, pipe: NamedPipe, caplog: pytest.LogCaptureFixture
) -> None:
    code = HELD.format(pipe=str(pipe.path))
    _, ranks = scene.start(code, code)
    wait_for_fork(ranks, pipe)
    (parent,) = scene.parents()
    os.kill(parent, signal.SIGKILL)
    while ranks.remaining:
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
        (TORCH + "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()",
         "started 1 threads"),
        ("raise ImportError('no such library')", "ImportError: no such library"),
        ("from types import SimpleNamespace\ncuda = SimpleNamespace(_is_in_bad_fork=lambda: True)", "initialised CUDA"),
        ("print('at import')\nimport os; os._exit(0)", "at import"),
    ],
    ids=["thread", "error", "cuda", "exit"],
)  # fmt: skip
def test_ranks_are_started_by_their_command_if_the_parent_cannot_fork(
    tmp_path: Path, runs_dir: Path, caplog: pytest.LogCaptureFixture, torch: str, reason: str
) -> None:
    scene = Scene(tmp_path / "code", runs_dir, torch)
    with scene.launcher:
        code = "import os, sys; sys.exit(os.getppid() % 100)"
        for _ in range(2):
            assert scene.finish(code, code)[1] == dict.fromkeys(range(2), os.getpid() % 100)
            assert scene.parents() == []
    output = runs_dir / "exp" / "first" / "attempts" / "rank-parent.log"
    assert f"each rank imports torch itself: its parent process has ended (see {output})" in caplog.text
    assert reason in output.read_text()
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
        while ranks.remaining:
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


FORKING_SUPERVISOR = """
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
    program = FORKING_SUPERVISOR.format(path=sys.path)
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


def test_stop_before_the_ranks_are_forked(scene: Scene) -> None:
    """A signal ends ranks that are being started, whatever their parent is doing."""
    _, ranks = scene.start("pass", "pass")
    assert (ranks.remaining, ranks.absent(), ranks._processes) == ([0, 1], [], [])
    ranks.signal(signal.SIGUSR1)
    assert ranks.remaining == [0, 1]
    ranks.signal(signal.SIGTERM)
    assert (ranks.remaining, ranks.exits) == ([], {0: -15, 1: -15})
    ranks.close()
    _, ranks = scene.start("pass", "pass")
    ranks.close()
    assert ranks.exits == {0: -9, 1: -9}
