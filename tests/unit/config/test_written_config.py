"""A config that is written to a run folder loads as an equal config, also after edits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from config_files import Write

from hpcdist.config.conversion import exact
from hpcdist.config.loading import load_config, load_run_config
from hpcdist.config.schema import Config
from hpcdist.config.shipped import shipped_configs
from hpcdist.config.written import to_yaml
from hpcdist.errors import ConfigError


def test_written_config_loads_as_an_equal_config(write: Write, tmp_path: Path) -> None:
    config = load_config(write("params: {text: 'größe: 3', list: [1, {a: null}]}\n"), ["name=first", "seed=3"])
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(config))
    assert load_run_config(path, [], {}) == config


#: Values that OmegaConf reads as another type than they are written.
AMBIGUOUS = """\
trainer: {script: [train.py, "1e5", "0x10", "1_000", "12:30", "null", "yes", "~", ""]}
launch: {env: {COMMIT: "12e5", DAY: "2026-01-02", EMPTY: "", COLON: "a: b", EURO: "€ \\U0001F600"}}
optim: {lr: 1e-30, max_grad_norm: 1}
data: {image_size: null}
params: {half: 1e-5, inf: .inf, text: "1e-5", deep: [{a: [1, 1.0, true, null, "on"]}, {}], lines: "a\\nb\\n"}
"""


def test_written_config_keeps_the_types_of_values(write: Write, tmp_path: Path) -> None:
    config = load_config(write(AMBIGUOUS))
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(config))
    assert repr(load_run_config(path, [], {})) == repr(config)
    assert repr(load_run_config(path, ["seed=7"], {})) == repr(dataclasses.replace(config, seed=7))
    assert config.trainer.script[1] == "1e5"


@pytest.mark.parametrize("name", shipped_configs())
def test_written_shipped_config_loads_without_omegaconf(name: str) -> None:
    config = load_config(name)
    assert exact(yaml.safe_load(to_yaml(config))) == config


@pytest.mark.parametrize(
    ("before", "after", "read"),
    [
        ("lr: 0.001", "lr: 1e-2", lambda config: config.optim.lr == 0.01),
        ("lr: 0.001", "lr: 1", lambda config: repr(config.optim.lr) == "1.0"),
        ("seed: 0\n", "", lambda config: config.seed == 0),
        ("params: {}", "params: {twice: '${seed}${seed}'}", lambda config: "${seed}" in config.params["twice"]),
        ("target: ddp", "target: 'own.module:train'", lambda config: config.trainer.target == "own.module:train"),
    ],
    ids=["number", "whole number", "missing key", "interpolation", "own trainer"],
)
def test_edited_config_of_a_run_folder_loads(
    write: Write, tmp_path: Path, before: str, after: str, read: Callable[[Config], bool]
) -> None:
    text = to_yaml(load_config(write("seed: 0\n")))
    assert before in text
    path = tmp_path / "config.yaml"
    path.write_text(text.replace(before, after))
    assert read(load_run_config(path, [], {}))


@pytest.mark.parametrize(
    ("before", "after", "problem"),
    [
        ("lr: 0.001", "lr: -1.0", "optim.lr must be > 0, got -1.0"),
        ("lr: 0.001", "lr: fast", "optim.lr must be float, got 'fast'"),
        ("lr: 0.001", "learning_rate: 1.0", "optim.learning_rate is not a key"),
        ("seed: 0\n", "seed: 0\nseed: 1\n", "found duplicate key seed"),
        ("seed: 0\n", "seed: true\nmodell: {}\n", "modell is not a key: did you mean 'model'?"),
        ("name: adam", "name: adagrad", "optim.name must be one of adam, adamw, sgd, got 'adagrad'"),
        ("target: ddp\n  script: []", "target: own:train\n  script: [x]", "trainer.script and trainer.target exclude"),
        ("name: simple_cnn", "name: resnet17", "model.name"),
    ],
)
def test_mistakes_in_an_edited_config_of_a_run_folder_are_reported(
    write: Write, tmp_path: Path, before: str, after: str, problem: str
) -> None:
    text = to_yaml(load_config(write("seed: 0\n")))
    assert before in text
    path = tmp_path / "config.yaml"
    path.write_text(text.replace(before, after))
    with pytest.raises(ConfigError) as caught:
        load_run_config(path, [], {})
    assert problem in str(caught.value)
