"""Fixtures of the tests of images."""

import os
from pathlib import Path

import pytest
from containers import UNKNOWN_UID


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Return a folder for runs of a user that the image does not contain."""
    folder = tmp_path / "runs"
    folder.mkdir()
    os.chown(folder, UNKNOWN_UID, UNKNOWN_UID)
    return folder
