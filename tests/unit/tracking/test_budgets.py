"""The budgets of charts and points: what MLflow gets, and that crashes of the shipper change none of it."""

from __future__ import annotations

import json
import math
import random
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from tracking_scene import Scene

from hpcdist.run.folder import RunDir
from hpcdist.tracking import journal
from hpcdist.tracking import points as tracking_points
from hpcdist.tracking.points import Batches, Point, PointBudget, without_node
from hpcdist.tracking.sync_runs import sync

LIMIT = 40
#: 64 nodes with 4 GPUs are 1,792 charts of system metrics.
SYSTEM = [
    *("cpu_utilization_percentage", "system_memory_usage_megabytes", "system_memory_usage_percentage"),
    *("disk_usage_percentage", "disk_usage_megabytes", "disk_available_megabytes"),
    *("network_receive_megabytes", "network_transmit_megabytes"),
    *(
        f"gpu_{gpu}_{name}"
        for gpu in range(4)
        for name in (
            *("memory_usage_megabytes", "memory_usage_percentage", "utilization_percentage"),
            *("power_usage_watts", "power_usage_percentage"),
        )
    ),
]


@pytest.fixture(autouse=True)
def _limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking_points, "EXACT_POINTS", LIMIT)


def points(values: list[float], key: str = "loss") -> list[Point]:
    return [Point(key, value, 1000 + step, step) for step, value in enumerate(values)]


def select(found: list[Point], *, batch: int = 7) -> list[Point]:
    """Return what MLflow gets, in batches with a new process after each."""
    series: dict[str, Any] = {}
    sent: list[Point] = []
    for start in range(0, len(found), batch):
        series = json.loads(json.dumps(series))
        sent += PointBudget(series).select(found[start : start + batch])
    return sent + PointBudget(series).flush()


def test_metric_within_the_limit_is_exact() -> None:
    found = points([float(step) for step in range(LIMIT)])
    assert select(found) == found


@pytest.mark.parametrize("seed", range(5))
def test_extremes_and_the_last_point_of_a_long_metric_are_sent(seed: int) -> None:
    draw = random.Random(seed)
    values = [draw.gauss(0, 1) for _ in range(100 * LIMIT + draw.randrange(50))]
    values[draw.randrange(len(values))] = 1e9
    values[draw.randrange(len(values))] = -1e9
    found = points(values)
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
    found = points([math.sin(step / 9) + step / 500 for step in range(3000)])
    assert select(found, batch=1) == select(found, batch=10**6)


def test_nan_and_infinities_of_a_bucket_are_sent() -> None:
    values = [0.5] * 2000
    for step, value in ((100, math.inf), (500, -math.inf), (1234, math.nan), (1235, math.nan)):
        values[step] = value
    for batch in (1, 50, 3000):
        sent = {point.step: point.value for point in select(points(values), batch=batch)}
        assert (sent[100], sent[500], sent[1999]) == (math.inf, -math.inf, 0.5)
        assert math.isnan(sent[1234])
    first_is_nan = points([math.nan if step == LIMIT else float(step) for step in range(2 * LIMIT)])
    assert {LIMIT, LIMIT + 1, 2 * LIMIT - 1} <= {point.step for point in select(first_is_nan)}


def test_metric_continues_after_the_end_of_a_run() -> None:
    found, budget = points([float(step % 17) for step in range(200)]), PointBudget({})
    sent = budget.select(found[:121])
    assert budget.is_holding
    sent += budget.flush()
    assert found[120] in sent
    assert not budget.is_holding
    sent += budget.select(found[121:]) + budget.flush()
    assert len(sent) == len(set(sent))
    assert found[-1] in sent
    assert budget.num_thinned == len(found) - len(sent)


@pytest.mark.parametrize(
    ("key", "without"),
    [
        ("system/n7/gpu_0_power_usage_watts", "system/gpu_0_power_usage_watts"),
        ("time/n7/step_s", "time/step_s"),
        ("system/cpu_utilization_percentage", None),
        ("time/step_s", None),
        ("time/of/day", None),
        ("eval/n7/step_s", None),
        ("system//x", None),
    ],
)
def test_metrics_of_nodes_are_known_by_their_names(key: str, without: str | None) -> None:
    assert without_node(key) == without


