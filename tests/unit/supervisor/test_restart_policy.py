"""Tables of the restart policy: first failure of an attempt, restart decision, suspected node."""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import Any

import pytest

from hpcdist.supervisor.restart_policy import Decision, Failure, decide, first_failure, not_started, suspect

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
        # All ranks succeeded.
        ({0: 0, 1: 0}, {0: DONE}, None),
        ({}, {}, None),
        # The failure of one rank, and its peers, in any order of exits.
        ({1: 1, 0: 1}, {0: peer_lost(0), 1: failed(rank=1)}, ("error", 1, "n1", 7, "ValueError: nan")),
        ({0: 1, 1: 1}, {0: peer_lost(0), 1: failed(rank=1)}, ("error", 1, "n1", 7, "ValueError: nan")),
        ({2: 1, 1: 1, 0: 0}, {1: failed(rank=1), 2: failed("OSError: x", rank=2)}, ("error", 2, "n2", 7, "OSError: x")),
        # A killed rank has no outcome, and its peers report first.
        (
            {0: 1, 2: 1, 1: -9},
            {0: peer_lost(0), 2: peer_lost(2)},
            ("killed", 1, "here", 31, "was killed by SIGKILL"),
        ),
        ({1: -signal.SIGSEGV, 0: 0}, {0: DONE}, ("killed", 1, "here", 31, "was killed by SIGSEGV")),
        ({1: -40, 0: 0}, {0: DONE}, ("killed", 1, "here", 31, "was killed by signal 40")),
        # Exits without an outcome.
        ({0: 0, 1: 3}, {0: DONE}, ("vanished", 1, "here", 31, "exited with code 3 without a report")),
        ({0: 1}, {0: DONE}, ("vanished", 0, "here", 30, "exited with code 1 without a report")),
        # A rank that left the others: by os._exit(0), or by a return from the trainer.
        ({1: 0, 0: 1}, {0: peer_lost(0)}, ("vanished", 1, "here", 31, LEFT)),
        ({0: 0, 1: 1}, {0: DONE | {"step": 5}, 1: peer_lost(1)}, ("vanished", 0, "here", 5, LEFT)),
        # Slurm reports ranks of unknown end last, as successful.
        ({0: 1, 1: 0}, {0: peer_lost(0)}, ("error", 0, "n0", 7, peer_lost(0)["error"])),
        # Only ranks that lost a peer.
        ({1: 1, 0: 1}, {0: peer_lost(0), 1: peer_lost(1)}, ("error", 1, "n1", 7, peer_lost(1)["error"])),
        # A user error.
        (
            {0: 2, 1: 2},
            {0: failed("no GPU", outcome="rejected"), 1: failed("no GPU", rank=1, outcome="rejected")},
            ("rejected", 0, "n0", 7, "no GPU"),
        ),
    ],
)
def test_first_failure_is_the_cause_of_the_others(
    exits: dict[int, int], outcomes: dict[int, dict[str, Any]], expected: tuple[Any, ...] | None
) -> None:
    found = first_failure(exits, outcomes, lambda rank: 30 + rank, lambda rank: "here")
    values = None if found is None else (found.kind, found.rank, found.host, found.step, found.error)
    assert values == expected


