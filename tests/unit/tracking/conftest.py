"""A run folder and a ready MLflow database for each test."""

import shutil
from pathlib import Path

import pytest
from tracking_scene import Scene


@pytest.fixture
def scene(tmp_path: Path, empty_database: Path) -> Scene:
    shutil.copy(empty_database, tmp_path / "mlflow.db")
    return Scene(tmp_path)


@pytest.fixture(autouse=True)
def current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let MLflow write the artifacts of experiments without a location below `tmp_path`, not into the checkout."""
    monkeypatch.chdir(tmp_path)
