"""Tests of the command of `hpcdist run --in`."""

from __future__ import annotations

import resource
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from hpcdist.config.loading import load_config
from hpcdist.containers.spec import RUNTIMES, ContainerSpec
from hpcdist.containers.steps import folder_overrides, for_config, host_container

DIGEST = "sha256:" + "0" * 64
HERE = Path("/home/ada/project")


@pytest.fixture
def ada() -> ContainerSpec:
    spec = host_container("docker", "hpcdist", DIGEST, "ada", {})
    return replace(spec, user="1001:100", devices=(), terminal=False)


def argv(spec: ContainerSpec, arguments: list[str]) -> list[str]:
    return [*RUNTIMES[spec.runtime](spec), *arguments]


def container_for(
    ada: ContainerSpec, *overrides: str, num_gpus: int = 8, own_code: bool = False, **env: str
) -> ContainerSpec:
    folders = ["runs_dir=/home/ada/runs", "data.root=/data/sets"]
    config = load_config("ddp_mnist", [*folders, *overrides])
    return for_config(ada, config, HERE, own_code=own_code, num_gpus=num_gpus, env=env)


def test_docker_command_with_gpus(ada: ContainerSpec) -> None:
    line = shlex.join(argv(container_for(ada), ["run", "ddp_mnist"]))
    assert line == (
        "docker run --rm --ipc=host --ulimit=stack=67108864 --user=1001:100 --stop-timeout=180"
        " --volume=/home/ada/runs:/home/ada/runs --volume=/data/sets:/data/sets --gpus=all"
        f" --env=USER=ada --env=HPCDIST_IMAGE=hpcdist --env=HPCDIST_IMAGE_DIGEST={DIGEST}"
        " --env=HPCDIST_RUNS_DIR=/home/ada/runs --env=HPCDIST_DATA_DIR=/data/sets"
        " hpcdist run ddp_mnist"
    )


def test_rootless_podman_command_with_infiniband(ada: ContainerSpec) -> None:
    found = replace(container_for(ada, own_code=True), runtime="podman", devices=("/dev/infiniband",), terminal=True)
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


def test_podman_of_root_maps_no_user(ada: ContainerSpec) -> None:
    assert "--userns=keep-id" not in argv(replace(ada, runtime="podman", user="0:0"), [])


@pytest.mark.parametrize(
    ("engine", "flags"),
    [
        ("docker", ['--gpus="device=0,2"']),
        ("podman", ["--device=nvidia.com/gpu=0", "--device=nvidia.com/gpu=2"]),
    ],
)
def test_cuda_visible_devices_selects_the_gpus_of_the_container(
    ada: ContainerSpec, engine: str, flags: list[str]
) -> None:
    spec = container_for(ada, CUDA_VISIBLE_DEVICES="0,2", num_gpus=2)
    command = argv(replace(spec, runtime=engine), [])
    assert [word for word in command if "gpu" in word] == flags


@pytest.mark.parametrize(("override", "num_gpus"), [("launch.device=auto", 0), ("launch.device=cpu", 8)])
def test_no_gpus_are_passed_without_gpus_or_for_cpu_runs(ada: ContainerSpec, override: str, num_gpus: int) -> None:
    command = argv(container_for(ada, override, num_gpus=num_gpus), [])
    assert not [word for word in command if "gpu" in word]


def test_stop_timeout_covers_saving_and_shipping(ada: ContainerSpec) -> None:
    spec = container_for(ada, "launch.stop_grace_s=30.5", "tracking.drain_timeout_s=10")
    assert spec.stop_timeout_s == 41


@pytest.mark.parametrize(
    ("uri", "is_host"), [("http://localhost:5000", True), ("https://ml.example.org", False), ("", False)]
)
def test_host_network_is_used_for_a_local_server(ada: ContainerSpec, uri: str, is_host: bool) -> None:
    assert ("--network=host" in argv(container_for(ada, f"tracking.uri='{uri}'"), [])) is is_host


def test_variables_are_passed_by_name_without_values(monkeypatch: pytest.MonkeyPatch) -> None:
    env = {
        "MLFLOW_TRACKING_PASSWORD": "hidden",
        "NCCL_DEBUG": "INFO",
        "HPCDIST_RUNS_DIR": "/other",
        "HPCDIST_IMAGE": "other",
        "AWS_SECRET_ACCESS_KEY": "hidden",
        "PATH": "/bin",
    }
    spec = host_container("docker", "hpcdist", DIGEST, "ada", env)
    assert spec.env == ("MLFLOW_TRACKING_PASSWORD", "NCCL_DEBUG")
    assert "hidden" not in shlex.join(argv(spec, []))


def test_configured_folders_become_absolute() -> None:
    default = load_config("ddp_digits", [])
    assert folder_overrides(default, default) == []
    own = load_config("ddp_digits", ["runs_dir=~/mine", "data.root=sets"])
    assert folder_overrides(own, default) == [f"runs_dir={Path.home()}/mine", f"data.root={Path.cwd()}/sets"]


@pytest.mark.parametrize(
    ("limit", "capabilities", "is_allowed"), [(-1, "0", True), (8, "0", False), (8, "1000000", True)]
)
def test_podman_locks_memory_if_its_caller_may(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, limit: int, capabilities: str, is_allowed: bool
) -> None:
    status = tmp_path / "status"
    status.write_text(f"Name:\tpython\nCapEff:\t{capabilities:>016}\n")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    monkeypatch.setattr("hpcdist.host.machine.STATUS", status)
    assert host_container("podman", "hpcdist", DIGEST, "ada", {}).ulimits == (
        ("memlock=-1",) if is_allowed else ("host",)
    )


@pytest.mark.parametrize("may_lock", [True, False])
def test_user_is_root_in_containers_of_a_rootless_daemon(monkeypatch: pytest.MonkeyPatch, may_lock: bool) -> None:
    """Root of such a container is the caller outside; the daemon cannot raise limits."""
    monkeypatch.setattr(Path, "is_dir", lambda path: path == Path("/dev/infiniband"))
    monkeypatch.setattr("hpcdist.containers.steps._may_lock_memory", lambda: may_lock)
    spec = host_container("docker", "hpcdist", DIGEST, "ada", {}, rootless_daemon=True)
    assert spec.user == "0:0"
    assert spec.ulimits == (("memlock=-1",) if may_lock else ())
