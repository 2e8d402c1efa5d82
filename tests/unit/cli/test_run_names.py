"""The argument RUN: a name, prefix or folder finds the run; any other text is a one-line error."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command_line import Cli
from typer.main import get_command

from hpcdist.cli.app import make_app
from hpcdist.config.loading import load_config
from hpcdist.config.written import run_yaml
from hpcdist.errors import RunFolderError
from hpcdist.host.files import write_json
from hpcdist.run.folder import RunDir
from hpcdist.run.lookup import find_runs, list_runs, resolve, resolve_run
from hpcdist.run.sweeps import SweepDir

Command = Callable[..., tuple[int, str]]


def commands_of(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Return every command with an argument RUN, read from the command line so that new ones are included."""
    for name, command in getattr(group, "commands", {}).items():
        arguments = [param for param in command.params if param.param_type_name == "argument"]
        if any("RUN" in (param.metavar or "") for param in arguments):
            yield (*path, name)
        yield from commands_of(command, (*path, name))


COMMANDS = sorted(commands_of(get_command(make_app())))
#: Commands that only read; the others would start processes for an existing run.
READING = [("status",), ("logs",), ("explain",)]
ENDING = [("stop",), ("cancel",)]


@pytest.fixture
def command(hpcdist: Cli) -> Command:
    """Run a command in this process. Returns its exit code and its output."""

    def run(*arguments: str) -> tuple[int, str]:
        result = hpcdist(*arguments)
        return result.code, result.out + result.err

    return run


def make(runs_dir: Path, name: str, experiment: str = "exp") -> RunDir:
    run = RunDir.create(runs_dir / experiment / name)
    run.config.write_text(run_yaml(load_config("ddp_digits", [f"name={name}", f"runs_dir={runs_dir}"])))
    run.new_attempt().log(0).write_text("one line of the log\n")
    run.write_state(replace(run.read_state(), status="finished", reason="ended", attempt=1, ended=2.0))
    return run


def make_sweep(runs_dir: Path, name: str, *cells: str) -> SweepDir:
    sweep = SweepDir(runs_dir / "exp" / name)
    sweep.path.mkdir(parents=True)
    listed = [{"name": cell, "label": cell, "values": {"seed": 1}} for cell in cells]
    write_json(sweep.file, {"uid": "u", "created": 1.0, "keys": ["seed"], "base": {}, "cells": listed})
    return sweep


def test_commands_with_a_run_argument_are_found() -> None:
    assert set(COMMANDS) >= {
        ("bench", "show"),
        ("cancel",),
        ("doctor",),
        ("explain",),
        ("follow",),
        ("logs",),
        ("resume",),
        ("status",),
        ("stop",),
        ("sync",),
    }


