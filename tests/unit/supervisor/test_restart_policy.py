"""Tables of the restart policy: first failure of an attempt, suspected node."""

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from hpcdist.host.cgroups import MemoryKill, MemoryScope
from hpcdist.supervisor.progress import StragglerEvent, Stragglers
from hpcdist.supervisor.restart_policy import Failure, first_failure, killed_beside, late_end, suspect

DONE: dict[str, Any] = {"outcome": "done"}
LEFT = "ended with exit status 0 before the other ranks"


def failed(error: str = "ValueError: nan", *, rank: int = 0, step: int | None = 7, **changes: Any) -> dict[str, Any]:
    outcome = {"outcome": "failed", "rank": rank, "host": f"n{rank}", "step": step, "error": error}
    return outcome | {"peer_lost": False, "traceback": ["Traceback\n", f"{error}\n"]} | changes


def peer_lost(rank: int) -> dict[str, Any]:
    return failed("RuntimeError: Connection closed by peer", rank=rank, peer_lost=True)


@pytest.mark.parametrize(
    ("exits", "outcomes", "expected"),
    [
        ({0: 0, 1: 0}, {0: DONE}, None),
        # The failure of one rank, and its peers, in any order of exits.
        ({0: 1, 1: 1}, {0: peer_lost(0), 1: failed(rank=1)}, ("error", 1, "n1", 7, "ValueError: nan")),
        ({2: 1, 1: 1, 0: 0}, {1: failed(rank=1), 2: failed("OSError: x", rank=2)}, ("error", 2, "n2", 7, "OSError: x")),
        # A killed rank has no outcome, and its peers report first.
        ({0: 1, 2: 1, 1: -9}, {0: peer_lost(0), 2: peer_lost(2)}, ("killed", 1, "here", 31, "was killed by SIGKILL")),
        ({1: -40, 0: 0}, {0: DONE}, ("killed", 1, "here", 31, "was killed by signal 40")),
        # Exits without an outcome.
        ({0: 0, 1: 3}, {0: DONE}, ("vanished", 1, "here", 31, "exited with code 3 without a report")),
        # A rank that left the others: by os._exit(0), or by a return from the trainer.
        ({1: 0, 0: 1}, {0: peer_lost(0)}, ("vanished", 1, "here", 31, LEFT)),
        ({0: 0, 1: 1}, {0: DONE | {"step": 5}, 1: peer_lost(1)}, ("vanished", 0, "here", 5, LEFT)),
        # Slurm reports ranks of unknown end last, as successful.
        ({0: 1, 1: 0}, {0: peer_lost(0)}, ("error", 0, "n0", 7, peer_lost(0)["error"])),
        # A rank that has reported its failure and is still ending.
        ({0: 1}, {0: peer_lost(0), 1: failed(rank=1)}, ("error", 1, "n1", 7, "ValueError: nan")),
        # Only ranks that lost a peer.
        ({1: 1, 0: 1}, {0: peer_lost(0), 1: peer_lost(1)}, ("error", 1, "n1", 7, peer_lost(1)["error"])),
        # A user error.
        ({0: 2, 1: 2}, {0: failed("no GPU", outcome="rejected"), 1: failed("no GPU", rank=1, outcome="rejected")},
         ("rejected", 0, "n0", 7, "no GPU")),
    ],
)  # fmt: skip
def test_first_failure_is_the_cause_of_the_others(
    exits: dict[int, int], outcomes: dict[int, dict[str, Any]], expected: tuple[Any, ...] | None
) -> None:
    found = first_failure(exits, outcomes, lambda rank: 30 + rank, lambda rank: "here")
    values = None if found is None else (found.kind, found.rank, found.host, found.step, found.error)
    assert values == expected


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        ("ValueError: nan\nadvice of torch", "ValueError: nan"),
        ("KeyError: ", "KeyError: "),
        # Of `mp.spawn`, whose message is the traceback of a child process.
        (
            "ProcessRaisedException: \n\n-- Process 1 terminated with the following error:\nTraceback (most recent"
            " call last):\n  File ...\nDistNetworkError: name: EADDRINUSE\n",
            "ProcessRaisedException: DistNetworkError: name: EADDRINUSE",
        ),
    ],
)
def test_sentence_on_an_error_of_several_lines(error: str, shown: str) -> None:
    found = first_failure({0: 1}, {0: failed(error)}, lambda rank: None, lambda rank: "n0")
    assert found is not None
    assert found.sentence() == f"rank 0 on n0 failed with {shown} after step 7"


