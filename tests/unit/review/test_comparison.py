"""Comparison of runs: each logged value, results, and what differs."""

import math
from pathlib import Path
from typing import Any

import pytest
from report_scene import TWO_NODES, ReportScene, some_ledger

from hpcdist.errors import RunFolderError
from hpcdist.host.json_files import write_json
from hpcdist.review import comparison
from hpcdist.review.comparison import (
    MISSING,
    compare,
    compare_results,
    compare_values,
    is_measured,
)
from hpcdist.review.facts import read_facts
from hpcdist.review.ledger import Ledger
from hpcdist.run.attempt_times import AttemptTimes, begin
from hpcdist.run.config_origin import Origin, write_origin
from hpcdist.run.samples import npy
from hpcdist.run.training_record import DatasetRecord, TrainingRecord, write_training
from hpcdist.tracking.series import read_series

LOSS = {step: 1 / step for step in range(1, 11)}


def sentence(before: Any, after: Any) -> str:
    return compare_values(before, after).sentence


def test_equal_and_measured_values_do_not_differ() -> None:
    before = {"train/loss": LOSS, "eval/auc": {10: math.nan}, "train/samples_per_s": {1: 9.0}}
    after = {"train/loss": dict(LOSS), "eval/auc": {10: math.nan}, "train/samples_per_s": {1: 4.0}}
    assert compare_values(before, after).is_equal
    assert sentence(before, after) == "no value differs: 11 values of 2 metrics at 10 steps"
    assert not compare_values({"a": {1: 1.0}}, {"a": {1: 1.0 + 1e-9}}).is_equal
    assert not compare_values({"a": {1: math.nan}}, {"a": {1: 1.0}}).is_equal
    measured = ["system/cpu_utilization_percentage", "time/step_s", "pipeline/bubble", "pipeline/busy_s/stage_1"]
    measured += ["train/tokens_per_s", "train_samples_per_second", "train_runtime", "eval/after_s"]
    repeated = ["train/loss", "samples", "loss", "class", "time_series/loss", "pipeline/bubble_in_theory"]
    assert [key for key in [*measured, *repeated] if is_measured(key)] == measured


def test_first_difference_and_missing_values() -> None:
    after = {"loss": {**LOSS, 7: 0.5, 9: 0.5}, "accuracy": {4: 0.25}}
    found = compare_values({"loss": LOSS, "accuracy": {4: 0.5}}, after)
    assert [(one.key, one.step, one.before, one.after) for one in found.differences] == [
        ("accuracy", 4, 0.5, 0.25), ("loss", 7, 1 / 7, 0.5),
    ]  # fmt: skip
    assert found.num_differing == 3
    assert sentence({"loss": LOSS, "accuracy": {4: 0.5}}, after) == (
        "the first difference is at step 4: accuracy was 0.5, is 0.25; 3 of 11 values of 2 metrics at 10 steps differ"
    )
    short = {step: value for step, value in LOSS.items() if step != 5}
    missing = (
        "the first difference is at step 5: loss was 0.2, is not logged; 1 of 10 values of 1 metric at 10 steps differ"
    )
    assert sentence({"loss": LOSS}, {"loss": short}) == missing
    added = (
        "the first difference is at step 5: loss was not logged, is 0.2; 1 of 10 values of 1 metric at 10 steps differ"
    )
    assert sentence({"loss": short}, {"loss": LOSS}) == added
    failed_early = sentence({"loss": LOSS}, {"loss": {1: LOSS[1]}})
    assert failed_early.endswith("9 of 10 values of 1 metric at 10 steps differ")
    assert sentence({"loss": LOSS, "a": {1: 1.0}}, {"loss": LOSS}) == "only one of the runs has logged a"
    assert sentence({"loss": LOSS}, {}) == "nothing was compared: the runs have no common values"
    assert not compare_values({}, {}).is_equal


