"""Checks of the container around this process."""

from __future__ import annotations

import os
import pwd
from collections.abc import Mapping
from pathlib import Path

from hpcdist.machine.check import Check, note, ok, warning


def container_checks(image: Mapping[str, str], env: Mapping[str, str], root: Path = Path("/")) -> list[Check]:
    """Return the usual mistakes in containers that are started by hand.

    Args:
        image: result of `own_image.image_facts`.
    """
    build = image.get("image_build", "")[:12]
    if named := " ".join(filter(None, [image.get("image", ""), f"build {build}" if build else ""])):
        checks = [ok("image", named)]
    else:
        checks = [note("image", "not built by `hpcdist image build`")]
    if (root / "proc/driver/nvidia/version").is_file() and not any((root / "dev").glob("nvidia[0-9]*")):
        text = "the host has an NVIDIA driver, but no GPU is passed into the container: training uses the CPUs"
        fix = "docker: --gpus all; podman: --device nvidia.com/gpu=all; apptainer: --nv; or `hpcdist run … --in docker`"
        checks.append(warning("GPUs", text, fix))
    home = env.get("HOME", "")
    if not home or not os.access(home, os.W_OK):
        text = f"{home} is not writable, and libraries keep caches there" if home else "HOME is not set"
        checks.append(note("home", text, "--env HOME=/tmp"))
    if not _has_name(env):
        text = "the user has no name in the container, and some libraries require one"
        checks.append(note("user", text, '--env USER="$USER"'))
    return checks


def _has_name(env: Mapping[str, str]) -> bool:
    try:
        return bool(env.get("USER") or env.get("LOGNAME") or pwd.getpwuid(os.getuid()).pw_name)
    except KeyError:
        return False
