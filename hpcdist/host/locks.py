"""Locks between processes of several hosts that share a folder, also on file systems without flock.

Lustre without `-o flock` and some NFS servers refuse flock. `exclusive` then creates a lock file with O_EXCL, which is
atomic on every network file system. A killed process leaves its lock file behind. Another process removes it if it has
not changed for longer than any work under such a lock takes.
"""

import errno
import fcntl
import logging
import os
import secrets
import socket
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from hpcdist.errors import RunFolderError
from hpcdist.host import retry

log = logging.getLogger(__name__)
NO_FLOCK = frozenset({errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL})
WAIT_S = 30.0
#: A lock file that is unchanged for this time was left by a killed process. Shorter than each wait for a lock.
LEFT_AFTER_S = 8.0
_POLL_S = 0.05
_ALIVE_S = 1.0


@contextmanager
def exclusive(path: Path, *, within_s: float = WAIT_S) -> Iterator[None]:
    """Hold a lock for work that takes milliseconds. Raises RunFolderError if it is not free within `within_s`.

    Args:
        path: the lock file, which is created and stays. Without flock, `path.held` exists while the lock is held.
    """
    until = time.monotonic() + within_s
    file = retry.retry(lambda: open_lock(path), path)
    try:
        while (locked := _try_flock(file)) is False:
            _wait(path, until, within_s)
        if locked:
            yield
            return
    finally:
        # Closing releases the lock; errors concern written data, and this file has none.
        with suppress(OSError):
            file.close()
    held = path.with_name(f"{path.name}.held")
    mine = _make(held, until, within_s)
    try:
        yield
    finally:
        content = retry.retry(lambda: _content(held), held)
        # A process that took this one for dead may have replaced the file.
        if content == mine:
            retry.remove(held)


def open_lock(path: Path, mode: int = 0o666, *, shared: bool = False) -> IO[str]:
    """Open a lock file, which is created if it is missing.

    Raises OSError if it is a link, no regular file, or, unless `shared`, of another user, who could hold it for ever.
    """

    def opener(name: str, flags: int) -> int:
        descriptor = os.open(name, flags | os.O_NOFOLLOW, mode)
        about = os.fstat(descriptor)
        is_allowed_owner = shared or about.st_uid in (os.geteuid(), 0)
        if not stat.S_ISREG(about.st_mode) or not is_allowed_owner:
            os.close(descriptor)
            raise PermissionError(errno.EPERM, "it is not a lock file of this user", name)
        return descriptor

    return open(path, "a+", opener=opener)


@contextmanager
def long_lock(
    path: Path,
    *,
    mode: int = 0o666,
    waiting: str = "",
    shared: bool = False,
    alive: Callable[[], None] | None = None,
) -> Iterator[None]:
    """Hold a lock for work that may take minutes, after waiting for it without a time limit.

    On a file system without flock, a warning is logged and the work is done without a lock.

    Args:
        waiting: logged before a wait.
        shared: whether the file may be another user's.
        alive: called every second during a wait, such as for the heartbeat of a rank.
    """
    with open_lock(path, mode, shared=shared) as file:
        if not lock_now(file):
            if waiting:
                log.info("%s", waiting)
            _lock(file, alive)
        yield


def _lock(file: IO[str], alive: Callable[[], None] | None) -> None:
    """Wait until an open file is locked for this process."""
    if alive is None:
        fcntl.flock(file, fcntl.LOCK_EX)
        return
    while not lock_now(file):
        alive()
        time.sleep(_ALIVE_S)


def lock_now(file: IO[str]) -> bool:
    """Lock an open file until it is closed; return False if another process holds the lock."""
    is_locked = _try_flock(file)
    if is_locked is None:
        log.warning("%s cannot be locked (no flock): do not start another process that writes there", file.name)
        return True
    return is_locked


def _try_flock(file: IO[str]) -> bool | None:
    """Return whether the file is locked now; None if its file system does not support flock."""

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

    return retry.retry(try_now, Path(file.name))


def _make(held: Path, until: float, within_s: float) -> str:
    """Create the lock file `held`, and return its content, which names this process."""
    mine = f"{socket.gethostname()} {os.getpid()} {secrets.token_hex(8)}"

    def create() -> bool:
        try:
            descriptor = os.open(held, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            # The server may have created the file in an earlier try and answered with an error.
            return _content(held) == mine
        try:
            os.write(descriptor, mine.encode())
        finally:
            os.close(descriptor)
        return True

    seen = ""
    since = time.monotonic()
    while not retry.retry(create, held):
        content = retry.retry(lambda: _content(held), held)
        if content is None:  # released meanwhile
            continue
        if content != seen:
            seen = content
            since = time.monotonic()
        if time.monotonic() - since >= LEFT_AFTER_S:
            _remove_left(held, content)
            continue
        _wait(held, until, within_s)
    return mine


def _content(held: Path) -> str | None:
    try:
        return held.read_text()
    except FileNotFoundError:
        return None


def _remove_left(held: Path, content: str) -> None:
    """Remove a lock file that was left behind, but not a new one that has replaced it."""
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
            f"{path} has been locked by another process for more than {within_s:g} s: `fuser -v {path}` shows it on"
            " this host; end it, or remove the file if no process uses it"
        )
    time.sleep(_POLL_S)
