"""Help, exit codes and errors of the command line; `hpcdist config`."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tempfile
from importlib import import_module
from pathlib import Path

import pytest
import yaml
from command_line import Cli, one_line

from hpcdist.cli import app

#: These tests may start processes.
pytestmark = pytest.mark.processes


COMMANDS = (
    "run",
    "resume",
    "runs",
    "status",
    "logs",
    "follow",
    "stop",
    "cancel",
    "explain",
    "doctor",
    "config",
    "sync",
    "ui",
)


def test_help_lists_public_commands_only(hpcdist: Cli) -> None:
    result = hpcdist("--help")
    assert (result.code, result.err) == (0, "")
    assert [command for command in COMMANDS if f" {command} " not in result.out] == []
    assert "worker" not in result.out
    assert "supervise" not in result.out


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_every_command_has_an_example(hpcdist: Cli, command: str) -> None:
    result = hpcdist(command, "--help")
    assert result.code == 0
    assert "Example" in result.out
    assert f"hpcdist {command}" in result.out.partition("Example")[2]


@pytest.mark.parametrize(
    ("arguments", "heavy"),
    [
        (["--help"], {"torch", "mlflow", "omegaconf", "submitit", "psutil"}),
        (["config", "ddp_digits"], {"torch", "mlflow", "submitit", "psutil"}),
        (["run", "ddp_digits", "--dry-run"], {"torch", "mlflow", "submitit"}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_fast_commands_import_no_heavy_modules(tmp_path: Path, arguments: list[str], heavy: set[str]) -> None:
    code = (
        "import atexit, sys\n"
        f"atexit.register(lambda: print(sorted({heavy!r} & set(sys.modules)), file=sys.stderr))\n"
        "from hpcdist.cli.app import main\n"
        "main()"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0
    assert ast.literal_eval(done.stderr) == []


def test_a_command_imports_its_own_module_only(tmp_path: Path) -> None:
    code = (
        "import atexit, sys\n"
        "modules = {'hpcdist.cli.' + name for panel in __import__('hpcdist.cli.app').cli.app.PANELS.values()"
        " for name in panel}\n"
        "atexit.register(lambda: print(sorted(modules & set(sys.modules)), file=sys.stderr))\n"
        "from hpcdist.cli.app import main\n"
        "main()"
    )
    arguments = [sys.executable, "-c", code, "config", "ddp_digits"]
    done = subprocess.run(arguments, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert ast.literal_eval(done.stderr) == ["hpcdist.cli.config"]


def test_table_of_commands_is_complete() -> None:
    for modules in app.PANELS.values():
        for name, commands in modules.items():
            own = import_module(f"hpcdist.cli.{name}").app
            names = {one.name or one.callback.__name__ for one in own.registered_commands}
            assert ({own.info.name} if name in app._GROUPS else names) == set(commands), name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "ddp_digits", "optim.lr=-1"], "optim.lr must be > 0, got -1.0"),
        (["run", "ddp_digits", "optim.lrr=1"], "optim.lrr is not a key: did you mean 'optim.lr'?"),
        (["run", "ddp_digits", "nonsense"], "'nonsense' is no override: write key=value, as in optim.lr=0.01"),
        (["run", "ddp_digit"], "ddp_digit: no such config file: did you mean 'ddp_digits'?"),
        (["run", "ddp_digits", "trainer=dpp"], "trainer: 'dpp' is not one of "),
        (["run", "ddp_digits", "launch.device=cuda"], "launch.device=cuda, but no GPU is visible here"),
        (["run", "ddp_digits", "--sweep", "seed=1,1"], "--sweep: seed: 1 is given twice"),
        (["run", "ddp_digits", "seed=3", "--sweep", "seed=1,2"], "--sweep: seed is both swept and overridden"),
        (["run", "ddp_digits", "--sweep", "optim.lr=0.1,-1"], "optim.lr must be > 0, got -1.0"),
        (["run", "ddp_digits", "--sweep", "trainer=ddp,dpp"], "trainer: 'dpp' is not one of "),
        (["run", "ddp_digits", "--sweep", "seed=1,2", "--detach"], "--sweep and --detach exclude each other: "),
        (["run", "ddp_digits", "--sweep", "seed=1,2", "tracking.uri=http://ada:***@mlflow"], "the password of "),
        (["submit", "ddp_digits", "--array-parallelism", "2"], "--array-parallelism needs --sweep"),
        (["submit", "ddp_digits", "--sweep", "cluster.nodes=1,2"], "--sweep: cluster.nodes cannot be swept: "),
        (
            ["run", "ddp_digits", "launch.device=cpu", "data.global_batch_size=97"],
            "data.global_batch_size=97 cannot be divided into 2 equal micro-batches: use 96, or set",
        ),
        (
            ["submit", "ddp_digits", "--dry-run", "data.global_batch_size=256", "cluster.nodes=3"],
            "data.global_batch_size=256 cannot be divided into 3 equal micro-batches: use 255, or set",
        ),
        (["config"], "CONFIG is missing: shipped configs are "),
        (["config", "ddp_digits", "seed=x"], "seed must be int, got 'x'"),
        (["status", "nope"], "no run 'nope' under "),
        (["resume", "nope"], "no run 'nope' under "),
        (["supervise", "nope"], "nope holds no run"),
        (["run", "ddp_digits", "tracking.uri=http://ada:***@mlflow"], "the password of http://ada:***@mlflow is not"),
    ],
)
def test_a_user_error_is_one_line(hpcdist: Cli, arguments: list[str], message: str) -> None:
    result = hpcdist(*arguments)
    assert message in one_line(result)
    assert os.listdir() == []


def test_several_config_mistakes_are_listed(hpcdist: Cli) -> None:
    result = hpcdist("run", "ddp_digits", "optim.lr=-1", "seed=-1", "nope=1")
    assert result.code == 2
    first, *lines = result.err.splitlines()
    assert first.endswith("command line: 3 mistakes")
    assert sorted(line.split()[1] for line in lines) == ["nope", "optim.lr", "seed"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["runn"], "No such command 'runn'"),
        (["run"], "Missing argument 'CONFIG'"),
        (["run", "ddp_digits", "--dryrun"], "No such option"),
        (["logs", "first", "--rank", "x"], "Invalid value for '--rank'"),
    ],
)
def test_usage_error_has_no_traceback(hpcdist: Cli, arguments: list[str], message: str) -> None:
    result = hpcdist(*arguments)
    assert result.code == 2
    assert message in result.err
    assert "Traceback" not in result.err


def test_process_exits_with_one_line_and_code_2(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hpcdist", "run", "ddp_digits", "optim.lr=-1"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.endswith("hpcdist: command line: optim.lr must be > 0, got -1.0\n")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (OSError(28, "No space left on device", "/runs/x"), 2, "hpcdist: No space left on device: /runs/x\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_os_errors_and_interrupts_print_no_traceback(
    hpcdist: Cli, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, message: str
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("hpcdist.run.lookup.list_runs", fail)
    result = hpcdist("runs")
    assert (result.code, result.err) == (code, message)


def test_unexpected_exception_is_one_line_with_the_path_of_the_traceback(
    monkeypatch: pytest.MonkeyPatch, hpcdist: Cli, tmp_path: Path
) -> None:
    monkeypatch.setattr("hpcdist.run.lookup.list_runs", lambda _: 1 // 0)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    result = hpcdist("runs")
    (kept,) = tmp_path.glob("hpcdist-*.traceback")
    assert (result.code, result.out) == (app.DEFECT, "")
    assert result.err == (
        f"hpcdist: internal error (ZeroDivisionError: integer division or modulo by zero): please report it with"
        f" {kept}\n"
    )
    assert "ZeroDivisionError" in kept.read_text()
    assert kept.stat().st_mode & 0o077 == 0
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    assert "Traceback (most recent call last)" in hpcdist("runs").err


def test_unexpected_exception_of_a_supervisor_is_logged_whole(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("hpcdist.run.folder.RunDir.open", lambda _: 1 // 0)
    monkeypatch.setattr(sys, "argv", ["hpcdist", "supervise", str(tmp_path)])
    with pytest.raises(ZeroDivisionError):
        app.main()


def test_config_prints_the_resolved_config(hpcdist: Cli) -> None:
    result = hpcdist("config", "ddp_digits", "optim.lr=0.01", "launch.env.API_KEY=s3cret", "params.lr=${optim.lr}")
    assert (result.code, result.err) == (0, "")
    shown = yaml.safe_load(result.out)
    assert (shown["optim"]["lr"], shown["params"], shown["data"]["name"]) == (0.01, {"lr": 0.01}, "digits")
    assert shown["launch"]["env"] == {"API_KEY": "***"}


def test_config_schema_prints_type_default_and_help_of_keys(hpcdist: Cli) -> None:
    result = hpcdist("config", "--schema")
    assert result.code == 0
    assert "optim.lr: float = 0.001\n    Peak learning rate.\n" in result.out
    assert "launch.max_restarts: int = 3\n" in result.out
