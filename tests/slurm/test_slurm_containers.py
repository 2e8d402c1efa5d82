"""A complete image on a real Slurm, and containers that cannot start there."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import runtime_cases
from containers import RUNTIMES, Containers
from slurm_cluster import DevCluster
from slurm_runs import SlurmRuns

import hpcdist
from hpcdist.host.json_files import read_json


@pytest.fixture
def apptainer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A PATH with apptainer."""
    if (reason := runtime_cases.missing_program("apptainer-folder")) is not None:
        assert os.environ.get("HPCDIST_REQUIRE_CONTAINERS") != "1", reason
        pytest.skip(reason)
    monkeypatch.setenv("PATH", f"{RUNTIMES}/apptainer/bin:{os.environ['PATH']}")
    for name, value in runtime_cases.apptainer_env().items():
        monkeypatch.setenv(name, value)


@pytest.mark.slow
@pytest.mark.usefixtures("apptainer")
def test_image_of_hpcdist_is_converted_and_trains_on_slurm(
    slurm_runs: SlurmRuns, containers: Containers, image: Callable[[str], str], tmp_path: Path
) -> None:
    command = ("image", "convert", image("slim"), "--engine", "podman", "--to", "dir", "--into", str(tmp_path))
    done = containers.hpcdist(*command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    name, folder = "complete-image", done.stdout.strip()
    # The folder with the fake mlflow module is the only one that is not mounted automatically.
    container = ["container.runtime=apptainer", f"container.image={folder}"]
    job = slurm_runs.submit(name, *container, f"container.mounts=[{slurm_runs.no_mlflow}]")
    state = slurm_runs.wait_end(name, job)
    assert (state.status, state.attempt) == ("finished", 1), state
    assert slurm_runs.hosts(name) == ["n1", "n1", "n2", "n2"]
    seen = read_json(slurm_runs.run_dir(name).container) or {}
    assert (seen["runtime"], seen["hpcdist"]) == ("apptainer", hpcdist.__version__)
    assert seen["image_digest"] == f"sha256:{folder.rpartition('-')[2]}"


# --- user errors


def test_run_is_rejected_if_the_nodes_lack_the_container_runtime(
    slurm_runs: SlurmRuns, devcluster: DevCluster, tmp_path: Path
) -> None:
    name = "no-runtime"
    (tmp_path / "image.sif").touch()
    job = slurm_runs.submit(name, "container.runtime=apptainer", f"container.image={tmp_path}/image.sif")
    state = slurm_runs.wait_end(name, job)
    wanted = ("failed", True, 1, "apptainer is not installed on n1, n2")
    assert (state.status, state.rejected, state.attempt, state.reason) == wanted


def foreign_image(folder: Path) -> Path:
    """Create a root file system with executables for an unknown processor architecture."""
    for name in ("usr/bin", "dev", "proc", "sys", "tmp", "etc", "home", "run"):
        (folder / name).mkdir(parents=True)
    for name in ("passwd", "group"):
        (folder / "etc" / name).touch()
    executable = bytearray(Path("/bin/sh").read_bytes())
    executable[18:20] = b"\xfe\xca"  # e_machine of the ELF header
    for name in ("python3", "sh"):
        (folder / "usr/bin" / name).write_bytes(executable)
        (folder / "usr/bin" / name).chmod(0o755)
    (folder / "bin").symlink_to("usr/bin")
    return folder


@pytest.mark.usefixtures("apptainer")
def test_submit_rejects_an_image_that_cannot_start_here(slurm_runs: SlurmRuns, tmp_path: Path) -> None:
    name = "invalid"
    container = ["container.runtime=apptainer", f"container.image={foreign_image(tmp_path / 'foreign')}"]
    code, output = slurm_runs.command("submit", *slurm_runs.config(name), "--cluster", "devcluster", *container)
    message = "is for another processor architecture than this machine has"
    assert (code, message in output, output.count("\n")) == (2, True, 1), output
    assert not slurm_runs.run_dir(name).path.exists()
