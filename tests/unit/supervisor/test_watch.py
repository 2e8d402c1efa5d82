"""Watch and ProgressMonitor with up to thousands of ranks: cost of a poll, hung ranks, ranks that were not started."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from signal import Signals
from types import SimpleNamespace
from typing import Any

import pytest

from hpcdist.config.launch_schema import LaunchConfig
from hpcdist.config.schema import Config
from hpcdist.config.training_schema import TrainerConfig
from hpcdist.host.cgroups import MemoryKill
from hpcdist.host.json_files import read_json
from hpcdist.run.folder import CHECKS_PER_S, Attempt, StopRequest
from hpcdist.supervisor import progress as progress_module
from hpcdist.supervisor import watch as watch_module
from hpcdist.supervisor.hang import Activity, Summary
from hpcdist.supervisor.progress import ProgressMonitor
from hpcdist.supervisor.watch import IDLE_LOOKS, POLL_S, STACKS_S, Allocation, IdleTime, Watch

NUM_RANKS = 1000
HANG_S = 300.0
NOW = 1_700_000_000.0


class SteppedRanks:
    """Ranks with a simulated clock, which advances only in `wait`; `sign` returns the time of the last heartbeat."""

    def __init__(self, attempt: Attempt, num_ranks: int = NUM_RANKS) -> None:
        self.attempt = attempt
        self.num_ranks = num_ranks
        self.exits: dict[int, int] = {}
        self.memory_kills: dict[int, MemoryKill] = {}
        self.time = 0.0
        self.num_polls = 0
        self.silent: dict[int, float] = {}  #: by rank, the time of its last heartbeat
        self.interval_s = num_ranks / 64
        self.never_started: list[int] = []
        self.absent_called_at: list[float] = []
        self.end_at = 10_000.0

    @property
    def remaining(self) -> list[int]:
        return [rank for rank in range(self.num_ranks) if rank not in self.exits]

    def host_of(self, rank: int) -> str:
        return f"n{rank}"

    def wait(self, timeout_s: float) -> None:
        self.time += timeout_s
        self.num_polls += 1
        if self.time >= self.end_at:
            self.exits = dict.fromkeys(range(self.num_ranks), 0)

    def close(self) -> None: ...

    def signal(self, number: Signals) -> None:
        raise NotImplementedError

    def examine(self, command: Sequence[str], *, limit_s: float, interrupted: Callable[[], bool]) -> str:
        raise NotImplementedError

    def absent(self) -> list[int]:
        self.absent_called_at.append(self.time)
        return self.never_started

    def last_message(self, rank: int) -> str:
        return "srun: retrying"

    def sign(self, rank: int) -> float:
        """Return the time of a rank's last heartbeat; the ranks write one after the other within an interval."""
        alive_until = min(self.time, self.silent.get(rank, self.time))
        turn = self.interval_s * rank / self.num_ranks
        return turn + (alive_until - turn) // self.interval_s * self.interval_s


