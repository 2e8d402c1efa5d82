"""The table of ended runs in the description of an MLflow experiment."""

import json
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import yaml
from tracking_scene import CONFIG, Scene

from hpcdist.cli.ranked_runs import rank_runs
from hpcdist.errors import TrackingError
from hpcdist.host.json_files import read_json, write_json
from hpcdist.review.ranking import Result, rankings
from hpcdist.run.folder import RunDir, State
from hpcdist.run.lookup import find_runs
from hpcdist.run.samples import npy
from hpcdist.run.training_record import DatasetRecord, TrainingRecord, write_training
from hpcdist.tracking import experiment_table
from hpcdist.tracking.delivery import Delivery
from hpcdist.tracking.run_page import MARK, NOTE_TAG

End = Callable[..., RunDir]


@pytest.fixture
def end(scene: Scene) -> End:
    """Return a function that uploads a run of the experiment that ended with a best value of its primary metric."""

    def make(
        name: str, value: float, ended: float, *, size: int = 1000, seed: int = 0, ones: int = 0, **of: str
    ) -> RunDir:
        run = RunDir.create(scene.run.path.with_name(name))
        run.config.write_text(yaml.safe_dump(CONFIG | {"checkpoint": CONFIG["checkpoint"] | of}))
        data = DatasetRecord(name="digits", split="test", num_samples=size, digest=f"d{size}")
        write_training(run.new_attempt(), TrainingRecord(began=1.0, datasets=(data,)))
        metrics = {of.get("monitor", "eval/accuracy"): value}
        saved = run.checkpoints / "step-00000010"
        saved.mkdir()
        if ones:
            saved.joinpath("samples.npy").write_bytes(npy([1] * ones + [0] * (size - ones)))
        write_json(saved / "manifest.json", {"step": 10, "created": 5.0, "metrics": metrics})
        if seed:
            values = {"optim.lr": 0.1, "seed": seed}
            write_json(run.path / "cell.json", {"sweep": "tune", "label": f"lr=0.1 seed={seed}", "values": values})
        run.write_state(State(status="finished", attempt=1, created=1.0, ended=ended))
        Delivery(run, scene.uri).ship_once()
        return run

    return make


def note_of_experiment(scene: Scene) -> str:
    """Return the description of the experiment without the backslashes of Markdown."""
    return str(scene.experiment.tags[NOTE_TAG]).replace("\\", "")


def test_results_of_the_same_samples_are_paired(scene: Scene, end: End) -> None:
    for time, ones in ((1, 950), (2, 960), (3, 960)):
        end(f"r{time}", ones / 1000, time, ones=ones)
    note = note_of_experiment(scene)
    assert ", within noise of r3 · 3 results" in note
    assert re.findall(r"\n\| (\d)&", note) == ["1", "1", "3"]
    assert re.findall(r"\| (the best|within noise|worse)", note) == ["the best", "within noise", "worse"]


def test_equal_means_share_a_place() -> None:
    raw = Result(metric="m", mode="max", value=0.15, data="", num_samples=None, ended=1, allocated_s=1, unit="")
    results = [raw, *(replace(raw, value=value, setting="s") for value in (0.1, 0.2))]
    (ranking,) = rankings(results, lambda row: row.measured)
    assert [placed.place for placed in ranking.placed()] == [1, 1], "0.15 and 0.15000000000000002"
    assert ranking.beside_next.startswith("too few seeds to tell from")


def test_value_at_step_zero_has_its_step() -> None:
    raw = Result(metric="m", mode="max", value=0.15, data="", num_samples=None, ended=1, allocated_s=1, unit="", step=0)
    for results, text in (([raw], "0"), ([raw, replace(raw, step=40)], "0 to 40"), ([replace(raw, step=None)], "")):
        (ranking,) = rankings([replace(result, setting="s") for result in results], lambda row: row.measured)
        assert ranking.rows[0].steps_text == text


def test_command_shows_the_rows_of_the_table(scene: Scene, end: End) -> None:
    for time, ones in ((1, 950), (2, 960), (3, 900)):
        end(f"r{time}", ones / 1000, time, ones=ones)
    note = note_of_experiment(scene).replace("&nbsp;", "")
    in_mlflow = re.findall(r"\n\| (\d)\| \[(\w+)\]\(.*?\)\| ([\d. ±]+)\| (.+?)\|", note)
    (ranking,), _ = rank_runs(find_runs(scene.run.path.parent.parent))
    assert in_mlflow == [
        (str(row.place), row.row.name, row.row.value_text, row.verdict_text) for row in ranking.placed()
    ]
    assert len(in_mlflow) == 3


