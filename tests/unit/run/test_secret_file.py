"""The secrets of a run, in a file that its owner alone may read."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest

from hpcdist.errors import RunFolderError
from hpcdist.run import secret_file
from hpcdist.run.folder import RunDir, Status
from hpcdist.run.secret_file import keep, kept

VALUES = {"WANDB_API_KEY": "s3cret", "HPCDIST_PARAMS_X_KEY": "[1, 2]"}


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path / "exp" / "first")


def test_what_is_kept_is_the_owners_alone_whatever_the_umask(run: RunDir) -> None:
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
def test_it_stays_as_long_as_the_run_can_go_on_as_it_is(run: RunDir, status: Status, stays: bool) -> None:
    keep(run, VALUES)
    run.write_state(replace(run.read_state(), status=status))
    assert run.secrets.exists() == stays


def test_a_write_that_fails_leaves_nothing_in_the_clear(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(secret_file.os, "fsync", full)
    with pytest.raises(OSError, match="Invalid argument"):
        keep(run, VALUES)
    assert [path.name for path in run.path.iterdir() if path.is_file()] == ["state.json"]


def test_a_file_that_others_may_read_is_refused(run: RunDir) -> None:
    keep(run, VALUES)
    run.secrets.chmod(0o640)
    with pytest.raises(
        RunFolderError, match=r"secrets\.json has mode 0640, .* replace them, then `chmod 600` the file"
    ):
        kept(run)


def test_a_damaged_file_and_a_link(run: RunDir) -> None:
    keep(run, VALUES)
    for text in ("{", "[1]", '{"A": "b"}', '{"values": {"A": 1}}'):
        run.secrets.write_text(text)
        with pytest.raises(RunFolderError, match=r"is damaged: remove it, and set its variables in the environment"):
            kept(run)
    run.secrets.rename(run.path / "elsewhere")
    run.secrets.symlink_to("elsewhere")
    with pytest.raises(RunFolderError, match=r"secrets\.json cannot be read: Too many levels of symbolic links"):
        kept(run)


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a file to another user")
def test_another_users_file_counts_for_nothing(run: RunDir) -> None:
    keep(run, VALUES)
    os.chown(run.secrets, 65534, 65534)
    assert kept(run) == {}
