"""What is checked before a submission, and how a refusal reads; nothing is submitted."""

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


def test_where_no_slurm_is_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        UserMistake, match=r"^sbatch is not installed here: submit from a login node, or show .* --dry-run$"
    ):
        submission.estimate_start(Config())


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("allocation failure: Invalid partition", "Slurm rejects this job: Invalid partition"),
        ("sbatch: error: Bad\nsecond line", "Slurm rejects this job: Bad second line"),
    ],
)
def test_a_refusal_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, said: str, told: str) -> None:
    sbatch = tmp_path / "sbatch"
    sbatch.write_text(f"#!/bin/sh\nprintf '%s\\n' '{said}' >&2\nexit 1\n")
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserMistake) as caught:
        submission.estimate_start(Config(name="probe"))
    assert str(caught.value) == told


@pytest.fixture
def sbatch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """Sets what sbatch does, a line of shell; scontrol knows the cluster's name."""

    def does(line: str) -> None:
        scripts = {"sbatch": line, "srun": "exit 0", "scontrol": "echo 'ClusterName = here'"}
        for name, text in scripts.items():
            script = tmp_path / name
            script.write_text(f"#!/bin/sh\n{text}\n")
            script.chmod(0o755)

    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return does


def test_a_slurm_that_does_not_answer_is_not_waited_for(
    sbatch: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    sbatch("exec sleep 1000")
    monkeypatch.setattr(client, "JOB_TIMEOUT_S", 0.2)
    with pytest.raises(UserMistake, match=r"^Slurm does not answer \(sbatch did not answer within 0\.2 s\): check"):
        submission.estimate_start(Config(name="probe"))


def test_a_submitted_run_knows_its_job(sbatch: Callable[[str], None], runs_dir: Path) -> None:
    run = RunDir.create(runs_dir / "exp" / "first")
    sbatch("echo 'Submitted batch job 41'")
    assert submission.submit(Config(runs_dir=str(runs_dir)), run) == "41"
    assert run.read_state().status == "queued"
    assert read_json(run.path / "slurm.json") == {"job_id": "41", "job_name": "exp/first", "cluster": "here"}


def test_a_refused_run_is_left_as_it_was(sbatch: Callable[[str], None], runs_dir: Path) -> None:
    """Above all it does not wait for the job that it was before: that one is over, and the run would count as dead."""
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


def test_where_there_are_no_heterogeneous_jobs_one_allocation_does(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
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


def test_where_there_are_some_or_nobody_knows_the_config_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with_scontrol(tmp_path, monkeypatch, "sched/backfill")
    assert submission.resolve_het(HET) == (HET, "")
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    assert submission.resolve_het(HET) == (HET, "")