@pytest.mark.parametrize(
    ("changes", "is_of_code"),
    [
        ({}, True),
        ({"error": "CUDA out of memory"}, True),
        ({"traceback": []}, False),  # an error of hpcdist
        ({"peer_lost": True}, False),
        ({"outcome": "rejected"}, False),
        ({"error": "RuntimeError: [/gloo] Timed out waiting 3000ms for recv operation to complete"}, False),
        ({"error": "AcceleratorError: CUDA error: CUDA-capable device(s) is/are busy or unavailable"}, False),
        ({"error": "DistNetworkError: name: EADDRINUSE"}, False),  # each attempt has another MASTER_PORT
    ],
)
def test_exception_of_the_code_is_no_fault_of_node_or_network(changes: dict[str, Any], is_of_code: bool) -> None:
    found = first_failure({0: 1}, {0: failed(**changes)}, lambda rank: None, lambda rank: "n0")
    assert found is not None
    assert found.is_of_code is is_of_code


def test_exit_code_of_a_launcher_is_not_reported_as_the_ranks() -> None:
    why = "slurmstepd: error: execve(): python3: No such file or directory (srun: error: n1: task 1: Exited with 2)"
    found = first_failure({1: 2, 0: 1}, {0: peer_lost(0)}, lambda rank: 31, lambda rank: "n1", unstarted={1: why})
    assert found is not None
    assert (found.kind, found.sentence()) == ("not_started", f"rank 1 on n1 was not started: {why}")


def memory_kill(scope: MemoryScope = "step", count: int = 1) -> MemoryKill:
    return MemoryKill(count=count, scope=scope, limit_bytes=300 * 2**20)


@pytest.mark.parametrize(
    ("scope", "reason"),
    [
        ("step", "with a limit of 300 MiB for the Slurm step"),
        ("job", "with a limit of 300 MiB for the Slurm job"),
        ("container", "with a limit of 300 MiB for the container"),
        ("group", "with a limit of 300 MiB for the control group"),
        ("machine", "since all 300 MiB of the machine were in use"),
    ],
)
def test_rank_killed_for_memory_names_the_limit_and_no_node(scope: MemoryScope, reason: str) -> None:
    exits, outcomes, kills = {1: -9, 0: 1}, {0: peer_lost(0)}, {0: memory_kill(scope), 1: memory_kill(scope)}
    found = first_failure(exits, outcomes, lambda rank: 31, lambda rank: "n1", memory_kills=kills)
    assert found is not None
    assert killed_beside(exits, kills, lambda rank: "n1", in_job=True) == "", "the killed process is the rank"
    sentence = f"rank 1 on n1 was killed by the kernel: out of memory, {reason}, last heartbeat at step 31"
    assert (found.kind, found.sentence()) == ("out_of_memory", sentence)
    assert suspect([found, found]) is None
    killed = first_failure(exits, outcomes, lambda rank: 31, lambda rank: "n1")
    assert suspect([killed, killed]) == "n1", "the control, without a limit"


def test_processes_killed_for_memory_beside_the_ranks() -> None:
    limit = "out of memory, with a limit of 300 MiB for the Slurm step"

    def clause(exits: dict[int, int], kills: dict[int, MemoryKill], *, in_job: bool = True) -> str:
        return killed_beside(exits, kills, lambda rank: f"n{rank // 2}", in_job=in_job)

    assert clause({0: 0}, {}) == ""
    assert clause({2: 0, 0: 1}, {2: memory_kill()}) == f"the kernel killed a child process of rank 2 on n1: {limit}"
    several = {1: memory_kill(count=3), 0: memory_kill(count=3)}
    assert clause({0: 0, 1: 1}, several) == f"the kernel killed 3 child processes of the ranks on n0: {limit}"
    on_machine = clause({0: 0}, {0: memory_kill("group")}, in_job=False)
    assert on_machine.startswith("the kernel killed a process beside rank 0 on n0: out of memory"), "perhaps another's"


