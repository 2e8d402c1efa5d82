"""The process of a rank as the kernel shows it, its stop signals, and its fork from a process that has imported torch.
Imports no torch.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

# Command line and environment that the kernel shows of this process, in `ps` and in /proc.
#
# A forked process shows those of its parent. `pkill` and `supervisor/hang_node.py`, among others, identify a rank
# by both, so a forked rank overwrites them in place. This needs no privilege, but neither part may grow: the new
# command line has the length of the old one, and the new variables replace one that was reserved for them.

#: Module of a rank's command.
RANK_MODULE = "hpcdist.rank.worker"
#: Forks the ranks. The names have the same length, because a forked process changes its command line in place.
PARENT_MODULE = "hpcdist.rank.parent"
#: Task of srun that waits for its forked rank, and ends with it.
TASK_MODULE = "hpcdist.rank.forked_task"
#: Exit code of the process that forks ranks if it cannot fork.
CANNOT_FORK = 69
#: A variable of the parent process whose memory the variables of a rank replace.
SPACE = "HPCDIST_ENV_SPACE"
#: Enough for ten variables with a long job id.
SPACE_BYTES = 2048
#: Positions in /proc/self/stat behind the name in parentheses, see proc(5): arg_start, arg_end, env_start, env_end.
_ADDRESSES = slice(45, 49)


def replace_word(old: str, new: str) -> None:
    """Replace a word of the shown command line by one of the same length."""
    assert len(old) == len(new), "the memory of the command line cannot grow"
    start, end, _, _ = _addresses()
    _overwrite(start, end, b"\0" + old.encode() + b"\0", b"\0" + new.encode() + b"\0")


def show_variables(variables: Mapping[str, str], space_bytes: int = SPACE_BYTES) -> None:
    """Add variables to the shown environment, in the place of SPACE; without enough space they are not shown.

    Args:
        space_bytes: length of the value with which SPACE was set at the start of the parent.
    """
    _, _, start, end = _addresses()
    reserved = f"{SPACE}={' ' * space_bytes}".encode()
    shown = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in variables.items())
    rest = len(reserved) - len(shown) - len(SPACE) - 1
    if rest >= 0:
        _overwrite(start, end, reserved, shown + SPACE.encode() + b"=" + b" " * rest)


def _addresses() -> tuple[int, int, int, int]:
    fields = Path("/proc/self/stat").read_bytes().rpartition(b") ")[2].split()
    arg_start, arg_end, env_start, env_end = map(int, fields[_ADDRESSES])
    return arg_start, arg_end, env_start, env_end


def _overwrite(start: int, end: int, old: bytes, new: bytes) -> None:
    """Overwrite the first occurrence of `old` between two addresses; nothing if there is none."""
    found = ctypes.string_at(start, end - start).find(old)
    if found >= 0:
        ctypes.memmove(start + found, new, len(new))


# The stop signals. This module does not import torch, so that signals are handled during torch's import.

log = logging.getLogger(__name__)
#: Slurm sends SIGTERM at a requeue or preemption, and SIGUSR2 before the time limit (`--signal=USR2@…`).
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR2)


class StopFlag:
    """A flag that the stop signals set. The handler does nothing else, because the current step must finish first."""

    def __init__(self) -> None:
        self.is_set = False

    def install(self) -> None:
        """Handle the stop signals, also those that have arrived while they were blocked.

        Ranks of forked tasks begin with blocked stop signals (`forked_task.py`). Handlers that a script has installed
        before are still called.
        """
        if threading.current_thread() is not threading.main_thread():
            log.warning("hpcdist.should_stop is not called from the main thread: stop signals end this script")
            return
        for number in STOP_SIGNALS:
            before = signal.getsignal(number)

            def handle(signum: int, frame: FrameType | None, before: Any = before) -> None:
                self.is_set = True
                if callable(before):
                    before(signum, frame)

            signal.signal(number, handle)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


# Forking a rank from a process that has imported what ranks need: session, signals, shown command and environment.

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
        space_bytes: see `show_variables`.
    """
    os.chdir(cwd)
    os.environ.pop(SPACE, None)
    os.environ.update(changed)
    replace_word(PARENT_MODULE, RANK_MODULE)
    show_variables(changed, space_bytes)
    if (random := sys.modules.get("numpy.random")) is not None:
        random.seed()  # Python's `random` does this itself


def leave(problem: str, code: int) -> NoReturn:
    """Print why this process cannot fork ranks, and end it."""
    # Not `sys.exit`, which waits for threads that an import has started.
    with suppress(OSError):
        print(problem.strip(), file=sys.stderr, flush=True)
    os._exit(code)
