"""One container: its description, and the runtimes as pure functions that return the argv in front of the command."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Self

from hpcdist.errors import UserMistake
from hpcdist.run.folder import Attempt

#: Environment variables that a rank needs, as names and patterns. All others of the job stay outside the container.
PASSED = (
    "SLURM_*", "SLURMD_NODENAME", "PMI*", "CUDA_VISIBLE_DEVICES", "HPCDIST_*", "NCCL_*", "GLOO_*", "TP_*", "TORCH_*",
    "UCX_*", "FI_*", "OMP_*", "MKL_*", "MALLOC_*", "PYTHONPATH", "PYTHONUNBUFFERED", "RES_OPTIONS", "TZ", "LANG",
    "LC_*",
)  # fmt: skip
#: Never passed: the tracking URI may hold a password that ranks do not need; the second is a key to Slurm itself.
WITHHELD = ("HPCDIST_TRACKING_URI", "SLURM_JWT")
#: Runtimes that start containers outside of the Slurm step; the containers outlive it.
DETACHED = ("podman", "docker")


@dataclass(frozen=True, kw_only=True)
class Mount:
    source: str
    target: str
    read_only: bool = False

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse `SOURCE`, `SOURCE:TARGET` or `SOURCE:TARGET:ro`; the config's validation has accepted the text."""
        source, *rest = text.split(":")
        target = next((word for word in rest if word not in ("ro", "rw")), source)
        return cls(source=source, target=target, read_only="ro" in rest)

    def text(self, read_only: str = ":ro", read_write: str = "") -> str:
        return f"{self.source}:{self.target}{read_only if self.read_only else read_write}"

    def covers(self, other: "Mount") -> bool:
        """Return whether this mount already shows the other one at the same path and in the same mode."""
        source, target = Path(other.source), Path(other.target)
        is_inside = source.is_relative_to(self.source) and other.read_only == self.read_only
        return is_inside and Path(self.target) / source.relative_to(self.source) == target


def without_nested(mounts: Iterable[Mount]) -> tuple[Mount, ...]:
    """Remove mounts that another one covers: some runtimes cannot mount below a mount."""
    kept: list[Mount] = []
    for mount in sorted(mounts, key=lambda mount: (len(Path(mount.target).parts), mount.target)):
        if any(set(":,") & set(path) for path in (mount.source, mount.target)):
            raise UserMistake(f"container: {mount.source} cannot be mounted: runtimes allow no ':' or ',' in a path")
        if not any(other.covers(mount) for other in kept):
            kept.append(mount)
    return tuple(kept)


@dataclass(frozen=True, kw_only=True)
class ContainerSpec:
    """One container: a rank's on Slurm, or the whole run's on this machine (`hpcdist run --in`)."""

    runtime: str
    image: str
    run: Path | None = None  #: the run folder of a rank's container, which is its label; None for a local container
    mounts: tuple[Mount, ...] = ()
    workdir: Path | None = None
    env: tuple[str, ...] = PASSED  #: variables passed by name; patterns (`NCCL_*`) in a rank's container only
    env_values: Mapping[str, str] = field(default_factory=dict)  #: variables set to other values than the host's
    gpus: str = ""  #: `all`, comma-separated device numbers, or empty for none
    python: str = "python3"
    extra_args: tuple[str, ...] = ()
    unpacked: bool = False  #: enroot: whether the image is a folder
    image_env: bool = False  #: charliecloud: whether the image's folder lists the variables that the image sets
    # The following are set for a local container. For a rank, the node-side script adds its user and devices.
    user: str = ""  #: `UID:GID`
    devices: tuple[str, ...] = ()
    ulimits: tuple[str, ...] = ()  #: in addition to those of the runtime
    host_network: bool = True
    terminal: bool = False
    stop_timeout_s: int | None = None

    @property
    def outlives_step(self) -> bool:
        """Whether containers are no children of the Slurm step and have to be removed."""
        return self.runtime in DETACHED


# Container runtimes as pure functions: each returns the argv in front of the command that runs in the container.
#
# apptainer, charliecloud, enroot and pyxis (Slurm's plugin) start containers as child processes of the Slurm step, so
# Slurm signals and ends them. Containers of podman and docker are no children of the step; `node_wrapper.sh` and
# `hpcdist.containers.pid1` tie them to it.
#
# docs/reference/tested-versions.md lists the tested versions. The command lines follow the runtimes' documentation:
# https://apptainer.org/docs/user/main/cli/apptainer_exec.html,
# https://docs.docker.com/reference/cli/docker/container/run,
# https://github.com/NVIDIA/enroot/blob/master/doc/cmd/start.md, https://github.com/NVIDIA/pyxis/wiki/Usage

