"""The check that ranks find torch, before they start. It does not import torch."""

import importlib.util
import os
import sys
from collections.abc import Mapping
from importlib.machinery import PathFinder

from hpcdist.config.schema import Config
from hpcdist.errors import ConfigError
from hpcdist.host.image_identity import install_command


def require_torch(config: Config, env: Mapping[str, str], *, on_slurm: bool) -> None:
    """Raise ConfigError if the ranks need torch and would not find it."""
    problems = torch_problems(config, env, on_slurm=on_slurm)
    if problems:
        raise ConfigError(*problems)


def torch_problems(config: Config, env: Mapping[str, str], *, on_slurm: bool) -> list[str]:
    """Return a problem if the ranks use this Python and it has no torch.

    There is none for a script, which may not import torch, and for ranks on Slurm with a Python of their own.
    """
    if config.trainer.script:
        return []
    if on_slurm and (config.container.runtime != "none" or config.cluster.environment.kind != "none"):
        return []
    if _has_torch({**env, **config.launch.env}):
        return []
    fix = f"run {install_command('train')}"
    if on_slurm:
        fix += ", or set container.image or cluster.environment"
    return [f"trainer.target={config.trainer.target} needs torch, which {sys.executable} does not have: {fix}"]


def _has_torch(env: Mapping[str, str]) -> bool:
    folders = [folder for folder in env.get("PYTHONPATH", "").split(os.pathsep) if folder]
    specs = [importlib.util.find_spec("torch"), PathFinder.find_spec("torch", folders)]
    # A folder of this name without a module has no origin.
    return any(spec is not None and spec.origin is not None for spec in specs)
