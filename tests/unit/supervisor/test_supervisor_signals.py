"""Signals to the supervisor, with fake ranks (`support/fake_rank.py`)."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from supervisor_scene import DONE, EXIT_0, STOP_ON_REQUEST, STUBBORN, NamedPipe, Scene

from hpcdist.run.folder import RunDir
from hpcdist.supervisor.supervisor import SignalRequests

#: All tests of this file may start processes.
pytestmark = pytest.mark.processes


@pytest.fixture
def scene(runs_dir: Path) -> Scene:
    return Scene(RunDir.create(runs_dir / "exp" / "first"))


def test_signal_before_the_first_attempt_stops_the_run(scene: Scene) -> None:
    scene.script(first=[STOP_ON_REQUEST, EXIT_0])
    supervisor = scene.supervisor()
    supervisor._signals.on_signal(signal.SIGTERM, None)
    state = scene.supervise(supervisor)
    assert (state.status, state.reason) == (
        "stopped",
        "everything saved (SIGTERM to the supervisor)",
    )


def test_signal_handlers_are_restored(scene: Scene) -> None:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    scene.script(first=[[*DONE], EXIT_0])
    scene.supervise()
    assert [signal.getsignal(number) for number in numbers] == before


def support_path() -> dict[str, str]:
    """Return an environment in which another Python finds supervisor_scene.py."""
    return {
        "PYTHONPATH": os.pathsep.join(
            [str(Path(__file__).parents[2] / "support"), *filter(None, [os.getenv("PYTHONPATH")])]
        )
    }


@contextmanager
def supervisor_process(scene: Scene) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "supervisor_scene", str(scene.run.path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | support_path()) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_first_signal_to_the_supervisor_stops_the_run(
    scene: Scene, messages: NamedPipe, number: signal.Signals
) -> None:
    scene.script(first=[[["say", "up"], *STOP_ON_REQUEST], [["await", "{attempt}/request.json"]]])
    with supervisor_process(scene) as process:
        assert messages.line() == "up"
        process.send_signal(number)
        out, _ = process.communicate()
    assert out.splitlines() == [
        f"stopping: the ranks save a checkpoint and exit ({number.name} to the supervisor)",
        f"stopped: everything saved ({number.name} to the supervisor)",
    ]
    assert process.returncode == 0


def test_second_interrupt_cancels_the_run(scene: Scene, messages: NamedPipe, alive: NamedPipe) -> None:
    scene.script(
        first=[
            [["grandchild", None], ["say", "up"], ["await", "{attempt}/request.json"], ["say", "asked"], *STUBBORN],
            STUBBORN,
        ]
    )
    with supervisor_process(scene) as process:
        assert messages.line() == "up"
        process.send_signal(signal.SIGINT)
        assert messages.line() == "asked"
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate()
    assert out.splitlines()[-1] == "cancelled: SIGINT to the supervisor"
    assert alive.is_released(10)


def test_closed_terminal_stops_the_run(scene: Scene, messages: NamedPipe) -> None:
    """Writes to the closed terminal fail, and must not fail the run."""
    scene.script(first=[[["say", "up"], *STOP_ON_REQUEST], [["await", "{attempt}/request.json"]]])
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ.update(support_path())
        os.execv(sys.executable, [sys.executable, "-m", "supervisor_scene", str(scene.run.path)])
    ended = os.pidfd_open(pid)
    try:
        assert messages.line() == "up"
        os.close(terminal)
        assert select.select([ended], [], [], 20)[0]
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(ended)
    state = scene.run.read_state()
    assert (state.status, state.reason) == (
        "stopped",
        "everything saved (SIGHUP to the supervisor)",
    )


@pytest.mark.parametrize(
    ("number", "in_job", "cause"),
    [
        (signal.SIGTERM, False, "signal"),
        (signal.SIGINT, True, "signal"),
        (signal.SIGHUP, True, "signal"),
        (signal.SIGTERM, True, "preemption"),
    ],
)
def test_sigterm_in_a_job_means_that_slurm_ends_it(number: signal.Signals, in_job: bool, cause: str) -> None:
    signals = SignalRequests(in_job=in_job)
    assert signals.request() is None
    signals.on_signal(number, None)
    request = signals.request()
    assert request is not None
    assert (request.action, request.cause, request.by) == ("stop", cause, number.name)
