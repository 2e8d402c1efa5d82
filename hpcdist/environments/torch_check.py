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
    if problems := torch_problems(config, env, on_slurm=on_slurm):
        raise ConfigError(*problems)


def torch_problems(config: Config, env: Mapping[str, str], *, on_slurm: bool) -> list[str]:
    """Return the missing torch of ranks that use this Python; scripts import the packages that they need themselves."""
    has_own_python = on_slurm and (config.container.runtime != "none" or config.cluster.environment.kind != "none")
    if config.trainer.script or has_own_python or _has_torch({**env, **config.launch.env}):
        return []
    others = ", or set container.image or cluster.environment" if on_slurm else ""
    return [
        f"trainer.target={config.trainer.target} needs torch, which {sys.executable} does not have: run"
        f" {install_command('train')}{others}"
    ]


def _has_torch(env: Mapping[str, str]) -> bool:
    folders = [*filter(None, env.get("PYTHONPATH", "").split(os.pathsep))]
    specs = importlib.util.find_spec("torch"), PathFinder.find_spec("torch", folders)
    # A folder of this name without a module has no origin.
    return any(spec is not None and spec.origin is not None for spec in specs)