@pytest.mark.parametrize(
    ("exits", "outcomes", "error"),
    [
        ({0: -15, 1: -15}, {}, None),
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


def test_first_failure_has_the_traceback() -> None:
    found = first_failure({0: 1}, {0: failed()}, lambda rank: None, lambda rank: "here")
    assert found is not None
    assert found.traceback == ("Traceback\n", "ValueError: nan\n")


def failure(kind: Any = "error", error: str = "ValueError: nan", step: int | None = 7) -> Failure:
    return Failure(kind=kind, rank=1, host="n1", step=step, error=error)


@pytest.mark.parametrize(
    ("kind", "error", "step", "sentence"),
    [
        ("error", "ValueError: nan", 7, "rank 1 on n1 failed with ValueError: nan after step 7"),
        ("rejected", "no such model", None, "rank 1 on n1 failed with no such model"),
        ("killed", "was killed by SIGKILL", 3, "rank 1 on n1 was killed by SIGKILL after step 3 (last heartbeat)"),
        # A rank that counts no steps.
        ("killed", "was killed by SIGKILL", 0, "rank 1 on n1 was killed by SIGKILL"),
        ("hung", "made no progress", 3, "rank 1 on n1 made no progress after step 3"),
        ("vanished", "ended with exit code 3", None, "rank 1 on n1 ended with exit code 3"),
        ("not_started", "was not started at all: srun: busy", None, "rank 1 on n1 was not started at all: srun: busy"),
    ],
)
def test_sentence_of_each_kind_of_failure(kind: str, error: str, step: int | None, sentence: str) -> None:
    assert failure(kind, error, step).sentence() == sentence


def test_sentence_includes_role_and_detail() -> None:
    killed = replace(failure("killed", "was killed by SIGKILL"), role="observer:0")
    assert killed.sentence() == "rank 1 (observer:0) on n1 was killed by SIGKILL after step 7 (last heartbeat)"
    hung = failure("hung", "made no progress", 7)
    detailed = replace(hung, detail="rank 1 differs from the others")
    assert detailed.sentence() == "rank 1 on n1 made no progress after step 7; rank 1 differs from the others"
    assert detailed.same_as(hung), "the detail does not count"


def test_failure_of_ranks_that_were_not_started() -> None:
    def found(*absent: int) -> Failure | None:
        return not_started(absent, 3, "at all: srun: busy", lambda rank: f"n{rank}")

    assert found() is None
    none = Failure(kind="not_started", rank=0, host="", step=None, error="no rank was started at all: srun: busy")
    assert found(0, 1, 2) == none
    assert none.sentence() == "no rank was started at all: srun: busy"
    some = found(1, 2)
    assert some is not None
    assert (some.rank, some.host) == (1, "n1")
    assert some.sentence() == "rank 1 on n1 was not started (nor were 1 others) at all: srun: busy"


SENTENCE = "rank 1 on n1 failed with ValueError: nan after step 7"
OTHER = failure(error="OSError: disk", step=3)


@pytest.mark.parametrize(
    ("failures", "max_restarts", "stop_requested", "expected"),
    [
        ([failure()], 3, False, Decision(restart=True, reason=SENTENCE)),
        ([failure()], 1, False, Decision(restart=True, reason=SENTENCE)),
        ([OTHER, failure()], 3, False, Decision(restart=True, reason=SENTENCE)),
        # launch.max_restarts.
        ([failure()], 0, False, Decision(restart=False, reason=SENTENCE)),
        (
            [OTHER, failure()],
            1,
            False,
            Decision(restart=False, reason=f"{SENTENCE}; all launch.max_restarts=1 restarts are used up"),
        ),
        # The same failure at the same step, twice in a row.
        (
            [failure(), failure()],
            9,
            False,
            Decision(restart=False, reason=f"{SENTENCE}, twice in a row: another restart would not help"),
        ),
        ([failure(step=6), failure()], 9, False, Decision(restart=True, reason=SENTENCE)),
        ([failure("hung"), failure()], 9, False, Decision(restart=True, reason=SENTENCE)),
        ([failure(), OTHER, failure()], 9, False, Decision(restart=True, reason=SENTENCE)),
        # A user error is never retried.
        (
            [failure("rejected", "no GPU", None)],
            9,
            False,
            Decision(restart=False, reason="rank 1 on n1 failed with no GPU"),
        ),
        # Nodes that failed the preflight check are not retried.
        (
            [Failure(kind="unfit", rank=0, host="", step=None, error="preflight: n3: disk: full")],
            9,
            False,
            Decision(restart=False, reason="preflight: n3: disk: full"),
        ),
        # No restart after a stop request.
        ([failure()], 9, True, Decision(restart=False, reason=f"{SENTENCE}, while it was asked to stop")),
    ],
)
def test_restart_decision(failures: list[Failure], max_restarts: int, stop_requested: bool, expected: Decision) -> None:
    assert decide(failures, max_restarts, stop_requested=stop_requested) == expected


# --- broken nodes


def on(host: str, error: str = "device lost", *, only_there: bool = True, step: int = 7) -> Failure:
    traceback = ("Traceback\n",)
    return Failure(kind="error", rank=0, host=host, step=step, error=error, traceback=traceback, only_there=only_there)


@pytest.mark.parametrize(
    ("history", "host"),
    [
        ([], None),
        ([on("n2")], None),
        ([on("n2"), on("n2")], "n2"),
        ([on("n2", step=3), on("n2", "other", step=9)], "n2"),
        ([on("n1"), on("n2")], None),
        # A stopped attempt, or one without a record, in between.
        ([on("n2"), None, on("n2")], None),
        # Ranks on other nodes report failures as well.
        ([on("n2"), on("n2", only_there=False)], None),
        ([on("n2"), replace(on("n2"), kind="hung", traceback=())], None),
        ([on("n2"), replace(on("n2"), kind="killed", traceback=())], "n2"),
        ([on("n2"), replace(on("n2"), kind="not_started", traceback=())], "n2"),
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


def test_only_there_is_false_if_other_hosts_report_failures() -> None:
    def only_there(outcomes: dict[int, dict[str, Any]]) -> bool:
        found = first_failure(dict.fromkeys(outcomes, 1), outcomes, lambda rank: None, lambda rank: "here")
        assert found is not None
        return found.only_there

    assert only_there({0: failed(rank=0), 1: peer_lost(1)})
    assert only_there({0: failed(rank=0), 1: failed(rank=1, host="n0")})
    assert not only_there({0: failed(rank=0), 1: failed(rank=1)})
