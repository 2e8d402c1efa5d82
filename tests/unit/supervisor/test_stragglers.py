"""Straggler detection with simulated step timing."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

import pytest

from hpcdist.supervisor.stragglers import AGAIN_S, WINDOW_S, StragglerEvent, Stragglers

STEP_S = 1.0
#: Returns data time and compute time of a rank at a time.
Parts = Callable[[int, float], tuple[float, float]]


class Simulation:
    """Ranks on nodes with a simulated clock, and the events of the straggler detection."""

    def __init__(self, hosts: list[str], roles: Mapping[int, str] | None = None) -> None:
        self.hosts = hosts
        self.stragglers = Stragglers(lambda rank: (roles or {}).get(rank, "trainer"))
        self.totals = {
            rank: dict.fromkeys(("steps", "step_s", "own_steps", "data_s", "compute_s"), 0.0)
            for rank in range(len(hosts))
        }
        self.now = 0.0
        self.events: list[StragglerEvent] = []

    def train(self, seconds: float, parts: Parts) -> list[StragglerEvent]:
        """Train for some time. Returns the events during this time."""
        before = len(self.events)
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
                    self.events += self.stragglers.note(rank, beat, self.now)
        return self.events[before:]


def slow(victim: int, *, compute: float = 0.0, data: float = 0.0) -> Parts:
    return lambda rank, now: (0.1 + data, 0.3 + compute) if rank == victim else (0.1, 0.3)


def even(rank: int, now: float) -> tuple[float, float]:
    return 0.1, 0.3


NODES = ["n1", "n2", "n3", "n4"]


def test_event_names_the_node_the_slow_part_and_a_hint() -> None:
    simulation = Simulation(NODES)
    assert simulation.train(60, slow(2, compute=0.14)) == [], "less than one minute"
    (event,) = simulation.train(20, slow(2, compute=0.14))
    assert event.text == (
        "n3 is 35 % slower than the median node (compute 0.44 s against 0.30 s a step, data alike) over the last"
        " minute, and the others wait for it: check n3 for other processes (`top`) and slow clocks (`nvidia-smi -q -d"
        " PERFORMANCE`); `cluster.exclude=n3` leaves it out"
    )
    assert (event.event, event.host, event.rank, event.role) == ("slow", "n3", 2, "trainer")


def test_slow_data_loading_is_distinguished_from_slow_compute() -> None:
    (event,) = Simulation(NODES).train(80, slow(0, data=0.1))
    assert "n1 is 25 % slower" in event.text
    assert "(data 0.20 s against 0.10 s a step, compute alike)" in event.text
    assert "check how fast n1 reads its data, and whether its data workers have free cores" in event.text


def test_both_slow_parts_are_named() -> None:
    (event,) = Simulation(NODES).train(80, slow(0, data=0.05, compute=0.06))
    assert "(data 0.15 s against 0.10 s a step, compute 0.36 s against 0.30 s a step)" in event.text


def test_short_times_are_in_milliseconds() -> None:
    (event,) = Simulation(NODES).train(80, lambda rank, now: (0.01, 0.08 if rank == 0 else 0.0204))
    assert "(compute 80.0 ms against 20.4 ms a step, data alike)" in event.text


def test_two_nodes_are_compared_with_each_other() -> None:
    (event,) = Simulation(["n1", "n2"]).train(80, slow(1, compute=0.1))
    assert event.text.startswith("n2 is 25 % slower than the other node (compute 0.40 s against 0.30 s")


def test_ranks_on_one_machine_are_compared() -> None:
    (event,) = Simulation(["host"] * 4).train(80, slow(3, compute=0.1))
    assert event.text.startswith("rank 3 (on host) is 25 % slower than the median rank (compute 0.40 s against 0.30 s")
    assert "cluster.exclude" not in event.text


def test_slowest_rank_counts_for_its_node() -> None:
    (event,) = Simulation(["n1"] * 4 + ["n2"] * 4 + ["n3"] * 4).train(80, slow(6, compute=0.1))
    assert (event.name, event.rank, event.others) == ("n2", 6, "the median node")


def test_roles_are_not_compared_with_each_other() -> None:
    roles = {0: "agent", 1: "observer", 2: "observer", 3: "observer"}
    simulation = Simulation(NODES, roles)
    assert simulation.train(80, lambda rank, now: (0.0, 0.9) if rank == 0 else (0.0, 0.3)) == []
    (event,) = simulation.train(80, lambda rank, now: (0.0, 0.9) if rank in (0, 3) else (0.0, 0.3))
    assert (event.name, event.role) == ("n4", "observer")


def test_excess_below_a_fifth_is_not_reported() -> None:
    assert Simulation(NODES).train(200, slow(2, compute=0.07)) == []


def test_excess_that_is_small_compared_with_the_step_is_not_reported() -> None:
    """Steps consist mostly of communication here."""
    assert Simulation(NODES).train(200, lambda rank, now: (0.0, 0.15 if rank == 2 else 0.11)) == []


def test_work_without_steps_counts_by_its_share_of_the_time() -> None:
    """Slow rollouts do not delay an agent that learns for fifty times as long."""

    def events(own_s: float, slow_s: float) -> list[StragglerEvent]:
        simulation = Simulation(NODES)
        found = []
        for now in range(0, 200, 10):
            for rank in range(4):
                each = slow_s if rank == 2 else own_s
                timing = {"steps": 0, "step_s": 0, "own_steps": now + 1, "data_s": 0, "compute_s": each * (now + 1)}
                found += simulation.stragglers.note(rank, {"host": NODES[rank], "timing": timing}, float(now))
        return found

    assert events(0.02, 0.04) == []
    assert [event.name for event in events(0.2, 0.4)] == ["n3"]


def test_one_normal_window_restarts_the_minute() -> None:
    simulation = Simulation(NODES)
    parts = slow(2, compute=0.2)
    assert simulation.train(50, parts) == []
    assert simulation.train(2 * WINDOW_S, even) == []
    assert simulation.train(50, parts) == []
    assert len(simulation.train(30, parts)) == 1


@pytest.mark.parametrize("seed", range(5))
def test_fluctuations_on_busy_machines_are_not_reported(seed: int) -> None:
    """Each node is up to three times as slow for seconds, and one node after the other for half a minute."""
    uneven = random.Random(seed)

    def parts(rank: int, now: float) -> tuple[float, float]:
        is_turn = int(now // 30) % 4 == rank
        return 0.1 * uneven.uniform(0, 3), (0.5 if is_turn else 0.3) * uneven.uniform(0.5, 1.5)

    assert Simulation(NODES).train(1200, parts) == []


def test_straggler_is_reported_again_after_ten_minutes_when_twice_as_slow_and_when_over() -> None:
    simulation = Simulation(NODES)
    simulation.train(80, slow(2, compute=0.1))
    assert simulation.train(AGAIN_S - 100, slow(2, compute=0.12)) == []
    (again,) = simulation.train(120, slow(2, compute=0.12))
    assert "30 %" in again.text
    worse = simulation.train(120, slow(2, compute=0.4))
    assert [event.event for event in worse] == ["slow"]
    assert simulation.train(50, even) == []
    (over,) = simulation.train(30, even)
    assert over.text == "n3 is as fast as the median node again"
    assert simulation.train(600, even) == []


def test_windows_without_steps_do_not_count() -> None:
    """For example during an evaluation of two minutes."""
    simulation = Simulation(NODES)
    simulation.train(50, slow(2, compute=0.2))
    totals = {rank: dict(values) for rank, values in simulation.totals.items()}
    for second in range(120):
        for rank in range(4):
            if simulation.stragglers.is_due(rank, simulation.now + second):
                assert (
                    simulation.stragglers.note(
                        rank, {"host": NODES[rank], "timing": totals[rank]}, simulation.now + second
                    )
                    == []
                )
    simulation.now += 120
    assert [event.name for event in simulation.train(15, slow(2, compute=0.2))] == ["n3"]


@pytest.mark.parametrize("beat", [{"host": "n1"}, {"host": "n1", "timing": {}}])
def test_heartbeats_without_timing_are_ignored(beat: dict[str, object]) -> None:
    simulation = Simulation(["n1", "n2"])
    for now in range(0, 200, 10):
        assert simulation.stragglers.note(0, beat, now) == []
    assert simulation.stragglers.is_due(0, 195) is False
    assert simulation.stragglers.is_due(0, 200) is True


def test_single_rank_is_not_compared() -> None:
    assert Simulation(["n1"]).train(200, slow(0, compute=1)) == []
