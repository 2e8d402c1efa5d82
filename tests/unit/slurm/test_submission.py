"""Submission with a fake sbatch: job id, errors, and clusters without heterogeneous jobs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from slurm_recordings import FakeCommands

from hpcdist.config.launch_schema import ClusterConfig, RoleRequest
from hpcdist.config.schema import Config
from hpcdist.errors import UserMistake
from hpcdist.host.files import read_json, write_json
from hpcdist.run.folder import RunDir
from hpcdist.slurm import client
from hpcdist.slurm.job import submit

#: All tests of this file may start processes.
pytestmark = pytest.mark.processes


def test_error_without_slurm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        UserMistake, match=r"^sbatch is not installed here: submit from a login node, or show .* --dry-run$"
    ):
        submit.estimate_start(Config())


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
    FakeCommands(tmp_path).add("sbatch", error=f"{output}\n", code=1)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserMistake) as caught:
        submit.estimate_start(Config(name="probe"))
    assert str(caught.value) == message


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeCommands:
    """Fake Slurm commands, the first ones on PATH; tests add sbatch."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    commands = FakeCommands(tmp_path)
    commands.add("srun")
    commands.add("scontrol", "ClusterName = here\n")
    return commands


def test_estimate_fails_after_a_timeout(commands: FakeCommands, monkeypatch: pytest.MonkeyPatch) -> None:
    commands.add_script("sbatch", "exec sleep 1000")
    monkeypatch.setattr(client, "JOB_TIMEOUT_S", 0.2)
    with pytest.raises(UserMistake, match=r"^Slurm does not answer \(sbatch did not answer within 0\.2 s\): check"):
        submit.estimate_start(Config(name="probe"))


def test_job_id_of_a_submitted_run_is_recorded(commands: FakeCommands, runs_dir: Path) -> None:
    run = RunDir.create(runs_dir / "exp" / "first")
    commands.add_script("sbatch", "echo 'Submitted batch job 41'")
    assert submit.submit(Config(runs_dir=str(runs_dir)), run) == "41"
    assert run.read_state().status == "queued"
    assert read_json(run.path / "slurm.json") == {"job_id": "41", "job_name": "exp/first", "cluster": "here"}


def test_rejected_submission_does_not_change_the_run(commands: FakeCommands, runs_dir: Path) -> None:
    """A run that were queued with the id of its previous job would count as dead."""
    run = RunDir.create(runs_dir / "exp" / "first")
    state = replace(run.read_state(), status="stopped", attempt=1)
    run.write_state(state)
    write_json(run.path / "slurm.json", {"job_id": "40"})
    commands.add_script("sbatch", "echo 'sbatch: error: Batch job submission failed: Invalid qos' >&2; exit 1")
    with pytest.raises(UserMistake, match=r"^Slurm rejected the job: .*Invalid qos"):
        submit.submit(Config(runs_dir=str(runs_dir)), run)
    assert run.read_state() == state
    assert read_json(run.path / "slurm.json") == {"job_id": "40"}


def test_run_is_unchanged_if_sbatch_cannot_be_started(
    commands: FakeCommands, runs_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir.create(runs_dir / "exp" / "first")
    state = run.read_state()
    commands.add_script("sbatch", "")
    (commands.folder / "sbatch").write_text("#!/no/such/interpreter\n")
    monkeypatch.setenv("PATH", str(commands.folder))
    with pytest.raises(OSError, match="No such file"):
        submit.submit(Config(runs_dir=str(runs_dir)), run)
    assert run.read_state() == state


def with_scontrol(folder: Path, monkeypatch: pytest.MonkeyPatch, scheduler: str) -> None:
    FakeCommands(folder).add("scontrol", f"SchedulerType           = {scheduler}\n")
    monkeypatch.setenv("PATH", str(folder))


HET = Config(roles={"server": 1, "worker": 2}, cluster=ClusterConfig(roles={"worker": RoleRequest(gpus_per_node=1)}))


def test_roles_share_one_allocation_without_heterogeneous_jobs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with_scontrol(tmp_path, monkeypatch, "sched/builtin")
    settled, note = submit.resolve_het(HET)
    assert settled == replace(HET, cluster=replace(HET.cluster, het=False))
    assert note == (
        "this cluster does not support heterogeneous jobs (SchedulerType=sched/builtin): the roles share one allocation"
    )
    partitions = {"server": RoleRequest(), "worker": RoleRequest(partition="gpu")}
    with pytest.raises(UserMistake, match=r"^cluster\.roles: partition differs between roles, which needs a hetero"):
        submit.resolve_het(replace(HET, cluster=ClusterConfig(roles=partitions)))
    for config in (Config(), settled, replace(HET, cluster=replace(HET.cluster, het=True))):
        assert submit.resolve_het(config) == (config, "")


def test_config_is_unchanged_if_heterogeneous_jobs_are_supported_or_unknown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with_scontrol(tmp_path, monkeypatch, "sched/backfill")
    assert submit.resolve_het(HET) == (HET, "")
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    assert submit.resolve_het(HET) == (HET, "")
