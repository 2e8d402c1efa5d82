"""The folder of runs and the database in it, which belong to one user.

Two users of one folder would lock each other out of the sqlite database and of the experiments' folders, and a
group-writable folder would let each member change the code that other members' runs execute. Users share results
through a tracking server. Folders of root are accepted, too: container images have one that all users can write to,
and root can change every file anyway.
"""

from __future__ import annotations

import os
import pwd
from pathlib import Path

from hpcdist.errors import RunFolderError
from hpcdist.files import retry

DATABASE = "mlflow.db"
_PRIVATE = 0o600
_FIX = (
    "set `runs_dir` to a folder of your own, such as '${oc.env:HOME}/runs', and share results through a tracking"
    " server (`tracking.uri`); start a container as the folder's owner with `--user $(id -u):$(id -g)`"
)


def claim(runs_dir: Path) -> None:
    """Create the folder of runs, mode 0700, if it is missing.

    Raises:
        RunFolderError: the folder, or the database in it, belongs to another user.
        OSError: the folder cannot be created.
    """
    # The mode applies to the last folder only.
    retry.retry(lambda: runs_dir.mkdir(mode=0o700, parents=True, exist_ok=True), runs_dir)
    require_own(runs_dir, "runs_dir")
    require_own(runs_dir / DATABASE, "the database")


def claim_experiment(folder: Path) -> None:
    """Create the folders of runs and of an experiment, mode 0700, if they are missing.

    Raises:
        RunFolderError: one of them belongs to another user.
        OSError: one of them cannot be created.
    """
    claim(folder.parent)
    retry.retry(lambda: folder.mkdir(mode=0o700, exist_ok=True), folder)
    require_own(folder, "the folder of the experiment")


def require_own(path: Path, name: str) -> None:
    """Raise RunFolderError if `path` exists and belongs to neither this user nor root.

    Args:
        name: description of the path for the message.
    """
    if (owner := foreign_owner(path)) is not None:
        raise RunFolderError(f"{name} {path} belongs to {owner}, not to {_name_of(os.geteuid())}: {_FIX}")


def foreign_owner(path: Path) -> str | None:
    """Return the owner of `path` if that is neither this user nor root, else None."""
    try:
        owner = path.stat().st_uid
    except OSError:  # missing or not accessible: opening it reports the reason
        return None
    return None if owner in (os.geteuid(), 0) else _name_of(owner)


def make_database(path: Path) -> None:
    """Create an empty sqlite database, or restrict an existing one to its owner (mode 0600).

    sqlite creates its journals with the mode of the database.

    Raises:
        RunFolderError: the database belongs to another user.
        OSError: the database cannot be created.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    require_own(path, "the database")
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, _PRIVATE)
    try:
        found = os.fstat(descriptor)
        if found.st_uid == os.geteuid() and found.st_mode & 0o077:  # created by an older version with the umask's mode
            os.fchmod(descriptor, _PRIVATE)
    finally:
        os.close(descriptor)


def _name_of(uid: int) -> str:
    try:
        return f"user {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"user {uid}"