class Scene:
    def __init__(
        self,
        attempt: Attempt,
        monkeypatch: pytest.MonkeyPatch,
        num_ranks: int = NUM_RANKS,
        allocation: Allocation | None = None,
        *,
        script: Sequence[str] = (),
        hang_timeout_s: float | None = HANG_S,
    ) -> None:
        self.ranks = SteppedRanks(attempt, num_ranks)
        self.stats: list[int] = []  #: ranks whose heartbeat files were checked
        self.reads: list[str] = []  #: names of files that were read
        clock = SimpleNamespace(monotonic=lambda: self.ranks.time, time=lambda: NOW + self.ranks.time)
        monkeypatch.setattr(watch_module, "time", clock)
        if script:  # its limits are long
            monkeypatch.setattr(watch_module, "POLL_S", 2.0)
        monkeypatch.setattr(progress_module, "read_json", self._read)
        monkeypatch.setattr(attempt, "read_request", self._read_request)
        self.notes: list[str] = []
        report: Any = SimpleNamespace(progress=lambda beat: None, note=self.notes.append, output=lambda text: None)
        config = Config(trainer=TrainerConfig(script=list(script)), launch=LaunchConfig(hang_timeout_s=hang_timeout_s))
        self.watch = Watch(attempt, self.ranks, config, report, allocation)
        monkeypatch.setattr(self.watch.progress, "_sign", self._stat)
        monkeypatch.setattr(self.watch.progress, "_read_timing", lambda rank, now: self._stat(rank))
        monkeypatch.setattr(watch_module, "collect", self._collect)
        monkeypatch.setattr(watch_module, "read_activities", self._activities)
        self.busy_until = dict.fromkeys(range(num_ranks), 0.0)  #: by rank, when it stops to compute
        self.regular = True  #: whether the ranks report each step
        self.limits: list[float] = []  #: time limits of `collect`
        self.summary: Summary | None = None  #: result of `collect`

    def _collect(
        self, attempt: Attempt, ranks: SteppedRanks, *, limit_s: float, interrupted: Callable[[], bool]
    ) -> Summary | None:
        assert not interrupted()
        self.limits.append(limit_s)
        return self.summary

    def _activities(self, *_: object, **options: object) -> dict[int, Activity]:
        self.ranks.time += 3.0  # longer than SLOW_POLL_S
        now = self.ranks.time
        return {
            rank: Activity(time=now, cpu_s=min(now, until), on_gpu=False) for rank, until in self.busy_until.items()
        }

    def _stat(self, rank: int) -> object:
        self.stats.append(rank)
        return self.ranks.sign(rank)

    def _read_request(self, *, within_s: float) -> StopRequest | None:
        self.reads.append("request.json")
        return Attempt(self.ranks.attempt.path).read_request(within_s=within_s)

    def _read(self, path: Path, **_: object) -> dict[str, Any] | None:
        self.reads.append(path.name)
        rank = int(path.name[5:10])
        time = NOW + self.ranks.silent.get(rank, self.ranks.time)
        return {"time": time, "step": 10 * rank, "regular": self.regular}


