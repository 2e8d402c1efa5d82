"""`hpcdist run … --in docker|podman`: run a config in a container on this machine."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hpcdist.config.loading import load_config
from hpcdist.config.schema import Config
from hpcdist.config.shipped import find_config
from hpcdist.config.written import redacted_argument
from hpcdist.containers.images import (
    RUNNERS,
    find_engine,
    inspect,
    local_container,
    require_driver,
    require_fit,
    without_secrets,
)
from hpcdist.containers.spec import RUNTIMES, ContainerSpec, Mount
from hpcdist.errors import ImageError, UserMistake
from hpcdist.host.log_files import say
from hpcdist.host.machine import driver_version
from hpcdist.run.folder import claim
from hpcdist.run.lease import user_name
from hpcdist.supervisor.plan import Machine


def run_in_container(
    source: str,
    overrides: Sequence[str],
    config: Config,
    *,
    engine: str,
    image: str,
    resume: bool | None,
    dry_run: bool,
) -> int:
    """Print the engine's command line for a run and execute it; the hpcdist in the container names the run."""
    is_file = Path(source).expanduser().is_file()
    spec = _container(source, config, engine, image, is_file=is_file, dry_run=dry_run)
    overrides, variables = without_secrets(overrides)
    spec = replace(spec, env=(*spec.env, *variables))
    # The folders that a config sets, as absolute paths: `~` and relative paths differ inside.
    default = load_config("ddp_digits", [])
    chosen = {"runs_dir": (config.runs_dir, default.runs_dir), "data.root": (config.data.root, default.data.root)}
    arguments = [
        "run",
        str(find_config(source).absolute()) if is_file else source,
        *overrides,
        *(f"{key}={folder}" for key, (folder, usual) in chosen.items() if folder != usual),
        *([] if resume is None else ["--resume" if resume else "--new"]),
    ]
    command = [*RUNTIMES[spec.runtime](spec), *arguments]
    if not spec.gpus and config.launch.device != "cpu":
        say("no GPU is visible: training on CPUs")
    say(shlex.join(map(redacted_argument, command)))
    if dry_run:
        return 0
    claim(Path(config.runs_dir).expanduser().absolute())
    for mount in spec.mounts:
        # The engine would create missing folders as root.
        Path(mount.source).mkdir(parents=True, exist_ok=True)
    return subprocess.run(command, env={**os.environ, **variables}, check=False).returncode


def _container(source: str, config: Config, engine: str, image: str, *, is_file: bool, dry_run: bool) -> ContainerSpec:
    """Return the container with the mounts of a run. Raises UserMistake, or ImageError unless it is a dry run."""
    if engine not in RUNNERS:
        raise UserMistake(f"--in must be {' or '.join(RUNNERS)}, got {engine!r}")
    found = find_engine(engine, RUNNERS)
    try:
        facts = inspect(found, image)
        require_fit(facts)
    except ImageError as error:
        if not dry_run:
            raise
        facts = None
        say(f"hpcdist: {error}", error=True)  # the plan is complete but for the image's digest
    # The user's own code is imported from the current folder; a shipped trainer and its config are in the image.
    own_code = is_file or bool(config.trainer.script) or ":" in config.trainer.target
    cwd = Path.cwd()
    spec = local_container(
        found.name,
        image,
        facts.digest if facts else "",
        user_name(),
        config,
        cwd,
        own_code=own_code,
        num_gpus=Machine.inspect(os.environ).num_gpus,
        env=os.environ,
        rootless_daemon=found.is_rootless_daemon(),
    )
    for file in filter(None, [find_config(source).absolute() if is_file else None, config.trainer.script_file]):
        if not file.is_relative_to(cwd):
            folder = str(file.parent)
            spec = replace(spec, mounts=(*spec.mounts, Mount(source=folder, target=folder)))
    if spec.gpus and facts:
        require_driver(facts, driver_version())
    return spec
