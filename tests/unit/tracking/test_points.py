"""Selection of points: each (key, step) once, with repeated, shared and late steps."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from report_scene import BEGAN, account, add_attempt
from tracking_scene import CONFIG, Scene

from hpcdist.errors import RunFolderError, TrackingError, UserMistake
from hpcdist.host.files import write_json
from hpcdist.review.ledger import CAUSES
from hpcdist.run.folder import RunDir
from hpcdist.tracking import delivery
from hpcdist.tracking import journal as journal_reader
from hpcdist.tracking import points as journal_tail
from hpcdist.tracking.delivery import LedgerMetrics
from hpcdist.tracking.journal import EventWriter, clean_metric_name
from hpcdist.tracking.mlflow_client import MlflowRun
from hpcdist.tracking.points import JournalTail, Point, SentPoints, StepSet, is_complete
from hpcdist.tracking.sync_runs import _only_watch, sync


def write(folder: Path, attempt: int, steps: list[int], *, rank: int = 0, key: str = "loss", time_ms: int = 0) -> None:
    with open(folder / f"attempt-{attempt:03d}.rank-{rank:05d}.jsonl", "a") as file:
        for step in steps:
            file.write(json.dumps({"t": time_ms + step, "s": step, "m": {key: attempt * 1000 + step}}) + "\n")


def drain(folder: Path, progress: SentPoints, newest: int = 99, *, over: bool = False) -> list[Point]:
    """Return the points that a shipper sends now."""
    tail = JournalTail(folder, progress)
    points: list[Point] = []
    while chunks := tail.next_chunks(newest, over=over):
        points += tail.new_points(chunks)
        progress.offsets |= {name: chunk.offset for name, chunk in chunks.items()}
        progress.intent = {}
    return points


def values(points: list[Point], key: str = "loss") -> list[float]:
    return [point.value for point in points if point.key == key]


@pytest.mark.parametrize(
    ("journals", "expected"),
    [
        ([(1, 0, [10, 20, 30, 40]), (2, 0, [30, 40, 50]), (3, 0, [50, 60])], [1010, 1020, 1030, 1040, 2050, 3060]),
        ([(1, 0, [1, 3, 5]), (1, 1, [1, 2, 3, 4, 5, 6])], [1001, 1003, 1005, 1002, 1004, 1006]),
    ],
    ids=["attempts", "ranks"],
)
def test_step_that_is_repeated_keeps_its_first_value(
    tmp_path: Path, journals: list[tuple[int, int, list[int]]], expected: list[int]
) -> None:
    progress = SentPoints()
    for attempt, rank, steps in journals:
        write(tmp_path, attempt, steps, rank=rank)
    assert values(drain(tmp_path, progress)) == expected
    assert drain(tmp_path, progress) == []


def test_attempt_is_read_after_all_earlier_attempts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_reader, "CHUNK_BYTES", 120)
    write(tmp_path, 1, list(range(20)))
    write(tmp_path, 1, list(range(20)), rank=1, key="other")
    write(tmp_path, 2, [18, 19, 20])
    points = drain(tmp_path, SentPoints())
    assert values(points) == [*range(1000, 1020), 2020]
    assert values(points, "other") == list(range(1000, 1020))


def test_late_lines_count_below_the_first_step_of_the_next_attempt(tmp_path: Path) -> None:
    progress = SentPoints()
    write(tmp_path, 1, [10, 20])
    write(tmp_path, 2, [50, 60])
    assert values(drain(tmp_path, progress)) == [1010, 1020, 2050, 2060]
    # These lines arrive late; from step 50 on the second attempt has them.
    write(tmp_path, 1, [30, 40, 50, 70])
    assert values(drain(tmp_path, progress)) == [1030, 1040]
    write(tmp_path, 2, [70])
    assert values(drain(tmp_path, progress)) == [2070]


def test_late_lines_count_before_the_next_attempt_has_sent_steps(tmp_path: Path) -> None:
    progress = SentPoints()
    write(tmp_path, 1, [10])
    write(tmp_path, 2, [10])
    assert values(drain(tmp_path, progress)) == [1010]
    write(tmp_path, 1, [20])
    write(tmp_path, 2, [20, 30])
    assert values(drain(tmp_path, progress)) == [1010 + 10, 2030]


def test_steps_of_one_attempt_are_sent_once_in_any_order(tmp_path: Path) -> None:
    progress = SentPoints()
    write(tmp_path, 1, [5, 9, 7, 7, 9, 5, 3, 8])
    assert values(drain(tmp_path, progress)) == [1005, 1009, 1007, 1003, 1008]
    # A new process reads the sent steps from the journal.
    write(tmp_path, 1, [7, 6, 8])
    reloaded = SentPoints(offsets=dict(progress.offsets), steps=progress.steps, marks=progress.marks)
    assert values(drain(tmp_path, reloaded)) == [1006]


def test_each_attempt_has_its_own_mark_even_at_the_same_step(tmp_path: Path) -> None:
    progress = SentPoints()
    write(tmp_path, 1, [7], key="system/cpu")
    assert values(drain(tmp_path, progress), "attempt") == []
    write(tmp_path, 1, [10, 20])
    write(tmp_path, 2, [15, 20])
    write(tmp_path, 3, [15, 30])
    marks = [(point.step, point.value) for point in drain(tmp_path, progress) if point.key == "attempt"]
    assert marks == [(10, 1), (15, 2), (16, 3)]
    write(tmp_path, 2, [40])
    assert values(drain(tmp_path, progress), "attempt") == []


def test_incomplete_line_is_final_after_the_next_attempt_starts(tmp_path: Path) -> None:
    write(tmp_path, 1, [10])
    with open(tmp_path / "attempt-001.rank-00000.jsonl", "a") as file:
        file.write('{"t":1,"s":20,"m":{"lo')
    progress = SentPoints()
    assert values(drain(tmp_path, progress, newest=1)) == [1010]
    read = dict(progress.offsets)
    write(tmp_path, 2, [20])
    assert values(drain(tmp_path, progress, newest=2)) == [2020]
    first = "attempt-001.rank-00000.jsonl"
    assert (tmp_path / first).stat().st_size == progress.offsets[first] > read[first]


def test_saved_intent_gives_the_same_points(tmp_path: Path) -> None:
    write(tmp_path, 2, [10, 20])
    progress = SentPoints()
    first = JournalTail(tmp_path, progress)
    chunks = first.next_chunks(2, over=False)
    saved = SentPoints(intent={name: chunk.offset for name, chunk in chunks.items()})
    # Late lines of an earlier attempt must wait.
    write(tmp_path, 1, [10, 20])
    write(tmp_path, 2, [30])
    second = JournalTail(tmp_path, saved)
    assert second.new_points(second.next_chunks(2, over=False)) == first.new_points(chunks)


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
    live = JournalTail(tmp_path, progress)
    while chunks := live.next_chunks(2, over=False):
        live.new_points(chunks)
        progress.offsets |= {name: chunk.offset for name, chunk in chunks.items()}
    before = live.num_polls
    assert live.next_chunks(2, over=False) == {}
    assert live.num_polls - before == 2, "a network file system may show lines late"
    monkeypatch.setattr(journal_tail, "LATE_S", -1.0)
    assert live.next_chunks(2, over=False) == {}
    assert live.num_polls - before == 3
    write(tmp_path, 1, [11])
    assert live.next_chunks(2, over=False) == {}
    assert list(live.next_chunks(2, over=True)) == ["attempt-001.rank-00000.jsonl"]


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
            self.values[clean_metric_name(key), step] = value


class Simulation:
    """A journal folder, a shipper that can be killed at any point, and an MLflow that stores equal points once."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.random = random.Random(seed)
        self.folder = folder
        self.expected = ExpectedContent()
        self.received: set[Point] = set()
        self._offsets: dict[str, int] = {}
        self._last: dict[tuple[int, int], int] = {}
        self._restart()

    def _restart(self) -> None:
        self.progress = SentPoints.load(self.folder)
        self.tail = JournalTail(self.folder, self.progress)

    def write(self, attempt: int) -> None:
        """Write records of a rank with increasing, repeated and late steps."""
        rank = self.random.randrange(2)
        step = self._last.get((attempt, rank), self.random.randrange(40))
        with open(self.folder / f"attempt-{attempt:03d}.rank-{rank:05d}.jsonl", "a") as file:
            for _ in range(self.random.randrange(1, 12)):
                step = max(0, step + self.random.choice((1, 1, 1, 5, 0, -3, -20)))
                keys = self.random.sample(KEYS, self.random.randrange(1, len(KEYS)))
                metrics = {key: self.random.random() for key in keys}
                file.write(json.dumps({"t": step, "s": step, "m": metrics}) + "\n")
        self._last[attempt, rank] = step

    def ship(self, newest: int, *, over: bool, may_be_killed: bool) -> None:
        """Send one chunk as `Delivery.ship_records` does, until the process is killed."""
        killed_after = self.random.randrange(1, 12) if may_be_killed else 99
        chunks = self.tail.next_chunks(newest, over=over)
        if not chunks:
            return
        self.progress.intent = {name: chunk.offset for name, chunk in chunks.items()}
        if killed_after == 1:
            self._restart()
            return
        self.progress.save(self.folder)
        if self._offsets != self.progress.intent:  # not yet in the model
            self._offsets = dict(self.progress.intent)
            for name, chunk in chunks.items():
                for record in chunk.records:
                    self.expected.add(int(name[8:11]), record.step, record.metrics)
        points = self.tail.new_points(chunks)
        sent = points[: self.random.randrange(len(points) + 1)] if killed_after == 2 else points
        self.received |= set(sent)
        if killed_after <= 3:
            self._restart()
            return
        self.progress.offsets |= self.progress.intent
        self.progress.intent = {}
        self.progress.save(self.folder)
        self._offsets = {}
        if killed_after == 4:
            self._restart()


