"""The ledger of a run folder: its entries add up to wall time × resources, each with the right cause."""

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from report_scene import BEGAN, account, add_attempt

from hpcdist.host.json_files import read_json, write_json
from hpcdist.review import ledger as review_ledger
from hpcdist.review.ledger import Entry, Ledger, allocated_s, allocations_of, read_ledger, together
from hpcdist.run.attempt_times import NodeShare as Share
from hpcdist.run.attempt_times import Resources, read_times, write_times
from hpcdist.run.folder import RunDir, State
from hpcdist.run.reached_steps import reached_step


def sums(ledger: Ledger, attempt: int | None = None) -> dict[str, float]:
    entries = [entry for entry in ledger.entries if attempt in (None, entry.attempt)]
    return {
        cause: round(sum(entry.seconds for entry in entries if entry.cause == cause), 3)
        for cause in {entry.cause for entry in entries}
    }


def test_every_second_of_a_local_run_has_one_cause(run: RunDir) -> None:
    add_attempt(run, 1, 101, [account(11, 91), account(11, 101), account(21, 101), account(11, 101)])
    ledger = read_ledger(run)
    assert sums(ledger, 0) == {"start": 5.0}, "one second of five cores before the attempt"
    assert sums(ledger, 1) == {
        "start": 50.0,  # 3 ranks for 10 s, and one for 20 s
        "data": 4.0,
        "compute": 79 + 89 + 79 + 89,
        "idle": 10 + 100.0,  # rank 0 until the last step of the others, and the core of n1 without a rank
    }
    assert ledger.allocated_s == pytest.approx(101 * 5)
    assert sum(entry.seconds for entry in ledger.entries if entry.node == "n1") == pytest.approx(303.0)
    assert ledger.goodput == pytest.approx(336 / 505)


def test_seconds_of_an_attempt_by_cause(tmp_path: Path) -> None:
    full, killed = account(1, 61), account(11, 41, closed=False)
    damaged = {"seconds": None}, {"seconds": {"lunch": 1.0}}, {"seconds": {"data": -1.0}}, {"cause": ["lunch"]}
    clocks = [account(31, 91), account(-99, 31), {**full, "seconds": {}}, {**full, "seconds": {"data": 1e9}}]
    # It reports seldom: until it is killed it continues, and ranks without reports do as rank 0.
    script = [{**account(1, 21, closed=False), "seconds": {"start": 5.0, "redone": 10.0, "compute": 5.0}}, None]
    no_step = {**account(1, 21, closed=False), "cause": "start", "seconds": {"start": 20.0}}
    on_gpus = Resources(unit="GPU", nodes={"g1": Share(allocated=4, share=1, ranks=[0, 1])})
    failed: dict[str, Any] = {"failed": True}
    for name, accounts, options, expected in (
        ("killed", [killed] * 3, failed, {"start": 90, "discarded": 90, "down": 60, "idle": 60}),
        ("clocks", clocks, {}, {"start": 90, "data": 60.731, "compute": 59.269, "idle": 90}),
        ("damaged", [full | changes for changes in damaged], {}, {"start": 240, "idle": 60}),
        ("plain script", [None], {"measured": False}, {"unknown": 240, "idle": 60}),
        ("plain script without steps", [no_step], {"measured": False}, {"unknown": 240, "idle": 60}),
        ("script", script, failed | {"measured": False}, {"start": 20, "redone": 40, "compute": 180, "idle": 60}),
        ("a rank without a GPU", [full] * 3, {"resources": on_gpus}, {"data": 2, "compute": 118, "idle": 120}),
    ):
        run = RunDir.create(tmp_path / "runs" / "exp" / name)
        add_attempt(run, 1, 61, accounts, **options)
        ledger = read_ledger(run)
        assert (name, sums(ledger, 1)) == (name, expected)
        assert ledger.unit == ("GPU" if "resources" in options else "core")
        assert ledger.is_measured == (ledger.goodput is not None) == ("plain script" not in name)


def test_time_in_which_all_ranks_did_nothing_is_idle(tmp_path: Path) -> None:
    full, late = account(1, 61), account(11, 31, closed=False)
    script: dict[str, Any] = {"measured": False}
    failed: dict[str, Any] = {"failed": True}
    for name, accounts, options, expected in (
        ("script", [None], script, {"unknown": 160, "idle": 80 + 60}),
        ("killed", [late] * 4, failed, {"start": 40, "discarded": 80, "down": 40, "idle": 80 + 60}),
        # A rank that obeys the stop counts the time as part of its steps.
        ("trainer", [full] * 4, {}, {"data": 4, "compute": 156, "idle": 80 + 60}),
    ):
        run = RunDir.create(tmp_path / "runs" / "exp" / name)
        add_attempt(run, 1, 61, accounts, **options)
        times = read_times(run.attempt(1))
        assert times is not None
        write_times(run.attempt(1), replace(times, idle_since=BEGAN + 41))
        assert (name, sums(read_ledger(run), 1)) == (name, expected)


