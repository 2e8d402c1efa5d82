"""Shell completion in bash, zsh and fish, without error messages and in bounded time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from command_line import Cli

from hpcdist import __version__
from hpcdist.cli import app, options
from hpcdist.cli.options import with_options

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


# --- Options have the same form and the same meaning in all commands.


def commands(group: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{path}{name} ")
        elif not command.hidden:
            yield f"{path}{name}", command


COMMANDS = dict(commands(typer.main.get_command(app.make_app())))
#: Commands on run folders; the others take no run.
ON_RUNS = (
    "runs",
    "status",
    "logs",
    "follow",
    "stop",
    "cancel",
    "resume",
    "explain",
    "doctor",
    "sync",
    "ui",
    "bench show",
)
ON_CONFIGS = ("run", "submit", "config", "bench comm")


def options_of(command: Any) -> dict[str, tuple[str, ...]]:
    return {
        name: tuple(sorted({*param.opts, *param.secondary_opts})) for param in command.params for name in param.opts
    }


def test_each_option_has_the_same_forms_on_all_commands() -> None:
    forms: dict[str, set[tuple[str, ...]]] = defaultdict(set)
    for name, command in COMMANDS.items():
        for option, names in options_of(command).items():
            if option.startswith("--") and (option, name) != ("--follow", "logs"):  # which has no `--detach`
                forms[option].add(names)
    assert {option: found for option, found in forms.items() if len(found) > 1} == {}


def test_commands_on_runs_and_on_configs_share_their_options() -> None:
    assert [name for name in (*ON_RUNS, *ON_CONFIGS) if "--runs-dir" not in options_of(COMMANDS[name])] == []
    shared = {"--experiment", "--tracking-uri", "--runs-dir"}
    assert [name for name in ON_CONFIGS if not shared <= options_of(COMMANDS[name]).keys()] == []
    for name in ("runs", "status", "config", "doctor", "bench show", "devcluster status"):
        assert "--json" in options_of(COMMANDS[name]), name


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_a_short_help_option(hpcdist: Cli, name: str) -> None:
    code, out, err = hpcdist(*name.split(), "-h")
    assert (code, err) == (0, "")
    assert "Example" in out
    assert hpcdist(*name.split(), "--help")[1] == out


def test_version_option_prints_the_version(hpcdist: Cli) -> None:
    assert hpcdist("--version") == (0, f"hpcdist {__version__}\n", "")


def test_options_of_config_commands_are_overrides(hpcdist: Cli, tmp_path: Path) -> None:
    uri = "http://mlflow:5000"
    options = ("--runs-dir", "my runs", "--experiment", "first", "--tracking-uri", uri)
    code, out, err = hpcdist("config", "ddp_digits", "--json", *options)
    assert (code, err) == (0, "")
    shown = json.loads(out)
    assert (shown["runs_dir"], shown["experiment"]) == (f"{tmp_path}/my runs", "first")
    assert shown["tracking"]["uri"] == uri
    assert os.environ["HPCDIST_TRACKING_URI"] == uri, "takes precedence over the environment of the caller"
    assert with_options(["seed=1"]) == ["seed=1"]


@pytest.mark.processes
def test_run_uses_the_runs_dir_option(hpcdist: Cli, tmp_path: Path) -> None:
    code, out, _ = hpcdist("run", "ddp_digits", "name=first", "--runs-dir", "elsewhere", "--dry-run")
    assert code == 0
    assert f"{tmp_path}/elsewhere/digits/first" in out


def test_empty_list_of_runs_as_json(hpcdist: Cli) -> None:
    code, out, err = hpcdist("runs", "--json")
    assert (code, json.loads(out), err) == (0, {"runs": [], "notes": []}, "")


@pytest.mark.parametrize(
    ("words", "override"),
    [
        ("run --lr 0.1", "optim.lr=0.1"),
        ("run ddp_digits --max-steps=10", "stop.max_steps=10"),
        ("submit ddp_digits --patience --dry-run", "stop.patience=VALUE"),
        ("config ddp_digits --seed 7", "seed=7"),
        ("run ddp_digits --webhook abc", "notify.webhook=***"),
        ("run ddp_digits --nonsense 1", "as in optim.lr=0.1"),
    ],
)
def test_config_key_that_is_written_as_an_option_is_explained(hpcdist: Cli, words: str, override: str) -> None:
    code, out, err = hpcdist(*words.split())
    assert (code, out) == (2, "")
    assert f": config keys are written key=value: {override} (see `hpcdist {words.split()[0]} --help`)\n" in err


def test_usage_error_names_the_help_of_its_command(hpcdist: Cli) -> None:
    code, out, err = hpcdist("bench", "comm", "--nonsense")
    assert (code, out) == (2, "")
    assert err.startswith("hpcdist: No such option: --nonsense")
    assert err.endswith("(see `hpcdist bench comm --help`)\n")
