"""Retries of file operations that fail temporarily, as on network file systems.

A command retries for two seconds and then reports the file. Unattended processes (supervisor, shipper, ranks) wrap
their work in `patient` and retry for minutes, also if permission is denied (an expired Kerberos ticket, a server with
root squashing) or the disk is full.
"""

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

#: Errors of an unavailable file server, or of one that has replaced an open file.
TRANSIENT = frozenset(
    {errno.ESTALE, errno.EIO, errno.EINTR, errno.EAGAIN, errno.EBUSY, errno.ETIMEDOUT, errno.ENOLINK, errno.EREMOTEIO}
    | {errno.ECONNRESET, errno.ECONNREFUSED, errno.ENOTCONN, errno.ESHUTDOWN, errno.EHOSTDOWN, errno.EHOSTUNREACH}
    | {errno.ENETUNREACH, errno.ENETDOWN}
)
DENIED = frozenset({errno.EACCES, errno.EPERM, errno.ENOKEY, errno.EKEYEXPIRED})
FULL = frozenset({errno.ENOSPC, errno.EDQUOT})

#: Retry time of supervisor and shipper.
UNATTENDED_S = 300.0
#: Retry time of unattended processes on a full disk, which a user has to clean up.
FULL_S = 10.0
COMMAND_S = 2.0
_FIRST_PAUSE_S = 0.05
_MAX_PAUSE_S = 5.0
#: Time after which a pause notices `give_up`: a signal handler cannot set an event safely.
_SLICE_S = 0.2


class _Mode:
    """The settings of this process, which `patient` and `give_up` change."""

    within_s = COMMAND_S
    unattended = False
    has_given_up = False


@contextmanager
def patient(within_s: float) -> Iterator[None]:
    """Extend the retries of this process to `within_s` inside the block."""
    before = _Mode.within_s, _Mode.unattended
    _Mode.within_s, _Mode.unattended, _Mode.has_given_up = within_s, True, False
    try:
        yield
    finally:
        _Mode.within_s, _Mode.unattended = before
        _Mode.has_given_up = False


def give_up() -> None:
    """End current retries and start none until the `patient` block ends. Safe in a signal handler."""
    _Mode.has_given_up = True


def retry(operation: Callable[[], T], path: Path, *, within_s: float | None = None) -> T:
    """Call `operation` until it does not fail with a transient error, and return its result. Raises the last error.

    Args:
        path: file name for log messages, and for errors without one.
        within_s: retry time from the first failure; None means the time that `patient` has set.
    """
    pause_s = _FIRST_PAUSE_S
    began = None
    while True:
        try:
            result = operation()
        except OSError as error:
            now = time.monotonic()
            if began is None:
                began = now
            if error.errno is not None and error.filename is None:
                error.filename = str(path)
            limit_s = _Mode.within_s if within_s is None else within_s
            left_s = began + _retry_time_s(error, limit_s) - now
            if left_s <= 0 or _Mode.has_given_up:
                raise
            if began == now:
                log.warning("%s: %s; retrying for up to %.0f s", error.filename, error.strerror, left_s)
            _pause_until(now + min(pause_s, left_s))
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)
        else:
            if began is not None:
                log.warning("%s is available again after %.1f s", path, time.monotonic() - began)
            return result


def _retry_time_s(error: OSError, limit_s: float) -> float:
    """Return how long an operation is retried that fails with this error: 0 if a retry is useless."""
    if error.errno in TRANSIENT or (_Mode.unattended and error.errno in DENIED):
        return limit_s
    if _Mode.unattended and error.errno in FULL:
        return min(limit_s, FULL_S)
    return 0.0


def _pause_until(end: float) -> None:
    """Sleep until a time of `time.monotonic`, or until `give_up` is called."""
    while not _Mode.has_given_up:
        rest_s = end - time.monotonic()
        if rest_s <= 0:
            return
        time.sleep(min(rest_s, _SLICE_S))


def is_away(error: OSError) -> bool:
    """Return whether an error means that the file system is unavailable, rather than full or read-only."""
    return error.errno in TRANSIENT or error.errno in DENIED


def rename(source: Path, target: Path) -> None:
    """Rename a file or folder, with retries; it replaces an existing file."""
    _retry_change(lambda: os.rename(source, target), target, FileNotFoundError, target.exists)


def make_folder(path: Path, mode: int = 0o777) -> None:
    """Create a folder, with retries. Raises FileExistsError if it contains something or existed before."""
    _retry_change(lambda: path.mkdir(mode), path, FileExistsError, lambda: not any(path.iterdir()))


def _retry_change(change: Callable[[], None], path: Path, again: type[OSError], is_made: Callable[[], bool]) -> None:
    """Retry a change that a server may have made although it answered with an error; a repetition then fails.

    Args:
        again: the error of the repetition.
        is_made: whether the change is done, in which case that error is ignored.
    """
    failed = False

    def try_now() -> None:
        nonlocal failed
        try:
            change()
        except again:
            if not (failed and is_made()):
                raise
        except OSError:
            failed = True
            raise

    retry(try_now, path)


def exists(path: Path) -> bool:
    """Return whether a file exists, with retries: `Path.exists` raises if the server is unavailable."""
    return retry(path.exists, path)


def remove(path: Path) -> None:
    """Remove a file, with retries, unless it is already missing."""
    retry(lambda: path.unlink(missing_ok=True), path)


def discard(path: Path) -> None:
    """Try once to remove a temporary file after another error; ignore errors of the removal."""
    with suppress(OSError):
        path.unlink(missing_ok=True)
