"""The specification of a container, and the recipes of images for each runtime."""

import resource
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from hpcdist.config.launch_schema import ClusterConfig
from hpcdist.config.loading import load_config
from hpcdist.config.schema import Config
from hpcdist.containers import spec as container
from hpcdist.containers.images import local_container
from hpcdist.containers.spec import RUNTIMES, ContainerSpec, Mount, outer_env, without_nested
from hpcdist.errors import UserMistake
from hpcdist.run.folder import RunDir
from hpcdist.slurm.job.srun import step_command
from hpcdist.supervisor.plan import rank_command

# --- The command lines of all runtimes

RUN = RunDir(Path("/shared/runs/digits/my first"))
MOUNTS = (Mount(source="/shared", target="/shared"), Mount(source="/scratch/imagenet", target="/data", read_only=True))
SPEC = ContainerSpec(
    runtime="podman",
    image="localhost/hpcdist:0.1.0",
    run=RUN.path,
    mounts=MOUNTS,
    workdir=Path("/shared/project"),
    env=("SLURM_*", "NCCL_*", "WANDB_MODE"),
    gpus="all",
    python="/opt/hpcdist/bin/python3",
    extra_args=("--cgroups=disabled",),
)
WORKER = ["/opt/hpcdist/bin/python3", "-P", "-m", "hpcdist.rank.worker", str(RUN.path)]


def step(spec: ContainerSpec) -> list[str]:
    config = Config(cluster=ClusterConfig(nodes=2, tasks_per_node=4, gpus_per_node=4))
    return step_command(config, RUN.attempt(1), rank_command(RUN.path, spec.python), spec)


@pytest.mark.parametrize(
    ("runtime", "read_only", "after"),
    [
        ("podman", "--volume=/scratch/imagenet:/data:ro", ["--entrypoint=", "/images/x"]),
        ("docker", "--volume=/scratch/imagenet:/data:ro", ["--entrypoint=", "/images/x"]),
        ("apptainer", "--bind=/scratch/imagenet:/data:ro", ["/images/x"]),
        ("charliecloud", "--bind=/scratch/imagenet:/data:ro", ["/images/x", "--"]),
        ("enroot", "--mount=/scratch/imagenet:/data:none:x-create=auto,rbind,ro", ["/images/x", "in"]),
        ("pyxis", "--container-mounts=/shared:/shared,/scratch/imagenet:/data:ro", ["sh", "-c"]),
    ],
)
def test_runtime_gets_read_only_mounts_and_further_arguments(runtime: str, read_only: str, after: list[str]) -> None:
    """tests/contract has the rest of the command lines."""
    command = step(replace(SPEC, runtime=runtime, image="/images/x", extra_args=("--mine",)))
    assert read_only in command
    place = command.index("--mine") + 1
    assert command[place : place + len(after)] == after
    assert command[-len(WORKER) :] == WORKER


def test_charliecloud_gets_the_variables_of_the_image_and_shares_tmp_anyway() -> None:
    mounts = (MOUNTS[0], Mount(source="/tmp/runs", target="/tmp/runs"), Mount(source="/tmp/a", target="/data"))
    spec = replace(SPEC, runtime="charliecloud", mounts=mounts, extra_args=(), image_env=True)
    assert [word for word in step(spec) if word.startswith("--bind")] == [
        "--bind=/shared:/shared",
        "--bind=/tmp/a:/data",
    ]
    assert "--set-env" in step(spec)
    assert "--set-env" not in step(replace(spec, image_env=False))


def test_enroot_starts_a_folder_by_its_name() -> None:
    spec = replace(SPEC, runtime="enroot", image="/images/hpcdist", unpacked=True)
    assert step(spec)[step(spec).index("in") - 1] == "hpcdist"
    assert outer_env(spec, {"ENROOT_DATA_PATH": "/raid"})["ENROOT_DATA_PATH"] == "/images"


