"""A limit on the size of the log that a process writes as its standard output and error.

Ranks, supervisor and shipper write into files of the run folder, without a pipe in between. Each of them looks at the
size of its own file once a second. Beyond the limit the middle of the file is taken out: the head says how it began,
the tail what happened last. This needs a file that is open for appending, so that whoever writes goes on at its new
end, and nothing of the file system: holes in files, which some network file systems lack, are not used. Lines that
other processes write to the file in that moment may be lost.
"""

from __future__ import annotations

import fcntl
import os
import stat
import threading
from contextlib import suppress
from pathlib import Path

LOOK_EVERY_S = 1.0
_COPY_BYTES = 1 << 20
#: This part of the limit is kept of the head and of the tail each: a log grows by six times as much as is copied.
_KEPT = 8


def limit_log(run: Path, max_mb: float) -> bool:
    """Keep standard output, where it is a log in a run's folder, below a size; return whether it is one.

    Args:
        run: the run folder; files elsewhere belong to the user and are left alone.
        max_mb: the limit in units of 10^6 bytes; 0 means none.
    """
    if max_mb <= 0 or not is_log_of(run, 1):
        return False
    max_bytes = int(max_mb * 1e6)
    threading.Thread(target=_keep_below, args=(max_bytes,), name="log limit", daemon=True).start()
    return True


def is_log_of(run: Path, descriptor: int) -> bool:
    """Return whether a descriptor is a regular file below `run`, open for appending."""
    with suppress(OSError):
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        appends = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_APPEND
        is_file = stat.S_ISREG(os.fstat(descriptor).st_mode)
        return bool(appends) and is_file and path.is_relative_to(run.resolve())
    return False


def _keep_below(max_bytes: int) -> None:
    waiting = threading.Event()
    while not waiting.wait(LOOK_EVERY_S):
        with suppress(OSError):  # a disk that is away or full: the next look tries again
            shorten(1, max_bytes)


def shorten(descriptor: int, max_bytes: int) -> int:
    """Take the middle out of a file of more than `max_bytes` that is open for appending; return how much.

    What is left is an eighth of `max_bytes` from its head, a line that says so, and as much from its tail.
    """
    size = os.fstat(descriptor).st_size
    if size <= max_bytes:
        return 0
    kept = max_bytes // _KEPT
    # Appending ignores every position: a second descriptor of the same file writes where it is told to.
    with open(f"/proc/self/fd/{descriptor}", "r+b", buffering=0) as file:
        begin = size - kept
        note = f"\n[hpcdist: {begin - kept:,} bytes of this log were removed here, see launch.log_max_mb]\n".encode()
        place = os.pwrite(file.fileno(), note, kept) + kept
        # To the end as it is by then: meanwhile the file has grown.
        while data := os.pread(file.fileno(), _COPY_BYTES, begin):
            place += os.pwrite(file.fileno(), data, place)
            begin += len(data)
        os.ftruncate(file.fileno(), place)
    return begin - place
