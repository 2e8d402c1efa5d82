"""What every test needs: no variables of whoever starts the tests, and a place for runs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

#: Once, before anything is imported: hpcdist sets variables of MLFLOW_* itself, and those must stay.
#: What steers the tests themselves stays too.
_STEER_TESTS = ("HPCDIST_DATA_DIR", "HPCDIST_REQUIRE_BROWSER", "HPCDIST_REQUIRE_SLURM", "HPCDIST_SCREENSHOTS")
for _name in list(os.environ):
    if _name.startswith(("HPCDIST_", "SLURM_", "SBATCH_", "MLFLOW_")) and _name not in _STEER_TESTS:
        del os.environ[_name]


@pytest.fixture
def runs_dir(tmp_path: Path) -> Path:
    return tmp_path / "runs"
