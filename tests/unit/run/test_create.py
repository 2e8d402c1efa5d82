"""Creation of a run folder that fails halfway."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from hpcdist.config.loading import load_config
from hpcdist.run import snapshot
from hpcdist.run.create import create_run


@pytest.mark.parametrize("removable", [True, False])
def test_failed_creation_removes_the_folder_and_reports_the_first_error(
    runs_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, removable: bool
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def deny(path: Path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    config = load_config("ddp_digits", [f"runs_dir={runs_dir}", "name=first"])
    monkeypatch.setattr(snapshot, "take", fail)
    if not removable:
        monkeypatch.setattr(shutil, "rmtree", deny)
    with pytest.raises(OSError, match="No space left"):
        create_run(config, tmp_path)
    assert config.folder.exists() is not removable