@pytest.mark.parametrize(
    ("exits", "outcomes", "error"),
    [
        ({1: -15, 0: 1}, {0: peer_lost(0)}, None),
        ({1: 0, 0: 1}, {0: peer_lost(0), 1: {"outcome": "stopped"}}, None),
        ({1: -15, 0: 1}, {0: failed("OSError: disk full")}, "OSError: disk full"),
        ({1: -15, 0: -9}, {}, "was killed by SIGKILL"),
    ],
)
def test_script_that_sigterm_ends_has_not_failed(
    exits: dict[int, int], outcomes: dict[int, dict[str, Any]], error: str | None
) -> None:
    found = first_failure(exits, outcomes, lambda rank: None, lambda rank: "here", sent_sigterm=True)
    assert (None if found is None else found.error) == error


# --- broken nodes


def on(host: str, error: str = "device lost", *, only_there: bool = True, step: int = 7) -> Failure:
    traceback = ("Traceback\n",)
    return Failure(kind="error", rank=0, host=host, step=step, error=error, traceback=traceback, only_there=only_there)


@pytest.mark.parametrize(
    ("history", "host"),
    [
        ([on("n2")], None),
        ([on("n2", step=3), on("n2", "other", step=9)], "n2"),
        ([on("n1"), on("n2")], None),
        # A stopped attempt, or one without a record, in between.
        ([on("n2"), None, on("n2")], None),
        # Ranks on other nodes report failures as well.
        ([on("n2"), on("n2", only_there=False)], None),
        ([on("n2"), replace(on("n2"), kind="hung", traceback=())], None),
        ([on("n2"), replace(on("n2"), kind="killed", traceback=())], "n2"),
        ([replace(on(""), kind="not_started", traceback=())] * 2, None),
        # A failure without traceback, such as a full disk.
        ([on("n2"), replace(on("n2"), traceback=())], None),
        # The same failure on another node: the code is broken.
        ([on("n1"), on("n1"), on("n2"), on("n2")], None),
        ([on("n1", "first"), on("n1", "first"), on("n2"), on("n2")], "n2"),
    ],
)
def test_node_with_repeated_failures_is_suspected(history: list[Failure | None], host: str | None) -> None:
    assert suspect(history) == host


def test_failure_is_local_unless_ranks_on_other_hosts_fail_too() -> None:
    """The sentence says how many ranks raised the error."""
    for outcome, only_there, n, end in (
        (peer_lost(1), True, 2, "7"),
        *((failed(rank=1), False, n, end) for n, end in ((2, "7; both ranks raised it"), (3, "7; 2 ranks raised it"))),
    ):
        outcomes = {0: failed(), 1: outcome}
        found = first_failure({0: 1, 1: 1}, outcomes, lambda rank: None, lambda rank: "here", num_ranks=n)
        assert found is not None
        assert (found.only_there, found.sentence().partition(" after step ")[2]) == (only_there, end)


def test_last_lines_of_a_script_do_not_tell_its_failures_apart() -> None:
    """Each start and each rank prints its own: with the time, for example."""
    outcomes = {}
    for rank in (0, 1):
        text = f"RuntimeError: train.py ended with exit status 1; its last line: 08:00:0{rank} rank {rank}: no data"
        outcomes[rank] = failed(text, rank=rank)
    first, second = (first_failure({rank: 1}, outcomes, lambda _: None, str, num_ranks=2) for rank in (0, 1))
    assert first is not None
    assert second is not None
    assert first.sentence().endswith("rank 0: no data after step 7; both ranks raised it")
    assert first.same_as(second)
    assert not first.same_as(replace(second, error=second.error.replace("status 1", "status 2")))


# --- Straggler detection with simulated step timing.


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
        " 60 s, and the others wait for it: check n3 for other processes (`top`) and slow clocks (`nvidia-smi -q -d"
        " PERFORMANCE`); `cluster.exclude=n3` leaves it out"
    )
    assert (event.event, event.host, event.rank, event.role) == ("slow", "n3", 2, "trainer")


