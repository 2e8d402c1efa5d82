"""Prepared views of an experiment in MLflow's store, and the links to them."""

import base64
import json
import logging
import shutil
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import pytest
from mlflow.entities import Run as MlflowEntity
from tracking_scene import CONFIG, Scene

from hpcdist.config.loading import load_config
from hpcdist.config.written import to_yaml
from hpcdist.errors import TrackingError
from hpcdist.host.files import read_json, write_json
from hpcdist.review.facts import AttemptFacts, CheckpointFacts, read_facts
from hpcdist.review.ledger import Entry, Ledger
from hpcdist.run.folder import RunDir, State
from hpcdist.run.lease import hold
from hpcdist.run.sweeps import SweepDir, make_sweep, mark, parse_axes, write_sweep
from hpcdist.tracking import pages
from hpcdist.tracking.mlflow_client import MlflowRun
from hpcdist.tracking.pages import ParentRun
from hpcdist.tracking.uri import link_to_newest, links_at_end

TAG = "mlflow.sharedViewState."
#: A view that the UI of MLflow 3.17.2 saved: other columns, sorted by a metric, grouped by a tag, a column moved.
OF_THE_UI = (
    "deflate;eJyVk8Fu2zAMhl+l0DnIHAwDNt/crNmCJRmQdN2AomhUibEFyJIh0mm8IO8+ym6dra0PO/onf/MjRR4FggyqmBlLEEQqxEj4oCFcNt+g4e8S"
    "KBiF4y3spX0nlaqDVM32nJahEulOWoSRQJKBrk0JbMwWC06yZgeqURb6ApkiswcOaUkSgfA5cns3EqXXYG8goPHu7LD2Yl07ZA+CBUWgp97WJSvprZDE"
    "gA81ATN+7n4Z6Ya5KxlkyQFfkSnHNkSNZM5KUSltkMbcBsFWMI9q63yPnb6sxUQXK1lCtIfacWnInF4B0tztPIsDYG+W4mkwH3HX/4neM/40mgoeyHEA"
    "Mp18St4ETScfkgHY9H2SDACnkxjqodOPyTB3l/uaPeqnlgm/Gq3BLfn1+b1n8/Xm+n6S3K9/rDbc9d7A41IeTGl+g+53jW0LBuqcvWowU4o3k6HW0G7o"
    "X5Ya4UvwdQX6RtoacO6mBS8sT41CzfHCaLgqK2r+lfPouWza2eZ5gJwnMKud6joXcg9B5nGjnxL5cOJmHttt5gQe4DkYh8va8zi5izE+AlTidHd6SsKr"
    "QyWdjuDHqFn/IO3COGixpt7tTB5hDtnBYHelSPyHeG0ONqX3VDhAZkjOF/MrJi/bF+os4nT6A757Z8E="
)


def unpacked(text: str) -> dict[str, Any]:
    state: dict[str, Any] = json.loads(zlib.decompress(base64.b64decode(text.removeprefix("deflate;"))))
    return state


def tags(scene: Scene) -> dict[str, str]:
    experiment = scene.client.get_experiment_by_name("exp")
    return {key: value for key, value in experiment.tags.items() if key.startswith(TAG)}


