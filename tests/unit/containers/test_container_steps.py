"""Steps of a job with containers, and the containers of ranks."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from containers import (
    IMAGE,
    PYXIS_CORRUPT_LOG,
    PYXIS_LOG,
    PYXIS_OTHER_TASK_LOG,
    SPEC,
    install_podman,
    probe_output,
)

import hpcdist
from hpcdist.config.launch_schema import ClusterConfig, ContainerConfig, LaunchConfig
from hpcdist.config.schema import Config, DataConfig, TrainerConfig
from hpcdist.containers.spec import PASSED, ContainerSpec, Mount
from hpcdist.containers.steps import ContainerSteps, container_problems, make_mount_points, rank_container
from hpcdist.errors import UserMistake
from hpcdist.host.files import read_json
from hpcdist.run.folder import Attempt, RunDir

# --- The Slurm steps that check images and remove containers


@pytest.fixture
def attempt(tmp_path: Path) -> Attempt:
    (tmp_path / "001").mkdir()
    return Attempt(tmp_path / "001")


def test_container_of_pyxis_that_slurm_interrupts_is_no_failure_of_the_rank(attempt: Attempt, tmp_path: Path) -> None:
    steps = ContainerSteps(replace(SPEC, runtime="pyxis"), RunDir(tmp_path), {})
    ended = "child 77 failed with error code: 1"
    attempt.log(0).write_text(PYXIS_LOG.replace(ended, f"child 77 terminated with signal {int(signal.SIGUSR2)}"))
    attempt.log(1).write_text(PYXIS_LOG)
    for rank in (0, 1):
        steps.exit_code(attempt, rank, "n1", 1)
    assert [attempt.outcomes()[rank]["interrupted"] for rank in (0, 1)] == [True, False]
    # With proctrack/cgroup the signal ends the task itself, and no message is printed.
    assert steps.exit_code(attempt, 2, "n1", -signal.SIGUSR2) == -signal.SIGUSR2
    assert attempt.outcomes()[2]["interrupted"]
    assert attempt.outcomes()[2]["error"] == "pyxis was interrupted by SIGUSR2 while it created the container"


def test_rank_whose_container_another_task_has_not_started_is_a_consequence(attempt: Attempt, tmp_path: Path) -> None:
    steps = ContainerSteps(replace(SPEC, runtime="pyxis"), RunDir(tmp_path), {})
    for rank, log in enumerate((PYXIS_OTHER_TASK_LOG, PYXIS_CORRUPT_LOG)):
        attempt.log(rank).write_text(log)
        steps.exit_code(attempt, rank, "n2", 1)
    assert [attempt.outcomes()[rank]["peer_lost"] for rank in (0, 1)] == [True, False]


def test_start_failure_is_written_as_the_outcome_of_the_rank(attempt: Attempt, tmp_path: Path) -> None:
    steps = ContainerSteps(SPEC, RunDir(tmp_path), {})
    attempt.log(2).write_text("Error: no space\n")
    assert steps.exit_code(attempt, 2, "n1", 125) == 125
    assert {key: attempt.outcomes()[2][key] for key in ("outcome", "host", "error", "peer_lost")} == {
        "outcome": "failed",
        "host": "n1",
        "error": "podman could not start the container (exit code 125): Error: no space",
        "peer_lost": False,
    }
    assert steps.exit_code(attempt, 3, "n1", 127) == 127
    assert attempt.outcomes()[3]["outcome"] == "rejected"
    assert [steps.exit_code(attempt, 1, "n1", code) for code in (137, 143, 1, 0, -15, 255)] == [-9, -15, 1, 0, -15, 255]
    assert sorted(attempt.outcomes()) == [2, 3]


def test_files_of_killed_wrappers_are_removed(attempt: Attempt, tmp_path: Path) -> None:
    os.mkfifo(attempt.path / "rank-00000.line")
    (attempt.path / "rank-00001.exit").write_text("137\n")
    attempt.log(1).write_text("stays")
    ContainerSteps(replace(SPEC, runtime="apptainer"), RunDir(tmp_path), {}).clean_up(attempt, failed=True)
    assert [path.name for path in attempt.path.iterdir()] == ["rank-00001.log"]


class FakeJob:
    """A job whose srun and podman are scripts that record their calls."""

    def __init__(self, folder: Path, srun: str) -> None:
        self.log = folder / "calls"
        for name, script in (("srun", srun), ("podman", f"echo {'ab' * 32}")):
            tool = folder / name
            tool.write_text(f'#!/bin/sh\necho {name} "$@" >> {self.log}\n{script}\n')
            tool.chmod(0o755)
        self.env = {"PATH": f"{folder}:/usr/bin:/bin", "SLURM_JOB_NODELIST": "n[1-2]", "PYTHONPATH": "/host"}

    def calls(self) -> list[str]:
        return [text for text in self.log.read_text().splitlines() if text.startswith(("srun", "podman"))]


@pytest.mark.processes
def test_each_attempt_removes_containers_and_the_first_checks_the_image(tmp_path: Path) -> None:
    job = FakeJob(tmp_path, f"case $* in *label*-c*) echo '0: {probe_output()}'; echo '1: {probe_output()}';; esac")
    run = RunDir(tmp_path)
    steps = ContainerSteps(SPEC, run, job.env)
    env_before = os.environ.copy()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", job.env["PATH"])
        steps.prepare(lambda: None)
        steps.prepare(lambda: None)
    assert os.environ == env_before
    started = [call.split()[:8] for call in job.calls() if call.startswith("srun")]
    assert len(started) == 3, "two remove containers, one checks the image"
    common = "srun --job-name=hpcdist-containers --overlap --nodes=2 --ntasks=2 --ntasks-per-node=1"
    common += " --cpus-per-task=1 --input=none"
    assert started == [common.split()] * 3
    assert "remove podman hpcdist.run=/runs/e/r" in job.calls()[0]
    assert read_json(run.container) == {
        "runtime": "podman",
        "image": IMAGE,
        "image_digest": f"sha256:{'ab' * 32}",
        "hpcdist": hpcdist.__version__,
        "python": "3.12.3",
        "torch": "2.15.0",
        "cuda": "13.2",
    }


@pytest.mark.processes
def test_containers_of_pyxis_are_removed_after_a_killed_supervisor_or_a_failed_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = FakeJob(tmp_path, f"case $* in *label*) echo '0: {probe_output()}'; echo '1: {probe_output()}';; esac")
    monkeypatch.setenv("PATH", job.env["PATH"])
    spec = replace(SPEC, runtime="pyxis")
    steps = ContainerSteps(spec, RunDir(tmp_path), {**job.env, "SLURM_JOB_ID": "7"})

    def num_removals() -> int:
        return sum(" remove pyxis 7" in call for call in job.calls())

    steps.prepare(lambda: None)
    assert num_removals() == 1, "an earlier supervisor may have been killed"
    steps.remove_containers()
    steps.prepare(lambda: None)
    assert num_removals() == 1, "pyxis removes the containers of a step that ends by itself"
    steps.clean_up(Attempt(tmp_path / "001"), failed=True)
    assert num_removals() == 2
    steps.prepare(lambda: None)
    assert num_removals() == 3, "SIGKILL to a step that has not ended also ends pyxis' removal"


@pytest.mark.processes
def test_each_component_of_a_heterogeneous_job_has_separate_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = FakeJob(tmp_path, f"case $* in *label*-c*) echo '0: {probe_output()}'; echo '1: {probe_output()}';; esac")
    monkeypatch.setenv("PATH", job.env["PATH"])
    groups = {"SLURM_JOB_NODELIST_HET_GROUP_0": "n1", "SLURM_JOB_NODELIST_HET_GROUP_1": "n[2-3]"}
    spec = replace(SPEC, gpus="all")
    ContainerSteps(spec, RunDir(tmp_path), job.env | groups | {"SLURM_HET_SIZE": "2"}, het=True).prepare(lambda: None)
    calls = [call for call in job.calls() if call.startswith("srun")]
    expected = [{"--het-group=0", "--nodes=1", "--ntasks=1"}, {"--het-group=1", "--nodes=2", "--ntasks=2"}]
    assert all(words <= {*call.split()} for call, words in zip(calls, [*expected, *expected], strict=True))
    assert "gpu" not in "".join(calls), "some components have no GPUs"


@pytest.mark.processes
@pytest.mark.parametrize(
    ("error", "is_logged"),
    [
        ("srun: error: Slurm job 12 has expired", False),
        ("srun: error: Unable to confirm allocation for job 4: Job is pending execution", False),
        ("Error: no space", True),
    ],
)
def test_remaining_containers_are_logged_unless_the_job_is_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, error: str, is_logged: bool
) -> None:
    job = FakeJob(tmp_path, f"echo '{error}' >&2; exit 1")
    monkeypatch.setenv("PATH", job.env["PATH"])
    ContainerSteps(SPEC, RunDir(tmp_path), job.env).remove_containers()
    assert (f"containers may remain on a node: {error}" in caplog.text) == is_logged


# --- The containers of ranks: specification and checks before submission


def test_specification_has_folders_variables_and_gpus_of_the_config(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    run = RunDir(tmp_path / "runs/digits/first")
    config = Config(
        trainer=TrainerConfig(script=["/code/train.py"]),
        data=DataConfig(root=str(tmp_path / "data")),
        launch=LaunchConfig(env={"MY_FLAG": "1", "MY_TOKEN": "secret"}),
        cluster=ClusterConfig(gpus_per_node=4, env={"SITE": "x"}),
        container=ContainerConfig(
            runtime="apptainer",
            image="/i.sif",
            mounts=["/scratch:/fast:ro"],
            env=["WANDB_MODE"],
            extra_args=["--fakeroot"],
        ),
    )
    spec = rank_container(config, run, cwd=tmp_path / "project/sub", root=tmp_path / "project")
    assert spec == ContainerSpec(
        runtime="apptainer",
        image="/i.sif",
        run=run.path,
        mounts=(
            Mount(source="/code", target="/code"),
            Mount(source="/scratch", target="/fast", read_only=True),
            *(
                Mount(source=str(path), target=str(path))
                for path in (tmp_path / "data", tmp_path / "project", run.path)
            ),
        ),
        workdir=tmp_path / "project/sub",
        env=(*PASSED, "WANDB_MODE", "SITE", "MY_FLAG", "MY_TOKEN"),
        gpus="all",
        extra_args=("--fakeroot",),
    )


def spec_of(config: Config, cwd: str = "/p", root: str = "/p") -> ContainerSpec:
    spec = rank_container(config, RunDir(Path("/runs/e/r")), cwd=Path(cwd), root=Path(root))
    assert spec is not None
    return spec


def test_configured_mount_replaces_the_default_one_and_system_folders_are_never_mounted(tmp_path: Path) -> None:
    config = Config(
        data=DataConfig(root=str(tmp_path)),
        container=ContainerConfig(runtime="podman", image=IMAGE, mounts=[f"/scratch/copy:{tmp_path}:ro"]),
    )
    mounts = {mount.target: mount.source for mount in spec_of(config, "/usr", "/").mounts}
    assert mounts[str(tmp_path)] == "/scratch/copy"
    assert not {"/", "/usr"} & mounts.keys()


@pytest.mark.parametrize(
    ("setting", "device", "gpus", "expected"),
    [
        ("auto", "auto", 4, True),
        ("auto", "cpu", 4, False),
        ("auto", "auto", 0, False),
        ("all", "cpu", 0, True),
        ("none", "auto", 4, False),
    ],
)
def test_gpus_depend_on_setting_device_and_request(setting: Any, device: Any, gpus: int, expected: bool) -> None:
    config = Config(
        launch=LaunchConfig(device=device),
        cluster=ClusterConfig(gpus_per_node=gpus),
        container=ContainerConfig(runtime="podman", image=IMAGE, gpus=setting),
    )
    assert spec_of(config).gpus == ("all" if expected else "")


# --- checks before submission
def config(**container: Any) -> Config:
    return Config(name="x", runs_dir="/runs", container=ContainerConfig(**container))


@pytest.fixture
def rootfs(tmp_path: Path) -> Path:
    for name in ("usr", "dev"):
        (tmp_path / "image" / name).mkdir(parents=True)
    return tmp_path / "image"


NO_ROOTFS = "/proc/self holds no root file system (no usr and dev in it)"
NO_REFERENCE = (
    "{image} is neither a path that begins with / nor an image reference of pyxis: [USER@][REGISTRY#]IMAGE[:TAG] with"
    " IMAGE in lower case"
)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("runtime", "image", "problem"),
    [
        ("pyxis", "/no.sqsh", "no such file or folder: /no.sqsh"),
        ("pyxis", "/proc/self", "/proc/self is a folder, and pyxis needs a .sqsh file or an image reference"),
        *(("pyxis", image, NO_REFERENCE) for image in ("podman://hpcdist", "HPC", "my image", "registry#a#b", "hpc:")),
        ("apptainer", "/no.sif", "no such file or folder: /no.sif"),
        (
            "apptainer",
            "docker://hpcdist",
            "docker://hpcdist would be fetched by every rank: convert it to a file first",
        ),
        ("charliecloud", "/proc/self", NO_ROOTFS),
        ("enroot", "/proc/self", NO_ROOTFS),
        *(
            ("pyxis", image, None)
            for image in (
                "debian",
                "ada@registry.site:5000#team/hpcdist:0.1.0",
                "docker://nvcr.io/nvidia/pytorch:26.10-py3",
                f"team/hpcdist@sha256:{'0a' * 32}",
                "dockerd://localhost/Mine:1",
                str(Path(__file__)),
            )
        ),
    ],
)
def test_images_that_a_runtime_cannot_start_are_reported(
    tmp_path: Path, runtime: str, image: str, problem: str | None
) -> None:
    expected = [] if problem is None else [f"container.image: {problem.format(image=image)}"]
    assert container_problems(config(runtime=runtime, image=image), tmp_path, {"PATH": ""}) == expected


def test_missing_mount_is_reported(tmp_path: Path) -> None:
    own = config(runtime="podman", image="x", mounts=["/nowhere/data:/data"])
    assert container_problems(own, tmp_path, {"PATH": ""}) == [
        "container.mounts: /nowhere/data does not exist here; mount folders that only the nodes have by"
        " container.extra_args"
    ]


@pytest.mark.processes
def test_image_missing_in_the_local_store_is_reported(tmp_path: Path) -> None:
    env = install_podman(tmp_path, 'echo "Error: inspecting object: $5: image not known" >&2; exit 125')
    problem = (
        "container.image: localhost/typo is not in podman's store on this machine (inspecting object: localhost/typo:"
        " image not known): build or load it, or set container.check_image=false if only the nodes have it"
    )
    container = {"runtime": "podman", "image": "localhost/typo"}
    assert container_problems(config(**container), tmp_path, env) == [problem]
    assert container_problems(config(**container, check_image=False), tmp_path, env) == []
    assert container_problems(config(**container), tmp_path, {"PATH": "/nowhere"}) == []


@pytest.mark.processes
def test_image_of_another_version_is_reported(tmp_path: Path) -> None:
    env = install_podman(tmp_path, f"[ $1 = image ] || echo '{probe_output(hpcdist='0.0.1')}'")
    (problem,) = container_problems(config(runtime="podman", image=IMAGE), tmp_path, env)
    assert problem.startswith(f"container.image: {IMAGE} has hpcdist 0.0.1, this is ")
    env = install_podman(tmp_path, f"echo '{probe_output()}'")
    assert container_problems(config(runtime="podman", image=IMAGE), tmp_path, env) == []


# --- mount points and digests
def test_mount_points_are_created_in_an_unpacked_image(rootfs: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    file = Path(__file__)
    target = Path("/srv/code")  # not below /tmp, which ch-run shares with the host
    mounts = (
        Mount(source=str(file.parent), target=str(target)),
        Mount(source=str(file), target="/etc/one.py"),
        Mount(source=str(tmp_path), target=str(tmp_path)),
    )
    spec = replace(SPEC, runtime="charliecloud", image=str(rootfs), mounts=mounts)
    make_mount_points(spec)
    make_mount_points(spec)
    assert (rootfs / str(target)[1:]).is_dir()
    assert [(rootfs / "etc" / name).is_file() for name in ("one.py", "hosts", "resolv.conf")] == [True] * 3
    assert (rootfs / "tmp").exists() == (not str(tmp_path).startswith("/tmp"))


def test_mount_point_that_cannot_be_created_is_an_error(rootfs: Path) -> None:
    (rootfs / "data").touch()
    spec = replace(SPEC, runtime="charliecloud", image=str(rootfs), mounts=(Mount(source="/usr", target="/data/x"),))
    problem = r"image has no mount point /data/x, and it cannot be created \(Not a .*\): ask the owner"
    with pytest.raises(UserMistake, match=problem):
        make_mount_points(spec)
