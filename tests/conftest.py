"""What every test needs: no variables of whoever starts the tests, and a place for runs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

#: Once, before anything is imported: hpcdist sets variables of MLFLOW_* itself, and those must stay.
for _name in list(os.environ):
    if _name.startswith(("HPCDIST_", "SLURM_", "MLFLOW_")) and _name != "HPCDIST_DATA_DIR":
        del os.environ[_name]


@pytest.fixture
def runs_dir(tmp_path: Path) -> Path:
    return tmp_path / "runs"
