"""Hung ranks: stack traces from their logs, and the summary that finds the rank that the others wait for."""

import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psutil
import pytest
from forked_scene import SOON_S, hung_ranks

from hpcdist.host.json_files import read_json
from hpcdist.run.folder import Attempt
from hpcdist.run.stack_frames import Frame, location_of
from hpcdist.supervisor import hang


def not_interrupted() -> bool:
    return False


class FakeRanks:
    """Ranks 0 to 7; their nodes print the result of `on_nodes`."""

    remaining: tuple[int, ...] = tuple(range(8))

    def __init__(self, on_nodes: Callable[[], str]) -> None:
        self._on_nodes = on_nodes

    def host_of(self, rank: int) -> str:
        return "n9"

    def signal(self, number: int) -> None: ...

    def wait(self, timeout_s: float) -> None:
        time.sleep(timeout_s)

    def examine(self, command: list[str], **_: object) -> str:
        return self._on_nodes()


def wait_for_state(pid: int, *states: str) -> None:
    end = time.monotonic() + SOON_S
    while (state := hang.state_of(pid)) not in states:
        assert time.monotonic() < end, f"process {pid} is {state}"
        time.sleep(0.01)


@pytest.mark.processes
def test_stacks_of_hung_ranks_are_collected(attempt: Attempt, tmp_path: Path) -> None:
    with hung_ranks(attempt, tmp_path, 4) as ranks:
        processes = hang.find_ranks(attempt.path.parent.parent, attempt.number)
        assert [process.rank for process in processes] == [0, 1, 2, 3], "ranks without their forked children"
        assert [len(hang.family(process.pid)) for process in processes] == [1, 2, 1, 1]
        assert hang.find_ranks(attempt.path.parent.parent, 2) == []
        assert hang.find_ranks(attempt.path.parent, attempt.number) == []
        summary = hang.collect(attempt, ranks, limit_s=20, interrupted=not_interrupted)
        assert ranks.remaining == [0, 1, 2, 3], "no rank was killed"
    assert summary is not None
    assert summary.suspects == (1,)
    assert summary.odd_first == (1, 0, 2, 3)
    assert summary.pending_s[0] > 3600, "since the call that the record shows"
    assert summary.pending_s[1] == 0
    assert summary.sentence.startswith("rank 1 differs from the others: in compute (worker.py:")
    assert "; ranks 0, 2-3 in wait (threading.py:" in summary.sentence
    assert summary.sentence.endswith(
        "rank 1 has not called gloo all_reduce [2] (number 7 of the default group), which ranks 0, 2-3 wait in"
    )
    text = attempt.stacks_summary.read_text()
    assert text == summary.text
    assert f"  rank 1 on {os.uname().nodename}, process {processes[1].pid}: state running" in text
    assert "; gloo, the default group: waits in all_reduce [2] (7)" in text
    assert "\nstacks of rank 1:\nThread 0x" in text
    assert text.count("in write_at_signals") == 4, "stacks of all threads"
    for rank in range(4):
        record = read_json(attempt.flight(rank)) or {}
        assert set(record["recorders"]) == {"gloo", "nccl"}
    left = {path.name for path in attempt.path.iterdir()}
    assert not [name for name in left if name.startswith("node-") or name == "stacks.log"], left


@pytest.mark.processes
def test_activity_shows_the_rank_that_computes_without_a_signal(attempt: Attempt, tmp_path: Path) -> None:
    with hung_ranks(attempt, tmp_path, 2) as ranks:
        before = after = hang.read_activities(attempt, ranks, limit_s=60, interrupted=not_interrupted)
        assert set(before) == {0, 1}
        end = time.monotonic() + 60
        while after[1].cpu_s < before[1].cpu_s + 0.5 and time.monotonic() < end:
            after = hang.read_activities(attempt, ranks, limit_s=60, interrupted=not_interrupted)
        since = {rank: one._replace(time=after[rank].time - 1.0) for rank, one in before.items()}
        assert hang.busy_ranks(since, after) == {1}
        assert hang.busy_ranks({}, after) == set(), "unknown"
        assert hang.busy_ranks({}, {0: after[0]._replace(on_gpu=True)}) == {0}
        assert all(activity.io_bytes > 0 for activity in before.values()), "the files of its imports"
    assert "Current thread" not in attempt.log(0).read_text()