def test_runs_with_other_data_or_metrics_have_their_own_table(scene: Scene, end: End) -> None:
    end("a", 0.95, 10.0)
    end("b", 0.955, 20.0)
    end("small", 0.99, 30.0, size=50)
    end("loss", 0.9, 40.0, monitor="eval/loss", monitor_mode="min")
    note = note_of_experiment(scene)
    kinds = re.findall(r"\n\*\*(eval/.*?) is best", note)
    assert [(kind.split(" · ")[0], kind.split(" · ")[-1]) for kind in kinds] == [
        ("eval/accuracy", "highest"),
        ("eval/accuracy", "highest"),
        ("eval/loss", "lowest"),
    ]
    assert re.findall(r"\n\| (\d)&", note) == ["1", "2", "1", "1"]


def test_seeds_of_a_setting_are_one_row_with_their_mean(scene: Scene, end: End) -> None:
    names = [f"tune-{seed}" for seed in (1, 2, 3)]
    cells = [{"name": name, "label": name, "values": {"optim.lr": 0.1, "seed": 1}} for name in names]
    sweep: dict[str, Any] = {"uid": "u", "created": 0.0, "keys": ["optim.lr", "seed"], "base": {}, "cells": cells}
    folder = scene.run.path.parent / "tune"
    folder.mkdir()
    write_json(folder / "sweep.json", sweep)
    end("single", 0.97, 5.0)
    runs = [end(names[index], 0.94 + index / 50, 6 + index, seed=6 + index) for index in range(3)]
    ids = read_json(runs[0].mlflow) or {}
    parent = scene.client.get_run(ids["run_id"]).data.tags["mlflow.parentRunId"]
    assert [one.path for one in scene.client.list_artifacts(parent)] == ["report.html"], "of the sweep"
    assert (folder / "report.html").is_file()
    note = note_of_experiment(scene).replace("&nbsp;", "")
    assert re.search(r"\| 0.96 ± 0.02 s.d. \(n=3\)\| too few seeds \(-0.010*\)\| 10\| finished\| ", note), note
    assert f"[tune lr=0.1](#/experiments/{ids['experiment_id']}/runs/{parent}?" in note


def test_table_has_the_best_rows_below_text_of_the_user(
    scene: Scene, end: End, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experiment_table, "_MAX_ROWS", 2)
    end("first*", 0.95, 10.0)
    experiment = scene.experiment.experiment_id
    scene.client.set_experiment_tag(experiment, NOTE_TAG, "ours: see the wiki")
    end("<b>", 0.97, 20.0)
    text = note_of_experiment(scene)
    best = "Best eval/accuracy: 0.970 ± 0.005, **[&lt;b&gt;](#"
    assert text.startswith(f"ours: see the wiki\n\n{best}")
    assert f")**, too few seeds to tell from first* · 2 results {MARK}\n" in text
    assert text.index("[&lt;b&gt;]") < text.index("[first*]")
    assert (
        "\n\n`hpcdist runs --experiment exp --sort best` lists all results, `hpcdist compare A B` compares two " in text
    )
    end("worse", 0.9, 30.0)
    text = note_of_experiment(scene)
    assert text.count("\n| ") == 4, "a head, its rule, and two rows"
    assert "\n\n1 more result: `hpcdist runs " in text


def test_runs_that_end_at_once_are_all_in_the_table(scene: Scene, end: End) -> None:
    end("a", 0.9, 1.0)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda number: end(f"r{number}", 0.8 + number / 100, 2.0), range(4)))
    assert note_of_experiment(scene).count("\n| ") == 7


def test_damaged_results_of_others_are_left_out(scene: Scene, end: End) -> None:
    end("a", 0.9, 1.0)
    experiment = scene.experiment.experiment_id
    for text in ("", "[]", "{", '{"metric": 1}', '{"metric": "eval/accuracy", "mode": "max", "value": NaN}'):
        scene.client.set_tag(scene.client.create_run(experiment).info.run_id, "hpcdist.result", text)
    end("b", 0.9, 2.0)
    assert " · 2 results <!--" in note_of_experiment(scene)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"num_samples": 0}, "num_samples cannot be 0"),
        ({"num_samples": 10, "value": 3.0}, "value cannot be 3.0, which is no proportion"),
        ({"num_samples": 10, "value": -0.5}, "value cannot be -0.5, which is no proportion"),
        ({"mode": "best"}, "mode cannot be 'best'"),
        ({"ended": "now"}, "ended cannot be 'now'"),
    ],
)
def test_impossible_results_of_others_are_left_out_with_a_line(
    scene: Scene, end: End, caplog: pytest.LogCaptureFixture, change: dict[str, Any], reason: str
) -> None:
    end("a", 0.9, 1.0)
    other = scene.client.create_run(scene.experiment.experiment_id).info.run_id
    valid = {"metric": "eval/accuracy", "mode": "max", "value": 0.5, "data": "", "num_samples": None}
    valid |= {"ended": 1.0, "allocated_s": 1.0, "unit": "core"}
    scene.client.set_tag(other, "hpcdist.result", json.dumps(valid | change))
    end("b", 0.9, 2.0)
    end("c", 0.9, 3.0)
    assert " · 3 results <!--" in note_of_experiment(scene)
    line = f"the MLflow run {other} is left out of the experiment's table: hpcdist.result is damaged: {reason}"
    assert [message for message in caplog.messages if other in message] == [line]


