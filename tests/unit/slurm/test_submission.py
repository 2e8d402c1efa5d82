"""Submission with a fake sbatch: job id, errors, and clusters without heterogeneous jobs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from hpcdist.config.schema import ClusterConfig, Config, RoleRequest
from hpcdist.errors import UserMistake
from hpcdist.files.atomic import read_json, write_json
from hpcdist.run.folder import RunDir
from hpcdist.slurm import client
from hpcdist.slurm.submit import submission

#: All tests of this file may start processes.
pytestmark = pytest.mark.processes


def test_error_without_slurm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        UserMistake, match=r"^sbatch is not installed here: submit from a login node, or show .* --dry-run$"
    ):
        submission.estimate_start(Config())


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("allocation failure: Invalid partition", "Slurm rejects this job: Invalid partition"),
        ("sbatch: error: Bad\nsecond line", "Slurm rejects this job: Bad second line"),
    ],
)
def test_rejection_is_reported_in_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, output: str, message: str
) -> None:
    sbatch = tmp_path / "sbatch"
    sbatch.write_text(f"#!/bin/sh\nprintf '%s\\n' '{output}' >&2\nexit 1\n")
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserMistake) as caught:
        submission.estimate_start(Config(name="probe"))
    assert str(caught.value) == message


@pytest.fixture
def sbatch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """A function that sets the shell command of the fake sbatch; the fake scontrol prints a cluster name."""

    def set_command(line: str) -> None:
        scripts = {"sbatch": line, "srun": "exit 0", "scontrol": "echo 'ClusterName = here'"}
        for name, text in scripts.items():
            script = tmp_path / name
            script.write_text(f"#!/bin/sh\n{text}\n")
            script.chmod(0o755)

    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return set_command


def test_estimate_fails_after_a_timeout(sbatch: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    sbatch("exec sleep 1000")
    monkeypatch.setattr(client, "JOB_TIMEOUT_S", 0.2)
    with pytest.raises(UserMistake, match=r"^Slurm does not answer \(sbatch did not answer within 0\.2 s\): check"):
        submission.estimate_start(Config(name="probe"))


def test_job_id_of_a_submitted_run_is_recorded(sbatch: Callable[[str], None], runs_dir: Path) -> None:
    run = RunDir.create(runs_dir / "exp" / "first")
    sbatch("echo 'Submitted batch job 41'")
    assert submission.submit(Config(runs_dir=str(runs_dir)), run) == "41"
    assert run.read_state().status == "queued"
    assert read_json(run.path / "slurm.json") == {"job_id": "41", "job_name": "exp/first", "cluster": "here"}


def test_rejected_submission_does_not_change_the_run(sbatch: Callable[[str], None], runs_dir: Path) -> None:
    """A run that were queued with the id of its previous job would count as dead."""
    run = RunDir.create(runs_dir / "exp" / "first")
    state = replace(run.read_state(), status="stopped", attempt=1)
    run.write_state(state)
    write_json(run.path / "slurm.json", {"job_id": "40"})
    sbatch("echo 'sbatch: error: Batch job submission failed: Invalid qos' >&2; exit 1")
    with pytest.raises(UserMistake, match=r"^Slurm rejected the job: .*Invalid qos"):
        submission.submit(Config(runs_dir=str(runs_dir)), run)
    assert run.read_state() == state
    assert read_json(run.path / "slurm.json") == {"job_id": "40"}


def with_scontrol(folder: Path, monkeypatch: pytest.MonkeyPatch, scheduler: str) -> None:
    scontrol = folder / "scontrol"
    scontrol.write_text(f"#!/bin/sh\necho 'SchedulerType           = {scheduler}'\n")
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))


HET = Config(roles={"server": 1, "worker": 2}, cluster=ClusterConfig(roles={"worker": RoleRequest(gpus_per_node=1)}))


def test_roles_share_one_allocation_without_heterogeneous_jobs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with_scontrol(tmp_path, monkeypatch, "sched/builtin")
    settled, note = submission.resolve_het(HET)
    assert settled == replace(HET, cluster=replace(HET.cluster, het=False))
    assert note == (
        "this cluster does not support heterogeneous jobs (SchedulerType=sched/builtin): the roles share one allocation"
    )
    partitions = {"server": RoleRequest(), "worker": RoleRequest(partition="gpu")}
    with pytest.raises(UserMistake, match=r"^cluster\.roles: partition differs between roles, which needs a hetero"):
        submission.resolve_het(replace(HET, cluster=ClusterConfig(roles=partitions)))
    for config in (Config(), settled, replace(HET, cluster=replace(HET.cluster, het=True))):
        assert submission.resolve_het(config) == (config, "")


def test_config_is_unchanged_if_heterogeneous_jobs_are_supported_or_unknown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with_scontrol(tmp_path, monkeypatch, "sched/backfill")
    assert submission.resolve_het(HET) == (HET, "")
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    assert submission.resolve_het(HET) == (HET, "")
