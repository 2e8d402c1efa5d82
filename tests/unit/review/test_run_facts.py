"""Facts of a run: what ran, result, attempts with lost steps, and progress."""

import json
import math
import random
import runpy
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from report_scene import ReportScene

from hpcdist.config.loading import load_config
from hpcdist.config.written import run_yaml
from hpcdist.host.json_files import write_json
from hpcdist.review.description import attempt_rows
from hpcdist.review.explain import read_faults
from hpcdist.review.facts import UNRECORDED, AttemptFacts, RunFacts, end_of_traceback, interruptions, read_facts
from hpcdist.review.ledger import timed_attempts
from hpcdist.review.metric_series import MAX_POINTS, NUM_BINS, Series, median_speeds, thinned
from hpcdist.run.attempt_times import AttemptTimes, NodeShare, Resources, begin, write_times
from hpcdist.run.config_origin import Override, load_origin, write_origin
from hpcdist.run.folder import RunDir, StopRequest
from hpcdist.run.training_record import DatasetRecord, TrainingRecord, write_training
from hpcdist.tracking.run_tags import state_tags
from hpcdist.tracking.series import read_series, read_values


class Folder:
    """A run folder that is filled attempt by attempt; attempt N starts at time 1000 N."""

    def __init__(self, path: Path, *overrides: str) -> None:
        self.run = RunDir.create(path / "runs" / "digits" / "first")
        self.run.config.write_text(run_yaml(load_config("ddp_digits", overrides)))
        write_origin(self.run, load_origin("ddp_digits"))

    def attempt(self, *, first_step: int | None, step: int, **end: Any) -> None:
        attempt = self.run.new_attempt()
        started = 1000.0 * attempt.number
        nodes = Resources(nodes={"n1": NodeShare(allocated=2, share=1.0, ranks=[0, 1])})
        times = begin(attempt, nodes, AttemptTimes(supervised=started, began=started, time_limit=9000.0))
        if end:
            write_times(attempt, replace(times, ended=started + 500, **end))
        if first_step is not None:
            write_training(attempt, TrainingRecord(first_step=first_step, began=started + 100))
        beat = {"time": started + 300, "host": "n1", "step": step, "total_steps": 400, "metrics": {"train/loss": 0.5}}
        attempt.beat(0).write_text(json.dumps(beat))
        self.run.write_state(replace(self.run.read_state(), status="running", attempt=attempt.number, world_size=2))

    def checkpoint(self, step: int, **metrics: float | None) -> None:
        folder = self.run.checkpoints / f"step-{step:08d}"
        folder.mkdir()
        write_json(folder / "manifest.json", {"created": 1500.0, "metrics": metrics})

    def facts(self, **state: Any) -> RunFacts:
        return read_facts(self.run, replace(self.run.read_state(), **state))


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path, "optim.lr=0.5", "stop.max_epochs=7")


def test_steps_after_the_last_checkpoint_of_an_attempt_are_lost(folder: Folder) -> None:
    folder.attempt(first_step=0, step=120, status="failed", reason="rank 1 was killed")
    folder.attempt(first_step=None, step=0, status="failed", reason="the nodes are unfit")
    folder.attempt(first_step=100, step=250, status="stopped", reason="preempted")
    folder.checkpoint(250)
    folder.attempt(first_step=250, step=400, status="finished", reason="trained 400 steps")
    folder.checkpoint(400)
    facts = folder.facts(status="finished")
    assert [(one.number, one.status, one.cause, one.steps_lost) for one in facts.attempts] == [
        (1, "failed", "rank 1 was killed", 20),
        (2, "failed", "the nodes are unfit", 0),
        (3, "stopped", "preempted", 0),
        (4, "finished", "trained 400 steps", 0),
    ]
    assert [(one.first_step, one.last_step) for one in facts.attempts] == [(0, 120), (None, 0), (100, 250), (250, 400)]
    first = facts.attempts[0]
    assert (first.started, first.ended, first.nodes) == (1000.0, 1500.0, ("n1",))
    assert facts.progress is None


