"""Text of others on a terminal: logs, names and messages must not control it. One function prints, and it cleans."""

from __future__ import annotations

import ast
import logging
import os
import pty
import re
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import Cli

import hpcdist
from hpcdist.cli import app
from hpcdist.errors import TrackingError
from hpcdist.host import log_files
from hpcdist.host.files import read_json, write_json
from hpcdist.run.folder import RunDir
from hpcdist.tracking import sync_runs

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
    "cli.rerun": "asks for a confirmation, if standard input and output are a terminal",
    "cli.runs": "asks whether standard output is a terminal",
    "rank.outcome": "flushes the streams",
    "bench.report": "a console that writes a file",
    "containers.images": "the standard output of a tool of the engine goes to standard error",
}
#: Processes of hpcdist whose output is a log file or is read by a program.
PROGRAMS = """
containers.self_test containers.pid1 slurm.on_nodes slurm.preflight.probe rank.forked_task rank.processes
rank.worker slurm.job.watchdog
supervisor.hang
checks.storage
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
def planted(make: Callable[..., RunDir], tmp_path: Path) -> RunDir:
    """A failed run whose files contain control sequences wherever a text can stand."""
    run = make("first", status="failed", reason=f"reason {EVIL}", attempt=1, world_size=1)
    folder = run.attempt(1).path
    run.attempt(1).log(0).write_text(f"log {EVIL}\nRuntimeError: {EVIL}\n")
    beat = {"step": 3, "total_steps": 4, "time": 1.0, "metrics": {f"metric {EVIL}": 1.0}, "doing": f"doing {EVIL}"}
    write_json(folder / "rank-00000.beat.json", beat)
    failure = {"kind": "error", "rank": 0, "host": f"host {EVIL}", "step": 1, "error": f"error {EVIL}"}
    write_json(folder / "failure.json", failure | {"traceback": [f"trace {EVIL}\n"], "log": f"log {EVIL}"})
    text = f"rank 0 is slow {EVIL}"
    with (folder / "stragglers.jsonl").open("w") as file:
        file.write(f'{{"role": "", "name": "n", "event": "slow", "text": {ascii_json(text)}}}\n')
    facts = read_json(run.environment) or {}
    write_json(run.environment, {**facts, "python": EVIL, "image": EVIL, "image_digest": EVIL, "gpu": EVIL})
    write_json(run.path / "dataset.json", {"name": EVIL})
    (run.checkpoints / f"step-{EVIL}").mkdir(parents=True)
    (run.path.parent / f"named{EVIL.replace('/', '')}").mkdir()
    return run


def ascii_json(text: str) -> str:
    import json

    return json.dumps(text)


COMMANDS = {
    "runs": ["runs"],
    "status": ["status", "first"],
    "explain": ["explain", "first"],
    "logs": ["logs", "first"],
    "logs -f": ["logs", "first", "-f"],
    "follow": ["follow", "first"],
    "compare": ["compare", "first", "second"],
    "cost": ["cost"],
    "doctor": ["doctor", "first"],
    "rerun": ["rerun", "first", "--dry-run"],
    "sync": ["sync", "first"],
    "stop": ["stop", "first"],
    "report": ["report", "first"],
    "unknown": ["status", EVIL],
    "file": ["run", f"{EVIL}.yaml"],
    "key": ["config", "ddp_digits", f"name={EVIL}"],
    "option": ["runs", f"--{EVIL}"],
}
#: In these, planted text must be visible; the others show none of it in this scene.
SHOWING = ("runs", "status", "explain", "logs", "logs -f", "follow", "compare", "rerun", "sync", "unknown", "option")


@pytest.mark.processes
def test_no_control_sequence_of_others_reaches_the_terminal(
    terminal: Callable[..., str], planted: RunDir, make: Callable[..., RunDir], monkeypatch: pytest.MonkeyPatch
) -> None:
    make("second", "seed=2", status="finished", attempt=1, world_size=1)

    def refused(*_: object) -> None:
        raise TrackingError(f"MLflow answered: {EVIL}")

    monkeypatch.setattr(sync_runs, "sync_run", refused)
    received = {name: terminal(*arguments) for name, arguments in COMMANDS.items()}
    kept = {name: CONTROL.findall(RICH.sub("", text)) for name, text in received.items()}
    assert {name: found for name, found in kept.items() if found} == {}
    assert [name for name in SHOWING if "PWNED" not in received[name]] == [], received


def test_a_log_is_raw_in_a_pipe_and_on_demand(terminal: Callable[..., str], planted: RunDir, hpcdist: Cli) -> None:
    planted.attempt(1).log(0).write_text(f"10 %\r\x1b[32m20 %\x1b[0m\r\nü\t{EVIL}")
    assert hpcdist("logs", "first").out == f"10 %\r\x1b[32m20 %\x1b[0m\r\nü\t{EVIL}", "standard output is no terminal"
    assert EVIL in terminal("logs", "first", "--raw")
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
