"""Detection of a heterogeneous job of which only a part was requeued."""

from __future__ import annotations

import pytest

from hpcdist.slurm.job.het_watchdog import is_partly_requeued


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
