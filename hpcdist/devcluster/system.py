"""Run commands, start daemons and wait for them."""

from __future__ import annotations

import shlex
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from hpcdist.devcluster import argv, processes
from hpcdist.devcluster.settings import Layout
from hpcdist.errors import DevClusterError, RunFolderError
from hpcdist.files import lock

POLL_INTERVAL_S = 0.1
COMMAND_TIMEOUT_S = 120.0
LOCK_WITHIN_S = 10.0
#: In a folder to which only root can write.
LOCK = Path("/run/hpcdist-devcluster.lock")


def run(command: list[str], *, env: Mapping[str, str] | None = None, stdin: str = "") -> str:
    """Run a command and return its output. Raises DevClusterError with the last line of its errors."""
    done = _call(command, env, stdin)
    if done.returncode != 0:
        error = (done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}").splitlines()[-1]
        raise DevClusterError(f"`{shlex.join(command)}` failed: {error.strip()}")
    return done.stdout


def succeeds(command: list[str], *, env: Mapping[str, str] | None = None) -> bool:
    """Return whether a command exits with 0."""
    return _call(command, env, "").returncode == 0


def _call(command: list[str], env: Mapping[str, str] | None, stdin: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command,
            input=stdin,
            env={**argv.BARE_ENV, **(env or {})},
            capture_output=True,
            text=True,
            errors="replace",
            timeout=COMMAND_TIMEOUT_S,
            check=False,
        )
    except FileNotFoundError:
        raise DevClusterError(f"{command[0]} not found: is the package that brings it installed?") from None
    except subprocess.TimeoutExpired:
        raise DevClusterError(f"`{shlex.join(command)}` did not end within {COMMAND_TIMEOUT_S:g} s") from None


def start(layout: Layout, daemon: argv.Daemon) -> None:
    """Start a daemon that outlives this process, unless it is running."""
    if processes.is_running(layout, daemon):
        return
    layout.pid_file(daemon.name).unlink(missing_ok=True)
    with open(layout.output(daemon.name), "ab") as log:
        subprocess.run(
            argv.daemon(layout, daemon),
            env=argv.daemon_env(layout),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            check=True,
        )


def wait_until(
    condition: Callable[[], bool], problem: str, layout: Layout, daemon: argv.Daemon, timeout_s: float
) -> None:
    """Wait until a condition is true.

    Raises:
        DevClusterError: `problem` after a timeout, or the daemon has ended; with the last line of the daemon's output.
    """
    deadline = time.monotonic() + timeout_s
    while not condition():
        ended = processes.has_ended(layout, daemon)
        if ended or time.monotonic() > deadline:
            reason = f"{daemon.name} ended at once" if ended else f"{problem} within {timeout_s:g} s"
            log = layout.output(daemon.name)
            last = (log.read_text(errors="replace").strip().splitlines() or ["nothing"])[-1]
            raise DevClusterError(f"{reason}; {log} ends with: {last}")
        time.sleep(POLL_INTERVAL_S)


@contextmanager
def exclusive() -> Iterator[None]:
    """Hold the lock of `up`, `down` and `node`.

    Raises:
        DevClusterError: another process holds it for `LOCK_WITHIN_S`. After a killed `up`, its child may do so until it
            has started the child's program.
    """
    with ExitStack() as stack:
        try:
            stack.enter_context(lock.exclusive(LOCK, within_s=LOCK_WITHIN_S))
        except RunFolderError:
            raise DevClusterError("another `hpcdist devcluster` is at work on this machine: wait for it") from None
        yield
