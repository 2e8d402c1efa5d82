"""The MLflow parent run of a sweep, in a real database."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from mlflow.entities import Run as MlflowEntity

from hpcdist.config.loading import load_config
from hpcdist.config.written import to_yaml
from hpcdist.errors import TrackingError
from hpcdist.host.files import read_json
from hpcdist.run.folder import RunDir, State
from hpcdist.run.lease import hold
from hpcdist.run.sweeps import SweepDir, make_sweep, mark, parse_axes, write_sweep
from hpcdist.tracking.delivery import Delivery
from hpcdist.tracking.pages import ParentRun

# MLflow 3.17 uses a loader option that SQLAlchemy 2.1 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning")


class SweepScene:
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
        run = self.runs[index]
        run.write_state(replace(run.read_state(), **state))
        Delivery(run, self.uri).ship_once()

    @property
    def client(self) -> MlflowClient:
        return MlflowClient(tracking_uri=self.uri, registry_uri=self.uri)

    def entities(self) -> dict[str, MlflowEntity]:
        """Return all MLflow runs by name."""
        experiment = self.client.get_experiment_by_name("exp")
        assert experiment is not None
        found = self.client.search_runs([experiment.experiment_id])
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
        assert found[name].data.tags["hpcdist.run.sweeps"] == "tune"
        assert found[name].data.params["seed"] == name.removeprefix("seed=")
    parent = found["tune"].data
    assert parent.params == {"seed": "1, 2"}
    assert parent.tags["hpcdist.axes"] == '{"seed": ["1", "2"]}'
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
    assert sweep.parent() == ("FINISHED", "2 cells: 2 finished")
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


def test_parent_run_with_an_unrecorded_id_is_found(sweep: SweepScene) -> None:
    sweep.ship(0)
    ids = read_json(sweep.folder.mlflow) or {}
    sweep.folder.mlflow.write_text(f'{{"run_uid": "{ids["run_uid"]}"}}')
    sweep.ship(1)
    assert sweep.entities()["seed=2"].data.tags["mlflow.parentRunId"] == ids["run_id"]


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
    assert sweep.parent() == ("FINISHED", "2 cells: 2 finished")


def test_update_of_the_parent_run_is_repeated_if_the_state_changes(
    sweep: SweepScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep.ship(0)
    states = iter([State(status="running", reason="old"), *[State(status="finished", reason="new", ended=7.0)] * 2])
    monkeypatch.setattr(SweepDir, "read_state", lambda self: next(states))
    parent = ParentRun.of(sweep.runs[0], sweep.uri)
    assert parent is not None
    parent.refresh()
    assert sweep.parent() == ("FINISHED", "new")


def test_cell_without_a_sweep_folder_is_an_ordinary_run(sweep: SweepScene) -> None:
    shutil.rmtree(sweep.folder.path)
    sweep.ship(0)
    assert set(sweep.entities()) == {"tune-seed_1"}


@pytest.mark.parametrize(
    ("file", "message"),
    [("sweep.json", "sweep.json is (damaged|missing)"), (".mlflow.lock", "tune cannot be written")],
)
def test_unusable_sweep_folder_raises_tracking_error(sweep: SweepScene, file: str, message: str) -> None:
    parent = ParentRun.of(sweep.runs[0], sweep.uri)
    assert parent is not None
    if file == "sweep.json":
        sweep.folder.file.write_text("{")
    else:
        (sweep.folder.path / file).mkdir()
    with pytest.raises(TrackingError, match=message):
        parent.cell_tags()
