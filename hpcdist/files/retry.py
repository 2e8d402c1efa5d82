"""Retries of file operations that fail for a while, as those of network file systems do.

A command retries for two seconds and then reports the file. A process that works unattended (supervisor, shipper,
rank) wraps its work in `patient`: it retries for minutes, also when permission is denied (an expired Kerberos ticket,
a server that maps root to nobody) or the disk is full.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

log = logging.getLogger(__name__)
T = TypeVar("T")

#: Errors of a file server that is away, or that has replaced a file which was open here.
TRANSIENT = frozenset(
    {
        errno.ESTALE,
        errno.EIO,
        errno.EINTR,
        errno.EAGAIN,
        errno.EBUSY,
        errno.ETIMEDOUT,
        errno.ENOLINK,
        errno.EREMOTEIO,
        errno.ECONNRESET,
        errno.ECONNREFUSED,
        errno.ENOTCONN,
        errno.ESHUTDOWN,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.ENETUNREACH,
        errno.ENETDOWN,
    }
)
DENIED = frozenset({errno.EACCES, errno.EPERM, errno.ENOKEY, errno.EKEYEXPIRED})
FULL = frozenset({errno.ENOSPC, errno.EDQUOT})

#: How long a supervisor or a shipper waits for its files.
UNATTENDED_S = 300.0
#: How long any process waits for room on a disk: someone has to make it.
FULL_S = 10.0
COMMAND_S = 2.0
_FIRST_PAUSE_S = 0.05
_MAX_PAUSE_S = 5.0
_SLICE_S = 0.2


class _Mode:
    """How patient this process is."""

    within_s = COMMAND_S
    unattended = False
    has_given_up = False


@contextmanager
def patient(within_s: float) -> Iterator[None]:
    """Let retries of this process take up to `within_s` while the block lasts."""
    before = _Mode.within_s, _Mode.unattended
    _Mode.within_s, _Mode.unattended, _Mode.has_given_up = within_s, True, False
    try:
        yield
    finally:
        _Mode.within_s, _Mode.unattended = before
        _Mode.has_given_up = False


def give_up() -> None:
    """End retries now and make none until the `patient` block ends. Safe in a signal handler."""
    _Mode.has_given_up = True


def retry(operation: Callable[[], T], path: Path, *, within_s: float | None = None) -> T:
    """Return what `operation` returns, calling it again while it fails with a transient error.

    Args:
        path: named in messages, and in the error where that names no file.
        within_s: how long after the first failure to go on; None takes what `patient` has set.

    Raises the last OSError.
    """
    pause_s, began = _FIRST_PAUSE_S, None
    while True:
        try:
            result = operation()
        except OSError as error:
            now = time.monotonic()
            began = now if began is None else began
            if error.errno is not None and error.filename is None:
                error.filename = str(path)
            left_s = began + _bound_s(error, _Mode.within_s if within_s is None else within_s) - now
            if left_s <= 0 or _Mode.has_given_up:
                raise
            if began == now:
                log.warning("%s: %s; retrying for up to %.0f s", error.filename, error.strerror, left_s)
            _pause(min(pause_s, left_s))
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)
        else:
            if began is not None:
                log.warning("%s is available again after %.1f s", path, time.monotonic() - began)
            return result


def is_away(error: OSError) -> bool:
    """Whether an error, after all retries, is one of a file system that is away rather than full or read-only."""
    return error.errno in TRANSIENT or error.errno in DENIED


def rename(source: Path, target: Path) -> None:
    """Rename with retries; a server that answers with an error may have done it."""
    failed = False

    def try_now() -> None:
        nonlocal failed
        try:
            os.rename(source, target)
        except FileNotFoundError:
            if not (failed and target.exists()):
                raise
        except OSError:
            failed = True
            raise

    retry(try_now, target)


def exists(path: Path) -> bool:
    """Whether there is such a file, with retries: `Path.exists` raises when its server is away."""
    return retry(path.exists, path)


def remove(path: Path) -> None:
    """Remove a file that may be gone already, with retries."""
    retry(lambda: path.unlink(missing_ok=True), path)


def discard(path: Path) -> None:
    """Try once to remove a temporary file after another error, which matters more than this one's."""
    with suppress(OSError):
        path.unlink(missing_ok=True)


def _bound_s(error: OSError, within_s: float) -> float:
    if error.errno in TRANSIENT or (error.errno in DENIED and _Mode.unattended):
        return within_s
    return min(within_s, FULL_S) if error.errno in FULL and _Mode.unattended else 0.0


def _pause(seconds: float) -> None:
    """Sleep, but not long past `give_up`: an event could not be set safely by a signal handler."""
    end = time.monotonic() + seconds
    while not _Mode.has_given_up and (left_s := end - time.monotonic()) > 0:
        time.sleep(min(left_s, _SLICE_S))