def test_wall_time_of_runs_that_overlap_counts_once() -> None:
    runs = [((0.0, 10.0), (90.0, 100.0)), ((5.0, 20.0),), ((6.0, 8.0),)]
    entry = Entry(cause="compute", attempt=1, node="n1", seconds=1.0)
    ledger = together([Ledger(entries=(entry,), spans=spans) for spans in runs])
    assert (ledger.running_s, ledger.elapsed_s) == (30, 100)
    assert (Ledger().running_s, Ledger().elapsed_s) == (0, 0)


def test_time_between_supervisors_is_not_allocated(run: RunDir) -> None:
    full = [account(1, 21)] * 4
    add_attempt(run, 1, 21, full, supervised=0, failed=True)
    add_attempt(run, 31, 51, [account(31, 51)] * 4, supervised=0)
    add_attempt(run, 1001, 1021, [account(1001, 1021)] * 4)
    ledger = read_ledger(run)
    assert sums(ledger, 0) == {"start": 10.0, "down": 50.0}
    assert ledger.allocated_s == pytest.approx(5 * (51 + 21))
    downs = [(i.began - BEGAN, i.ended - BEGAN) for i in ledger.intervals if i.cause == "down"]
    assert downs == [(21, 31)]
    add_attempt(run, 2001, None, [account(2001, 2021, closed=False), account(2001, 2031, closed=False), None, None])
    ledger = read_ledger(run)
    assert ledger.allocated_s == pytest.approx(5 * (51 + 21 + 31)), "the last heartbeat of a killed supervisor"
    assert sums(ledger, 4)["down"] == 10.0


def test_gaps_after_the_loss_of_a_node_have_the_remaining_nodes(run: RunDir) -> None:
    rest = Resources(nodes={"n1": Share(allocated=2, share=1, ranks=[0])})
    add_attempt(run, 1, 21, [account(1, 21)] * 4, supervised=0, failed=True)
    add_attempt(run, 31, 51, [account(31, 51)], rest, supervised=0, failed=True)
    add_attempt(run, 61, 81, [account(61, 81)], rest, supervised=0)
    assert sums(read_ledger(run), 0) == {"start": 5.0, "down": 50.0 + 20.0}


def test_nodes_given_back_before_the_upload_are_not_allocated(run: RunDir) -> None:
    two = Resources(nodes={f"n{n}": Share(allocated=1, share=1, ranks=[n - 1]) for n in (1, 2)})
    add_attempt(run, 1, 21, [account(1, 21)] * 2, two, supervised=0)
    start = {"nodes": "n[1-2]", "began": 0, "ended": 61, "cores": 2}
    write_starts(run, start)
    assert sums(read_ledger(run), 0) == {"start": 2.0, "finish": 80.0}
    write_starts(run, start | {"resized": BEGAN + 31, "last_nodes": "n1"})
    assert sums(read_ledger(run), 0) == {"start": 2.0, "finish": 2 * 10.0 + 30.0}
    write_starts(run, start | {"resized": BEGAN + 31, "last_nodes": "n["})
    assert read_ledger(run).allocated_s == 2 * 21, "a damaged record is none"


