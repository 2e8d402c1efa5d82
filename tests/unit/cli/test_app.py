"""Help, exit codes and errors of the command line; `hpcdist config`."""

import ast
import json
import logging
import os
import pty
import re
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from command_line import Cli, Make, one_line

import hpcdist
from hpcdist import __version__
from hpcdist.cli import app, options
from hpcdist.errors import TrackingError
from hpcdist.host import log_files
from hpcdist.host.json_files import read_json, write_json
from hpcdist.run.folder import RunDir
from hpcdist.tracking import sync_runs


@pytest.mark.processes
@pytest.mark.parametrize(
    ("arguments", "heavy"),
    [
        (["--help"], {"torch", "mlflow", "omegaconf", "submitit", "psutil"}),
        (["config", "ddp_digits"], {"torch", "mlflow", "submitit", "psutil", "hpcdist.cli.runs", "hpcdist.cli.review"}),
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
    assert (done.returncode, done.stderr) == (0, "[]\n")


@pytest.mark.processes
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "ddp_digits", "optim.lr=-1"], "optim.lr must be > 0, got -1.0"),
        (["run", "ddp_digits", "trainer=dpp"], "trainer: 'dpp' is not one of "),
        (["run", "ddp_digits", "launch.device=cuda"], "launch.device=cuda, but no GPU is visible here"),
        (["run", "ddp_digits", "--sweep", "seed=1,1"], "--sweep: seed: 1 is given twice"),
        (["run", "ddp_digits", "seed=3", "--sweep", "seed=1,2"], "--sweep: seed is both swept and overridden"),
        (["run", "ddp_digits", "--sweep", "optim.lr=0.1,-1"], "optim.lr must be > 0, got -1.0"),
        (["run", "ddp_digits", "--sweep", "seed=1,2", "--detach"], "--sweep and --detach exclude each other: "),
        (["run", "ddp_digits", "--sweep", "seed=1,2", "tracking.uri=http://ada:***@mlflow"], "the password of "),
        (["submit", "ddp_digits", "--array-parallelism", "2"], "--array-parallelism needs --sweep"),
        (["submit", "ddp_digits", "--sweep", "cluster.nodes=1,2"], "--sweep: cluster.nodes cannot be swept: "),
        (["run", "ddp_digits", "launch.device=cpu", "data.global_batch_size=97"],
         "data.global_batch_size=97 cannot be divided into 2 equal micro-batches: use 96, or set"),
        (["submit", "ddp_digits", "--dry-run", "data.global_batch_size=256", "cluster.nodes=3"],
         "data.global_batch_size=256 cannot be divided into 3 equal micro-batches: use 255, or set"),
        (["config"], "CONFIG is missing: shipped configs are "),
        (["supervise", "nope"], "nope holds no run"),
        (["run", "ddp_digits", "tracking.uri=http://ada:***@mlflow"], "the password of http://ada:***@mlflow is not"),
        (["runn"], "No such command 'runn'"),
        (["run"], "CONFIG is missing: shipped configs are "),
        (["bench", "comm", "--nonsense"], "(see `hpcdist bench comm --help`)"),
        (["run", "--lr", "0.1"], ": config keys are written key=value, as in optim.lr=0.1 (see `hpcdist run --help`)"),
    ],
)  # fmt: skip
def test_a_user_error_is_one_line(hpcdist: Cli, arguments: list[str], message: str) -> None:
    result = hpcdist(*arguments)
    assert message in one_line(result)
    assert os.listdir() == []


@pytest.mark.processes
def test_unexpected_exception_is_one_line_naming_the_traceback(
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


FULL = "No space left on device"


@pytest.mark.processes
@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(28, FULL, "/home/x"), f"{FULL}: /home/x: free space there (`df -h`)"),
        (OSError(28, FULL, "/home/x", None, "/runs/x"), f"{FULL}: /runs/x: free space there"),
        (OSError(13, "Permission denied", "/runs/x"), "Permission denied: /runs/x\n"),
        (OSError(28, FULL), f"{FULL}\n"),
        (OSError(2, "No such file", "/runs/x", None, "/runs/y"), "No such file: /runs/x\n"),
        (
            BlockingIOError(11, "write could not complete without blocking"),
            "write could not complete without blocking\n",
        ),
        (
            BlockingIOError(11, os.strerror(11)),
            f"{os.strerror(11)}: this user or container may start no more processes",
        ),
        (RuntimeError("can't start new thread"), "can't start new thread: this user or container may start no more"),
    ],
)
def test_errors_of_the_system_name_what_to_do(
    error: Exception, message: str, monkeypatch: pytest.MonkeyPatch, hpcdist: Cli
) -> None:
    def fails(_: object) -> None:
        raise error

    monkeypatch.setattr("hpcdist.run.lookup.list_runs", fails)
    result = hpcdist("runs")
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith(f"hpcdist: {message}")


