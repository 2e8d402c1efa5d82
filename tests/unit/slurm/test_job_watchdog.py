"""Detection of jobs that Slurm has requeued in part or not at all after the failure of their batch host."""

from __future__ import annotations

import pytest

from hpcdist.slurm.job.watchdog import has_lost_batch_host, is_partly_requeued


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        ([], False),
        (["RUNNING", "RUNNING"], False),
        (["PENDING", "RUNNING"], True),
        (["PENDING", "PENDING", "RUNNING"], True),
        (["PENDING", "PENDING"], False),
        (["RUNNING", "PENDING"], False),
        (["COMPLETING", "RUNNING"], False),
    ],
)
def test_job_is_partly_requeued_if_its_leader_is_pending_and_others_run(states: list[str], expected: bool) -> None:
    records = [{"JobId": str(index), "JobState": state} for index, state in enumerate(states)]
    assert is_partly_requeued(records) == expected


@pytest.mark.parametrize(
    ("state", "host", "nodes", "expected"),
    [
        ("RUNNING", "n1", "n[2-4]", True),
        ("RUNNING", "n1", "n[1,3-4]", False),
        ("PENDING", "n1", "n[2-4]", False),
        ("RUNNING", "n1", "(null)", False),
        ("RUNNING", None, "n[2-4]", False),
    ],
)
def test_job_has_lost_its_batch_host_if_it_runs_on_other_nodes(
    state: str, host: str | None, nodes: str, expected: bool
) -> None:
    record = {"JobState": state, "NodeList": nodes, **({"BatchHost": host} if host else {})}
    assert has_lost_batch_host([record]) == expected
    assert not has_lost_batch_host([])
