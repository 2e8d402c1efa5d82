"""The check that ranks find torch, before they start."""

import sys
from pathlib import Path
from typing import Any

import pytest
from hpcdist_runs import hide_torch

from hpcdist.config.cluster_schema import ClusterConfig, ContainerConfig, EnvironmentConfig
from hpcdist.config.launch_schema import LaunchConfig
from hpcdist.config.schema import Config
from hpcdist.config.training_schema import TrainerConfig
from hpcdist.environments.torch_check import require_torch, torch_problems
from hpcdist.errors import ConfigError

PROBLEM = (
    f"trainer.target=ddp needs torch, which {sys.executable} does not have: run `pip install '.[train]'` in a checkout"
    " of hpcdist"
)
IN_MODULES = ClusterConfig(environment=EnvironmentConfig(kind="module", modules=["python/3.12"]))


@pytest.mark.parametrize(
    ("config", "here", "on_slurm"),
    [
        ({}, [PROBLEM], [f"{PROBLEM}, or set container.image or cluster.environment"]),
        ({"container": ContainerConfig(runtime="pyxis", image="i")}, [PROBLEM], []),
        ({"cluster": IN_MODULES}, [PROBLEM], []),
        ({"trainer": TrainerConfig(script=["train.py"])}, [], []),
    ],
    ids=["trainer", "container", "environment", "script"],
)
def test_missing_torch_is_a_problem_of_ranks_with_this_python(
    monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], here: list[str], on_slurm: list[str]
) -> None:
    hide_torch(monkeypatch)
    assert torch_problems(Config(**config), {}, on_slurm=False) == here
    assert torch_problems(Config(**config), {}, on_slurm=True) == on_slurm


def test_torch_in_folders_of_pythonpath_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hide_torch(monkeypatch)
    (tmp_path / "torch").mkdir()
    path = {"PYTHONPATH": f"/nowhere:{tmp_path}"}
    with pytest.raises(ConfigError, match=r"^trainer\.target=ddp needs torch"):
        require_torch(Config(), path, on_slurm=False)
    (tmp_path / "torch" / "__init__.py").touch()
    require_torch(Config(), path, on_slurm=False)
    require_torch(Config(launch=LaunchConfig(env=path)), {}, on_slurm=False)
