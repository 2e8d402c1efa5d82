"""The identity of a run folder, by which processes notice that the folder has been replaced by another one.

The file `identity` holds random bytes, which only the owner of the folder can read. The supervisor passes their SHA-256
to its processes. Another user cannot give a folder this file, and links are not followed. Unlike device, inode and
owner, it is the same on all nodes, in containers, in user namespaces and after a move of the folder.
"""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
from collections.abc import Mapping
from pathlib import Path

from hpcdist.errors import RunFolderError
from hpcdist.files import retry
from hpcdist.files.private_file import write_private

VARIABLE = "HPCDIST_FOLDER_IDENTITY"


def identity(folder: Path) -> str:
    """Return the identity of a run folder, which gets one if it has none."""
    if not _read(folder):
        write_private(folder / "identity", secrets.token_hex(32))
    return _read(folder)


def require_same(folder: Path, env: Mapping[str, str]) -> None:
    """Raise RunFolderError if a folder is not the one whose identity is in the environment of this process."""
    if VARIABLE in env and _read(folder) != env[VARIABLE]:
        raise RunFolderError(
            f"the run folder {folder} has been replaced by another one since this run was started: find out who may"
            " write to the folders above it, move the right one back, and continue with `hpcdist resume`"
        )


def _read(folder: Path) -> str:
    """Return the digest of the random bytes; empty if the file is missing, damaged or another user's."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        with open(retry.retry(lambda: os.open(folder / "identity", flags), folder), "rb") as file:
            content = file.read(65)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.ELOOP):
            raise
        return ""
    return hashlib.sha256(content).hexdigest() if len(content) == 64 else ""
