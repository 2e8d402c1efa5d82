"""`hpcdist run --sweep`, and the script of a sweep on Slurm."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command_line import Cli

from hpcdist.config.written import read_stored
from hpcdist.errors import UserMistake
from hpcdist.review.description import describe_sweep, read_sweep_facts
from hpcdist.run.folder import Request, RunDir, State
from hpcdist.run.records import parameters
from hpcdist.run.sweeps import SweepDir
from hpcdist.supervisor import local

#: These tests may start processes.
pytestmark = pytest.mark.processes


@pytest.fixture
def cells(monkeypatch: pytest.MonkeyPatch) -> dict[str, Callable[[RunDir], State]]:
    """Set the ends of cells by the last part of their names; all others finish."""
    ends: dict[str, Callable[[RunDir], State]] = {}

    def supervise(run: RunDir, config: Any, plan: Any, report: Any, env: Any, *, tracking_uri: str) -> State:
        run.new_attempt()
        how = ends.get(run.name.rpartition("-")[2], lambda run: State(status="finished", reason="done"))
        state = replace(how(run), attempt=1)
        run.write_state(state)
        return state

    monkeypatch.setattr(local, "supervise", supervise)
    monkeypatch.setattr("hpcdist.host.log_files.configure", lambda: None)
    monkeypatch.setattr("hpcdist.cli.sweep._close_parent_run", lambda run, uri: print("closed the parent run"))
    return ends


SWEEP = ("run", "ddp_digits", "name=tune", "--sweep", "seed=1,2,3", "--sweep", "optim.lr=0.1")


def test_dry_run_of_a_sweep_shows_its_cells_and_writes_nothing(hpcdist: Cli) -> None:
    result = hpcdist(*SWEEP, "--dry-run")
    assert (result.code, result.err) == (0, "")
    assert "sweep tune: 3 cells, 3 to run, in " in result.out
    assert "  2: seed=3 lr=0.1 (new)  tune-seed_3-lr_0.1\n" in result.out
    assert "hpcdist.rank.worker" in result.out
    assert os.listdir() == []


def test_sweep_continues_after_a_failed_cell(hpcdist: Cli, cells: dict[str, Callable[[RunDir], State]]) -> None:
    swept = (*SWEEP[:4], "optim.lr=0.1", "--sweep", "seed=1,2,3")
    cells["seed_2"] = lambda run: State(status="failed", reason="a reason")
    result = hpcdist(*swept)
    assert (result.code, result.err) == (1, "")
    assert "sweep tune: 1 failed, 2 finished" in result.out
    del cells["seed_2"]
    result = hpcdist(*swept)
    assert (result.code, result.err) == (0, "")
    assert "sweep tune: 3 cells, 1 to run, in " in result.out
    assert "cell 1 of 1: lr=0.1 seed=2" in result.out
    assert "sweep tune: 3 finished" in result.out
    assert "closed the parent run" not in result.out


def test_sweep_continues_after_a_rejected_cell(hpcdist: Cli, cells: dict[str, Callable[[RunDir], State]]) -> None:
    def rejects(run: RunDir) -> State:
        raise UserMistake("another process holds it")

    cells["lr_0.1"] = rejects
    result = hpcdist(*SWEEP[:4], "seed=1", "--sweep", "optim.lr=0.1,0.2")
    assert "tune-seed_1-lr_0.1: another process holds it" in result.out
    assert "1 finished" in result.out
    assert result.code == 1


@pytest.mark.parametrize("in_cell", [True, False], ids=["in a cell", "between cells"])
def test_ctrl_c_ends_the_sweep(hpcdist: Cli, cells: dict[str, Callable[[RunDir], State]], in_cell: bool) -> None:
    def stopped(run: RunDir) -> State:
        if in_cell:  # as the signal handler of the supervisor writes it
            run.attempt(1).send_request(Request(cause="signal", by="SIGINT"))
            return State(status="stopped", reason="saved")
        os.kill(os.getpid(), signal.SIGINT)
        return State(status="finished")

    cells["seed_2"] = stopped
    result = hpcdist(*SWEEP[:4], "optim.lr=0.1", "--sweep", "seed=1,2,3")
    assert (result.code, result.err) == (0, "")
    ended = "1 created, 1 finished, 1 stopped" if in_cell else "1 created, 2 finished"
    assert f"sweep tune: {ended}" in result.out
    assert "run the same command again for missing and failed cells" in result.out
    assert "closed the parent run" in result.out


def test_sweep_continues_after_a_stopped_cell(hpcdist: Cli, cells: dict[str, Callable[[RunDir], State]]) -> None:
    def stopped(run: RunDir) -> State:
        run.attempt(1).send_request(Request(cause="user", by="`hpcdist stop` by ada"))
        return State(status="stopped", reason="saved")

    cells["seed_1"] = stopped
    result = hpcdist(*SWEEP[:4], "optim.lr=0.1", "--sweep", "seed=1,2,3")
    assert "sweep tune: 2 finished, 1 stopped" in result.out
    assert result.code == 0


def test_sweep_of_a_script_shows_the_metric_that_its_cells_log(
    hpcdist: Cli, cells: dict[str, Callable[[RunDir], State]]
) -> None:
    Path("train.py").touch()
    Path("train.yaml").write_text("{trainer: {script: [train.py, --lr, '${params.lr}']}, params: {lr: 0.5}}")

    def logs(run: RunDir) -> State:
        beat = {"time": 1.0, "host": "n1", "step": 7, "total_steps": None, "metric_steps": {"loss": 7, "grad": 7}}
        run.attempt(1).beat(0).write_text(json.dumps(beat | {"metrics": {"loss": 0.25, "grad": 2.0}}))
        return State(status="finished", reason="done")

    cells["lr_0.1"] = logs
    result = hpcdist("run", "train.yaml", "--sweep", "params.lr=0.1,0.01")
    assert (result.code, result.err) == (0, "")
    assert "eval/accuracy" not in result.out
    assert re.search(r"status +. step . loss . reason", result.out), result.out
    assert re.search(r"lr=0.1 +. finished . 7 +. 0.25 . done", result.out), result.out
    (name,) = re.findall("sweep (train-lr-[0-9a-f]{8}): 2 cells, 2 to run", result.out)
    run = RunDir(next(Path("runs/hpcdist").glob("*-lr_0.1")))
    assert parameters(run, read_stored(run.config))["lr"] == "0.1"

    sweep = SweepDir(Path("runs/hpcdist", name))
    facts = read_sweep_facts(sweep, sweep.read_state())
    assert "Best cell: lr\\=0\\.1 with **loss = 0.25** at step 7 (lowest is best)" in describe_sweep(
        facts, max_chars=8000
    )

    # A later command adds a value; its cells have other arguments, but it is the same sweep.
    result = hpcdist("run", "train.yaml", "--sweep", "params.lr=0.001", "--dry-run")
    assert f"sweep {name}: 1 cells, 1 to run" in result.out, (result.out, result.err)

    shutil.rmtree(run.path)
    assert {cell.status for cell in read_sweep_facts(sweep, sweep.read_state()).cells} >= {"missing"}


def test_submitted_sweep_is_a_job_array(hpcdist: Cli) -> None:
    result = hpcdist("submit", *SWEEP[1:], "--cluster", "devcluster", "--array-parallelism", "2", "--dry-run")
    assert (result.code, result.err) == (0, "")
    assert "\n#SBATCH --array=0-2%2\n" in result.out
    assert "\n#SBATCH --job-name=digits/tune\n" in result.out
    assert "\n# srun --job-name=attempt-001 " in result.out
    assert os.listdir() == []
    result = hpcdist("submit", *SWEEP[1:4], "seed=1", "--cluster", "devcluster", "--dry-run")
    assert "--array" not in result.out, "a single cell is an ordinary job"