@pytest.fixture
def scene(attempt: Attempt, monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(attempt, monkeypatch)


def test_cost_of_a_poll_does_not_depend_on_the_number_of_ranks(scene: Scene) -> None:
    scene.ranks.end_at = 200.0
    assert scene.watch.until_over() is None
    per_s = len(scene.stats) / scene.ranks.time
    assert per_s <= CHECKS_PER_S + 1 / POLL_S + 1, "CHECKS_PER_S in turn, and rank 0 in each poll"
    assert set(scene.stats) == set(range(NUM_RANKS))
    assert scene.reads.count("request.json") == scene.ranks.num_polls
    assert len(scene.reads) - scene.ranks.num_polls <= 1.1 * scene.ranks.time, "new heartbeats of rank 0"


@pytest.mark.parametrize("victim", [0, NUM_RANKS - 1])
def test_hung_rank_is_found_within_the_hang_timeout(scene: Scene, victim: int) -> None:
    scene.ranks.silent[victim] = 100.0
    failure = scene.watch.until_over()
    assert failure is not None
    assert (failure.kind, failure.rank, failure.host, failure.step) == ("hung", victim, f"n{victim}", 10 * victim)
    late_s = scene.ranks.time - (100 + HANG_S)
    assert -scene.ranks.interval_s <= late_s <= 2 * NUM_RANKS / CHECKS_PER_S + 2
    assert scene.limits == [STACKS_S]


@pytest.mark.parametrize(
    ("absent", "host", "sentence"),
    [
        (range(NUM_RANKS), "", "no rank was started within launch.init_timeout_s=120 s: srun: retrying"),
        ([7, 8, 9], "n7",
         "rank 7 on n7 was not started (nor were 2 others) within launch.init_timeout_s=120 s: srun: retrying"),
    ],
)  # fmt: skip
def test_ranks_not_started_within_the_init_timeout_are_a_failure(
    scene: Scene, absent: list[int], host: str, sentence: str
) -> None:
    scene.ranks.never_started = list(absent)
    failure = scene.watch.until_over()
    assert failure is not None
    assert (failure.kind, failure.host, failure.step, failure.sentence()) == ("not_started", host, None, sentence)
    (asked_at,) = scene.ranks.absent_called_at
    assert 120.0 <= asked_at < 120.5
    assert scene.limits == [], "no stack traces are collected"


def test_ranks_without_a_heartbeat_have_the_init_timeout(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config(launch=LaunchConfig(hang_timeout_s=15.0, init_timeout_s=120.0))
    progress = ProgressMonitor(scene.ranks.attempt, scene.ranks, config, scene.watch.report, 0.0)
    monkeypatch.setattr(progress, "_sign", lambda rank: None)
    monkeypatch.setattr(progress, "_read_timing", lambda rank, now: None)
    assert [progress.find_hung(now) for now in (1.0, 16.0, 119.0)] == [None, None, None]
    assert progress.find_hung(121.0) is not None


@pytest.mark.parametrize(("suspects", "rank"), [((3,), 3), ((3, 4), 700)])
def test_suspect_of_the_stacks_or_oldest_heartbeat_is_reported(
    scene: Scene, suspects: tuple[int, ...], rank: int
) -> None:
    scene.ranks.silent = dict.fromkeys(range(NUM_RANKS), 100.0) | {700: 99.5}
    scene.summary = Summary(sentence="they differ", suspects=suspects, odd_first=(), text="")
    failure = scene.watch.until_over()
    assert failure is not None
    assert (failure.rank, failure.host, failure.step) == (rank, f"n{rank}", 10 * rank)
    assert failure.sentence().endswith(f") after step {10 * rank}; they differ")


SCRIPT = ("train.py",)
DEADLOCK = Summary(sentence="all ranks are in all_reduce", suspects=(), odd_first=(), text="")


@pytest.mark.parametrize("hang_timeout_s", [None, HANG_S])
def test_silent_script_ranks_live_as_long_as_one_rank_prints(
    attempt: Attempt, monkeypatch: pytest.MonkeyPatch, hang_timeout_s: float | None
) -> None:
    scene = Scene(attempt, monkeypatch, 4, script=SCRIPT, hang_timeout_s=hang_timeout_s)
    scene.ranks.silent, scene.ranks.end_at = dict.fromkeys(range(1, 4), 0.0), 2500.0
    assert scene.watch.until_over() is None
    assert scene.ranks.time >= scene.ranks.end_at
    assert (scene.notes, scene.limits) == ([], [])


def test_deadlock_of_a_script_is_a_warning_by_default(attempt: Attempt, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(attempt, monkeypatch, 4, script=SCRIPT, hang_timeout_s=None)
    scene.ranks.silent, scene.summary = dict.fromkeys(range(4), 100.0), DEADLOCK
    scene.ranks.end_at = 4500.0
    attempt.stacks_summary.write_text(DEADLOCK.sentence)
    assert scene.watch.until_over() is None
    (note,) = scene.notes
    assert note == (
        "the script may hang: no output for 1800 s, and no rank uses CPU, GPU or files; all ranks are in all_reduce"
        f" (stack traces of all ranks are in {attempt.path}); it is not ended, since launch.hang_timeout_s is not set"
    )
    assert attempt.silence.read_text() == DEADLOCK.sentence
    assert not attempt.stacks_summary.exists(), "a later failure has another cause"


@pytest.mark.parametrize("script", [(), SCRIPT])
def test_silent_ranks_that_compute_are_not_ended(
    attempt: Attempt, monkeypatch: pytest.MonkeyPatch, script: Sequence[str]
) -> None:
    scene = Scene(attempt, monkeypatch, 4, script=script)
    scene.ranks.silent, scene.summary = dict.fromkeys(range(4), 100.0), DEADLOCK
    scene.busy_until[2] = 1000.0
    failure = scene.watch.until_over()
    assert failure is not None
    assert set(scene.notes) == {
        "no sign of progress for 300 s, but rank 2 used CPU, GPU or files meanwhile: the run continues"
    }
    assert 1000 + HANG_S / 2 <= scene.ranks.time <= 1000 + 2 * HANG_S


IDLE_S = 3600.0


@pytest.fixture
def idle(attempt: Attempt, monkeypatch: pytest.MonkeyPatch) -> Scene:
    """A script of two ranks in a job that is silent from 100 s on; SIGTERM ends its ranks."""
    scene = Scene(attempt, monkeypatch, 2, script=SCRIPT, hang_timeout_s=None)
    scene.watch.idle_s = IDLE_S
    scene.ranks.silent, scene.summary = dict.fromkeys(range(2), 100.0), DEADLOCK
    scene.ranks.end_at = 20_000.0

    def end(number: Signals) -> None:
        scene.ranks.exits = dict.fromkeys(range(2), -number)

    def collect_stacks(*_: object, **options: object) -> Summary | None:
        scene.ranks.silent[0] = scene.ranks.time  # it prints its stacks
        return scene.summary

    monkeypatch.setattr(scene.ranks, "signal", end)
    monkeypatch.setattr(watch_module, "collect", collect_stacks)
    return scene


@pytest.mark.parametrize("busy_until", [0.0, 5000.0])
def test_idle_ranks_are_asked_to_stop_with_their_stacks(idle: Scene, busy_until: float) -> None:
    idle.busy_until[1] = busy_until
    assert idle.watch.until_over() is None
    since = max(100.0, busy_until)
    assert since + IDLE_S <= idle.ranks.time <= since + IDLE_S * (1 + 4 / IDLE_LOOKS)
    request = Attempt(idle.watch.attempt.path).read_request()
    assert request is not None
    assert (request.action, request.cause) == ("stop", "idle")
    assert (
        request.sentence == "idle: no step, no output, and no use of CPU, GPU or files for launch.idle_timeout_s=3600 s"
    )
    assert f"the ranks are idle: {DEADLOCK.sentence} (stack traces of all ranks are in" in "".join(idle.notes)
    assert idle.watch.idle_since is not None
    assert since <= idle.watch.idle_since - NOW <= since + 4 * IDLE_S / IDLE_LOOKS


def test_ranks_whose_activity_is_unknown_do_not_count_as_idle(idle: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_module, "read_activities", lambda *_, **options: {0: Activity(1.0, 0.0, on_gpu=False)})
    assert idle.watch.until_over() is None
    assert idle.ranks.time >= idle.ranks.end_at
    assert not idle.watch.attempt.request.exists()


def test_output_and_a_busy_gpu_are_no_idleness(idle: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    del idle.ranks.silent[1]  # it prints
    assert idle.watch.until_over() is None
    assert idle.ranks.time >= idle.ranks.end_at
    spare = IdleTime(0.0)
    for now in range(100, 1000, 100):
        on_gpu = {0: Activity(float(now), 0.0, on_gpu=True)}
        spare.note_activities(float(now), on_gpu, [0])
    assert spare.since == 900.0


def test_busy_wait_in_a_collective_is_a_hang(attempt: Attempt, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL uses a core and a GPU while it waits."""
    scene = Scene(attempt, monkeypatch, 2)
    scene.ranks.silent = dict.fromkeys(range(2), 100.0)
    scene.busy_until = dict.fromkeys(range(2), 1e6)
    scene.summary = replace(DEADLOCK, pending_s={0: 290.0, 1: 299.0})
    failure = scene.watch.until_over()
    assert failure is not None
    assert scene.ranks.time < 410


def test_trainer_without_steps_lives_as_long_as_one_rank_logs(
    attempt: Attempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(attempt, monkeypatch, 2)
    scene.regular = False
    scene.ranks.silent = {0: 1000.0, 1: 0.0}
    failure = scene.watch.until_over()
    assert failure is not None, "nobody logs any more"
    assert 1000 + HANG_S - scene.ranks.interval_s <= scene.ranks.time < 1010 + HANG_S


@pytest.mark.parametrize(
    ("lead_s", "grace_s", "stacks_s"),
    [
        (600.0, 120.0, [STACKS_S]),  # launch.stop_grace_s
        (145.0, 120.0, [10.0]),  # the remaining time without REST_S
        (10.0, 5.0, []),
    ],
)
def test_grace_and_stack_collection_end_before_the_allocation(
    attempt: Attempt, monkeypatch: pytest.MonkeyPatch, lead_s: float, grace_s: float, stacks_s: list[float]
) -> None:
    allocation = Allocation(stop_at=NOW + 200, end=NOW + 200 + lead_s)
    scene = Scene(attempt, monkeypatch, num_ranks=2, allocation=allocation)
    failure = scene.watch.until_over()
    assert failure is not None
    assert failure.kind == "hung"
    assert failure.error.endswith("or before the end of the allocation")
    assert abs(scene.ranks.time - (200 + grace_s)) <= 3 * POLL_S
    assert scene.limits == pytest.approx(stacks_s, abs=3 * POLL_S)
    request = read_json(attempt.request)
    assert request is not None
    assert (request["action"], request["cause"]) == ("stop", "time_limit")


def monitor(
    attempt: Attempt, num_ranks: int, config: Config | None = None, notes: list[str] | None = None
) -> ProgressMonitor:
    report: Any = SimpleNamespace(note=(notes if notes is not None else []).append)
    return ProgressMonitor(attempt, SteppedRanks(attempt, num_ranks), config or Config(), report, now=0.0)


def beat(attempt: Attempt, rank: int, step: int) -> None:
    attempt.beat(rank).write_text(json.dumps({"time": NOW, "step": step, "total_steps": None, "metrics": {}}))


def test_last_step_is_at_least_the_step_of_rank_0(attempt: Attempt) -> None:
    """Otherwise two failures in the first minute would look like the same failure at step 0, twice."""
    beat(attempt, 0, 80)
    beat(attempt, 3000, 0)
    progress = monitor(attempt, 4096)
    assert progress.last_step(3000) == 80
    assert progress.last_step(2999) is None, "no heartbeat yet"


def test_straggler_is_reported_and_recorded(attempt: Attempt) -> None:
    notes: list[str] = []
    progress = monitor(attempt, 3, notes=notes)

    def train(seconds: range) -> None:
        """Ten steps a second on each of three hosts; n2 computes for 1.5 times as long during two minutes."""
        for now in seconds:
            for rank in range(3):
                totals = {"steps": 10 * now, "step_s": now, "own_steps": 10 * now, "data_s": 0.1 * now}
                totals["compute_s"] = 0.6 * now + (0.3 * min(now, 120) if rank == 2 else 0.0)
                text = json.dumps({"time": NOW + now, "host": f"n{rank}", "step": 1, "timing": totals})
                attempt.beat(rank).write_text(text if now % 7 else text[:50])  # some are half written
            progress.find_hung(float(now))

    train(range(100))
    (note,) = notes
    assert note.startswith(
        "n2 is 43 % slower than the median node (compute 90.0 ms against 60.0 ms a step, data alike)"
    )
    (line,) = attempt.straggler_events()
    assert (line["text"], line["event"], line["name"], line["rank"]) == (note, "slow", "n2", 2)
    assert attempt.current_stragglers() == [note]
    train(range(100, 220))
    assert notes[1:] == ["n2 is as fast as the median node again"]
    assert attempt.current_stragglers() == []
