"""The result of a script that does not log itself: its last value is read from its output, its csv or event files."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from event_records import scalar_record
from tracking_scene import Scene

from hpcdist.cli.ranked_runs import as_data, rank_runs
from hpcdist.config.record_schema import TrackingConfig
from hpcdist.host.json_files import write_json
from hpcdist.review.ledger import ledgers_of
from hpcdist.review.report import charts_of, render_report, render_sweep
from hpcdist.review.sweep_facts import SweepFacts, read_sweep_facts
from hpcdist.run.folder import RunDir, State, Status
from hpcdist.run.lookup import find_runs
from hpcdist.run.sweeps import SweepDir
from hpcdist.tracking import series
from hpcdist.tracking.experiment_table import RESULT_TAG
from hpcdist.tracking.journal import JournalWriter
from hpcdist.tracking.run_page import NOTE_TAG
from hpcdist.tracking.script_metrics import ScriptMetrics
from hpcdist.tracking.series import read_last_values, read_series

PATTERNS = {"val/loss": r"step (?P<step>\d+): .*val loss ([0-9.]+)"}
CONFIG = {"trainer": {"script": ["train.py"]}, "tracking": {"stdout_metrics": PATTERNS}}


def print_lines(folder: Path, losses: Mapping[int, float]) -> str:
    """Return what a script like nanoGPT's prints."""
    return "".join(f"step {step}: train loss 9.0000, val loss {loss:.4f}\n" for step, loss in losses.items())


def write_csv(folder: Path, losses: Mapping[int, float]) -> str:
    """Write the log of a script like timm's."""
    rows = [f"{step},{2 * loss},{loss}\n" for step, loss in losses.items()]
    (folder / "summary.csv").write_text("epoch,train_loss,eval_loss\n" + "".join(rows))
    return "epoch\n" * len(rows)


def write_events(folder: Path, losses: Mapping[int, float]) -> str:
    """Write what TensorBoard's writer does."""
    records = [scalar_record("Loss/eval", step, loss) for step, loss in losses.items()]
    (folder / "events.out.tfevents.1.n1").write_bytes(b"".join(records))
    return ""


#: Writes losses by step into a folder, and returns what is printed besides.
Write = Callable[[Path, Mapping[int, float]], str]
#: Metric by which the runs of a script are compared.
CHANNELS: dict[Write, str] = {print_lines: "val/loss", write_csv: "eval_loss", write_events: "Loss/eval"}


def train(run: RunDir, write: Write, *attempts: Mapping[int, float], status: Any = "finished") -> None:
    """Do what the ranks of a script and the reader of its metrics do in some attempts, each with losses by step."""
    monitor = {"checkpoint": {"monitor": CHANNELS[write], "monitor_mode": "min"}}
    run.config.write_text(yaml.safe_dump(CONFIG | monitor))
    reader = ScriptMetrics(run, TrackingConfig(stdout_metrics=PATTERNS))
    for losses in attempts:
        attempt = run.new_attempt()
        folder = run.path / f"outputs-{attempt.number}"
        folder.mkdir()
        attempt.log(0).write_text(write(folder, losses))
        lines = [json.dumps({"path": str(path), "start": 0}) for path in folder.iterdir()]
        attempt.written.write_text("".join(f"{line}\n" for line in lines))
        reader.read(over=losses is attempts[-1])
    run.write_state(State(status=status, attempt=len(run.attempts()), created=1.0, ended=2.0))


@pytest.mark.parametrize("write", CHANNELS)
def test_last_value_counts_as_if_it_were_logged(scene: Scene, write: Write) -> None:
    # The second attempt repeats steps. Only its values count from there on, also below those of the first one.
    train(scene.run, write, {0: 4.0, 20: 2.0, 40: 0.25}, {20: 2.5, 40: 1.5})
    metric = CHANNELS[write]
    assert read_last_values(scene.run)[metric] == (40, 1.5)
    (row,) = as_data(rank_runs(find_runs(scene.run.path.parent.parent))[0])
    assert (row["kind"], row["text"]) == (f"{metric} · last value · lowest is best", "1.5")
    assert row["runs"] == [{"folder": str(scene.run.path), "value": 1.5, "step": 40, "status": "finished"}]

    scene.shipper().ship_once()
    assert json.loads(scene.entity.data.tags[RESULT_TAG])["value"] == 1.5, "a server needs no folders"
    assert scene.entity.data.metrics[metric] == 1.5
    assert f"Best {metric}: 1.5, " in scene.experiment.tags[NOTE_TAG].replace("\\", "")
    assert scene.steps(metric) == [0, 20, 20, 40, 40], "each attempt once"
    assert scene.entity.data.tags[NOTE_TAG].startswith(f"**last {metric} 1\\.5 at step 40** · ")
    report = render_report(scene.run, read_series, read_last_values)
    assert f"<p><b>last {metric} 1.5 at step 40 · " in report
    assert report.index(f"<h3>{metric}</h3>") < report.index("<h2>Run</h2>"), "the curve comes first"
    assert report.count(f"<h3>{metric}</h3>") == 1


def test_script_that_ended_early_or_diverged_has_no_result(scene: Scene) -> None:
    train(scene.run, print_lines, {0: 4.0}, status="failed")
    diverged = RunDir.create(scene.run.path.with_name("diverged"))
    train(diverged, write_csv, {0: 4.0, 1: float("nan")})
    assert rank_runs(find_runs(scene.run.path.parent.parent)) == ([], ["2 ended runs without a result"])


