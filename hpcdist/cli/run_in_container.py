"""`hpcdist run CONFIG --in docker|podman`: the run in a container on this machine."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hpcdist.cli.terminal import say
from hpcdist.config.loading import load_config
from hpcdist.config.schema import Config
from hpcdist.config.shipped import find_config
from hpcdist.config.written import redacted_argument
from hpcdist.containers.images import local_run as boxes
from hpcdist.containers.images.engine import RUNNERS, find_engine
from hpcdist.containers.images.labels import inspect, require_driver, require_fit
from hpcdist.errors import UserMistake
from hpcdist.run.lease import user_name
from hpcdist.run.runs_dir import claim
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
    """Print the engine's command for a run and execute it. Returns its exit code.

    Args:
        source: Name of a shipped config, or path of a file.
        config: The config as loaded here, without a name: hpcdist in the container chooses the name.
    """
    if engine not in RUNNERS:
        raise UserMistake(f"--in must be {' or '.join(RUNNERS)}, got {engine!r}")
    found = find_engine(engine, RUNNERS)
    facts = inspect(found, image)
    require_fit(facts)
    box = boxes.Box.inspect(found.name, image, facts.digest, user_name(), os.environ)
    path = find_config(source).absolute()
    is_file = Path(source).expanduser().is_file()
    # User code is imported from the current folder; shipped trainers and configs are in the image.
    own_code = is_file or bool(config.trainer.script) or ":" in config.trainer.target
    cwd = Path.cwd()
    box = boxes.furnish(
        box, config, cwd, own_code=own_code, num_gpus=Machine.inspect(os.environ).num_gpus, env=os.environ
    )
    if is_file and not path.is_relative_to(cwd):
        box = boxes.with_mount(box, path.parent)
    if box.gpus:
        require_driver(facts, subprocess.run(["nvidia-smi"], capture_output=True, text=True, check=False).stdout)
    overrides, variables = boxes.without_secrets(overrides)
    box = replace(box, env_names=(*box.env_names, *variables))
    words = [
        "run",
        str(path) if is_file else source,
        *overrides,
        *boxes.folders_in_words(config, load_config("ddp_digits", [])),
    ]
    command = boxes.argv(box, [*words, *([] if resume is None else ["--resume" if resume else "--new"])])
    if not box.gpus and config.launch.device != "cpu":
        say("no GPU is visible: training on CPUs")
    say(shlex.join(map(redacted_argument, command)))
    if dry_run:
        return 0
    claim(Path(config.runs_dir).expanduser().absolute())
    for folder in box.mounts:
        # Otherwise the engine creates them, owned by root.
        folder.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    return subprocess.run(command, env={**os.environ, **variables}, check=False).returncode
