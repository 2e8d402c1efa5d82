"""Ranks in containers on a real Slurm: charliecloud, and podman with containers that are not children of the step."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from containers import Containers
from hpcdist_runs import HOLD_OVERRIDES, HOLD_STEP, LAST_STEP, wait_for
from slurm_cluster import DevCluster
from slurm_runs import JOB_ENDED, SlurmRuns

from hpcdist.host.files import read_json

# --- The image in which Slurm tests start ranks: by name with podman, as a folder with charliecloud


@dataclass(frozen=True)
class ContainerImage:
    name: str  #: name in podman's store
    folder: Path  #: the unpacked image
    containers: Containers

    def podman(self, *arguments: str) -> str:
        return self.containers.podman(*arguments)

    @property
    def env(self) -> dict[str, str]:
        """Return the variables by which podman finds the store of the image."""
        return {name: value for name, value in self.containers.env.items() if name.startswith("CONTAINERS_")}


@contextmanager
def mounted_image(containers: Containers, name: str) -> Iterator[ContainerImage]:
    """Yield an image mounted from podman's store, because a copy of several gigabytes would take minutes."""
    container = containers.podman("create", name).strip()
    try:
        folder = Path(containers.podman("mount", container).strip())
        # The files that `hpcdist image convert` adds.
        (folder / "ch").mkdir()
        (folder / "ch/environment").write_text(
            "".join(f"{line}\n" for line in containers.inspect(name)["Config"]["Env"])
        )
        yield ContainerImage(name, folder, containers)
        containers.podman("unmount", container)
    finally:
        containers.podman("rm", "--force", container)


# --- Ranks in containers on a real Slurm: charliecloud, and podman with containers that are not children of the step

RUNTIMES = ("podman", "charliecloud")


#: Containers end at most this long after their job.
REMOVAL_TIMEOUT_S = 30.0


@pytest.fixture(scope="module")
def unpacked_image(containers: Containers, image: Callable[[str], str]) -> Iterator[ContainerImage]:
    with mounted_image(containers, image("slim")) as found:
        yield found


@pytest.fixture
def in_image(unpacked_image: ContainerImage, monkeypatch: pytest.MonkeyPatch) -> ContainerImage:
    """The image; the environment of the test points to podman's store."""
    for name, value in unpacked_image.env.items():
        monkeypatch.setenv(name, value)
    return unpacked_image


def overrides(image: ContainerImage, runtime: str, runs: SlurmRuns) -> list[str]:
    name = image.name if runtime == "podman" else str(image.folder)
    # The folder with the fake mlflow module is the only one that is not mounted automatically.
    return [f"container.runtime={runtime}", f"container.image={name}", f"container.mounts=[{runs.no_mlflow}]"]


@pytest.fixture(scope="module")
def control(unpacked_image: ContainerImage, slurm_runs: SlurmRuns) -> str:
    """Name of the control run: in the image, without faults."""
    name = "contained-control"
    with pytest.MonkeyPatch.context() as patch:
        for key, value in unpacked_image.env.items():
            patch.setenv(key, value)
        job = slurm_runs.submit(name, *overrides(unpacked_image, "podman", slurm_runs))
        slurm_runs.assert_finished_as(name, job, name)
    return name


def clients(subcommand: str, argument: str) -> list[psutil.Process]:
    """Return the processes of a podman subcommand with an argument."""
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if (words := process.info["cmdline"] or [])[:2] == ["podman", subcommand] and argument in words
    ]


def containers(image: ContainerImage, runs: SlurmRuns, name: str) -> list[str]:
    """Return the names of the run's containers, including stopped ones."""
    label = f"label=hpcdist.run={runs.run_dir(name).path}"
    return image.podman("ps", "--all", "--filter", label, "--format", "{{.Names}}").split()


def assert_nothing_left(image: ContainerImage, runs: SlurmRuns, name: str) -> None:
    wait_for(lambda: not containers(image, runs, name), "the containers to be removed", timeout_s=REMOVAL_TIMEOUT_S)
    assert not runs.rank_processes(name)
    folder = runs.attempt(name).path
    assert not [*folder.glob("*.line"), *folder.glob("*.exit")]


