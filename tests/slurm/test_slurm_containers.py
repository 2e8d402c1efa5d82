"""Ranks in containers under a real Slurm: podman, whose containers are no children of the step, and charliecloud."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import container_image
import psutil
import pytest
from container_image import ContainerImage
from containers import Containers
from hpcdist_runs import HOLD_OVERRIDES, HOLD_STEP, LAST_STEP, wait_for
from slurm_cluster import DevCluster
from slurm_runs import JOB_ENDED, SlurmRuns

from hpcdist.files.atomic import read_json

RUNTIMES = ("podman", "charliecloud")
#: The first test builds the image, unless other tests have done so.
pytestmark = pytest.mark.timeout(1200)
#: No container may outlive its job by more.
GONE_S = 30.0


@pytest.fixture(autouse=True)
def no_jobs_left(devcluster: DevCluster) -> Iterator[None]:
    yield
    devcluster.cancel_all()


@pytest.fixture(scope="module")
def boxed(containers: Containers, image: Callable[[str], str]) -> Iterator[ContainerImage]:
    with container_image.unpacked(containers, image("slim")) as found:
        yield found


@pytest.fixture
def in_image(boxed: ContainerImage, monkeypatch: pytest.MonkeyPatch) -> ContainerImage:
    """For the time of a test, whatever is started finds podman's store."""
    for name, value in boxed.env.items():
        monkeypatch.setenv(name, value)
    return boxed


def overrides(image: ContainerImage, runtime: str, runs: SlurmRuns) -> list[str]:
    name = image.name if runtime == "podman" else str(image.folder)
    # Only the folder that stands in for a missing MLflow is not mounted by itself.
    return [f"container.runtime={runtime}", f"container.image={name}", f"container.mounts=[{runs.no_mlflow}]"]


@pytest.fixture(scope="module")
def control(boxed: ContainerImage, slurm_runs: SlurmRuns) -> str:
    """Name of a run in the image that nothing happened to."""
    name = "contained-control"
    with pytest.MonkeyPatch.context() as patch:
        for key, value in boxed.env.items():
            patch.setenv(key, value)
        job = slurm_runs.submit(name, *overrides(boxed, "podman", slurm_runs))
        slurm_runs.assert_finished_as(name, job, name)
    return name


def ranks(runs: SlurmRuns, name: str) -> dict[int, psutil.Process]:
    """The ranks' processes as the host sees them, by rank."""
    found = {}
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if words[1:4] == ["-P", "-m", "hpcdist.rank.worker"] and words[-1] == str(runs.run_dir(name).path):
            found[int(process.environ()["SLURM_PROCID"])] = process
    return found


def clients(verb: str, word: str) -> list[psutil.Process]:
    """podman's own processes with a word in their command line."""
    found = psutil.process_iter(["cmdline"])
    return [it for it in found if (it.info["cmdline"] or [])[:2] == ["podman", verb] and word in it.info["cmdline"]]


def containers(image: ContainerImage, runs: SlurmRuns, name: str) -> list[str]:
    """Names of the run's containers, ended ones included."""
    label = f"label=hpcdist.run={runs.run_dir(name).path}"
    return image.podman("ps", "--all", "--filter", label, "--format", "{{.Names}}").split()


def assert_nothing_left(image: ContainerImage, runs: SlurmRuns, name: str) -> None:
    wait_for(lambda: not containers(image, runs, name), "the containers to be gone", timeout_s=GONE_S)
    assert not ranks(runs, name)
    folder = runs.attempt(name).path
    assert not [*folder.glob("*.line"), *folder.glob("*.exit")]


