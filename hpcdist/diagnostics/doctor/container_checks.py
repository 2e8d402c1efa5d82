"""Checks of the container around this process."""

from __future__ import annotations

import os
import pwd
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hpcdist.machine.check import Check


@dataclass(frozen=True, kw_only=True)
class ContainerFacts:
    """The container around this process."""

    image: str  #: name and build, empty if the image was not built by hpcdist
    driver: bool  #: whether the host's kernel has the NVIDIA driver
    devices: bool  #: whether GPU devices are visible in the container
    home: str
    home_writable: bool
    has_name: bool  #: whether the user has a name in the container


def in_container(root: Path = Path("/")) -> bool:
    """Return whether this process runs in a container, by the files that runtimes leave."""
    marks = (".dockerenv", "run/.containerenv", ".singularity.d", "ch/environment")
    return any((root / mark).exists() for mark in marks)


def read_container(image: Mapping[str, str], env: Mapping[str, str], root: Path = Path("/")) -> ContainerFacts:
    """Read the facts of the container; `image` is the result of `own_image.image_facts`."""
    try:
        named = bool(env.get("USER") or env.get("LOGNAME") or pwd.getpwuid(os.getuid()).pw_name)
    except KeyError:
        named = False
    home = env.get("HOME", "")
    build = image.get("image_build", "")[:12]
    return ContainerFacts(
        image=" ".join(filter(None, [image.get("image", ""), f"build {build}" if build else ""])),
        driver=(root / "proc/driver/nvidia/version").is_file(),
        devices=any((root / "dev").glob("nvidia[0-9]*")),
        home=home,
        home_writable=bool(home) and os.access(home, os.W_OK),
        has_name=named,
    )


def container_checks(found: ContainerFacts) -> list[Check]:
    """Return the usual mistakes in containers that are started by hand."""
    checks = [
        Check(name="image", level="ok", text=found.image)
        if found.image
        else Check(name="image", level="note", text="not built by `hpcdist image build`")
    ]
    if found.driver and not found.devices:
        text = "the host has an NVIDIA driver, but no GPU is passed into the container: training uses the CPUs"
        fix = "docker: --gpus all; podman: --device nvidia.com/gpu=all; apptainer: --nv; or `hpcdist run … --in docker`"
        checks.append(Check(name="GPUs", level="warning", text=text, fix=fix))
    if not found.home_writable:
        text = f"{found.home} is not writable, and libraries keep caches there" if found.home else "HOME is not set"
        checks.append(Check(name="home", level="note", text=text, fix="--env HOME=/tmp"))
    if not found.has_name:
        text = "the user has no name in the container, and some libraries require one"
        checks.append(Check(name="user", level="note", text=text, fix='--env USER="$USER"'))
    return checks
