"""The rank of a run when it ends, and the leaderboard in the description of its MLflow experiment."""

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from tracking_scene import CONFIG, Scene

from hpcdist.host.files import write_json
from hpcdist.review.uncertainty import npy
from hpcdist.run.folder import RunDir, State
from hpcdist.run.records import DatasetRecord, Standing, TrainingRecord, read_standing, write_training
from hpcdist.tracking import leaderboard
from hpcdist.tracking.delivery import Delivery
from hpcdist.tracking.pages import MARK, NOTE_TAG

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


def standing(run: RunDir) -> Standing:
    found = read_standing(run, run.read_state())
    assert found is not None
    return found


def note_of_experiment(scene: Scene) -> str:
    return str(scene.client.get_experiment_by_name("exp").tags[NOTE_TAG])


def first_line(scene: Scene, run: RunDir) -> str:
    text = scene.client.get_run(standing(run).run_id).data.tags[NOTE_TAG].removeprefix(f"{MARK}\n\n")
    return text.partition("\n")[0].replace("\\", "")


def test_first_line_has_the_rank_at_the_end_of_the_run(scene: Scene, end: End) -> None:
    first = end("a", 0.95, 10.0)
    assert first_line(scene, first).startswith("**eval/accuracy 0.950 ± 0.007** · first result in exp when it ended")
    second, other = end("b", 0.955, 20.0), end("c", 0.99, 30.0, size=50)
    assert "· place 1 of 2 in exp when it ended, +0.005 against the best before (within" in first_line(scene, second)
    found, known = standing(second), (standing(first).run_id, 0.95, str(first.path))
    assert (found.before_run_id, found.before_value, found.before_folder) == known
    assert "no comparable run in exp when it ended" in first_line(scene, other), "it has other data"
    worse = end("d", 0.9, 40.0)
    how = "(clear, 95 %: -0.081 to -0.029, unpaired, for 2 comparisons)"
    assert f", -0.055 against the best before {how}" in first_line(scene, worse)
    loss = end("e", 0.9, 50.0, monitor="eval/loss", monitor_mode="min")
    assert standing(loss).num_others == 4
    # A rank is that of the end of its run, also if the run is uploaded, or uploaded again, after later ones.
    Delivery(second, scene.uri).ship_once()
    late = end("f", 0.96, 15.0)
    assert standing(second).place == 1
    assert (standing(late).place, standing(late).number) == (1, 2)


def test_results_of_the_same_samples_are_paired_and_equal_values_share_a_place(scene: Scene, end: End) -> None:
    _, second, third = [end(f"r{time}", ones / 1000, time, ones=ones) for time, ones in ((1, 950), (2, 960), (3, 960))]
    assert "+0.010 against the best before (clear, 95 %: +0.003 to +0.018, paired)" in first_line(scene, second)
    assert "place 1 of 3 in exp when it ended, equal to the best before" in first_line(scene, third)
    note = note_of_experiment(scene).replace("\\", "")
    assert "equal to the next one (r3) · 3 results: [A against B](#" in note
    cell = r'<td title="95 %: (\S+ to \S+) \(paired, 1,000 samples, for 2 comparisons\)"[^>]*>(.*?) <b>(.*?)<'
    page = third.leaderboard.read_text()
    assert '<td title="paired, 1,000 samples" class="w equal">0 <b>equal</b></td>' in page
    assert re.findall(cell, page) == [("+0.002 to +0.019", "+0.010", "clear")] * 2, "of two comparisons"
    assert re.findall(r"\n\| (\d)&", note) == ["1", "1", "3"]
    raw = leaderboard.Result(
        metric="m", mode="max", value=0.15, data="", num_samples=None, ended=1, allocated_s=1, unit=""
    )
    rows = leaderboard.make_rows([raw, *(replace(raw, value=value, setting="s") for value in (0.1, 0.2))])
    assert [number for number, _ in leaderboard.placed(rows)] == [1, 1], "0.15 and 0.15000000000000002"
    assert leaderboard.beside_next(rows, lambda row: row.measured).startswith("too few seeds to tell from")


def test_seeds_of_a_setting_do_not_compete(scene: Scene, end: End) -> None:
    names = [f"tune-{seed}" for seed in (1, 2, 3)]
    cells = [{"name": name, "label": name, "values": {"optim.lr": 0.1, "seed": 1}} for name in names]
    sweep: dict[str, Any] = {"uid": "u", "created": 0.0, "keys": ["optim.lr", "seed"], "base": {}, "cells": cells}
    Path(scene.run.path.parent, "tune").mkdir()
    write_json(scene.run.path.parent / "tune" / "sweep.json", sweep)
    end("single", 0.97, 5.0)
    runs = [end(names[index], 0.94 + index / 50, 6 + index, seed=6 + index) for index in range(3)]
    found = standing(runs[-1])
    assert (found.setting, found.value, found.place, found.number) == ("tune lr=0.1", pytest.approx(0.96), 2, 2)
    own, mean = first_line(scene, runs[-1]).split(" in exp when it ended, ")
    assert own.endswith("0.004 with this seed** · setting tune lr=0.1: 0.96 ± 0.02 s.d. (n=3), place 2 of 2")
    parent = scene.client.get_run(found.run_id).data.tags["mlflow.parentRunId"]
    assert [one.path for one in scene.client.list_artifacts(parent)] == ["report.html"], "of the sweep"
    assert Path(scene.run.path.parent, "tune", "report.html").is_file()
    assert f"<code>{parent}</code>" in runs[-1].leaderboard.read_text(), "as in the description"
    assert mean.startswith("-0.01 against the best before (within noise, 95 %: -0.11 to +0.09, 1 run against 3 seeds)")
    note = note_of_experiment(scene).replace("\\", "").replace("&nbsp;", "")
    assert "| 0.96 ± 0.02 s.d. (n=3)| 10| 3| | finished| " in note