def test_pyxis_gets_one_list_of_mounts_or_none() -> None:
    """srun would keep only the last of two lists, and refuses an empty one, as for the image probe."""
    lists = [
        [word for word in step(replace(SPEC, runtime="pyxis", **changes)) if word.startswith("--container-mounts")]
        for changes in ({"mounts": ()}, {"extra_args": ("--container-mounts=/opt:/opt",)})
    ]
    assert lists == [[], ["--container-mounts=/shared:/shared,/scratch/imagenet:/data:ro,/opt:/opt"]]


def test_no_runtime_passes_gpus_to_cpu_runs() -> None:
    for runtime in ("podman", "docker", "apptainer", "charliecloud", "pyxis"):
        command = step(replace(SPEC, runtime=runtime, gpus=""))
        found = [word for word in command if "gpu" in word or word == "--nv"]
        assert found == ["--gpus-per-node=4"], runtime
    assert "--env=NVIDIA_VISIBLE_DEVICES=void" in step(replace(SPEC, runtime="enroot", gpus=""))


ENV = {
    "SLURM_JOB_ID": "7",
    "SLURM_JWT": "a key",
    "NCCL_DEBUG": "INFO",
    "HPCDIST_TRACKING_URI": "https://me:secret@server",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "LD_LIBRARY_PATH": "/host",
    "PATH": "/usr/bin",
    "LOGNAME": "ada",
}


def test_inherited_environment_is_reduced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(container, "INFINIBAND", tmp_path / "none")
    reduced = {"SLURM_JOB_ID": "7", "NCCL_DEBUG": "INFO", "PATH": "/usr/bin", "LOGNAME": "ada", "USER": "ada"}
    spec = replace(SPEC, env=("SLURM_*", "NCCL_*", "HPCDIST_*"))
    for runtime in ("apptainer", "charliecloud"):
        assert outer_env(replace(spec, runtime=runtime), ENV) == reduced
    in_tmp = replace(spec, runtime="charliecloud", mounts=(Mount(source="/tmp/runs", target="/tmp/runs"),))
    assert outer_env(in_tmp, {**ENV, "TMPDIR": "/raid/7"}) == reduced | {"TMPDIR": "/tmp"}, "shown as /tmp by ch-run"
    elsewhere = replace(in_tmp, mounts=MOUNTS)
    assert outer_env(elsewhere, {**ENV, "TMPDIR": "/raid/7"}) == reduced | {"TMPDIR": "/raid/7"}
    for_pyxis = reduced | {
        "ENROOT_LOGIN_SHELL": "no",
        "NVIDIA_VISIBLE_DEVICES": "all",
        "NVIDIA_DRIVER_CAPABILITIES": "compute,utility",
    }
    assert outer_env(replace(spec, runtime="pyxis"), ENV) == for_pyxis
    monkeypatch.setattr(container, "INFINIBAND", tmp_path)
    with_infiniband = for_pyxis | {"MELLANOX_VISIBLE_DEVICES": "all"}
    assert outer_env(replace(spec, runtime="pyxis"), ENV) == with_infiniband
    login_shell = {**ENV, "ENROOT_LOGIN_SHELL": "yes"}
    assert outer_env(replace(spec, runtime="enroot"), ENV) == ENV | {"ENROOT_LOGIN_SHELL": "no"}
    assert outer_env(replace(spec, runtime="enroot"), login_shell) == login_shell
    assert outer_env(spec, ENV) == ENV, "the container of podman gets variables by name"


def test_mounts_are_parsed_and_covered_ones_removed() -> None:
    assert Mount.parse("/a:/b:rw") == Mount(source="/a", target="/b")
    assert Mount.parse("/a:ro") == Mount(source="/a", target="/a", read_only=True)
    texts = ["/p/runs/x", "/p", "/p", "/p/data:ro", "/q/a", "/q:/r", "/p/in:/r/in"]
    kept = [mount.text() for mount in without_nested(map(Mount.parse, texts))]
    assert kept == ["/p:/p", "/q:/r", "/p/data:/p/data:ro", "/q/a:/q/a", "/p/in:/r/in"]


