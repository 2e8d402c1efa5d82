"""Links to MLflow's UI, which need no import of MLflow."""

from pathlib import Path
from typing import Any

import pytest

from hpcdist.host.json_files import write_json
from hpcdist.run.folder import RunDir, State
from hpcdist.tracking.uri import link_to_newest, link_to_run

IDS = {"uri": "http://mlflow:5000", "experiment_id": "7", "run_id": "ab"}
QUERY = "workflowType=machine_learning"


def make(root: Path, name: str, **ids: Any) -> RunDir:
    run = RunDir.create(root / name)
    write_json(run.mlflow, ids)
    return run


@pytest.mark.parametrize(
    ("ids", "link"),
    [
        (IDS | {"uri": "http://ada:***@mlflow:5000/"}, f"http://mlflow:5000/#/experiments/7/runs/ab?{QUERY}"),
        (IDS | {"uri": "sqlite:////runs/mlflow.db"}, ""),
        (IDS | {"run_id": 5}, ""),
        ({"uri": "http://mlflow:5000", "run_id": "ab"}, ""),
        ({}, ""),
    ],
)
def test_link_to_a_run_needs_a_server_and_its_ids(tmp_path: Path, ids: dict[str, Any], link: str) -> None:
    assert link_to_run(make(tmp_path, "exp/one", **ids)) == link


def test_link_leads_to_the_experiment_of_the_newest_run(tmp_path: Path) -> None:
    runs = [
        make(tmp_path, "b/old", **IDS | {"experiment_id": "8"}),
        make(tmp_path, "a/new", **IDS),
        make(tmp_path, "c/elsewhere", **IDS | {"uri": "http://other"}),
        make(tmp_path, "d/damaged", **IDS | {"experiment_id": "9"}),
    ]
    for run, created in zip(runs, (0.0, 3.0, 4.0, 5.0), strict=True):
        run.write_state(State(status="finished", created=created))
    (runs[3].path / "state.json").write_text("{")
    address = "http://mlflow:5000/"
    assert link_to_newest(runs, IDS["uri"], address) == f"{address}#/experiments/7/runs?{QUERY}"
    assert link_to_newest([], IDS["uri"], address) == f"{address}#/experiments?{QUERY}"
