"""Checks of `cluster.environment` before a submission."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from hpcdist.config.schema import Config
from hpcdist.environments.loaded_modules import has_modules, load_modules
from hpcdist.environments.uv_project import uv_problems
from hpcdist.errors import UserMistake

_SQUASHFS = b"hsqs"


def environment_problems(config: Config, env: Mapping[str, str]) -> list[str]:
    """Return the mistakes in the environment of the ranks that this machine can find, each with its key and fix."""
    environment = config.cluster.environment
    path = Path(environment.path)
    found = []
    if environment.kind == "venv":
        program = path / "bin" / environment.python
        if not os.access(program, os.X_OK):
            found.append(f"cluster.environment.path: {path} is not a virtual environment: no program {program}")
    elif environment.kind == "uv":
        found += uv_problems(path, env)
    elif environment.kind == "squashfs":
        found += _image_problems(path)
    if environment.kind in ("venv", "uv") and environment.stage and shutil.which("zstd", path=env.get("PATH")) is None:
        found.append("cluster.environment: packing needs the program zstd: install it, or set stage=false")
    return found


def module_problems(config: Config, env: Mapping[str, str]) -> list[str]:
    """Return why the modules cannot be loaded on this machine; no problem if it has no environment modules.

    Nothing is checked with `cluster.setup`, whose commands run in the job only.
    """
    names = config.cluster.environment.modules
    env = {**env, **config.cluster.env}
    # Commands of the job, such as `module use`, may change which modules exist.
    if not names or config.cluster.setup or not has_modules(env):
        return []
    try:
        load_modules(names, env)
    except UserMistake as error:
        return [str(error)]
    return []


def _image_problems(image: Path) -> list[str]:
    try:
        with open(image, "rb") as file:
            if file.read(len(_SQUASHFS)) == _SQUASHFS:
                return []
    except OSError as error:
        return [f"cluster.environment.path: {image} cannot be read: {error.strerror}"]
    return [f"cluster.environment.path: {image} is not a squashfs image: create it by `mksquashfs ENVIRONMENT {image}`"]
