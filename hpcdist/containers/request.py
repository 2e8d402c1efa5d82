"""From a run's config to its container, and what can be said against it: before the queue, and on the nodes."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpcdist.config.schema import Config
from hpcdist.config.written import secrets_of
from hpcdist.containers.runtimes import DETACHED, PASSED, WITHHELD, Box, Mount, contain, without_nested
from hpcdist.containers.trial_start import LOOK_S, judge, look_command, look_env
from hpcdist.errors import UserMistake
from hpcdist.machine.timed_command import run_within
from hpcdist.run.folder import RunDir
from hpcdist.run.snapshot import git_root
from hpcdist.slurm.job_components import components

#: Never mounted because someone happens to stand there: the image's own programs would be hidden.
_OF_THE_IMAGE = {"/", "/bin", "/dev", "/etc", "/lib", "/opt", "/proc", "/sbin", "/sys", "/usr", "/var"}


def box_for(config: Config, run: RunDir, *, cwd: Path, root: Path) -> Box | None:
    """What the containers of a run are told; None where it wants none.

    Args:
        cwd: the ranks' current folder.
        root: top of the user's code around it.

    Raises UserMistake for a path that cannot be mounted.
    """
    container = config.container
    if container.runtime == "none":
        return None
    own = [Mount.parse(text) for text in container.mounts]
    paths = [run.path, root, cwd]
    if Path(config.data.root).is_dir():
        paths.append(Path(config.data.root))
    if config.trainer.script:
        paths.append(Path(config.trainer.script[0]).parent)
    taken = {mount.target for mount in own} | _OF_THE_IMAGE
    same = [Mount(source=str(path), target=str(path)) for path in paths if str(path) not in taken]
    names = [*config.cluster.env, *config.launch.env, *secrets_of(config)]
    env = [*PASSED, *container.env, *(name for name in names if name not in WITHHELD)]
    asked = any(part.gpus_per_node for part in components(config)) and config.launch.device != "cpu"
    return Box(
        runtime=container.runtime,
        image=container.image,
        run=run.path,
        mounts=without_nested([*own, *same]),
        workdir=cwd,
        env=tuple(dict.fromkeys(env)),
        gpus=container.gpus == "all" or (container.gpus == "auto" and asked),
        python=container.python,
        extra_args=tuple(container.extra_args),
        image_env=container.runtime == "charliecloud" and (Path(container.image) / "ch/environment").is_file(),
    )


# --- before the queue


def problems(config: Config, cwd: Path, env: Mapping[str, str]) -> list[str]:
    """What this machine can tell to be wrong with a run's containers: a line a mistake, with key and fix."""
    container = config.container
    found = [
        f"container.mounts: {mount.source} does not exist here; what only the nodes have can be mounted by"
        " container.extra_args"
        for mount in map(Mount.parse, container.mounts)
        if not Path(mount.source).exists()
    ]
    try:
        if container.runtime in ("apptainer", "charliecloud", "enroot"):
            _check_path(container.runtime, container.image)
        run = RunDir(Path(config.runs_dir) / config.experiment / (config.name or "probe"))
        if (box := box_for(config, run, cwd=cwd, root=git_root(cwd) or cwd)) is not None and not found:
            check_here(config, box, env)
    except UserMistake as error:
        found.append(str(error))
    return found


def _check_path(runtime: str, image: str) -> None:
    if "://" in image:
        raise UserMistake(f"container.image: {image} would be fetched by every rank: convert it to a file first")
    path = Path(image)
    if not path.exists():
        raise UserMistake(f"container.image: no such file or folder: {image}")
    if runtime == "charliecloud" and not ((path / "usr").is_dir() and (path / "dev").is_dir()):
        raise UserMistake(f"container.image: {image} holds no root file system (no usr and dev in it)")
    if runtime == "enroot" and not path.is_file():
        raise UserMistake(f"container.image: {image} is no file: enroot starts a .sqsh")


def check_here(config: Config, box: Box, env: Mapping[str, str]) -> dict[str, Any] | None:
    """What is in the image, by a look into it on this machine; None where this machine cannot start it.

    Raises UserMistake when the image is not there, or is not one that this hpcdist can use.
    """
    prepare_image(box)
    command = look_command(box)
    tool = {"charliecloud": "ch-run", "pyxis": ""}.get(box.runtime, box.runtime)
    if not config.container.check_image or shutil.which(tool, path=env.get("PATH")) is None:
        return None
    if box.runtime in DETACHED and (said := _missing_in_store(box, env)):
        raise UserMistake(
            f"container.image: {box.image} is not in {box.runtime}'s store on this machine ({said}): build or load it,"
            " or set container.check_image=false where only the nodes have it"
        )
    done = run_within(command.words, LOOK_S, env=look_env(box, env))
    facts, problem, _ = judge(box, done.stdout, done.stderr, "this machine")
    if problem:
        raise UserMistake(f"container.image: {problem}")
    return facts


def _missing_in_store(box: Box, env: Mapping[str, str]) -> str:
    command = [box.runtime, "image", "inspect", "--format", "{{.Id}}", box.image]
    done = run_within(command, LOOK_S, env=env)
    return "" if done.returncode == 0 else " ".join(done.stderr.split()).removeprefix("Error: ")


def prepare_image(box: Box) -> None:
    """Make what a run mounts things at: an unpacked image is read-only once it is started.

    ch-run shows the host's names by itself, where the image has files that these can take the place of.
    """
    if box.runtime != "charliecloud":
        return
    binds = [word.removeprefix("--bind=").split(":") for word in contain(box, []).words if word.startswith("--bind=")]
    for source, target in [*binds, *((path, path) for path in ("/etc/hosts", "/etc/resolv.conf"))]:
        place = Path(box.image) / target.lstrip("/")
        try:
            if not Path(source).is_file():
                place.mkdir(parents=True, exist_ok=True)
            elif not place.exists():
                place.parent.mkdir(parents=True, exist_ok=True)
                place.touch()
        except OSError as error:
            raise UserMistake(
                f"container.image: {box.image} has no {target} to mount something at, and it cannot be made:"
                f" {error.strerror}"
            ) from error


# --- what was seen
