"""Tests on two simulated GPUs (`simulated_gpus.py`)."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hpcdist_runs import Runs
from simulated_gpus import libraries


@pytest.fixture
def gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Let programs see two simulated GPUs; yield the folder of their faults and their log.

    Work on one memory by two streams without an order between them fails the test.
    """
    folder = tmp_path / "gpus"
    folder.mkdir()
    (folder / "log").touch()
    for name, value in {"SIMGPU_FOLDER": str(folder), "SIMGPU_DEVICES": "2", "TEST_DEVICE": "cuda"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", str(libraries()), prepend=os.pathsep)
    yield folder
    assert "RACE" not in (folder / "log").read_text()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, empty_database: Path) -> Runs:
    return Runs(tmp_path_factory.mktemp("runs"), empty_database)