SCRIPT = Path(__file__).with_name("node_wrapper.sh")
#: Variables that runtimes and srun need on the host. Containers that inherit the environment see them as well.
_HOST = (
    "PATH", "HOME", "USER", "LOGNAME", "TMPDIR", "XDG_RUNTIME_DIR", "APPTAINER_*", "SINGULARITY_*", "CH_*", "ENROOT_*",
    "NVIDIA_*", "MELLANOX_*",
)  # fmt: skip
#: Exists on nodes with InfiniBand or RoCE adapters.
INFINIBAND = Path("/dev/infiniband")
#: Runtimes with containers that inherit the environment of the process that starts them.
_INHERITING = ("apptainer", "charliecloud", "pyxis")
_TMP = "/tmp"  # noqa: S108
_PYXIS_MOUNTS = "--container-mounts="
#: Job name of the Slurm steps that inspect or remove containers.
CONTAINERS_STEP = "hpcdist-containers"
#: enroot's login shell reads /etc/profile, which resets PATH in Debian's images and so hides the image's own Python.
_NO_LOGIN_SHELL = {"ENROOT_LOGIN_SHELL": "no"}
#: Slurm sends SIGUSR2 ahead of the time limit; a rank that has no handler yet must not die of it.
IGNORE_USR2 = ("sh", "-c", "trap '' USR2; exec \"$@\"", "sh")


@dataclass(frozen=True, kw_only=True)
class ContainerCommand:
    argv: list[str]
    srun_flags: list[str] = field(default_factory=list)


def podman(spec: ContainerSpec) -> list[str]:
    gpus = [f"--device=nvidia.com/gpu={gpu.strip()}" for gpu in spec.gpus.split(",") if gpu]
    # Rootless podman would map the caller to another user.
    userns = ["--userns=keep-id"] if spec.user and not spec.user.startswith("0:") else []
    return _engine_run("podman", spec, ulimits=spec.ulimits or ("host",), flags=[*userns, *gpus])


def docker(spec: ContainerSpec) -> list[str]:
    # docker splits at commas before it interprets quotes.
    gpus = ["--gpus=all" if spec.gpus == "all" else f'--gpus="device={spec.gpus}"'] if spec.gpus else []
    return _engine_run("docker", spec, ulimits=(*spec.ulimits, "stack=67108864"), flags=gpus)


def _engine_run(engine: str, spec: ContainerSpec, *, ulimits: Sequence[str], flags: Sequence[str]) -> list[str]:
    """Return the argv that podman and docker have in common; a rank's containers have a run folder."""
    is_rank = spec.run is not None
    return [
        engine, "run", "--rm",
        # A thousand ranks would query a registry at once.
        *(["--pull=never"] if is_rank else []),
        *(["--interactive", "--tty"] if spec.terminal else []),
        *(["--network=host"] if spec.host_network else []),
        *(["--uts=host"] if is_rank else []),
        "--ipc=host", *(f"--ulimit={limit}" for limit in ulimits),
        *(["--security-opt=label=disable", "--no-healthcheck", "--log-driver=none", f"--label=hpcdist.run={spec.run}"]
          if is_rank else []),
        *([f"--user={spec.user}"] if spec.user else []),
        *([f"--stop-timeout={spec.stop_timeout_s}"] if spec.stop_timeout_s is not None else []),
        *(f"--device={device}" for device in spec.devices),
        *(f"--volume={mount.text()}" for mount in spec.mounts),
        *([f"--workdir={spec.workdir}"] if spec.workdir is not None else []),
        *flags,
        *(f"--env={name}={value}" for name, value in spec.env_values.items()),
        # For a rank, the script on the node expands the patterns to names.
        *([] if is_rank else [f"--env={name}" for name in spec.env]),
        *spec.extra_args,
        *(["--entrypoint="] if is_rank else []),
        spec.image,
    ]  # fmt: skip


def apptainer(spec: ContainerSpec) -> list[str]:
    """Return the argv of `apptainer exec`, which shares the host's network, /dev, /dev/shm and limits by default."""
    return [
        "apptainer", "exec", "--no-home",
        *(f"--bind={mount.text()}" for mount in spec.mounts),
        f"--pwd={spec.workdir}",
        *(["--nv"] if spec.gpus else []),
        *spec.extra_args,
        spec.image,
    ]  # fmt: skip


def charliecloud(spec: ContainerSpec) -> list[str]:
    """Return the argv of `ch-run`, which shares everything but the file system.

    ch-run shows the host's /tmp (see `outer_env`), so nothing can be mounted below it. `ch-fromhost --nvidia IMAGE`
    copies the GPU libraries into the image once.
    """
    return [
        "ch-run",
        *(["--set-env"] if spec.image_env else []),
        *(f"--bind={mount.text()}" for mount in spec.mounts if not _is_shared_tmp(mount)),
        f"--cd={spec.workdir}",
        *spec.extra_args,
        spec.image,
        "--",
    ]


