"""Starts of all jobs of a run in `job.json`, completed from accounting."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hpcdist.host.files import read_json, write_json
from hpcdist.review.ledger import allocations_of
from hpcdist.run.folder import RunDir
from hpcdist.run.slurm_job import all_job_starts, job_starts, keep_job, update_job_starts
from hpcdist.slurm import client
from hpcdist.slurm.client import SlurmError
from hpcdist.slurm.output import AccountedStart

ONE = AccountedStart(
    name="exp/first",
    began=1000.0,
    ended=1100.0,
    queue_s=5.0,
    nodes="n[1-2]",
    cores=4,
    gpus=0,
    energy_j=None,
    state="COMPLETED",
)


class Accounting:
    """Slurm's accounting: starts by job id, and the ids that were asked for."""

    def __init__(self) -> None:
        self.starts: dict[str, list[AccountedStart]] = {}
        self.asked: list[str] = []

    def accounted_starts(self, job_id: str) -> list[AccountedStart]:
        self.asked.append(job_id)
        if job_id not in self.starts:
            raise SlurmError("sacct: error: slurmdbd: Unable to connect")
        return self.starts[job_id]


@pytest.fixture
def accounting(monkeypatch: pytest.MonkeyPatch) -> Accounting:
    found = Accounting()
    monkeypatch.setattr(client, "accounted_starts", found.accounted_starts)
    return found


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path / "runs" / "exp" / "first")


def submit(run: RunDir, job_id: str, name: str = "exp/first") -> None:
    keep_job(run)
    write_json(run.path / "slurm.json", {"job_id": job_id, "job_name": name, "cluster": "c"})


def test_jobs_before_a_resume_are_completed_from_accounting(run: RunDir, accounting: Accounting) -> None:
    submit(run, "41")
    write_json(run.path / "job.json", {"job_id": "41", "starts": {"0": {"nodes": "n[1-2]", "began": 1000.0}}})
    submit(run, "42")  # which failed before its first attempt recorded a start
    submit(run, "43")
    update_job_starts(run)
    assert [start.ended for start in all_job_starts(run)] == [None], "accounting does not answer"
    accounting.starts = {
        "41": [ONE],
        "42": [replace(ONE, began=1200.0, ended=1210.0, state="FAILED")],
        "43": [replace(ONE, began=1300.0, ended=1350.0)],
    }
    accounting.asked.clear()
    update_job_starts(run)
    assert [(start.began, start.ended, start.cores) for start in all_job_starts(run)] == [
        (1000.0, 1100.0, 4),
        (1200.0, 1210.0, 4),
        (1300.0, 1350.0, 4),
    ]
    assert sum((one.ended - one.began) * sum(one.nodes.values()) for one in allocations_of(run)) == 160 * 4
    assert [start["began"] for start in job_starts(run)] == [1300.0], "of the current job alone"
    assert sorted(accounting.asked) == ["41", "42", "43"]
    update_job_starts(run)
    assert len(accounting.asked) == 3, "complete records are not queried again"


def test_another_job_with_the_id_of_an_earlier_one_is_not_counted(run: RunDir, accounting: Accounting) -> None:
    """The ids of a cluster begin anew when it is set up again."""
    own = {"0": {"nodes": "n1", "began": 1000.0}}
    write_json(run.path / "job.json", {"job_id": "7", "starts": own, "earlier": {"5": own, "6": own}})
    write_json(run.path / "slurm.json", {"job_id": "8", "job_name": "exp/first"})
    accounting.starts = {
        "5": [replace(ONE, name="exp/other", began=5000.0, ended=5100.0)],
        "6": [replace(ONE, name="array/of-the-run", began=1001.0)],
        "7": [],
        "8": [replace(ONE, name="exp/other", began=6000.0)],
    }
    update_job_starts(run)
    found = {(start.began, start.ended) for start in all_job_starts(run)}
    assert found == {(1000.0, None), (1001.0, 1100.0)}


def test_a_job_that_may_have_started_again_is_queried_again(run: RunDir, accounting: Accounting) -> None:
    submit(run, "41")
    preempted = replace(ONE, state="PREEMPTED")
    accounting.starts = {"41": [preempted]}
    update_job_starts(run)
    accounting.starts = {"41": [preempted, replace(ONE, began=1200.0, ended=1230.0, state="NODE_FAIL")]}
    update_job_starts(run)
    accounting.starts["41"].append(replace(ONE, began=1300.0, ended=1400.0))
    update_job_starts(run)
    update_job_starts(run)
    assert [start.ended for start in all_job_starts(run)] == [1100.0, 1230.0, 1400.0]
    assert len(accounting.asked) == 3


def test_job_of_a_rejected_submission_is_counted_once(run: RunDir, accounting: Accounting) -> None:
    submit(run, "41")
    accounting.starts = {"41": [ONE]}
    keep_job(run)  # before a submission that Slurm rejects: the run still belongs to job 41
    update_job_starts(run)
    assert [start.began for start in all_job_starts(run)] == [1000.0]
    keep_job(run)
    write_json(run.path / "slurm.json", {"job_id": None})
    update_job_starts(run)
    assert [start.began for start in all_job_starts(run)] == [1000.0], "also while the next job has no id"
    assert (read_json(run.path / "job.json") or {})["names"] == {"41": "exp/first"}
