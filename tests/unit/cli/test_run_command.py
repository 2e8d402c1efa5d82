"""`hpcdist run`, and the hidden commands that it starts."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from absent_torch import hide_torch
from command_line import Cli, one_line

from hpcdist.run.folder import RunDir, State
from hpcdist.supervisor import local

#: These tests may start processes.
pytestmark = pytest.mark.processes


def test_dry_run_shows_the_plan_and_writes_nothing(hpcdist: Cli, tmp_path: Path) -> None:
    result = hpcdist("run", "ddp_digits", "name=first", "launch.env.API_KEY=s3cret", "--dry-run")
    assert (result.code, result.err) == (0, "")
    rows = {line.split()[0]: line for line in result.out.splitlines()}
    assert rows["trainer"].endswith("ddp")
    assert rows["roles"].endswith("trainer → rank 0 … 1")
    assert "2 × cpu, gloo, " in rows["devices"]
    assert rows["run"] == "run folder  runs/digits/first"
    assert rows["MLflow"].endswith(f"sqlite:///{tmp_path}/runs/mlflow.db")
    assert f"hpcdist.rank.worker {tmp_path}/runs/digits/first" in rows["command"]
    assert "API_KEY=***" in result.out
    assert "s3cret" not in result.out
    assert list(tmp_path.iterdir()) == []


def test_run_prints_plan_and_final_status(hpcdist: Cli, tmp_path: Path, supervised: dict[str, Any]) -> None:
    result = hpcdist("run", "ddp_digits", "name=first", "launch.num_ranks=3")
    assert result.code == 0
    assert result.out.startswith("trainer")
    assert result.out.splitlines()[-1] == "finished: all epochs are done"
    assert supervised["run"].path == tmp_path / "runs" / "digits" / "first"
    assert supervised["plan"].num_ranks == 3
    assert supervised["config"].launch.num_ranks == 3
    assert supervised["run"].config.is_file()


@pytest.mark.parametrize("sweep", [(), ("--sweep", "seed=1,2")], ids=["run", "sweep"])
def test_syntax_error_of_the_code_is_reported_before_anything_is_written(
    hpcdist: Cli, supervised: dict[str, Any], tmp_path: Path, sweep: tuple[str, ...]
) -> None:
    (tmp_path / "train.py").write_text("def train(ctx, cfg):\n    if ctx\n")
    result = hpcdist("run", "ddp_digits", "trainer=train:train", "name=first", *sweep)
    assert result.code == 2
    assert "trainer.target: " in one_line(result)
    assert "train.py:2: SyntaxError: expected ':' in `if ctx`" in one_line(result)
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


@pytest.mark.parametrize("sweep", [(), ("--sweep", "seed=1,2")], ids=["run", "sweep"])
def test_run_without_torch_is_rejected_before_anything_is_written(
    hpcdist: Cli, supervised: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sweep: tuple[str, ...]
) -> None:
    hide_torch(monkeypatch)
    result = hpcdist("run", "ddp_digits", "name=first", *sweep)
    assert (result.code, result.out) == (2, "")
    assert result.err == (
        f"hpcdist: trainer.target=ddp needs torch, which {sys.executable} does not have: run `pip install '.[train]'`"
        " in a checkout of hpcdist\n"
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("state", "code"),
    [
        (State(status="finished"), 0),
        (State(status="stopped"), 0),
        (State(status="failed"), 1),
        (State(status="failed", rejected=True), 2),
        (State(status="cancelled"), 130),
    ],
    ids=lambda value: getattr(value, "status", None),
)
def test_exit_code_depends_on_the_status_of_the_run(
    hpcdist: Cli, supervised: dict[str, Any], state: State, code: int
) -> None:
    supervised["ends"] = state
    assert hpcdist("run", "ddp_digits").code == code


def test_run_rejects_a_name_in_use(hpcdist: Cli, make: Callable[..., RunDir], supervised: dict[str, Any]) -> None:
    make("first")
    result = hpcdist("run", "ddp_digits", "name=first", "experiment=exp")
    assert one_line(result).endswith("choose another `name`, or continue that run with `hpcdist resume first`")
    assert "run" not in supervised


def test_run_reports_a_folder_that_it_cannot_write(hpcdist: Cli, tmp_path: Path, supervised: dict[str, Any]) -> None:
    (tmp_path / "file").touch()
    result = hpcdist("run", "ddp_digits", "runs_dir=file/runs", "name=first")
    assert one_line(result) == (
        f"run folder {tmp_path}/file/runs/digits/first cannot be created (Not a directory):"
        " set `runs_dir` to a folder that you can write"
    )


def test_detached_run_prints_the_follow_command(
    hpcdist: Cli, monkeypatch: pytest.MonkeyPatch, supervised: dict[str, Any]
) -> None:
    seen: list[str] = []
    monkeypatch.setattr(local, "detach", lambda run, env: seen.append(run.name) or 4711)
    result = hpcdist("run", "ddp_digits", "name=first", "--detach")
    assert result.code == 0
    assert result.out.splitlines()[-1] == (
        "first runs in the background (process 4711): `hpcdist follow first` shows its progress"
    )
    assert seen == ["first"]
    assert "run" not in supervised


def test_supervise_runs_a_run_folder(hpcdist: Cli, make: Callable[..., RunDir], supervised: dict[str, Any]) -> None:
    run = make("first", "seed=7")
    supervised["ends"] = State(status="failed", reason="a reason")
    assert hpcdist("supervise", str(run.path)).code == 1
    assert (supervised["run"].path, supervised["config"].seed) == (run.path, 7)


def test_worker_command_runs_one_rank(hpcdist: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def work(arguments: list[str]) -> None:
        assert arguments == ["/runs/exp/first"]
        sys.exit(7)

    monkeypatch.setitem(sys.modules, "hpcdist.rank.worker", SimpleNamespace(main=work))
    assert hpcdist("worker", "/runs/exp/first").code == 7
