"""The folder that holds the runs: it belongs to one user, and so does the database in it.

Two users in one folder would lock each other out of the sqlite database and of the experiments' folders. A mode that
lets a group write would let each member change what the others' runs execute. Users share results in a tracking server.
Folders of root are accepted besides the user's own: a container image has one that all users may write to, and what
root can change is trusted anyway.
"""

from __future__ import annotations

import os
import pwd
from pathlib import Path

from hpcdist.errors import RunFolderError

DATABASE = "mlflow.db"
_PRIVATE = 0o600
_FIX = (
    "set `runs_dir` to a folder of your own, such as '${oc.env:HOME}/runs', and share results in a tracking server"
    " (`tracking.uri`); a container is started as the folder's owner with `--user $(id -u):$(id -g)`"
)


def claim(runs_dir: Path) -> None:
    """Make the folder of the runs, mode 0700, where it is missing.

    Raises RunFolderError when the folder, or the database in it, belongs to another user; OSError when it cannot be
    made.
    """
    runs_dir.mkdir(mode=0o700, parents=True, exist_ok=True)  # the mode is that of the last folder alone
    require_own(runs_dir, "runs_dir")
    require_own(runs_dir / DATABASE, "the database")


def claim_experiment(folder: Path) -> None:
    """Make the folder of an experiment, mode 0700, where it is missing, and the folder of the runs around it.

    Raises RunFolderError when one of them belongs to another user, OSError when it cannot be made.
    """
    claim(folder.parent)
    folder.mkdir(mode=0o700, exist_ok=True)
    require_own(folder, "the folder of the experiment")


def require_own(path: Path, name: str) -> None:
    """Raise RunFolderError when `path` is there and belongs to neither this user nor root.

    Args:
        name: what the message calls it.
    """
    if (owner := foreign_owner(path)) is not None:
        raise RunFolderError(f"{name} {path} belongs to {owner}, not to {_name_of(os.geteuid())}: {_FIX}")


def foreign_owner(path: Path) -> str | None:
    """Return the name of the owner of `path` when that is neither this user nor root, else None."""
    try:
        owner = path.stat().st_uid
    except OSError:  # missing, or in a folder that this user may not enter: whoever opens it gets the reason
        return None
    return None if owner in (os.geteuid(), 0) else _name_of(owner)


def make_database(path: Path) -> None:
    """Make an empty sqlite database where there is none, and take others' rights from one that is there.

    sqlite gives its journals the mode of the database. Raises RunFolderError when the database belongs to another user,
    OSError when it cannot be made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    require_own(path, "the database")
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, _PRIVATE)
    try:
        found = os.fstat(descriptor)
        if found.st_uid == os.geteuid() and found.st_mode & 0o077:  # made by a release that left it to the umask
            os.fchmod(descriptor, _PRIVATE)
    finally:
        os.close(descriptor)


def _name_of(uid: int) -> str:
    try:
        return f"user {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"user {uid}"
