"""Tests of the containers of ranks: specification and checks before submission."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from container_facts import IMAGE, SPEC, install_podman, probe_output

from hpcdist.config.launch_schema import ClusterConfig, ContainerConfig, LaunchConfig
from hpcdist.config.schema import Config, DataConfig, TrainerConfig
from hpcdist.containers.spec import PASSED, ContainerSpec, Mount
from hpcdist.containers.steps import container_problems, make_mount_points, rank_container
from hpcdist.errors import UserMistake
from hpcdist.run.folder import RunDir


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


def test_runtime_none_has_no_container() -> None:
    assert rank_container(Config(), RunDir(Path("/runs/e/r")), cwd=Path("/p"), root=Path("/p")) is None


def test_configured_mount_replaces_the_default_mount(tmp_path: Path) -> None:
    config = Config(
        data=DataConfig(root=str(tmp_path)),
        container=ContainerConfig(runtime="podman", image=IMAGE, mounts=[f"/scratch/copy:{tmp_path}:ro"]),
    )
    spec = rank_container(config, RunDir(Path("/runs/e/r")), cwd=Path("/p"), root=Path("/p"))
    assert spec is not None
    assert [mount.source for mount in spec.mounts if mount.target == str(tmp_path)] == ["/scratch/copy"]


def test_system_folders_are_never_mounted() -> None:
    spec = rank_container(
        config(runtime="podman", image=IMAGE), RunDir(Path("/runs/e/r")), cwd=Path("/usr"), root=Path("/")
    )
    assert spec is not None
    assert not {"/", "/usr"} & {mount.target for mount in spec.mounts}


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
    spec = rank_container(config, RunDir(Path("/runs/e/r")), cwd=Path("/p"), root=Path("/p"))
    assert spec is not None
    assert spec.gpus == ("all" if expected else "")


# --- checks before submission


def config(**container: Any) -> Config:
    return Config(name="x", runs_dir="/runs", container=ContainerConfig(**container))


@pytest.fixture
def rootfs(tmp_path: Path) -> Path:
    for name in ("usr", "dev"):
        (tmp_path / "image" / name).mkdir(parents=True)
    return tmp_path / "image"


@pytest.mark.processes
@pytest.mark.parametrize(
    ("container", "problem"),
    [
        (
            {"runtime": "podman", "image": "x", "mounts": ["/nowhere/data:/data"]},
            "container.mounts: /nowhere/data does not exist here; mount folders that only the nodes have by"
            " container.extra_args",
        ),
        ({"runtime": "pyxis", "image": "/no.sqsh"}, "container.image: no such file or folder: /no.sqsh"),
        (
            {"runtime": "pyxis", "image": "/proc/self"},
            "container.image: /proc/self is a folder, and pyxis needs a .sqsh file or an image reference",
        ),
        ({"runtime": "apptainer", "image": "/no.sif"}, "container.image: no such file or folder: /no.sif"),
        (
            {"runtime": "apptainer", "image": "docker://hpcdist"},
            "container.image: docker://hpcdist would be fetched by every rank: convert it to a file first",
        ),
        (
            {"runtime": "charliecloud", "image": "/proc/self"},
            "container.image: /proc/self holds no root file system (no usr and dev in it)",
        ),
        (
            {"runtime": "enroot", "image": "/proc/self"},
            "container.image: /proc/self holds no root file system (no usr and dev in it)",
        ),
    ],
)
def test_missing_images_and_mounts_are_reported(tmp_path: Path, container: dict[str, Any], problem: str) -> None:
    assert container_problems(config(**container), tmp_path, {"PATH": ""}) == [problem]


@pytest.mark.processes
@pytest.mark.parametrize(
    "image",
    [
        "debian",
        "ada@registry.site:5000#team/hpcdist:0.1.0",
        "docker://nvcr.io/nvidia/pytorch:26.10-py3",
        f"team/hpcdist@sha256:{'0a' * 32}",
        "dockerd://localhost/Mine:1",
        str(Path(__file__)),
    ],
)
def test_files_and_references_of_pyxis_are_accepted(tmp_path: Path, image: str) -> None:
    assert container_problems(config(runtime="pyxis", image=image), tmp_path, {"PATH": ""}) == []


@pytest.mark.processes
@pytest.mark.parametrize("image", ["podman://hpcdist", "HPCdist", "my image", "registry#a#b", "hpcdist:"])
def test_references_that_pyxis_cannot_fetch_are_reported(tmp_path: Path, image: str) -> None:
    assert container_problems(config(runtime="pyxis", image=image), tmp_path, {"PATH": ""}) == [
        f"container.image: {image} is neither a path that begins with / nor an image reference of pyxis:"
        " [USER@][REGISTRY#]IMAGE[:TAG] with IMAGE in lower case"
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
    assert (
        container_problems(
            config(runtime="podman", image=IMAGE), tmp_path, install_podman(tmp_path, f"echo '{probe_output()}'")
        )
        == []
    )


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
