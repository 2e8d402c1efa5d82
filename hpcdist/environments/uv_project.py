"""Environments of projects that are locked by uv (`uv.lock`)."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from hpcdist.environments.listing import CACHE, fingerprint
from hpcdist.errors import UserMistake

LOCK = "uv.lock"
_PROJECT = "pyproject.toml"
_SKIPPED = frozenset({CACHE, ".venv", ".git"})


def uv_problems(project: Path, env: Mapping[str, str]) -> list[str]:
    """Return what prevents uv from building the environment of a project: no lock file, or no uv."""
    key = "cluster.environment.path"
    if not (project / LOCK).is_file() or not (project / _PROJECT).is_file():
        return [
            f"{key}: {project} has no {LOCK} with a {_PROJECT}: name the project's folder, or create it by `uv lock`"
        ]
    if uv_program(env) is None:
        return [f"{key}: {project} needs the program uv, which is not installed here: `pip install uv`"]
    return []


def uv_fingerprint(project: Path, uv_args: Sequence[str]) -> str:
    """Return a digest of all that determines the environment: the lock, uv's options, the processor, local packages.

    Raises:
        UserMistake: the lock file cannot be read.
    """
    found = hashlib.sha256(repr((list(uv_args), platform.machine())).encode())
    for name in (LOCK, _PROJECT, ".python-version"):
        if (file := project / name).is_file():
            found.update(name.encode() + b"\0" + file.read_bytes())
    for folder in _local_packages(project):
        found.update(fingerprint(folder, skip=_SKIPPED).encode())
    return found.hexdigest()


def _local_packages(project: Path) -> Iterator[Path]:
    """Yield folders of packages in a lock file whose content is not part of it, except the project itself."""
    try:
        lock = tomllib.loads((project / LOCK).read_text())
        sources = [package.get("source", {}) for package in lock.get("package", [])]
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, AttributeError, OSError) as error:
        raise UserMistake(f"cluster.environment.path: {project / LOCK} cannot be read ({error}): `uv lock`") from error
    for source in sources:
        place = source.get("directory") or source.get("editable")
        if place and (folder := project / place).resolve() != project.resolve() and folder.is_dir():
            yield folder


def build(project: Path, uv_args: Sequence[str], target: Path, env: Mapping[str, str]) -> None:
    """Create the environment of a project in a new folder, with exactly the locked versions.

    The project itself is not installed, because ranks import the run's copy of the code.

    Raises:
        UserMistake: uv fails.
    """
    uv = uv_program(env)
    if uv is None:  # a job that packs again may run on another machine than `submit`
        raise UserMistake("cluster.environment: the program uv is not installed here: `pip install uv`")
    command = [uv, "sync", "--quiet", "--locked", "--no-editable", "--no-install-project", "--compile-bytecode"]
    command += ["--no-progress", f"--project={project}", *uv_args]
    # Without links to uv's cache, whose files may be removed while the environment is in use.
    own = {"UV_PROJECT_ENVIRONMENT": str(target), "UV_LINK_MODE": "copy"}
    cleared = {name: value for name, value in env.items() if name != "VIRTUAL_ENV"}
    done = subprocess.run(command, env={**cleared, **own}, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        shutil.rmtree(target, ignore_errors=True)
        raise UserMistake(f"cluster.environment.path: uv cannot build {project}: {' '.join(done.stderr.split())}")


def uv_program(env: Mapping[str, str]) -> str | None:
    """Return the program uv: of the search path, or the one installed beside this Python."""
    own = os.path.dirname(sys.executable)
    return shutil.which("uv", path=os.pathsep.join([env.get("PATH", os.defpath), own]))
