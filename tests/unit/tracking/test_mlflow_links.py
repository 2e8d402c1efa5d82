"""Links to MLflow's UI and its prepared views, printed without an import of MLflow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpcdist.host.files import write_json
from hpcdist.run.folder import RunDir, State
from hpcdist.tracking import links

IDS = {"uri": "http://mlflow:5000", "experiment_id": "7", "run_id": "ab"}


def make(root: Path, name: str, **ids: Any) -> RunDir:
    run = RunDir.create(root / name)
    write_json(run.mlflow, ids)
    return run


@pytest.mark.parametrize(
    ("uri", "address"),
    [
        ("http://mlflow:5000", "http://mlflow:5000"),
        ("https://ada:***@mlflow.org/team/", "https://mlflow.org/team"),
        ("http://ada@[::1]:5000/", "http://[::1]:5000"),
    ],
)
def test_address_has_no_credentials(uri: str, address: str) -> None:
    assert links.web_address(uri) == address


def test_end_of_a_run_links_to_its_page_and_to_the_views(tmp_path: Path) -> None:
    listing = "http://mlflow:5000/#/experiments/7/runs?workflowType=machine_learning"
    page = "review in MLflow: http://mlflow:5000/#/experiments/7/runs/ab?workflowType=machine_learning"
    assert links.end_of_run(make(tmp_path, "exp/old", **IDS)) == [page]
    run = make(tmp_path, "exp/new", **IDS, views=["hpcdist-cost", "hpcdist-overview", "of a newer version", 3])
    assert links.end_of_run(run) == [
        page,
        f"  Overview: {listing}&viewStateShareKey=hpcdist-overview",
        f"  Cost: {listing}&viewStateShareKey=hpcdist-cost",
    ]


@pytest.mark.parametrize(
    "ids",
    [
        {},
        IDS | {"uri": "sqlite:////runs/mlflow.db"},
        IDS | {"run_id": 5},
        {"uri": "http://mlflow:5000", "run_id": "ab"},
    ],
    ids=["no record", "database", "damaged", "incomplete"],
)
def test_run_without_an_address_has_no_links(tmp_path: Path, ids: dict[str, Any]) -> None:
    assert links.end_of_run(make(tmp_path, "exp/run", **ids)) == []


def test_link_to_the_newest_run_opens_the_view_with_metrics(tmp_path: Path) -> None:
    found = [
        make(tmp_path, "b/old", **IDS | {"experiment_id": "8"}, views=["hpcdist-overview"]),
        make(tmp_path, "a/new", **IDS, views=["hpcdist-overview", "hpcdist-cost"]),
        make(tmp_path, "c/elsewhere", **IDS | {"uri": "http://other"}),
        make(tmp_path, "d/damaged", **IDS | {"experiment_id": "9"}),
    ]
    for number, run in enumerate(found):
        run.write_state(State(status="finished", created=float(number)))
    (found[3].path / "state.json").write_text("{")
    address = "http://mlflow:5000/"
    listing = f"{address}#/experiments/7/runs?workflowType=machine_learning"
    assert links.of_newest(found, IDS["uri"], address) == f"{listing}&viewStateShareKey=hpcdist-overview"
    write_json(found[1].mlflow, IDS | {"views": []})
    assert links.of_newest(found, IDS["uri"], address) == listing
    assert links.of_newest([], IDS["uri"], address) == f"{address}#/experiments?workflowType=machine_learning"


def test_experiments_are_listed_with_the_views_of_all_their_runs(tmp_path: Path) -> None:
    found = [
        make(tmp_path, "b/one", **IDS, views=["hpcdist-overview"]),
        make(tmp_path, "b/two", **IDS, views="damaged"),
        make(tmp_path, "b/three", **IDS, views=["hpcdist-overview", "hpcdist-sweep"]),
        make(tmp_path, "a/one", **IDS | {"experiment_id": "8"}),
        make(tmp_path, "other/one", **IDS | {"uri": "http://other"}),
    ]
    address = "http://mlflow:5000/"
    assert links.of_experiments(found, "http://mlflow:5000", address) == [
        f"a: {address}#/experiments/8/runs?workflowType=machine_learning",
        f"b: {address}#/experiments/7/runs?workflowType=machine_learning",
        f"  Overview: {address}#/experiments/7/runs?workflowType=machine_learning&viewStateShareKey=hpcdist-overview",
        f"  Sweep: {address}#/experiments/7/runs?workflowType=machine_learning&viewStateShareKey=hpcdist-sweep",
    ]
