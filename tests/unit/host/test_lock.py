"""Locks on file systems with and without flock."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hpcdist.errors import RunFolderError
from hpcdist.host import lock
from hpcdist.host.lock import exclusive, long_lock, open_lock


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / ".lock"


@pytest.fixture
def held(path: Path) -> Path:
    return path.with_name(".lock.held")


@pytest.fixture(params=sorted(lock.NO_FLOCK), ids=errno.errorcode.get)
def no_flock(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError(request.param, os.strerror(request.param))

    monkeypatch.setattr(fcntl, "flock", fail)


def test_lock_file_is_used_without_flock(path: Path, held: Path, no_flock: None) -> None:
    with exclusive(path):
        assert held.read_text().startswith(f"{socket.gethostname()} {os.getpid()} ")
        with (
            pytest.raises(
                RunFolderError, match=r"\.lock\.held has been locked by another process for more than 0\.1 s: `fus"
            ),
            exclusive(path, within_s=0.1),
        ):
            pytest.fail("held twice")
    assert not held.exists()
    with exclusive(path):
        pass


def test_no_lock_file_is_created_with_flock(path: Path, held: Path) -> None:
    with exclusive(path):
        assert not held.exists()
        expected = pytest.raises(
            RunFolderError, match=r"\.lock has been locked by another process for more than 0\.1 s"
        )
        with expected, exclusive(path, within_s=0.1):
            pytest.fail("held twice")


@pytest.mark.processes
def test_lock_file_of_a_killed_process_is_removed_at_once(path: Path, held: Path, no_flock: None) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pass
    held.write_text(f"{socket.gethostname()} {ended.pid} 1.0 abcd")
    with exclusive(path, within_s=0.0):
        assert f" {os.getpid()} " in held.read_text()


@pytest.mark.parametrize("content", ["n2 7 1.0 abcd", ""], ids=["another host", "empty"])
def test_unchanged_lock_file_is_removed(path: Path, held: Path, monkeypatch: pytest.MonkeyPatch, content: str) -> None:
    monkeypatch.setattr(lock, "_try_flock", lambda _: None)
    monkeypatch.setattr(lock, "LEFT_AFTER_S", 0.1)
    held.write_text(content)
    with exclusive(path):
        assert f" {os.getpid()} " in held.read_text()
    assert [entry.name for entry in held.parent.iterdir()] == [".lock"]


def test_new_lock_file_is_not_removed_in_place_of_an_old_one(held: Path) -> None:
    held.write_text("n3 8 1.0 new")
    lock._remove_left(held, "n2 7 1.0 old")
    assert held.read_text() == "n3 8 1.0 new"
    assert [entry.name for entry in held.parent.iterdir()] == [held.name]


def test_long_lock_without_flock_logs_a_warning(path: Path, no_flock: None, caplog: pytest.LogCaptureFixture) -> None:
    with long_lock(path):
        assert caplog.messages == [
            f"{path} cannot be locked (no flock): do not start another process that writes there"
        ]


def test_other_errors_of_flock_are_raised(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))

    monkeypatch.setattr(fcntl, "flock", fail)
    with pytest.raises(OSError, match="Bad file descriptor"), long_lock(path):
        pytest.fail("held")
    with pytest.raises(OSError, match="Bad file descriptor"), exclusive(path):
        pytest.fail("held")


@pytest.mark.parametrize("plant", ["link", "fifo", "file"])
def test_planted_lock_file_is_refused(path: Path, tmp_path: Path, plant: str) -> None:
    """Another user could otherwise have a file of this user truncated, or hold the lock for ever."""
    (target := tmp_path / "mine").write_text("valuable")
    if plant == "link":
        path.symlink_to(target)
    elif plant == "fifo":
        os.mkfifo(path)
    elif os.getuid() != 0:
        pytest.skip("only root can make files of another user")
    else:
        path.touch()
        os.chown(path, 65534, 65534)
    with pytest.raises(OSError, match=r"Too many levels of symbolic links|it is not a lock file of this user"):
        open_lock(path)
    assert target.read_text() == "valuable"
