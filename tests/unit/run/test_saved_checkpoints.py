"""Checkpoints by their names and manifests: copies, unfinished and damaged ones are not counted."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from hpcdist.review.facts import read_checkpoints
from hpcdist.run.folder import RunDir
from hpcdist.run.records import MANIFEST_FILE, complete_checkpoints, folder_name, newest_step, resume_point, step_of
from hpcdist.slurm.job.preflight_step import newest_checkpoint_bytes


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run with checkpoints of the steps 9 and 100,000,000, and folders that are none."""
    run = RunDir.create(tmp_path / "runs" / "exp" / "first")
    for name, manifest in {
        "step-00000009": '{"step": 9}',
        "step-100000000": '{"step": 100000000}',
        "step-200000000": None,
        "step-100000000-copy-of-a-user": '{"step": 300000000}',
        ".tmp-step-00000400": '{"step": 400}',
    }.items():
        (run.checkpoints / name).mkdir(parents=True)
        if manifest is not None:
            (run.checkpoints / name / "manifest.json").write_text(manifest)
    return run


def test_names() -> None:
    assert [folder_name(step) for step in (9, 10**9)] == ["step-00000009", "step-1000000000"]
    names = ("step-00000009", "step-1000000000", "step-9", "step-00000009.old", "step-²²²²²²²²")
    assert [step_of(Path("x") / name) for name in names] == [9, 10**9, None, None, None]


def test_copies_and_unfinished_checkpoints_are_not_counted(run: RunDir) -> None:
    assert [step for step, _ in complete_checkpoints(run)] == [9, 100_000_000]
    assert newest_step(run) == 100_000_000
    assert [facts.step for facts in read_checkpoints(run)] == [9, 100_000_000]
    assert newest_checkpoint_bytes(run) == len('{"step": 100000000}')


def test_damaged_manifest_is_not_the_newest(run: RunDir) -> None:
    (run.checkpoints / "step-100000000" / "manifest.json").write_text("{")
    assert newest_step(run) == 9
    (run.checkpoints / "step-00000009" / "manifest.json").unlink()
    assert newest_step(run) is None


def test_resume_point_names_step_time_and_lost_steps(runs_dir: Path) -> None:
    run = RunDir.create(runs_dir / "exp" / "first")
    assert resume_point(run, 0) == "starting at step 0, since there is no checkpoint"
    assert resume_point(run, 1) == "starting at step 0, since there is no checkpoint, 1 step lost"
    manifest = run.checkpoints / folder_name(190) / MANIFEST_FILE
    manifest.parent.mkdir(parents=True)
    manifest.write_text("{}")
    saved = time.strftime("%H:%M:%S", time.localtime(manifest.stat().st_mtime))
    assert resume_point(run, 190) == f"resuming at step 190, checkpoint of {saved}"
    os.utime(manifest, (1e9, 1e9))
    then = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(1e9))
    assert resume_point(run, 204) == f"resuming at step 190, checkpoint of {then}, 14 steps lost"


def test_resume_point_of_a_script_names_its_newest_file(runs_dir: Path) -> None:
    run = RunDir.create(runs_dir / "exp" / "first")
    assert resume_point(run, 0, is_script=True) == "the script starts again, without a file in checkpoints/"
    (run.checkpoints / "newest.pt").touch()
    os.utime(run.checkpoints / "newest.pt", (1e9, 1e9))
    then = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(1e9))
    assert resume_point(run, 204, is_script=True) == (
        f"the script starts again (after step 204); its newest file in checkpoints/ is newest.pt of {then}"
    )
