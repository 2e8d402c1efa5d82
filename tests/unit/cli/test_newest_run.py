"""Commands without the argument RUN act on the newest run of the folder, and print its name first."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import Cli, one_line

from hpcdist.host.files import read_json, write_json
from hpcdist.run.folder import RunDir
from hpcdist.run.lease import hold

pytestmark = pytest.mark.processes  # runs are created with the commit that git reports

Make = Callable[..., RunDir]


@pytest.fixture
def runs(make: Make) -> list[RunDir]:
    """An old run whose name is the last by the alphabet, and a new one."""
    found = [make("zeta", status="failed", reason="killed", attempt=1, created=1.0, ended=2.0)]
    found.append(make("alpha", status="finished", reason="done", attempt=1, created=9.0, ended=10.0))
    for run in found:
        run.attempt(1).log(0).write_text(f"log of {run.name}\n")
    return found


@pytest.mark.parametrize("command", ["status", "logs", "explain", "follow", "cost"])
def test_newest_run_is_chosen_and_named_on_standard_error(hpcdist: Cli, runs: list[RunDir], command: str) -> None:
    named = hpcdist(command, "alpha")
    assert named.code == 0
    newest = hpcdist(command)
    assert newest.err.splitlines()[0] == "run: exp/alpha (the newest in runs)"
    assert (newest.code, newest.out) == (0, named.out)


def test_resume_takes_overrides_without_a_name(hpcdist: Cli, runs: list[RunDir]) -> None:
    result = hpcdist("resume", "stop.max_epochs=0")
    assert result.code == 2
    assert result.err.startswith("run: exp/alpha (the newest in runs)\n")
    assert "stop.max_epochs" in result.err
    assert "run alpha is finished" in hpcdist("resume").err


def test_export_takes_the_newest_run(hpcdist: Cli, runs: list[RunDir]) -> None:
    pytest.importorskip("torch")
    assert hpcdist("export", "--format", "torch").err.startswith("run: exp/alpha (the newest in runs)\nhpcdist: ")


def test_stop_takes_the_newest_run_that_runs_or_waits(
    hpcdist: Cli, make: Make, runs: list[RunDir], tmp_path: Path
) -> None:
    fix = "name one, or its folder by --runs-dir"
    assert one_line(hpcdist("stop")) == f"no run in {tmp_path / 'runs'} runs or waits: {fix}"
    older = make("older", status="running", attempt=1, created=3.0)
    newer = make("newer", status="running", attempt=1, created=4.0)
    with hold(older), hold(newer):
        result = hpcdist("stop")
    assert (result.code, result.err) == (0, "run: exp/newer (the newest in runs that runs or waits)\n")
    assert (read_json(newer.attempt(1).request) or {})["action"] == "stop"
    assert not older.attempt(1).request.exists()


def test_newest_sweep_stands_for_its_cells(hpcdist: Cli, make: Make, runs: list[RunDir], tmp_path: Path) -> None:
    make("grid-1", created=20.0)
    write_json(tmp_path / "runs/exp/grid-1/cell.json", {"sweep": "grid"})
    (tmp_path / "runs/exp/grid").mkdir()
    cells = [{"name": "grid-1", "label": "1", "values": {"seed": 1}}]
    write_json(
        tmp_path / "runs/exp/grid/sweep.json",
        {"uid": "u", "created": 19.0, "keys": ["seed"], "base": {}, "cells": cells},
    )
    assert hpcdist("status").err == "sweep: exp/grid (the newest in runs)\n"
    assert hpcdist("logs").err.splitlines()[1] == "hpcdist: grid is a sweep: name one of its cells (grid-1, …)"


def test_folder_without_runs_is_an_error_that_names_it(hpcdist: Cli, tmp_path: Path) -> None:
    for command in ("status", "logs", "explain", "follow", "stop", "resume", "cost"):
        message = one_line(hpcdist(command))
        assert message.startswith(f"no run in {tmp_path / 'runs'}"), command


def test_damaged_runs_are_passed_over(hpcdist: Cli, make: Make, runs: list[RunDir]) -> None:
    make("broken", created=50.0).path.joinpath("state.json").write_text("{")
    assert hpcdist("status").err == "run: exp/alpha (the newest in runs)\n"


def test_misspelt_names_have_a_suggestion(hpcdist: Cli, make: Make, runs: list[RunDir]) -> None:
    assert one_line(hpcdist("status", "alhpa")).endswith(": did you mean 'alpha'?")
    assert one_line(hpcdist("status", "exp/zeat")).endswith(": did you mean 'exp/zeta'?")
    assert one_line(hpcdist("status", "nothing-like-it")).endswith(": `hpcdist runs` lists them")


def test_misspelt_trainer_has_a_suggestion(hpcdist: Cli) -> None:
    assert "did you mean 'pipeline'?" in one_line(hpcdist("run", "ddp_digits", "trainer=pipelin", "--dry-run"))
