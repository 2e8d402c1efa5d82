"""The tests of configs also pass with the omegaconf that hpcdist gets without hydra-core."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

#: Made by scripts/install.sh.
NEWEST = Path(sys.prefix) / "omegaconf"


@pytest.mark.processes
@pytest.mark.slow
def test_configs_load_with_the_newest_omegaconf() -> None:
    if not NEWEST.is_dir():
        pytest.skip(f"{NEWEST} is missing: `make install` creates it")
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    env["PYTHONPATH"] = str(NEWEST)
    version = "import omegaconf; print(omegaconf.__file__)"
    done = subprocess.run([sys.executable, "-c", version], env=env, capture_output=True, text=True, check=True)
    assert Path(done.stdout).is_relative_to(NEWEST)
    tests = [str(Path(__file__).with_name(f"test_config_{name}.py")) for name in ("files", "mistakes")]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *tests], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
