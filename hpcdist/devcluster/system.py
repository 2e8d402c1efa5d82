"""Running commands, and waiting for what they start."""

from __future__ import annotations

import shlex
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from hpcdist.devcluster import argv, processes
from hpcdist.devcluster.settings import Layout
from hpcdist.errors import DevClusterError

LOOK_EVERY_S = 0.1
COMMAND_WITHIN_S = 120.0
#: Name of an abstract socket: it is given up with the process, however that ends, and leaves no file.
LOCK = "\0hpcdist-devcluster"


def run(command: list[str], *, env: Mapping[str, str] | None = None, stdin: str = "") -> str:
    """Run a command and return its output. Raises DevClusterError with its last line of complaint."""
    done = _call(command, env, stdin)
    if done.returncode != 0:
        said = (done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}").splitlines()[-1]
        raise DevClusterError(f"`{shlex.join(command)}` failed: {said.strip()}")
    return done.stdout


def succeeds(command: list[str], *, env: Mapping[str, str] | None = None) -> bool:
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
            timeout=COMMAND_WITHIN_S,
            check=False,
        )
    except FileNotFoundError:
        raise DevClusterError(f"{command[0]} not found: is the package that brings it installed?") from None
    except subprocess.TimeoutExpired:
        raise DevClusterError(f"`{shlex.join(command)}` did not end within {COMMAND_WITHIN_S:g} s") from None


def start(layout: Layout, daemon: argv.Daemon) -> None:
    """Leave a daemon behind, unless it runs."""
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


def wait_until(condition: Callable[[], bool], what: str, layout: Layout, daemon: argv.Daemon, within_s: float) -> None:
    """Look until a condition holds.

    Raises DevClusterError, with the last line of the daemon's log, when the daemon ends first or time is up.
    """
    deadline = time.monotonic() + within_s
    while not condition():
        ended = processes.has_ended(layout, daemon)
        if ended or time.monotonic() > deadline:
            how = f"{daemon.name} ended at once" if ended else f"{what} within {within_s:g} s"
            log = layout.output(daemon.name)
            last = (log.read_text(errors="replace").strip().splitlines() or ["nothing"])[-1]
            raise DevClusterError(f"{how}; {log} ends with: {last}")
        time.sleep(LOOK_EVERY_S)


@contextmanager
def exclusive() -> Iterator[None]:
    """Hold what only one `up`, `down` or `node` may hold at a time. Raises DevClusterError when another does."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as lock:
        try:
            lock.bind(LOCK)
        except OSError:
            raise DevClusterError("another `hpcdist devcluster` is at work on this machine: wait for it") from None
        yield
