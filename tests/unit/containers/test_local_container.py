"""The container of a whole run on this machine: `hpcdist run --in`."""

import resource
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpcdist.config.loading import load_config
from hpcdist.containers.engine import EngineName
from hpcdist.containers.local_container import LocalContainer, local_container, run_words

DIGEST = "sha256:" + "0" * 64


def container_for(
    *overrides: str,
    engine: EngineName = "docker",
    num_gpus: int = 8,
    own_code: bool = False,
    rootless_daemon: bool = False,
    **env: str,
) -> LocalContainer:
    config = load_config("ddp_mnist", ["runs_dir=/home/ada/runs", "data.root=/data/sets", *overrides])
    return local_container(
        engine,
        "hpcdist",
        DIGEST,
        "ada",
        config,
        Path("/home/ada/project"),
        own_code=own_code,
        num_gpus=num_gpus,
        env=env,
        rootless_daemon=rootless_daemon,
    )


def test_own_folder_of_compiled_code_is_mounted(tmp_path: Path) -> None:
    volume = f"--volume={tmp_path}:{tmp_path}"
    assert volume in run_words(container_for(f"launch.cache_dir={tmp_path}"))
    assert volume not in run_words(container_for())
    (tmp_path / ".hpcdist-compiled").mkdir()
    inside = container_for(f"runs_dir={tmp_path}")
    assert sum(word.startswith(volume) for word in run_words(inside)) == 1


def words_about_gpus(container: LocalContainer) -> list[str]:
    return [word for word in run_words(container) if "gpu" in word]


def test_podman_command_with_infiniband() -> None:
    spec = container_for(engine="podman", own_code=True, NCCL_DEBUG="INFO")
    spec = replace(spec, user="1001:100", devices=("/dev/infiniband",), terminal=True, ulimits=("host",))
    assert shlex.join(run_words(spec)) == (
        "podman run --rm --interactive --tty --ipc=host --ulimit=host --user=1001:100"
        " --stop-timeout=180 --device=/dev/infiniband"
        " --volume=/home/ada/runs:/home/ada/runs --volume=/data/sets:/data/sets"
        " --volume=/home/ada/project:/home/ada/project --workdir=/home/ada/project"
        " --userns=keep-id --device=nvidia.com/gpu=all"
        f" --env=PYTHONNOUSERSITE=1 --env=USER=ada --env=HPCDIST_IMAGE=hpcdist --env=HPCDIST_IMAGE_DIGEST={DIGEST}"
        " --env=HPCDIST_RUNS_DIR=/home/ada/runs --env=HPCDIST_DATA_DIR=/data/sets --env=NCCL_DEBUG"
        " hpcdist"
    )
    assert "--userns=keep-id" not in run_words(replace(spec, user="0:0"))


def test_gpus_of_the_container_are_those_that_the_run_may_use() -> None:
    spec = container_for(CUDA_VISIBLE_DEVICES="0,2", num_gpus=2)
    assert words_about_gpus(spec) == ['--gpus="device=0,2"']
    assert words_about_gpus(replace(spec, engine="podman")) == [
        "--device=nvidia.com/gpu=0",
        "--device=nvidia.com/gpu=2",
    ]
    assert words_about_gpus(container_for("launch.device=cpu")) == words_about_gpus(container_for(num_gpus=0)) == []


def test_host_network_and_stop_timeout_follow_the_config() -> None:
    assert "--network=host" in run_words(container_for("tracking.uri='http://localhost:5000'"))
    assert "--network=host" not in run_words(container_for("tracking.uri='https://ml.example.org'"))
    assert container_for("launch.stop_grace_s=30.5", "tracking.drain_timeout_s=10").stop_timeout_s == 41


def test_variables_are_passed_by_name_without_values() -> None:
    env: dict[str, Any] = {
        "MLFLOW_TRACKING_PASSWORD": "hidden",
        "NCCL_DEBUG": "INFO",
        "HPCDIST_RUNS_DIR": "/other",
        "HPCDIST_IMAGE": "other",
        "AWS_SECRET_ACCESS_KEY": "hidden",
        "PATH": "/bin",
    }
    spec = container_for(**env)
    assert spec.env == ("MLFLOW_TRACKING_PASSWORD", "NCCL_DEBUG")
    assert "hidden" not in shlex.join(run_words(spec))


def test_caches_and_proxies_reach_the_container(tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    env: dict[str, Any] = {
        "HF_HOME": str(tmp_path / "hf"),
        "HF_TOKEN": "hidden",
        "https_proxy": "http://p",
        "TORCH_HOME": "/no/such",
    }
    spec = container_for(**env)
    words = run_words(spec)
    assert spec.env == ("HF_HOME", "HF_TOKEN", "https_proxy")
    assert f"--volume={tmp_path}/hf:{tmp_path}/hf" in words
    assert spec.notes == ("the container does not get TORCH_HOME: /no/such does not exist here",)
    assert "hidden" not in shlex.join(words)


@pytest.mark.parametrize(
    ("limit", "capabilities", "is_allowed"), [(-1, "0", True), (8, "0", False), (8, "1000000", True)]
)
def test_memory_is_locked_if_the_caller_may_and_the_daemon_can(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, limit: int, capabilities: str, is_allowed: bool
) -> None:
    status = tmp_path / "status"
    status.write_text(f"Name:\tpython\nCapEff:\t{capabilities:>016}\n")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    monkeypatch.setattr("hpcdist.host.machine.STATUS", status)
    is_dir = Path.is_dir
    monkeypatch.setattr(Path, "is_dir", lambda path: path == Path("/dev/infiniband") or is_dir(path))
    assert container_for(engine="podman").ulimits == (("memlock=-1",) if is_allowed else ("host",))
    # Root of a container of a rootless daemon is the caller outside.
    rootless = container_for(rootless_daemon=True)
    stack = ("stack=67108864",)
    assert (rootless.user, rootless.ulimits) == ("0:0", ("memlock=-1", *stack) if is_allowed else stack)
    assert container_for().ulimits == ("memlock=-1", *stack)
