"""The folder of a sweep: whether a command continues the same sweep, and the state derived from its cells."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from hpcdist.config.loading import load_config
from hpcdist.errors import RunFolderError
from hpcdist.host.files import read_json, write_json
from hpcdist.run.folder import RunDir, Status
from hpcdist.run.lease import hold
from hpcdist.run.lookup import find_runs
from hpcdist.run.sweeps import Sweep, SweepDir, make_sweep, mark, match, parse_axes, sweep_of, write_sweep

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
    folder = write_sweep(sweep)
    runs = []
    for cell, status in zip(sweep.cells, statuses, strict=False):
        run = RunDir.create(folder.path.parent / cell.name)
        attempt = 0 if status in ("created", "queued") else 1
        run.write_state(replace(run.read_state(), status=status, attempt=attempt, ended=9e9))
        mark(run, folder, cell)
        runs.append(run)
    return folder, runs


# --- continuing a sweep


def test_new_sweep_is_unchanged(make: Make) -> None:
    sweep = make(SEEDS)
    assert match(sweep) is sweep
    assert not sweep.folder.exists(), "`match` creates no folder"


def test_values_can_be_added_and_cells_keep_their_names(make: Make) -> None:
    folder = write_sweep(make(["optim.lr=0.1", "seed=1,2"]))
    uid = folder.read()["uid"]
    again = match(make(["seed=2,3", "optim.lr=0.1"]))
    assert [cell.name for cell in again.cells] == ["tune-lr_0.1-seed_2", "tune-lr_0.1-seed_3"]
    write_sweep(again)
    assert [cell["name"] for cell in folder.read()["cells"]] == [f"tune-lr_0.1-seed_{seed}" for seed in (1, 2, 3)]
    assert folder.read()["uid"] == uid
    assert read_json(folder.mlflow) == {"run_uid": uid}


def test_other_keys_are_an_error(make: Make) -> None:
    write_sweep(make(SEEDS))
    with pytest.raises(RunFolderError, match=r"^sweep tune is over seed, not over optim.lr: .* choose another `name`$"):
        match(make(["optim.lr=0.1"]))


def test_another_config_is_an_error(make: Make) -> None:
    write_sweep(make(SEEDS))
    wanted = "sweep tune was started with another config (optim.lr was 0.001, is 0.5): its cells could not be compared"
    with pytest.raises(RunFolderError, match=f"^{re.escape(wanted)}; choose another `name`$"):
        match(make(SEEDS, "optim.lr=0.5"))
    assert match(make(SEEDS, "cluster.time_limit_min=5")).name == "tune"


def test_existing_run_with_the_name_is_an_error(make: Make) -> None:
    sweep = make(SEEDS)
    RunDir.create(sweep.folder)
    with pytest.raises(RunFolderError, match=r"/exp/tune is a run, not a sweep: choose another `name`$"):
        match(sweep)


def test_damaged_sweep_file_is_an_error(make: Make) -> None:
    folder = write_sweep(make(SEEDS))
    folder.file.write_text("{")
    with pytest.raises(
        RunFolderError, match=r"sweep\.json is damaged \(it holds no JSON object\): restore it, or remove the folder"
    ):
        folder.read()


# --- folders


def test_cells_are_runs_and_the_sweep_is_not(make: Make) -> None:
    folder, runs = make_cells(make(SEEDS), "finished", "failed")
    for run in runs:
        run.config.write_text("{}")
    assert [run.name for run in find_runs(folder.path.parents[1])] == ["tune-seed_1", "tune-seed_2"]
    found = sweep_of(runs[0])
    assert found is not None
    assert found.path == folder.path
    folder.file.unlink()
    assert sweep_of(runs[0]) is None
    assert sweep_of(folder) is None


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
def test_state_of_an_ended_sweep(make: Make, statuses: tuple[Status, ...], status: str, reason: str) -> None:
    """A cell in state `running` without a holder has lost its supervisor."""
    folder, _ = make_cells(make(SEEDS), *statuses)
    state = folder.read_state()
    assert (state.status, state.reason) == (status, reason)
    assert state.ended is not None


def test_sweep_is_running_while_a_cell_is(make: Make) -> None:
    folder, (_, run, _) = make_cells(make(SEEDS), "failed", "running", "created")
    assert folder.read_state().status == "failed"
    with hold(run):
        state = folder.read_state()
    assert (state.status, state.ended) == ("running", None)


def test_created_cells_wait_while_the_sweep_is_held(make: Make) -> None:
    folder, _ = make_cells(make(SEEDS), "finished", "created", "created")
    assert folder.read_state().status == "stopped"
    with hold(folder):
        assert folder.read_state().status == "running"


def test_cells_in_slurms_queue_are_queued(make: Make) -> None:
    folder, runs = make_cells(make(SEEDS), "queued", "queued", "queued")
    for run in runs:
        write_json(run.path / "slurm.json", {"job_id": "1"})
    assert folder.read_state().status == "queued"
    runs[0].write_state(replace(runs[0].read_state(), status="running", attempt=1))
    assert folder.read_state().status == "running", "only Slurm knows the state of a job without a holder"
