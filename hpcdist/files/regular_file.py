"""Opening of files that must be regular: a pipe blocks its reader, and a device such as /dev/zero has no end."""

from __future__ import annotations

import errno
import io
import os
import stat
from pathlib import Path
from typing import BinaryIO


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading.

    Raises:
        io.UnsupportedOperation: it is a pipe, a device or a socket. This is an OSError and a ValueError.
        OSError: it cannot be opened.
    """
    file = open(path, "rb", opener=_open)  # noqa: SIM115  # closed below or by the caller
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise io.UnsupportedOperation(errno.EINVAL, "not a regular file", str(path))
    return file


def _open(path: str, flags: int) -> int:
    # Without O_NONBLOCK, a pipe that nobody writes to would block; regular files do not know the flag.
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY)


def read_regular(path: Path, max_bytes: int) -> bytes:
    """Return the content of a regular file. Raises ValueError if it is longer than `max_bytes`, and OSError."""
    with open_regular(path) as file:
        data = file.read(max_bytes + 1)
        if len(data) > max_bytes:
            raise ValueError(f"{os.fstat(file.fileno()).st_size} bytes, more than {max_bytes}")
    return data
