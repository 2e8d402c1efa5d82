"""A container runtime as a pure function: what a rank's container is told → the words in front of its command.

Runtimes that start processes of their own tree (apptainer, charliecloud, enroot) and Slurm's plugin (pyxis) give
their containers Slurm's signals, and Slurm ends them. podman's and docker's containers are no children of the step;
`contained.sh` and `hpcdist.containers.pid1` tie them to it.

Run with podman 4.3 and charliecloud 0.31. The others are only written down, from their documentation:
https://apptainer.org/docs/user/main/cli/apptainer_exec.html, https://docs.docker.com/reference/cli/docker/container/run,
https://github.com/NVIDIA/enroot/blob/master/doc/cmd/start.md, https://github.com/NVIDIA/pyxis/wiki/Usage
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from hpcdist.errors import UserMistake
from hpcdist.run.attempt import Attempt

SCRIPT = Path(__file__).with_name("contained.sh")
#: What a rank needs to know, by name. Whatever else stands in a job's environment stays outside.
PASSED = (
    "SLURM_*", "SLURMD_NODENAME", "PMI*", "CUDA_VISIBLE_DEVICES", "HPCDIST_*", "NCCL_*", "GLOO_*", "TP_*", "TORCH_*",
    "UCX_*", "FI_*", "OMP_*", "MKL_*", "MALLOC_*", "PYTHONPATH", "PYTHONUNBUFFERED", "RES_OPTIONS", "TZ", "LANG",
    "LC_*",
)  # fmt: skip
#: A password may stand in the first, which ranks do without; the second is a key to Slurm itself.
WITHHELD = ("HPCDIST_TRACKING_URI", "SLURM_JWT")
#: What a runtime, and srun, need on the host. Where a container inherits its environment, it sees these as well.
_HOST = (
    "PATH", "HOME", "USER", "LOGNAME", "TMPDIR", "XDG_RUNTIME_DIR", "APPTAINER_*", "SINGULARITY_*", "CH_*", "ENROOT_*",
    "NVIDIA_*", "MELLANOX_*",
)  # fmt: skip
#: Present on nodes with InfiniBand or RoCE cards.
INFINIBAND = Path("/dev/infiniband")
#: Their containers outlive the step.
DETACHED = ("podman", "docker")
#: Their containers see the environment of the one who starts them.
_INHERITING = ("apptainer", "charliecloud", "pyxis")
#: How Slurm's steps are called that look at containers or remove them.
CONTAINERS_STEP = "hpcdist-containers"
#: enroot's login shell reads /etc/profile, which resets PATH in Debian's images and so hides the image's own Python.
_NO_LOGIN_SHELL = {"ENROOT_LOGIN_SHELL": "no"}
#: Until a rank can hear SIGUSR2, which Slurm sends ahead of the time limit, it must not die of it.
DEAF_TO_USR2 = ("sh", "-c", "trap '' USR2; exec \"$@\"", "sh")


@dataclass(frozen=True, kw_only=True)
class Mount:
    """A folder or file of the host, and where it is seen in the container."""

    source: str
    target: str
    read_only: bool = False

    @classmethod
    def parse(cls, text: str) -> Mount:
        """`SOURCE`, `SOURCE:TARGET` or `SOURCE:TARGET:ro`, as the config's own check has let it pass."""
        source, *rest = text.split(":")
        read_only = "ro" in rest
        target = next((word for word in rest if word not in ("ro", "rw")), source)
        return cls(source=source, target=target, read_only=read_only)

    def text(self, read_only: str = ":ro", read_write: str = "") -> str:
        return f"{self.source}:{self.target}{read_only if self.read_only else read_write}"

    def covers(self, other: Mount) -> bool:
        """Whether the other is seen through this one already, at the same path."""
        inside = Path(other.source).is_relative_to(self.source)
        return (
            inside
            and Path(self.target) / Path(other.source).relative_to(self.source) == Path(other.target)
            and other.read_only == self.read_only
        )


