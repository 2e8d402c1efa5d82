"""A run folder and a ready MLflow database for each test."""

import shutil
from pathlib import Path

import pytest
from tracking_scene import Scene

from hpcdist.tracking.mlflow_client import open_client


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a database once, since creating its tables takes seconds, and copy it for each test."""
    path = tmp_path_factory.mktemp("database") / "mlflow.db"
    open_client(f"sqlite:///{path}")
    return path


@pytest.fixture
def scene(tmp_path: Path, empty_database: Path) -> Scene:
    shutil.copy(empty_database, tmp_path / "mlflow.db")
    return Scene(tmp_path)


@pytest.fixture(autouse=True)
def current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let MLflow write the artifacts of experiments without a location below `tmp_path`, not into the checkout."""
    monkeypatch.chdir(tmp_path)
