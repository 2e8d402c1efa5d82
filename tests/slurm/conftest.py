"""One dev cluster for all tests of this folder: a real Slurm of four nodes on this machine."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
from slurm_cluster import DevCluster, dev_cluster
from slurm_runs import ON_FOUR_RANKS, SlurmRuns


@pytest.fixture(scope="session")
def devcluster() -> Iterator[DevCluster]:
    with dev_cluster(4) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def slurm_runs(tmp_path_factory: pytest.TempPathFactory, devcluster: DevCluster) -> SlurmRuns:
    """One folder for the runs of all tests; each test gives its runs names of their own."""
    database = tmp_path_factory.mktemp("ready") / "mlflow.db"
    # In a process of its own, since importing MLflow here would take seconds and its libraries' warnings.
    code = "import sys; from hpcdist.tracking.mlflow_run import open_client; open_client(sys.argv[1])"
    subprocess.run([sys.executable, "-c", code, f"sqlite:///{database}"], check=True)
    return SlurmRuns(tmp_path_factory.mktemp("slurm_runs"), database, devcluster)


@pytest.fixture(scope="session")
def slurm_control(slurm_runs: SlurmRuns) -> str:
    """Name of a run of four ranks on this machine, without Slurm, that nothing happened to."""
    name = "control"
    code, output = slurm_runs.command("run", *slurm_runs.config(name, *ON_FOUR_RANKS))
    assert code == 0, output
    return name