@pytest.mark.parametrize("runtime", ["podman", pytest.param("charliecloud", marks=pytest.mark.faults)])
def test_a_requeue_in_the_middle_loses_no_step(
    slurm_runs: SlurmRuns, devcluster: DevCluster, in_image: ContainerImage, control: str, runtime: str
) -> None:
    name = f"requeued-{runtime}"
    job = slurm_runs.submit_held(name, *overrides(in_image, runtime, slurm_runs))
    inside = ranks(slurm_runs, name)
    assert sorted(inside) == [0, 1, 2, 3]
    for rank, process in inside.items():
        # The image's own Python, in a root of its own.
        assert process.exe() != os.path.realpath(psutil.Process().exe())
        assert os.stat(f"/proc/{process.pid}/root").st_ino != os.stat("/").st_ino
        assert process.environ()["SLURMD_NODENAME"] == f"n{rank // 2 + 1}"
    if runtime == "podman":
        assert sorted(containers(in_image, slurm_runs, name)) == [f"hpcdist-{job}-1-{rank}" for rank in range(4)]
        # Where Slurm tells processes by their parents, its signals may end podman's clients: the ranks stay.
        clients("run", f"--name=hpcdist-{job}-1-1")[0].kill()
        wait_for(lambda: clients("attach", f"hpcdist-{job}-1-1"), "another client to take its place")
    devcluster.run("scontrol", "requeue", job)
    wait_for(slurm_runs.attempt(name).request.exists, "the supervisor to be told")
    slurm_runs.release(name)
    assert slurm_runs.wait_status(name, "queued").reason == "stopped with everything saved (SIGTERM to the supervisor)"
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
def test_a_killed_rank_is_restarted_in_place(
    slurm_runs: SlurmRuns, in_image: ContainerImage, control: str, runtime: str
) -> None:
    name = f"killed-{runtime}"
    job = slurm_runs.submit_held(name, *overrides(in_image, runtime, slurm_runs))
    ranks(slurm_runs, name)[3].kill()
    slurm_runs.release(name)
    slurm_runs.assert_finished_as(name, job, control)
    assert "rank 3 on n2 was killed by SIGKILL (out of memory?) at step " in slurm_runs.job_log(name)
    assert (slurm_runs.state(name).attempt, slurm_runs.state(name).restarts) == (2, 1)
    assert_nothing_left(in_image, slurm_runs, name)


def test_containers_end_with_their_step_when_nobody_is_left_to_remove_them(
    slurm_runs: SlurmRuns, devcluster: DevCluster, in_image: ContainerImage
) -> None:
    """As at the end of KillWait: supervisor, srun and all tasks are killed at once, and Slurm knows no container."""
    name = "killed-whole"
    job = slurm_runs.submit_held(name, *overrides(in_image, "podman", slurm_runs))
    assert len(containers(in_image, slurm_runs, name)) == 4
    devcluster.run("scancel", "--full", "--signal=KILL", job)
    devcluster.until(lambda: devcluster.job(job)["JobState"] in JOB_ENDED, "the job is over")
    assert_nothing_left(in_image, slurm_runs, name)


@pytest.mark.faults
def test_a_cancelled_run_saves_and_leaves_no_container(
    slurm_runs: SlurmRuns, devcluster: DevCluster, in_image: ContainerImage
) -> None:
    name = "scancelled-podman"
    job = slurm_runs.submit_held(name, *overrides(in_image, "podman", slurm_runs))
    devcluster.run("scancel", job)
    wait_for(slurm_runs.attempt(name).request.exists, "the supervisor to be told")
    slurm_runs.release(name)
    assert slurm_runs.wait_end(name, job).status == "stopped"
    assert slurm_runs.checkpoint_steps(name)[-1] >= HOLD_STEP
    assert_nothing_left(in_image, slurm_runs, name)


@pytest.mark.faults
def test_the_next_supervisor_ends_the_containers_of_a_killed_one(
    slurm_runs: SlurmRuns, in_image: ContainerImage, control: str
) -> None:
    name = "supervisor-killed-podman"
    job = slurm_runs.submit_held(name, *overrides(in_image, "podman", slurm_runs))
    old = ranks(slurm_runs, name).values()
    os.kill(slurm_runs.holder_pid(name), signal.SIGKILL)
    slurm_runs.assert_finished_as(name, job, control)
    assert slurm_runs.state(name).attempt == 2
    assert not any(process.is_running() for process in old), "they were never released"
    assert_nothing_left(in_image, slurm_runs, name)


@pytest.mark.faults
def test_a_preempted_run_goes_on(
    slurm_runs: SlurmRuns, devcluster: DevCluster, in_image: ContainerImage, control: str
) -> None:
    name = "preempted-podman"
    job = slurm_runs.submit_held(name, *overrides(in_image, "podman", slurm_runs))
    high = devcluster.sbatch("true", "--partition=high", "--nodes=4", "--exclusive")
    wait_for(slurm_runs.attempt(name).request.exists, "the supervisor to be told")
    slurm_runs.release(name)
    slurm_runs.wait_status(name, "queued")
    saved = slurm_runs.checkpoint_steps(name)[-1]
    assert saved >= HOLD_STEP
    assert_nothing_left(in_image, slurm_runs, name)
    devcluster.until(lambda: devcluster.job(high)["JobState"] == "COMPLETED", "the job of high has run")
    slurm_runs.start_now(job)
    slurm_runs.assert_finished_as(name, job, control)
    assert slurm_runs.resumed_at(name, 2) == saved


