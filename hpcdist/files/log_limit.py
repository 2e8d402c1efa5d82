"""Size limit of the log file that a process writes as its standard output and error.

Ranks, supervisor and shipper write directly to files in the run folder, without a pipe. Each process checks the size
of its own log once a second, more often while it grows quickly, and at its end. Beyond the limit the middle of the log
is removed; the beginning and the end stay. The output of the second before a check, or before a kill, can exceed the
limit. The file must be open for appending, so that writers continue at its new end. Sparse files are not used, because
some network file systems do not support them. Lines that other processes write during the removal may be lost.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import stat
import threading
from contextlib import suppress
from pathlib import Path

CHECK_EVERY_S = 1.0
#: Time until the next check of a log that was just shortened; later checks return to CHECK_EVERY_S.
_SOON_S = 0.05
_COPY_BYTES = 1 << 20
#: Head and tail keep 1/8 of the limit each, so that the log grows by six times the copied size between copies.
_KEPT = 8


def limit_log(run: Path, max_mb: float) -> bool:
    """Limit the size of standard output if it is a log in a run folder.

    Args:
        run: the run folder; files elsewhere belong to the user and are not changed.
        max_mb: the limit in units of 10^6 bytes; 0 means none.

    Returns:
        Whether standard output is such a log.
    """
    if max_mb <= 0 or not is_log_of(run, 1):
        return False
    max_bytes = int(max_mb * 1e6)
    ending = threading.Event()
    thread = threading.Thread(target=_keep_below, args=(max_bytes, ending), name="log limit", daemon=True)
    thread.start()

    def end() -> None:
        ending.set()
        thread.join()

    atexit.register(end)
    return True


def is_log_of(run: Path, descriptor: int) -> bool:
    """Return whether a descriptor is a regular file below `run`, open for appending."""
    with suppress(OSError):
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        appends = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_APPEND
        is_file = stat.S_ISREG(os.fstat(descriptor).st_mode)
        return bool(appends) and is_file and path.is_relative_to(run.resolve())
    return False


def _keep_below(max_bytes: int, ending: threading.Event) -> None:
    pause_s = CHECK_EVERY_S
    while True:
        is_last = ending.wait(pause_s)
        pause_s = min(CHECK_EVERY_S, 2 * pause_s)
        with suppress(OSError):  # the disk is full or not available: the next check tries again
            if shorten(1, max_bytes):
                pause_s = _SOON_S
        if is_last:
            return


def shorten(descriptor: int, max_bytes: int) -> int:
    """Remove the middle of a file that is open for appending and longer than `max_bytes`.

    The first and the last eighth of `max_bytes` stay, with a note in between.

    Returns:
        The number of removed bytes.
    """
    size = os.fstat(descriptor).st_size
    if size <= max_bytes:
        return 0
    kept = max_bytes // _KEPT
    # A descriptor opened for appending ignores positions, so a second one writes in the middle.
    with open(f"/proc/self/fd/{descriptor}", "r+b", buffering=0) as file:
        begin = size - kept
        note = f"\n[hpcdist: {begin - kept:,} bytes of this log were removed here, see launch.log_max_mb]\n".encode()
        place = os.pwrite(file.fileno(), note, kept) + kept
        # Up to the current end: the file may have grown since.
        while data := os.pread(file.fileno(), _COPY_BYTES, begin):
            place += os.pwrite(file.fileno(), data, place)
            begin += len(data)
        os.ftruncate(file.fileno(), place)
    return begin - place
