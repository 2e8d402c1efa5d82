"""Selection of points: each (key, step) once, within the budgets of charts and points, whatever crashes."""

import errno
import json
import math
import random
import re
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from hpcdist.errors import TrackingError
from hpcdist.rank.system_metrics import _usage
from hpcdist.review.charts import metric_charts
from hpcdist.review.facts import read_facts
from hpcdist.run.folder import RunDir, State
from hpcdist.run.mlflow_limits import clean_name
from hpcdist.tracking import journal as journal_reader
from hpcdist.tracking import journal_tail, point_budget
from hpcdist.tracking.batches import PointBatches
from hpcdist.tracking.journal import READER_SUFFIX, JournalWriter, read_range
from hpcdist.tracking.journal_tail import JournalTail
from hpcdist.tracking.metric_point import Point
from hpcdist.tracking.point_budget import PointBudget
from hpcdist.tracking.sent_points import SentPoints
from hpcdist.tracking.series import read_last_values, read_series, read_values
from hpcdist.tracking.system_charts import charted


def write(folder: Path, attempt: int, steps: list[int], *, rank: int = 0, key: str = "loss", time_ms: int = 0) -> None:
    with open(folder / f"attempt-{attempt:03d}.rank-{rank:05d}.jsonl", "a") as file:
        for step in steps:
            file.write(json.dumps({"t": time_ms + step, "s": step, "m": {key: attempt * 1000 + step}}) + "\n")


def test_missing_damaged_or_foreign_state_loads_as_empty(tmp_path: Path) -> None:
    path = tmp_path / SentPoints.FILE
    assert SentPoints.load(tmp_path, "r") == SentPoints(run_id="r")
    sent = SentPoints(run_id="r", offsets={"a": 3}, steps={"loss": {"1": [0, 9]}})
    sent.save(tmp_path)
    assert SentPoints.load(tmp_path) == SentPoints.load(tmp_path, "r") == sent
    assert SentPoints.load(tmp_path, "another run") == SentPoints(run_id="another run")
    for content in ('{"offsets": []}', '{"unknown": 1}', "[]", '{"run_id"'):
        path.write_text(content)
        assert SentPoints.load(tmp_path, "r") == SentPoints(run_id="r")
    with pytest.raises(TrackingError, match=r"sent-points\.json cannot be written .No such file"):
        sent.save(tmp_path / "missing")


def test_earlier_attempts_are_polled_again_at_the_end_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, 1, [10])
    write(tmp_path, 2, [20])
    progress = SentPoints()
    tail = JournalTail(tmp_path, progress)
    while chunks := tail.next_chunks(2, over=False):
        progress.offsets |= {name: chunk.offset for name, chunk in chunks.items()}
    before = tail.num_polls
    assert tail.next_chunks(2, over=False) == {}
    assert tail.num_polls - before == 2, "a network file system may show lines late"
    monkeypatch.setattr(journal_tail, "LATE_S", -1.0)
    write(tmp_path, 1, [11])
    assert tail.next_chunks(2, over=False) == {}
    assert list(tail.next_chunks(2, over=True)) == ["attempt-001.rank-00000.jsonl"]


# --- Each (key, step) is sent once, with its first value: random journals, crashes and names against a simple model.


#: Names that become equal if invalid characters are replaced or the end is cut.
KEYS = ["loss", "acc%", "acc#", "acc_", "k" * 300 + "a", "k" * 300 + "b", "attempt"]