@pytest.mark.processes
def test_unexpected_exception_of_a_supervisor_is_logged_whole(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("hpcdist.run.folder.RunDir.open", lambda _: 1 // 0)
    monkeypatch.setattr(sys, "argv", ["hpcdist", "supervise", str(tmp_path)])
    with pytest.raises(ZeroDivisionError):
        app.main()


@pytest.mark.processes
def test_config_prints_the_resolved_config(hpcdist: Cli) -> None:
    result = hpcdist("config", "ddp_digits", "optim.lr=0.01", "launch.env.API_KEY=s3cret", "params.lr=${optim.lr}")
    assert (result.code, result.err) == (0, "")
    shown = yaml.safe_load(result.out)
    assert (shown["optim"]["lr"], shown["params"], shown["data"]["name"]) == (0.01, {"lr": 0.01}, "digits")
    assert shown["launch"]["env"] == {"API_KEY": "***"}
    assert "optim.lr: float = 0.001\n    Peak learning rate.\n" in hpcdist("config", "--schema").out


# --- Shell completion without error messages and in bounded time.


BIN = Path(sys.executable).parent
#: Completes the words as readline does after it has split the line at COMP_WORDBREAKS, and prints the candidates.
BASH = """
source "$HOME/.bash_completions/hpcdist.sh"
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
_hpcdist_completion hpcdist
printf '%s\\n' "${COMPREPLY[@]}"
"""


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


@pytest.mark.processes
def test_bash_completes_commands_runs_configs_and_keys(folder: Path) -> None:
    env = {"HOME": str(folder), "PATH": f"{BIN}:{os.environ['PATH']}", "LANG": "C.UTF-8"}
    env["_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION"] = "1"
    # On a busy machine, the imports for the keys may take longer than the limit of a lookup.
    (folder / "patient").mkdir()
    (folder / "patient" / "sitecustomize.py").write_text("from hpcdist.cli import options\noptions.LIMIT_S = 600.0\n")
    env["PYTHONPATH"] = str(folder / "patient")
    install = [str(BIN / "hpcdist"), "--install-completion", "bash"]
    subprocess.run(install, env=env, cwd=folder, check=True, capture_output=True)
    for words, more, expected in (
        ("resu", {}, ["resume"]),
        ("status |", {}, ["sweep-a", "second", "first"]),
        ("status digits/", {}, ["digits/second", "digits/first"]),
        ("run mi", {}, ["mine.yaml"]),
        ("run ddp_digits optim.l", {}, ["optim.lr=", "optim.lr=0.001"]),
        ("run ddp_digits optim.lr = 0.1 optim.l", {}, ["optim.lr=", "optim.lr=0.001"]),
        ("run ddp_digits preflight.mode =", {}, []),
        ("run ddp_digits preflight.mode = o", {}, []),  # the beginning of a value, not of `optim.name`
        ("status |", {"HPCDIST_RUNS_DIR": "/dev/null"}, []),
        ("status fi", {"HPCDIST_RUNS_DIR": str(folder / "missing")}, []),
    ):
        command = ["bash", "--norc", "-c", BASH, "-", "hpcdist", *words.replace("|", "").split(" ")]
        done = subprocess.run(command, env=env | more, cwd=folder, capture_output=True, text=True, check=True)
        assert (done.stdout.split(), done.stderr) == (expected, ""), words


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


def test_completers_and_their_time_on_a_hanging_file_system(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def complete(completer: Any, incomplete: str, **params: Any) -> Any:
        return completer(SimpleNamespace(params=params), incomplete)

    monkeypatch.chdir(folder)
    assert complete(options.experiments, "") == ["digits"]
    assert complete(options.profiles, "dev") == ["devcluster"]
    assert complete(options.configs, f"{folder}/mi") == [f"{folder}/mine.yaml"]
    listed = options._folders
    is_hanging, is_over = threading.Event(), threading.Event()

    def hang(path: Path) -> Any:
        if path.name == "digits":
            is_hanging.set()
            is_over.wait()
        return listed(path)

    class Lookup(threading.Thread):
        def join(self, timeout: float | None = None) -> None:
            """Let the limit pass once the lookup hangs."""
            assert timeout == options.LIMIT_S
            assert is_hanging.wait(60)

    monkeypatch.setattr(options, "_folders", hang)
    monkeypatch.setattr(threading, "Thread", Lookup)
    assert complete(options.runs, "") == ["sweep-a"]
    is_over.set()


def test_version_and_help(hpcdist: Cli) -> None:
    assert hpcdist("--version") == (0, f"hpcdist {__version__}\n", "")
    assert hpcdist("runs", "-h") == hpcdist("runs", "--help")
    code, out, err = hpcdist("runs", "--json")
    assert (code, json.loads(out), err) == (0, {"runs": [], "notes": []}, "")


# --- Text of others on a terminal: logs, names and messages must not control it. One function prints, and it cleans.


#: Sets the title, clears the screen, C1 forms of the same, overwrites a line, and reverses the order of characters.
EVIL = "\x1b]0;PWNED\x07\x1b[2J\x1b]8;;http://e\x1b\\\x9b2J\x9d0;x\x9c\x08\u202e\u2066"
#: Sequences that rich writes: colours, and those of a progress display.
RICH = re.compile(r"\x1b\[(\d+(;\d+)*m|\?25[hl]|\d?[AK]|0?m)")
CONTROL = re.compile(r"[\x00-\x08\x0b-\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")

#: Functions that print, or ask on the terminal: those that a name alone may pass on, and those that are called.
PRINTING = {"print", "sys.stdout", "sys.stderr"}
CALLED = {"Console", "input", "pprint", "typer.echo", "typer.secho", "typer.prompt", "typer.confirm", "click.echo"}
#: Modules that print otherwise, none of them to the terminal of a command: module → reader of their output.
PRINTERS = {
    "host.log_files": "the one place that prints",
    "cli.app": "sets the error handler of the streams",
    "cli.runs": "asks whether standard output is a terminal",
    "trainers.comm.results": "a console that writes a file",
    "containers.images": "the standard output of a tool of the engine goes to standard error",
}
#: Processes of hpcdist whose output is a log file or is read by a program.
PROGRAMS = """
checks.node_probe slurm.on_nodes
rank.worker job.node_steps
supervisor.hang
""".split()  # noqa: SIM905


def test_only_one_function_prints() -> None:
    package, found = Path(hpcdist.__file__).parent, set()
    for path in package.rglob("*.py"):
        if not re.search(r"\b(print|sys\.std|Console\(|input\(|echo|prompt|confirm)", text := path.read_text()):
            continue
        nodes = list(ast.walk(ast.parse(text)))  # comments and strings may have these words
        names = {ast.unparse(node) for node in nodes if isinstance(node, ast.Name | ast.Attribute)}
        calls = {ast.unparse(node.func) for node in nodes if isinstance(node, ast.Call)}
        if names & PRINTING or calls & CALLED:
            found.add(".".join(path.relative_to(package).with_suffix("").parts))
    assert found == {*PRINTERS, *PROGRAMS}


@pytest.fixture
def terminal(hpcdist: Cli, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Run a command with a terminal as its standard output and error. Returns what the terminal receives."""

    def call(*arguments: str) -> str:
        ours, theirs = pty.openpty()
        received = []

        def read() -> None:
            try:
                while data := os.read(ours, 65_536):
                    received.append(data)
            except OSError:  # EIO: the other end is closed
                return

        reader = threading.Thread(target=read)
        reader.start()
        with monkeypatch.context() as patch, open(theirs, "w", encoding="utf-8") as stream:
            for name in ("stdout", "stderr"):
                patch.setattr(sys, name, stream)
            patch.setenv("TERM", "xterm-256color")
            patch.setattr(sys, "argv", ["hpcdist", *arguments])
            with pytest.raises(SystemExit):
                app.main()
        reader.join()
        os.close(ours)
        return b"".join(received).decode()

    return call


@pytest.fixture
def planted(make: Make, tmp_path: Path) -> RunDir:
    """A failed run with control sequences in its files wherever a text can stand."""
    run = make("first", status="failed", reason=f"reason {EVIL}", attempt=1, world_size=1)
    folder = run.attempt(1).path
    run.attempt(1).log(0).write_text(f"log {EVIL}\nRuntimeError: {EVIL}\n")
    beat = {"step": 3, "total_steps": 4, "time": 1.0, "metrics": {f"metric {EVIL}": 1.0}, "doing": f"doing {EVIL}"}
    write_json(folder / "rank-00000.beat.json", beat)
    failure = {"kind": "error", "rank": 0, "host": f"host {EVIL}", "step": 1, "error": f"error {EVIL}"}
    write_json(folder / "failure.json", failure | {"traceback": [f"trace {EVIL}\n"], "log": f"log {EVIL}"})
    text = f"rank 0 is slow {EVIL}"
    with (folder / "stragglers.jsonl").open("w") as file:
        file.write(f'{{"role": "", "name": "n", "event": "slow", "text": {json.dumps(text)}}}\n')
    facts = read_json(run.environment) or {}
    write_json(run.environment, {**facts, "python": EVIL, "image": EVIL, "image_digest": EVIL, "gpu": EVIL})
    write_json(run.path / "dataset.json", {"name": EVIL})
    (run.checkpoints / f"step-{EVIL}").mkdir(parents=True)
    (run.path.parent / f"named{EVIL.replace('/', '')}").mkdir()
    return run


TERMINAL_COMMANDS = {
    "runs": ["runs"],
    "status": ["status", "first"],
    "explain": ["explain", "first"],
    "logs": ["logs", "first"],
    "logs -f": ["logs", "first", "-f"],
    "follow": ["follow", "first"],
    "compare": ["compare", "first", "second"],
    "cost": ["cost"],
    "doctor": ["doctor", "first"],
    "run --like": ["run", "--like", "first", "--dry-run"],
    "sync": ["sync", "first"],
    "stop": ["stop", "first"],
    "report": ["report", "first"],
    "unknown": ["status", EVIL],
    "file": ["run", f"{EVIL}.yaml"],
    "key": ["config", "ddp_digits", f"name={EVIL}"],
    "option": ["runs", f"--{EVIL}"],
}
#: In these, planted text must be visible; the others show none of it in this scene.
SHOWING = ("runs", "status", "explain", "logs", "logs -f", "follow", "compare", "sync", "unknown", "option")


@pytest.mark.processes
def test_no_control_sequence_of_others_reaches_the_terminal(
    terminal: Callable[..., str], planted: RunDir, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    make("second", "seed=2", status="finished", attempt=1, world_size=1)

    def refused(*_: object, **__: object) -> None:
        raise TrackingError(f"MLflow answered: {EVIL}")

    monkeypatch.setattr(sync_runs, "sync_run", refused)
    received = {name: terminal(*arguments) for name, arguments in TERMINAL_COMMANDS.items()}
    kept = {name: CONTROL.findall(RICH.sub("", text)) for name, text in received.items()}
    assert {name: found for name, found in kept.items() if found} == {}
    assert [name for name in SHOWING if "PWNED" not in received[name]] == [], received


@pytest.mark.processes
def test_a_log_is_raw_in_a_pipe_only(terminal: Callable[..., str], planted: RunDir, hpcdist: Cli) -> None:
    planted.attempt(1).log(0).write_text(f"10 %\r\x1b[32m20 %\x1b[0m\r\nü\t{EVIL}")
    assert hpcdist("logs", "first").out == f"10 %\r\x1b[32m20 %\x1b[0m\r\nü\t{EVIL}", "standard output is no terminal"
    text = terminal("logs", "first").replace("\r\n", "\n")
    assert text.startswith("10 %\n20 %\nü\t\\x1b]0;PWNED\\x07\\x1b[2J")


def test_log_records_are_clean(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(logging, "captureWarnings", lambda _: None)
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    level, ours = root.level, logging.getLogger("hpcdist").level
    log_files.configure()
    try:
        raise ValueError(EVIL)
    except ValueError:
        root.exception("failed: %s", EVIL)
    finally:
        root.setLevel(level)
        logging.getLogger("hpcdist").setLevel(ours)
    assert CONTROL.findall(capsys.readouterr().err) == []
