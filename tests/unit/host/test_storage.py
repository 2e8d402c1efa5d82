"""Tests of the facts and tests of a file system."""

import errno
import fcntl
import os
import threading
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from hpcdist.host import storage


def set_mounts(monkeypatch: pytest.MonkeyPatch, *mounts: tuple[str, str, str]) -> None:
    """Set mount point, type and source of all mounts in their order."""
    found = [SimpleNamespace(mountpoint=point, fstype=kind, device=source) for point, kind, source in mounts]
    monkeypatch.setattr(psutil, "disk_partitions", lambda **_: found)


def test_mount_is_the_last_one_on_the_nearest_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**_: bool) -> None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "/proc/self/mounts")

    assert storage.mount_of(Path("/proc/self"))[0] == "proc"
    root, home = ("/", "ext4", "/dev/sda1"), ("/home", "nfs4", "server:/my home")
    set_mounts(monkeypatch, root, home, ("/over", "ext4", "/dev/sdc"), ("/over", "beegfs", "beegfs_nodev"))
    found = {path: storage.mount_of(Path(path)) for path in ("/home/ada/runs", "/homeless/runs", "/over")}
    assert found == {"/home/ada/runs": home[1:], "/homeless/runs": root[1:], "/over": ("beegfs", "beegfs_nodev")}
    monkeypatch.setattr(psutil, "disk_partitions", fail)
    assert storage.mount_of(Path("/srv/runs")) == ("", "")


@pytest.mark.processes
def test_local_folder_has_no_problems(tmp_path: Path) -> None:
    assert storage.lock_problem(tmp_path) == ""
    assert storage.write_speed(tmp_path / "not" / "there", 2**20 + 5, 5.0) > 0
    assert list(tmp_path.iterdir()) == [], "temporary files are removed"


@pytest.mark.processes
def test_wrong_and_missing_locks_are_problems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(file: object, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", lambda file, how: None)
    assert storage.lock_problem(tmp_path) == "two processes got the same lock"
    monkeypatch.setattr(fcntl, "flock", fail)
    assert storage.lock_problem(tmp_path) == "No locks available"


def test_full_file_system_raises_and_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space left on device"):
        storage.write_speed(tmp_path, 2**20, 5.0)
    assert list(tmp_path.iterdir()) == []


def test_file_is_visible_with_its_content(tmp_path: Path) -> None:
    path = tmp_path / "witness"
    assert not storage.sees(path, "token", 0.0)
    path.write_text("another token")
    assert not storage.sees(path, "token", 0.0)
    path.write_text("token")
    assert storage.sees(path, "token", 0.0)


def test_missing_folder_has_the_space_of_its_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = storage.describe(tmp_path / "a" / "b", 5.0)
    assert found["total"] >= found["free"] > 0
    assert found["kind"]
    answered = threading.Event()
    monkeypatch.setattr(storage, "space", lambda path: answered.wait() and {})
    found = storage.describe(tmp_path, 0.01)
    answered.set()
    assert (found["error"], found["folder"]) == ("no answer in 0.01 s", str(tmp_path))
