"""`hpcdist devcluster up --runtime`: runs in containers, with nothing prepared but what `up` prints."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

import pytest
import runtime_cases
from containers import RUNTIMES, Containers, mismatch, mount_flags, small_image
from runtime_cases import PYXIS
from slurm_cluster import DevCluster
from slurm_runs import SlurmRuns
from test_devcluster import left_behind

from hpcdist.devcluster import cluster

#: Runtime, the form of the image, and the further options of `up`.
CASES = {
    "apptainer": ("apptainer-sif", ()),
    "docker": ("docker", ()),
    "pyxis": ("pyxis", ("--pyxis-plugin", str(PYXIS))),
}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose PATH has all runtimes."""
    bins = ":".join(str(RUNTIMES / name / "bin") for name in ("apptainer", "enroot"))
    monkeypatch.setenv("PATH", f"{bins}:{os.environ['PATH']}")


@pytest.fixture
def stopped(devcluster: DevCluster) -> Iterator[DevCluster]:
    """The cluster of the other tests is down; it is up again afterwards."""
    cluster.down(devcluster.layout)
    yield devcluster
    cluster.down(devcluster.layout)
    devcluster.restart()


@pytest.mark.faults
@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("runtime", CASES)
def test_run_in_containers(
    runtime: str,
    stopped: DevCluster,
    slurm_runs: SlurmRuns,
    slurm_control: str,
    containers: Containers,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case, options = CASES[runtime]
    if (reason := mismatch() or runtime_cases.missing_program(case)) is not None:
        pytest.skip(reason)
    image = small_image(containers)
    before = left_behind(stopped)
    done = stopped.hpcdist("devcluster", "up", "--nodes", "2", "--runtime", runtime, *options)
    assert done.returncode == 0, done.stderr
    printed = re.search(r"^  export PATH=(.*):\$PATH$", done.stdout, re.MULTILINE)
    assert printed, done.stdout
    monkeypatch.setenv("PATH", f"{printed[1]}:{os.environ['PATH']}")
    if runtime == "docker":
        stopped.run("srun", "--nodes=2", "--ntasks-per-node=1", "docker", "import", str(image.tar), image.name)
    references = {"apptainer": image.sif, "docker": lambda _: image.name, "pyxis": lambda _: image.sqsh}
    flags = ",".join(f"'{flag}'" for flag in mount_flags(runtime))
    container = (
        f"container.runtime={runtime}",
        f"container.image={references[runtime]('apptainer')}",
        f"container.mounts=[{slurm_runs.no_mlflow}]",
        f"container.extra_args=[{flags}]",
    )
    name = f"devcluster-{runtime}"
    job = slurm_runs.submit(name, *container)
    slurm_runs.assert_finished_as(name, job, slurm_control)
    assert slurm_runs.hosts(name) == ["n1", "n1", "n2", "n2"]

    cluster.kill_node(stopped.layout, "n2")
    cluster.start_node(stopped.layout, "n2")
    stopped.restore_nodes()
    job = slurm_runs.submit(f"{name}-again", *container)
    slurm_runs.assert_finished_as(f"{name}-again", job, slurm_control)

    done = stopped.hpcdist("devcluster", "down")
    assert done.returncode == 0, done.stderr
    assert left_behind(stopped) == before
