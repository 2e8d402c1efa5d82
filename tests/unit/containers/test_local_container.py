"""The line that runs a config in a container, compared whole."""

from __future__ import annotations

import resource
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from hpcdist.config.loading import load_config
from hpcdist.containers import local_container
from hpcdist.containers.local_container import folder_overrides, for_config, host_container
from hpcdist.containers.runtimes import RUNTIMES
from hpcdist.containers.spec import ContainerSpec

DIGEST = "sha256:" + "0" * 64
HERE = Path("/home/ada/project")


@pytest.fixture
def ada() -> ContainerSpec:
    spec = host_container("docker", "hpcdist", DIGEST, "ada", {})
    return replace(spec, user="1001:100", devices=(), terminal=False)


def argv(spec: ContainerSpec, arguments: list[str]) -> list[str]:
    return [*RUNTIMES[spec.runtime](spec), *arguments]


def furnished(
    ada: ContainerSpec, *overrides: str, num_gpus: int = 8, own_code: bool = False, **env: str
) -> ContainerSpec:
    folders = ["runs_dir=/home/ada/runs", "data.root=/data/sets"]
    config = load_config("ddp_mnist", [*folders, *overrides])
    return for_config(ada, config, HERE, own_code=own_code, num_gpus=num_gpus, env=env)


def test_docker_on_a_box_with_gpus(ada: ContainerSpec) -> None:
    line = shlex.join(argv(furnished(ada), ["run", "ddp_mnist"]))
    assert line == (
        "docker run --rm --ipc=host --ulimit=memlock=-1 --user=1001:100 --stop-timeout=180"
        " --volume=/home/ada/runs:/home/ada/runs --volume=/data/sets:/data/sets --gpus=all"
        f" --env=USER=ada --env=HPCDIST_IMAGE=hpcdist --env=HPCDIST_IMAGE_DIGEST={DIGEST}"
        " --env=HPCDIST_RUNS_DIR=/home/ada/runs --env=HPCDIST_DATA_DIR=/data/sets"
        " hpcdist run ddp_mnist"
    )


def test_podman_without_root_on_a_box_with_infiniband(ada: ContainerSpec) -> None:
    found = replace(furnished(ada, own_code=True), runtime="podman", devices=("/dev/infiniband",), terminal=True)
    line = shlex.join(argv(replace(found, env=("NCCL_DEBUG",), ulimits=("host",)), ["run", "mine.yaml"]))
    assert line == (
        "podman run --rm --interactive --tty --ipc=host --ulimit=host --user=1001:100"
        " --stop-timeout=180 --device=/dev/infiniband"
        " --volume=/home/ada/runs:/home/ada/runs --volume=/data/sets:/data/sets"
        " --volume=/home/ada/project:/home/ada/project --workdir=/home/ada/project"
        " --userns=keep-id --device=nvidia.com/gpu=all"
        f" --env=USER=ada --env=HPCDIST_IMAGE=hpcdist --env=HPCDIST_IMAGE_DIGEST={DIGEST}"
        " --env=HPCDIST_RUNS_DIR=/home/ada/runs --env=HPCDIST_DATA_DIR=/data/sets --env=NCCL_DEBUG"
        " hpcdist run mine.yaml"
    )


def test_root_needs_no_mapping_in_podman(ada: ContainerSpec) -> None:
    assert "--userns=keep-id" not in argv(replace(ada, runtime="podman", user="0:0"), [])


@pytest.mark.parametrize(
    ("engine", "flags"),
    [
        ("docker", ['--gpus="device=0,2"']),
        ("podman", ["--device=nvidia.com/gpu=0", "--device=nvidia.com/gpu=2"]),
    ],
)
def test_the_callers_choice_of_gpus_holds_inside(ada: ContainerSpec, engine: str, flags: list[str]) -> None:
    chosen = furnished(ada, CUDA_VISIBLE_DEVICES="0,2", num_gpus=2)
    words = argv(replace(chosen, runtime=engine), [])
    assert [word for word in words if "gpu" in word] == flags


@pytest.mark.parametrize(("override", "num_gpus"), [("launch.device=auto", 0), ("launch.device=cpu", 8)])
def test_no_gpu_is_passed_that_is_not_there_or_not_wanted(ada: ContainerSpec, override: str, num_gpus: int) -> None:
    words = argv(furnished(ada, override, num_gpus=num_gpus), [])
    assert not [word for word in words if "gpu" in word]


def test_the_time_to_stop_is_what_saving_and_shipping_may_take(ada: ContainerSpec) -> None:
    chosen = furnished(ada, "launch.stop_grace_s=30.5", "tracking.drain_timeout_s=10")
    assert chosen.stop_timeout_s == 41


@pytest.mark.parametrize(
    ("uri", "is_host"), [("http://localhost:5000", True), ("https://ml.example.org", False), ("", False)]
)
def test_a_server_on_this_machine_is_reached_through_its_network(ada: ContainerSpec, uri: str, is_host: bool) -> None:
    assert ("--network=host" in argv(furnished(ada, f"tracking.uri='{uri}'"), [])) is is_host


def test_variables_pass_by_name_so_that_no_value_is_in_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    env = {
        "MLFLOW_TRACKING_PASSWORD": "hidden",
        "NCCL_DEBUG": "INFO",
        "HPCDIST_RUNS_DIR": "/elsewhere",
        "HPCDIST_IMAGE": "other",
        "AWS_SECRET_ACCESS_KEY": "hidden",
        "PATH": "/bin",
    }
    found = host_container("docker", "hpcdist", DIGEST, "ada", env)
    assert found.env == ("MLFLOW_TRACKING_PASSWORD", "NCCL_DEBUG")
    assert "hidden" not in shlex.join(argv(found, []))


def test_folders_that_a_config_names_itself_are_told_as_they_are_here() -> None:
    default = load_config("ddp_digits", [])
    assert folder_overrides(default, default) == []
    own = load_config("ddp_digits", ["runs_dir=~/mine", "data.root=sets"])
    assert folder_overrides(own, default) == [f"runs_dir={Path.home()}/mine", f"data.root={Path.cwd()}/sets"]


@pytest.mark.parametrize(("limit", "capabilities", "may"), [(-1, "0", True), (8, "0", False), (8, "1000000", True)])
def test_podman_can_lock_memory_where_its_caller_may(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, limit: int, capabilities: str, may: bool
) -> None:
    status = tmp_path / "status"
    status.write_text(f"Name:\tpython\nCapEff:\t{capabilities:>016}\n")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    monkeypatch.setattr(local_container, "STATUS", status)
    assert host_container("podman", "hpcdist", DIGEST, "ada", {}).ulimits == (("memlock=-1",) if may else ("host",))
    assert host_container("docker", "hpcdist", DIGEST, "ada", {}).ulimits == ("memlock=-1",)
