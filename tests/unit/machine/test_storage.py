"""What is found out of a file system by trying."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from hpcdist.machine import storage

MOUNTS = """\
22 1 0:20 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
23 22 0:21 / /home rw shared:2 master:3 - nfs4 server:/my\\040home rw,vers=4.2
"""


def test_the_mount_of_a_path_and_where_it_comes_from() -> None:
    assert storage.mount_of(Path("/home/ada/runs"), MOUNTS) == ("nfs4", "server:/my home")
    assert storage.mount_of(Path("/srv/runs"), MOUNTS) == ("ext4", "/dev/sda1")
    assert storage.mount_of(Path("/srv/runs"), "") == ("", "")


@pytest.mark.processes
def test_a_folder_that_is_good_for_runs(tmp_path: Path) -> None:
    assert storage.lock_problem(tmp_path) == ""
    assert storage.rename_problem(tmp_path) == ""
    assert storage.exclusive_problem(tmp_path) == ""
    assert storage.write_speed(tmp_path / "not" / "there", 2**20 + 5, 5.0) > 0
    assert list(tmp_path.iterdir()) == [], "nothing is left"


@pytest.mark.processes
def test_a_lock_that_keeps_nobody_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage.fcntl, "flock", lambda file, how: None)
    assert storage.lock_problem(tmp_path) == "two processes got the same lock"


def test_no_locks_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(file: object, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(storage.fcntl, "flock", refuse)
    assert storage.lock_problem(tmp_path) == "No locks available"


def test_a_replacement_that_leaves_a_gap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = threading.Event()

    def replace(source: Path, target: Path) -> None:
        target.unlink()
        seen.wait(0.05)
        source.rename(target)

    monkeypatch.setattr(storage.os, "replace", replace)
    monkeypatch.setattr(storage, "_RENAMES", 5)
    assert storage.rename_problem(tmp_path) == "a reader saw no file (No such file or directory)"


def test_a_file_that_is_made_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage.os, "O_EXCL", 0)
    assert storage.exclusive_problem(tmp_path) == "the same file was created twice"


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(storage.os, "fsync", full)
    with pytest.raises(OSError, match="No space left on device"):
        storage.write_speed(tmp_path, 2**20, 5.0)
    assert list(tmp_path.iterdir()) == []


def test_a_file_of_another_machine_is_seen_with_its_content(tmp_path: Path) -> None:
    path = tmp_path / "witness"
    assert not storage.sees(path, "token", 0.0)
    path.write_text("of another run")
    assert not storage.sees(path, "token", 0.0)
    path.write_text("token")
    assert storage.sees(path, "token", 0.0)


def test_a_dead_file_system_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dead = threading.Event()
    monkeypatch.setattr(storage, "space", lambda path: dead.wait() and {})
    found = storage.describe(tmp_path, 0.01)
    dead.set()
    assert found["error"] == "no answer in 0.01 s"
    assert found["folder"] == str(tmp_path)


def test_space_of_a_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    found = storage.describe(tmp_path / "a" / "b", 5.0)
    assert found["total"] >= found["free"] > 0
    assert found["kind"]
