"""The section `container`: the container in which ranks run."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

from hpcdist.config.schema.checks import check, one_line

_MOUNT = re.compile(r"[/~][^:,]*(:/[^:,]*)?(:(ro|rw))?")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\*?")


@dataclass(frozen=True, kw_only=True)
class ContainerConfig:
    """The container of the ranks. A site's profile may contain this section as well."""

    runtime: Literal["none", "docker", "podman", "apptainer", "charliecloud", "enroot", "pyxis"] = "none"
    """Container runtime on the nodes; `none` starts ranks without a container."""
    image: str = ""
    """Name (docker, podman), `.sif` (apptainer), `.sqsh` (enroot, pyxis), folder (charliecloud, apptainer, enroot)."""
    mounts: list[str] = field(default_factory=list)
    """`SOURCE`, `SOURCE:TARGET` or `SOURCE:TARGET:ro`, in addition to the run folder, the code and `data.root`."""
    env: list[str] = field(default_factory=list)
    """Additional variables to pass, by name or as `NAME_*`; those of Slurm, NCCL and this config are passed."""
    gpus: Literal["auto", "none", "all"] = "auto"
    """GPUs in the container; `auto` passes those that Slurm allocates if `cluster.gpus_per_node` requests some."""
    python: str = "python3"
    """Python of the image with hpcdist installed: a command on the image's PATH, or a path in the image."""
    extra_args: list[str] = field(default_factory=list)
    """Additional options of the runtime (of srun with pyxis), which override those of hpcdist."""
    check_image: bool = True
    """Check the image before submission, if this machine can; false if only the nodes have it."""

    def __post_init__(self) -> None:
        check(
            [
                f"mounts must be SOURCE, SOURCE:TARGET or SOURCE:TARGET:ro with absolute paths, got {mount!r}"
                for mount in self.mounts
                if not _MOUNT.fullmatch(mount)
            ]
            + [
                f"env must hold names such as WANDB_MODE or UCX_*, never values, got {name.partition('=')[0]!r}"
                for name in self.env
                if not _NAME.fullmatch(name)
            ]
            + one_line(self, "image", "python", "mounts", "extra_args")
            + (["image must name the image to start"] if self.runtime != "none" and not self.image else [])
        )
