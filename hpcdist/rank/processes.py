"""The process of a rank: its name, exit code, stop signals and fork. Imports no torch, because that takes a second."""

import ctypes
import logging
import os
import re
import signal
import threading
import traceback
from collections.abc import Callable, Collection
from types import FrameType
from typing import Any

#: Module of a rank's command.
RANK_MODULE = "hpcdist.rank.worker"
#: Forks the ranks, which have its command line and its first environment in /proc.
PARENT_MODULE = "hpcdist.rank.parent"
#: Begins the lines in which it reports to the supervisor.
MARK = "hpcdist-parent "
#: Time for the processes of an attempt to end after SIGKILL.
KILL_S = 10.0
#: How long a rank retries to access its files, in seconds. The other ranks wait for it meanwhile.
FILE_TIMEOUT_S = 120.0
#: Time by which the limit of a collective exceeds `launch.hang_s`, in seconds: the supervisor finds the hung rank
#: before the collective fails on the ranks that wait for it.
COLLECTIVE_MARGIN_S = 60
#: Options of prctl(2): the signal at the death of the parent process, and the name of the process.
_PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15
_PLACE = re.compile(r"rank-(\d+)/(\d+)")


def shown_place(name: str) -> tuple[int, int] | None:
    """Return rank and attempt in the name of a forked rank's process; None for another name."""
    match = _PLACE.fullmatch(name)
    if match is None:
        return None
    return int(match[1]), int(match[2])


log = logging.getLogger(__name__)
#: Slurm sends SIGTERM at a requeue, preemption or cancellation, and SIGUSR2 before the time limit (`--signal=USR2@…`).
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR2)


class StopFlag:
    """A flag that the stop signals set. The handler ends nothing, because the current step must finish first."""

    def __init__(self) -> None:
        self.is_raised = False

    def install(self) -> None:
        """Handle the stop signals, also those that were blocked until now. Handlers of a script are still called."""
        if threading.current_thread() is not threading.main_thread():
            log.warning("hpcdist.should_stop is not called from the main thread: stop signals end this script")
            return
        for number in STOP_SIGNALS:
            before = signal.getsignal(number)

            def handle(signum: int, frame: FrameType | None, before: Any = before) -> None:
                self.is_raised = True
                if callable(before):
                    before(signum, frame)

            signal.signal(number, handle)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def _reset_handlers(ignored: Collection[int]) -> None:
    """Give the signals that the parent ignores Python's own handlers, except for those to be ignored."""
    for number in IGNORED:
        if number in ignored:
            signal.signal(number, signal.SIG_IGN)
        elif number == signal.SIGINT:
            signal.signal(number, signal.default_int_handler)
        else:
            signal.signal(number, signal.SIG_DFL)


#: Signals that end a process or a job. The parent of ranks ignores them: Slurm sends SIGTERM to all processes of a job.
IGNORED = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


def fork_rank(become: Callable[[], None], ignored: Collection[int] = (), blocked: Collection[int] = ()) -> int:
    """Fork a rank, which leads a session of its own and is killed at the death of this process.

    Args:
        become: called in the rank, which receives no signals until it has returned.
        ignored: signals that the rank then ignores until it installs handlers of its own.
        blocked: signals that then wait until the rank unblocks them.

    Returns the id of the rank's process, and 0 in the rank. Raises OSError if no process can be created.
    """
    parent = os.getpid()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        pid = os.fork()
        if pid == 0:
            try:
                os.setsid()
                ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
                if os.getppid() != parent:
                    os._exit(-signal.SIGKILL & 0xFF)  # the parent has died before the call
                become()
                _reset_handlers(ignored)
                mask = {*mask, *blocked}
            except BaseException:  # the process must not go on as a second parent
                traceback.print_exc()
                os._exit(1)
        return pid
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
