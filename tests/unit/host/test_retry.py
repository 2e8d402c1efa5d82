"""Retries of file operations: errors, durations and log messages."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hpcdist.host import retry as file_retry
from hpcdist.host.retry import exists, give_up, make_folder, patient, rename, retry

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


@pytest.mark.parametrize("number", sorted(file_retry.TRANSIENT), ids=errno.errorcode.get)
def test_transient_error_is_retried_and_logged_once(number: int, caplog: pytest.LogCaptureFixture) -> None:
    assert retry(failing(number, number, number), PATH, within_s=10) == "read"
    first, last = caplog.messages
    assert first == f"{PATH}: {os.strerror(number)}; retrying for up to 10 s"
    assert last.startswith(f"{PATH} is available again after 0.")


@pytest.mark.parametrize("number", [errno.ENOENT, errno.EISDIR, errno.EACCES, errno.ENOSPC], ids=errno.errorcode.get)
def test_permanent_error_is_raised_at_once(number: int, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(OSError, match=os.strerror(number)):
        retry(failing(number), PATH)
    assert caplog.messages == []


def test_last_error_is_raised_with_the_file_name_after_the_retry_time() -> None:
    with pytest.raises(OSError, match="Stale file handle") as caught:
        retry(always(errno.ESTALE), PATH)
    assert caught.value.filename == str(PATH)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT], ids=errno.errorcode.get)
def test_unattended_process_also_retries_denied_permission_and_full_disk(number: int) -> None:
    with patient(10):
        assert retry(failing(number, number), PATH) == "read"
    with pytest.raises(OSError, match=os.strerror(number)):
        retry(failing(number), PATH)


def test_retry_time_on_a_full_disk_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_retry, "FULL_S", 0.01)
    with patient(10_000), pytest.raises(OSError, match="No space left"):
        retry(always(errno.ENOSPC), PATH)


def test_no_retry_with_zero_retry_time() -> None:
    with patient(10_000), pytest.raises(OSError, match="Stale"):
        retry(failing(errno.ESTALE), PATH, within_s=0)


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


def test_rename_succeeds_if_the_file_was_renamed_despite_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


@pytest.mark.parametrize("created", [True, False])
def test_new_folder_may_exist_after_an_error_but_not_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, created: bool
) -> None:
    real = Path.mkdir

    def fail_once(path: Path, mode: int) -> None:
        monkeypatch.setattr(Path, "mkdir", real)
        if created:
            real(path, mode)
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(Path, "mkdir", fail_once)
    make_folder(tmp_path / "a", 0o700)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o700
    with pytest.raises(FileExistsError):
        make_folder(tmp_path / "a")


def test_exists_is_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = failing(errno.ESTALE)
    monkeypatch.setattr(Path, "exists", lambda self: bool(answers()))
    assert exists(PATH)
