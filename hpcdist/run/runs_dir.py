"""The folder of runs and the database in it, which belong to one user.

Two users of one folder would lock each other out of the sqlite database and of the experiments' folders, and a
group-writable folder would let each member change the code that other members' runs execute. Users share results
through a tracking server. Folders of root are accepted, too: container images have one that all users can write to,
and root can change every file anyway.
"""

from __future__ import annotations

import os
from pathlib import Path

from hpcdist.errors import RunFolderError
from hpcdist.files import ownership, retry

DATABASE = "mlflow.db"
_PRIVATE = 0o600


def claim(runs_dir: Path) -> None:
    """Create the folder of runs, mode 0700, if it is missing.

    Raises:
        RunFolderError: another user owns the folder or the database in it, or could replace them.
        OSError: the folder cannot be created.
    """
    ownership.require_safe(runs_dir)  # nothing is created if it is refused
    # The mode applies to the last folder only.
    retry.retry(lambda: runs_dir.mkdir(mode=0o700, parents=True, exist_ok=True), runs_dir)
    ownership.require_safe(runs_dir)
    if (place := own_place(runs_dir)) != runs_dir:
        ownership.make_private(place)
    ownership.require_safe(place / DATABASE)


def own_place(runs_dir: Path) -> Path:
    """Return the folder of the database, its artifacts and packed environments.

    It is a folder of this user in `runs_dir` if others may write there and could make one of the files first.
    """
    try:
        is_shared = ownership.is_shared(runs_dir.stat())
    except OSError:  # `claim` will make it
        return runs_dir
    return runs_dir / f".hpcdist-{os.geteuid()}" if is_shared else runs_dir


def claim_experiment(folder: Path) -> None:
    """Create the folders of runs and of an experiment, mode 0700, if they are missing.

    Raises:
        RunFolderError: another user owns one of them, or could replace it.
        OSError: one of them cannot be created.
    """
    claim(folder.parent)
    retry.retry(lambda: folder.mkdir(mode=0o700, exist_ok=True), folder)
    ownership.require_safe(folder)


def make_database(path: Path) -> None:
    """Create an empty sqlite database, or restrict an existing one to its owner (mode 0600).

    sqlite creates its journals with the mode of the database.

    Raises:
        RunFolderError: the database belongs to another user, or others may write to its folder.
        OSError: the database cannot be created.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    ownership.require_safe(path)
    if ownership.is_shared(path.parent.stat()):
        raise RunFolderError(
            f"others may write to {path.parent}, so that they can put a journal beside the database {path.name}:"
            f" `chmod go-w {path.parent}`, or use a database in a folder of your own (tracking.uri)"
        )
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, _PRIVATE)
    try:
        found = os.fstat(descriptor)
        if found.st_uid == os.geteuid() and found.st_mode & 0o077:  # created by an older version with the umask's mode
            os.fchmod(descriptor, _PRIVATE)
    finally:
        os.close(descriptor)