def test_attempt_without_a_recorded_end(folder: Folder) -> None:
    """The supervisor of the first attempt was killed; the second one is live."""
    folder.attempt(first_step=0, step=120)
    folder.attempt(first_step=0, step=40)
    before, now = folder.facts().attempts
    assert (before.status, before.cause, before.ended, before.steps_lost) == ("failed", UNRECORDED, 1300.0, 120)
    assert (now.status, now.cause, now.ended, now.steps_lost) == ("running", "", None, None)
    closed = folder.facts(status="failed", reason="node n1 failed", ended=2400.0).attempts[1]
    assert (closed.status, closed.cause, closed.ended) == ("failed", "node n1 failed", 2400.0)
    assert closed.steps_lost == 40, "there is no checkpoint"
    beat = {"time": 1450.0, "host": "n1", "step": 130, "total_steps": 400, "metrics": {}}
    folder.run.attempt(1).beat(1).write_text(json.dumps(beat))
    assert folder.facts().attempts[0].ended == 1450.0, "the last heartbeat of any rank"
    assert timed_attempts(folder.run, now=3000.0)[0].ended == 1450.0


def test_slurm_explains_the_ends_of_the_starts_of_a_job(folder: Folder) -> None:
    folder.attempt(first_step=0, step=120, status="failed", reason="rank 1 was killed")
    folder.attempt(first_step=100, step=250, status="stopped", reason="everything saved")
    folder.run.attempt(2).send_request(StopRequest(cause="preemption"))
    folder.attempt(first_step=250, step=300)
    folder.attempt(first_step=250, step=400, status="finished", reason="trained 400 steps")
    ends = [(990.0, 2600.0, "PREEMPTED"), (2600.0, 3700.0, "NODE_FAIL"), (3700.0, 4600.0, "OUT_OF_MEMORY")]
    starts: dict[str, dict[str, Any]] = {
        str(number): {"nodes": "n1", "began": began, "ended": ended, "cores": 2, "state": state}
        for number, (began, ended, state) in enumerate(ends)
    }
    write_json(folder.run.path / "job.json", {"job_id": "7", "starts": starts})
    assert [one.cause for one in folder.facts(status="finished").attempts] == [
        "rank 1 was killed",
        "a job of higher priority preempted this one (Slurm: PREEMPTED): everything saved",
        "a node failed (Slurm: NODE_FAIL)",
        "trained 400 steps",
    ]
    faults = read_faults(folder.run, folder.facts(status="finished").attempts)
    assert list(faults) == [1, 3], "a preemption is no fault"
    assert faults[3].cause == "a node failed"
    for nodes, cause in (("n1", "node n1 failed"), ("n1,n3", "nodes n1, n3 failed")):
        starts["1"]["failed_nodes"] = nodes
        write_json(folder.run.path / "job.json", {"job_id": "7", "starts": starts})
        attempts = folder.facts(status="finished").attempts
        assert attempts[2].cause == f"{cause} (Slurm: NODE_FAIL)"
    assert interruptions(attempts, 8000) == (
        "1: rank 1 was killed; 2: a job of higher priority preempted this one (Slurm: PREEMPTED): everything saved;"
        " 3: nodes n1, n3 failed (Slurm: NODE_FAIL)"
    )


def test_interruptions_end_with_the_newest() -> None:
    one = AttemptFacts(number=1, started=1.0, ended=2.0, status="failed", cause="rank 1 was killed")
    attempts = [replace(one, number=number) for number in range(1, 101)]
    text = interruptions([*attempts, replace(one, number=101, status="running", cause="")], 300)
    assert len(text) == 300
    assert text.startswith("…")
    assert text.endswith("; 99: rank 1 was killed; 100: rank 1 was killed")
    assert interruptions([replace(one, status="finished", cause="trained 9 steps")], 300) == ""