class ExpectedContent:
    """The expected content of MLflow: the rule of `SentPoints.admit` with sets of all steps."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, int], float] = {}
        self._steps: dict[str, dict[int, set[int]]] = {key: {} for key in KEYS}

    def add(self, attempt: int, step: int, metrics: dict[str, float]) -> None:
        for key, value in metrics.items():
            shipped = self._steps[key]
            before = (other >= step for number, own in shipped.items() if number < attempt for other in own)
            after = (other <= step for number, own in shipped.items() if number > attempt for other in own)
            if any(before) or any(after) or step in shipped.get(attempt, set()):
                continue
            shipped.setdefault(attempt, set()).add(step)
            self.values[clean_name(key), step] = value


def make_run(folder: Path) -> RunDir:
    run = RunDir.create(folder / "runs" / "exp" / "large")
    run.new_attempt()
    run.new_attempt()
    return run


class Store:
    """A shipper that can be killed between any two of its actions, and an MLflow that stores equal points once."""

    def __init__(self, run: RunDir, seed: int) -> None:
        self.run = run
        self.random = random.Random(seed)
        self.received: set[Point] = set()
        self.batches = PointBatches(run)

    def ship(self, newest: int = 1, *, over: bool, may_be_killed: bool = True) -> bool:
        """Send a batch as `Delivery.ship_records` does. Returns False if there is nothing to send."""
        killed_after = self.random.randrange(1, 8) if may_be_killed else 99
        is_repeated = SentPoints.load(self.run.journal).is_sending
        if (found := self.batches.next(newest, over=over)) is None:
            return False
        if not is_repeated:
            self.on_new_batch(SentPoints.load(self.run.journal))
        if killed_after > 1:
            self.received |= set(found[: self.random.randrange(len(found) + 1)] if killed_after == 2 else found)
        if killed_after > 3:
            self.batches.commit()
        if killed_after <= 4:
            self.batches = PointBatches(self.run)
        return True

    def on_new_batch(self, sent: SentPoints) -> None:
        """Called with the saved state before the batch is sent."""

    def ship_rest(self, newest: int = 1) -> None:
        while self.ship(newest, over=True):
            pass

    def assert_each_step_once(self) -> None:
        counts = Counter((point.key, point.step) for point in self.received)
        assert not [key for key, number in counts.items() if number > 1]

    def values(self, key: str) -> dict[int, float]:
        return {point.step: point.value for point in self.received if point.key == key}


class Simulation(Store):
    """Ranks with increasing, repeated and late steps."""

    def __init__(self, run: RunDir, seed: int) -> None:
        super().__init__(run, seed)
        self.expected = ExpectedContent()
        self._last: dict[tuple[int, int], int] = {}

    def write(self, attempt: int) -> None:
        rank = self.random.randrange(2)
        step = self._last.get((attempt, rank), self.random.randrange(40))
        with open(self.run.journal / f"attempt-{attempt:03d}.rank-{rank:05d}.jsonl", "a") as file:
            for _ in range(self.random.randrange(1, 12)):
                step = max(0, step + self.random.choice((1, 1, 1, 5, 0, -3, -20)))
                keys = self.random.sample(KEYS, self.random.randrange(1, len(KEYS)))
                metrics = {key: self.random.random() for key in keys}
                file.write(json.dumps({"t": step, "s": step, "m": metrics}) + "\n")
        self._last[attempt, rank] = step

    def on_new_batch(self, sent: SentPoints) -> None:
        for name, end in sent.intent.items():
            for record in read_range(self.run.journal / name, sent.offsets.get(name, 0), end).records:
                self.expected.add(int(name[8:11]), record.step, record.metrics)


@pytest.mark.parametrize("seed", range(10))
def test_each_step_of_a_key_is_sent_once(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_reader, "CHUNK_BYTES", 3000)
    monkeypatch.setattr(journal_tail, "BATCH_BYTES", 3000)
    monkeypatch.setattr(point_budget, "EXACT_POINTS", 10**6)
    simulation = Simulation(make_run(tmp_path), seed)
    attempt = 1
    for _ in range(80):
        attempt += simulation.random.random() < 0.04
        # Sometimes lines of an earlier attempt on another node arrive late.
        simulation.write(attempt if simulation.random.random() < 0.8 else simulation.random.randrange(1, attempt + 1))
        if simulation.random.random() < 0.7:
            simulation.ship(attempt, over=False)
    simulation.ship_rest(attempt)
    received = simulation.received
    assert {(point.key, point.step): point.value for point in received} == simulation.expected.values
    assert len(received) == len(simulation.expected.values)


def test_newest_attempt_counts_for_a_script_without_resume(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.config.write_text("trainer: {script: [train.py]}\n")
    write(run.journal, 1, [1, 2, 3, 4])
    write(run.journal, 2, [1, 2, 3, 4], time_ms=100)
    write(run.journal, 3, [3, 4], time_ms=200)
    store = Store(run, 0)
    store.ship_rest(3)
    losses = sorted((point for point in store.received if point.key == "loss"), key=lambda it: it.time_ms)
    assert (
        {point.step: point.value for point in losses}
        == read_values(run)["loss"]
        == {1: 2001, 2: 2002, 3: 3003, 4: 3004}
    )
    assert (len(losses), read_series(run)["loss"].num_points) == (10, 4), "MLflow has those of all attempts"
    (chart,) = metric_charts(read_series(run), {})[1]
    assert (">attempt 2<" in chart.figure, ">attempt 3<" in chart.figure, ">attempt 1<" in chart.figure) == (1, 1, 0)


def test_attempts_in_a_chart_of_a_script_are_those_of_its_metric(tmp_path: Path) -> None:
    """A script numbers points without a step from 0 in each attempt."""
    run = make_run(tmp_path)
    run.config.write_text("trainer: {script: [train.py]}\n")
    for attempt, steps in ((1, range(25)), (2, range(15, 25)), (3, range(15, 40))):
        for key in ("loss", "train/mixed"):
            write(run.journal, attempt, list(steps), key=key)
        write(run.journal, attempt, list(range(40)), key="free")
        write(run.journal, attempt, [5, 6, 7], key="eval/mixed")
    write(run.journal, 1, list(range(40)), key="only_first")
    run.write_state(State(status="finished", attempt=3))
    charts = {chart.title: chart.figure for chart in metric_charts(read_series(run), {}, facts=read_facts(run))[1]}
    assert {title: re.findall(">(attempt .)<", figure) for title, figure in charts.items()} == {
        "loss": ["attempt 1", "attempt 3"], "free": ["attempt 3"], "mixed": [], "only_first": []
    }  # fmt: skip


@pytest.mark.parametrize("seed", range(5))
def test_each_record_of_a_script_is_sent_once(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one at a step that was sent; the reader of its files repeats records after a kill."""
    monkeypatch.setattr(journal_reader, "CHUNK_BYTES", 300)
    monkeypatch.setattr(journal_tail, "BATCH_BYTES", 900)
    monkeypatch.setattr(point_budget, "EXACT_POINTS", 10**6)
    run = make_run(tmp_path)
    run.config.write_text("trainer: {script: [train.py]}\n")
    store = Store(run, seed)
    logged: dict[tuple[int, int], float] = {}
    for time_ms in range(200):
        step = time_ms % 7 + time_ms // 50
        logged[time_ms, step] = store.random.random()
        write_record(run, 1, 0, time_ms / 1000, step, {"loss": logged[time_ms, step]})
        with JournalWriter(run.journal, 1, file_suffix=READER_SUFFIX) as reader:
            for repeated in range(max(0, time_ms - 3), time_ms + 1):
                reader.log({"read": repeated}, repeated, time_ms)
        store.ship(over=False)
    store.ship_rest()
    losses = [point for point in store.received if point.key == "loss"]
    assert {(point.time_ms, point.step): point.value for point in losses} == logged
    assert len(losses) == len(logged)
    read = [(point.step, point.value) for point in store.received if point.key == "read"]
    assert sorted(read) == [(step, step) for step in range(200)]
    assert read_values(run)["loss"] == {step: value for (_, step), value in logged.items()}
    shown = read_series(run)["loss"]
    assert shown.points == sorted(read_values(run)["loss"].items())
    assert shown.last == read_last_values(run)["loss"].value == shown.points[-1][1]


