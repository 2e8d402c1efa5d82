"""Regular files and atomic writes, on file systems that others share.

A file that is opened must be regular: a pipe blocks its reader, and a device such as /dev/zero has no end.
"""

import errno
import io
import logging
import os
import secrets
import stat
from pathlib import Path

from hpcdist.host import retry

log = logging.getLogger(__name__)


def open_regular(path: Path) -> io.BufferedReader:
    """Open a regular file for reading.

    Raises OSError; for a pipe, a device or a socket io.UnsupportedOperation, which is an OSError and a ValueError.
    """
    # Without O_NONBLOCK, a pipe that nobody writes to would block; regular files do not know the flag.
    extra = os.O_NONBLOCK | os.O_NOCTTY
    # With an opener, Python closes the descriptor of a folder, and its error has the path.
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | extra))  # noqa: SIM115  # the caller closes
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise io.UnsupportedOperation(errno.EINVAL, "not a regular file", str(path))
    return file


def read_regular(path: Path, max_bytes: int) -> bytes:
    """Return the content of a regular file. Raises ValueError if it is longer than `max_bytes`, and OSError."""
    with open_regular(path) as file:
        data = file.read(max_bytes + 1)
        if len(data) > max_bytes:
            raise ValueError(f"{os.fstat(file.fileno()).st_size} bytes, more than {max_bytes}")
    return data


def write_atomic(
    path: Path, data: bytes | str, *, durable: bool = False, mode: int = 0o666, within_s: float | None = None
) -> None:
    """Replace a file atomically: a reader sees either the old or the new content.

    Args:
        durable: also wait until content and name are on disk (fsync).
        mode: permissions of the new file, reduced by the umask.
        within_s: retry time, as in `retry.retry`.
    """
    raw = data.encode() if isinstance(data, str) else data

    def write() -> None:
        temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            with open(os.open(temporary, flags, mode), "wb") as file:
                file.write(raw)
                if durable:
                    file.flush()
                    os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException as error:
            retry.discard(temporary)
            if isinstance(error, OSError):
                error.filename = str(path)  # a user knows no temporary name
                del error.filename2  # a message would show None
            raise
        if durable:
            fsync_folder(path.parent)

    retry.retry(write, path, within_s=within_s)


def fsync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on disk: a new file survives a crash of the node only then."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def short_path(path: str | Path) -> str:
    """Return a path relative to the current folder if it is below it, else the absolute path."""
    full = os.path.abspath(path)
    try:
        if Path(full).is_relative_to(os.getcwd()):
            return os.path.relpath(full)
    except OSError:  # the current folder was deleted
        pass
    return full
