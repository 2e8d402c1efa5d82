"""Process guard: child processes end when the supervisor dies, also by SIGKILL."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

#: Reads `+pgid` and `-pgid` from a pipe whose other end the supervisor holds, and each process only until it has
#: registered. When the supervisor dies, the pipe ends, and the guard kills all registered process groups, grandchildren
#: included.
_GUARD = """
import os, signal, sys
for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
    signal.signal(number, signal.SIG_IGN)  # Slurm sends SIGTERM to everything that a job has started
groups = set()
for line in sys.stdin:
    (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
for group in groups:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        pass
"""
#: A child registers its own group with the guard, through its standard input, before it executes the command. If the
#: supervisor did this after the start, a supervisor killed in between would leave an orphan. The child then closes the
#: pipe. The write is in a subshell, because SIGPIPE kills the writer if the guard is dead.
_REGISTER_AND_EXEC = '(echo "+$$" >&0); exec "$@" </dev/null'

_POLL_S = 0.1
_LEAVE_S = 1.0


class Guard:
    """Starts children as leaders of process groups, which are killed when this process dies."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-ISc", _GUARD],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            text=True,
        )

    def start(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: Path,
        output: Path,
        control: socket.socket | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start a child in a new session.

        Args:
            output: file to which standard output and error are appended.
            control: takes the place of standard output.
        """
        with open(output, "ab") as file:
            return subprocess.Popen(
                ["/bin/sh", "-c", _REGISTER_AND_EXEC, "sh", *command],
                env=env,
                cwd=cwd,
                stdin=self._process.stdin,
                stdout=file if control is None else control.fileno(),
                stderr=file,
                start_new_session=True,
            )

    def fileno(self) -> int:
        """Return the descriptor of the pipe through which a process registers its group, as `+pgid` and a newline."""
        assert self._process.stdin is not None
        return self._process.stdin.fileno()

    def run(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: Path,
        output: Path,
        limit_s: float,
        interrupted: Callable[[], bool],
    ) -> None:
        """Run a child until it ends; end it after `limit_s`, or soon after `interrupted` returns true."""
        until = time.monotonic() + limit_s
        process = self.start(command, env=env, cwd=cwd, output=output)
        try:
            while process.poll() is None and time.monotonic() < until and not interrupted():
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_POLL_S)
            if process.poll() is None:
                process.terminate()  # srun then also ends its tasks
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_LEAVE_S)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            self.forget(process.pid)

    def forget(self, group: int) -> None:
        """Unregister the process group of an ended child, because the kernel may reuse its id."""
        assert self._process.stdin is not None
        # A run continues without its guard.
        with suppress(BrokenPipeError):
            self._process.stdin.write(f"-{group}\n")
            self._process.stdin.flush()

    def close(self) -> None:
        """End the guard as the death of this process does: it kills the groups that are still registered."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()
