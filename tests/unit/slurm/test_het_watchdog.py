"""When the rest of a heterogeneous job is queued again."""

from __future__ import annotations

import pytest

from hpcdist.slurm.job.het_watchdog import is_partly_requeued


@pytest.mark.parametrize(
    ("states", "torn"),
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
def test_a_job_is_partly_requeued_when_its_leader_waits_and_others_run(states: list[str], torn: bool) -> None:
    assert is_partly_requeued([{"JobId": str(index), "JobState": state} for index, state in enumerate(states)]) == torn
