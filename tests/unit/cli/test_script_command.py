"""`hpcdist run train.py --lr 0.1`: a script and its arguments instead of a config, or after it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from command_line import Cli

#: These tests may start processes.
pytestmark = pytest.mark.processes


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text("print('hello')\n")
    return path


def test_words_after_a_script_belong_to_it(hpcdist: Cli, script: Path, supervised: dict[str, Any]) -> None:
    words = ["--lr", "0.10", "--amp", "no", "--code", "010", "--detach", "--help", "seed=3", "größe", "--", "other.py"]
    result = hpcdist("run", "launch.num_ranks=3", "train.py", *words)
    assert (result.code, result.err) == (0, "")
    config = supervised["config"]
    assert config.trainer.script == [str(script), *words]
    assert (config.launch.num_ranks, config.experiment, config.seed) == (3, "train", 0)
    assert config.name.startswith("train-20")


def test_options_and_keys_precede_a_script(hpcdist: Cli, script: Path, supervised: dict[str, Any]) -> None:
    config = script.with_name("mine.yaml")
    config.write_text("{seed: 4, experiment: mine, params: {file: x.py}}")
    result = hpcdist("run", "--tracking-uri", "sqlite:///a.db", "mine.yaml", "name=x.py", "./train.py")
    assert (result.code, result.err) == (0, "")
    found = supervised["config"]
    assert found.trainer.script == [str(script)]
    assert (found.seed, found.experiment, found.name) == (4, "mine", "x.py")
    assert found.tracking.uri == f"sqlite:///{script.parent}/a.db"
    assert hpcdist("run", "--experiment", "second", "train.py").code == 0
    assert supervised["config"].experiment == "second"


def test_module_instead_of_a_script(hpcdist: Cli, tmp_path: Path, supervised: dict[str, Any]) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package/train.py").touch()
    result = hpcdist("run", "-m", "package.train", "-m", "x")
    assert (result.code, result.err) == (0, "")
    config = supervised["config"]
    assert (config.trainer.script, config.experiment) == (["-m", "package.train", "-m", "x"], "package.train")
    (tmp_path / "package/train.py").write_text("def broken(:\n")
    result = hpcdist("run", "-m", "package.train")
    assert (result.code, "SyntaxError" in result.err) == (2, True)
    assert hpcdist("run", "-m").err.startswith("hpcdist: command line: trainer.script needs a module after -m, as in")
    assert hpcdist("run", "-m", "nopackage.train").err.startswith("hpcdist: trainer.script: no module 'nopackage' in ")


def test_module_without_a_spec_is_a_mistake_of_the_user(hpcdist: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)  # as in the command, which pytest is not
    result = hpcdist("run", "-m", "__main__")
    assert result.code == 2
    assert result.err.startswith("hpcdist: trainer.script: no module '__main__' in ")


def test_missing_script_is_named(hpcdist: Cli, tmp_path: Path) -> None:
    assert hpcdist("run", "nope.py", "--lr", "1") == (
        2,
        "",
        f"hpcdist: trainer.script: no such file: {tmp_path}/nope.py\n",
    )


def test_submission_of_a_script(hpcdist: Cli, script: Path) -> None:
    result = hpcdist("submit", "--dry-run", "cluster.nodes=2", "name=first", "train.py", "--nodes", "7")
    assert (result.code, result.err) == (0, "")
    assert "#SBATCH --nodes=2" in result.out
    assert f"{script.parent}/runs/train/first" in result.out


def test_sweep_over_an_argument_of_a_script(hpcdist: Cli, script: Path) -> None:
    result = hpcdist("run", "--dry-run", "--sweep", "params.lr=0.1,0.2", "train.py", "--lr", "${params.lr}")
    assert (result.code, result.err) == (0, "")
    assert "lr=0.2" in result.out
    assert f"{script} --lr 0.1" in result.out, "of the first cell"


@pytest.mark.parametrize(
    ("text", "mistake"),
    [
        ("trainer: train.py", "trainer.target is a trainer; for a script write trainer: {script: [train.py]}"),
        (
            "trainer: {script: train.py --lr 0.1}",
            "trainer.script must be list[str], got 'train.py --lr 0.1': write [train.py, --lr, 0.1]",
        ),
        ("trainer: {script: [-m]}", "trainer.script needs a module after -m, as in [-m, package.module], got ''"),
    ],
)
def test_wrong_spelling_in_yaml_names_the_right_one(hpcdist: Cli, script: Path, text: str, mistake: str) -> None:
    script.with_name("mine.yaml").write_text(text)
    assert hpcdist("run", "mine.yaml").err == f"hpcdist: mine.yaml: {mistake}\n"