@pytest.mark.parametrize(
    "runtime",
    [pytest.param("podman", marks=pytest.mark.slow), pytest.param("charliecloud", marks=pytest.mark.faults)],
)
def test_requeued_job_resumes_at_the_last_step(
    slurm_runs: SlurmRuns, devcluster: DevCluster, in_image: ContainerImage, control: str, runtime: str
) -> None:
    name = f"requeued-{runtime}"
    job = slurm_runs.submit_held(name, *overrides(in_image, runtime, slurm_runs))
    inside = slurm_runs.rank_processes(name)
    assert sorted(inside) == [0, 1, 2, 3]
    for rank, process in inside.items():
        # The rank runs the image's Python in its own root file system.
        assert process.exe() != os.path.realpath(psutil.Process().exe())
        assert os.stat(f"/proc/{process.pid}/root").st_ino != os.stat("/").st_ino
        assert process.environ()["SLURMD_NODENAME"] == f"n{rank // 2 + 1}"
    if runtime == "podman":
        assert sorted(containers(in_image, slurm_runs, name)) == [f"hpcdist-{job}-1-{rank}" for rank in range(4)]
        # Slurm's signals may end podman's client, which is a child of the step: the rank continues.
        clients("run", f"--name=hpcdist-{job}-1-1")[0].kill()
        wait_for(lambda: clients("attach", f"hpcdist-{job}-1-1"), "a new client to attach")
    devcluster.run("scontrol", "requeue", job)
    slurm_runs.wait_stop_request(name)
    slurm_runs.release(name)
    assert slurm_runs.wait_requeued(name).reason == "everything saved (Slurm ends the job)"
    saved = slurm_runs.checkpoint_steps(name)[-1]
    assert HOLD_STEP <= saved < LAST_STEP
    assert_nothing_left(in_image, slurm_runs, name)
    slurm_runs.start_now(job)

    slurm_runs.assert_finished_as(name, job, control)
    assert slurm_runs.resumed_at(name, 2) == saved
    assert slurm_runs.hosts(name, 2) == ["n1", "n1", "n2", "n2"]
    assert (slurm_runs.state(name).attempt, slurm_runs.state(name).restarts) == (2, 0)
    assert_nothing_left(in_image, slurm_runs, name)
    seen = read_json(slurm_runs.run_dir(name).container) or {}
    assert (seen["runtime"], seen["hpcdist"]) == (runtime, "0.1.0")
    if runtime == "podman":
        assert (
            seen["image_digest"]
            == f"sha256:{in_image.podman('image', 'inspect', '--format', '{{.Id}}', in_image.name).strip()}"
        )


@pytest.mark.faults
@pytest.mark.parametrize("runtime", RUNTIMES)
def test_killed_rank_restarts_the_ranks_in_place(
    slurm_runs: SlurmRuns, in_image: ContainerImage, control: str, runtime: str
) -> None:
    name = f"killed-{runtime}"
    job = slurm_runs.submit_held(name, *overrides(in_image, runtime, slurm_runs))
    slurm_runs.rank_processes(name)[3].kill()
    slurm_runs.release(name)
    slurm_runs.assert_finished_as(name, job, control)
    assert "rank 3 on n2 was killed by SIGKILL after step " in slurm_runs.job_log(name)
    assert (slurm_runs.state(name).attempt, slurm_runs.state(name).restarts) == (2, 1)
    assert_nothing_left(in_image, slurm_runs, name)


@pytest.mark.slow
def test_containers_are_removed_after_slurm_kills_the_whole_job(
    slurm_runs: SlurmRuns, devcluster: DevCluster, in_image: ContainerImage
) -> None:
    """After KillWait Slurm kills supervisor, srun and tasks at once; it does not know the containers."""
    name = "killed-whole"
    job = slurm_runs.submit_held(name, *overrides(in_image, "podman", slurm_runs))
    assert len(containers(in_image, slurm_runs, name)) == 4
    devcluster.run("scancel", "--full", "--signal=KILL", job)
    devcluster.wait_job_state(job, *JOB_ENDED)
    assert_nothing_left(in_image, slurm_runs, name)


@pytest.mark.faults
def test_cancelled_job_saves_and_leaves_no_container(
    slurm_runs: SlurmRuns, devcluster: DevCluster, in_image: ContainerImage
) -> None:
    name = "scancelled-podman"
    job = slurm_runs.submit_held(name, *overrides(in_image, "podman", slurm_runs))
    devcluster.run("scancel", job)
    slurm_runs.wait_stop_request(name)
    slurm_runs.release(name)
    assert slurm_runs.wait_end(name, job).status == "stopped"
    assert slurm_runs.checkpoint_steps(name)[-1] >= HOLD_STEP
    assert_nothing_left(in_image, slurm_runs, name)


