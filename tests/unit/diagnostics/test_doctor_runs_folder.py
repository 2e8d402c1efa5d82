"""Tests of the section of `hpcdist doctor` about the folder of runs."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from hpcdist.checks import storage as folder
from hpcdist.checks.storage import GIB, folder_checks
from hpcdist.host.machine import Check


def levels(checks: Sequence[Check]) -> dict[str, str]:
    assert len({check.name for check in checks}) == len(checks), checks
    return {check.name: check.level for check in checks}


@pytest.fixture
def fast_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the measurement of the speed, which writes for two seconds."""
    monkeypatch.setattr(folder.storage, "write_speed", lambda *_: 2.0**30)


@pytest.mark.processes
def test_local_folder_is_ok(tmp_path: Path) -> None:
    found = folder_checks(tmp_path / "runs")
    assert levels(found) == dict.fromkeys(("runs", "file system", "space", "files", "writing"), "ok") | {
        "writing": found[3].level
    }
    assert found[0].text == f"{tmp_path}/runs (the first run creates it)"
    assert list(tmp_path.iterdir()) == [], "the check creates nothing"


def test_folder_without_write_permission_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder.os, "access", lambda path, mode: False)  # root may write everywhere
    (check,) = folder_checks(tmp_path)
    me = os.getuid()
    assert check.level == "failure"
    assert check.text == (
        f"{tmp_path} belongs to {tmp_path.owner()} ({me}) and cannot be written by user {me}: a run would fail"
    )
    assert check.fix == "set another folder by --runs-dir or HPCDIST_RUNS_DIR"
    (check,) = folder_checks(tmp_path, in_container=True)
    assert check.fix.startswith("start the container with --user $(id -u):$(id -g); or set another")


@pytest.mark.usefixtures("fast_disk")
@pytest.mark.processes
def test_folder_or_database_of_others_is_reported(tmp_path: Path) -> None:
    (tmp_path / "mlflow.db").touch(mode=0o600)
    os.chown(tmp_path, 0, 65534)
    tmp_path.chmod(0o775)
    (tmp_path / "mlflow.db").chmod(0o640)
    (check,) = (check for check in folder_checks(tmp_path) if check.name == "owner")
    assert check.level == "failure"
    assert f"others may write to {tmp_path} (mode 0775)" in check.text
    assert check.fix.startswith(f"`chmod go-w {tmp_path}`")
    tmp_path.chmod(0o755)
    database_check = folder_checks(tmp_path)[1]
    assert (database_check.name, database_check.level) == ("database", "warning")
    assert database_check.fix == f"chmod 600 {tmp_path}/mlflow.db"
    os.chown(tmp_path / "mlflow.db", 1234, 0)
    (check,) = (check for check in folder_checks(tmp_path) if check.name == "owner")
    assert (check.level, check.text) == ("failure", f"{tmp_path}/mlflow.db belongs to user 1234, not to root")
    assert "share results through a tracking server" in check.fix


@pytest.mark.usefixtures("fast_disk")
@pytest.mark.processes
def test_folder_in_the_container_layer_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder.storage, "mount_of", lambda path: ("overlay", "overlay"))
    monkeypatch.setattr(folder, "is_in_container_layer", lambda place: True)
    check = folder_checks(tmp_path, in_container=True)[1]
    assert (check.level, check.fix) == ("warning", f"mount a folder: -v $PWD/runs:{tmp_path}")
    assert folder_checks(tmp_path)[1].level == "ok"
    monkeypatch.setattr(folder, "is_in_container_layer", lambda place: False)
    assert folder_checks(tmp_path, in_container=True)[1].level == "ok"


def test_read_only_file_system_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path, num_bytes: int, limit_s: float) -> float:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(folder.storage, "write_speed", fail)
    found = folder_checks(tmp_path)
    assert levels(found)["writing"] == "failure"
    assert "could not be written (Read-only file system)" in found[-1].text


@pytest.mark.usefixtures("fast_disk")
@pytest.mark.processes
@pytest.mark.parametrize(
    ("space", "level", "text"),
    [
        ({"free": 0, "total": 100 * GIB}, "failure", "0.0 GiB free of 100.0: a run would fail"),
        ({"free": GIB, "total": 100 * GIB}, "warning", "checkpoints may not fit"),
        ({"free": 50 * GIB, "total": 100 * GIB, "free_files": 12}, "warning", "only 12 more files (inodes)"),
        ({"free": 50 * GIB, "total": 100 * GIB, "free_files": 10**6}, "ok", "50.0 GiB free of 100.0"),
    ],
)
def test_little_space_is_reported(
    space: dict[str, int], level: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder.storage, "space", lambda path: space)
    check = next(check for check in folder_checks(tmp_path) if check.name == "space")
    assert (check.level, text in check.text) == (level, True)


@pytest.mark.processes
@pytest.mark.usefixtures("fast_disk")
def test_file_system_without_posix_guarantees_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(folder.storage, "rename_problem", lambda path: "a reader saw no file")
        patch.setattr(folder.storage, "exclusive_problem", lambda path: "the same file was created twice")
        found = levels(folder_checks(tmp_path))
    assert found["replacing"] == found["making once"] == "failure"
    monkeypatch.setattr(folder.storage, "lock_problem", lambda path: "No locks available")
    assert levels(folder_checks(tmp_path))["locks"] == "warning"


@pytest.mark.processes
@pytest.mark.usefixtures("fast_disk")
@pytest.mark.parametrize(("offset_s", "text"), [(40.0, "40 s ahead of this"), (-40.0, "40 s behind this")])
def test_clock_of_the_file_server_is_compared(
    offset_s: float, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder, "clock_offset", lambda path: offset_s)
    clock = folder_checks(tmp_path)[-1]
    assert (clock.name, clock.level, text in clock.text) == ("clock", "warning", True)


@pytest.mark.processes
def test_slow_file_system_is_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder.storage, "write_speed", lambda *_: 2.0**20)
    speed = folder_checks(tmp_path)[3]
    assert (speed.level, "1 MiB/s" in speed.text) == ("note", True)


@pytest.mark.usefixtures("fast_disk")
@pytest.mark.processes
@pytest.mark.parametrize(
    ("kind", "on_cluster", "level", "text"),
    [
        ("nfs4", True, "ok", "nfs4 (server:/home): other machines may see it"),
        ("", True, "ok", "of unknown type (server:/home): unknown whether other machines see it"),
        ("ext4", False, "ok", "of this machine"),
        ("ext4", True, "warning", "Slurm's nodes must see it"),
        ("tmpfs", True, "warning", "each machine has its own: Slurm's nodes must see it"),
    ],
)
def test_local_file_system_on_a_cluster_is_a_warning(
    kind: str, on_cluster: bool, level: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder.storage, "mount_of", lambda path: (kind, "server:/home"))
    check = folder_checks(tmp_path, on_cluster=on_cluster)[1]
    assert (check.level, text in check.text) == (level, True), check
