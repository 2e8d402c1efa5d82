"""The matrix runtime x fault as an ordinary user: an undisturbed run, a requeue and a killed rank with each runtime.

The nodes have what a cluster gives its users: a /dev/fuse for all users, subordinate ids for rootless podman, and a
docker socket of the user's group.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import runtime_cases
from containers import Containers
from ordinary_user import UserRuns, prepared_for_user, user_program
from runtime_cases import CASES, RuntimeCase
from slurm_cluster import DevCluster
from slurm_faults import Cell, FaultScene
from slurm_runs import ON_FOUR_RANKS, create_database
from small_image import mismatch

pytestmark = [pytest.mark.faults, pytest.mark.parametrize("runtime", CASES, indirect=True, scope="module")]


@pytest.fixture(scope="module")
def open_folder() -> Iterator[Path]:
    """A folder that all users can enter, unlike those of pytest."""
    folder = Path(tempfile.mkdtemp(prefix="hpcdist-user-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def user_runs(devcluster: DevCluster, open_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> UserRuns:
    program = user_program(open_folder / "python")
    database = create_database(tmp_path_factory.mktemp("empty") / "mlflow.db")
    home = open_folder / "home"
    home.mkdir()
    return UserRuns(home, database, devcluster, program)


@pytest.fixture(scope="module")
def user_control(user_runs: UserRuns) -> str:
    """Name of the control run: four ranks of the user on this machine, without Slurm, container and faults."""
    name = "control"
    for arguments in (("run", *user_runs.config(name, *ON_FOUR_RANKS)), ("sync", name)):
        code, output = user_runs.command(*arguments)
        assert code == 0, output
    return name


@pytest.fixture(scope="module")
def runtime(
    request: pytest.FixtureRequest, containers: Containers, user_runs: UserRuns, open_folder: Path, user_control: str
) -> Iterator[RuntimeCase]:
    """A runtime that is ready for the user on all nodes; its variables are set."""
    if (reason := mismatch() or runtime_cases.missing_program(request.param)) is not None:
        assert os.environ.get("HPCDIST_REQUIRE_CONTAINERS") != "1", reason
        pytest.skip(reason)
    folder = open_folder / request.param
    folder.mkdir()
    prepared = prepared_for_user(request.param, containers, user_runs, folder)
    with prepared as found, pytest.MonkeyPatch.context() as patch:
        for name, value in found.env.items():
            patch.setenv(name, value)
        yield found


@pytest.fixture
def boxed(runtime: RuntimeCase, user_runs: UserRuns, user_control: str) -> Iterator[FaultScene]:
    """Fault injection for a run of the user whose ranks are in containers; teardown restores the cluster."""
    yield FaultScene(user_runs, runtime_cases.subject_of(runtime), user_control, Cell(fault="", trainer=runtime.name))
    user_runs.cluster.restore_nodes()
    runtime.restore()


def test_plain(boxed: FaultScene, runtime: RuntimeCase) -> None:
    runtime_cases.plain(boxed, runtime)


def test_requeue(boxed: FaultScene, runtime: RuntimeCase) -> None:
    runtime_cases.requeue(boxed, runtime)


def test_killed_rank(boxed: FaultScene, runtime: RuntimeCase) -> None:
    runtime_cases.killed_rank(boxed, runtime)