# --- The budgets of charts and points.


LIMIT = 40
SYSTEM = ["cpu_utilization_percentage", "disk_usage_megabytes", "gpu_0_power_usage_watts"]
MEMORY = "system_memory_usage_percentage"


@pytest.fixture(autouse=True)
def _limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(point_budget, "EXACT_POINTS", LIMIT)


def series_of(values: list[float], key: str = "loss") -> list[Point]:
    return [Point(key, value, 1000 + step, step) for step, value in enumerate(values)]


def select(found: list[Point], *, batch: int = 7) -> list[Point]:
    """Return what MLflow gets, in batches with a new process after each."""
    series: dict[str, Any] = {}
    sent: list[Point] = []
    for start in range(0, len(found), batch):
        series = json.loads(json.dumps(series))
        sent += PointBudget(series).select(found[start : start + batch])
    return sent + PointBudget(series).flush()


@pytest.mark.parametrize("seed", range(5))
def test_extremes_and_the_last_point_of_a_long_metric_are_sent(seed: int) -> None:
    draw = random.Random(seed)
    values = [draw.gauss(0, 1) for _ in range(100 * LIMIT + draw.randrange(50))]
    values[draw.randrange(len(values))] = 1e9
    values[draw.randrange(len(values))] = -1e9
    found = series_of(values)
    sent = select(found, batch=draw.randrange(1, 300))
    assert len(sent) == len(set(sent))
    assert set(sent) <= set(found)
    assert sent[:LIMIT] == found[:LIMIT]
    assert {found[-1], max(found, key=lambda point: point.value), min(found, key=lambda point: point.value)} <= set(
        sent
    )
    assert len(sent) <= LIMIT + 7 * LIMIT / 4 + 16, "a quarter of the limit for each doubling"
    # No bucket is longer than 16 points for each multiple of the limit.
    steps = sorted(point.step for point in sent)
    assert max(after - before for before, after in pairwise(steps)) <= 2 * 16 * 64


