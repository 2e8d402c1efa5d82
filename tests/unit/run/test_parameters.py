"""Parameters of a run: those of a shipped trainer, of a trainer of the user's own, and of a script."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpcdist.config.loading import load_config
from hpcdist.config.written import plain_tree, run_yaml
from hpcdist.run.folder import RunDir
from hpcdist.run.records import load_origin, parameters, script_arguments, write_origin


def run_of(tmp_path: Path, yaml: str, *overrides: str, recorded: bool = True) -> RunDir:
    """Return the folder of a run that was started with a YAML and overrides."""
    config = tmp_path / "mine.yaml"
    config.write_text(yaml)
    run = RunDir.create(tmp_path / "runs" / "digits" / "first")
    run.config.write_text(run_yaml(load_config(config, overrides)))
    if recorded:
        write_origin(run, load_origin(str(config), overrides))
    return run


def parameters_of(run: RunDir) -> dict[str, Any]:
    return parameters(run, plain_tree(run.config))


def test_shipped_trainer_has_the_keys_of_its_sections(tmp_path: Path) -> None:
    found = parameters_of(run_of(tmp_path, "trainer: ddp\n", "seed=3"))
    assert (found["model.name"], found["optim.lr"], found["seed"]) == ("simple_cnn", 0.001, 3)
    assert not {key for key in found if key.startswith(("rl.", "pipeline."))}


OWN = """
experiment: mine
trainer: mine:train
optim: {lr: 0.001}
stop: {max_steps: 5}
params: {hidden: 32, layers: {count: 2}}
"""


def test_own_trainer_has_what_was_written_and_its_params(tmp_path: Path) -> None:
    run = run_of(tmp_path, OWN, "name=first", "data.batch_size=64", "params.total_steps=7", "roles={a: 1, b: 2}")
    assert parameters_of(run) == {
        "trainer.target": "mine:train",
        "seed": 0,
        "optim.lr": 0.001,  # the default, but written
        "data.batch_size": 64,
        "stop.max_steps": 5,
        "roles.a": 1,
        "roles.b": 2,
        "params.hidden": 32,
        "params.layers.count": 2,
        "params.total_steps": 7,
    }


def test_key_that_a_resume_changes_becomes_a_parameter(tmp_path: Path) -> None:
    run = run_of(tmp_path, OWN)
    run.config.write_text(run_yaml(load_config(tmp_path / "mine.yaml", ["optim.weight_decay=0.1"])))
    assert parameters_of(run)["optim.weight_decay"] == 0.1


def test_script_has_its_arguments_and_what_was_written(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    yaml = f"trainer: {{script: ['{tmp_path}/train.py', --lr, '0.1', --seed, '5', --api-key, hunter22]}}\n"
    found = parameters_of(run_of(tmp_path, yaml, "launch.num_ranks=2"))
    words = found.pop("trainer.script")
    assert "hunter22" not in words
    assert found == {"launch.num_ranks": 2, "lr": "0.1", "seed": "5", "api_key": "***"}


def test_run_without_a_recorded_origin_has_all_keys(tmp_path: Path) -> None:
    assert "model.name" in parameters_of(run_of(tmp_path, OWN, recorded=False))


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("train.py", {}),
        ("train.py --lr 0.1 --epochs=90 -b 32", {"lr": "0.1", "epochs": "90", "b": "32"}),
        ("train.py --shift -1 --no-cuda --fp-16", {"shift": "-1", "no_cuda": "true", "fp_16": "true"}),
        ("main.py -a resnet18 --dummy --gpu 2 /data", {"a": "resnet18", "dummy": "true", "gpu": "2", "arg1": "/data"}),
        ("train.py config/gpt.py --batch_size=8 out", {"arg1": "config/gpt.py", "batch_size": "8", "arg2": "out"}),
        ("train.py model=gpt +optim.lr=1e-3 ++a/b=x=y", {"model": "gpt", "optim.lr": "1e-3", "a/b": "x=y"}),
        ("train.py --tag a --tag b --dry -- -", {"tag": "b", "dry": "true", "arg1": "-"}),
        ("-m package.train --lr 0.1 --empty=", {"lr": "0.1", "empty": ""}),
    ],
)  # fmt: skip
def test_arguments_of_a_script_by_name(command: str, expected: dict[str, str]) -> None:
    assert script_arguments(command.split()) == expected
