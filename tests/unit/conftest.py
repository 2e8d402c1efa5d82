import os
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
from slurm_recordings import FakeCommands

from hpcdist.containers.inherited import FOR_LIBRARIES


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeCommands:
    """A folder for fake commands of Slurm, the only one on PATH."""
    monkeypatch.setenv("PATH", str(tmp_path))
    return FakeCommands(tmp_path)


@pytest.fixture
def nothing_to_inherit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the proxies, certificates and caches of this machine, which containers would inherit."""
    for name in list(os.environ):
        if any(fnmatchcase(name, pattern) for pattern in FOR_LIBRARIES):
            monkeypatch.delenv(name)