def view(scene: Scene, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(tags(scene)[f"{TAG}hpcdist-{name}"])
    return found | {"state": unpacked(found["state"])}


def as_cell(scene: Scene, *keys: str) -> None:
    """Make the run of the scene a cell of a sweep over `keys`."""
    sweep = scene.run.path.parent / "tune"
    sweep.mkdir(exist_ok=True)
    values = dict.fromkeys(keys, 1)
    cells = [{"name": scene.run.name, "label": "x", "values": values}]
    facts = {"uid": "u", "created": 0.0, "keys": list(keys), "base": {}, "cells": cells}
    write_json(sweep / "sweep.json", facts)
    write_json(scene.run.path / "cell.json", {"sweep": "tune", "label": "x", "values": values})


def test_state_has_the_keys_and_types_of_a_view_that_the_ui_saved() -> None:
    saved = unpacked(OF_THE_UI)
    for state in pages.prepared({"eval/accuracy": "max"}, ["optim.lr"]).values():
        assert [key for key in state if key not in saved] == []
        wrong = [key for key, value in state.items() if value is not None and not isinstance(value, type(saved[key]))]
        assert wrong == []
        if state["groupBy"]:
            assert state["groupBy"].keys() == saved["groupBy"].keys()
            assert state["groupBy"]["groupByKeys"][0].keys() == saved["groupBy"]["groupByKeys"][0].keys()
        assert state["columnOrder"][:2] == saved["columnOrder"][:2]


def test_views_of_a_run(scene: Scene) -> None:
    scene.shipper().ship_once()
    assert set(tags(scene)) == {f"{TAG}hpcdist-{name}" for name in ("overview", "failures", "cost")}
    assert (read_json(scene.run.mlflow) or {})["views"] == ["hpcdist-overview", "hpcdist-failures", "hpcdist-cost"]
    overview = view(scene, "overview")
    columns, widths = (overview["state"][key] for key in ("selectedColumns", "columnWidths"))
    loss = "metrics.`train/loss`"
    assert columns[:5:2] == ["tags.`hpcdist.best`", "tags.`hpcdist.cost`", loss], columns
    assert sum(widths[f"tags.`hpcdist.{name}`"] for name in ("best", "state", "cost")) < 600, "the space at 1,280 px"
    assert widths[loss] >= 180, "a float with all of its digits is not cut"


def test_views_follow_monitors_and_axes_of_all_runs(scene: Scene) -> None:
    as_cell(scene, "optim.lr")
    scene.shipper().ship_once()
    before = tags(scene)
    scene.shipper().ship_once()
    assert tags(scene) == before  # the definition is the same: nothing is written
    checkpoint = {"monitor": "eval/perplexity", "monitor_mode": "min"}
    scene.write_config(CONFIG | {"checkpoint": checkpoint})
    as_cell(scene, "seed")
    scene.shipper().ship_once()
    sweep = view(scene, "sweep")
    assert sweep["state"]["selectedColumns"][:6] == [
        "params.`optim.lr`",
        "params.`seed`",
        "metrics.`usage/best/eval/accuracy`",
        "metrics.`usage/best/eval/perplexity`",
        "metrics.`eval/accuracy`",
        "metrics.`eval/perplexity`",
    ]
    for state in (sweep["state"], view(scene, "overview")["state"]):
        assert (state["orderByKey"], state["orderByAsc"]) == ("metrics.`usage/best/eval/perplexity`", True)
    assert sweep["createdAt"] == json.loads(before[f"{TAG}hpcdist-sweep"])["createdAt"] < sweep["updatedAt"]
    assert tags(scene)[f"{TAG}hpcdist-failures"] == before[f"{TAG}hpcdist-failures"]
    # A run that is not part of a sweep removes no axis.
    (scene.run.path / "cell.json").unlink()
    scene.shipper().ship_once()
    assert view(scene, "sweep")["state"] == sweep["state"]


def test_columns_of_tags_have_values(scene: Scene) -> None:
    def attempt(number: int, steps_lost: int | None) -> AttemptFacts:
        return AttemptFacts(number=number, started=1.0, ended=2.0, status="failed", cause="x", steps_lost=steps_lost)

    scene.shipper().ship_once()
    seconds = {"compute": 2556.1, "idle": 1.0}
    entries = tuple(Entry(cause=cause, attempt=1, node="n1", seconds=value) for cause, value in seconds.items())
    best = CheckpointFacts(path=scene.run.path, step=1200, metrics={"eval/accuracy": 0.98239994049})
    attempts = (attempt(1, 7), attempt(2, None), attempt(3, 3))
    facts = replace(read_facts(scene.run), attempts=attempts, best=best, monitor="eval/accuracy")
    found = pages.view_tags(facts, Ledger(unit="GPU", entries=entries))
    assert found == {
        "hpcdist.best": "0.9824 at step 1,200",
        "hpcdist.cost": "0.71 GPU-hours, goodput 100 %",
        "hpcdist.interruptions": "1: x; 2: x; 3: x",
        "hpcdist.lost_steps": "10",
    }
    shown = {column[6:-1] for view in pages.prepared({"m": "max"}, ["lr"]).values() for column in view["columnOrder"]}
    known = {"hpcdist.run.sweep", *found, *scene.entity.data.tags}
    assert {key for key in shown if key.startswith("hpcdist.")} <= known


def test_own_view_is_replaced_and_views_of_users_are_not_touched(scene: Scene) -> None:
    opened = MlflowRun(scene.run, scene.uri)
    users = json.dumps({"name": "Overview", "createdAt": 1, "updatedAt": 1, "state": OF_THE_UI})
    for damaged in ("", "[]", '{"state": "deflate;x"}', '{"state": 3}', "[" * 10**4):
        for name, text in (("1795348316588x8z3xfcs", users), ("broken", damaged), ("hpcdist-overview", damaged)):
            scene.client.set_experiment_tag(opened.experiment_id, TAG + name, text)
        scene.shipper().ship_once()
        assert tags(scene)[f"{TAG}1795348316588x8z3xfcs"] == users
        assert tags(scene)[f"{TAG}broken"] == damaged
        assert view(scene, "overview")["state"]["selectedColumns"], damaged


def test_another_version_of_mlflow_gets_no_views(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pages, "installed", "3.170.1")
    with caplog.at_level(logging.DEBUG, pages.__name__):
        scene.shipper().ship_once()
    assert "no views are written: MLflow 3.170.1 is not one of the tested versions" in caplog.text
    assert tags(scene) == {}
    assert "views" not in (read_json(scene.run.mlflow) or {})


# --- The MLflow parent run of a sweep, in a real database.


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
        found = self.client.search_runs([self.client.get_experiment_by_name("exp").experiment_id])
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


# --- Links to MLflow's UI and its prepared views, printed without an import of MLflow.


IDS = {"uri": "http://mlflow:5000", "experiment_id": "7", "run_id": "ab"}


def make(root: Path, name: str, **ids: Any) -> RunDir:
    run = RunDir.create(root / name)
    write_json(run.mlflow, ids)
    return run


def test_end_of_a_run_links_to_its_page_and_to_the_views(tmp_path: Path) -> None:
    listing = "http://mlflow:5000/#/experiments/7/runs?workflowType=machine_learning"
    page = "review in MLflow: http://mlflow:5000/#/experiments/7/runs/ab?workflowType=machine_learning"
    secret = IDS | {"uri": "http://ada:***@mlflow:5000/"}
    assert links_at_end(make(tmp_path, "exp/old", **secret)) == [page]
    database, damaged = IDS | {"uri": "sqlite:////runs/mlflow.db"}, IDS | {"run_id": 5}
    for number, ids in enumerate(({}, database, damaged, {"uri": "http://mlflow:5000", "run_id": "ab"})):
        assert links_at_end(make(tmp_path, f"exp/run-{number}", **ids)) == []
    run = make(tmp_path, "exp/new", **IDS, views=["hpcdist-cost", "hpcdist-overview", "of a newer version", 3])
    assert links_at_end(run) == [
        page,
        f"  Overview: {listing}&viewStateShareKey=hpcdist-overview",
        f"  Cost: {listing}&viewStateShareKey=hpcdist-cost",
    ]


def test_link_leads_to_the_experiment_of_the_newest_run(tmp_path: Path) -> None:
    found = [
        make(tmp_path, "b/old", **IDS | {"experiment_id": "8"}, views=["hpcdist-overview", "hpcdist-sweep"]),
        make(tmp_path, "a/new", **IDS, views=["hpcdist-overview"]),
        make(tmp_path, "a/old", **IDS, views="damaged"),
        make(tmp_path, "c/elsewhere", **IDS | {"uri": "http://other"}),
        make(tmp_path, "d/damaged", **IDS | {"experiment_id": "9"}),
    ]
    for run, created in zip(found, (0.0, 3.0, 1.0, 4.0, 5.0), strict=True):
        run.write_state(State(status="finished", created=created))
    (found[4].path / "state.json").write_text("{")
    address, query = "http://mlflow:5000/", "runs?workflowType=machine_learning"
    a = f"{address}#/experiments/7/{query}"
    assert link_to_newest(found, IDS["uri"], address) == f"{a}&viewStateShareKey=hpcdist-overview"
    write_json(found[1].mlflow, IDS | {"views": []})
    assert link_to_newest(found, IDS["uri"], address) == a
    assert link_to_newest([], IDS["uri"], address) == f"{address}#/experiments?workflowType=machine_learning"