def make_run(folder: Path) -> RunDir:
    run = RunDir.create(folder / "runs" / "exp" / "large")
    run.new_attempt()
    run.new_attempt()
    return run


def write(run: RunDir, attempt: int, rank: int, time_s: float, step: int, metrics: dict[str, float]) -> None:
    with open(run.journal / f"attempt-{attempt:03d}.rank-{rank:05d}.jsonl", "a") as file:
        file.write(json.dumps({"t": round(1000 * time_s), "s": step, "m": metrics}) + "\n")


def write_node(run: RunDir, node: int, second: float, value: float, *, attempt: int = 1, names: int = 99) -> None:
    metrics = {f"system/n{node}/{name}": value for name in SYSTEM[:names]}
    write(run, attempt, 4 * node, 9_000_000 + second, int(second), metrics)


class Store:
    """A shipper that can be killed between any two of its actions, and an MLflow that stores equal points once."""

    def __init__(self, run: RunDir, seed: int) -> None:
        self.run = run
        self.random = random.Random(seed)
        self.received: set[Point] = set()
        self.batches = Batches(run)

    def ship(self, newest: int = 1, *, over: bool, may_be_killed: bool = True) -> bool:
        """Send a batch as `Delivery.ship_records` does. Returns False if there is nothing to send."""
        killed_after = self.random.randrange(1, 8) if may_be_killed else 99
        if (found := self.batches.next(newest, over=over)) is None:
            return False
        if killed_after > 1:
            self.received |= set(found[: self.random.randrange(len(found) + 1)] if killed_after == 2 else found)
        if killed_after > 3:
            self.batches.commit()
        if killed_after <= 4:
            self.batches = Batches(self.run)
        return True

    def ship_rest(self, newest: int = 1) -> None:
        while self.ship(newest, over=True):
            pass

    def assert_each_step_once(self) -> None:
        counts = Counter((point.key, point.step) for point in self.received)
        assert not [key for key, number in counts.items() if number > 1]

    def values(self, key: str) -> dict[int, float]:
        return {point.step: point.value for point in self.received if point.key == key}


