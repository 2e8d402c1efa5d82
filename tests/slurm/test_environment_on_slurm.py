"""Ranks in an environment of their own, packed at submission and copied to each node."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hpcdist_runs import wait_for
from slurm_cluster import DevCluster
from slurm_runs import NUM_RANKS, SlurmRuns

from hpcdist.environments.rank_environment import user_folder
from hpcdist.files.atomic import read_json

pytestmark = [
    pytest.mark.faults,
    pytest.mark.skipif(shutil.which("zstd") is None, reason="needs zstd: apt-get install zstd"),
]


@pytest.fixture
def overrides(tmp_path: Path) -> list[str]:
    """The config of a virtual environment that finds its packages in the environment of the tests."""
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    (site,) = venv.glob("lib/python*/site-packages")
    (site / "tests.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")) + "\n")
    return [
        "cluster.environment.kind=venv",
        f"cluster.environment.path={venv}",
        f"cluster.environment.local_dir={tmp_path / 'disk'}",
    ]


def test_requeued_run_uses_the_copy_again(
    slurm_runs: SlurmRuns, devcluster: DevCluster, slurm_control: str, overrides: list[str], tmp_path: Path
) -> None:
    name = "environment"
    job = slurm_runs.submit_held(name, *overrides)
    record = read_json(slurm_runs.run_dir(name).rank_environment) or {}
    copy = tmp_path / "disk" / user_folder() / record["key"]
    ranks = [command for command in slurm_runs.processes(name) if "hpcdist.rank.worker" in command]
    started_from = [command for command in ranks if command.startswith(f"{copy}/bin/python3 ")]
    assert len(started_from) >= NUM_RANKS, ranks
    # The environment of a running job may change; the run keeps its own.
    shutil.rmtree(tmp_path / "venv")
    devcluster.run("scontrol", "requeue", job)
    slurm_runs.release(name)
    slurm_runs.wait_queued_again(name)
    slurm_runs.start_now(job)
    slurm_runs.assert_finished_as(name, job, slurm_control)
    log = slurm_runs.job_log(name)
    # The virtual nodes share a disk, so one of them finds the copy of the other one.
    assert log.count("environment: copied to 1 of 2 nodes in ") == 1
    assert log.count(f"environment: {record['key']} is on all 2 nodes") == 1


def test_unfit_local_disk_ends_the_run_without_a_restart(
    slurm_runs: SlurmRuns, overrides: list[str], tmp_path: Path
) -> None:
    (tmp_path / "disk").write_text("a file in place of a folder")
    name = "unfit-disk"
    job = slurm_runs.submit(name, *overrides)
    state = slurm_runs.wait_end(name, job)
    assert (state.status, state.attempt, state.rejected) == ("failed", 1, True), state
    assert state.reason.startswith("environment on n1, n2: "), state
    assert state.reason.endswith("set cluster.environment.local_dir to a local disk with enough space"), state
    wait_for(lambda: not slurm_runs.processes(name), f"the processes of {name} to end")
