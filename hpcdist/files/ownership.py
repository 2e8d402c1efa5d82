"""Whose a run folder is, and what in it may be followed.

Several users may share a `runs_dir`. The config of a run chooses a server, its `slurm.json` a job, its code is
executed: a command acts on a run folder only when it belongs to the caller and nobody else may write to it. The user of
a command is its effective user; root is no exception, since a folder of somebody else would act with root's rights.
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
    """Whether a folder, and the symbolic link that leads to it, if it is one, belong to the caller."""
    try:
        return os.lstat(folder).st_uid == os.stat(folder).st_uid == os.geteuid()
    except OSError:
        return False


def require_mine(folder: Path, action: str) -> None:
    """Raise RunFolderError unless the folder of a run or sweep belongs to the caller.

    Args:
        action: what the caller is about to do with it, such as `sync`.
    """
    if not is_mine(folder):
        raise RunFolderError(
            f"run folder {folder} belongs to {_owner(folder)}, and `hpcdist {action}` acts on own runs only, since the"
            f" folder's config and code would act with your rights: ask {_owner(folder)}, or start a run of your own"
        )


def require_trusted(folder: Path, action: str) -> None:
    """Raise RunFolderError unless the folder belongs to the caller and group and others cannot write to it.

    Modes inside the folder count only where group or others may enter it.
    """
    require_mine(folder, action)
    for path in _checked(folder):
        if path.lstat().st_mode & _WRITABLE and not path.is_symlink():
            mode = stat.S_IMODE(path.stat().st_mode)
            raise RunFolderError(
                f"{path} may be written by group or others (mode {mode:04o}), and `hpcdist {action}` would execute"
                f" what they put there: `chmod -R go-w {shlex.quote(str(folder))}`"
            )


def _checked(folder: Path) -> Iterator[Path]:
    yield folder
    if folder.stat().st_mode & _ENTERABLE:
        yield from sorted(folder.iterdir())
        yield from sorted((folder / "attempts").glob("*"))


def _owner(folder: Path) -> str:
    try:
        number = os.lstat(folder).st_uid
        if number == os.geteuid():  # the folder that a link of the caller leads to
            number = os.stat(folder).st_uid
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"user {number}"
    except OSError:
        return "an unknown user"


def stays_inside(path: Path, folder: Path) -> bool:
    """Whether a path below `folder` is still below it when all symbolic links are followed."""
    try:
        return path.resolve(strict=True).is_relative_to(folder.resolve(strict=True))
    except (OSError, RuntimeError):  # a link to nothing, or a loop of links
        return False