def test_last_values_of_an_ended_run_are_kept(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """The journal of a long run takes seconds to read, and the page of a sweep needs those of all cells."""
    train(scene.run, write_csv, {0: 4.0, 1: float("nan")})

    def read() -> str:
        return str(sorted(read_last_values(scene.run).items()))

    expected = read()
    assert "('train_loss', LastValue(step=1, value=nan))" in expected
    kept = scene.run.journal / "last-values.json"
    with monkeypatch.context() as patch:
        patch.setattr(series, "_points", lambda run: pytest.fail("the journal is read again"))
        assert read() == expected, "also NaN"
    of_other_rule = kept.read_text().replace('"rule": 3', '"rule": 2').replace("NaN", "1")
    for damage in ("{", json.dumps({"sizes": {}}), kept.read_text().replace("[", "[[0],"), of_other_rule):
        kept.write_text(damage)
        assert read() == expected

    kept.write_text(kept.read_text().replace('"train_loss"', r'"\u001b[2J/loss"'))
    assert read() != expected
    with monkeypatch.context() as patch:
        patch.setattr(series, "is_mine", lambda folder: False)
        assert read() == expected, "names of another user may hold codes of the terminal"

    train(scene.run, write_csv, {0: 4.0, 1: 2.0}, status="running")
    assert read_last_values(scene.run)["train_loss"] == (1, 4.0), "a resume"
    scene.run.write_state(State(status="finished", attempt=2, created=1.0, ended=3.0))
    assert read_last_values(scene.run)["train_loss"] == (1, 4.0)


@pytest.fixture
def sweep(tmp_path: Path) -> SweepDir:
    """A sweep over the learning rate of a script that prints its losses."""
    experiment = tmp_path / "runs" / "exp"
    cells = []
    for lr, losses in ((0.1, {0: 4.0, 40: 1.0}), (0.2, {0: 4.0, 40: 0.5}), (0.3, {0: 4.0, 40: 2.0})):
        run = RunDir.create(experiment / f"tune-lr_{lr}")
        train(run, print_lines, losses)
        cells.append({"name": run.name, "label": f"lr={lr}", "values": {"params.lr": lr}})
    folder = SweepDir.create(experiment / "tune")
    write_json(folder.file, {"uid": "1", "created": 1.0, "keys": ["params.lr"], "base": {}, "cells": cells})
    return folder


def facts_of(sweep: SweepDir) -> SweepFacts:
    return read_sweep_facts(sweep, sweep.read_state(), read_last_values)


def test_sweep_over_printed_values_is_ranked_and_drawn(sweep: SweepDir) -> None:
    facts = facts_of(sweep)
    assert (facts.monitor, facts.monitor_mode, facts.is_last) == ("val/loss", "min", True)
    assert [(row.name, row.best_result.value, row.best_result.step) for row in facts.ranking.rows] == [
        ("lr=0.2", 0.5, 40),
        ("lr=0.1", 1.0, 40),
        ("lr=0.3", 2.0, 40),
    ]
    drawn = charts_of(sweep, facts, {}, read_series)
    assert [chart.title for chart in drawn.values()] == ["val/loss over the steps", "val/loss against params.lr"]
    assert str(drawn["curves"].figure).count("<polyline") == 3


@pytest.mark.parametrize("status", ["failed", "running"])
def test_unfinished_cell_is_not_the_best(sweep: SweepDir, status: str) -> None:
    train(RunDir(sweep.path.parent / "tune-lr_0.2"), print_lines, {0: 4.0, 20: 0.125}, status=status)
    facts = facts_of(sweep)
    (ranking,), _ = rank_runs(find_runs(sweep.path.parent.parent))
    names = [placed.row.name for placed in ranking.placed()]
    assert [f"tune-{row.name.replace('=', '_')}" for row in facts.ranking.rows] == names
    assert names == ["tune-lr_0.1", "tune-lr_0.3"]
    assert [cell.label for cell in facts.ranked_cells] == ["lr=0.1", "lr=0.3", "lr=0.2"]
    assert (facts.cells[1].value, facts.cells[1].step) == (0.125, 20), "its last value is shown"
    chart = charts_of(sweep, facts, {}, read_series)["params.lr"]
    assert str(chart.figure).count("<circle") == 2
    equal = replace(facts, cells=tuple(replace(cell, value=1.0) for cell in facts.cells[:2]))
    assert render_sweep(sweep, equal, ledgers_of(sweep.cells()), {}).count("★ ") == 1


def test_cell_that_failed_early_does_not_choose_the_metric(tmp_path: Path) -> None:
    sweep = SweepDir.create(tmp_path / "runs" / "exp" / "tune")
    cells = []
    statuses: tuple[Status, ...] = ("finished", "failed")
    for number, status in enumerate(statuses):
        run = RunDir.create(sweep.path.parent / f"tune-{number}")
        run.config.write_text(yaml.safe_dump(CONFIG))
        with JournalWriter(run.journal, run.new_attempt().number) as journal:
            journal.log({"train/loss": 2.0}, 10)
            if status == "finished":
                journal.log({"eval/loss": 1.0}, 10)
        run.write_state(State(status=status, attempt=1, created=1.0, ended=2.0))
        cells.append({"name": run.name, "label": f"lr={number}", "values": {"params.lr": number}})
    write_json(sweep.file, {"uid": "1", "created": 1.0, "keys": ["params.lr"], "base": {}, "cells": cells})
    (ranking,), _ = rank_runs(find_runs(tmp_path / "runs"))
    assert facts_of(sweep).monitor == ranking.rows[0].best_result.metric == "eval/loss"
