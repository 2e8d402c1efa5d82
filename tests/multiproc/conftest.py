"""Fixtures of tests with real processes. A start takes seconds, so each one serves many assertions."""

from pathlib import Path

import pytest
from hpcdist_runs import LAST_STEP, TRAINING, Runs


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory, empty_database: Path) -> Runs:
    """The runs folder of all tests; each test uses unique run names."""
    return Runs(tmp_path_factory.mktemp("runs"), empty_database)


@pytest.fixture(scope="session")
def control_run(runs: Runs) -> str:
    """Name of an uninterrupted run."""
    name = "control"
    code, output = runs.command("run", *runs.config(name, *TRAINING, export=True))
    assert code == 0, output
    assert f"finished: trained {LAST_STEP} steps, 2 epochs" in output
    return name
