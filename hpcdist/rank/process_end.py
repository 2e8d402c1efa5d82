"""The end of a rank's process: as Python ends one, but within a time limit.

Threads are joined, functions of `atexit` are called and open files are flushed. Then `os._exit` ends the process:
destructors of gloo and NCCL may block when other ranks have died, and so may threads of libraries.
"""

from __future__ import annotations

import _io
import atexit
import gc
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

log = logging.getLogger(__name__)
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
