"""The programs of examples/tutorials, alone and with `hpcdist run`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hpcdist_runs import Runs, unused_port
from tutorials import FOLDER, TUTORIALS, Tutorial


@pytest.mark.parametrize("tutorial", TUTORIALS, ids=lambda tutorial: tutorial.name)
@pytest.mark.slow
def test_program_alone(tutorial: Tutorial, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(FOLDER / f"{tutorial.name}.py"), *tutorial.arguments],
        cwd=tmp_path,
        env={**os.environ, "MASTER_PORT": str(unused_port()), "GLOO_SOCKET_IFNAME": "lo", "TP_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert tutorial.output in done.stdout
    assert torch.load(tmp_path / "checkpoints" / tutorial.weights, weights_only=True)


@pytest.mark.parametrize(
    "tutorial",
    [
        pytest.param(tutorial, id=tutorial.name, marks=[] if tutorial.name == "ddp_with_rpc" else [pytest.mark.slow])
        for tutorial in TUTORIALS
    ],
)
def test_program_with_hpcdist_run(tutorial: Tutorial, tmp_path: Path, empty_database: Path) -> None:
    runs = Runs(tmp_path, empty_database, experiment="tutorials")
    uri = f"tracking.uri=sqlite:///{runs.database}"
    overrides = [tutorial.script, uri, "tracking.system_interval_s=0", "tracking.drain_timeout_s=300"]
    code, output = runs.command("run", f"tutorial_{tutorial.name}", f"name={tutorial.name}", *overrides)
    assert code == 0, output
    assert tutorial.output in output
    assert tutorial.metric in {key for key, _, _ in runs.points(tutorial.name)}
    run = runs.run_dir(tutorial.name)
    assert torch.load(run.checkpoints / tutorial.weights, weights_only=True)
    ranks = sorted(path.name for path in run.attempt(1).path.glob("rank-*.log"))
    assert len(ranks) == tutorial.num_ranks
