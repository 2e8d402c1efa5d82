"""The command lines and the environment of containers of ranks."""

from dataclasses import replace
from pathlib import Path

import pytest

from hpcdist.config.cluster_schema import ClusterConfig
from hpcdist.config.schema import Config
from hpcdist.containers import runtimes
from hpcdist.containers.mounts import Mount
from hpcdist.containers.runtimes import outer_env
from hpcdist.containers.spec import IMAGE_PYTHON, ContainerSpec
from hpcdist.job.srun import step_command
from hpcdist.run.folder import RunDir
from hpcdist.supervisor.plan import rank_command

RUN = RunDir(Path("/shared/runs/digits/my first"))
MOUNTS = (Mount(source="/shared", target="/shared"), Mount(source="/scratch/imagenet", target="/data", read_only=True))
SPEC = ContainerSpec(
    runtime="apptainer",
    image="/images/x",
    mounts=MOUNTS,
    workdir=Path("/shared/project"),
    env=("SLURM_*", "NCCL_*", "HPCDIST_*"),
    uses_gpus=True,
    extra_args=("--mine",),
)
WORKER = rank_command(RUN.path, IMAGE_PYTHON)


def step(spec: ContainerSpec) -> list[str]:
    config = Config(cluster=ClusterConfig(nodes=2, tasks_per_node=4, gpus_per_node=4))
    return step_command(config, RUN.attempt(1), WORKER, spec)


@pytest.mark.parametrize(
    ("runtime", "read_only", "after"),
    [
        ("apptainer", "--bind=/scratch/imagenet:/data:ro", ["/images/x"]),
        ("enroot", "--mount=/scratch/imagenet:/data:none:x-create=auto,rbind,ro", ["/images/x", "in"]),
        ("pyxis", "--container-mounts=/shared:/shared,/scratch/imagenet:/data:ro", ["sh", "-c"]),
    ],
)
def test_runtime_gets_read_only_mounts_and_further_arguments(runtime: str, read_only: str, after: list[str]) -> None:
    """tests/contract has the rest of the command lines."""
    command = step(replace(SPEC, runtime=runtime))
    assert read_only in command
    place = command.index("--mine") + 1
    assert command[place : place + len(after)] == after
    assert command[-len(WORKER) :] == WORKER


def test_enroot_starts_a_folder_by_its_name() -> None:
    spec = replace(SPEC, runtime="enroot", image="/images/hpcdist", is_folder=True)
    assert step(spec)[step(spec).index("in") - 1] == "hpcdist"
    assert outer_env(spec, {"ENROOT_DATA_PATH": "/raid"})["ENROOT_DATA_PATH"] == "/images"


def test_pyxis_gets_one_list_of_mounts_or_none() -> None:
    """srun would keep only the last of two lists, and refuses an empty one, as for the image probe."""
    lists = [
        [word for word in step(replace(SPEC, runtime="pyxis", **changes)) if word.startswith("--container-mounts")]
        for changes in ({"mounts": ()}, {"extra_args": ("--container-mounts=/opt:/opt",)})
    ]
    assert lists == [[], ["--container-mounts=/shared:/shared,/scratch/imagenet:/data:ro,/opt:/opt"]]


def test_runtimes_pass_gpus_only_to_runs_that_use_them() -> None:
    for uses_gpus, devices in ((True, "all"), (False, "void")):
        spec = replace(SPEC, uses_gpus=uses_gpus)
        assert ("--nv" in step(spec)) == uses_gpus
        for runtime in ("enroot", "pyxis"):
            assert outer_env(replace(spec, runtime=runtime), {})["NVIDIA_VISIBLE_DEVICES"] == devices


ENV = {
    "SLURM_JOB_ID": "7",
    "SLURM_JWT": "a key",
    "NCCL_DEBUG": "INFO",
    "HPCDIST_TRACKING_URI": "https://me:secret@server",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "LD_LIBRARY_PATH": "/host",
    "PATH": "/usr/bin",
}


@pytest.mark.lost_night
def test_containers_inherit_a_reduced_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtimes, "INFINIBAND", tmp_path / "none")
    reduced = {"SLURM_JOB_ID": "7", "NCCL_DEBUG": "INFO", "PATH": "/usr/bin", "PYTHONNOUSERSITE": "1"}
    assert outer_env(SPEC, ENV) == reduced
    devices = {"NVIDIA_VISIBLE_DEVICES": "all", "NVIDIA_DRIVER_CAPABILITIES": "compute,utility"}
    of_enroot = reduced | {"ENROOT_LOGIN_SHELL": "no"} | devices
    for runtime in ("enroot", "pyxis"):
        assert outer_env(replace(SPEC, runtime=runtime), ENV) == of_enroot
    login_shell = {**ENV, "ENROOT_LOGIN_SHELL": "yes"}
    assert outer_env(replace(SPEC, runtime="enroot"), login_shell) == of_enroot | {"ENROOT_LOGIN_SHELL": "yes"}
    monkeypatch.setattr(runtimes, "INFINIBAND", tmp_path)
    with_infiniband = of_enroot | {"MELLANOX_VISIBLE_DEVICES": "all"}
    assert outer_env(replace(SPEC, runtime="pyxis"), ENV) == with_infiniband
