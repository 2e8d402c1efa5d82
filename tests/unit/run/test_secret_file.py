"""`secrets.json` of a run, readable by its owner only."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest

from hpcdist.errors import RunFolderError
from hpcdist.run import records
from hpcdist.run.folder import RunDir, Status
from hpcdist.run.records import keep, kept

VALUES = {"WANDB_API_KEY": "s3cret", "HPCDIST_PARAMS_X_KEY": "[1, 2]"}


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path / "exp" / "first")


def test_file_is_private_with_any_umask(run: RunDir) -> None:
    before = os.umask(0)
    try:
        keep(run, VALUES)
    finally:
        os.umask(before)
    assert run.secrets.stat().st_mode & 0o777 == 0o600
    assert kept(run) == VALUES
    keep(run, {"A": "b"})
    assert kept(run) == {"A": "b"}
    assert sorted(path.name for path in run.path.iterdir() if path.is_file()) == ["secrets.json", "state.json"]
    keep(run, {})
    assert not run.secrets.exists()
    assert kept(run) == {}


@pytest.mark.parametrize(
    ("status", "stays"),
    [
        ("queued", True),
        ("running", True),
        ("stopped", True),
        ("failed", True),
        ("finished", False),
        ("cancelled", False),
    ],
)
def test_file_is_removed_when_the_run_is_finished_or_cancelled(run: RunDir, status: Status, stays: bool) -> None:
    keep(run, VALUES)
    run.write_state(replace(run.read_state(), status=status))
    assert run.secrets.exists() == stays


def test_removal_is_retried(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(run, VALUES)
    unlink, failures = Path.unlink, [errno.ESTALE]

    def fail(path: Path, *, missing_ok: bool = False) -> None:
        if failures:
            raise OSError(failures.pop(), "Stale file handle")
        unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", fail)
    keep(run, {})
    assert not run.secrets.exists()


def test_failed_write_leaves_no_file(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(records.os, "fsync", fail)
    with pytest.raises(OSError, match="Invalid argument"):
        keep(run, VALUES)
    assert [path.name for path in run.path.iterdir() if path.is_file()] == ["state.json"]


def test_file_readable_by_others_is_an_error(run: RunDir) -> None:
    keep(run, VALUES)
    run.secrets.chmod(0o640)
    with pytest.raises(
        RunFolderError, match=r"secrets\.json has mode 0640, .* replace them, then `chmod 600` the file"
    ):
        kept(run)


def test_damaged_file_and_symbolic_link_are_errors(run: RunDir) -> None:
    keep(run, VALUES)
    for text in ("{", "[1]", '{"A": "b"}', '{"values": {"A": 1}}'):
        run.secrets.write_text(text)
        with pytest.raises(RunFolderError, match=r"is damaged: remove it, and set its variables in the environment"):
            kept(run)
    run.secrets.rename(run.path / "elsewhere")
    run.secrets.symlink_to("elsewhere")
    with pytest.raises(RunFolderError, match=r"secrets\.json cannot be read: Too many levels of symbolic links"):
        kept(run)


@pytest.mark.skipif(os.geteuid() != 0, reason="requires root to change the owner of a file")
def test_file_of_another_user_is_ignored(run: RunDir) -> None:
    keep(run, VALUES)
    os.chown(run.secrets, 65534, 65534)
    assert kept(run) == {}