def enroot(spec: ContainerSpec) -> list[str]:
    """Return the argv of `enroot start`; our script replaces the command script that starts the image's entrypoint.

    enroot starts a folder by its name below ENROOT_DATA_PATH, which `outer_env` sets.
    """
    return [
        "enroot", "start", f"--rc={SCRIPT}",
        *(f"--mount={mount.text(':none:x-create=auto,rbind,ro', ':none:x-create=auto,rbind,rw')}"
          for mount in spec.mounts),
        *(f"--env={name}={value}" for name, value in _device_variables(spec).items()),
        *spec.extra_args,
        Path(spec.image).name if spec.unpacked else spec.image, "in", str(spec.workdir),
    ]  # fmt: skip


def pyxis(spec: ContainerSpec) -> list[str]:
    """Return srun's flags: pyxis is a plugin of Slurm."""
    # srun keeps only the last of several lists of mounts.
    more = [text.removeprefix(_PYXIS_MOUNTS) for text in spec.extra_args if text.startswith(_PYXIS_MOUNTS)]
    mounts = [*(mount.text() for mount in spec.mounts), *more]
    return [
        f"--container-image={spec.image}",
        # srun refuses an empty list of mounts.
        *([f"{_PYXIS_MOUNTS}{','.join(mounts)}"] if mounts else []),
        f"--container-workdir={spec.workdir}",
        "--no-container-entrypoint", "--no-container-mount-home", "--no-container-remap-root",
        *(text for text in spec.extra_args if not text.startswith(_PYXIS_MOUNTS)),
    ]  # fmt: skip


RUNTIMES: dict[str, Callable[[ContainerSpec], list[str]]] = {
    "podman": podman,
    "docker": docker,
    "apptainer": apptainer,
    "charliecloud": charliecloud,
    "enroot": enroot,
}


def container_command(spec: ContainerSpec, command: Sequence[str], attempt: Attempt | None = None) -> ContainerCommand:
    """Return the command of a Slurm task that runs `command` in a container."""
    if spec.runtime == "pyxis":
        return ContainerCommand(argv=[*IGNORE_USR2, *command], srun_flags=pyxis(spec))
    prefix, names = RUNTIMES[spec.runtime](spec), "|".join(spec.env)
    if attempt is not None and spec.outlives_step:
        pid1 = [spec.python, "-P", "-m", "hpcdist.containers.pid1", str(attempt.path)]
        return ContainerCommand(argv=["sh", str(SCRIPT), "rank", str(attempt.path), names, *prefix, *pid1, *command])
    if spec.runtime in _INHERITING:
        return ContainerCommand(argv=["sh", str(SCRIPT), "plain", *prefix, *IGNORE_USR2, *command])
    inside = [] if spec.outlives_step else IGNORE_USR2
    return ContainerCommand(argv=["sh", str(SCRIPT), "once", names, *prefix, *inside, *command])


def remove_command(spec: ContainerSpec, job_id: str) -> list[str]:
    """Return the command that removes a run's containers on a node: of any job and attempt, with pyxis of this job."""
    which = job_id if spec.runtime == "pyxis" else f"hpcdist.run={spec.run}"
    return ["sh", str(SCRIPT), "remove", spec.runtime, which]


def outer_env(spec: ContainerSpec, env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment to start a container from, reduced where the container inherits it."""
    if spec.runtime == "enroot":
        folder = {"ENROOT_DATA_PATH": str(Path(spec.image).parent)} if spec.unpacked else {}
        return {**_NO_LOGIN_SHELL, **env, **folder}
    if spec.runtime not in _INHERITING:
        return dict(env)
    allowed = (*spec.env, *_HOST)
    seen = {
        name: value
        for name, value in env.items()
        if name not in WITHHELD and any(fnmatchcase(name, pattern) for pattern in allowed)
    }
    return {
        "USER": env.get("LOGNAME", ""),  # ch-run does not start without it
        **(_NO_LOGIN_SHELL if spec.runtime == "pyxis" else {}),
        **seen,
        # ch-run shows the host's $TMPDIR as /tmp. Folders in /tmp would be missing: they are not mounted.
        **({"TMPDIR": _TMP} if spec.runtime == "charliecloud" and any(map(_is_shared_tmp, spec.mounts)) else {}),
        **_device_variables(spec),
    }


def _device_variables(spec: ContainerSpec) -> dict[str, str]:
    """Return the variables by which enroot's hooks, also below pyxis, add GPUs and InfiniBand devices.

    The InfiniBand hook fails on a node without an adapter. For enroot, `node_wrapper.sh` checks on the node itself.
    pyxis runs no script on the node, so the host of the batch step is checked instead of each node.
    """
    if spec.runtime not in ("enroot", "pyxis"):
        return {}
    gpus = {"NVIDIA_VISIBLE_DEVICES": "all", "NVIDIA_DRIVER_CAPABILITIES": "compute,utility"}
    found = {"MELLANOX_VISIBLE_DEVICES": "all"} if spec.runtime == "pyxis" and INFINIBAND.exists() else {}
    return {**(gpus if spec.gpus else {"NVIDIA_VISIBLE_DEVICES": "void"}), **found}


def _is_shared_tmp(mount: Mount) -> bool:
    return mount.source == mount.target and Path(mount.target).is_relative_to(_TMP)