def test_selection_does_not_depend_on_batches() -> None:
    found = series_of([math.sin(step / 9) + step / 500 for step in range(3000)])
    assert select(found, batch=1) == select(found, batch=10**6)


def test_nan_and_infinities_of_a_bucket_are_sent() -> None:
    values = [0.5] * 2000
    for step, value in ((100, math.inf), (500, -math.inf), (1234, math.nan), (1235, math.nan)):
        values[step] = value
    for batch in (1, 50, 3000):
        sent = {point.step: point.value for point in select(series_of(values), batch=batch)}
        assert (sent[100], sent[500], sent[1999]) == (math.inf, -math.inf, 0.5)
        assert math.isnan(sent[1234])
    first_is_nan = series_of([math.nan if step == LIMIT else float(step) for step in range(2 * LIMIT)])
    assert {LIMIT, LIMIT + 1, 2 * LIMIT - 1} <= {point.step for point in select(first_is_nan)}


def write_record(run: RunDir, attempt: int, rank: int, time_s: float, step: int, metrics: dict[str, float]) -> None:
    with open(run.journal / f"attempt-{attempt:03d}.rank-{rank:05d}.jsonl", "a") as file:
        file.write(json.dumps({"t": round(1000 * time_s), "s": step, "m": metrics}) + "\n")


def write_node(run: RunDir, node: int, second: float, value: float, *, attempt: int = 1) -> None:
    metrics = {f"system/n{node}/{name}": value for name in (*SYSTEM, MEMORY)}
    metrics[f"time/n{node}/step_s"] = value
    write_record(run, attempt, 4 * node, 9_000_000 + second, int(second), metrics)


