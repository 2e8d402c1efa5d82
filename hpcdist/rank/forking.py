"""Forking a rank from a process that has imported what ranks need: session, signals, shown command and environment."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import traceback
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import Any, NoReturn

from hpcdist.machine import process_record

#: Signals that end a process or a job. The parent of ranks ignores them: Slurm sends SIGTERM to all processes of a job.
IGNORED = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
_PR_SET_PDEATHSIG = 1


def fork_rank(become: Callable[[], None], ignored: Collection[int] = (), blocked: Collection[int] = ()) -> int:
    """Fork a rank, which leads a session of its own and is killed at the death of this process.

    Args:
        become: called in the rank; signals to the rank wait until it returns.
        ignored: signals that the rank ignores until it has handlers of its own.
        blocked: signals that wait until the rank has handlers of its own.

    Returns:
        The process id, 0 in the rank.

    Raises OSError if the process cannot be created.
    """
    parent = os.getpid()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        pid = os.fork()
        if pid == 0:
            try:
                _begin_rank(parent)
                become()
                for number in IGNORED:
                    signal.signal(number, _first_handler(number, ignored))
                mask = {*mask, *blocked}
            except BaseException:  # the process must not go on as a second parent
                traceback.print_exc()
                os._exit(1)
        return pid
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _begin_rank(parent: int) -> None:
    os.setsid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:
        os._exit(-signal.SIGKILL & 0xFF)  # the parent has died before the call


def _first_handler(number: signal.Signals, ignored: Collection[int]) -> Any:
    if number in ignored:
        return signal.SIG_IGN
    return signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL


def set_place(cwd: str, changed: Mapping[str, str], space_bytes: int) -> None:
    """Give a forked process the folder, the shown command and the environment of a rank.

    Args:
        cwd: working directory.
        changed: variables that differ from those of the parent.
        space_bytes: see `process_record.show_variables`.
    """
    os.chdir(cwd)
    os.environ.pop(process_record.SPACE, None)
    os.environ.update(changed)
    process_record.replace_word(process_record.PARENT_MODULE, process_record.RANK_MODULE)
    process_record.show_variables(changed, space_bytes)
    if (random := sys.modules.get("numpy.random")) is not None:
        random.seed()  # Python's `random` does this itself


def leave(problem: str, code: int) -> NoReturn:
    """Print why this process cannot fork ranks, and end it."""
    # Not `sys.exit`, which waits for threads that an import has started.
    with suppress(OSError):
        print(problem.strip(), file=sys.stderr, flush=True)
    os._exit(code)
