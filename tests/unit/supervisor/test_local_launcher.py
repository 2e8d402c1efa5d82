"""Ranks on this machine, the launcher that keeps their parent process, and the guard of their processes.

Named pipes show which processes are alive.
"""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from forked_scene import HELD, SOON_S, TORCH, Scene, end_of, parent_of, reports_of, wait_for_start
from hpcdist_runs import wait_for
from supervisor_scene import NamedPipe

from hpcdist.rank.processes import PARENT_MODULE
from hpcdist.run.folder import RunDir
from hpcdist.supervisor.children import Guard
from hpcdist.supervisor.local_launcher import LocalRanks
from hpcdist.supervisor.parents import RankParents

#: All tests of this file may start processes.
pytestmark = pytest.mark.processes

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
        run = RunDir.create(folder / "run")
        self.attempt = run.new_attempt()
        self.parents = RankParents(
            parent_of(run, "all", ["sh", "-c", 'eval "$COMMAND"']),
            guard,
            env={"PATH": "/usr/bin:/bin"},
            cwd=folder,
            output=folder / "parent.log",
        )
        self.started: list[LocalRanks] = []

    def start(self, *commands: str) -> LocalRanks:
        envs = [{"COMMAND": command} for command in commands]
        ranks = LocalRanks(self.parents, self.attempt, envs, self.guard)
        self.started.append(ranks)
        while len(ranks.absent()) > len(ranks.exits):
            ranks.wait(SOON_S)
        return ranks

    def close(self, ranks: LocalRanks) -> None:
        self.started.remove(ranks)
        ranks.close()

    def log(self, rank: int) -> str:
        return self.attempt.log(rank).read_text()


@pytest.fixture
def shell(tmp_path: Path, guard: Guard) -> Iterator[Shell]:
    shell = Shell(tmp_path, guard)
    yield shell
    for ranks in shell.started:
        ranks.close()
    shell.parents.close()


@pytest.fixture
def pipe(tmp_path: Path) -> Iterator[NamedPipe]:
    with NamedPipe(tmp_path / "pipe") as pipe:
        yield pipe


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


def test_rank_that_cannot_be_started_fails_with_its_reason(shell: Shell, pipe: NamedPipe) -> None:
    shell.attempt.log(1).mkdir()
    ranks = shell.start(f"exec 3> {pipe.path}; echo ready >&3; exec sleep 600", "true")
    assert pipe.line() == "ready"
    while 1 in ranks.remaining:
        ranks.wait(SOON_S)
    assert (ranks.exits, ranks.absent()) == ({1: 1}, [1])
    reason = f"its parent process cannot start it: [Errno 21] Is a directory: '{shell.attempt.log(1)}'"
    assert ranks.last_message(0) == reason
    shell.close(ranks)
    assert pipe.is_released(SOON_S)


def test_sockets_of_ended_ranks_are_removed(shell: Shell, tmp_path: Path) -> None:
    """`shutil.copytree` and others cannot copy a folder with a socket in it."""
    bind = "import socket; socket.socket(socket.AF_UNIX).bind('store.sock')"
    ranks = shell.start(f'cd {shell.attempt.path} && {sys.executable} -c "{bind}"; echo done > log')
    while ranks.remaining:
        ranks.wait(SOON_S)
    assert (shell.attempt.path / "store.sock").is_socket()
    shell.close(ranks)
    assert not (shell.attempt.path / "store.sock").exists()
    shutil.copytree(shell.attempt.path, tmp_path / "copy")
    assert (tmp_path / "copy" / "log").read_text() == "done\n"


def test_other_children_of_the_replaced_shell_survive(tmp_path: Path, guard: Guard) -> None:
    """With enroot, the FUSE daemons of the container's image are such children."""
    run = RunDir.create(tmp_path / "run")
    daemon = f'sleep 600 & echo $! > {tmp_path}/daemon; exec "$@"'
    command = [
        "sh",
        "-c",
        daemon,
        "sh",
        *parent_of(run, "all", ["sh", "-c", f"sleep 600 & echo $! > {tmp_path}/orphan; exit 3"]),
    ]
    parents = RankParents(command, guard, env={"PATH": "/usr/bin:/bin"}, cwd=tmp_path, output=tmp_path / "parent.log")
    try:
        for _ in range(2):
            ranks = LocalRanks(parents, run.new_attempt(), [{}], guard)
            assert end_of(ranks) == {0: 3}
            ranks.close()
            assert parents.is_usable
            assert not psutil.pid_exists(int((tmp_path / "orphan").read_text()))
            (left,) = psutil.Process(parents.process.pid).children()
            assert left.pid == int((tmp_path / "daemon").read_text())
    finally:
        parents.kill()
        parents.close()
        with suppress(ProcessLookupError):
            os.kill(int((tmp_path / "daemon").read_text()), signal.SIGKILL)


# --- descriptors


