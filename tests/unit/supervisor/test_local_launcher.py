"""LocalRanks and the process guard with shell commands as ranks; named pipes show which processes are alive."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from hpcdist_runs import wait_for
from supervisor_scene import NamedPipe

from hpcdist.supervisor.launcher import Guard
from hpcdist.supervisor.local import LocalRanks

#: All tests of this file may start processes.
pytestmark = pytest.mark.processes

SOON_S = 10.0
#: A grandchild that ignores signals and lives until it is killed.
STUBBORN = "trap '' TERM INT HUP; echo alive >&3; exec sleep 600"


@pytest.fixture
def guard() -> Iterator[Guard]:
    guard = Guard()
    yield guard
    guard.close()


class Scene:
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
def scene(tmp_path: Path, guard: Guard) -> Iterator[Scene]:
    scene = Scene(tmp_path, guard)
    yield scene
    for ranks in scene.started:
        ranks.close()


def wait_for_all(ranks: LocalRanks) -> dict[int, int]:
    while ranks.running:
        ranks.wait(SOON_S)
    return ranks.exits


# --- ranks


def test_exits_are_in_the_order_in_which_ranks_end(scene: Scene, tmp_path: Path) -> None:
    for rank in range(3):
        os.mkfifo(tmp_path / f"go-{rank}")
    ranks = scene.start("read x < go-0; exit 5", "read x < go-1; kill -9 $$", "read x < go-2")
    for rank in (2, 0, 1):
        (tmp_path / f"go-{rank}").write_text("go\n")
        while rank in ranks.running:
            ranks.wait(SOON_S)
    assert list(ranks.exits.items()) == [(2, 0), (0, 5), (1, -9)]
    assert ranks.running == []


def test_wait_ends_after_the_timeout_or_the_first_exit(scene: Scene, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "go")
    ranks = scene.start("read x < go", "exec sleep 600")
    ranks.wait(0)
    assert (ranks.running, ranks.exits) == ([0, 1], {})
    (tmp_path / "go").write_text("go\n")
    ranks.wait(SOON_S)
    assert (ranks.running, ranks.exits) == ([1], {0: 0})


def test_rank_gets_environment_folder_log_and_no_standard_input(scene: Scene, tmp_path: Path) -> None:
    (tmp_path / "rank-1.log").write_text("earlier\n")
    assert wait_for_all(scene.start("env; pwd; cat", "echo out; echo err >&2")) == {0: 0, 1: 0}
    lines = scene.log(0).splitlines()
    assert lines[-1] == str(tmp_path)
    assert {line.partition("=")[0] for line in lines[:-1]} <= {"PATH", "COMMAND", "PWD", "OLDPWD", "SHLVL", "_"}
    assert scene.log(1) == "earlier\nout\nerr\n"


def test_signal_is_sent_to_running_ranks_only(scene: Scene, pipe: NamedPipe) -> None:
    ranks = scene.start(f"exec 3> {pipe.path}; sleep 600 & echo ready >&3; wait", "exit 0")
    assert pipe.line() == "ready"
    while 1 in ranks.running:
        ranks.wait(SOON_S)
    ranks.signal(signal.SIGTERM)
    assert wait_for_all(ranks) == {1: 0, 0: -15}
    assert not pipe.is_released(0), "the child of the rank got the signal"
    scene.close(ranks)
    assert pipe.is_released(SOON_S)


def test_close_kills_all_process_groups_with_grandchildren(scene: Scene, pipe: NamedPipe) -> None:
    """One rank still runs and ignores SIGTERM; the other one has ended, but its grandchild has not."""
    ranks = scene.start(
        f"exec 3> {pipe.path}; trap '' TERM; sh -c \"{STUBBORN}\"; :",
        f'exec 3> {pipe.path}; sh -c "{STUBBORN}" & exit 0',
    )
    assert [pipe.line(), pipe.line()] == ["alive", "alive"]
    while 1 in ranks.running:
        ranks.wait(SOON_S)
    assert ranks.exits == {1: 0}
    scene.close(ranks)
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


def test_rank_inherits_only_its_log(scene: Scene) -> None:
    """If a rank inherited the guard's pipe, the guard would not notice the end of the supervisor."""
    held = os.open(os.devnull, os.O_RDONLY)
    os.set_inheritable(held, True)
    try:
        wait_for_all(scene.start("ls /proc/self/fd", "ls /proc/self/fd"))
    finally:
        os.close(held)
    for rank in range(2):
        # `ls` opens the folder as descriptor 3.
        assert scene.log(rank).split() == ["0", "1", "2", "3"]


