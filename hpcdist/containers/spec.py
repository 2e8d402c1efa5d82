"""The description of one container, independent of the runtime that starts it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hpcdist.errors import UserMistake

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
    """A bind mount of a folder or file of the host."""

    source: str
    target: str
    read_only: bool = False

    @classmethod
    def parse(cls, text: str) -> Mount:
        """Parse `SOURCE`, `SOURCE:TARGET` or `SOURCE:TARGET:ro`; the config's validation has accepted the text."""
        source, *rest = text.split(":")
        read_only = "ro" in rest
        target = next((word for word in rest if word not in ("ro", "rw")), source)
        return cls(source=source, target=target, read_only=read_only)

    def text(self, read_only: str = ":ro", read_write: str = "") -> str:
        """Return `SOURCE:TARGET` with the suffix for its mode."""
        return f"{self.source}:{self.target}{read_only if self.read_only else read_write}"

    def covers(self, other: Mount) -> bool:
        """Return whether this mount already shows the other one at the same path and in the same mode."""
        inside = Path(other.source).is_relative_to(self.source)
        return (
            inside
            and Path(self.target) / Path(other.source).relative_to(self.source) == Path(other.target)
            and other.read_only == self.read_only
        )


def without_nested(mounts: Iterable[Mount]) -> tuple[Mount, ...]:
    """Remove mounts that another one covers, because some runtimes cannot mount below a mount.

    Raises:
        UserMistake: a path contains `:` or `,`.
    """
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
