"""Snapshots of a run's job."""

from __future__ import annotations

import pytest

from hpcdist.slurm import client
from hpcdist.slurm.client import JobRef, JobSnapshot, SlurmError, take_snapshot
from hpcdist.slurm.output import JobInfo

RUNNING = JobInfo(id="1", name="timeout", state="RUNNING")


def answer(monkeypatch: pytest.MonkeyPatch, result: JobInfo | SlurmError | None) -> None:
    def query_job(job_id: str, *, history: bool) -> JobInfo | None:
        if isinstance(result, SlurmError):
            raise result
        return result

    monkeypatch.setattr(client, "query_job", query_job)


def test_job_of_another_name_is_not_the_runs_job(monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, RUNNING)
    assert take_snapshot(JobRef(id="1", name="timeout")).info is RUNNING
    assert take_snapshot(JobRef(id="1")).info is RUNNING
    other = take_snapshot(JobRef(id="1", name="digits/first"))
    assert (other.info, other.is_over) == (None, True)


def test_job_of_another_cluster_is_not_over(monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, None)
    monkeypatch.setattr(client, "cluster_name", lambda: "here")
    assert take_snapshot(JobRef(id="1", cluster="here")) == JobSnapshot()
    there = take_snapshot(JobRef(id="1", cluster="there"))
    assert (there.error, there.is_over) == ("job 1 is on cluster there, this is here", False)


@pytest.mark.parametrize("installed", [True, False])
def test_job_is_not_over_while_slurm_does_not_answer(monkeypatch: pytest.MonkeyPatch, installed: bool) -> None:
    answer(monkeypatch, SlurmError("no answer", installed=installed))
    snapshot = take_snapshot(JobRef(id="8"))
    assert snapshot == JobSnapshot(error="no answer", installed=installed)
    assert not snapshot.is_over