def test_running_attempt_counts_until_now(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    add_attempt(run, 1, None, [account(1, 21, closed=False)] * 4)
    run.write_state(State(status="running", attempt=1))
    monkeypatch.setattr(review_ledger, "holder", lambda run: {"pid": 1})
    monkeypatch.setattr(time, "time", lambda: BEGAN + 22)
    ledger = read_ledger(run)
    assert sums(ledger, 1) == {"data": 4.0, "compute": 80.0, "idle": 21.0}
    assert max(interval.ended for interval in ledger.intervals) == BEGAN + 22


def test_run_of_an_older_version_has_no_ledger(run: RunDir) -> None:
    run.new_attempt()
    assert read_ledger(run) == Ledger()
    write_json(run.attempt(1).times, {"began": "never"})
    assert read_ledger(run) == Ledger(), "and neither has one with a damaged file"


def test_recorded_phases_are_intervals(run: RunDir) -> None:
    add_attempt(run, 1, 31, [account(3, 29, seconds={"start": 2.0, "redone": 5.0, "compute": 19.0})] * 4)
    phases = [("start", 3, 5), ("compile", 5, 6), ("evaluation", 10, 12), ("checkpoint", 12, 13), ("lunch", 13, 14)]
    lines = [json.dumps({"cause": name, "began": BEGAN + a, "ended": BEGAN + b}) for name, a, b in phases]
    run.attempt(1).phases.write_text("\n".join([*lines, "{", "[]", '{"cause": "start", "began": 2}', "torn"]))
    found = [(i.cause, i.began - BEGAN, i.ended - BEGAN) for i in read_ledger(run).intervals if i.attempt == 1]
    assert found == [
        ("start", 1, 5),
        ("compile", 5, 6),
        ("redone", 6, 10),
        ("evaluation", 10, 12),
        ("checkpoint", 12, 13),
        ("redone", 13, 14),
        ("compute", 14, 29),
        ("finish", 29, 31),
    ]
    write_json(run.attempt(1).times, (read_json(run.attempt(1).times) or {}) | {"status": "failed"})
    found = [(i.cause, i.began - BEGAN, i.ended - BEGAN) for i in read_ledger(run).intervals if i.attempt == 1]
    assert found[-2:] == [("discarded", 14, 29), ("finish", 29, 31)], "it has no checkpoint"
    run.attempt(1).phases.write_text(lines[0] + "\n")
    for measured, after in ((True, ("start", 1, 29)), (False, ("redone", 5, 10))):
        write_json(run.attempt(1).times, (read_json(run.attempt(1).times) or {}) | {"measured": measured})
        found = [(i.cause, i.began - BEGAN, i.ended - BEGAN) for i in read_ledger(run).intervals if i.attempt == 1]
        assert after in found, "the steps of a script follow its start"


def test_rank_that_ended_early_is_idle_until_the_attempt_ends(run: RunDir) -> None:
    """The last steps end at 31, 41, 21 and 41 s; the first rank exports the model until 51 s, and all end at 61 s."""
    first, second = ({"data": 1.0, "compute": end - 2.0, "finish": 51.0 - end} for end in (31, 41))
    ends = [account(1, 51, seconds=first), account(1, 51, seconds=second), account(1, 21)]
    add_attempt(run, 1, 61, [*ends, account(1, 51, seconds=second)], supervised=1)
    unused = 60.0
    assert sums(read_ledger(run)) == {
        "data": 4.0,
        "compute": 29 + 39 + 19 + 39,
        "finish": 30 + 20 + 20 + 20,
        "idle": 20 + unused,
    }
    (last,) = [i for i in read_ledger(run).intervals if i.cause == "finish"]
    assert (last.began - BEGAN, last.ended - BEGAN) == (31, 61)
    (run.checkpoints / "step-00000003").mkdir(parents=True)
    write_json(run.checkpoints / "step-00000003" / "manifest.json", {"metrics": {}})
    add_attempt(run, 1001, 1061, [account(1001, 1051, closed=False), *[account(1001, 1021)] * 3], failed=True)
    kept = 3 / 7  # of seven steps
    assert sums(read_ledger(run), 2) == pytest.approx(
        {"data": 4 * kept, "compute": 106 * kept, "discarded": 110 * (1 - kept), "idle": 120 + unused, "down": 10},
        abs=1e-3,
    )


def write_starts(run: RunDir, *starts: dict[str, Any], **more: Any) -> None:
    moved = [
        {key: BEGAN + value if key in ("began", "ended") else value for key, value in start.items()} for start in starts
    ]
    numbered = {str(number): start for number, start in enumerate(moved)}
    write_json(run.path / "job.json", {"job_id": "41", "starts": numbered, **more})


def test_starts_of_a_job_are_allocated_from_begin_to_end(run: RunDir) -> None:
    """Preempted once; the second start fails before its first attempt, the third continues the run."""
    write_starts(
        run,
        {"nodes": "n[1-2]", "queue_s": 7.0, "began": 0, "ended": 50, "cores": 5},
        {"nodes": "n[3-4]", "queue_s": 8.0, "began": 100, "ended": 110, "cores": 6, "energy_j": 3.6e6},
        {"nodes": "n[1-2]", "queue_s": 9.0, "began": 200, "ended": 260, "cores": 5, "energy_j": 7.2e6},
    )
    add_attempt(run, 5, 40, [account(5, 40)] * 4, supervised=3)
    add_attempt(run, 205, 225, [account(205, 225, closed=False)] * 4, supervised=203, failed=True)
    add_attempt(run, 235, 255, [account(235, 255)] * 4, supervised=230)
    ledger = read_ledger(run)
    assert ledger.allocated_s == pytest.approx(50 * 5 + 10 * 6 + 60 * 5)
    assert sum(map(allocated_s, allocations_of(run))) == pytest.approx(ledger.allocated_s)
    assert sums(ledger, 0) == {
        "start": 5 * 5 + 10 * 6 + 5 * 5,
        "finish": 10 * 5 + 5 * 5,  # after attempts that ended as they should
        "down": 10 * 5,
    }
    assert ledger.queue_s == 24.0
    assert ledger.energy_kwh == pytest.approx(3.0)
    queued = [(i.began - BEGAN, i.ended - BEGAN) for i in ledger.intervals if i.cause == "queue"]
    assert queued == [(-7, 0), (92, 100), (191, 200)]


def add_energy(run: RunDir, attempt: int, rank: int, joules: dict[str, float]) -> None:
    path = run.attempt(attempt).beat(rank)
    write_json(path, {**(read_json(path) or {}), "energy_j": joules})


def test_energy_of_ranks_counts_once_for_each_sensor_and_attempt(run: RunDir) -> None:
    for number, began in ((1, 1), (2, 101)):
        add_attempt(run, began, began + 80, [account(began, began + 80)] * 4)
        add_energy(run, number, 0, {"intel-rapl:0 package-0": 1.2e6, "GPU-a": 3.6e6})
        add_energy(run, number, 1, {"GPU-a": 3.5e6})  # shares the GPU of rank 0
        add_energy(run, number, 2, {"intel-rapl:0 package-0": 2.4e6})  # another node
    ledger = read_ledger(run)
    assert ledger.energy_kwh == pytest.approx(4.0)
    assert ledger.energy_of == "GPUs and CPUs"
    write_starts(run, {"nodes": "n[1-2]", "began": 0, "ended": 200, "cores": 5, "energy_j": 7.2e6})
    ledger = read_ledger(run)
    assert ledger.energy_kwh == pytest.approx(2.0)
    assert ledger.energy_of == "nodes", "Slurm's energy comes first"


def test_start_ends_with_its_allocation_or_last_attempt(run: RunDir) -> None:
    write_starts(run, {"began": 0, "queue_s": 2.0}, {"nodes": "n1"}, earlier={"40": None, "39": {"0": {"began": "x"}}})
    add_attempt(run, 5, 33, [account(5, 33)] * 4, supervised=3)
    assert read_ledger(run).allocated_s == pytest.approx(33 * 5)
    write_starts(run, {"began": 0, "ended": 30, "cores": 5})
    assert read_ledger(run).allocated_s == pytest.approx(150.0)


def test_reached_step_is_the_largest_of_ranks_and_attempts(run: RunDir) -> None:
    add_attempt(run, 1, 11, [account(1, 11)] * 2)
    assert reached_step(run.attempt(1)) == 7
    write_json(run.attempt(1).beat(1), {"time": 1.0, "step": 12, "total_steps": 20, "metrics": {}})
    assert reached_step(run.attempt(1)) == 12
    for rank, step in ((0, 14), (1, None)):
        write_json(run.attempt(1).outcome(rank), {"outcome": "failed", "step": step})
    assert reached_step(run.attempt(1)) == 14, "the ranks that lost their peer did two steps after their last heartbeat"
    add_attempt(run, 21, 31, [account(21, 31)] * 2, reached=12)
    assert reached_step(run.attempt(2)) == 12
    write_json(run.attempt(2).beat(1), {"format": 99})
    assert reached_step(run.attempt(2)) == 12, "a heartbeat that cannot be read"


def test_damaged_shares_are_ignored(run: RunDir) -> None:
    good = {"allocated": 2, "share": 1.0, "ranks": [0]}
    bad = [{}, good | {"share": -1}, good | {"ranks": [0.5]}, good | {"ranks": None}, 7]
    nodes = {"n0": good} | {f"n{number}": raw for number, raw in enumerate(bad, start=1)}
    write_json(run.new_attempt().times, {"supervised": 1.0, "began": 2.0, "nodes": nodes})
    times = read_times(run.attempt(1))
    assert times is not None
    assert list(times.shares) == ["n0"]
