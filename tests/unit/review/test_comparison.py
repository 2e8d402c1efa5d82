"""What `hpcdist compare` shows of two runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from report_scene import ReportScene, some_ledger

from hpcdist.host.files import write_json
from hpcdist.review import comparison
from hpcdist.review.comparison import MISSING, compare
from hpcdist.review.ledger import Ledger
from hpcdist.run.records import Origin, write_origin
from hpcdist.tracking.points import read_series


def compared(*scenes: ReportScene) -> dict[str, dict[str, tuple[str, ...]]]:
    runs = {scene.run.name: scene.run for scene in scenes}
    return compare(runs, {name: read_series(run) for name, run in runs.items()})


@pytest.fixture
def two(tmp_path: Path) -> tuple[ReportScene, ReportScene]:
    return ReportScene(tmp_path), ReportScene(tmp_path, "second")


def test_equal_runs_have_no_rows(two: tuple[ReportScene, ReportScene]) -> None:
    assert compared(*two) == {}


def test_rows_show_each_difference_and_nothing_else(
    two: tuple[ReportScene, ReportScene], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = two
    second.write_config({"optim": {"lr": 0.01, "momentum": 0.9}})
    second.run.path.joinpath("code.patch").write_text("+1\n")
    write_json(second.run.environment, {"host": "n9", "user": "ada", "git_commit": "def", "versions": {"torch": "3"}})
    second.state(status="failed", reason="rank 1 failed", ended=None)
    for scene, factor in ((first, 1.0), (second, 2.0)):
        scene.log({"train/loss": [factor, factor * 2], "eval/accuracy": [factor / 2, factor / 4], "train/lr": [0.1]})
    monkeypatch.setattr(comparison, "read_ledger", lambda run: some_ledger() if run.name == "first" else Ledger())
    assert compared(first, second) == {
        "config": {"optim.lr": ("0.001", "0.01"), "optim.momentum": (MISSING, "0.9")},
        "code": {"commit": ("abc", "def"), "uncommitted changes": ("none", "code.patch 2be5b899a1b7")},
        "environment": {"host": ("n1", "n9"), "versions.torch": ("2", "3")},
        "outcome": {
            "state": ("finished", "failed"),
            "reason": ("trained 90 steps", "rank 1 failed"),
            "running": ("1 min 04 s", MISSING),
            "core-hours": ("0.07778", MISSING),
            "goodput": ("7.1 %", MISSING),
            "in the queue": ("9.0 s", MISSING),
            "energy": ("0.25 kWh (nodes)", MISSING),
        },
        "metrics": {
            "eval/accuracy, last": ("0.25", "0.5"),
            "eval/accuracy, highest": ("0.5", "1"),
            "train/loss, last": ("2", "4"),
            "train/loss, lowest": ("1", "2"),
        },
    }


def test_runs_of_scripts_differ_by_their_arguments_and_by_what_was_set(two: tuple[ReportScene, ReportScene]) -> None:
    words = [["train.py", "--lr", "0.1"], ["train.py", "--lr", "0.2"]]
    optim = {"lr": 0.001, "momentum": 0.9}
    for scene, script, momentum in zip(two, words, (0.9, 0.8), strict=True):
        scene.write_config({"trainer": {"script": script}, "optim": optim | {"momentum": momentum}})
        write_origin(scene.run, Origin(config="train.yaml", written=["trainer.script"]))
    assert set(compared(*two)["config"]) == {"trainer.script", "lr"}
    # Set in one run, to the default of the other.
    write_origin(two[1].run, Origin(config="train.yaml", written=["trainer.script", "optim.lr", "optim.momentum"]))
    found = compared(*two)["config"]
    assert (found["lr"], found["optim.momentum"]) == (("0.1", "0.2"), ("0.9", "0.8"))
    assert "optim.lr" not in found, "equal in both"
