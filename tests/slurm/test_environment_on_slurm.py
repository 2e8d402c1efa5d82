"""Ranks in an environment of their own, packed at submission and copied to each node."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hpcdist_runs import wait_for
from slurm_cluster import DevCluster
from slurm_runs import NUM_RANKS, SlurmRuns

from hpcdist.environments.rank_environment import has_modules, user_folder
from hpcdist.host.files import read_json

pytestmark = [
    pytest.mark.faults,
    pytest.mark.skipif(shutil.which("zstd") is None, reason="needs zstd: apt-get install zstd"),
]


#: The definition of `module` of a site: it changes the shell's environment.
MODULES = """
module() {
  [ "$2" = python/tests ] || { echo "ERROR: Unable to locate a modulefile for '$2'" >&2; return 1; }
  export LOADEDMODULES="$2" PATH="%s/bin:$PATH"
}
"""


def packages_path() -> str:
    """Return the content of a `.pth` file with the packages of these tests."""
    return "\n".join(path for path in sys.path if path.endswith("site-packages")) + "\n"


def make_venv(folder: Path) -> Path:
    """Create a virtual environment that finds its packages in the environment of the tests."""
    venv = folder / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    (site,) = venv.glob("lib/python*/site-packages")
    (site / "tests.pth").write_text(packages_path())
    return venv


def venv_settings(folder: Path) -> list[str]:
    """Return the config of a virtual environment."""
    return ["kind=venv", f"path={make_venv(folder)}"]


def squashfs_settings(folder: Path) -> list[str]:
    """Return the config of an image of a virtual environment."""
    if shutil.which("mksquashfs") is None:
        pytest.skip("needs mksquashfs: apt-get install squashfs-tools")
    image = folder / "environment.sqsh"
    subprocess.run(["mksquashfs", make_venv(folder), image, "-quiet", "-no-progress"], check=True)
    shutil.rmtree(folder / "venv")
    return ["kind=squashfs", f"path={image}"]


def uv_settings(folder: Path) -> list[str]:
    """Return the config of a project whose only locked package leads to the packages of the tests."""
    uv = shutil.which("uv") or str(Path(sys.executable).with_name("uv"))
    if not Path(uv).exists():
        pytest.skip("needs uv: pip install uv")
    project = folder / "project"
    project.mkdir()
    wheel = project / "tests_packages-1-py3-none-any.whl"
    info = "tests_packages-1.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tests.pth", packages_path())
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tests-packages\nVersion: 1\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    (project / "pyproject.toml").write_text(
        f"""[project]
name = "training"
version = "1"
requires-python = ">={sys.version_info[0]}.{sys.version_info[1]}"
dependencies = ["tests-packages"]
[tool.uv.sources]
tests-packages = {{ path = "{wheel.name}" }}
"""
    )
    python = f"--python={sys.executable}"
    subprocess.run([uv, "lock", "--offline", f"--project={project}", python], capture_output=True, check=True)
    return ["kind=uv", f"path={project}", f"uv_args=[--offline,{python}]"]


@pytest.mark.parametrize("settings", [venv_settings, squashfs_settings, uv_settings])
def test_requeued_run_uses_the_copy_again(
    slurm_runs: SlurmRuns,
    devcluster: DevCluster,
    slurm_control: str,
    settings: Callable[[Path], list[str]],
    tmp_path: Path,
) -> None:
    name = settings.__name__.replace("_", "-")
    values = [*settings(tmp_path), f"local_dir={tmp_path / 'disk'}"]
    job = slurm_runs.submit_held(name, *(f"cluster.environment.{value}" for value in values))
    record = read_json(slurm_runs.run_dir(name).rank_environment) or {}
    copy = tmp_path / "disk" / user_folder() / record["key"]
    assert_ranks_use(f"{copy}/bin/python3", slurm_runs, name)
    # The environment of a running job may change; the run keeps its own.
    shutil.rmtree(tmp_path / "venv", ignore_errors=True)
    shutil.rmtree(tmp_path / "project", ignore_errors=True)
    devcluster.run("scontrol", "requeue", job)
    slurm_runs.release(name)
    slurm_runs.wait_queued_again(name)
    slurm_runs.start_now(job)
    slurm_runs.assert_finished_as(name, job, slurm_control)
    log = slurm_runs.job_log(name)
    # The virtual nodes share a disk, so one of them finds the copy of the other one.
    assert log.count("environment: copied to 1 of 2 nodes in ") == 1
    assert log.count(f"environment: {record['key']} is on all 2 nodes") == 1


@pytest.mark.parametrize("installed", [False, True], ids=["function", "installed"])
def test_ranks_use_the_python_of_a_module(
    slurm_runs: SlurmRuns, devcluster: DevCluster, slurm_control: str, installed: bool, tmp_path: Path
) -> None:
    name = f"module-{installed}".lower()
    venv = make_venv(tmp_path)
    if installed:
        if not has_modules(os.environ):
            pytest.skip("needs environment modules: apt-get install environment-modules, or lmod")
        (tmp_path / "python").mkdir()
        (tmp_path / "python" / "tests").write_text(f"#%Module1.0\nprepend-path PATH {venv}/bin\n")
        variable = f"cluster.env.MODULEPATH={tmp_path}"
    else:
        (tmp_path / "site" / "init").mkdir(parents=True)
        (tmp_path / "site" / "init" / "bash").write_text(MODULES % venv)
        variable = f"cluster.env.MODULESHOME={tmp_path / 'site'}"
    settings = ["kind=module", "modules=[python/tests]"]
    job = slurm_runs.submit_held(name, *(f"cluster.environment.{value}" for value in settings), variable)
    assert_ranks_use(f"{venv}/bin/python3", slurm_runs, name)
    devcluster.run("scontrol", "requeue", job)
    slurm_runs.release(name)
    slurm_runs.wait_queued_again(name)
    slurm_runs.start_now(job)
    slurm_runs.assert_finished_as(name, job, slurm_control)
    record = read_json(slurm_runs.run_dir(name).rank_environment) or {}
    assert (record["kind"], record["modules"]) == ("module", ["python/tests"])


def assert_ranks_use(python: str, slurm_runs: SlurmRuns, name: str) -> None:
    """Assert that all ranks of a running run were started with an interpreter."""
    ranks = [command for command in slurm_runs.processes(name) if "hpcdist.rank.worker" in command]
    assert len([command for command in ranks if command.startswith(f"{python} ")]) >= NUM_RANKS, ranks


def test_unfit_local_disk_ends_the_run_without_a_restart(slurm_runs: SlurmRuns, tmp_path: Path) -> None:
    values = [*venv_settings(tmp_path), f"local_dir={tmp_path / 'disk'}"]
    (tmp_path / "disk").write_text("a file in place of a folder")
    name = "unfit-disk"
    job = slurm_runs.submit(name, *(f"cluster.environment.{value}" for value in values))
    state = slurm_runs.wait_end(name, job)
    assert (state.status, state.attempt, state.rejected) == ("failed", 1, True), state
    assert state.reason.startswith("environment on n1, n2: "), state
    assert state.reason.endswith("set cluster.environment.local_dir to a local disk with enough space"), state
    wait_for(lambda: not slurm_runs.processes(name), f"the processes of {name} to end")