@pytest.mark.parametrize("seed", range(3))
def test_complete_intervals_have_statistics_of_all_nodes(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(point_budget, "EXACT_POINTS", 1000)
    monkeypatch.setattr(journal_reader, "CHUNK_BYTES", 3000)
    monkeypatch.setattr(journal_tail, "BATCH_BYTES", 9000)
    run, draw = make_run(tmp_path), random.Random(seed)
    expected: dict[tuple[int, int], list[float]] = defaultdict(list)
    for attempt, begin in ((1, 0), (2, 900)):
        for node in range(8):
            for number in range(60):
                second, value = begin + 10 * number + draw.random(), draw.random()
                write_node(run, node, second, value, attempt=attempt)
                expected[attempt, round(1000 * (9_000_000 + second)) // 30_000].append(value)
                write_record(run, attempt, 4 * node + 1, 9_000_000 + second, 10 * number, {f"own/{node}": value})
    store = Store(run, seed)
    store.ship_rest(2)
    store.assert_each_step_once()
    for metric, function in (
        (f"system/nodes_mean/{SYSTEM[0]}", fmean),
        (f"system/nodes_max/{MEMORY}", max),
        ("time/nodes_min/step_s", min),
        ("time/nodes_mean/step_s", fmean),
        ("time/nodes_max/step_s", max),
    ):
        found = store.values(metric)
        assert [value for _, value in sorted(found.items())] == pytest.approx(
            [function(values) for _, values in sorted(expected.items())]
        )
    of_system = {point.key for point in store.received if point.key.startswith("system/")}
    assert len(of_system) == 3, "as few charts as one node has"
    assert len(store.values("own/3")) == 60
    assert not store.values(f"system/n3/{SYSTEM[0]}")


@pytest.mark.parametrize("seed", range(4))
def test_live_run_with_random_crashes_sends_each_point_once(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(point_budget, "FIRST_BUCKET", 8)
    run, draw = make_run(tmp_path), random.Random(seed)
    store = Store(run, seed)
    losses: list[Point] = []
    for number in range(150):
        attempt = 1 + (number >= 90)
        for _ in range(draw.randrange(4)):
            step = len(losses)
            losses.append(Point("loss", draw.gauss(0, 1), 1000 * (9_000_000 + 10 * number), step))
            write_record(run, attempt, 0, 9_000_000 + 10 * number, step, {"loss": losses[-1].value})
        for node in range(6):
            if draw.random() < 0.9:
                # A record that arrives after its interval, as through a network file system.
                late = 400 * (draw.random() < 0.02)
                write_node(run, node, 10 * number - late + draw.random(), draw.random(), attempt=attempt)
                times = {f"time/n{node}/{name}": draw.random() for name in ("step_s", "data_s")}
                write_record(run, attempt, 4 * node, 9_000_000 + 10 * number, len(losses) // 20 * 20, times)
        if draw.random() < 0.8:
            store.ship(attempt, over=False)
    live = len(store.values(f"system/nodes_mean/{SYSTEM[0]}"))
    store.ship_rest(2)
    store.assert_each_step_once()
    assert [point for point in sorted(store.received, key=lambda it: it.step) if point.key == "loss"] == sorted(
        select(losses, batch=1000), key=lambda it: it.step
    )
    assert live >= 15, "intervals are sent while the run is live"
    assert store.values("time/nodes_mean/step_s")
    assert not [point for point in store.received if point.key.split("/")[1:2] == ["n3"]]
    assert not store.ship(2, over=True)


GPUS = {
    f"gpu_{gpu}_{name}": 10.0 * gpu
    for gpu in range(8)
    for name in (
        *("memory_usage_megabytes", "memory_usage_percentage", "utilization_percentage"),
        *("power_usage_watts", "power_usage_percentage"),
    )
}


def test_metrics_without_the_disk_while_it_is_unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: str) -> None:
        raise OSError(errno.ESTALE, f"Stale file handle: {path}")

    everything = _usage("/", (0, 0), {})
    monkeypatch.setattr("psutil.disk_usage", fail)
    found = _usage("/", (0, 0), {})
    assert {name for name in everything if not name.startswith("disk_")} == set(found)


@pytest.mark.parametrize("prefix", ["system/", "system/gpu_1/"], ids=["one node", "several nodes"])
def test_node_has_at_most_eight_system_charts(prefix: str) -> None:
    values = {**_usage("/", (0, 0), {}), **GPUS}
    found = charted({"loss": 1.0, **{prefix + name: value for name, value in values.items()}})
    assert found["loss"] == 1.0
    of_gpus = {name: value for name, value in found.items() if name.removeprefix(prefix).startswith("gpu_")}
    assert of_gpus == {
        f"{prefix}gpu_utilization_percentage": 35.0,
        f"{prefix}gpu_memory_usage_percentage": 70.0,
        f"{prefix}gpu_power_usage_watts": 280.0,
    }
    assert len(found) == 1 + 8


def test_system_metrics_without_a_chart_are_not_sent(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    metrics = {f"system/{name}": 1.0 for name in (*SYSTEM, "gpu_1_power_usage_watts")}
    write_record(run, 1, 0, 9_000_000, 5, metrics)
    store = Store(run, 0)
    store.ship_rest(1)
    assert {(point.key, point.value) for point in store.received} == {
        ("system/cpu_utilization_percentage", 1.0), ("system/gpu_power_usage_watts", 2.0),
    }  # fmt: skip
    assert set(read_series(run)) == set(metrics), "the report has all"


def test_silent_node_does_not_delay_the_others(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    store = Store(run, 0)
    for number in range(30):
        for node in range(6):
            if node or number < 4:
                write_node(run, node, 10 * number, float(node))
        store.ship(over=False, may_be_killed=False)
    found = sorted(store.values(f"system/nodes_mean/{SYSTEM[0]}").items())
    assert len(found) >= 8
    assert (found[0][1], found[-1][1]) == (fmean(range(6)), fmean(range(1, 6)))
