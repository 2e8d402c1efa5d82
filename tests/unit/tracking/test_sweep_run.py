"""The MLflow parent run of a sweep, in a real database."""

import shutil
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import pytest
from mlflow.entities import Run as MlflowEntity
from tracking_scene import Scene

from hpcdist.config.loading import load_config
from hpcdist.config.written import to_yaml
from hpcdist.errors import TrackingError
from hpcdist.host.json_files import read_json
from hpcdist.run.folder import RunDir, State
from hpcdist.run.lease import hold
from hpcdist.run.sweeps import SweepDir, make_sweep, mark, parse_axes, write_sweep
from hpcdist.tracking.parent_run import ParentRun


class SweepScene(Scene):
    """A sweep with cells `seed=1`, `seed=2`, …, and its MLflow runs."""

    def __init__(self, root: Path) -> None:
        self.uri = f"sqlite:///{root}/mlflow.db"
        self.config = root / "run.yaml"
        self.config.write_text(f"{{experiment: exp, name: tune, runs_dir: {root}/runs}}\n")
        self.runs: list[RunDir] = []
        self.folder = self.add("1,2")

    def add(self, seeds: str) -> SweepDir:
        axes = parse_axes([f"seed={seeds}"], [])
        sweep = make_sweep(axes, lambda more: load_config(self.config, more), lambda config: "ddp")
        folder = write_sweep(sweep)
        for cell in sweep.cells:
            run = RunDir.create(folder.path.parent / cell.name)
            run.config.write_text(to_yaml(cell.config))
            mark(run, folder, cell)
            self.runs.append(run)
        return folder

    def ship(self, index: int, **state: Any) -> None:
        """Set the state of a cell and upload it."""
        self.run = self.runs[index]
        self.state(**state)
        self.shipper().ship_once()

    def entities(self) -> dict[str, MlflowEntity]:
        """Return all MLflow runs by name."""
        found = self.client.search_runs([self.experiment.experiment_id])
        assert len({run.info.run_name for run in found}) == len(found)
        return {run.info.run_name: run for run in found}

    def parent(self) -> tuple[str, str]:
        run = self.entities()["tune"]
        return run.info.status, run.data.tags["hpcdist.reason"]


@pytest.fixture
def sweep(tmp_path: Path, empty_database: Path) -> SweepScene:
    shutil.copy(empty_database, tmp_path / "mlflow.db")
    return SweepScene(tmp_path)


def test_cells_are_child_runs_named_by_their_values(sweep: SweepScene) -> None:
    sweep.ship(0)
    sweep.ship(1)
    found = sweep.entities()
    assert set(found) == {"tune", "seed=1", "seed=2"}
    for name in ("seed=1", "seed=2"):
        assert found[name].data.tags["mlflow.parentRunId"] == found["tune"].info.run_id
        assert found[name].data.tags["hpcdist.run.sweep"] == "tune"
        assert found[name].data.tags["hpcdist.setting"] == "tune all seeds"
        assert found[name].data.params["seed"] == name.removeprefix("seed=")
    parent = found["tune"].data
    assert parent.params == {"seed": "1, 2"}
    assert parent.tags["hpcdist.folder"] == str(sweep.folder.path)
    assert (read_json(sweep.folder.mlflow) or {})["run_id"] == found["tune"].info.run_id


def test_status_of_the_parent_run_follows_its_cells(sweep: SweepScene) -> None:
    with hold(sweep.folder):
        sweep.ship(0, status="queued")
        assert sweep.parent() == ("SCHEDULED", "2 cells: 1 created, 1 queued")
        with hold(sweep.runs[0]):
            sweep.ship(0, status="running", attempt=1)
        assert sweep.parent() == ("RUNNING", "2 cells: 1 created, 1 running")
        sweep.ship(0, status="failed", ended=5.0)
        assert sweep.parent() == ("RUNNING", "2 cells: 1 created, 1 failed")
        sweep.ship(1, status="finished", attempt=1, ended=7.0)
    assert sweep.parent() == ("FAILED", "2 cells: 1 failed, 1 finished")
    assert sweep.entities()["tune"].info.end_time == 7000
    sweep.ship(0, status="finished", attempt=2, ended=9.0)
    assert sweep.parent() == ("FINISHED", "2 cells")
    sweep.add("3")
    sweep.ship(2, status="cancelled", attempt=1, ended=11.0)
    assert sweep.parent() == ("KILLED", "3 cells: 1 cancelled, 2 finished")
    parent = sweep.entities()["tune"].data
    assert parent.tags["hpcdist.changed.seed"] == "1, 2, 3", "MLflow's parameters cannot change"


def test_concurrent_shippers_create_one_parent_run(sweep: SweepScene) -> None:
    parents = [ParentRun.of(run, sweep.uri) for run in sweep.runs * 3]
    with ThreadPoolExecutor(6) as pool:
        ids = set(pool.map(lambda parent: parent.cell_tags()["mlflow.parentRunId"] if parent else "", parents))
    assert ids == {sweep.entities()["tune"].info.run_id}


def test_end_of_a_sweep_is_uploaded_after_an_outage(sweep: SweepScene, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of the last cell does not count as uploaded until the parent is updated."""

    def unavailable(self: ParentRun) -> None:
        raise TrackingError("no answer")

    sweep.ship(0, status="finished", attempt=1, ended=5.0)
    with monkeypatch.context() as patch:
        patch.setattr(ParentRun, "refresh", unavailable)
        with pytest.raises(TrackingError, match="no answer"):
            sweep.ship(1, status="finished", attempt=1, ended=7.0)
    assert sweep.entities()["seed=2"].info.status == "FINISHED"
    assert sweep.parent()[0] != "FINISHED"
    sweep.ship(1)
    assert sweep.parent() == ("FINISHED", "2 cells")


def test_parent_run_is_updated_again_if_the_state_changes(sweep: SweepScene, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep.ship(0)
    states = chain([State(status="running", reason="old")], repeat(State(status="finished", reason="new", ended=7.0)))
    monkeypatch.setattr(SweepDir, "read_state", lambda self: next(states))
    parent = ParentRun.of(sweep.runs[0], sweep.uri)
    assert parent is not None
    parent.refresh()
    assert sweep.parent() == ("FINISHED", "new")


def test_unusable_sweep_folder_raises_tracking_error(sweep: SweepScene) -> None:
    parent = ParentRun.of(sweep.runs[0], sweep.uri)
    assert parent is not None
    lock = sweep.folder.path / ".mlflow.lock"
    lock.mkdir()
    with pytest.raises(TrackingError, match=r"Is a directory: .*/tune/\.mlflow\.lock"):
        parent.cell_tags()
    lock.rmdir()
    sweep.folder.file.write_text("{")
    with pytest.raises(TrackingError, match=r"sweep\.json is (damaged|missing)"):
        parent.cell_tags()
