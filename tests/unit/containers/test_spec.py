"""The container of ranks: its specification, mounts, and checks before a submission."""

from pathlib import Path
from typing import Any, cast

import pytest

from hpcdist.config.cluster_schema import ClusterConfig, ContainerConfig
from hpcdist.config.launch_schema import LaunchConfig
from hpcdist.config.schema import Config
from hpcdist.config.training_schema import DataConfig, TrainerConfig
from hpcdist.containers.mounts import Mount, without_nested
from hpcdist.containers.spec import PASSED, ContainerSpec, container_problems, rank_container
from hpcdist.errors import UserMistake
from hpcdist.run.folder import RunDir


def test_spec_has_folders_variables_and_gpus_of_the_config(tmp_path: Path) -> None:
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
    spec = rank_container(config, run, {}, cwd=tmp_path / "project/sub", root=tmp_path / "project")
    assert spec == ContainerSpec(
        runtime="apptainer",
        image="/i.sif",
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
        uses_gpus=True,
        extra_args=("--fakeroot",),
    )


def spec_of(config: Config, cwd: str = "/p", root: str = "/p") -> ContainerSpec:
    spec = rank_container(config, RunDir(Path("/runs/e/r")), {}, cwd=Path(cwd), root=Path(root))
    assert spec is not None
    return spec


def test_configured_mount_replaces_the_default_one(tmp_path: Path) -> None:
    config = Config(
        data=DataConfig(root=str(tmp_path)),
        container=ContainerConfig(runtime="apptainer", image="/i.sif", mounts=[f"/scratch/copy:{tmp_path}:ro"]),
    )
    mounts = {mount.target: mount.source for mount in spec_of(config, "/usr", "/").mounts}
    assert mounts[str(tmp_path)] == "/scratch/copy"
    assert not {"/", "/usr"} & mounts.keys()


def test_folder_of_compiled_code_is_mounted_if_it_exists(tmp_path: Path) -> None:
    config = Config(runs_dir=str(tmp_path), container=ContainerConfig(runtime="apptainer", image="/i.sif"))
    folder = tmp_path / ".hpcdist-compiled"
    mount = Mount(source=str(folder), target=str(folder))
    assert mount not in spec_of(config).mounts
    folder.mkdir()
    assert mount in spec_of(config).mounts


def test_gpus_depend_on_device_and_request() -> None:
    for device, gpus, expected in (("auto", 4, True), ("cpu", 4, False), ("auto", 0, False)):
        config = Config(
            launch=LaunchConfig(device=cast(Any, device)),
            cluster=ClusterConfig(gpus_per_node=gpus),
            container=ContainerConfig(runtime="apptainer", image="/i.sif"),
        )
        assert spec_of(config).uses_gpus is expected


def config(**container: Any) -> Config:
    return Config(name="x", runs_dir="/runs", container=ContainerConfig(**container))


@pytest.mark.processes
@pytest.mark.parametrize(
    ("runtime", "image", "problem"),
    [
        ("pyxis", "/no.sqsh", "no such file or folder: /no.sqsh"),
        ("pyxis", "/proc/self", "/proc/self is a folder, and pyxis needs a .sqsh file or an image reference"),
        ("apptainer", "docker://hpcdist",
         "docker://hpcdist would be fetched by every rank: convert it to a file first"),
        ("enroot", "/proc/self", "/proc/self holds no root file system (no usr and dev in it)"),
        *(("pyxis", image, None) for image in ("ada@registry.site:5000#team/hpcdist:0.1.0", str(Path(__file__)))),
    ],
)  # fmt: skip
def test_images_that_a_runtime_cannot_start_are_reported(
    tmp_path: Path, runtime: str, image: str, problem: str | None
) -> None:
    expected = [] if problem is None else [f"container.image: {problem}"]
    assert container_problems(config(runtime=runtime, image=image), tmp_path) == expected


@pytest.mark.processes
def test_missing_mount_is_reported(tmp_path: Path) -> None:
    own = config(runtime="pyxis", image="x", mounts=["/nowhere/data:/data"])
    assert container_problems(own, tmp_path) == [
        "container.mounts: /nowhere/data does not exist here; mount folders that only the nodes have by"
        " container.extra_args"
    ]


def test_mounts_are_parsed_and_covered_ones_removed() -> None:
    assert Mount.parse("/a:/b:rw") == Mount(source="/a", target="/b")
    assert Mount.parse("/a:ro") == Mount(source="/a", target="/a", read_only=True)
    texts = ["/p/runs/x", "/p", "/p", "/p/data:ro", "/q/a", "/q:/r", "/p/in:/r/in"]
    kept = [mount.text() for mount in without_nested(map(Mount.parse, texts))]
    assert kept == ["/p:/p", "/q:/r", "/p/data:/p/data:ro", "/q/a:/q/a", "/p/in:/r/in"]


def test_path_with_colon_is_refused() -> None:
    with pytest.raises(UserMistake, match="container: /a:b cannot be mounted: runtimes allow no ':' or ',' in a path"):
        without_nested([Mount(source="/a:b", target="/a:b")])
