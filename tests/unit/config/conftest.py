"""A config file for each test."""

from pathlib import Path

import pytest
from config_files import Write


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(text: str) -> Path:
        path = tmp_path / "run.yaml"
        path.write_text(text)
        return path

    return write