def test_description_of_the_experiment_is_a_leaderboard_below_text_of_the_user(
    scene: Scene, end: End, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leaderboard, "_MAX_ROWS", 2)
    end("first*", 0.95, 10.0)
    experiment = scene.client.get_experiment_by_name("exp").experiment_id
    scene.client.set_experiment_tag(experiment, NOTE_TAG, "ours: see the wiki")
    end("<b>", 0.97, 20.0)
    text = note_of_experiment(scene)
    best = "**Best eval/accuracy: 0.970 ± 0.005, [&lt;b&gt;](#"
    assert text.replace("\\", "").startswith(f"ours: see the wiki\n\n{MARK}\n\n{best}")
    assert ")**, clear of the next one (first*) · 2 results: [A against B](#" in text.replace("\\", "")
    assert text.index("[&lt;b&gt;]") < text.index(r"[first\*]")
    page = end("worse", 0.9, 30.0).leaderboard.read_text()
    text = note_of_experiment(scene)
    assert text.count("\n| ") == 4, "a head, its rule, and two rows"
    assert "\n\n1 more in [leaderboard" in text
    assert (page.count('<tr><td class="n">'), page.count("&lt;b&gt;</td>")) == (3, 1)


def test_runs_that_end_at_once_are_all_on_the_leaderboard(scene: Scene, end: End) -> None:
    end("a", 0.9, 1.0)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda number: end(f"r{number}", 0.8 + number / 100, 2.0), range(4)))
    assert note_of_experiment(scene).count("\n| ") == 7


def test_damaged_results_of_others_are_left_out(scene: Scene, end: End) -> None:
    run = end("a", 0.9, 1.0)
    experiment = scene.client.get_experiment_by_name("exp").experiment_id
    for text in ("", "[]", "{", '{"metric": 1}', '{"metric": "eval/accuracy", "mode": "max", "value": NaN}'):
        scene.client.set_tag(scene.client.create_run(experiment).info.run_id, "hpcdist.result", text)
    run = end("b", 0.9, 2.0)
    assert (standing(run).number, standing(run).difference) == (2, 0.0)


def test_failed_run_begins_with_cause_place_and_fix(scene: Scene, end: End) -> None:
    end("a", 0.9, 1.0)
    attempt = scene.run.new_attempt()
    trace = ["Traceback", '  File "/home/ada/train.py", line 7, in train', "    raise ValueError"]
    outcome = {"outcome": "failed", "error": "ValueError: no", "traceback": [f"{one}\n" for one in trace], "time": 1.0}
    write_json(attempt.outcome(1), outcome | {"host": "n1", "step": 3})
    write_json(attempt.failure, {"kind": "error", "rank": 1, "host": "n1", "step": 3, "error": "ValueError: no"})
    scene.state(status="failed", reason="rank 1 on n1 failed with ValueError: no", ended=2.0)
    scene.shipper().ship_once()
    assert "2 ended runs, 1 of them without a result. " in note_of_experiment(scene).replace("\\", "")
    found = scene.entity.data.tags[NOTE_TAG].removeprefix(f"{MARK}\n\n").replace("\\", "")
    assert found.startswith(
        "**failed**: rank 1 on n1 failed with ValueError: no\n\n"
        f"fix /home/ada/train.py:7, then `hpcdist resume {scene.run.path} --with-current-code`\n\n"
    )
    attempt.outcome(1).write_text('{"outcome": "failed"}')
    scene.state(status="failed", attempt=1)
    scene.shipper().ship_once()  # a damaged file of a rank stops nothing


def test_run_without_a_search_has_no_rank(scene: Scene, end: End, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError("disk")

    monkeypatch.setattr("hpcdist.tracking.leaderboard.all_pages", fail)
    run = end("a", 0.9, 1.0)
    assert read_standing(run, run.read_state()) is None
    monkeypatch.undo()
    Delivery(run, scene.uri).ship_once()
    assert first_line(scene, run).startswith("**eval/accuracy 0.900 ± 0.009** · first result"), "sync ranks it later"
    run.write_state(State(status="running", attempt=2))
    assert read_standing(run, run.read_state()) is None, "a resumed run has no rank yet"
