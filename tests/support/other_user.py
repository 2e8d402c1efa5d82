"""Another user of this machine, for tests of what such a user cannot do."""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

#: User and group of `nobody`.
NOBODY = 65534


@contextmanager
def folder_for_all_users() -> Iterator[Path]:
    """Make a folder that all users can enter, unlike pytest's temporary folders, whose modes belong to this machine."""
    folder = Path(tempfile.mkdtemp(prefix="hpcdist-users-", dir="/var/tmp"))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def as_other_user(attempt: Callable[[], Any]) -> Any:
    """Return what a function returns in a process of another user; its exceptions become their text.

    Skips the test unless it runs as root.
    """
    if os.geteuid() != 0:
        pytest.skip("only root can be another user")
    reader, writer = os.pipe()
    if (pid := os.fork()) == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        try:
            found = attempt()
        except BaseException as error:
            found = f"{type(error).__name__}: {error}"
        os.write(writer, json.dumps(found).encode())
        os._exit(0)
    os.close(writer)
    os.waitpid(pid, 0)
    with open(reader, "rb") as pipe:
        return json.loads(pipe.read())
