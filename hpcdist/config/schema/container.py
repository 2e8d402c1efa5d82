"""The container that ranks run in."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

from hpcdist.config.schema.checks import check, one_line

_MOUNT = re.compile(r"[/~][^:,]*(:/[^:,]*)?(:(ro|rw))?")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\*?")


@dataclass(frozen=True, kw_only=True)
class ContainerConfig:
    """What ranks are started in. A site's profile may hold such a section, too."""

    runtime: Literal["none", "docker", "podman", "apptainer", "charliecloud", "enroot", "pyxis"] = "none"
    """What starts containers on the nodes; `none` starts ranks without one."""
    image: str = ""
    """A name in docker's or podman's store, a `.sif` file, a folder (charliecloud), a `.sqsh` file (enroot, pyxis)."""
    mounts: list[str] = field(default_factory=list)
    """`SOURCE`, `SOURCE:TARGET` or `SOURCE:TARGET:ro`, besides the run folder, the code and `data.root`."""
    env: list[str] = field(default_factory=list)
    """More variables that ranks may see, by name or as `NAME_*`; Slurm's, NCCL's and those of this config they see."""
    gpus: Literal["auto", "none", "all"] = "auto"
    """Whether containers see the GPUs; `auto`: where `cluster.gpus_per_node` asks for some. Slurm says which."""
    python: str = "python3"
    """The image's own Python, which has hpcdist: a command on the image's PATH, or a path in it."""
    extra_args: list[str] = field(default_factory=list)
    """Further flags of the runtime (of srun with pyxis), after hpcdist's own, so that they win."""
    check_here: bool = True
    """Look into the image before submission, where this machine can; false where only the nodes have it."""

    def __post_init__(self) -> None:
        check(
            [
                f"mounts must be SOURCE, SOURCE:TARGET or SOURCE:TARGET:ro with whole paths, got {mount!r}"
                for mount in self.mounts
                if not _MOUNT.fullmatch(mount)
            ]
            + [
                f"env must hold names such as WANDB_MODE or UCX_*, never values, got {name.partition('=')[0]!r}"
                for name in self.env
                if not _NAME.fullmatch(name)
            ]
            + one_line(self, "image", "python", "mounts", "extra_args")
            + (["image must say what to start"] if self.runtime != "none" and not self.image else [])
        )
