"""Files that hold passwords or tokens: readable by their owner alone."""

from __future__ import annotations

import os
import shlex
import stat
from pathlib import Path

from hpcdist.errors import UserMistake
from hpcdist.files.atomic import write_atomic
from hpcdist.files.regular_file import read_regular

#: Such a file holds one line or a few; more is a mistake, such as the path of a log.
MAX_BYTES = 64 * 1024


def require_private(path: Path) -> None:
    """Raise UserMistake when group or others may read or write a file, or when it belongs to another user."""
    try:
        about = path.stat()
    except OSError as error:
        raise UserMistake(f"{path} cannot be read: {error.strerror}") from error
    if about.st_uid not in (os.geteuid(), 0):
        raise UserMistake(f"{path} belongs to user {about.st_uid}: use a file of your own with mode 0600")
    if mode := stat.S_IMODE(about.st_mode) & 0o077:
        raise UserMistake(
            f"{path} has mode {stat.S_IMODE(about.st_mode):04o}, so that other users can"
            f" {'read' if mode & 0o044 else 'change'} the credentials in it: `chmod 600 {shlex.quote(str(path))}`"
        )


def read_private(path: Path) -> str:
    """Return the text of a private file without surrounding white space.

    Raises UserMistake when it is missing, empty, too large or not private.
    """
    require_private(path)
    try:
        text = read_regular(path, MAX_BYTES).decode(errors="replace").strip()
    except OSError as error:
        raise UserMistake(f"{path} cannot be read: {error.strerror}") from error
    except ValueError:
        raise UserMistake(f"{path} is larger than 64 KiB: it must hold one secret") from None
    if not text:
        raise UserMistake(f"{path} is empty: it must hold one secret")
    return text


def write_private(path: Path, text: str) -> None:
    """Write a file with mode 0600, atomically; its temporary file has this mode, too."""
    write_atomic(path, text, durable=True, mode=0o600)
