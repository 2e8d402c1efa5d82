"""Running a command within a time limit."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress

#: A command that is terminated gets this long to end; srun ends its tasks then, too.
LEAVE_S = 1.0


def run_within(
    command: Sequence[str], limit_s: float, *, env: Mapping[str, str] | None = None, stdin: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, or end it after `limit_s` seconds; returns what it printed in either case.

    The output goes through files: what a command leaves running may hold its pipes open for any length of time.
    A command that was ended has a return code below zero, and its last line of errors names the limit.
    Raises FileNotFoundError where there is no such command.
    """
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        given.write(stdin.encode())
        given.seek(0)
        process = subprocess.Popen(command, env=env, stdin=given, stdout=output, stderr=errors, start_new_session=True)
        late = ""
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            late = f"\nno answer within {limit_s:g} s\n"
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(LEAVE_S)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        said = []
        for file in (output, errors):
            file.seek(0)
            said.append(file.read().decode(errors="replace"))
        return subprocess.CompletedProcess(command, -1 if late else process.returncode, said[0], said[1] + late)


def last_line(text: str, limit_chars: int = 200) -> str:
    """The last line that is not empty, cut to a length; empty where there is none."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:limit_chars] if lines else ""
