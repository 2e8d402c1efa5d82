"""Dependencies on runs and jobs."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcdist.errors import RunFolderError, UserMistake
from hpcdist.host.files import write_json
from hpcdist.run.folder import RunDir, State, Status
from hpcdist.slurm.job.submit import resolve


def make(runs_dir: Path, name: str, status: Status, job_id: str | None) -> None:
    run = RunDir.create(runs_dir / "exp" / name)
    run.config.write_text("")
    run.write_state(State(status=status))
    if job_id is not None:
        write_json(run.path / "slurm.json", {"job_id": job_id})


@pytest.fixture
def runs(runs_dir: Path) -> Path:
    make(runs_dir, "first", "running", "41")
    make(runs_dir, "second", "finished", "42")
    make(runs_dir, "third", "failed", "43")
    make(runs_dir, "local", "running", None)
    return runs_dir


@pytest.mark.parametrize(
    ("text", "resolved"),
    [
        ("afterok:12", "afterok:12"),
        ("afterok:12:13_4:14_*", "afterok:12:13_4:14_*"),
        ("after:12+5", "after:12+5"),
        ("after:first+5", "after:41+5"),
        ("afterok:first:exp/second,afterany:12?singleton", "afterok:41:42,afterany:12?singleton"),
        ("afterok:fir", "afterok:41"),
        ("afternotok:third", "afternotok:43"),
        ("afterany:third", "afterany:43"),
    ],
)
def test_run_names_are_replaced_by_job_ids(runs: Path, text: str, resolved: str) -> None:
    assert resolve(text, runs) == resolved


@pytest.mark.parametrize("text", ["12", "afterko:12", "afterok", "afterok:", "singleton:12", "afterok:12,", ""])
def test_malformed_dependency_is_rejected(runs: Path, text: str) -> None:
    with pytest.raises(
        UserMistake, match=r"^--dependency .* is not a dependency: write afterok:RUN or afterok:JOB \(or after, "
    ):
        resolve(text, runs)


def test_dependency_that_cannot_be_satisfied_is_rejected(runs: Path) -> None:
    with pytest.raises(
        UserMistake, match=r"^--dependency afterok:third: run third is failed: the job would never start$"
    ):
        resolve("afterok:third", runs)
    with pytest.raises(UserMistake, match=r"run second is finished: the job would never start$"):
        resolve("afternotok:second", runs)


def test_dependency_on_a_run_without_a_job_is_rejected(runs: Path) -> None:
    with pytest.raises(UserMistake, match=r"^--dependency afterok:local: run local was never submitted to Slurm$"):
        resolve("afterok:local", runs)
    with pytest.raises(RunFolderError, match=r"^no run 'nowhere' under "):
        resolve("afterok:nowhere", runs)