def fail_in(path: Path, code: str) -> list[str]:
    """Run a script that fails, and return its traceback as a rank reports it."""
    path.write_text(code)
    try:
        runpy.run_path(str(path), run_name="__main__")
    except Exception as error:  # of the script
        return traceback.format_exception(error)
    raise AssertionError("the script has not failed")


def test_end_of_a_traceback_has_the_innermost_calls(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    shown = end_of_traceback(fail_in(path, "batch = {'x': 1}\nbatch['labels']\n"))
    assert (shown[0], shown[1], shown[-1]) == (
        f'  File "{path}", line 2, in <module>',
        "    batch['labels']",
        "KeyError: 'labels'",
    )
    nested = (
        "def inner(x):\n    return x['y']\ndef middle(x):\n    return inner(x)\n"
        "def outer(x):\n    return middle(x)\nouter({})\n"
    )
    calls = [line for line in end_of_traceback(fail_in(path, nested)) if line.startswith("  File")]
    assert calls == [f'  File "{path}", line 4, in middle', f'  File "{path}", line 2, in inner']
    long = end_of_traceback(fail_in(path, "raise ValueError('\\n'.join(map(str, range(100))))\n"))
    assert (long[0], len(long)) == (f'  File "{path}", line 1, in <module>', 10)
    assert end_of_traceback([]) == ()


def test_progress_of_a_live_run(folder: Folder) -> None:
    folder.attempt(first_step=0, step=100, status="failed", reason="killed")
    folder.attempt(first_step=100, step=200)
    progress = folder.facts().progress
    assert progress is not None
    assert (progress.step, progress.total_steps, progress.seen, progress.time_limit) == (200, 400, 2300.0, 9000.0)
    assert progress.steps_per_s == 0.5, "100 steps in 200 s since training began"
    assert progress.eta == 2300.0 + 200 / 0.5
    folder.attempt(first_step=200, step=200)
    progress = folder.facts().progress
    assert progress is not None
    assert (progress.steps_per_s, progress.eta) == (None, None), "no step in this attempt yet"


def test_throughput_is_the_median_of_the_logged_values() -> None:
    keys = ["train/samples_per_s", "tokens_per_sec", "per_second", "comm/bytes_per_s", "train/loss", "steps_per_sample"]
    series = {key: Series() for key in keys}
    for value in (1.0, 900.0, 1000.0):
        for one in series.values():
            one.add(int(value), value)
    assert median_speeds(series) == {"per_second": 900.0, "tokens_per_sec": 900.0, "train/samples_per_s": 900.0}


def test_versions_and_image_are_those_of_the_ranks(tmp_path: Path) -> None:
    folder = Folder(tmp_path, "cluster.environment.kind=module", "cluster.environment.modules=[python/3.12]")
    own = {"python": "3.11.7", "versions": {"torch": "2.15.0", "numpy": 3}}
    inside = {"python": "3.12.2", "torch": "2.14.0"}

    def found() -> tuple[Any, ...]:
        facts = folder.facts()
        assert facts.versions == {"python": "3.11.7", "torch": "2.15.0"}
        return facts.rank_python, facts.rank_versions, facts.image, facts.image_build

    write_json(folder.run.environment, {"launcher": "slurm", **own})
    assert found() == ("environment", {}, "", ""), "the job has not started"
    write_json(folder.run.rank_environment, {"kind": "module", **inside})
    assert found() == ("environment", inside, "", "")
    write_json(folder.run.environment, {"launcher": "local", "image_build": "abc", **own})
    assert found() == ("", {}, "", "abc")
    write_json(folder.run.container, {**inside, "image": "a.sif", "image_digest": None, "cuda": None})
    assert found() == ("container", inside, "a.sif", "")


def test_best_checkpoint_is_the_newest_of_the_best(folder: Folder) -> None:
    folder.checkpoint(100, **{"eval/accuracy": 0.9})
    folder.checkpoint(200, **{"eval/accuracy": 0.9})
    folder.checkpoint(300, **{"eval/accuracy": 0.8})
    folder.checkpoint(400, **{"eval/accuracy": None})
    (folder.run.checkpoints / "step-00000500").mkdir()
    facts = folder.facts()
    assert [one.step for one in facts.checkpoints] == [100, 200, 300, 400]
    assert facts.best is not None
    assert (facts.best.step, facts.best_value, facts.monitor, facts.monitor_mode) == (200, 0.9, "eval/accuracy", "max")
    folder.run.config.write_text("checkpoint: often\n")
    facts = folder.facts()
    assert (facts.monitor, facts.best_value) == ("eval/accuracy", 0.9), "the defaults of an edited config"


def test_overrides_model_and_datasets_are_read(folder: Folder) -> None:
    facts = folder.facts()
    assert (facts.config_name, facts.model) == ("ddp_digits", "simple_cnn")
    default = load_config("ddp_digits")
    assert facts.overrides == {
        "optim.lr": Override(before=default.optim.lr, after=0.5),
        "stop.max_epochs": Override(before=default.stop.max_epochs, after=7),
    }
    data = (DatasetRecord(name="digits", num_samples=9, digest="ab"), DatasetRecord(name="digits", split="test"))
    folder.attempt(first_step=0, step=1)
    write_training(folder.run.attempt(1), TrainingRecord(num_parameters=12, datasets=data))
    folder.attempt(first_step=None, step=0)
    facts = folder.facts()
    assert (facts.num_parameters, facts.datasets, facts.devices) == (12, data, "")
    machine: dict[str, Any] = {"devices": "2 × NVIDIA A100", "cpu": "AMD EPYC 7B13, 8 logical CPUs"}
    write_training(folder.run.attempt(1), TrainingRecord(num_parameters=12, **machine))
    facts, tags = folder.facts(), state_tags(folder.run, folder.run.read_state())
    assert machine == {key: tags[f"hpcdist.{key}"] for key in machine} == {"devices": facts.devices, "cpu": facts.cpu}


def test_damaged_files_give_empty_values(folder: Folder) -> None:
    folder.attempt(first_step=0, step=5)
    attempt = folder.run.attempt(1)
    paths = [attempt.times, attempt.path / "training.json", attempt.beat(0), attempt.outcome(0)]
    names = ("environment.json", "origin.json", "mlflow.json", "container.json", "slurm.json", "cell.json")
    for text in ("[]", "{", '{"format": 99}', '{"datasets": [3], "values": 3, "began": "x"}'):
        for path in (*paths, *(folder.run.path / name for name in names)):
            path.write_text(text)
        facts = folder.facts()
        assert not any((facts.user, facts.overrides, facts.datasets, facts.num_parameters, facts.progress)), text
        assert [one.status for one in facts.attempts] == ["running"]


def test_steps_of_a_script_are_those_that_it_reports(folder: Folder) -> None:
    """Without reports, nobody knows which steps were done twice."""
    for first_step, step in ((None, 0), (0, 45), (10, 60), (10, 30)):
        folder.attempt(first_step=first_step, step=step, status="failed", measured=False)
    found = folder.facts(status="failed").attempts
    assert [(one.first_step, one.last_step, one.steps_lost) for one in found] == [
        (None, None, None),
        (0, 45, 35),
        (10, 60, 50),
        (10, 30, None),  # the next start shows where it continues
    ]


def test_steps_of_a_script_may_begin_at_zero(folder: Folder) -> None:
    record = TrainingRecord(first_step=0, counts_from_zero=True, began=1.0)
    for step in (40, 100):
        folder.attempt(first_step=0, step=step, status="failed", measured=False)
        write_training(folder.run.attempt(len(folder.run.attempts())), record)
    facts = folder.facts(status="failed")
    assert [row[4] for row in attempt_rows(facts)] == ["0 to 40", "0 to 100"]
    assert facts.attempts[0].steps_lost == 41, "the next attempt has begun with step 0 again"


def test_long_series_are_thinned_and_short_ones_exact() -> None:
    generator = random.Random(1)
    values = [generator.random() for _ in range(100_000)]
    values[40_000], values[77_777] = -5.0, 9.0
    series = Series()
    for step, value in enumerate(values):
        series.add(step, value)
    points = series.points
    assert len(points) <= MAX_POINTS + 2
    assert points == sorted(points)
    assert {(0, values[0]), (40_000, -5.0), (77_777, 9.0), (99_999, values[-1])} <= set(points)
    assert all(values[step] == value for step, value in points)
    assert series.num_points == 100_000
    for low in range(0, 100_000, 2000):  # no part of the run is left with few points
        assert len([step for step, _ in points if low <= step < low + 2000]) >= 2000 * NUM_BINS // 100_000
    series = Series()
    for step, value in ((3, 1.5), (1, 0.5), (2, 1.0), (7, math.nan), (4, math.inf)):
        series.add(step, value)
    assert series.points == [(1, 0.5), (2, 1.0), (3, 1.5)]
    assert (series.lowest, series.highest) == (0.5, 1.5)
    assert math.isnan(series.last or 0.0), "the last value shows that a run has diverged"
    assert (series.num_points, series.num_not_finite, series.first_not_finite) == (5, 2, 4)
    assert (Series().lowest, Series().last, Series().highest, Series().points) == (None, None, None, [])
    assert thinned([], 2) == []


def test_replaced_value_at_a_step_is_no_extreme() -> None:
    series = Series()
    for value in (0.5, 9.0, 2.0):
        series.add(1, value)
    series.add(2, 3.0)
    assert (series.lowest, series.highest, series.points) == (2.0, 3.0, [(1, 2.0), (2, 3.0)])


def test_long_series_over_nodes_has_the_extremes_of_each(tmp_path: Path) -> None:
    scene = ReportScene(tmp_path)
    num_points = MAX_POINTS // 2 + 1
    name = "gpu_0_power_usage_watts"
    scene.log({f"system/n1/{name}": [90.0] + [5.0] * num_points, f"system/n2/{name}": [2.0] + [4.0] * num_points})
    found = read_series(scene.run)[f"system/{name}"]
    assert (found.lowest, found.highest, found.points[:2]) == (2.0, 90.0, [(1, 2.0), (1, 90.0)])


def test_median_of_a_long_series_weighs_all_parts_equally() -> None:
    series = Series()
    for step in range(6000):  # the last third is slower, and single steps stop
        series.add(step, 500.0 if step >= 4000 else 1.0 if step % 10 == 3 else 1000.0)
    assert series.median == 1000.0
    assert Series().median is None


def test_series_of_a_run_have_repeated_steps_once(tmp_path: Path) -> None:
    scene = ReportScene(tmp_path)
    scene.state(attempt=2)
    scene.log({"train/loss": [1.0, 2.0, 3.0], "time/n1/step_s": [0.1]})
    scene.log({"system/n1/gpu_0_power_usage_watts": [1.0, 3.0], "system/n2/gpu_0_power_usage_watts": [9.0]})
    scene.log({"train/loss": [30.0, 4.0]}, attempt=2, first=3)
    series = read_series(scene.run)
    assert set(series) == {"train/loss", "system/gpu_0_power_usage_watts"}
    assert series["system/gpu_0_power_usage_watts"].highest == 9.0, "over all nodes"
    assert set(read_values(scene.run)) == {"train/loss"}
    assert series["train/loss"].points == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0)]
    assert series["train/loss"].steps_of_attempts == {1: (1, 3), 2: (4, 4)}