@pytest.mark.parametrize("seed", range(40))
def test_each_step_of_a_key_is_sent_once(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_reader, "CHUNK_BYTES", 3000)
    monkeypatch.setattr(journal_tail, "BATCH_BYTES", 3000)
    simulation = Simulation(tmp_path, seed)
    attempt = 1
    for _ in range(80):
        attempt += simulation.random.random() < 0.04
        # Sometimes lines of an earlier attempt on another node arrive late.
        simulation.write(attempt if simulation.random.random() < 0.8 else simulation.random.randrange(1, attempt + 1))
        if simulation.random.random() < 0.7:
            simulation.ship(attempt, over=False, may_be_killed=True)
    while simulation.tail.next_chunks(attempt, over=True):
        simulation.ship(attempt, over=True, may_be_killed=True)
    metrics = [point for point in simulation.received if point.key != "attempt"]
    assert {(point.key, point.step): point.value for point in metrics} == simulation.expected.values
    assert len(metrics) == len(simulation.expected.values)
    assert len({point.step for point in simulation.received if point.key == "attempt"}) <= attempt


def test_late_record_of_many_keys_reads_the_journal_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "attempt-001.rank-00000.jsonl"
    with open(path, "w") as file:
        for step in [*range(0, 4000, 10), *([777] * 2), 778]:
            file.write(json.dumps({"t": 0, "s": step, "m": {f"key/{number}": 0.5 for number in range(30)}}) + "\n")
    num_read = 0
    read = journal_reader._read

    def counted(path: Path, offset: int, num_bytes: int) -> bytes:
        nonlocal num_read
        data = read(path, offset, num_bytes)
        num_read += len(data)
        return data

    monkeypatch.setattr(journal_reader, "_read", counted)
    progress = SentPoints()
    found = JournalTail(tmp_path, progress)
    while chunks := found.next_chunks(1, over=False):
        found.new_points(chunks)
        progress.offsets |= {name: chunk.offset for name, chunk in chunks.items()}
    assert found.counts.num_repeated == 30
    assert num_read < 2.5 * path.stat().st_size


