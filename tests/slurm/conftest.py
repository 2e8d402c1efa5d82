"""One dev cluster for all tests of this folder: a real Slurm of four nodes on this machine."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
from fault_table import Cell
from slurm_cluster import DevCluster, dev_cluster
from slurm_faults import SUBJECTS, FaultScene, Subject
from slurm_runs import ON_FOUR_RANKS, SlurmRuns

from hpcdist.devcluster import cluster, nodes


@pytest.fixture(scope="session")
def devcluster() -> Iterator[DevCluster]:
    with dev_cluster(4) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def slurm_runs(tmp_path_factory: pytest.TempPathFactory, devcluster: DevCluster) -> SlurmRuns:
    """One folder for the runs of all tests; each test gives its runs names of their own."""
    database = tmp_path_factory.mktemp("ready") / "mlflow.db"
    # In a process of its own, since importing MLflow here would take seconds and its libraries' warnings.
    code = "import sys; from hpcdist.tracking.mlflow_client import open_client; open_client(sys.argv[1])"
    subprocess.run([sys.executable, "-c", code, f"sqlite:///{database}"], check=True)
    return SlurmRuns(tmp_path_factory.mktemp("slurm_runs"), database, devcluster)


@pytest.fixture(scope="session")
def slurm_control(slurm_runs: SlurmRuns) -> str:
    """Name of a run of four ranks on this machine, without Slurm, that nothing happened to."""
    name = "control"
    code, output = slurm_runs.command("run", *slurm_runs.config(name, *ON_FOUR_RANKS))
    assert code == 0, output
    # On a busy machine the run may end before MLflow has taken everything.
    code, output = slurm_runs.command("sync", name)
    assert code == 0, output
    return name


@pytest.fixture(params=SUBJECTS, ids=lambda subject: str(subject.name))
def scene(
    request: pytest.FixtureRequest, slurm_runs: SlurmRuns, slurm_control: str, cell: Cell
) -> Iterator[FaultScene]:
    """A fault that is to strike a trainer; the cluster is whole again afterwards."""
    subject: Subject = request.param
    cell.trainer = subject.name
    devcluster = slurm_runs.cluster
    yield FaultScene(slurm_runs, subject, slurm_control, cell)
    devcluster.cancel_all()
    if "grace_s" in request.fixturenames:
        cluster.set_grace_time(devcluster.layout, 0)
    for name in cluster.status(devcluster.layout).dead:
        nodes.start_node(devcluster.layout, name.removeprefix("slurmd-"))
    devcluster.until(
        lambda: {node.state for node in cluster.status(devcluster.layout).nodes} == {"idle"}, "all nodes are idle"
    )
