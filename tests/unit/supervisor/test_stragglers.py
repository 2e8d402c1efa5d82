"""Who is told to hold the others up: the slow one, of its role, after a whole minute, and nobody on a busy machine."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

import pytest

from hpcdist.supervisor.stragglers import AGAIN_S, WINDOW_S, StragglerEvent, Stragglers

STEP_S = 1.0
#: Data time and compute of a rank at a time.
Parts = Callable[[int, float], tuple[float, float]]


class Run:
    """Ranks on nodes, and what is told of them while time goes by."""

    def __init__(self, hosts: list[str], roles: Mapping[int, str] | None = None) -> None:
        self.hosts = hosts
        self.stragglers = Stragglers(lambda rank: (roles or {}).get(rank, "trainer"))
        self.totals = {
            rank: dict.fromkeys(("steps", "step_s", "own_steps", "data_s", "compute_s"), 0.0)
            for rank in range(len(hosts))
        }
        self.now = 0.0
        self.told: list[tuple[float, StragglerEvent]] = []

    def go_on(self, seconds: float, parts: Parts) -> list[StragglerEvent]:
        """Train for so long; returns what is told meanwhile."""
        before = len(self.told)
        end = self.now + seconds
        while self.now < end:
            self.now += 1.0
            for rank, totals in self.totals.items():
                data_s, compute_s = parts(rank, self.now)
                totals["steps"] += 1 / STEP_S
                totals["own_steps"] += 1 / STEP_S
                totals["step_s"] += 1.0
                totals["data_s"] += data_s
                totals["compute_s"] += compute_s
                if self.stragglers.is_due(rank, self.now):
                    beat = {"host": self.hosts[rank], "timing": dict(totals)}
                    self.told += [(self.now, told) for told in self.stragglers.note(rank, beat, self.now)]
        return [told for _, told in self.told[before:]]


def slow(victim: int, *, compute: float = 0.0, data: float = 0.0) -> Parts:
    return lambda rank, now: (0.1 + data, 0.3 + compute) if rank == victim else (0.1, 0.3)


def even(rank: int, now: float) -> tuple[float, float]:
    return 0.1, 0.3


NODES = ["n1", "n2", "n3", "n4"]


def test_the_slow_node_is_named_with_the_part_that_is_slow_and_what_to_look_at() -> None:
    run = Run(NODES)
    assert run.go_on(60, slow(2, compute=0.14)) == [], "not for a whole minute"
    (told,) = run.go_on(20, slow(2, compute=0.14))
    assert told.text == (
        "n3 is 35 % slower than the median node (compute 0.44 s against 0.30 s a step, data alike) over the last"
        " minute, and the others wait for it: look on n3 for other processes (`top`) and slow clocks (`nvidia-smi -q -d"
        " PERFORMANCE`); `cluster.exclude=n3` leaves it out"
    )
    assert (told.event, told.host, told.rank, told.role) == ("slow", "n3", 2, "trainer")


def test_slow_data_are_told_from_slow_compute() -> None:
    (told,) = Run(NODES).go_on(80, slow(0, data=0.1))
    assert "n1 is 25 % slower" in told.text
    assert "(data 0.20 s against 0.10 s a step, compute alike)" in told.text
    assert "look on n1 how fast its data are read" in told.text


def test_both_parts_are_named_where_both_are_slow() -> None:
    (told,) = Run(NODES).go_on(80, slow(0, data=0.05, compute=0.06))
    assert "(data 0.15 s against 0.10 s a step, compute 0.36 s against 0.30 s a step)" in told.text


def test_short_steps_are_told_in_milliseconds() -> None:
    (told,) = Run(NODES).go_on(80, lambda rank, now: (0.01, 0.08 if rank == 0 else 0.0204))
    assert "(compute 80.0 ms against 20.4 ms a step, data alike)" in told.text


def test_of_two_the_other_one_is_the_measure() -> None:
    (told,) = Run(["n1", "n2"]).go_on(80, slow(1, compute=0.1))
    assert told.text.startswith("n2 is 25 % slower than the other node (compute 0.40 s against 0.30 s")


def test_on_one_machine_ranks_are_compared() -> None:
    (told,) = Run(["box"] * 4).go_on(80, slow(3, compute=0.1))
    assert told.text.startswith("rank 3 (on box) is 25 % slower than the median rank (compute 0.40 s against 0.30 s")
    assert "cluster.exclude" not in told.text


def test_a_node_is_as_slow_as_its_slowest_rank() -> None:
    (told,) = Run(["n1"] * 4 + ["n2"] * 4 + ["n3"] * 4).go_on(80, slow(6, compute=0.1))
    assert (told.name, told.rank, told.others) == ("n2", 6, "the median node")


def test_roles_are_not_compared_with_each_other() -> None:
    roles = {0: "agent", 1: "observer", 2: "observer", 3: "observer"}
    run = Run(NODES, roles)
    assert run.go_on(80, lambda rank, now: (0.0, 0.9) if rank == 0 else (0.0, 0.3)) == []
    (told,) = run.go_on(80, lambda rank, now: (0.0, 0.9) if rank in (0, 3) else (0.0, 0.3))
    assert (told.name, told.role) == ("n4", "observer")


def test_less_than_a_fifth_is_nothing_to_tell() -> None:
    assert Run(NODES).go_on(200, slow(2, compute=0.07)) == []


def test_a_fifth_of_next_to_nothing_is_nothing_to_tell() -> None:
    """Where steps are spent on the exchange, it does not matter who computes a little longer."""
    assert Run(NODES).go_on(200, lambda rank, now: (0.0, 0.15 if rank == 2 else 0.11)) == []


def test_work_without_steps_counts_by_its_share_of_the_time() -> None:
    """Observers whose rollouts take a fiftieth of the time that the agent learns hold up nobody."""

    def told(own_s: float, slow_s: float) -> list[StragglerEvent]:
        run = Run(NODES)
        found = []
        for now in range(0, 200, 10):
            for rank in range(4):
                each = slow_s if rank == 2 else own_s
                timing = {"steps": 0, "step_s": 0, "own_steps": now + 1, "data_s": 0, "compute_s": each * (now + 1)}
                found += run.stragglers.note(rank, {"host": NODES[rank], "timing": timing}, float(now))
        return found

    assert told(0.02, 0.04) == []
    assert [one.name for one in told(0.2, 0.4)] == ["n3"]


def test_one_window_in_which_it_is_not_slow_begins_the_minute_anew() -> None:
    run = Run(NODES)
    parts = slow(2, compute=0.2)
    assert run.go_on(50, parts) == []
    assert run.go_on(2 * WINDOW_S, even) == []
    assert run.go_on(50, parts) == []
    assert len(run.go_on(30, parts)) == 1


@pytest.mark.parametrize("seed", range(5))
def test_a_busy_machine_gives_no_alarm(seed: int) -> None:
    """Each node is up to three times as slow for seconds, and in its turn for half a minute."""
    uneven = random.Random(seed)

    def parts(rank: int, now: float) -> tuple[float, float]:
        is_turn = int(now // 30) % 4 == rank
        return 0.1 * uneven.uniform(0, 3), (0.5 if is_turn else 0.3) * uneven.uniform(0.5, 1.5)

    assert Run(NODES).go_on(1200, parts) == []


def test_it_is_told_again_after_ten_minutes_or_when_it_is_twice_as_bad_and_when_it_is_over() -> None:
    run = Run(NODES)
    run.go_on(80, slow(2, compute=0.1))
    assert run.go_on(AGAIN_S - 100, slow(2, compute=0.12)) == []
    (again,) = run.go_on(120, slow(2, compute=0.12))
    assert "30 %" in again.text
    worse = run.go_on(120, slow(2, compute=0.4))
    assert [told.event for told in worse] == ["slow"]
    assert run.go_on(50, even) == []
    (over,) = run.go_on(30, even)
    assert over.text == "n3 is as fast as the median node again"
    assert run.go_on(600, even) == []


def test_windows_in_which_nobody_does_a_step_are_not_judged() -> None:
    """An evaluation of two minutes does not count as a minute of equal nodes, nor of unequal ones."""
    run = Run(NODES)
    run.go_on(50, slow(2, compute=0.2))
    totals = {rank: dict(values) for rank, values in run.totals.items()}
    for second in range(120):
        for rank in range(4):
            if run.stragglers.is_due(rank, run.now + second):
                assert run.stragglers.note(rank, {"host": NODES[rank], "timing": totals[rank]}, run.now + second) == []
    run.now += 120
    assert [told.name for told in run.go_on(15, slow(2, compute=0.2))] == ["n3"]


@pytest.mark.parametrize("beat", [{"host": "n1"}, {"host": "n1", "timing": {}}])
def test_ranks_that_tell_nothing_are_left_out(beat: dict[str, object]) -> None:
    run = Run(["n1", "n2"])
    for now in range(0, 200, 10):
        assert run.stragglers.note(0, beat, now) == []
    assert run.stragglers.is_due(0, 195) is False
    assert run.stragglers.is_due(0, 200) is True


def test_one_rank_has_nobody_to_be_compared_with() -> None:
    assert Run(["n1"]).go_on(200, slow(0, compute=1)) == []