def compared(*scenes: ReportScene) -> dict[str, dict[str, tuple[str, ...]]]:
    runs = {scene.run.name: scene.run for scene in scenes}
    facts = {name: read_facts(run) for name, run in runs.items()}
    return compare(facts, {name: read_series(run) for name, run in runs.items()})


def test_differing_files_of_the_code_are_named(two: tuple[ReportScene, ReportScene]) -> None:
    first, second = two
    digests = {"same.py": "0" * 64, "train.py": "1" * 64, "train.py.old": "2" * 64}
    write_json(first.run.code_files, {"sha256": digests})
    write_json(second.run.code_files, {"sha256": {"same.py": "0" * 64, "train.py": "3" * 64}})
    assert compared(first, second) == {
        "code files": {"train.py": ("1" * 12, "3" * 12), "train.py.old": ("2" * 12, MISSING)}
    }
    write_json(second.run.code_files, {"sha256": {f"{number:02}.py": "1" * 64 for number in range(30)}})
    rows = compared(first, second)["code files"]
    assert list(rows.items())[19:] == [("19.py", (MISSING, "1" * 12)), ("… and 13 files", ("…", "…"))]
    write_json(second.run.code_files, {})
    with pytest.raises(RunFolderError, match=r"code-files.json is damaged \(it has no sha256\): remove it"):
        compared(first, second)


@pytest.fixture
def two(tmp_path: Path) -> tuple[ReportScene, ReportScene]:
    return ReportScene(tmp_path), ReportScene(tmp_path, "second")


