"""`hpcdist run --sweep`, and the script of a sweep on Slurm."""

import json
import os
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import Cli, Ends, one_line

from hpcdist.config.written import read_stored
from hpcdist.errors import UserMistake
from hpcdist.review.sweep_facts import describe_sweep, read_sweep_facts
from hpcdist.run.folder import RunDir, State, StopRequest
from hpcdist.run.run_parameters import parameters
from hpcdist.run.sweeps import SweepDir
from hpcdist.tracking.journal import JournalWriter
from hpcdist.tracking.series import read_last_values

#: All tests of this file may start processes.
pytestmark = pytest.mark.processes


SWEEP = ("run", "ddp_digits", "name=tune", "--sweep", "seed=1,2,3", "--sweep", "optim.lr=0.1")


def rejected(run: RunDir) -> State:
    raise UserMistake("another process holds it")


def stopped(cause: Any) -> Callable[[RunDir], State]:
    """End a cell after a request, as the signal handler of the supervisor or `hpcdist stop CELL` writes it."""

    def stop(run: RunDir) -> State:
        run.attempt(1).send_request(StopRequest(cause=cause, by="SIGINT"))
        return State(status="stopped", reason="saved")

    return stop


def interrupted(run: RunDir) -> State:
    """Send Ctrl-C between two cells."""
    os.kill(os.getpid(), signal.SIGINT)
    return State(status="finished")


@pytest.mark.parametrize(
    ("end", "counts", "code"),
    [
        (rejected, "1 created, 2 finished", 1),
        (stopped("user"), "2 finished, 1 stopped", 0),
        (stopped("signal"), "1 created, 1 finished, 1 stopped", 0),
        (interrupted, "1 created, 2 finished", 0),
    ],
    ids=["rejected", "stopped", "Ctrl-C in a cell", "Ctrl-C between cells"],
)
def test_ctrl_c_ends_the_sweep_and_nothing_else_does(
    hpcdist: Cli, cells: Ends, end: Callable[[RunDir], State], counts: str, code: int
) -> None:
    cells["seed_2"] = end
    result = hpcdist(*SWEEP[:4], "optim.lr=0.1", "--sweep", "seed=1,2,3")
    assert (result.code, result.err) == (code, "")
    assert f"sweep tune: {counts}" in result.out
    assert "run the same command again for missing and failed cells" in result.out
    assert ("seed_2: another process holds it" in result.out) == (end is rejected)
    assert ("closed the parent run" in result.out) == ("created" in counts)


def test_sweep_of_a_script_shows_the_metric_that_its_cells_log(hpcdist: Cli, cells: Ends) -> None:
    Path("train.py").touch()
    Path("train.yaml").write_text("{trainer: {script: [train.py, --lr, '${params.lr}']}, params: {lr: 0.5}}")

    def logs(run: RunDir) -> State:
        beat = {"time": 1.0, "host": "n1", "step": 7, "total_steps": None, "metrics": {}}
        run.attempt(1).beat(0).write_text(json.dumps(beat))
        with JournalWriter(run.journal) as journal:
            journal.log({"loss": 0.25, "grad": 2.0}, 7)
        return State(status="finished", reason="done")

    cells["lr_0.1"] = logs
    result = hpcdist("run", "train.yaml", "--sweep", "params.lr=0.1,0.01")
    assert (result.code, result.err) == (0, "")
    assert "eval/accuracy" not in result.out
    assert re.search(r"status +. step . last loss . reason", result.out), result.out
    assert re.search(r"lr=0.1 +. finished . +7 . +0.25 . done", result.out), result.out
    (name,) = re.findall("sweep (train-lr-[0-9a-f]{8}): 2 cells, 2 to run", result.out)
    run = RunDir(next(Path("runs/hpcdist").glob("*-lr_0.1")))
    assert parameters(run, read_stored(run.config))["lr"] == "0.1"

    sweep = SweepDir(Path("runs/hpcdist", name))
    facts = read_sweep_facts(sweep, sweep.read_state(), read_last_values)
    assert "Best cell: lr\\=0\\.1 with **last loss = 0.25** (lowest is best)" in describe_sweep(facts, max_chars=8000)

    # A later command adds a value; its cells have other arguments, but it is the same sweep.
    result = hpcdist("run", "train.yaml", "--sweep", "params.lr=0.001", "--dry-run")
    assert f"sweep {name}: 1 cell, 1 to run" in result.out, (result.out, result.err)

    assert "setting" not in hpcdist("run", "train.yaml", "name=silent", "--repeat", "2").out, "no cell has a value"
    cells["seed_1"] = logs
    result = hpcdist("run", "train.yaml", "name=two", "--repeat", "2")
    # A script has no best checkpoint.
    assert re.search(r"setting +. +last loss +. against the best +. cells", result.out), result.out

    shutil.rmtree(run.path)
    assert {cell.status for cell in read_sweep_facts(sweep, sweep.read_state(), read_last_values).cells} >= {"missing"}


