"""Files that several processes and users share: ownership, formats, locks and retries."""

import errno
import fcntl
import os
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hpcdist.errors import RunFolderError
from hpcdist.host import json_files, locks, ownership
from hpcdist.host import retry as file_retry
from hpcdist.host.retry import give_up, make_folder, patient, rename, retry
from hpcdist.run import folder as runs_dir_module
from hpcdist.run.folder import RunDir
from hpcdist.tracking.uri import choose_uri, sqlite_path

# --- Folders that another user could replace are refused, as sshd does; planted files in a shared folder are not used

NOBODY = 65534


def shared(folder: Path, mode: int = 0o2770, owner: int = 0) -> Path:
    """Make a folder of the group `nogroup`."""
    folder.mkdir(exist_ok=True)
    os.chown(folder, owner, NOBODY)
    folder.chmod(mode)
    return folder


def is_safe(path: Path) -> bool:
    try:
        ownership.require_safe(path)
    except RunFolderError:
        return False
    return True


@pytest.mark.skipif(os.getuid() != 0, reason="only root can act as a second user")
@pytest.mark.parametrize(
    ("mode", "owner", "fix"),
    [
        (0o2770, 0, "chmod go-w"),
        (0o757, 0, "chmod go-w"),
        (0o755, NOBODY, "set `runs_dir`"),
        (0o1777, 0, ""),
        (0o1770, NOBODY, "set `runs_dir`"),
    ],
)
def test_folder_above_that_others_could_replace_is_refused(
    tmp_path: Path, mode: int, owner: int, fix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    above = shared(tmp_path / "group", mode, owner)
    if not fix:
        RunDir.create(above / "runs" / "exp" / "first")
        return
    with pytest.raises(RunFolderError, match=rf"{above} .*: .*{fix}.*set {ownership.TRUSTED_GROUPS}=nogroup") as found:
        RunDir.create(above / "runs" / "exp" / "first")
    assert found.value.exit_code == 2
    run = above / "old" / "exp" / "first"
    run.mkdir(parents=True)
    for require in (ownership.require_mine, ownership.require_trusted):
        with pytest.raises(RunFolderError, match=rf"{above} "):
            require(run, "resume")
    monkeypatch.setenv(ownership.TRUSTED_GROUPS, "staff,nogroup")
    assert is_safe(run) == (mode != 0o757), "all others are no members of a group"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can act as a second user")
def test_folder_in_an_open_one_inherits_its_group_by_setgid_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ownership.TRUSTED_GROUPS, "nogroup")
    inner = shared(shared(tmp_path / "open", 0o3777) / "runs", 0o755, NOBODY)
    assert not is_safe(inner)
    inner.parent.chmod(0o3775)
    assert is_safe(inner)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can act as a second user")
def test_each_link_on_the_way_counts(tmp_path: Path) -> None:
    (tmp_path / "own" / "runs").mkdir(parents=True)
    above = shared(tmp_path / "group", 0o1777)
    (above / "first").symlink_to("../own/runs")
    (tmp_path / "link").symlink_to(above / "first")
    assert is_safe(tmp_path / "link" / "exp")
    os.lchown(above / "first", NOBODY, NOBODY)
    with pytest.raises(RunFolderError, match=rf"{above}/first belongs to nobody"):
        ownership.require_safe(tmp_path / "link" / "exp")
    (above / "first").unlink()
    (above / "first").symlink_to("../own/runs")
    above.chmod(0o770)
    with pytest.raises(RunFolderError, match=rf"others may write to {above} \(mode 0770\)"):
        ownership.require_safe(tmp_path / "link" / ".." / "link")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can act as a second user")