def without_nested(mounts: Iterable[Mount]) -> tuple[Mount, ...]:
    """Mounts that no other one shows already: some runtimes cannot mount below a mount."""
    kept: list[Mount] = []
    for mount in sorted(mounts, key=lambda mount: (len(Path(mount.target).parts), mount.target)):
        if any(set(":,") & set(path) for path in (mount.source, mount.target)):
            raise UserMistake(f"container: {mount.source} cannot be mounted: no runtime takes ':' or ',' in a path")
        if not any(other.covers(mount) for other in kept):
            kept.append(mount)
    return tuple(kept)


@dataclass(frozen=True, kw_only=True)
class Box:
    """What a container is told, whatever the runtime."""

    runtime: str
    image: str
    run: Path  #: the run folder; labels containers, so that they can be found
    mounts: tuple[Mount, ...]
    workdir: Path
    env: tuple[str, ...] = PASSED  #: names and patterns (`NCCL_*`) of variables that are passed
    gpus: bool = False
    python: str = "python3"
    extra_args: tuple[str, ...] = ()
    image_env: bool = False  #: charliecloud: whether the image's folder says which variables it sets

    @property
    def outlives_step(self) -> bool:
        return self.runtime in DETACHED


@dataclass(frozen=True, kw_only=True)
class Contained:
    """A command in a container: flags that srun is told, and what it executes."""

    words: list[str]
    srun: list[str] = field(default_factory=list)


def podman(box: Box) -> list[str]:
    """`podman run`, up to the image. Without a pull: a thousand ranks would ask a registry at once."""
    return [
        "podman", "run", "--rm", "--pull=never",
        "--network=host", "--uts=host", "--ipc=host", "--ulimit=host",
        "--security-opt=label=disable", "--no-healthcheck", "--log-driver=none",
        f"--label=hpcdist.run={box.run}",
        *(f"--volume={mount.text()}" for mount in box.mounts),
        f"--workdir={box.workdir}",
        *(["--device=nvidia.com/gpu=all"] if box.gpus else []),
        *box.extra_args,
        "--entrypoint=",
        box.image,
    ]  # fmt: skip


def docker(box: Box) -> list[str]:
    """`docker run`, up to the image."""
    return [
        "docker", "run", "--rm", "--pull=never",
        "--network=host", "--uts=host", "--ipc=host", "--ulimit=memlock=-1", "--ulimit=stack=67108864",
        "--security-opt=label=disable", "--no-healthcheck", "--log-driver=none",
        f"--label=hpcdist.run={box.run}",
        *(f"--volume={mount.text()}" for mount in box.mounts),
        f"--workdir={box.workdir}",
        *(["--gpus=all"] if box.gpus else []),
        *box.extra_args,
        "--entrypoint=",
        box.image,
    ]  # fmt: skip


def apptainer(box: Box) -> list[str]:
    """`apptainer exec`: shares the host's network, /dev, /dev/shm and limits as it is."""
    return [
        "apptainer", "exec", "--no-home",
        *(f"--bind={mount.text()}" for mount in box.mounts),
        f"--pwd={box.workdir}",
        *(["--nv"] if box.gpus else []),
        *box.extra_args,
        box.image,
    ]  # fmt: skip


def charliecloud(box: Box) -> list[str]:
    """`ch-run`: shares all but the file system. The host's /tmp is seen, so nothing can be mounted below it.

    GPU libraries come into the image once, by `ch-fromhost --nvidia IMAGE`.
    """
    return [
        "ch-run",
        *(["--set-env"] if box.image_env else []),
        *(f"--bind={mount.text()}" for mount in box.mounts if not _is_shared_tmp(mount)),
        f"--cd={box.workdir}",
        *box.extra_args,
        box.image,
        "--",
    ]


