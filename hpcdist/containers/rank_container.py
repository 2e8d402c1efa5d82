"""The containers of a run's ranks on Slurm: from config to ContainerSpec, and the checks before submission."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpcdist.config.schema import Config
from hpcdist.config.written import secrets_of
from hpcdist.containers.image_probe import PROBE_TIMEOUT_S, image_probe_command, image_probe_env, probe_outcome
from hpcdist.containers.runtimes import container_command
from hpcdist.containers.spec import DETACHED, PASSED, WITHHELD, ContainerSpec, Mount, without_nested
from hpcdist.errors import UserMistake
from hpcdist.machine.timed_command import run_within
from hpcdist.run.folder import RunDir
from hpcdist.run.work_tree import git_root
from hpcdist.slurm.job_components import components

#: Never mounted just because they are the current folder: they would hide the image's own programs.
_OF_THE_IMAGE = {"/", "/bin", "/dev", "/etc", "/lib", "/opt", "/proc", "/sbin", "/sys", "/usr", "/var"}

#: Image references that `enroot import` accepts for pyxis: of a registry, or of the docker daemon on each node.
_PYXIS_REFERENCE = re.compile(
    r"(docker://)?([^@/#]+@)?([^@/#]+[#/])?[a-z0-9][a-z0-9/._-]*(:[\w.-]+)?(@sha256:[0-9a-f]{64})?|dockerd://[A-Za-z0-9/._:-]+"
)


def rank_container(config: Config, run: RunDir, *, cwd: Path, root: Path) -> ContainerSpec | None:
    """Return the container of a run's ranks; None if `container.runtime` is `none`.

    Args:
        cwd: the ranks' current folder.
        root: top of the user's code around it.

    Raises:
        UserMistake: a path cannot be mounted.
    """
    container = config.container
    if container.runtime == "none":
        return None
    own = [Mount.parse(text) for text in container.mounts]
    paths = [run.path, root, cwd]
    if Path(config.data.root).is_dir():
        paths.append(Path(config.data.root))
    if file := config.trainer.script_file:
        paths.append(file.parent)
    taken = {mount.target for mount in own} | _OF_THE_IMAGE
    same = [Mount(source=str(path), target=str(path)) for path in paths if str(path) not in taken]
    names = [*config.cluster.env, *config.launch.env, *secrets_of(config)]
    env = [*PASSED, *container.env, *(name for name in names if name not in WITHHELD)]
    uses_gpus = any(part.gpus_per_node for part in components(config)) and config.launch.device != "cpu"
    return ContainerSpec(
        runtime=container.runtime,
        image=container.image,
        run=run.path,
        mounts=without_nested([*own, *same]),
        workdir=cwd,
        env=tuple(dict.fromkeys(env)),
        gpus="all" if container.gpus == "all" or (container.gpus == "auto" and uses_gpus) else "",
        python=container.python,
        extra_args=tuple(container.extra_args),
        unpacked=container.runtime == "enroot" and Path(container.image).is_dir(),
        image_env=container.runtime == "charliecloud" and (Path(container.image) / "ch/environment").is_file(),
    )


def container_problems(config: Config, cwd: Path, env: Mapping[str, str]) -> list[str]:
    """Return the mistakes in a run's container settings that this machine can find: one line each, with key and fix."""
    container = config.container
    found = [
        f"container.mounts: {mount.source} does not exist here; mount folders that only the nodes have by"
        " container.extra_args"
        for mount in map(Mount.parse, container.mounts)
        if not Path(mount.source).exists()
    ]
    try:
        if container.runtime in ("apptainer", "charliecloud", "enroot"):
            _check_path(container.runtime, container.image)
        if container.runtime == "pyxis":
            _check_pyxis_image(container.image)
        run = RunDir(Path(config.runs_dir) / config.experiment / (config.name or "probe"))
        if (spec := rank_container(config, run, cwd=cwd, root=git_root(cwd) or cwd)) is not None and not found:
            check_image_here(config, spec, env)
    except UserMistake as error:
        found.append(str(error))
    return found