def test_data_read_at_once_is_bounded_for_any_number_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_reader, "CHUNK_BYTES", 500)
    monkeypatch.setattr(journal_tail, "BATCH_BYTES", 1000)
    for rank in range(20):
        lines = [json.dumps({"t": 0, "s": step, "m": {f"rank{rank}": 0.5}}) + "\n" for step in range(30)]
        (tmp_path / f"attempt-001.rank-{rank:05d}.jsonl").write_text("".join(lines))
    progress = SentPoints()
    found = JournalTail(tmp_path, progress)
    num_points = 0
    while chunks := found.next_chunks(1, over=False):
        assert len(chunks) <= 4
        num_points += len(found.new_points(chunks))
        progress.offsets |= {name: chunk.offset for name, chunk in chunks.items()}
    assert num_points == 20 * 30 + 1


# --- `hpcdist sync --all --watch`: a real process, with runs that come and go, one of which cannot be uploaded.


WAIT_S = 240.0


def wait_for(condition: Callable[[], object], log: Path) -> None:
    until = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < until, log.read_text()
        time.sleep(0.05)


@pytest.fixture
def watch(tmp_path: Path) -> Iterator[Callable[[], subprocess.Popen[bytes]]]:
    """Start the command; its output is in `watch.log`."""
    started = []

    def start() -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "hpcdist", "sync", "--all", "--watch", "--interval", "1"]
        with open(tmp_path / "watch.log", "ab") as log:
            process = subprocess.Popen(
                [*command, "--runs-dir", str(tmp_path / "runs")],
                env={**os.environ, "HPCDIST_TRACKING_URI": ""},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.mark.processes
def test_watch_uploads_new_records_and_ends_on_sigterm(
    scene: Scene, tmp_path: Path, watch: Callable[[], subprocess.Popen[bytes]]
) -> None:
    scene.write_config({**CONFIG, "runs_dir": str(tmp_path / "runs"), "tracking": {"uri": scene.uri}})
    scene.state(status="stopped", ended=time.time())
    scene.log([1, 2, 3])
    broken = RunDir.create(tmp_path / "runs" / "exp" / "broken")
    broken.config.write_text(json.dumps({**CONFIG, "tracking": {"uri": "http://127.0.0.1:1"}}))
    broken.write_state(replace(broken.read_state(), status="stopped", ended=time.time()))
    log = tmp_path / "watch.log"
    first = watch()
    wait_for(lambda: "first: 4 points and" in log.read_text(), log)
    wait_for(lambda: "broken: MLflow at http://127.0.0.1:1: the server cannot be reached" in log.read_text(), log)
    assert is_complete(scene.run)
    again = watch()
    assert again.wait(WAIT_S) == 2
    assert f"hpcdist: another `hpcdist sync --watch` uploads the runs in {tmp_path}/runs: process {first.pid} on" in (
        log.read_text()
    )
    scene.log([4, 5])
    wait_for(lambda: "first: 2 points and" in log.read_text(), log)
    first.send_signal(signal.SIGTERM)
    assert first.wait(WAIT_S) == 0
    text = log.read_text()
    assert "ended by a signal; the next `hpcdist sync` uploads the rest" in text
    assert "Traceback" not in text
    assert text.count("broken: ") == 1, "a failure is logged once"
    assert scene.steps() == [1, 2, 3, 4, 5]


@pytest.mark.processes
def test_run_is_complete_until_it_has_new_records_or_another_attempt(scene: Scene) -> None:
    scene.log([1, 2])
    sync(scene.run, scene.uri, close_dead=False)
    assert not is_complete(scene.run), "it has not ended"
    scene.state(status="stopped", ended=time.time())
    assert not is_complete(scene.run)
    sync(scene.run, scene.uri)
    assert is_complete(scene.run)
    scene.log([3])
    assert not is_complete(scene.run)
    sync(scene.run, scene.uri)
    assert is_complete(scene.run)
    with EventWriter(scene.run.journal, 1, 0) as events:
        events.record("tag", {"stage": "late"})
    assert not is_complete(scene.run)
    sync(scene.run, scene.uri)
    assert is_complete(scene.run)
    scene.state(status="finished", attempt=2)
    assert not is_complete(scene.run)


@pytest.mark.processes
@pytest.mark.skipif(os.getuid() != 0, reason="only root can make files of another user")
def test_watch_refuses_planted_locks_and_folders_of_others(tmp_path: Path) -> None:
    (runs := tmp_path / "runs").mkdir()
    (mine := tmp_path / "mine").write_text("valuable")
    (runs / ".sync.lock").symlink_to(mine)
    with pytest.raises(UserMistake, match="Too many levels of symbolic links"), _only_watch(runs):
        pass
    assert mine.read_text() == "valuable"
    # In a folder that others can write to, the lock is in a folder of one's own.
    runs.chmod(0o1777)
    with _only_watch(runs):
        assert (runs / f".hpcdist-{os.geteuid()}" / ".sync.lock").read_text().startswith("process ")
    os.chown(runs, 65534, 65534)
    with pytest.raises(RunFolderError, match="runs belongs to nobody"), _only_watch(runs):
        pass


# --- The ledger of a run as metrics of MLflow.


def new_metrics(scene: Scene) -> LedgerMetrics:
    return LedgerMetrics(scene.run)


def test_ledger_of_an_ended_run_is_logged_once(scene: Scene) -> None:
    add_attempt(scene.run, 1, 37, [account(1, 37)] * 4)
    scene.state(status="finished", ended=BEGAN + 40, created=BEGAN - 10)
    for _ in range(2):
        scene.shipper().ship_once()
    logged = {key: value for key, value in scene.entity.data.metrics.items() if key.startswith("usage/")}
    assert logged.keys() == {f"usage/{name}" for name in (*CAUSES, "allocated", "goodput", "queue")}
    # MLflow's list of runs shows every digit.
    assert (logged["usage/allocated"], logged["usage/compute"]) == (round(5 * 37 / 3600, 6), round(4 * 35 / 3600, 6))
    assert logged["usage/goodput"] == round(140 / 185, 6)
    (point,) = scene.client.get_metric_history(scene.run_id, "usage/compute")
    assert (point.step, point.timestamp) == (7, int((BEGAN + 37) * 1000)), "the last training step"


def test_ledger_of_a_running_run_is_logged_in_intervals(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(delivery.time, "monotonic", lambda: now)
    mlflow, ledger = scene.shipper().open_run(), new_metrics(scene)
    scene.state(created=BEGAN)
    numbers = []
    for now in (30, 61, 90, 121):
        add_attempt(scene.run, 1 + now, 21 + now, [account(1 + now, 21 + now)] * 4)
        ledger.ship(scene.run.read_state(), mlflow)
        numbers.append(len(scene.client.get_metric_history(scene.run_id, "usage/compute")))
    assert numbers == [0, 1, 1, 2]
    scene.state(status="failed", ended=BEGAN + 200)
    for _ in range(2):
        ledger.ship(scene.run.read_state(), mlflow)
    history = scene.client.get_metric_history(scene.run_id, "usage/compute")
    times = {point.timestamp for point in history}
    assert len(times) == len(history) == 2, "each time once, and nothing for an equal ledger"
    assert {point.step for point in history} == {7, 8}, "each step once"
    write_json(scene.run.path / "job.json", {"job_id": "1", "starts": {"0": {"began": BEGAN, "ended": BEGAN + 200}}})
    new_metrics(scene).ship(scene.run.read_state(), mlflow)
    found = scene.entity.data.metrics["usage/allocated"]
    assert found == pytest.approx(200 * 5 / 3600, abs=1e-6), "as accounting says"


def test_ledger_that_accounting_changes_gets_the_next_step_from_the_next_process(scene: Scene) -> None:
    add_attempt(scene.run, 1, 37, [account(1, 37)] * 4)
    scene.state(status="finished", ended=BEGAN + 40, created=BEGAN - 10)
    scene.shipper().ship_once()
    write_json(scene.run.path / "job.json", {"job_id": "1", "starts": {"0": {"began": BEGAN, "ended": BEGAN + 36.04}}})
    for _ in range(2):
        scene.shipper().ship_once()
    points = [(p.step, p.timestamp) for p in scene.client.get_metric_history(scene.run_id, "usage/allocated")]
    ended_ms = int((BEGAN + 37) * 1000)
    assert sorted(points) == [(7, ended_ms), (8, ended_ms + 1)]
    assert scene.entity.data.metrics["usage/allocated"] == pytest.approx(36.04 * 5 / 3600, abs=1e-6)


def test_step_of_the_ledger_grows_after_a_restart(scene: Scene) -> None:
    add_attempt(scene.run, 1, 37, [account(1, 37)] * 4)
    scene.state(status="stopped", ended=BEGAN + 40, attempt=1)
    mlflow = scene.shipper().open_run()
    new_metrics(scene).ship(scene.run.read_state(), mlflow)
    mlflow.log_points([Point("usage/allocated", 0.05, int((BEGAN + 38) * 1000), 12)])  # before the restart
    add_attempt(scene.run, 41, 57, [account(41, 57)] * 4)
    scene.state(status="finished", ended=BEGAN + 60, attempt=2)
    new_metrics(scene).ship(scene.run.read_state(), mlflow)
    history = scene.client.get_metric_history(scene.run_id, "usage/allocated")
    assert [point.step for point in sorted(history, key=lambda point: point.timestamp)] == [7, 12, 13]
    assert scene.entity.data.metrics["usage/allocated"] == pytest.approx((37 + 17) * 5 / 3600, abs=1e-6)


def test_ledger_is_logged_once_through_an_outage(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    add_attempt(scene.run, 1, 37, [account(1, 37)] * 4)
    scene.state(status="stopped", ended=BEGAN + 40)
    mlflow, ledger = scene.shipper().open_run(), new_metrics(scene)

    def send_without_response(points: Sequence[Point]) -> int:
        MlflowRun.log_points(mlflow, points)
        raise TrackingError("the server does not answer")

    with monkeypatch.context() as patch:
        patch.setattr(mlflow, "log_points", send_without_response)
        with pytest.raises(TrackingError, match="does not answer"):
            ledger.ship(scene.run.read_state(), mlflow)
    # The record has arrived, and accounting changes the ledger before the next pass.
    write_json(scene.run.path / "job.json", {"job_id": "1", "starts": {"0": {"began": BEGAN, "ended": BEGAN + 36.04}}})
    ledger.ship(scene.run.read_state(), mlflow)
    history = scene.client.get_metric_history(scene.run_id, "usage/allocated")
    assert sorted(point.step for point in history) == [7, 8]


def test_run_without_a_ledger_has_no_metrics_of_it(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    scene.log([1])
    scene.state(status="finished", ended=BEGAN + 40)
    scene.shipper().ship_once()
    write_json(scene.run.path / "job.json", {"format": 99})
    new_metrics(scene).ship(scene.run.read_state(), scene.shipper().open_run())
    assert "the ledger of first is not uploaded" in caplog.text
    assert not [key for key in scene.entity.data.metrics if key.startswith("usage/")]


def test_energy_is_logged_where_it_is_known(scene: Scene) -> None:
    start = {"began": BEGAN, "ended": BEGAN + 50, "energy_j": 1.8e6}
    write_json(scene.run.path / "job.json", {"job_id": "1", "starts": {"0": start}})
    add_attempt(scene.run, 1, 37, [account(1, 37)] * 4)
    scene.state(status="finished", ended=BEGAN + 40)
    scene.shipper().ship_once()
    assert scene.entity.data.metrics["usage/energy_kwh"] == pytest.approx(0.5)


# --- StepSet behaves like a set of Python, with less memory.


@pytest.mark.parametrize("steps", [range(3000, -1000, -1), range(0, 5000, 5), range(-(2**63), 2**63, 2**51 + 7)])
def test_step_set_equals_a_set(steps: range) -> None:
    found, expected = StepSet(), set[int]()
    for step in random.Random(3).choices(steps, k=2 * min(len(steps), 4000)):
        assert (step in found) == (step in expected)
        found.add(step)
        expected.add(step)
    for step in expected:
        assert all((other in found) == (other in expected) for other in (step - 1, step, step + 1))


def test_steps_take_less_than_a_byte_each() -> None:
    tracemalloc.start()
    try:
        found = StepSet()
        for step in range(1_000_000):
            found.add(step)
        assert tracemalloc.get_traced_memory()[0] < 500_000
    finally:
        tracemalloc.stop()
