"""Fixtures of tests with real processes. A start takes seconds, so each one serves many assertions."""

from pathlib import Path

import pytest
from hpcdist_runs import AUGMENTED, LAST_STEP, TRAINING, Runs, create_database


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An MLflow database with empty tables."""
    return create_database(tmp_path_factory.mktemp("ready") / "mlflow.db")


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory, empty_database: Path) -> Runs:
    """The runs folder of all tests; each test uses unique run names."""
    return Runs(tmp_path_factory.mktemp("runs"), empty_database)


def run_uninterrupted(runs: Runs, name: str, *overrides: str, export: bool = False) -> str:
    code, output = runs.command("run", *runs.config(name, *TRAINING, *overrides, export=export))
    assert code == 0, output
    assert f"finished: trained {LAST_STEP} steps, 2 epochs" in output
    return name


@pytest.fixture(scope="session")
def control_run(runs: Runs) -> str:
    """Name of an uninterrupted run."""
    return run_uninterrupted(runs, "control", export=True)


@pytest.fixture(scope="session")
def augmented_control_run(runs: Runs) -> str:
    """Name of an uninterrupted run with augmented images."""
    return run_uninterrupted(runs, "control-augmented", *AUGMENTED)