def _check_path(runtime: str, image: str) -> None:
    if "://" in image:
        raise UserMistake(f"container.image: {image} would be fetched by every rank: convert it to a file first")
    path = Path(image)
    if not path.exists():
        raise UserMistake(f"container.image: no such file or folder: {image}")
    is_folder = runtime == "charliecloud" or (runtime == "enroot" and path.is_dir())
    if is_folder and not ((path / "usr").is_dir() and (path / "dev").is_dir()):
        raise UserMistake(f"container.image: {image} holds no root file system (no usr and dev in it)")


def _check_pyxis_image(image: str) -> None:
    """Reject images that pyxis cannot start: a name that begins with `/` or `.` is a file, others are references.

    Whether a registry has the image is unknown here: the nodes fetch it with credentials and mirrors of their own.
    """
    if image.startswith(("/", ".")):
        _check_path("pyxis", image)
        if Path(image).is_dir():
            raise UserMistake(
                f"container.image: {image} is a folder, and pyxis needs a .sqsh file or an image reference"
            )
    elif not _PYXIS_REFERENCE.fullmatch(image):
        raise UserMistake(
            f"container.image: {image} is neither a path that begins with / nor an image reference of pyxis:"
            " [USER@][REGISTRY#]IMAGE[:TAG] with IMAGE in lower case"
        )


def check_image_here(config: Config, spec: ContainerSpec, env: Mapping[str, str]) -> dict[str, Any] | None:
    """Start the image once on this machine and return its facts; None if this machine has no such runtime.

    Raises:
        UserMistake: the image does not exist, or does not fit this hpcdist.
    """
    make_mount_points(spec)
    command = image_probe_command(spec)
    tool = {"charliecloud": "ch-run", "pyxis": ""}.get(spec.runtime, spec.runtime)
    if not config.container.check_image or shutil.which(tool, path=env.get("PATH")) is None:
        return None
    if spec.runtime in DETACHED and (error := _missing_in_store(spec, env)):
        raise UserMistake(
            f"container.image: {spec.image} is not in {spec.runtime}'s store on this machine ({error}): build or load"
            " it, or set container.check_image=false if only the nodes have it"
        )
    done = run_within(command.argv, PROBE_TIMEOUT_S, env=image_probe_env(spec, env))
    facts, problem, _ = probe_outcome(spec, done.stdout, done.stderr, "this machine")
    if problem:
        raise UserMistake(f"container.image: {problem}")
    return facts


def _missing_in_store(spec: ContainerSpec, env: Mapping[str, str]) -> str:
    command = [spec.runtime, "image", "inspect", "--format", "{{.Id}}", spec.image]
    done = run_within(command, PROBE_TIMEOUT_S, env=env)
    return "" if done.returncode == 0 else " ".join(done.stderr.split()).removeprefix("Error: ")


def make_mount_points(spec: ContainerSpec) -> None:
    """Create the mount points of a run in charliecloud's unpacked image, which is read-only once it is started.

    ch-run mounts the host's /etc/hosts and /etc/resolv.conf by itself if the image has such files.
    """
    if spec.runtime != "charliecloud":
        return
    argv = container_command(spec, []).argv
    binds = [word.removeprefix("--bind=").split(":") for word in argv if word.startswith("--bind=")]
    for source, target in [*binds, *((path, path) for path in ("/etc/hosts", "/etc/resolv.conf"))]:
        place = Path(spec.image) / target.lstrip("/")
        try:
            if not Path(source).is_file():
                place.mkdir(parents=True, exist_ok=True)
            elif not place.exists():
                place.parent.mkdir(parents=True, exist_ok=True)
                place.touch()
        except OSError as error:
            raise UserMistake(
                f"container.image: {spec.image} has no mount point {target}, and it cannot be created"
                f" ({error.strerror}): ask the owner of the image to create it, or use a copy of your own"
            ) from error