def test_rows_show_each_difference_and_nothing_else(
    two: tuple[ReportScene, ReportScene], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = two
    assert compared(first, second) == {}
    second.write_config({"optim": {"lr": 0.01, "weight_decay": 0.9}})
    second.run.path.joinpath("code.patch").write_text("+1\n")
    write_json(second.run.environment, {"host": "n9", "user": "ada", "git_commit": "def", "versions": {"torch": "3"}})
    second.state(status="failed", reason="rank 1 failed", ended=None)
    for scene, factor in ((first, 1.0), (second, 2.0)):
        scene.log({"train/loss": [factor, factor * 2], "eval/accuracy": [factor / 2, factor / 4], "train/lr": [0.1]})
    monkeypatch.setattr(comparison, "read_ledger", lambda run: some_ledger() if run.name == "first" else Ledger())
    assert compared(first, second) == {
        "config": {"optim.lr": ("0.001", "0.01"), "optim.weight_decay": (MISSING, "0.9")},
        "code": {"commit": ("abc", "def"), "uncommitted changes": ("none", "code.patch 2be5b899a1b7")},
        "environment": {"host": ("n1", "n9"), "versions.torch": ("2", "3")},
        "outcome": {
            "state": ("finished", "failed"),
            "reason": ("trained 90 steps", "rank 1 failed"),
            "running": ("1 min 4 s", MISSING),
            "core-hours": ("0.078", MISSING),
            "goodput": ("7.1 %", MISSING),
            "in the queue": ("9 s", MISSING),
            "energy": ("0.25 kWh (nodes)", MISSING),
        },
        "metrics": {
            "eval/accuracy, last": ("0.25", "0.5"),
            "train/loss, last": ("2", "4"),
        },
    }


def evaluated(root: Path, name: str, accuracy: float, digest: str, samples: bytes = b"", **changes: Any) -> ReportScene:
    """Return a run with one evaluation on 400 test samples; without a digest, its data are not recorded."""
    scene = ReportScene(root, name)
    save = scene.run.checkpoints / "step-00000010"
    save.mkdir()
    write_json(save / "manifest.json", {"step": 10, "metrics": {"eval/accuracy": accuracy}})
    if samples:
        save.joinpath("samples.npy").write_bytes(samples)
    data = DatasetRecord(**{"name": "digits", "split": "test", "num_samples": 400, "digest": digest, **changes})
    begin(scene.run.new_attempt(), TWO_NODES, AttemptTimes(supervised=1.0, began=1.0))
    write_training(scene.run.attempt(1), TrainingRecord(datasets=(data,) if digest else ()))
    return scene


def test_runs_with_results_of_the_same_samples_are_paired(tmp_path: Path) -> None:
    samples = npy([1] * 368 + [0] * 32)
    runs = [
        evaluated(tmp_path, "base", 0.90, "1a", npy([1] * 360 + [0] * 40)),
        evaluated(tmp_path, "better", 0.92, "1a", samples),
        evaluated(tmp_path, "same", 0.9025, "1a", npy([1] * 361 + [0] * 39)),
        evaluated(tmp_path, "of another evaluation", 0.9175, "1a", samples),
        evaluated(tmp_path, "without", 0.92, "1a"),
        evaluated(tmp_path, "another split", 0.92, "1a", samples, split="val"),
        evaluated(tmp_path, "fewer samples", 0.92, "1a", npy([1] * 276 + [0] * 24)),
    ]
    found = compare_results({scene.run.name: read_facts(scene.run) for scene in runs}, {})
    assert [(*one.row[1:2], *one.row[3:], one.method) for one in found[1:4]] == [
        ("better", "+0.020", "+0.006 to +0.034", "better", "paired, 400 samples"),
        ("same", "+0.0025", "-0.0024 to +0.0074", "within noise", "paired, 400 samples"),
        ("of another evaluation", "+0.017", "", "too few seeds", found[3].method),
    ]
    assert found[3].method.startswith("a verdict needs per-sample results of both runs on the same data")
    assert {one.verdict for one in found[3:]} == {"too few seeds"}


def test_verdict_on_the_best_values_and_the_medians_of_speeds(tmp_path: Path) -> None:
    rows = []
    for name, accuracy, digest, speeds in (
        ("base", 0.90, "1a", [1.0, 100.0, 100.0]),
        ("good", 0.99, "1a", [80.0, 90.0, 900.0]),
        ("other", 0.99, "2b", []),
        ("bare", 0.99, "", []),
    ):
        scene = evaluated(tmp_path, name, accuracy, digest)
        scene.log({"train/samples_per_s": speeds, "train/loss": [1.0]})
        rows.append(scene.run)
    runs = {run.name: run for run in rows}
    facts = {name: read_facts(run) for name, run in runs.items()}
    found = compare_results(facts, {name: read_series(run) for name, run in runs.items()})
    assert [one.row for one in found] == [
        ("best eval/accuracy", "base", "0.90 ± 0.02", "", "", ""),
        ("best eval/accuracy", "good", "0.990 ± 0.005", "+0.090", "", "too few seeds"),
        ("best eval/accuracy", "other", "0.990 ± 0.005", "+0.090", "", "not comparable (other data)"),
        ("best eval/accuracy", "bare", "0.99", "+0.090", "", "too few seeds"),
        ("train/samples_per_s, median", "base", "100", "", "", ""),
        ("train/samples_per_s, median", "good", "90", "-10.0 %", "", ""),
    ]
    digests = "digits (test), 400 samples, digest 1a", "digits (test), 400 samples, digest 2b"
    assert compare({name: facts[name] for name in ("base", "other")}, {"base": {}, "other": {}})["data"] == {
        "datasets": digests
    }


def test_keys_of_the_launch_are_compared(two: tuple[ReportScene, ReportScene]) -> None:
    """MLflow has no parameters of them."""
    for scene, threads in zip(two, (1, 2), strict=True):
        scene.write_config({"launch": {"num_threads": threads}, "cluster": {"partition": f"p{threads}"}})
    assert compared(*two)["config"] == {"launch.num_threads": ("1", "2"), "cluster.partition": ("p1", "p2")}


def test_script_runs_differ_by_arguments_and_overrides(two: tuple[ReportScene, ReportScene]) -> None:
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
