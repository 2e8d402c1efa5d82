"""Summary of a hang: groups of ranks by location, suspects, and its text."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import pytest

from hpcdist.supervisor.hang import MAX_RANKS, summarize
from hpcdist.supervisor.hang_node import Calls, Frame, ProcessState, RankSnapshot

WAITS = (Frame("all_reduce", "/v/lib/python3.11/site-packages/torch/c10d.py", 41), Frame("train", "/me/ddp.py", 190))
LOADS = (Frame("read", "/v/lib/python3.11/queue.py", 7), Frame("load", "/me/loading.py", 44))
OTHER = (Frame("sleep", "/me/net.py", 3),)


def snapshot(rank: int, frames: tuple[Frame, ...] = WAITS, *, state: str = "S", **changes: Any) -> RankSnapshot:
    facts = ProcessState(state=state, wchan="futex_wait_queue", threads=9, cpu_s=70.0, half_closed=())
    values: dict[str, Any] = {"host": f"n{rank // 4}", "pid": 100 + rank, "source": "py-spy", "text": "stack\n"}
    values |= {"cpu_s": 0.02, "over_s": 1.0}
    return RankSnapshot(rank=rank, frames=frames, process=facts, **{**values, **changes})


def calls(last: int, *pending: int) -> tuple[Calls, ...]:
    waits = tuple((number, "all_reduce [2]") for number in pending)
    return (Calls(backend="gloo", group="0", last=last, operation="all_reduce [2]", pending=waits),)


def test_single_rank_at_another_location_is_the_suspect() -> None:
    summary = summarize([snapshot(rank, LOADS if rank == 7 else WAITS) for rank in range(512)], {})
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
    assert "  rank 7 on n1: state S (sleeping), in futex_wait_queue, 9 threads, 0.02 s of CPU in 1.0 s" in lines
    assert f"  and {512 - MAX_RANKS} more" in lines
    assert len(lines) < MAX_RANKS + 20, "the table is limited"


def test_no_suspect_if_all_locations_differ() -> None:
    snapshots = [snapshot(rank, (Frame("f", f"/me/a{rank}.py", 1),)) for rank in range(500)]
    summary = summarize(snapshots, {})
    assert summary.suspects == ()
    assert summary.sentence == (
        "rank 0 in f (a0.py:1); rank 1 in f (a1.py:1); rank 2 in f (a2.py:1); and 497 more locations"
    )
    assert f"  and {500 - MAX_RANKS} more locations" in summary.text.splitlines()


def test_no_suspect_if_all_locations_are_equal() -> None:
    summary = summarize([snapshot(rank) for rank in range(4)], {})
    assert summary.sentence == "all ranks are in all_reduce (torch/c10d.py:41), called by train (ddp.py:190)"
    assert summary.suspects == ()
    assert summarize([snapshot(0)], {}).sentence.startswith("rank 0 is in all_reduce")


@pytest.mark.parametrize(
    ("others", "suspects"),
    [
        ({1: OTHER}, ()),
        ({2: LOADS}, (2,)),
        ({2: LOADS, 3: OTHER}, ()),
        ({6: LOADS, 7: OTHER}, (6, 7)),
        ({4: LOADS, 5: LOADS, 6: LOADS, 7: LOADS}, ()),
    ],
    ids=["one of two", "one of three", "two of four", "two of eight", "half of them"],
)
def test_small_minority_is_suspected(others: dict[int, tuple[Frame, ...]], suspects: tuple[int, ...]) -> None:
    snapshots = [snapshot(rank, others.get(rank, WAITS)) for rank in range(max(others) + 1)]
    summary = summarize(snapshots, {})
    assert summary.suspects == suspects
    for rank, frames in others.items():
        assert frames[0].function in summary.sentence, rank


def test_computing_ranks_are_grouped_by_lines_of_user_code() -> None:
    """Each rank is in another line of a library."""
    snapshots = [
        snapshot(
            rank, (Frame("f", "/v/lib/python3.11/a.py", rank), Frame("train", "/me/net.py", 8 + (rank == 5))), state="R"
        )
        for rank in range(6)
    ]
    summary = summarize(snapshots, {})
    assert summary.suspects == (5,)
    assert summary.sentence.startswith(
        "rank 5 differs from the others: in train (net.py:9); ranks 0-4 in train (net.py:8); "
    )
    assert summary.sentence.endswith("; ranks 0-5 get at most 2% of a core: other processes use their CPUs")
    assert "of a core" not in summarize([snapshot(0, state="R", cpu_s=0.9), snapshot(1, state="R", cpu_s=0.8)], {}).text
    assert "of a core" not in summarize([snapshot(0, state="R"), snapshot(1)], {}).text


def test_stopped_process_is_suspected_regardless_of_its_stack() -> None:
    summary = summarize([snapshot(0), snapshot(1, state="T"), snapshot(2, ())], {})
    assert summary.suspects == (1,)
    assert summary.sentence.startswith(
        "rank 1 differs from the others: state T (stopped) at all_reduce (torch/c10d.py:41), called by train"
    )
    assert "rank 2 no stack, state S (sleeping)" in summary.sentence


def test_rank_that_has_not_called_the_collective_is_suspected() -> None:
    snapshots = [snapshot(0, calls=calls(8, 7, 8)), snapshot(1, LOADS, calls=calls(6))]
    summary = summarize(snapshots, {})
    assert summary.suspects == (1,)
    assert summary.sentence.endswith(
        "rank 1 has not called gloo all_reduce [2] (number 7 of the default group), which rank 0 waits in"
    )
    # A rank that waits in a collective of another group is no suspect.
    waits_elsewhere = (
        *calls(6),
        Calls(backend="gloo", group="1", last=2, operation="barrier", pending=((2, "barrier"),)),
    )
    snapshots[1] = snapshot(1, LOADS, calls=waits_elsewhere)
    assert summarize(snapshots, {}).suspects == ()


def test_ranks_without_snapshot_are_listed() -> None:
    summary = summarize([snapshot(rank) for rank in range(4)], {rank: f"n{rank // 2}" for rank in range(4, 12)})
    assert summary.sentence.startswith("ranks 0-3 are in all_reduce (torch/c10d.py:41), ")
    assert summary.sentence.endswith("; no snapshot of ranks 4-11 (n2, n3, n4 and 1 more)")
    assert "no snapshot of ranks 4-11 (n2, n3, n4 and 1 more)" in summary.text.splitlines()


def test_snapshot_survives_json_and_its_text_is_complete() -> None:
    facts = ProcessState(state="R", wchan="", threads=3, cpu_s=1.0, half_closed=("10.88.0.3:29500",))
    found = snapshot(2, problem="py-spy could not read the process: EPERM", calls=calls(8, 7))
    found = replace(found, process=facts)
    assert RankSnapshot.from_json(json.loads(json.dumps(asdict(found)))) == found
    assert found.whole_text().splitlines() == [
        "rank 2 on n0, process 102: state R (running), 3 threads, 0.02 s of CPU in 1.0 s",
        "TCP connections closed by the peer: 10.88.0.3:29500",
        "flight recorder, gloo, the default group: waits in all_reduce [2] (7)",
        "py-spy could not read the process: EPERM",
        "stacks by py-spy:",
        "",
        "stack",
    ]
    assert "no stack could be read" in snapshot(2, (), text="").whole_text()
