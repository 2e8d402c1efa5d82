"""Run commands of a dev cluster one `hpcdist devcluster` at a time, start its daemons and wait for them."""

import shlex
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from hpcdist.devcluster.cluster_processes import is_running, read_pid
from hpcdist.devcluster.settings import BARE_ENV, Daemon, Layout, daemon_command, daemon_env
from hpcdist.errors import DevClusterError, RunFolderError
from hpcdist.host import locks
from hpcdist.host.time_limits import last_line, run_within

#: Time to wait for another `hpcdist devcluster`.
LOCK_WITHIN_S = 10.0
#: Time limit of a command; most take less than a second.
_COMMAND_WITHIN_S = 120.0
#: MariaDB's first start takes up to 10 s on two busy cores.
_ANSWER_WITHIN_S = 120.0
_POLL_S = 0.1
_MARIADB_ERROR = "[ERROR]"
#: In a folder to which only root can write.
LOCK = Path("/run/hpcdist-devcluster.lock")


def run(command: list[str], *, env: Mapping[str, str] | None = None, stdin: str = "") -> str:
    """Run a command and return its output; raise DevClusterError with its error if it fails or does not exist.

    Args:
        env: variables besides BARE_ENV.
    """
    done = _call(command, env, stdin)
    if done.returncode != 0:
        error = _cause(done.stderr) or last_line(done.stdout) or f"exit code {done.returncode}"
        raise DevClusterError(f"`{shlex.join(command)}` failed: {error}")
    return done.stdout


def _cause(errors: str) -> str:
    """Return MariaDB's first error, because it always ends with "Aborting"; the last line of other commands."""
    for line in errors.splitlines():
        if _MARIADB_ERROR in line:
            return last_line(line)
    return last_line(errors)


def succeeds(command: list[str], *, env: Mapping[str, str] | None = None) -> bool:
    """Run a command and return whether it succeeds; raise DevClusterError if it does not exist."""
    return _call(command, env, "").returncode == 0


def _call(command: list[str], env: Mapping[str, str] | None, stdin: str) -> subprocess.CompletedProcess[str]:
    try:
        return run_within(command, _COMMAND_WITHIN_S, env={**BARE_ENV, **(env or {})}, stdin=stdin)
    except FileNotFoundError:
        raise DevClusterError(f"{command[0]} not found: is the package that brings it installed?") from None


def start_daemon(layout: Layout, daemon: Daemon) -> None:
    """Start a daemon that outlives this process, unless it is running."""
    if is_running(layout, daemon):
        return
    layout.pid_file(daemon.name).unlink(missing_ok=True)
    command = daemon_command(layout, daemon)
    env = daemon_env(layout)
    with open(layout.output(daemon.name), "ab") as log:
        subprocess.run(command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, check=True)


def wait_until(
    condition: Callable[[], bool],
    problem: str,
    layout: Layout,
    daemon: Daemon,
    timeout_s: float = _ANSWER_WITHIN_S,
) -> None:
    """Wait for a condition; raise `problem` after the time limit or the daemon's end, with its last line of output."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        has_ended = read_pid(layout, daemon) is not None and not is_running(layout, daemon)
        if has_ended or time.monotonic() > deadline:
            reason = f"{problem} within {timeout_s:g} s"
            if has_ended:
                reason = f"{daemon.name} ended at once"
            log = layout.output(daemon.name)
            last = last_line(log.read_text(errors="replace")) or "nothing"
            raise DevClusterError(f"{reason}; {log} ends with: {last}")
        time.sleep(_POLL_S)


@contextmanager
def exclusive() -> Iterator[None]:
    """Hold the lock of `up`, `down` and `node`; after a killed `up`, its child holds it for a moment."""
    with ExitStack() as stack:
        try:
            stack.enter_context(locks.exclusive(LOCK, within_s=LOCK_WITHIN_S))
        except RunFolderError:
            raise DevClusterError("another `hpcdist devcluster` is at work on this machine: wait for it") from None
        yield
