"""Shell completion in bash, zsh and fish, without error messages and in bounded time."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpcdist.cli import options

BIN = Path(sys.executable).parent
#: Completes the words as readline does after it has split the line at COMP_WORDBREAKS, and prints the candidates.
BASH = """
source "$HOME/.bash_completions/hpcdist.sh"
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
_hpcdist_completion hpcdist
printf '%s\\n' "${COMPREPLY[@]}"
"""

Complete = Callable[..., list[str]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Make two runs and a sweep in two experiments, and a config of the user."""
    for name, file in (
        ("digits/first", "state.json"),
        ("digits/second", "state.json"),
        ("mnist/sweep-a", "sweep.json"),
        ("mnist/nothing", "notes.txt"),
    ):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / file).touch()
    (tmp_path / "mine.yaml").touch()
    return tmp_path


@pytest.fixture
def bash(folder: Path) -> Complete:
    """Install the completion by its option, and complete words in bash."""
    env = {"HOME": str(folder), "PATH": f"{BIN}:{os.environ['PATH']}", "LANG": "C.UTF-8"}
    env["_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION"] = "1"
    install = [str(BIN / "hpcdist"), "--install-completion", "bash"]
    subprocess.run(install, env=env, cwd=folder, check=True, capture_output=True)

    def complete(*words: str, **more: str) -> list[str]:
        done = subprocess.run(
            ["bash", "--norc", "-c", BASH, "-", "hpcdist", *words],
            env=env | more,
            cwd=folder,
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stderr == ""
        return done.stdout.split()

    return complete


@pytest.mark.processes
def test_bash_completes_commands_runs_configs_and_keys(bash: Complete) -> None:
    assert bash("resu") == ["resume"]
    assert bash("status", "") == ["sweep-a", "second", "first"]
    assert bash("status", "fi") == ["first"]
    assert bash("status", "digits/") == ["digits/second", "digits/first"]
    assert bash("run", "ddp_d") == ["ddp_digits"]
    assert bash("run", "mi") == ["mine.yaml"]
    assert bash("run", "ddp_digits", "optim.l") == ["optim.lr=", "optim.lr=0.001"]
    assert bash("run", "ddp_digits", "model.compile", "=", "t") == ["true"]
    assert bash("run", "ddp_digits", "model.compile", "=") == ["true", "false"]


@pytest.mark.processes
def test_completion_prints_no_errors(bash: Complete, folder: Path) -> None:
    assert bash("status", "", HPCDIST_RUNS_DIR="/dev/null") == []
    assert bash("run", "ddp_digits", "no.such.key", "=") == []
    assert bash("status", "fi", HPCDIST_RUNS_DIR=str(folder / "missing")) == []


@pytest.mark.processes
@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_zsh_and_fish_complete_config_keys(folder: Path, shell: str) -> None:
    env = {
        "PATH": os.environ["PATH"],
        "_HPCDIST_COMPLETE": f"complete_{shell}",
        "_TYPER_COMPLETE_ARGS": "hpcdist run ddp_digits optim.l",
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
    }
    done = subprocess.run([BIN / "hpcdist"], env=env, cwd=folder, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert "optim.lr=" in done.stdout
    assert "optim.lr=0.001" in done.stdout


@pytest.mark.processes
def test_completion_imports_no_heavy_modules(folder: Path) -> None:
    code = (
        "import sys; from hpcdist.cli import app, options as completion\n"
        "app.make_app()\n"
        "from types import SimpleNamespace\n"
        "print(completion.runs(SimpleNamespace(params={}), 'fi'))\n"
        "print(sorted({'torch', 'mlflow', 'omegaconf', 'rich', 'psutil', 'yaml', 'numpy'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["['first']", "[]"]


def complete(completer: Any, incomplete: str, **params: Any) -> list[str]:
    return completer(SimpleNamespace(params=params), incomplete)  # type: ignore[no-any-return]


def test_completion_is_bounded_in_time_on_a_hanging_file_system(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = options._folders

    def slow(path: Path) -> Any:
        if path.name == "digits":
            time.sleep(30)
        return listed(path)

    monkeypatch.setattr(options, "_folders", slow)
    monkeypatch.setattr(options, "LIMIT_S", 0.2)
    began = time.monotonic()
    assert complete(options.runs, "", runs_dir=folder / "runs") == ["sweep-a"]
    assert time.monotonic() - began < 5


def test_completers_return_experiments_profiles_keys_and_configs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    assert complete(options.experiments, "") == ["digits"]
    assert complete(options.runs_or_last, "") == ["last", "sweep-a", "second", "first"]
    assert complete(options.profiles, "dev") == ["devcluster"]
    assert complete(options.one_of("docker", "podman"), "p") == ["podman"]
    assert complete(options.keys, "data.name=") == [
        f"data.name={name}" for name in ("digits", "mnist", "fashion_mnist", "cifar10", "image_folder", "synthetic")
    ]
    assert "launch.max_restarts=" in complete(options.keys, "launch.m")
    assert complete(options.configs, f"{folder}/mi") == [f"{folder}/mine.yaml"]
