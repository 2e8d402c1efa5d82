"""Child processes that do not outlive the supervisor, whatever kills it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

#: Reads `+pgid` and `-pgid` from a pipe that only the supervisor holds open. When the supervisor dies, whatever
#: killed it, the pipe ends and the process groups still noted are killed, grandchildren included.
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
#: A child names its own group to the guard, on its standard input, before it becomes what it is to be. Were it the
#: supervisor who did so after the start, one that is killed in between would leave an orphan. The guard sees the end
#: of its pipe only when such a child has let go of it. In a subshell, since a guard that is dead ends who writes.
_NAME_YOURSELF = '(echo "+$$" >&0); exec "$@" </dev/null'

_LOOK_EVERY_S = 0.1
_LEAVE_S = 1.0


class Guard:
    """Starts children as leaders of process groups, and kills what is left of them when this process dies."""

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
        self, command: Sequence[str], *, env: Mapping[str, str], cwd: Path, output: Path
    ) -> subprocess.Popen[bytes]:
        """Start a child in a session of its own; what it prints is appended to `output`, errors included."""
        with open(output, "ab") as file:
            return subprocess.Popen(
                ["/bin/sh", "-c", _NAME_YOURSELF, "sh", *command],
                env=env,
                cwd=cwd,
                stdin=self._process.stdin,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

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
        """Run a child to its end, or end it after `limit_s` or soon after `interrupted` is true."""
        until = time.monotonic() + limit_s
        process = self.start(command, env=env, cwd=cwd, output=output)
        try:
            while process.poll() is None and time.monotonic() < until and not interrupted():
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_LOOK_EVERY_S)
            if process.poll() is None:
                process.terminate()  # srun then ends its tasks, too
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_LEAVE_S)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            self.forget(process.pid)

    def forget(self, group: int) -> None:
        """A child's process group is gone: its number may soon be somebody else's."""
        assert self._process.stdin is not None
        # Without its guard a run is less safe, not over.
        with suppress(BrokenPipeError):
            self._process.stdin.write(f"-{group}\n")
            self._process.stdin.flush()

    def close(self) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()
