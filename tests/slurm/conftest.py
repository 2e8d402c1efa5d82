"""One dev cluster for all tests of this folder: a real Slurm of four nodes on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
from slurm_cluster import DevCluster, why_not
from slurm_runs import ON_FOUR_RANKS, SlurmRuns

from hpcdist.devcluster import cluster, host
from hpcdist.devcluster.settings import Layout

REQUIRE = "HPCDIST_REQUIRE_SLURM"
"""Set to 1, it turns the skip for want of a cluster into a failure: for machines that must have one."""


@pytest.fixture(scope="session")
def devcluster() -> Iterator[DevCluster]:
    layout = Layout()
    if (reason := why_not(layout)) is not None:
        if os.environ.get(REQUIRE) == "1":
            pytest.fail(f"{REQUIRE}=1, but {reason}")
        pytest.skip(reason)
    cluster.down(layout)  # what a killed session has left
    before = host.HOSTS.read_text()
    try:
        yield DevCluster(layout, cluster.up(layout, {"num_nodes": 4}, env={}), before)
    finally:
        cluster.down(layout)


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
