"""Commands and calls with a time limit."""

import os
import select
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import IO, TypeVar

#: Polling interval for the output of a command that may end early.
POLL_S = 0.05


def run_within(
    command: Sequence[str],
    limit_s: float,
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    stdin: str = "",
    is_enough: Callable[[str], bool] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a command and return its output; end it after `limit_s` seconds.

    The output goes to files, because a leftover child process may keep pipes open for any time. The return code of a
    killed command is negative; after a timeout, the last line of stderr names the limit.

    Args:
        is_enough: decides from the output so far whether to end the command before the limit.

    Raises FileNotFoundError if the command does not exist.
    """
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        given.write(stdin.encode())
        given.seek(0)
        process = subprocess.Popen(
            command, env=env, cwd=cwd, stdin=given, stdout=output, stderr=errors, start_new_session=True
        )
        until = time.monotonic() + limit_s
        is_late = is_cut = False
        try:
            while not (is_late or is_cut):
                wait_s = until - time.monotonic()
                if is_enough is not None:
                    wait_s = min(wait_s, POLL_S)
                if _ends_within(process, wait_s):
                    break
                is_late = time.monotonic() >= until
                is_cut = is_enough is not None and is_enough(_text(output))
            else:
                process.terminate()
                _ends_within(process, 1.0)  # meanwhile, srun ends its tasks
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        code = -1 if is_late or is_cut else process.returncode
        error_text = _text(errors)
        if is_late:
            error_text += f"\nno answer within {limit_s:g} s\n"
        return subprocess.CompletedProcess(command, code, _text(output), error_text)


def _text(file: IO[bytes]) -> str:
    # Not `read`, which would move the position at which the command writes.
    return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode(errors="replace")


def _ends_within(process: subprocess.Popen[bytes], limit_s: float) -> bool:
    """Wait for a process, and return whether it has ended within the limit.

    `process.wait` with a limit polls, and returns up to 50 ms after the end.
    """
    descriptor = os.pidfd_open(process.pid)
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        return bool(poll.poll(max(0.0, limit_s) * 1000))  # a negative limit would be none
    finally:
        os.close(descriptor)


def last_line(text: str, limit_chars: int = 200) -> str:
    """Return the last non-empty line, cut to a length; empty if there is none."""
    for line in reversed(text.splitlines()):
        if line.strip():
            return line.strip()[:limit_chars]
    return ""


# Calls that may block for ever, such as access to a dead file server, run in daemon threads.

T = TypeVar("T")


def start(work: Callable[[], T]) -> Future[T]:
    """Start a call in a daemon thread, which does not keep the process alive."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # a running thread cannot be cancelled

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def done_within(limit_s: float, future: Future[T], otherwise: T) -> T:
    """Return the result of a call, or `otherwise` if it is not done within the limit. Raises the error of the call."""
    try:
        return future.result(limit_s)
    except TimeoutError:
        return otherwise