def test_close_releases_all_descriptors(tmp_path: Path) -> None:
    before = set(os.listdir("/proc/self/fd"))
    guard = Guard()
    scene = Scene(tmp_path, guard)
    scene.close(scene.start("exit 0", "exec sleep 600"))
    guard.close()
    assert set(os.listdir("/proc/self/fd")) == before


# --- the guard


def sleepers(guard: Guard, folder: Path, count: int) -> list[subprocess.Popen[bytes]]:
    """Start children, and return when each of them executes its command."""
    env = {"PATH": os.environ["PATH"]}
    processes = [guard.start(["sleep", "600"], env=env, cwd=folder, output=folder / "log") for _ in range(count)]
    while any(Path(f"/proc/{process.pid}/comm").read_text() != "sleep\n" for process in processes):
        assert all(process.poll() is None for process in processes)
    return processes


def test_guard_kills_registered_groups_only(tmp_path: Path) -> None:
    guard = Guard()
    processes = sleepers(guard, tmp_path, 3)
    guard.forget(processes[1].pid)
    processes[2].kill()
    processes[2].wait()
    guard.close()
    assert processes[0].wait(SOON_S) == -9
    assert processes[1].poll() is None
    processes[1].kill()
    assert processes[1].wait() == -9


def test_rank_registers_with_the_guard_before_it_executes_its_command(tmp_path: Path) -> None:
    """The rank ends even if the supervisor dies directly after the start."""
    guard = Guard()
    process = guard.start(["/bin/sleep", "600"], env={}, cwd=tmp_path, output=tmp_path / "log")
    guard.close()  # at once
    assert process.wait(SOON_S) == -9


def test_rank_starts_after_the_guard_was_killed(tmp_path: Path, guard: Guard) -> None:
    guard._process.kill()
    guard._process.wait()
    (process,) = sleepers(guard, tmp_path, 1)
    process.kill()
    guard.forget(process.pid)
    assert process.wait() == -9


SUPERVISOR = """
import os, sys
from pathlib import Path
from hpcdist.supervisor.launcher import Guard
from hpcdist.supervisor.local import LocalRanks
folder = Path(sys.argv[1])
guard = Guard()
command = ["sh", "-c", sys.argv[2]]
ranks = LocalRanks(command, [{"PATH": os.environ["PATH"]}] * 2, [folder / "0.log", folder / "1.log"], guard, cwd=folder)
print(guard._process.pid, flush=True)
while True:
    ranks.wait(600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV], ids=lambda number: number.name)
def test_ranks_and_grandchildren_end_with_a_killed_supervisor(
    tmp_path: Path, pipe: NamedPipe, number: signal.Signals
) -> None:
    """Two ranks, each with a grandchild that ignores SIGTERM, hold a pipe open until they end."""
    rank = f"exec 3> {pipe.path}; sh -c \"{STUBBORN}\" & trap '' TERM HUP INT; echo alive >&3; wait"
    with subprocess.Popen(
        [sys.executable, "-c", SUPERVISOR, str(tmp_path), rank], stdout=subprocess.PIPE, text=True
    ) as supervisor:
        assert supervisor.stdout is not None
        guard = os.pidfd_open(int(supervisor.stdout.readline()))
        try:
            assert [pipe.line() for _ in range(4)] == ["alive"] * 4
            supervisor.send_signal(number)
            assert supervisor.wait() == -number
            assert pipe.is_released(SOON_S)
            assert select.select([guard], [], [], SOON_S)[0], "the guard is alive"
        finally:
            os.close(guard)