@pytest.mark.parametrize("seed", range(3))
def test_complete_intervals_have_the_statistics_of_all_nodes_through_crashes(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracking_points, "EXACT_POINTS", 1000)
    monkeypatch.setattr(journal, "CHUNK_BYTES", 3000)
    monkeypatch.setattr(tracking_points, "CHUNK_BYTES", 3000)
    monkeypatch.setattr(tracking_points, "BATCH_BYTES", 9000)
    run, draw = make_run(tmp_path), random.Random(seed)
    expected: dict[tuple[int, int], list[float]] = defaultdict(list)
    for attempt, begin in ((1, 0), (2, 900)):
        for node in range(8):
            for number in range(60):
                second, value = begin + 10 * number + draw.random(), draw.random()
                write_node(run, node, second, value, attempt=attempt, names=3)
                expected[attempt, round(1000 * (9_000_000 + second)) // 30_000].append(value)
                write(run, attempt, 4 * node + 1, 9_000_000 + second, 10 * number, {f"own/{node}": value})
    store = Store(run, seed)
    store.ship_rest(2)
    store.assert_each_step_once()
    for kind, function in (("min", min), ("mean", fmean), ("max", max)):
        found = store.values(f"system/nodes_{kind}/{SYSTEM[0]}")
        assert [value for _, value in sorted(found.items())] == pytest.approx(
            [function(values) for _, values in sorted(expected.items())]
        )
    assert len(store.values("own/3")) == 60
    assert not store.values(f"system/n3/{SYSTEM[0]}")


@pytest.mark.parametrize("seed", range(4))
def test_live_run_with_random_crashes_sends_each_point_once(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracking_points, "FIRST_BUCKET", 8)
    run, draw = make_run(tmp_path), random.Random(seed)
    store = Store(run, seed)
    losses: list[Point] = []
    for number in range(150):
        attempt = 1 + (number >= 90)
        for _ in range(draw.randrange(4)):
            step = len(losses)
            losses.append(Point("loss", draw.gauss(0, 1), 1000 * (9_000_000 + 10 * number), step))
            write(run, attempt, 0, 9_000_000 + 10 * number, step, {"loss": losses[-1].value})
        for node in range(6):
            if draw.random() < 0.9:
                # A record that arrives after its interval, as through a network file system.
                late = 400 * (draw.random() < 0.02)
                write_node(run, node, 10 * number - late + draw.random(), draw.random(), attempt=attempt, names=2)
                times = {f"time/n{node}/{name}": draw.random() for name in ("step_s", "data_s")}
                write(run, attempt, 4 * node, 9_000_000 + 10 * number, len(losses) // 20 * 20, times)
        if draw.random() < 0.8:
            store.ship(attempt, over=False)
    live = len(store.values(f"system/nodes_max/{SYSTEM[0]}"))
    store.ship_rest(2)
    store.assert_each_step_once()
    assert [point for point in sorted(store.received, key=lambda it: it.step) if point.key == "loss"] == sorted(
        select(losses, batch=1000), key=lambda it: it.step
    )
    assert live >= 15, "intervals are sent while the run is live"
    assert store.values("time/nodes_mean/step_s")
    assert not [point for point in store.received if point.key.split("/")[1:2] == ["n3"]]
    assert not store.ship(2, over=True)


def test_silent_node_does_not_delay_the_others(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    store = Store(run, 0)
    for number in range(30):
        for node in range(6):
            if node or number < 4:
                write_node(run, node, 10 * number, float(node), names=1)
        store.ship(over=False, may_be_killed=False)
    found = sorted(store.values(f"system/nodes_min/{SYSTEM[0]}").items())
    assert len(found) >= 8
    assert (found[0][1], found[-1][1]) == (0.0, 1.0)


def test_sync_reports_points_beyond_the_limit(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking_points, "EXACT_POINTS", 10)
    scene.log(range(100))
    scene.state(status="finished", ended=2e9)
    report = sync(scene.run, scene.uri)
    steps = scene.steps()
    assert steps[:10] == list(range(10))
    assert steps[-1] == 99
    assert report.num_points == len(steps) + 1
    assert f", {100 - len(steps)} points after the first 10,000 of a metric in the journal only" in str(report)
    assert sync(scene.run, scene.uri).num_points == 0


def test_charts_of_64_nodes_with_4_gpus(scene: Scene) -> None:
    scene.run.new_attempt()
    assert 64 * len(SYSTEM) == 1792
    for node in range(64):
        for second in (0, 10, 20, 30, 40):
            write_node(scene.run, node, second, node + second)
        times = {f"time/n{node}/{name}": 0.01 * node for name in ("step_s", "data_s", "compute_s")}
        write(scene.run, 1, 4 * node, 9_000_045, 50, times)
    write(scene.run, 1, 0, 9_000_046, 50, {"train/loss": 0.5})
    scene.state(status="finished", ended=2e9)
    scene.shipper().ship_once()
    metrics = scene.entity.data.metrics
    names = len(SYSTEM) + 3
    assert len(metrics) == 3 * names + len(("train/loss", "attempt"))
    assert {key.split("/")[1] for key in metrics if key.startswith("system/")} == {
        *("nodes_min", "nodes_mean", "nodes_max")
    }
    name = "gpu_3_power_usage_watts"
    assert [metrics[f"system/nodes_{kind}/{name}"] for kind in ("min", "mean", "max")] == [30.0, 66.5, 103.0]
    assert metrics["time/nodes_max/step_s"] == pytest.approx(0.63)
    # Lines of a network file system arrive within that time.
    assert tracking_points.SILENT_MS >= 1000 * tracking_points.LATE_S
