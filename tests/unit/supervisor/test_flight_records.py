"""Records of flight recorders: pending collectives, missing calls and mismatched calls."""

from __future__ import annotations

from typing import Any

from hpcdist.supervisor.hang_node import Calls, absences, calls_of, mismatches, ranks_text


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


def calls(last: int, *pending: int, operation: str = "all_reduce [2]", group: str = "0") -> list[Calls]:
    waits = tuple((number, operation) for number in pending)
    return [Calls(backend="gloo", group=group, last=last, operation=operation, pending=waits)]


def test_calls_of_each_group() -> None:
    recorded = [
        entry(1),
        entry(2),
        entry(9, "gloo:send", is_p2p=True, done=False),
        entry(1, group="2", process_group=["2", "control"], time_created_ns=50),
        entry(3, done=False),
        entry(4, "gloo:barrier", done=False, input_sizes=[]),
    ]
    own, default = calls_of({"gloo": {"entries": recorded}})
    assert (own.text(), own.pending) == ("gloo, group control: has finished all_reduce [4×2] (1)", ())
    assert (default.last, default.operation) == (4, "barrier")
    assert default.pending == ((3, "all_reduce [4×2]"), (4, "barrier"))
    assert default.text() == "gloo, the default group: waits in all_reduce [4×2] (3)"


def test_state_of_nccl_entries_marks_pending_calls() -> None:
    started = entry(7, "nccl:all_gather", done=False, state="started")
    completed = entry(7, "nccl:all_gather", done=False, state="completed")
    assert calls_of({"nccl": {"entries": [started]}})[0].pending == ((7, "all_gather [4×2]"),)
    assert calls_of({"nccl": {"entries": [completed]}})[0].pending == ()


def test_absence_names_ranks_that_have_not_called_a_collective() -> None:
    (absence,) = absences({0: calls(8, 7, 8), 1: calls(8, 7, 8), 2: calls(6)})
    assert absence.absent == [2]
    assert absence.text == (
        "rank 2 has not called gloo all_reduce [2] (number 7 of the default group), which ranks 0-1 wait in"
    )
    (absence,) = absences({0: calls(8, 8), 1: calls(7), 2: calls(6)})
    assert absence.text == (
        "ranks 1-2 have not called gloo all_reduce [2] (number 8 of the default group), which rank 0 waits in"
    )


def test_no_absence_if_all_ranks_have_called_or_none_waits() -> None:
    assert absences({0: calls(8, 8), 1: calls(8, 8)}) == []
    assert absences({0: calls(8), 1: calls(6)}) == [], "no rank waits"
    assert absences({0: calls(8, 8), 1: calls(3, group="1")}) == [], "numbers of different groups"
    assert absences({}) == mismatches({}) == []


def test_mismatch_names_ranks_that_call_different_collectives() -> None:
    different = {0: calls(5, 5), 1: calls(5, 5), 2: calls(5, 5, operation="broadcast [2]")}
    (mismatch,) = mismatches(different)
    assert mismatch == (
        "as gloo collective number 5 of the default group ranks 0-1 call all_reduce, but rank 2 calls broadcast"
    )
    # Sizes may differ, as in an all_gather of unequal pieces.
    assert mismatches({0: calls(5, 5), 1: calls(5, 5, operation="all_reduce [3]")}) == []


def test_ranks_text_merges_ranges() -> None:
    assert ranks_text([7]) == "rank 7"
    assert ranks_text([3, 0, 1, 2, 5]) == "ranks 0-3, 5"
    assert ranks_text(range(0, 40, 2)) == "ranks 0, 2, 4, 6, 8, 10 and 14 more"
