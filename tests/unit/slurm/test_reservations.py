"""Reservations that keep a job in the queue."""

from dataclasses import replace

import pytest

from hpcdist.slurm.reservations import Reservation, first_in_the_way, parse_reservations

NOW = 1795967800.0
NODES = ("n1", "n2", "n3", "n4")
#: Of Slurm 22.05, without the last words of each line.
RECORDED = """\
ReservationName=maint StartTime=1795969572 EndTime=1795973172 Duration=01:00:00 Nodes=n[1-4] NodeCnt=4 CoreCnt=32 \
Features=(null) PartitionName=(null) Flags=MAINT,SPEC_NODES,ALL_NODES TRES=cpu=32 Users=root State=INACTIVE
ReservationName=part StartTime=1795968381 EndTime=1795971981 Duration=01:00:00 Nodes=n1 NodeCnt=1 CoreCnt=8 \
Features=(null) PartitionName=(null) Flags=SPEC_NODES TRES=cpu=8 Users=root State=INACTIVE
ReservationName=seats StartTime=1795968381 EndTime=1795971981 Duration=01:00:00 Nodes=(null) NodeCnt=0 CoreCnt=0 \
Flags=ANY_NODES Licenses=matlab:2
"""
MAINT = Reservation(
    name="maint", begin=1795969572.0, end=1795973172.0, nodes=frozenset(NODES), is_maintenance=True
)  # fmt: skip
PART = Reservation(
    name="part", begin=1795968381.0, end=1795971981.0, nodes=frozenset({"n1"}), is_maintenance=False
)  # fmt: skip


def test_reservations_of_nodes_are_parsed() -> None:
    assert parse_reservations(RECORDED) == [MAINT, PART]
    assert parse_reservations("No reservations in the system\n") == []


@pytest.mark.parametrize(
    ("num_nodes", "limit_min", "expected"),
    [
        (2, 60, MAINT),
        (2, 20, None),
        (4, 20, PART),
        (4, 5, None),
    ],
)
def test_first_reservation_that_leaves_too_few_nodes_is_found(
    num_nodes: int, limit_min: int, expected: Reservation | None
) -> None:
    assert first_in_the_way([MAINT, PART], NODES, num_nodes, 60 * limit_min, NOW) == expected


def test_reservations_of_other_nodes_or_times_do_not_matter() -> None:
    others = [replace(MAINT, nodes=frozenset({"gpu1"})), replace(MAINT, begin=1.0, end=2.0)]
    assert first_in_the_way(others, NODES, 4, 3600, NOW) is None


def test_sentence_of_a_reservation() -> None:
    assert MAINT.sentence(NODES, NOW) == "maintenance maint begins in 30 min on all nodes"
    assert PART.sentence(NODES, NOW) == "reservation part begins in 10 min on 1 of 4 nodes"
    assert PART.sentence(NODES, PART.begin).startswith("reservation part lasts until 20")
    assert MAINT.minutes_before(NOW) == 25
