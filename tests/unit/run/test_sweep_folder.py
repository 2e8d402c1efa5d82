"""A sweep's folder: whether a command line means the same sweep, and how it stands by its cells."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from hpcdist.config.loading import load_config
from hpcdist.errors import RunFolderError
from hpcdist.files.atomic import read_json, write_json
from hpcdist.run.folder import RunDir, Status
from hpcdist.run.lease import hold
from hpcdist.run.lookup import find_runs
from hpcdist.run.sweep import Sweep, make_sweep, parse_axes
from hpcdist.run.sweep_folder import SweepDir, mark, match, sweep_of, write_sweep

Make = Callable[..., Sweep]
SEEDS = ["seed=1,2,3"]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    path = tmp_path / "run.yaml"
    path.write_text(f"{{experiment: exp, name: tune, runs_dir: {tmp_path}/runs}}\n")

    def make(axes: Sequence[str], *overrides: str) -> Sweep:
        return make_sweep(
            parse_axes(axes, overrides), lambda more: load_config(path, [*overrides, *more]), lambda config: "ddp"
        )

    return make


def make_cells(sweep: Sweep, *statuses: Status) -> tuple[SweepDir, list[RunDir]]:
    there = write_sweep(sweep)
    runs = []
    for cell, status in zip(sweep.cells, statuses, strict=False):
        run = RunDir.create(there.path.parent / cell.name)
        attempt = 0 if status in ("created", "queued") else 1
        run.write_state(replace(run.read_state(), status=status, attempt=attempt, ended=9e9))
        mark(run, there, cell)
        runs.append(run)
    return there, runs


# --- the same sweep again


def test_a_new_sweep_is_as_it_is(make: Make) -> None:
    sweep = make(SEEDS)
    assert match(sweep) is sweep
    assert not sweep.folder.exists(), "looking makes nothing"


def test_values_are_added_and_cells_keep_their_names(make: Make) -> None:
    there = write_sweep(make(["optim.lr=0.1", "seed=1,2"]))
    uid = there.read()["uid"]
    again = match(make(["seed=2,3", "optim.lr=0.1"]))
    assert [cell.name for cell in again.cells] == ["tune-lr_0.1-seed_2", "tune-lr_0.1-seed_3"]
    write_sweep(again)
    assert [cell["name"] for cell in there.read()["cells"]] == [f"tune-lr_0.1-seed_{seed}" for seed in (1, 2, 3)]
    assert there.read()["uid"] == uid
    assert read_json(there.mlflow) == {"run_uid": uid}


def test_other_keys_are_another_sweep(make: Make) -> None:
    write_sweep(make(SEEDS))
    with pytest.raises(RunFolderError, match=r"^sweep tune is over seed, not over optim.lr: .* choose another `name`$"):
        match(make(["optim.lr=0.1"]))


def test_another_config_is_another_sweep(make: Make) -> None:
    write_sweep(make(SEEDS))
    wanted = "sweep tune was started with another config (optim.lr was 0.001, is 0.5): its cells could not be compared"
    with pytest.raises(RunFolderError, match=f"^{re.escape(wanted)}; choose another `name`$"):
        match(make(SEEDS, "optim.lr=0.5"))
    assert match(make(SEEDS, "cluster.time_limit_min=5")).name == "tune"


def test_a_run_of_that_name(make: Make) -> None:
    sweep = make(SEEDS)
    RunDir.create(sweep.folder)
    with pytest.raises(RunFolderError, match=r"/exp/tune is a run, no sweep: choose another `name`$"):
        match(sweep)


def test_a_broken_file_is_told(make: Make) -> None:
    there = write_sweep(make(SEEDS))
    there.file.write_text("{")
    with pytest.raises(
        RunFolderError, match=r"sweep\.json is damaged \(it holds no JSON object\): restore it, or remove the folder"
    ):
        there.read()


# --- folders


def test_a_sweep_is_no_run_and_its_cells_are(make: Make) -> None:
    there, runs = make_cells(make(SEEDS), "finished", "failed")
    for run in runs:
        run.config.write_text("{}")
    assert [run.name for run in find_runs(there.path.parents[1])] == ["tune-seed_1", "tune-seed_2"]
    found = sweep_of(runs[0])
    assert found is not None
    assert found.path == there.path
    there.file.unlink()
    assert sweep_of(runs[0]) is None
    assert sweep_of(there) is None


@pytest.mark.parametrize(
    ("statuses", "status", "reason"),
    [
        (("finished",) * 3, "finished", "3 cells: 3 finished"),
        (("finished", "failed", "stopped"), "failed", "3 cells: 1 failed, 1 finished, 1 stopped"),
        (("finished", "stopped", "cancelled"), "cancelled", "3 cells: 1 cancelled, 1 finished, 1 stopped"),
        (("finished", "stopped", "finished"), "stopped", "3 cells: 2 finished, 1 stopped"),
        (("finished", "finished"), "stopped", "3 cells: 2 finished, 1 missing"),
        (("finished", "finished", "created"), "stopped", "3 cells: 1 created, 2 finished"),
        (("finished", "running", "finished"), "failed", "3 cells: 2 finished, 1 running"),
        ((), "stopped", "3 cells: 3 missing"),
    ],
)
def test_a_sweep_that_is_over(make: Make, statuses: tuple[Status, ...], status: str, reason: str) -> None:
    """A cell that says it is running, and is held by nobody, has lost its supervisor."""
    there, _ = make_cells(make(SEEDS), *statuses)
    state = there.read_state()
    assert (state.status, state.reason) == (status, reason)
    assert state.ended is not None


def test_a_sweep_goes_on_while_one_of_its_cells_does(make: Make) -> None:
    there, (_, run, _) = make_cells(make(SEEDS), "failed", "running", "created")
    assert there.read_state().status == "failed"
    with hold(run):
        state = there.read_state()
    assert (state.status, state.ended) == ("running", None)


def test_cells_wait_for_their_turn_while_the_sweep_is_at_work(make: Make) -> None:
    there, _ = make_cells(make(SEEDS), "finished", "created", "created")
    assert there.read_state().status == "stopped"
    with hold(there):
        assert there.read_state().status == "running"


def test_cells_on_slurm_wait_in_its_queue(make: Make) -> None:
    there, runs = make_cells(make(SEEDS), "queued", "queued", "queued")
    for run in runs:
        write_json(run.path / "slurm.json", {"job_id": "1"})
    assert there.read_state().status == "queued"
    runs[0].write_state(replace(runs[0].read_state(), status="running", attempt=1))
    assert there.read_state().status == "running", "Slurm knows what became of a job that nobody holds"
