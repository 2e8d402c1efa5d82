from pathlib import Path

import pytest
from slurm_recordings import FakeCommands


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeCommands:
    """A folder for fake commands of Slurm, the only one on PATH."""
    monkeypatch.setenv("PATH", str(tmp_path))
    return FakeCommands(tmp_path)