def test_rank_that_reads_from_a_slow_file_system_is_busy() -> None:
    before = {rank: hang.Activity(0.0, cpu_s=0.0, on_gpu=False, io_bytes=10**9) for rank in range(2)}
    after = {
        0: hang.Activity(100.0, cpu_s=0.5, on_gpu=False, io_bytes=10**9 + 500_000_000),
        1: hang.Activity(100.0, cpu_s=0.5, on_gpu=False, io_bytes=10**9 + 5_000_000),  # logs and heartbeats
    }
    assert hang.busy_ranks(before, after) == {0}


def test_kernel_that_counts_no_bytes_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil.Process, "io_counters", Mock(side_effect=RuntimeError("/proc/1/io file was empty")))
    assert hang._io_bytes([os.getpid()]) == 0
    monkeypatch.delattr(psutil.Process, "io_counters")
    assert hang._io_bytes([os.getpid()]) == 0


@pytest.mark.processes
def test_stopped_rank_has_a_state_without_a_stack(
    attempt: Attempt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hung_ranks(attempt, tmp_path, 3) as ranks:
        processes = hang.find_ranks(attempt.path.parent.parent, attempt.number)
        os.kill(processes[2].pid, signal.SIGSTOP)
        wait_for_state(processes[2].pid, psutil.STATUS_STOPPED)
        with attempt.log(2).open("a") as log:
            log.write('Thread 0x1 (most recent call first):\n  File "/me/x.py", line 3 in earlier\n')
        os.utime(attempt.log(2), (0, 0))  # the stacks of an earlier examination
        summary = hang.collect(attempt, ranks, limit_s=20, interrupted=not_interrupted)
        # A stopped rank cannot print its stacks, so this must return without a wait for them.
        monkeypatch.setattr(hang, "PRINT_S", 10_000.0)
        snapshots = hang.take_snapshots(processes, attempt, "n1", time.monotonic() + 10_000)
        assert [snapshot.state for snapshot in snapshots] == ["sleeping", "running", "stopped"]
    assert summary is not None
    assert summary.suspects == (2,)
    assert summary.sentence.startswith("rank 2 differs from the others: state stopped; ")
    assert "\nstacks of rank 2:\nnone could be read\n" in summary.text
    assert not attempt.flight(2).exists()


def test_details_of_at_most_max_ranks_are_kept_suspects_first(
    attempt: Attempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The summary covers all ranks."""

    def answer() -> str:
        for node in ("n0", "n1"):
            ranks = [rank for rank in range(6) if f"n{rank // 3}" == node]
            found = [asdict(snapshot(rank, OTHER if rank == 4 else WAITS)) for rank in ranks]
            attempt.node_stacks(node).write_text(json.dumps({"ranks": found}))
            for rank in ranks:
                attempt.flight(rank).write_text("{}")
        return ""

    monkeypatch.setattr(hang, "MAX_RANKS", 3)
    monkeypatch.setattr(hang, "MAX_STACKS", 2)
    silent = FakeRanks(lambda: "srun: error\n")
    assert hang.collect(attempt, silent, limit_s=5, interrupted=not_interrupted) is None  # type: ignore[arg-type]
    assert (attempt.path / "stacks.log").read_text() == "srun: error\n", "the stacks are in the logs of the ranks"
    (attempt.path / "stacks.log").unlink()
    summary = hang.collect(attempt, FakeRanks(answer), limit_s=5, interrupted=not_interrupted)  # type: ignore[arg-type]
    assert summary is not None
    assert (summary.suspects, summary.odd_first) == ((4,), (4, 0, 1, 2, 3, 5))
    assert "no snapshot of ranks 6-7 (n9)" in summary.sentence
    assert summary.text.index("stacks of rank 4:") < summary.text.index("stacks of rank 0:")
    assert "stacks of rank 1:" not in summary.text, "they are in its log"
    assert [rank for rank in range(6) if attempt.flight(rank).exists()] == [0, 1, 4]


# --- Summary of a hang: groups of ranks by location, suspects, and its text.


WAITS = (
    Frame("all_reduce", "/v/lib/python3.11/site-packages/torch/c10d.py", 41),
    Frame("train", "/me/ddp.py", 190),
)
LOADS = (Frame("read", "/v/lib/python3.11/queue.py", 7), Frame("load", "/me/loading.py", 44))
OTHER = (Frame("sleep", "/me/net.py", 3),)


def snapshot(
    rank: int, frames: tuple[Frame, ...] = WAITS, *, state: str = "sleeping", calls: Sequence[hang.Calls] = ()
) -> hang.RankSnapshot:
    place: dict[str, Any] = {"rank": rank, "host": f"n{rank // 4}", "pid": 100 + rank}
    stack: dict[str, Any] = {"frames": frames, "text": "stack\n" if frames else ""}
    return hang.RankSnapshot(**place, **stack, state=state, calls=tuple(calls))


def calls(last: int, *pending: int, operation: str = "all_reduce [2]", group: str = "0") -> list[hang.Calls]:
    return [hang.Calls("gloo", group, "", last, operation, tuple((number, operation) for number in pending))]


def test_single_rank_at_another_location_is_the_suspect() -> None:
    summary = hang.summarize([snapshot(rank, LOADS if rank == 7 else WAITS) for rank in range(512)], {})
    assert summary.sentence == (
        "rank 7 differs from the others: in read (queue.py:7), called by load (loading.py:44);"
        " ranks 0-6, 8-511 in all_reduce (torch/c10d.py:41), called by train (ddp.py:190)"
    )
    assert summary.suspects == (7,)
    assert summary.odd_first[:3] == (7, 0, 1)
    assert len(summary.odd_first) == 512
    lines = summary.text.splitlines()
    assert lines[0] == summary.sentence
    assert "      1  rank 7: in read (queue.py:7), called by load (loading.py:44)" in lines
    assert "  rank 7 on n1, process 107: state sleeping" in lines
    assert f"  and {512 - hang.MAX_RANKS} more" in lines
    assert len(lines) < hang.MAX_RANKS + 4 * hang.MAX_STACKS + 20, "the table is limited"


@pytest.mark.parametrize(
    ("others", "suspects"), [({2: LOADS}, (2,)), ({2: LOADS, 3: OTHER}, ()), ({6: LOADS, 7: OTHER}, (6, 7))]
)
def test_small_minority_is_suspected(others: dict[int, tuple[Frame, ...]], suspects: tuple[int, ...]) -> None:
    snapshots = [snapshot(rank, others.get(rank, WAITS)) for rank in range(max(others) + 1)]
    summary = hang.summarize(snapshots, {})
    assert summary.suspects == suspects
    for rank, frames in others.items():
        assert frames[0].function in summary.sentence, rank


def test_rank_that_has_not_called_the_collective_is_suspected() -> None:
    snapshots = [snapshot(0, calls=calls(8, 7, 8)), snapshot(1, LOADS, calls=calls(6))]
    summary = hang.summarize(snapshots, {})
    assert summary.suspects == (1,)
    assert summary.sentence.endswith(
        "rank 1 has not called gloo all_reduce [2] (number 7 of the default group), which rank 0 waits in"
    )
    # A rank that waits in a collective of another group is no suspect.
    snapshots[1] = snapshot(1, LOADS, calls=[*calls(6), *calls(2, 2, operation="barrier", group="1")])
    assert hang.summarize(snapshots, {}).suspects == ()


# --- Parser of the stacks of faulthandler, and the location of a stack.


DUMPED = """\
Thread 0x00007fa67b0ea6c0 (most recent call first):
  File "/root/.pyenv/versions/3.11.7/lib/python3.11/threading.py", line 331 in wait

Current thread 0x00007fa736fe5b80 (most recent call first):
  File "/root/.pyenv/versions/3.11.7/lib/python3.11/threading.py", line 327 in wait
  File "/root/.pyenv/versions/3.11.7/lib/python3.11/threading.py", line 629 in wait
  File "/runs/digits/hangs/code/counting.py", line 28 in train
  File "/src/hpcdist/rank/worker.py", line 212 in _train
  File "<frozen runpy>", line 198 in _run_module_as_main
"""
#: Stack of a data loader worker, which is forked from the rank.
FORKED = """\
Current thread 0x00007fa736fe5b80 (most recent call first):
  File "/v/lib/python3.11/site-packages/torch/utils/data/_utils/worker.py", line 281 in _worker_loop
  File "/root/.pyenv/versions/3.11.7/lib/python3.11/multiprocessing/process.py", line 314 in _bootstrap
  File "/runs/digits/hangs/code/counting.py", line 12 in train
"""
TEXT = "wait (threading.py:327), called by train (counting.py:28)"


@pytest.mark.parametrize(
    "log",
    [
        f"step 14\n{DUMPED}{FORKED}WARNING: unrelated line\n",
        DUMPED.replace("line 28", "line 1") + "step 15\n" + FORKED + DUMPED,
    ],
    ids=["one dump", "two dumps"],
)
def test_last_dump_of_the_rank_itself_is_used(log: str) -> None:
    frames, text = hang.parse_faulthandler(log)
    assert (location_of(frames), text) == (TEXT, DUMPED), "all threads, without other lines of the log"


# --- Records of flight recorders: pending collectives, missing calls and mismatched calls.


def entry(
    number: int, name: str = "gloo:all_reduce", *, done: bool = True, group: str = "0", **more: Any
) -> dict[str, Any]:
    """Return an entry as written by torch 2.15 for gloo, without unused keys."""
    return {
        "collective_seq_id": number,
        "input_sizes": [[4, 2]],
        "is_p2p": False,
        "process_group": [group, "default_pg" if group == "0" else "undefined"],
        "profiling_name": name,
        "retired": done,
        "state": "scheduled",
        "time_created_ns": 100 * number,
        **more,
    }  # fmt: skip


def test_calls_of_each_group() -> None:
    recorded = [
        entry(1),
        entry(2),
        entry(9, "gloo:send", is_p2p=True, done=False),
        entry(1, group="2", process_group=["2", "control"], time_created_ns=50),
        entry(3, done=False),
        entry(4, "gloo:barrier", done=False, input_sizes=[]),
    ]
    own, default = hang.calls_of({"gloo": {"entries": recorded}})
    assert (own.text(), own.pending) == ("gloo, group control: has finished all_reduce [4×2] (1)", ())
    assert (default.last, default.operation) == (4, "barrier")
    assert default.pending == ((3, "all_reduce [4×2]"), (4, "barrier"))
    assert default.text() == "gloo, the default group: waits in all_reduce [4×2] (3)"
    completed = entry(7, "nccl:all_gather", done=False, state="completed")
    assert hang.calls_of({"nccl": {"entries": [completed]}})[0].pending == (), "nccl does not retire its calls"


@pytest.mark.parametrize(
    ("by_rank", "absent", "text"),
    [
        ({0: calls(8, 7, 8), 1: calls(8, 7, 8), 2: calls(6)}, {2},
         "rank 2 has not called gloo all_reduce [2] (number 7 of the default group), which ranks 0-1 wait in"),
        ({0: calls(5, 5), 1: calls(5, 5), 2: calls(5, 5, operation="broadcast [2]")}, set(),
         "as gloo collective number 5 of the default group ranks 0-1 call all_reduce, but rank 2 calls broadcast"),
        ({0: calls(8), 1: calls(6)}, set(), ""),  # no rank waits
        ({0: calls(8, 8), 1: calls(3, group="1")}, set(), ""),  # numbers of different groups
        ({0: calls(5, 5), 1: calls(5, 5, operation="all_reduce [3]")}, set(), ""),  # an all_gather of unequal pieces
    ],
)  # fmt: skip
def test_collectives_of_ranks_are_compared(by_rank: dict[int, list[hang.Calls]], absent: set[int], text: str) -> None:
    assert hang.compare_calls(by_rank) == (absent, [text] if text else [])
