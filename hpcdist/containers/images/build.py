"""`hpcdist image build`: build hpcdist's images from a checkout."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import hpcdist
from hpcdist.containers.images.base_digest import Base
from hpcdist.containers.images.engine import Engine, EngineName
from hpcdist.errors import ImageError, UserMistake

Target = Literal["default", "slim", "mlflow"]
TARGETS: tuple[Target, ...] = get_args(Target)
_DOCKERFILES = {"default": "Dockerfile", "slim": "Dockerfile", "mlflow": "mlflow.Dockerfile"}


@dataclass(frozen=True, kw_only=True)
class Build:
    """One build of one image."""

    checkout: Path
    tag: str
    base: Base
    target: Target = "default"
    uid: int | None = None
    gid: int | None = None
    revision: str = ""
    created: str = ""
    options: tuple[str, ...] = ()  #: further arguments for the engine


def find_checkout(start: Path) -> Path:
    """Return the checkout to build: the one around `start`, or that of an editable installation."""
    for folder in (start, *start.parents, Path(hpcdist.__file__).parents[1]):
        if (folder / "docker" / "Dockerfile").is_file() and (folder / "hpcdist" / "__init__.py").is_file():
            return folder
    raise UserMistake(f"no docker/Dockerfile of hpcdist in {start} or above: run this command in a checkout")


def dockerfile_of(checkout: Path, target: Target) -> Path:
    """Return the path of a target's Dockerfile."""
    return checkout / "docker" / _DOCKERFILES[target]


def default_tag(target: Target) -> str:
    """Return the default tag of a target, such as `hpcdist:slim`."""
    return {"default": "hpcdist", "slim": "hpcdist:slim", "mlflow": "hpcdist-mlflow"}[target]


def revision_of(checkout: Path) -> tuple[str, str]:
    """Return the commit, marked `-dirty` if files differ, and its time, for the labels; empty without git."""
    found = []
    for arguments in (["describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"], ["log", "-1", "--format=%cI"]):
        try:
            done = subprocess.run(["git", "-C", checkout, *arguments], capture_output=True, text=True, check=False)
        except FileNotFoundError:
            return "", ""
        found.append(done.stdout.strip() if done.returncode == 0 else "")
    return found[0], found[1]


def argv(engine: EngineName, build: Build) -> list[str]:
    """Return the argv of a build."""
    command: list[str] = [engine, "build"]
    if engine != "docker":
        command += ["--format", "docker"]  # the OCI format has no health checks
    command += ["--file", str(dockerfile_of(build.checkout, build.target)), "--tag", build.tag]
    if build.target != "mlflow":
        command += ["--target", build.target]
    arguments = {
        "BASE_IMAGE": build.base.reference,
        "BASE_NAME": build.base.name,
        "BASE_DIGEST": build.base.digest or None,
        "BASE_ID": build.base.id or None,
        "UID": build.uid,
        "GID": build.gid,
        "REVISION": build.revision or None,
        "CREATED": build.created or None,
    }
    for name, value in arguments.items():
        if value is not None:
            command += ["--build-arg", f"{name}={value}"]
    return [*command, *build.options, str(build.checkout)]


def run(engine: Engine, command: Sequence[str]) -> None:
    """Run a build with the engine's output on the terminal. Raises ImageError if it fails."""
    # Debian 12's docker builds without BuildKit unless asked, and the Dockerfiles' mounts need it.
    code = subprocess.run(command, env={**os.environ, "DOCKER_BUILDKIT": "1"}, check=False).returncode
    if code:
        raise ImageError(f"{engine.name} could not build the image (exit code {code}); see its output above")