def test_rank_inherits_only_its_log(shell: Shell) -> None:
    """If a rank inherited the guard's pipe, the guard would not notice the end of the supervisor."""
    held = os.open(os.devnull, os.O_RDONLY)
    os.set_inheritable(held, True)
    try:
        ranks = shell.start("ls /proc/self/fd", "ls /proc/self/fd")
        while ranks.remaining:
            ranks.wait(SOON_S)
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


# --- the parent that the launcher keeps


@pytest.fixture
def scene(tmp_path: Path, runs_dir: Path) -> Iterator[Scene]:
    scene = Scene(tmp_path / "code", runs_dir)
    with scene.launcher:
        yield scene
    assert scene.parents() == []


def test_ranks_end_with_their_parent_which_is_replaced(
    scene: Scene, pipe: NamedPipe, caplog: pytest.LogCaptureFixture
) -> None:
    """Their children end as well."""
    child = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {HELD.format(pipe=str(pipe.path))!r}]);"
    code = child + HELD.format(pipe=str(pipe.path))
    _, ranks = scene.start(code, code)
    wait_for_start(ranks, pipe, 4)
    (parent,) = scene.parents()
    os.kill(parent, signal.SIGKILL)
    assert end_of(ranks) == {0: -9, 1: -9}
    assert pipe.is_released(SOON_S)
    assert scene.finish("import sys; sys.exit(3)", "pass")[1] == {0: 3, 1: 0}
    assert scene.parents() not in ([], [parent])
    output = scene.run.path / "attempts" / "rank-parent.log"
    assert f"the parent process of the ranks is started again (see {output})" in caplog.text


def test_ranks_fail_if_the_imports_end_their_parent(tmp_path: Path, runs_dir: Path) -> None:
    """They would end a rank, too. Each attempt has a new parent."""
    scene = Scene(tmp_path / "code", runs_dir, "print('at import', flush=True)\nimport os; os._exit(0)")
    with scene.launcher:
        for number in (1, 2):
            _, ranks = scene.start("pass", "pass")
            assert end_of(ranks) == {0: 1, 1: 1}
            assert ranks.absent() == [0, 1]
            output = scene.run.path / "attempts" / "rank-parent.log"
            assert ranks.last_message(0) == f"their parent process has ended (see {output})"
            assert output.read_text() == "at import\n" * number


def test_attempt_that_ends_during_the_imports_starts_no_rank(tmp_path: Path, runs_dir: Path) -> None:
    """The parent continues with its imports, and starts the ranks of the next attempt."""
    os.mkfifo(begin := tmp_path / "begin")
    scene = Scene(tmp_path / "code", runs_dir, f"open({str(begin)!r}).read()\n{TORCH}")
    with scene.launcher:
        first, ranks = scene.start("pass", "pass")
        (parent,) = wait_for(scene.parents, "the parent, which a shell becomes")
        ranks.wait(0.01)
        ranks.close()
        assert (ranks.exits, ranks.absent()) == ({0: -9, 1: -9}, [0, 1])
        begin.write_text("")
        second, exits = scene.finish("import os, sys; print(os.getppid())", "pass")
        assert exits == {0: 0, 1: 0}
        assert second.log(0).read_text() == f"{parent}\n"
        assert not first.log(0).exists()


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


def test_forked_rank_has_what_an_executed_one_has(scene: Scene) -> None:
    """Environment, folder, log, session, signals and descriptors."""
    forked = reports_of(scene)
    scene.launcher.fork = False
    scene.launcher._parent.is_usable = False  # so another one is started
    executed = reports_of(scene)
    for rank in range(2):
        for number, report in ((1, forked[rank]), (2, executed[rank])):
            assert report["env"].pop("HPCDIST_RANK") == str(rank)
            assert report["env"].pop("HPCDIST_ATTEMPT") == str(number)
            report["env"].pop("HPCDIST_MASTER_PORT")
            assert report["is_leader"]
            del report["pid"], report["parent"]
        assert (forked[rank].pop("mask"), executed[rank].pop("mask")) == (2, 0), "a forked one waits for its handlers"
        assert forked[rank] == executed[rank]
        assert forked[rank]["env"]["INHERITED"] == "as it was"
        assert forked[rank]["files"] == ["0", "1", "2", "3"], "the folder itself is 3"


def test_stop_before_the_ranks_are_started(scene: Scene) -> None:
    """A signal ends ranks that are being started, whatever their parent is doing."""
    _, ranks = scene.start("pass", "pass")
    assert (ranks.remaining, ranks.absent()) == ([0, 1], [0, 1])
    ranks.signal(signal.SIGUSR1)
    assert ranks.remaining == [0, 1]
    ranks.signal(signal.SIGTERM)
    assert (ranks.remaining, ranks.exits) == ([], {0: -15, 1: -15})
    ranks.close()
    _, ranks = scene.start("pass", "pass")
    ranks.close()
    assert ranks.exits == {0: -9, 1: -9}
