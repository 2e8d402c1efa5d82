"""Options have the same form and the same meaning in all commands."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from command_line import Cli

from hpcdist import __version__
from hpcdist.cli import app
from hpcdist.cli.options import with_options


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