def enroot(box: Box) -> list[str]:
    """`enroot start`. Its command script, which would start the image's entrypoint, is ours."""
    return [
        "enroot", "start", f"--rc={SCRIPT}",
        *(f"--mount={mount.text(':none:x-create=auto,rbind,ro', ':none:x-create=auto,rbind,rw')}"
          for mount in box.mounts),
        *(f"--env={name}={value}" for name, value in _devices(box).items()),
        *box.extra_args,
        box.image, "in", str(box.workdir),
    ]  # fmt: skip


def pyxis(box: Box) -> list[str]:
    """Flags of srun: pyxis is a plugin of Slurm."""
    return [
        f"--container-image={box.image}",
        # srun refuses an empty list of mounts.
        *([f"--container-mounts={','.join(mount.text() for mount in box.mounts)}"] if box.mounts else []),
        f"--container-workdir={box.workdir}",
        "--no-container-entrypoint", "--no-container-mount-home", "--no-container-remap-root",
        *box.extra_args,
    ]  # fmt: skip


_PREFIX: dict[str, Callable[[Box], list[str]]] = {
    "podman": podman,
    "docker": docker,
    "apptainer": apptainer,
    "charliecloud": charliecloud,
    "enroot": enroot,
}


def contain(box: Box, command: Sequence[str], attempt: Attempt | None = None) -> Contained:
    """A command in a container: a rank of an attempt, or something that ends by itself."""
    if box.runtime == "pyxis":
        return Contained(words=[*DEAF_TO_USR2, *command], srun=pyxis(box))
    prefix, names = _PREFIX[box.runtime](box), "|".join(box.env)
    if attempt is not None and box.outlives_step:
        first = [box.python, "-P", "-m", "hpcdist.containers.pid1", str(attempt.path)]
        return Contained(words=["sh", str(SCRIPT), "rank", str(attempt.path), names, *prefix, *first, *command])
    if box.runtime in _INHERITING:
        return Contained(words=["sh", str(SCRIPT), "plain", *prefix, *DEAF_TO_USR2, *command])
    inside = [] if box.outlives_step else DEAF_TO_USR2
    return Contained(words=["sh", str(SCRIPT), "once", names, *prefix, *inside, *command])


def remove_command(box: Box) -> list[str]:
    """Ends and removes what a run has left on a node, whichever job and attempt it was of."""
    return ["sh", str(SCRIPT), "remove", box.runtime, f"hpcdist.run={box.run}"]


def outer_env(box: Box, env: Mapping[str, str]) -> dict[str, str]:
    """The environment to start a container from: where it inherits all of it, only what it may see."""
    if box.runtime == "enroot":
        return {**_NO_LOGIN_SHELL, **env}
    if box.runtime not in _INHERITING:
        return dict(env)
    seen = {name: value for name, value in env.items() if _matches(name, (*box.env, *_HOST)) and name not in WITHHELD}
    # ch-run does not start without it.
    return {
        "USER": env.get("LOGNAME", ""),
        **(_NO_LOGIN_SHELL if box.runtime == "pyxis" else {}),
        **seen,
        **_devices(box),
    }


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _devices(box: Box) -> dict[str, str]:
    """Variables that enroot's hooks read, below pyxis as well: they add GPUs and InfiniBand devices.

    The InfiniBand hook fails the start on a node without such a card. `contained.sh` asks the node itself for enroot;
    pyxis has no script on the node, so the host of the batch step stands for all nodes.
    """
    if box.runtime not in ("enroot", "pyxis"):
        return {}
    gpus = {"NVIDIA_VISIBLE_DEVICES": "all", "NVIDIA_DRIVER_CAPABILITIES": "compute,utility"}
    found = {"MELLANOX_VISIBLE_DEVICES": "all"} if box.runtime == "pyxis" and INFINIBAND.exists() else {}
    return {**(gpus if box.gpus else {"NVIDIA_VISIBLE_DEVICES": "void"}), **found}


def _is_shared_tmp(mount: Mount) -> bool:
    return mount.source == mount.target and Path(mount.target).is_relative_to("/tmp")  # noqa: S108