def test_words_of_others_are_shown_as_they_are(scene: Scene, end: End) -> None:
    end("a", 0.5, 1.0)
    experiment = scene.experiment.experiment_id
    result = {"metric": "eval/accuracy", "mode": "max", "value": 0.9, "data": "digits test", "num_samples": None}
    result |= {"ended": 1.0, "allocated_s": 1.0, "unit": "core", "status": "<b>[y](http://b)"}
    for _ in range(3):  # the first line is about the results of the largest group
        run = scene.client.create_run(experiment, run_name="[x](http://a)")
        scene.client.set_tag(run.info.run_id, "hpcdist.result", json.dumps(result))
    end("b", 0.5, 2.0)
    note = str(scene.experiment.tags[NOTE_TAG])
    assert "(http" not in note.replace("\\(http", "")
    assert "<b>" not in note


def test_experiment_without_a_result_has_its_cost(scene: Scene, end: End) -> None:
    scene.state(status="failed", reason="no", ended=2.0)
    scene.shipper().ship_once()
    note = note_of_experiment(scene)
    assert note.startswith(
        f"No run has a result · 1 ended run until 1970-01-01 00:00 UTC {MARK}\n\nA result is the best value of "
    )
    end("a", 0.9, 1.0)
    assert note_of_experiment(scene).startswith("Best eval/accuracy: "), "words in MLflow's list of experiments"


def test_failed_run_begins_with_cause_and_fix(scene: Scene, end: End) -> None:
    end("a", 0.9, 1.0)
    attempt = scene.run.new_attempt()
    trace = ["Traceback", '  File "/home/ada/train.py", line 7, in train', "    raise ValueError", "ValueError: no"]
    traceback = [f"{line}\n" for line in trace]
    outcome = {"outcome": "failed", "error": "ValueError: no", "traceback": traceback, "time": 1.0}
    write_json(attempt.outcome(1), outcome | {"host": "n1", "step": 3})
    failure = {"kind": "error", "rank": 1, "host": "n1", "step": 3, "error": "ValueError: no"}
    write_json(attempt.failure, failure | {"traceback": traceback})
    scene.state(status="failed", reason="rank 1 on n1 failed with ValueError: no", ended=2.0)
    scene.shipper().ship_once()
    assert "2 ended runs until 1970-01-01 00:00 UTC, 1 of them without a result. " in note_of_experiment(scene)
    found = scene.entity.data.tags[NOTE_TAG].replace("\\", "")
    assert found.startswith(
        f"**failed**: rank 1 on n1 failed with ValueError: no {MARK}\n\n"
        f"correct /home/ada/train.py:7, then `hpcdist resume {scene.run.path} --with-current-code`\n\n"
    )
    assert f"\n\n```text\n{''.join(traceback[1:])}```\n\n[logs of all ranks](#/" in found
    attempt.outcome(1).write_text('{"outcome": "failed"}')
    scene.state(status="failed", attempt=1)
    scene.shipper().ship_once()  # a damaged file of a rank stops nothing


def test_failed_update_of_the_table_is_repeated_by_sync(
    scene: Scene, end: End, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError("disk")

    monkeypatch.setattr(experiment_table, "read_result", fail)
    with pytest.raises(TrackingError, match="disk"):
        end("a", 0.9, 1.0)
    monkeypatch.undo()
    run = RunDir(scene.run.path.with_name("a"))
    run_id = (read_json(run.mlflow) or {})["run_id"]
    assert scene.client.get_run(run_id).info.status == "FINISHED", "the rest is uploaded"
    Delivery(run, scene.uri).ship_once()
    assert " · 1 result <!--" in note_of_experiment(scene)
