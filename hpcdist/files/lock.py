"""Locks between processes of several hosts that share a folder, also where its file system has no flock.

Lustre without `-o flock` and some NFS servers refuse flock. `exclusive` then makes a second file that must not exist
yet, which every network file system decides atomically. A process that is killed leaves that file behind: it is
removed when its process is known to be dead, or when it has not changed for longer than the short work takes that
is done under such a lock.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import psutil

from hpcdist.errors import RunFolderError
from hpcdist.files import retry

log = logging.getLogger(__name__)
NO_FLOCK = frozenset({errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL})
WAIT_S = 30.0
#: A lock file of another host that has not changed for so long was left by a process that was killed.
LEFT_AFTER_S = 10.0
_LOOK_EVERY_S = 0.05


@contextmanager
def exclusive(path: Path, *, within_s: float = WAIT_S) -> Iterator[None]:
    """Hold a lock for work that takes milliseconds.

    Args:
        path: made and left behind; `path.held` exists beside it while the lock is held without flock.

    Raises RunFolderError when the lock is not free within `within_s`, OSError when the folder is away.
    """
    until = time.monotonic() + within_s
    file = retry.retry(lambda: open(path, "a"), path)  # noqa: SIM115  # closed below
    try:
        if _flock(file, path, until, within_s):
            yield
            return
    finally:
        # This releases the lock; an error would be about data, and nothing is written to this file.
        with suppress(OSError):
            file.close()
    held = path.with_name(f"{path.name}.held")
    _make(held, until, within_s)
    try:
        yield
    finally:
        retry.remove(held)


def flock_if_possible(file: IO[Any]) -> None:
    """Wait for a lock that is held for long; where the file system has none, warn and go on without."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno not in NO_FLOCK:
            raise
        log.warning("no lock on %s (%s): do not start another process that writes there", file.name, error.strerror)


def _flock(file: IO[str], path: Path, until: float, within_s: float) -> bool:
    """Whether the lock is held now; False where the file system has no flock."""

    def try_now() -> bool | None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno in NO_FLOCK:
                return None
            raise
        return True

    while (done := retry.retry(try_now, path)) is False:
        _wait(path, until, within_s)
    return done is True


def _make(held: Path, until: float, within_s: float) -> None:
    """Make the lock file, after removing one that a killed process has left."""
    mine = f"{socket.gethostname()} {os.getpid()} {psutil.Process().create_time()} {secrets.token_hex(4)}"
    seen, since = "", time.monotonic()
    while not retry.retry(lambda: _create(held, mine), held):
        found = retry.retry(lambda: _content(held), held)
        if found is None:
            continue
        if found != seen:
            seen, since = found, time.monotonic()
        if _is_dead(found) or time.monotonic() - since >= LEFT_AFTER_S:
            _remove_left(held, found)
            continue
        _wait(held, until, within_s)


def _create(held: Path, content: str) -> bool:
    try:
        descriptor = os.open(held, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        # A server that has made the file may have answered with an error before.
        return _content(held) == content
    try:
        os.write(descriptor, content.encode())
    finally:
        os.close(descriptor)
    return True


def _content(held: Path) -> str | None:
    try:
        return held.read_text()
    except FileNotFoundError:
        return None


def _is_dead(content: str) -> bool:
    """Whether a lock file names a process of this host that has ended."""
    host, _, rest = content.partition(" ")
    pid, _, rest = rest.partition(" ")
    started = rest.partition(" ")[0]
    if host != socket.gethostname() or not pid.isdigit():
        return False
    try:
        return str(psutil.Process(int(pid)).create_time()) != started
    except psutil.NoSuchProcess:
        return True


def _remove_left(held: Path, content: str) -> None:
    """Remove a lock file that was left behind, and no other one that has come in its place meanwhile."""
    aside = held.with_name(f".{held.name}.{secrets.token_hex(4)}")
    try:
        os.rename(held, aside)
    except FileNotFoundError:
        return
    if _content(aside) != content:
        with suppress(FileExistsError):
            os.link(aside, held)
    retry.discard(aside)


def _wait(path: Path, until: float, within_s: float) -> None:
    if time.monotonic() >= until:
        raise RunFolderError(
            f"{path} is locked by another process for more than {within_s:g} s: `fuser -v {path}` shows it on this"
            " host; end it, or remove the file when no process uses it"
        )
    time.sleep(_LOOK_EVERY_S)