def test_path_with_colon_is_refused() -> None:
    with pytest.raises(UserMistake, match="container: /a:b cannot be mounted: runtimes allow no ':' or ',' in a path"):
        without_nested([Mount(source="/a:b", target="/a:b")])


# --- The command of `hpcdist run --in`.
DIGEST = "sha256:" + "0" * 64


def container_for(
    *overrides: str,
    engine: str = "docker",
    num_gpus: int = 8,
    own_code: bool = False,
    rootless_daemon: bool = False,
    **env: str,
) -> ContainerSpec:
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


def words_about_gpus(spec: ContainerSpec) -> list[str]:
    return [word for word in RUNTIMES[spec.runtime](spec) if "gpu" in word]


def test_podman_command_with_infiniband() -> None:
    spec = container_for(engine="podman", own_code=True, NCCL_DEBUG="INFO")
    spec = replace(spec, user="1001:100", devices=("/dev/infiniband",), terminal=True, ulimits=("host",))
    assert shlex.join(container.podman(spec)) == (
        "podman run --rm --interactive --tty --ipc=host --ulimit=host --user=1001:100"
        " --stop-timeout=180 --device=/dev/infiniband"
        " --volume=/home/ada/runs:/home/ada/runs --volume=/data/sets:/data/sets"
        " --volume=/home/ada/project:/home/ada/project --workdir=/home/ada/project"
        " --userns=keep-id --device=nvidia.com/gpu=all"
        f" --env=USER=ada --env=HPCDIST_IMAGE=hpcdist --env=HPCDIST_IMAGE_DIGEST={DIGEST}"
        " --env=HPCDIST_RUNS_DIR=/home/ada/runs --env=HPCDIST_DATA_DIR=/data/sets --env=NCCL_DEBUG"
        " hpcdist"
    )
    assert "--userns=keep-id" not in container.podman(replace(spec, user="0:0"))


def test_gpus_of_the_container_are_those_that_the_run_may_use() -> None:
    spec = container_for(CUDA_VISIBLE_DEVICES="0,2", num_gpus=2)
    assert words_about_gpus(spec) == ['--gpus="device=0,2"']
    assert words_about_gpus(replace(spec, runtime="podman")) == [
        "--device=nvidia.com/gpu=0",
        "--device=nvidia.com/gpu=2",
    ]
    assert words_about_gpus(container_for("launch.device=cpu")) == words_about_gpus(container_for(num_gpus=0)) == []


def test_host_network_serves_a_local_server_and_a_stop_waits_for_saving_and_shipping() -> None:
    assert "--network=host" in container.docker(container_for("tracking.uri='http://localhost:5000'"))
    assert "--network=host" not in container.docker(container_for("tracking.uri='https://ml.example.org'"))
    assert container_for("launch.stop_grace_s=30.5", "tracking.drain_timeout_s=10").stop_timeout_s == 41


def test_variables_are_passed_by_name_without_values() -> None:
    env = {
        "MLFLOW_TRACKING_PASSWORD": "hidden",
        "NCCL_DEBUG": "INFO",
        "HPCDIST_RUNS_DIR": "/other",
        "HPCDIST_IMAGE": "other",
        "AWS_SECRET_ACCESS_KEY": "hidden",
        "PATH": "/bin",
    }
    spec = container_for(**env)
    assert spec.env == ("MLFLOW_TRACKING_PASSWORD", "NCCL_DEBUG")
    assert "hidden" not in shlex.join(container.docker(spec))


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
    assert (rootless.user, rootless.ulimits) == ("0:0", ("memlock=-1",) if is_allowed else ())
    assert container_for().ulimits == ("memlock=-1",)
