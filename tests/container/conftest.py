"""What the tests of images share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from containers import UNKNOWN_UID


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A folder for runs that belongs to somebody whom the image does not know."""
    folder = tmp_path / "runs"
    folder.mkdir()
    os.chown(folder, UNKNOWN_UID, UNKNOWN_UID)
    return folder