def test_group_of_one_user_is_that_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian and Red Hat give each user a group of the same name, and a umask of 002."""
    tmp_path.chmod(0o775)
    assert is_safe(tmp_path), "the group root has no other members"
    shared(tmp_path, 0o775)
    assert not is_safe(tmp_path)
    monkeypatch.setattr(ownership, "user_of", lambda uid: "nogroup")
    assert is_safe(tmp_path)
    os.chown(tmp_path, 0, 987654)  # without a name, as in a container
    assert not is_safe(tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: 987654)
    assert is_safe(tmp_path)


# --- /runs of the images, mode 1777, in which another user has been first
@pytest.fixture
def planted(tmp_path: Path) -> Path:
    """A folder of runs with files of another user, made by that user."""
    runs = shared(tmp_path / "runs", 0o1777)
    (runs / "mlartifacts").mkdir()
    for name in ("mlflow.db", "mlflow.db-journal", "mlflow.db.lock"):
        (runs / name).symlink_to(tmp_path / "victim")
    for path in runs.iterdir():
        os.lchown(path, NOBODY, NOBODY)
    return runs


@pytest.mark.skipif(os.getuid() != 0, reason="only root can act as a second user")
def test_files_of_others_beside_the_runs_are_not_used(planted: Path, tmp_path: Path) -> None:
    database = sqlite_path(choose_uri({}, "", planted))
    assert database == planted / ".hpcdist-0" / "mlflow.db"
    runs_dir_module.make_database(database)
    assert database.parent.stat().st_mode & 0o7777 == 0o700
    assert not (tmp_path / "victim").exists()
    (tmp_path / "victim").touch()
    with pytest.raises(RunFolderError, match=r"mlflow.db belongs to nobody"):
        runs_dir_module.make_database(planted / "mlflow.db")
    with pytest.raises(RunFolderError, match=r"others may write to .*: `chmod go-w .*`, or use a database"):
        runs_dir_module.make_database(planted / "own.db")
    (tmp_path / "lock").symlink_to(tmp_path / "other")  # in a folder with the sticky bit, the kernel refuses it
    with pytest.raises(OSError, match="symbolic links"), locks.long_lock(tmp_path / "lock"):
        pass
    assert not (tmp_path / "other").exists()
    assert (tmp_path / "victim").stat().st_mode & 0o777 == 0o644


@pytest.mark.skipif(os.getuid() != 0, reason="only root can act as a second user")
@pytest.mark.parametrize("kind", ["folder", "link", "writable"])
def test_own_folder_that_another_user_made_is_refused(planted: Path, tmp_path: Path, kind: str) -> None:
    own = planted / ".hpcdist-0"
    own.symlink_to(tmp_path / "victim") if kind == "link" else own.mkdir()
    if kind == "writable":
        own.chmod(0o777)
    else:
        os.lchown(own, NOBODY, NOBODY)
    with pytest.raises(RunFolderError, match=rf"{own} (belongs to nobody|.*mode 0777)"):
        RunDir.create(planted / "exp" / "first")
    ownership.make_private(tmp_path / "new")
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700


# --- Parsing of untrusted JSON: every failure is a ValueError.
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b'{"a":' * 200_000, "nested too deeply"),
        (b"[-" + b"9" * 400 + b"]", "a number of 401 digits"),
        (b"\xff\xfe", "utf-8"),
        (b"", "Expecting value"),
        (b'{"a": 1} x', "Extra data"),
    ],
)
def test_invalid_or_excessive_json_is_a_value_error(text: bytes, reason: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=reason):
        json_files.parse_json(text)
    (tmp_path / "x.json").write_bytes(text)
    assert json_files.read_json(tmp_path / "x.json") is None


def test_json_files_are_read_up_to_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert json_files.parse_json("9" * 300) == 10**300 - 1
    path = tmp_path / "huge.json"
    with open(path, "wb") as file:
        file.truncate(1 << 40)  # sparse
    with pytest.raises(ValueError, match="1099511627776 bytes, more than 1000"):
        json_files.read_json_value(path, 1000)
    path.write_text('{"a": 1}\n')
    assert (json_files.read_json_value(path, 9), json_files.read_json_lines(path)) == ({"a": 1}, [{"a": 1}])
    monkeypatch.setattr(json_files, "MAX_JSON_BYTES", 8)
    assert json_files.read_json_lines(path) == json_files.read_json_lines(Path("/dev/zero")) == []


# --- the format number
@dataclass
class Sample:
    whole: int
    ratio: float = 1.0


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (2, r"^a\.json was written by a newer hpcdist \(format 2; this version reads up to 1\): upgrade hpcdist$"),
        ("1", r"^a\.json is damaged: its format is '1', not an integer$"),
        (True, r"^a\.json is damaged: its format is 'True', not an integer$"),
    ],
)
def test_unknown_format_is_an_error(number: object, message: str) -> None:
    for content in ({"a": 1}, json_files.stamped({"a": 1})):
        assert json_files.unstamped(content, Path("a.json")) == {"a": 1}
    with pytest.raises(RunFolderError, match=message):
        json_files.unstamped({"format": number}, Path("a.json"))


def test_fill_ignores_new_keys_and_names_invalid_values() -> None:
    assert json_files.fill(Sample, {"whole": 3, "later": "x"}, Path("a.json")) == Sample(whole=3)
    with pytest.raises(RunFolderError, match=r"^a\.json is damaged: it has no whole$"):
        json_files.fill(Sample, {}, Path("a.json"))
    for value in (True, "3", None, -1, 10**400, 1.0):
        with pytest.raises(RunFolderError, match=r"^a\.json is damaged: whole cannot be '"):
            json_files.fill(Sample, {"whole": value}, Path("a.json"))
    for value in (float("nan"), float("inf"), 10**400, "1"):
        with pytest.raises(RunFolderError, match=r"^a\.json is damaged: ratio cannot be '"):
            json_files.fill(Sample, {"whole": 1, "ratio": value}, Path("a.json"))


# --- Locks on file systems with and without flock


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / ".lock"


@pytest.fixture
def held(path: Path) -> Path:
    return path.with_name(".lock.held")


@pytest.fixture
def no_flock(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", fail)


def test_lock_file_is_used_without_flock(path: Path, held: Path, no_flock: None) -> None:
    with locks.exclusive(path):
        assert held.read_text().startswith(f"{socket.gethostname()} {os.getpid()} ")
        message = r"\.lock\.held has been locked by another process for more than 0\.1 s: `fus"
        with pytest.raises(RunFolderError, match=message), locks.exclusive(path, within_s=0.1):
            pytest.fail("held twice")
    assert not held.exists()
    with locks.exclusive(path):
        pass


def test_no_lock_file_is_created_with_flock(path: Path, held: Path) -> None:
    with locks.exclusive(path):
        assert not held.exists()
        message = r"\.lock has been locked by another process for more than 0\.1 s"
        with pytest.raises(RunFolderError, match=message), locks.exclusive(path, within_s=0.1):
            pytest.fail("held twice")


def test_unchanged_lock_file_is_removed(path: Path, held: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "_try_flock", lambda _: None)
    monkeypatch.setattr(locks, "LEFT_AFTER_S", 0.1)
    held.write_text("n2 7 1.0 abcd")
    with locks.exclusive(path):
        assert f" {os.getpid()} " in held.read_text()
    assert [entry.name for entry in held.parent.iterdir()] == [".lock"]


def test_new_lock_file_is_not_removed_in_place_of_an_old_one(held: Path) -> None:
    held.write_text("n3 8 1.0 new")
    locks._remove_left(held, "n2 7 1.0 old")
    assert held.read_text() == "n3 8 1.0 new"
    assert [entry.name for entry in held.parent.iterdir()] == [held.name]


def test_long_lock_without_flock_logs_a_warning(path: Path, no_flock: None, caplog: pytest.LogCaptureFixture) -> None:
    with locks.long_lock(path):
        assert caplog.messages == [
            f"{path} cannot be locked (no flock): do not start another process that writes there"
        ]


def test_a_wait_for_a_long_lock_reports_that_it_lives(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "_ALIVE_S", 0)
    holder = locks.open_lock(path)
    assert locks.lock_now(holder)
    num_calls = 0

    def alive() -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 3:
            holder.close()

    with locks.long_lock(path, alive=alive):
        assert num_calls == 3


def test_other_errors_of_flock_are_raised(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))

    monkeypatch.setattr(fcntl, "flock", fail)
    with pytest.raises(OSError, match="Bad file descriptor"), locks.long_lock(path):
        pytest.fail("held")
    with pytest.raises(OSError, match="Bad file descriptor"), locks.exclusive(path):
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
        locks.open_lock(path)
    assert target.read_text() == "valuable"


# --- Retries of file operations: errors, durations and log messages

PATH = Path("/runs/exp/first/state.json")


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_retry, "_FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(file_retry, "COMMAND_S", 0.05)
    monkeypatch.setattr(file_retry._Mode, "within_s", 0.05)


def failing(*errors: int) -> Callable[[], str]:
    """Return an operation that fails with these errors, one after the other, and then succeeds."""
    remaining: Iterator[int] = iter(errors)

    def operation() -> str:
        if (number := next(remaining, None)) is not None:
            raise OSError(number, os.strerror(number))
        return "read"

    return operation


def always(number: int) -> Callable[[], str]:
    return failing(*[number] * 10_000)


def test_transient_errors_are_retried_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    assert retry(failing(errno.ESTALE, errno.EIO, errno.EINTR), PATH, within_s=10) == "read"
    first, last = caplog.messages
    assert first == f"{PATH}: {os.strerror(errno.ESTALE)}; retrying for up to 10 s"
    assert last.startswith(f"{PATH} is available again after 0.")


def test_unattended_process_retries_denied_access_and_full_disk() -> None:
    errors = (errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT)
    with patient(10):
        assert retry(failing(*errors), PATH) == "read"
    for number in errors:
        with pytest.raises(OSError, match=os.strerror(number)):
            retry(failing(number), PATH)


def test_give_up_ends_current_and_later_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_retry, "_FIRST_PAUSE_S", 1000.0)
    monkeypatch.setattr(file_retry, "_MAX_PAUSE_S", 1000.0)
    with patient(10_000):
        threading.Timer(0.05, give_up).start()
        for _ in range(2):
            with pytest.raises(OSError, match="Stale"):
                retry(always(errno.ESTALE), PATH)
    monkeypatch.setattr(file_retry, "_FIRST_PAUSE_S", 0.001)
    assert retry(failing(errno.ESTALE), PATH) == "read"


def test_rename_that_worked_despite_an_error_succeeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_text("content")
    real = os.rename

    def rename_and_fail(source: Path, target: Path) -> None:
        real(source, target)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "rename", rename_and_fail)
    rename(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b").read_text() == "content"
    with pytest.raises(FileNotFoundError):
        rename(tmp_path / "a", tmp_path / "b")


def test_new_folder_may_exist_after_an_error_but_not_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Path.mkdir
    for folder, is_created in ((tmp_path / "a", True), (tmp_path / "b", False)):

        def fail_once(path: Path, mode: int, is_created: bool = is_created) -> None:
            monkeypatch.setattr(Path, "mkdir", real)
            if is_created:
                real(path, mode)
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

        monkeypatch.setattr(Path, "mkdir", fail_once)
        make_folder(folder, 0o700)
        assert folder.stat().st_mode & 0o777 == 0o700
        with pytest.raises(FileExistsError):
            make_folder(folder)
