"""The console blocks of the documentation that need Slurm, run on the dev cluster."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from doc_blocks import ROOT, blocks
from slurm_runs import SlurmRuns

PAGE = ROOT / "docs" / "tutorials" / "first-slurm-job.md"


@pytest.mark.slow
def test_commands_of_the_slurm_tutorial_succeed(slurm_runs: SlurmRuns, tmp_path: Path) -> None:
    commands = [command for block in blocks(PAGE) if "slurm" in block.words for command in block.commands]
    assert len(commands) >= 3
    env = {
        **slurm_runs.env(),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HPCDIST_RUNS_DIR": str(tmp_path / "runs"),
    }
    for command in commands:
        done = subprocess.run(shlex.split(command), cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