def test_text_without_a_matching_run_is_a_one_line_error(
    runs_dir: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make(runs_dir, "first")
    make(runs_dir, "second")
    make_sweep(runs_dir, "grid", "grid-1")
    before = run.path.joinpath("state.json").read_bytes()
    monkeypatch.chdir(runs_dir)
    (runs_dir / "a_file").touch()
    texts = ["", " ", "*", "f*", "a**b", "?irst", "[f]irst", ".", "..", "/", "a_file", "exp", "x" * 5000, "exp/*"]
    texts += ["\x00", "first\x00", "first\n", "nowhere/../first", "/dev/null", "~nobody", "-", "\udcff", "/" * 1500]
    for words in COMMANDS:
        # `cost` also takes an experiment.
        for text in [text for text in texts if (words, text) != (("cost",), "exp")]:
            code, output = command(*words, "--runs-dir", str(runs_dir), "--", text)
            assert code == 2, (words, text, output)
            assert "Traceback" not in output
            assert len(output) < 500, (words, text)
            assert output.startswith("hpcdist: "), (words, text, output)
    assert run.path.joinpath("state.json").read_bytes() == before
    assert not run.attempt(1).request.exists()


@pytest.mark.parametrize("text", ["absolute", "relative", "slash", "dots", "dot", "first", "exp/first", "fir"])
def test_run_is_found_by_folder_name_and_prefix(
    runs_dir: Path, command: Command, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make(runs_dir, "first")
    make(runs_dir, "second")
    monkeypatch.chdir(run.path if text == "dot" else runs_dir.parent)
    texts = {"absolute": str(run.path), "relative": "runs/exp/first", "slash": f"{run.path}/"}
    texts |= {"dots": "runs/exp/../exp/first", "dot": "."}
    name = texts.get(text, text)
    found = resolve_run(name, runs_dir)
    assert found.path == run.path
    assert (found.name, found.experiment) == ("first", "exp")
    for words in READING:
        code, output = command(*words, "--runs-dir", str(runs_dir), name)
        assert code == 0, (words, output)
    for words in ENDING:
        code, output = command(*words, "--runs-dir", str(runs_dir), name)
        assert code == 2, (words, output)
        expected = "hpcdist: run first is not running: it has no supervisor, and its last state is 'finished'\n"
        assert output == expected, "the run was found"


def test_sweep_is_found_by_folder_name_and_prefix(runs_dir: Path, command: Command) -> None:
    make(runs_dir, "first")
    sweep = make_sweep(runs_dir, "grid", "grid-1")
    for text in (str(sweep.path), f"{sweep.path}/", "grid", "exp/grid", "gri"):
        found = resolve(text, runs_dir)
        assert isinstance(found, SweepDir)
        assert found.path == sweep.path
        code, output = command("stop", "--runs-dir", str(runs_dir), text)
        assert (code, output) == (2, "hpcdist: no cell of sweep grid runs or waits (1 cells: 1 missing)\n")
    with pytest.raises(RunFolderError, match=r"^grid is a sweep: name one of its cells \(grid-1, …\)$"):
        resolve_run("grid", runs_dir)


def test_prefix_of_a_sweep_and_its_cells_is_ambiguous(runs_dir: Path) -> None:
    make_sweep(runs_dir, "grid", "grid-1")
    make(runs_dir, "grid-1")
    assert isinstance(resolve("grid", runs_dir), SweepDir), "the whole name"
    with pytest.raises(RunFolderError, match=r"^'gri' matches 2 runs \(exp/grid, exp/grid-1\): write more of the name"):
        resolve("gri", runs_dir)


# --- folders of other users


@pytest.fixture
def foreign_run(runs_dir: Path) -> RunDir:
    if os.geteuid() != 0:
        pytest.skip("only root can change the owner of a folder")
    run = make(runs_dir, "theirs")
    for path in [run.path, *run.path.rglob("*")]:
        os.lchown(path, 65534, 65534)
    return run


def test_commands_on_all_runs_skip_runs_of_other_users(runs_dir: Path, foreign_run: RunDir, command: Command) -> None:
    mine = make(runs_dir, "mine")
    assert [run.path for run in find_runs(runs_dir)] == [mine.path]
    assert list_runs(runs_dir).num_others == 1
    note = "1 run folder of other users skipped: `hpcdist status RUN` shows one by its name"
    code, output = command("runs", "--runs-dir", str(runs_dir))
    assert code == 0
    assert note in output
    assert "theirs" not in output


def test_run_of_another_user_can_be_read_but_not_changed(runs_dir: Path, foreign_run: RunDir, command: Command) -> None:
    for words in READING:
        code, output = command(*words, "--runs-dir", str(runs_dir), "theirs")
        assert code == 0, (words, output)
    for words in (("stop",), ("cancel",), ("resume",), ("doctor",), ("sync",)):
        for text in ("theirs", str(foreign_run.path)):
            code, output = command(*words, "--runs-dir", str(runs_dir), text)
            assert code == 2, (words, output)
            expected = (
                f"run folder {foreign_run.path} belongs to nobody, and `hpcdist {words[0]}` acts only on your own runs"
            )
            assert expected in output
    assert not foreign_run.attempt(1).request.exists()


def test_link_of_another_user_to_an_own_run_is_skipped(runs_dir: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can change the owner of a link")
    run = make(runs_dir.parent / "elsewhere", "mine")
    (runs_dir / "exp").mkdir(parents=True)
    link = runs_dir / "exp" / "planted"
    link.symlink_to(run.path)
    assert [found.name for found in find_runs(runs_dir)] == ["planted"]
    os.lchown(link, 65534, 65534)
    assert find_runs(runs_dir) == []


@pytest.mark.parametrize(
    ("mode", "inner", "refused"),
    [
        (0o700, 0o777, ""),
        (0o770, 0o700, "first"),
        (0o702, 0o700, "first"),
        (0o755, 0o775, "attempts"),
        (0o755, 0o755, ""),
    ],
)
def test_resume_rejects_a_folder_that_others_can_write(
    runs_dir: Path, command: Command, mode: int, inner: int, refused: str
) -> None:
    run = make(runs_dir, "first")
    (run.path / "attempts").chmod(inner)
    run.path.chmod(mode)
    code, output = command("resume", "--runs-dir", str(runs_dir), "first")
    assert code == 2
    if refused:
        path = next(path for path in (run.path, *run.path.iterdir()) if path.name == refused)
        assert output == (
            f"hpcdist: {path} is writable by group or others (mode {path.stat().st_mode & 0o7777:04o}), and"
            f" `hpcdist resume` would execute their code: `chmod -R go-w {run.path}`\n"
        )
    else:
        assert output == "hpcdist: run first is finished: to train longer, add an override such as stop.max_epochs=20\n"