@pytest.mark.faults
def test_the_time_limit(slurm_runs: SlurmRuns, in_image: ContainerImage, control: str) -> None:
    """The ranks hold until they are asked to stop, which only the time limit does."""
    name = "time-limit-podman"
    limits = ["cluster.time_limit_min=2", "cluster.signal_lead_s=60"]
    job = slurm_runs.submit(name, *HOLD_OVERRIDES, *overrides(in_image, "podman", slurm_runs), *limits)
    reason = slurm_runs.wait_status(name, "queued", timeout_s=150).reason
    assert reason.partition("(")[2] in ("time limit)", "the ranks received a stop signal)")
    saved = slurm_runs.checkpoint_steps(name)[-1]
    assert_nothing_left(in_image, slurm_runs, name)
    slurm_runs.start_now(job)
    slurm_runs.assert_finished_as(name, job, control)
    assert slurm_runs.resumed_at(name, 2) == saved


# --- what a user can get wrong


def test_a_runtime_that_the_nodes_have_not_ends_the_run_at_once(
    slurm_runs: SlurmRuns, devcluster: DevCluster, tmp_path: Path
) -> None:
    name = "no-runtime"
    (tmp_path / "image.sif").touch()
    job = slurm_runs.submit(name, "container.runtime=apptainer", f"container.image={tmp_path}/image.sif")
    state = slurm_runs.wait_end(name, job)
    wanted = ("failed", True, 1, "apptainer is not installed on n1, n2")
    assert (state.status, state.rejected, state.attempt, state.reason) == wanted


def foreign_image(folder: Path) -> Path:
    """A root file system whose Python is for a processor that nobody has."""
    for name in ("usr/bin", "dev", "proc", "sys", "tmp", "etc", "home", "run"):
        (folder / name).mkdir(parents=True)
    for name in ("passwd", "group"):
        (folder / "etc" / name).touch()
    own = bytearray(Path("/bin/sh").read_bytes())
    own[18:20] = b"\xfe\xca"  # the machine that an ELF file is for
    for name in ("python3", "sh"):
        (folder / "usr/bin" / name).write_bytes(own)
        (folder / "usr/bin" / name).chmod(0o755)
    (folder / "bin").symlink_to("usr/bin")
    return folder


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["container.runtime=podman", "container.image=localhost/typo"], "localhost/typo is not in podman's store on"),
        (
            ["container.runtime=podman", "container.image=IMAGE", "container.python=/no/python"],
            "has no /no/python in it",
        ),
        (
            ["container.runtime=charliecloud", "container.image=FOLDER", "container.python=/no/python"],
            "has no /no/python in",
        ),
        (
            ["container.runtime=charliecloud", "container.image=FOREIGN"],
            "is for another processor architecture than this machine has",
        ),
        (["container.runtime=charliecloud", "container.image=/nowhere"], "no such file or folder: /nowhere"),
        (
            ["container.runtime=podman", "container.image=IMAGE", "container.mounts=[/nowhere]"],
            "/nowhere does not exist",
        ),
        (["container.runtime=lxc", "container.image=IMAGE"], "container.runtime must be "),
    ],
)
def test_before_the_queue_a_mistake_is_one_line(
    slurm_runs: SlurmRuns, in_image: ContainerImage, tmp_path: Path, words: list[str], told: str
) -> None:
    name = "mistaken"
    places = {"IMAGE": in_image.name, "FOLDER": str(in_image.folder)}
    if "container.image=FOREIGN" in words:
        places["FOREIGN"] = str(foreign_image(tmp_path / "foreign"))
    for word, place in places.items():
        words = [text.replace(f"={word}", f"={place}") for text in words]
    code, output = slurm_runs.command("submit", *slurm_runs.config(name), "--cluster", "devcluster", *words)
    assert (code, told in output, output.count("\n")) == (2, True, 1), output
    assert not slurm_runs.run_dir(name).path.exists()
