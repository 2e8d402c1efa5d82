"""Ranks in a complete image on a real Slurm, with podman, whose containers are not children of the step."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from containers import Containers
from hpcdist_runs import HOLD_STEP, LAST_STEP, wait_for
from slurm_cluster import DevCluster
from slurm_runs import JOB_ENDED, SlurmRuns

from hpcdist.host.files import read_json

#: Containers end at most this long after their job.
REMOVAL_TIMEOUT_S = 30.0


@pytest.fixture(scope="module")
def slim(containers: Containers, image: Callable[[str], str]) -> Iterator[str]:
    """Name of a complete image; the environment points to podman's store with it."""
    with pytest.MonkeyPatch.context() as patch:
        for key, value in containers.env.items():
            if key.startswith("CONTAINERS_"):
                patch.setenv(key, value)
        yield image("slim")


def overrides(image: str, runs: SlurmRuns) -> list[str]:
    # The folder with the fake mlflow module is the only one that is not mounted automatically.
    return ["container.runtime=podman", f"container.image={image}", f"container.mounts=[{runs.no_mlflow}]"]


@pytest.fixture(scope="module")
def control(slim: str, slurm_runs: SlurmRuns) -> str:
    """Name of the control run: in the image, without faults."""
    name = "contained-control"
    slurm_runs.assert_finished_as(name, slurm_runs.submit(name, *overrides(slim, slurm_runs)), name)
    return name


def clients(subcommand: str, argument: str) -> list[psutil.Process]:
    """Return the processes of a podman subcommand with an argument."""
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if (words := process.info["cmdline"] or [])[:2] == ["podman", subcommand] and argument in words
    ]


def listed(containers: Containers, runs: SlurmRuns, name: str) -> list[str]:
    """Return the names of the run's containers, including stopped ones."""
    label = f"label=hpcdist.run={runs.run_dir(name).path}"
    return containers.podman("ps", "--all", "--filter", label, "--format", "{{.Names}}").split()


def assert_nothing_left(containers: Containers, runs: SlurmRuns, name: str) -> None:
    wait_for(lambda: not listed(containers, runs, name), "the containers to be removed", timeout_s=REMOVAL_TIMEOUT_S)
    assert not runs.rank_processes(name)
    folder = runs.attempt(name).path
    assert not [*folder.glob("*.line"), *folder.glob("*.exit")]


@pytest.mark.slow
def test_requeued_job_resumes_at_the_last_step(
    slurm_runs: SlurmRuns, devcluster: DevCluster, containers: Containers, slim: str, control: str
) -> None:
    name = "requeued-podman"
    job = slurm_runs.submit_held(name, *overrides(slim, slurm_runs))
    inside = slurm_runs.rank_processes(name)
    assert sorted(inside) == [0, 1, 2, 3]
    for rank, process in inside.items():
        # The rank runs the image's Python in its own root file system.
        assert process.exe() != os.path.realpath(psutil.Process().exe())
        assert os.stat(f"/proc/{process.pid}/root").st_ino != os.stat("/").st_ino
        assert process.environ()["SLURMD_NODENAME"] == f"n{rank // 2 + 1}"
    assert sorted(listed(containers, slurm_runs, name)) == [f"hpcdist-{job}-1-{rank}" for rank in range(4)]
    # Slurm's signals may end podman's client, which is a child of the step: the rank continues.
    clients("run", f"--name=hpcdist-{job}-1-1")[0].kill()
    wait_for(lambda: clients("attach", f"hpcdist-{job}-1-1"), "a new client to attach")
    devcluster.run("scontrol", "requeue", job)
    slurm_runs.wait_stop_request(name)
    slurm_runs.release(name)
    assert slurm_runs.wait_requeued(name).reason == "everything saved (Slurm ends the job)"
    saved = slurm_runs.checkpoint_steps(name)[-1]
    assert HOLD_STEP <= saved < LAST_STEP
    assert_nothing_left(containers, slurm_runs, name)
    slurm_runs.start_now(job)

    slurm_runs.assert_finished_as(name, job, control)
    assert slurm_runs.resumed_at(name, 2) == saved
    assert slurm_runs.hosts(name, 2) == ["n1", "n1", "n2", "n2"]
    assert (slurm_runs.state(name).attempt, slurm_runs.state(name).restarts) == (2, 0)
    assert_nothing_left(containers, slurm_runs, name)
    seen = read_json(slurm_runs.run_dir(name).container) or {}
    digest = containers.podman("image", "inspect", "--format", "{{.Id}}", slim).strip()
    assert (seen["runtime"], seen["hpcdist"], seen["image_digest"]) == ("podman", "0.1.0", f"sha256:{digest}")


@pytest.mark.slow
def test_containers_are_removed_after_slurm_kills_the_whole_job(
    slurm_runs: SlurmRuns, devcluster: DevCluster, containers: Containers, slim: str
) -> None:
    """After KillWait Slurm kills supervisor, srun and tasks at once; it does not know the containers."""
    name = "killed-whole"
    job = slurm_runs.submit_held(name, *overrides(slim, slurm_runs))
    assert len(listed(containers, slurm_runs, name)) == 4
    devcluster.run("scancel", "--full", "--signal=KILL", job)
    devcluster.wait_job_state(job, *JOB_ENDED)
    assert_nothing_left(containers, slurm_runs, name)


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


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        pytest.param(
            ["container.runtime=podman", "container.image=IMAGE", "container.python=/no/python"],
            "has no /no/python in it",
            marks=pytest.mark.slow,
        ),
        (
            ["container.runtime=charliecloud", "container.image=FOREIGN"],
            "is for another processor architecture than this machine has",
        ),
    ],
)
def test_submit_rejects_invalid_container_settings(
    slurm_runs: SlurmRuns, request: pytest.FixtureRequest, tmp_path: Path, settings: list[str], message: str
) -> None:
    name = "invalid"
    if "container.image=FOREIGN" in settings:
        request.getfixturevalue("containers")  # needs charliecloud
        settings[1] = f"container.image={foreign_image(tmp_path / 'foreign')}"
    elif "container.runtime=podman" in settings:
        image = request.getfixturevalue("slim")
        settings = [text.replace("=IMAGE", f"={image}") for text in settings]
    code, output = slurm_runs.command("submit", *slurm_runs.config(name), "--cluster", "devcluster", *settings)
    assert (code, message in output, output.count("\n")) == (2, True, 1), output
    assert not slurm_runs.run_dir(name).path.exists()
