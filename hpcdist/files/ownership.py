"""Ownership and permission checks of run folders.

Several users may share a `runs_dir`. A run's config selects a server, its `slurm.json` a job, and its code is executed.
Therefore commands act only on run folders that belong to the effective user and that no other user can write to. Root
is no exception: the code of another user's run would execute with root's rights.
"""

from __future__ import annotations

import os
import pwd
import shlex
import stat
from collections.abc import Iterator
from pathlib import Path

from hpcdist.errors import RunFolderError

_WRITABLE = stat.S_IWGRP | stat.S_IWOTH
_ENTERABLE = stat.S_IXGRP | stat.S_IXOTH


def is_mine(folder: Path) -> bool:
    """Return whether a folder belongs to the effective user, and so does the symbolic link if `folder` is one."""
    try:
        return os.lstat(folder).st_uid == os.stat(folder).st_uid == os.geteuid()
    except OSError:
        return False


def require_mine(folder: Path, action: str) -> None:
    """Raise RunFolderError unless the folder of a run or sweep belongs to the effective user.

    Args:
        action: name of the command for the message, such as `sync`.
    """
    if not is_mine(folder):
        raise RunFolderError(
            f"run folder {folder} belongs to {_owner(folder)}, and `hpcdist {action}` acts only on your own runs,"
            f" because a run's config and code act with your rights: ask {_owner(folder)}, or start a new run"
        )


def require_trusted(folder: Path, action: str) -> None:
    """Raise RunFolderError unless the folder belongs to the effective user, who alone can write to it.

    Modes of files inside the folder are checked only if group or others can enter it.
    """
    require_mine(folder, action)
    for path in _checked(folder):
        if path.lstat().st_mode & _WRITABLE and not path.is_symlink():
            mode = stat.S_IMODE(path.stat().st_mode)
            raise RunFolderError(
                f"{path} is writable by group or others (mode {mode:04o}), and `hpcdist {action}` would execute"
                f" their code: `chmod -R go-w {shlex.quote(str(folder))}`"
            )


def _checked(folder: Path) -> Iterator[Path]:
    yield folder
    if folder.stat().st_mode & _ENTERABLE:
        yield from sorted(folder.iterdir())
        yield from sorted((folder / "attempts").glob("*"))


def _owner(folder: Path) -> str:
    try:
        number = os.lstat(folder).st_uid
        if number == os.geteuid():  # a link of this user to a folder of another one
            number = os.stat(folder).st_uid
        return user_of(number)
    except OSError:
        return "an unknown user"


def user_of(uid: int) -> str:
    """Return the name of a user, or such as `user 1234` if the id has no name, as in some containers."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def stays_inside(path: Path, folder: Path) -> bool:
    """Return whether a path below `folder` stays below it when all symbolic links are resolved."""
    try:
        return path.resolve(strict=True).is_relative_to(folder.resolve(strict=True))
    except (OSError, RuntimeError):  # a dangling link, or a loop of links
        return False
