"""One dev cluster for all tests of this folder: a real Slurm of four nodes on this machine."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm_cluster import DevCluster, dev_cluster, shared_folder
from slurm_faults import SUBJECTS, Cell, FaultScene, Subject
from slurm_runs import ON_FOUR_RANKS, SlurmRuns

#: Time limit of a test; the first one may have to build a container image.
TEST_TIMEOUT_S = 1200


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.timeout(TEST_TIMEOUT_S))


@pytest.fixture(scope="session")
def devcluster() -> Iterator[DevCluster]:
    with dev_cluster(4) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def cancel_jobs(devcluster: DevCluster) -> Iterator[None]:
    yield
    devcluster.cancel_all()


@pytest.fixture(scope="module", autouse=True)
def cancel_jobs_of_module(devcluster: DevCluster) -> Iterator[None]:
    """Cancel the jobs of a module's fixture that fails: `cancel_jobs` is set up after it."""
    yield
    devcluster.cancel_all()


@pytest.fixture
def time_to_save(devcluster: DevCluster) -> Iterator[None]:
    """For tests that require that a run saves when its job is requeued."""
    with devcluster.time_to_save():
        yield


@pytest.fixture(scope="session")
def slurm_runs(empty_database: Path, devcluster: DevCluster) -> Iterator[SlurmRuns]:
    """One folder for the runs of all tests; run names are unique across tests."""
    with shared_folder() as root:
        yield SlurmRuns(root, empty_database, devcluster)


@pytest.fixture(scope="session")
def slurm_control(slurm_runs: SlurmRuns) -> str:
    """Name of the control run: four ranks on this machine, without Slurm and without faults."""
    name = "control"
    # `sync` alone imports MLflow and uploads all records; on a busy machine the run may end before its shipper does.
    code, output = slurm_runs.command("run", *slurm_runs.config(name, *ON_FOUR_RANKS), **slurm_runs.unshipped)
    assert code == 0, output
    code, output = slurm_runs.command("sync", name)
    assert code == 0, output
    return name


@pytest.fixture(params=SUBJECTS, ids=lambda subject: str(subject.name))
def scene(
    request: pytest.FixtureRequest, slurm_runs: SlurmRuns, slurm_control: str, cell: Cell
) -> Iterator[FaultScene]:
    """Fault injection for one trainer; teardown restores the cluster."""
    subject: Subject = request.param
    cell.trainer = subject.name
    devcluster = slurm_runs.cluster
    yield FaultScene(slurm_runs, subject, slurm_control, cell)
    if "grace_s" in request.fixturenames:
        devcluster.set_grace_time(0)
    devcluster.restore_nodes()
