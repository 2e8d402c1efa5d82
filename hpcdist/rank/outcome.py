"""The end of a rank: its outcome file, from which the supervisor learns how it ended, and the end of its process within
a time limit.
"""

from __future__ import annotations

import _io
import atexit
import gc
import logging
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Literal, NoReturn

from hpcdist.errors import HpcdistError, PeerLost, TrainerError, UserMistake
from hpcdist.host import retry
from hpcdist.host.files import write_json
from hpcdist.run.folder import Attempt, RunDir

# The outcome file of a rank, from which the supervisor learns how the rank ended.
#
# Rank 0 writes `attempts/NNN/rank-00000.outcome.json` after a success; every rank that fails writes its own. A rank
# that is killed writes nothing, and the supervisor sees its exit status.

log = logging.getLogger(__name__)
#: Parts of error messages of gloo, NCCL, TensorPipe and the store when another rank has died.
_PEER_LOST = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "remote process exited",
    "NCCL",
    "tensorpipe",
)
_RESERVE_BYTES = 16 * 1024
#: Maximum number of characters of the error and of the traceback; the log has the whole text.
_MAX_TEXT = 10_000


class Outcome:
    """Writes the outcome file of one rank.

    It reserves disk space at once and frees it before writing, so that a rank that fails because the disk is full can
    still write its outcome.
    """

    def __init__(self, attempt: Attempt, rank: int) -> None:
        self._path = attempt.outcome(rank)
        self._rank = rank
        self._reserve = attempt.path / f".rank-{rank:05d}.reserve"
        #: Returns the number of steps done, if known.
        self.step: Callable[[], int | None] = lambda: None
        with suppress(OSError):  # the disk is already full: try to write the outcome without a reserve
            self._reserve.write_bytes(bytes(_RESERVE_BYTES))

    def write(self, outcome: Literal["done", "stopped", "failed", "rejected"], **details: Any) -> None:
        """Write the rank's result."""
        self.close()
        write_json(
            self._path,
            {
                "outcome": outcome,
                "rank": self._rank,
                "host": socket.gethostname(),
                "time": time.time(),
                "step": self.step(),
                **details,
            },
        )

    def close(self) -> None:
        """Free the reserved disk space."""
        retry.discard(self._reserve)

    def write_error(self, error: BaseException) -> int:
        """Log an exception, write the outcome file, and return the exit code."""
        is_rejected = isinstance(error, UserMistake | SyntaxError)
        is_expected = isinstance(error, HpcdistError)
        text = str(error) or type(error).__name__
        # Only an error in the user's module has a cause here.
        imported = error.__cause__ if isinstance(error, TrainerError) else None
        trace = "" if is_expected and imported is None else "".join(traceback.format_exception(imported or error))
        with suppress(HpcdistError, OSError):
            run = RunDir(self._path.parents[2])
            text, trace = run.with_original_paths(text), run.with_original_paths(trace)
        log.error("%s", "\n".join([text] * is_expected + [trace.rstrip()] * bool(trace)))
        self.write(
            "rejected" if is_rejected else "failed",
            error=_shorten(text if is_expected else f"{type(error).__name__}: {text}"),
            peer_lost=isinstance(error, PeerLost)
            or (isinstance(error, RuntimeError) and any(part in text for part in _PEER_LOST)),
            traceback=[_shorten(trace)] if trace else [],
        )
        return 2 if is_rejected else 1


def _shorten(text: str) -> str:
    """Remove the middle of a text that is too long for the supervisor, the commands and MLflow."""
    if len(text) <= _MAX_TEXT:
        return text
    half = _MAX_TEXT // 2
    return f"{text[:half]}\n… {len(text) - 2 * half} characters, see the log …\n{text[-half:]}"


# The end of a rank's process: as Python ends one, but within a time limit.
#
# Threads are joined, functions of `atexit` are called and open files are flushed. Then `os._exit` ends the process:
# destructors of gloo and NCCL may block when other ranks have died, and so may threads of libraries.

#: Time limit after a failure, whose restart waits for the end of all ranks.
FAILED_S = 3.0
#: Time for functions of `atexit` if threads have used up the limit.
ATEXIT_S = 3.0
#: Additional time for calls that a signal does not interrupt.
_STUCK_S = 2.0


class _TimeIsUp(Exception):
    """Interrupts the main thread."""


def end(conclude: Callable[[], int], limit_s: float) -> NoReturn:
    """End this process as Python does, with the exit code that `conclude` returns.

    Args:
        conclude: called after threads and functions of `atexit`, which may still record metrics.
        limit_s: time limit of threads and functions of `atexit`.
    """

    def give_up() -> None:
        log.warning("a function of atexit does not end, and is cut off: %s", _name(threading.main_thread()))
        exit_now(conclude())

    stuck = threading.Timer(limit_s + ATEXIT_S + _STUCK_S, give_up)
    stuck.daemon = True
    stuck.start()
    signal.signal(signal.SIGALRM, _interrupt)
    until = time.monotonic() + limit_s
    _within(limit_s, threading._shutdown)  # type: ignore[attr-defined]
    if endless := [one for one in threading.enumerate() if not one.daemon and one is not threading.main_thread()]:
        log.warning("%s: not ended within %g s, and cut off", ", ".join(map(_name, endless)), limit_s)
    _within(max(ATEXIT_S, until - time.monotonic()), atexit._run_exitfuncs)
    _within(ATEXIT_S, _flush_files)
    stuck.cancel()
    exit_now(conclude())


def exit_now(code: int) -> NoReturn:
    """Exit without waiting for anything."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(code)


def _interrupt(*_: object) -> NoReturn:
    raise _TimeIsUp


def _within(seconds: float, call: Callable[[], object]) -> None:
    """Call a function, and interrupt it after some seconds. As in Python, its errors do not change the exit code."""
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            call()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except _TimeIsUp:
        pass
    except Exception:
        log.exception("an error at the end of the process is ignored")


def _name(thread: threading.Thread) -> str:
    """Return the name of a thread and the line that it executes."""
    frame = sys._current_frames().get(thread.ident or 0)
    return f"thread {thread.name!r}" + (f" ({frame.f_code.co_filename}:{frame.f_lineno})" if frame else "")


def _flush_files() -> None:
    """Flush open files, which Python flushes when it deletes the objects of all modules."""
    gc.unfreeze()
    for one in gc.get_objects():
        try:
            # Not an abstract class of `io`, whose check takes ten times as long.
            if issubclass(type(one), _io._IOBase) and not one.closed and one.writable():
                one.flush()
        except OSError as error:
            log.warning("%r is not written completely: %s", one, error.strerror)
        except ValueError:
            pass  # closed by the flush of another one, or detached from its file