@pytest.mark.parametrize(
    ("hosts", "parts", "rank", "text"),
    [
        (NODES, slow(0, data=0.1), 0, "check how fast n1 reads its data, and whether its data workers have free"),
        (NODES, slow(0, data=0.05, compute=0.06), 0, "(data 0.15 s against 0.10 s a step, compute 0.36 s against 0.30"),
        (NODES, lambda rank, now: (0.01, 0.0204 + 0.0596 * (not rank)), 0, "(compute 80.0 ms against 20.4 ms a step,"),
        (["n1", "n2"], slow(1, compute=0.1), 1, "n2 is 25 % slower than the other node (compute 0.40 s against 0.30"),
        (["host"] * 4, slow(3, compute=0.1), 3, "rank 3 (on host) is 25 % slower than the median rank (compute 0.40 s"),
        (["n1"] * 4 + ["n2"] * 4 + ["n3"] * 4, slow(6, data=0.1), 6, "n2 is 25 % slower than the median node"),
    ],
)  # fmt: skip
def test_event_names_place_and_slow_parts(hosts: list[str], parts: Parts, rank: int, text: str) -> None:
    (event,) = Simulation(hosts).train(80, parts)
    assert event.rank == rank
    assert text in event.text
    assert ("cluster.exclude" in event.text) == (hosts != ["host"] * 4)


def test_roles_are_not_compared_with_each_other() -> None:
    roles = {0: "agent", 1: "observer", 2: "observer", 3: "observer"}
    simulation = Simulation(NODES, roles)
    assert simulation.train(80, lambda rank, now: (0.0, 0.9) if rank == 0 else (0.0, 0.3)) == []
    (event,) = simulation.train(80, lambda rank, now: (0.0, 0.9) if rank in (0, 3) else (0.0, 0.3))
    assert (event.name, event.role) == ("n4", "observer")


@pytest.mark.parametrize(
    ("hosts", "parts"),
    [
        (NODES, slow(2, compute=0.07)),  # less than a fifth
        (NODES, lambda rank, now: (0.0, 0.15 if rank == 2 else 0.11)),  # steps consist mostly of communication
        (["n1"], slow(0, compute=1)),
    ],
)
def test_small_excess_and_single_rank_are_not_reported(hosts: list[str], parts: Parts) -> None:
    assert Simulation(hosts).train(200, parts) == []


@pytest.mark.parametrize("seed", range(2))
def test_fluctuations_on_busy_machines_are_not_reported(seed: int) -> None:
    """Each node is up to three times as slow for seconds, and one node after the other for half a minute."""
    uneven = random.Random(seed)

    def parts(rank: int, now: float) -> tuple[float, float]:
        is_turn = int(now // 30) % 4 == rank
        return 0.1 * uneven.uniform(0, 3), (0.5 if is_turn else 0.3) * uneven.uniform(0.5, 1.5)

    assert Simulation(NODES).train(1200, parts) == []


def test_straggler_is_reported_once_and_when_it_is_over() -> None:
    simulation = Simulation(NODES)
    assert [event.event for event in simulation.train(900, slow(2, compute=0.1))] == ["slow"]
    assert simulation.train(50, even) == []
    (over,) = simulation.train(630, even)
    assert over.text == "n3 is as fast as the median node again"
    assert [event.event for event in simulation.train(80, slow(2, compute=0.1))] == ["slow"]


def test_rank_that_ended_last_says_what_has_kept_it() -> None:
    late: dict[str, Any] = {"time": 160.0, "late": {"since": 100.0, "what": "thread 'upload' (u.py:3)"}}
    ended = late_end({1: 0, 0: 0}, {0: late})
    assert ended is not None
    assert (ended.since, ended.sentence) == (
        100.0,
        "the process of rank 0 did not end for 60 s: thread 'upload' (u.py:3)",
    )
    busy = late_end({0: 0}, {0: {**late, "late": {**late["late"], "busy": True}}})
    assert busy is not None
    assert (ended.is_busy, busy.is_busy) == (False, True)
    assert busy.sentence == f"{ended.sentence}, cut off at work: launch.stop_grace_s gives it more time"
    assert late_end({0: 0, 1: 0}, {0: late}) is None, "rank 1 has worked meanwhile"
    assert late_end({0: 0}, {0: {"time": 160.0}}) is None
    assert late_end({0: 0}, {0: late | {"late": {"since": "100", "what": "x"}}}) is None
    assert late_end({}, {}) is None