@pytest.mark.faults
def test_restarted_supervisor_removes_the_containers_of_the_killed_one(
    slurm_runs: SlurmRuns, in_image: ContainerImage, control: str
) -> None:
    name = "supervisor-killed-podman"
    job = slurm_runs.submit_held(name, *overrides(in_image, "podman", slurm_runs))
    old = slurm_runs.rank_processes(name).values()
    os.kill(slurm_runs.holder_pid(name), signal.SIGKILL)
    slurm_runs.assert_finished_as(name, job, control)
    assert slurm_runs.state(name).attempt == 2
    assert not any(process.is_running() for process in old), "ranks that were never released are killed"
    assert_nothing_left(in_image, slurm_runs, name)


@pytest.mark.faults
def test_preempted_job_saves_and_resumes(
    slurm_runs: SlurmRuns, devcluster: DevCluster, in_image: ContainerImage, control: str
) -> None:
    name = "preempted-podman"
    job = slurm_runs.submit_held(name, *overrides(in_image, "podman", slurm_runs))
    high = devcluster.start_high_priority_job("--nodes=4")
    slurm_runs.wait_stop_request(name)
    slurm_runs.release(name)
    saved = slurm_runs.wait_queued_again(name)
    assert saved >= HOLD_STEP
    assert_nothing_left(in_image, slurm_runs, name)
    devcluster.wait_job_state(high, "COMPLETED")
    slurm_runs.start_now(job)
    slurm_runs.assert_finished_as(name, job, control)
    assert slurm_runs.resumed_at(name, 2) == saved


@pytest.mark.faults
def test_job_saves_and_requeues_itself_ahead_of_the_time_limit(
    slurm_runs: SlurmRuns, in_image: ContainerImage, control: str
) -> None:
    """The ranks are held until they are asked to stop; only the time limit causes that."""
    name = "time-limit-podman"
    limits = ["cluster.time_limit_min=2", "cluster.signal_lead_s=60"]
    job = slurm_runs.submit(name, *HOLD_OVERRIDES, *overrides(in_image, "podman", slurm_runs), *limits)
    reason = slurm_runs.wait_requeued(name).reason
    assert reason.partition("(")[2] in ("time limit)", "the ranks received a stop signal)")
    saved = slurm_runs.checkpoint_steps(name)[-1]
    assert_nothing_left(in_image, slurm_runs, name)
    slurm_runs.start_now(job)
    slurm_runs.assert_finished_as(name, job, control)
    assert slurm_runs.resumed_at(name, 2) == saved


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
            ["container.runtime=podman", "container.image=localhost/typo"],
            "localhost/typo is not in podman's store on",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["container.runtime=podman", "container.image=IMAGE", "container.python=/no/python"],
            "has no /no/python in it",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["container.runtime=charliecloud", "container.image=FOLDER", "container.python=/no/python"],
            "has no /no/python in",
            marks=pytest.mark.slow,
        ),
        (
            ["container.runtime=charliecloud", "container.image=FOREIGN"],
            "is for another processor architecture than this machine has",
        ),
        (["container.runtime=charliecloud", "container.image=/nowhere"], "no such file or folder: /nowhere"),
        pytest.param(
            ["container.runtime=podman", "container.image=IMAGE", "container.mounts=[/nowhere]"],
            "/nowhere does not exist",
            marks=pytest.mark.slow,
        ),
        (["container.runtime=lxc", "container.image=/nowhere"], "container.runtime must be "),
    ],
)
def test_submit_rejects_invalid_container_settings(
    slurm_runs: SlurmRuns, request: pytest.FixtureRequest, tmp_path: Path, settings: list[str], message: str
) -> None:
    name, images = "invalid", {}
    if "container.image=FOREIGN" in settings:
        request.getfixturevalue("containers")  # needs charliecloud
        images["FOREIGN"] = str(foreign_image(tmp_path / "foreign"))
    elif "container.runtime=podman" in settings or "container.image=FOLDER" in settings:
        in_image: ContainerImage = request.getfixturevalue("in_image")
        images |= {"IMAGE": in_image.name, "FOLDER": str(in_image.folder)}
    for placeholder, image in images.items():
        settings = [text.replace(f"={placeholder}", f"={image}") for text in settings]
    code, output = slurm_runs.command("submit", *slurm_runs.config(name), "--cluster", "devcluster", *settings)
    assert (code, message in output, output.count("\n")) == (2, True, 1), output
    assert not slurm_runs.run_dir(name).path.exists()