def test_repeat_sets_seeds_and_settings_are_compared_by_means(hpcdist: Cli, cells: Ends) -> None:
    def reached(value: float) -> Callable[[RunDir], State]:
        def end(run: RunDir) -> State:
            save = run.checkpoints / "step-00000007"
            save.mkdir()
            (save / "manifest.json").write_text(json.dumps({"step": 7, "metrics": {"eval/accuracy": value}}))
            return State(status="finished")

        return end

    # The last part of the names of cells.
    cells.update({f"seed_{seed}": reached(0.9 + seed / 100) for seed in (1, 2, 3)})
    swept = ("run", "ddp_digits", "name=tune", "--sweep", "optim.lr=0.1,0.2", "--repeat", "3")
    result = hpcdist(*swept)
    assert (result.code, result.err) == (0, "")
    assert [cell.name for cell in SweepDir(Path("runs/digits/tune")).cells()] == [
        f"tune-lr_{lr}-seed_{seed}" for lr in (0.1, 0.2) for seed in (1, 2, 3)
    ]
    assert re.search(r"lr=0.2 +. +0.920 ± 0.010 s.d. \(n=3\) . within noise +. +3 ", result.out), result.out
    assert re.search(r"lr=0.2 +. +0.920 ± 0.010 s.d. \(n=3\) . within noise +. +3 ", hpcdist("status", "tune").out)
    document = json.loads(hpcdist("status", "tune", "--json").out)
    assert [(one["label"], one["text"]) for one in document["settings"]] == [
        ("lr=0.1", "0.920 ± 0.010 s.d. (n=3)"), ("lr=0.2", "0.920 ± 0.010 s.d. (n=3)"),
    ]  # fmt: skip
    assert re.search(r"lr=0.2 .* within noise", hpcdist("compare", "tune").out)
    found = json.loads(hpcdist("compare", "tune", "--json").out)
    assert (found["best"], found["results"][1]["verdict"]) == ("lr=0.1", "within noise")
    for word in ("--sweep seed=4", "seed=5"):
        message = one_line(hpcdist(*swept, *word.split()))
        assert message == f"--repeat 3 and {word} both set the seed: remove one of them", message
    for run in SweepDir(Path("runs/digits/tune")).cells():
        shutil.rmtree(run.checkpoints)
        if "lr_0.1" not in run.name:
            with JournalWriter(run.journal) as journal:
                journal.log({"own/score": 1.0}, 7)
    document = json.loads(hpcdist("status", "tune", "--json").out)
    assert [(one["label"], one["values"], one["num_cells"]) for one in document["settings"]] == [
        ("lr=0.2", [1.0, 1.0, 1.0], 3),
        ("lr=0.1", [], 3),
    ]
    assert "no setting can be called the best: it is unknown whether" in hpcdist("compare", "tune").out
    assert json.loads(hpcdist("compare", "tune", "--json").out)["best"] is None
    # Without seeds each cell is a run of its own.
    hpcdist("run", "ddp_digits", "name=plain", "--sweep", "optim.lr=0.1,0.2")
    assert json.loads(hpcdist("compare", "plain", "--json").out)["runs"] == ["plain-lr_0.1", "plain-lr_0.2"]


def test_dry_run_shows_the_step_of_the_first_cell_that_will_run(hpcdist: Cli, cells: Ends) -> None:
    result = hpcdist("submit", *SWEEP[1:4], "seed=1", "--cluster", "devcluster", "--dry-run")
    assert "--array" not in result.out, "a single cell is an ordinary job"
    assert os.listdir() == []
    container = ("container.runtime=pyxis",)
    swept = ("ddp_digits", "name=tune", *container, "--sweep", "container.image=first,second")
    cells["image_second"] = lambda run: State(status="failed", reason="a reason")
    result = hpcdist("run", *swept)
    assert "sweep tune: 1 failed, 1 finished" in result.out, result.err
    result = hpcdist("submit", *swept, "--cluster", "devcluster", "--dry-run")
    step = result.out.partition("# then, in the batch step of task 0 (tune-image_second):\n")[2]
    assert "--container-image=second " in step, (result.out, result.err)
    assert "--container-image=first " not in step
