"""A run in a job of the user's own batch script, with a fake scontrol and without a supervisor."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpcdist.config.launch_schema import ClusterConfig, RoleRequest
from hpcdist.config.loading import load_config
from hpcdist.config.schema import Config
from hpcdist.errors import ConfigError, RunFolderError
from hpcdist.host.files import read_json
from hpcdist.run.folder import RunDir, State
from hpcdist.slurm.job import batch_step
from hpcdist.slurm.job.batch_step import cluster_from_job, run_in_job

JOB = {
    "SLURM_JOB_ID": "41",
    "SLURM_JOB_PARTITION": "gpu",
    "SLURM_JOB_ACCOUNT": "ada",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_NTASKS_PER_NODE": "4",
    "SLURM_TASKS_PER_NODE": "4(x2)",
    "SLURM_CPUS_PER_TASK": "8",
    "SLURM_GPUS_PER_NODE": "a100:4",
    "SLURM_MEM_PER_NODE": "64000",
}
OF_JOB = ClusterConfig(
    partition="gpu",
    account="ada",
    nodes=2,
    tasks_per_node=4,
    cpus_per_task=8,
    gpus_per_node=4,
    mem="64000",
    time_limit_min=90,
)


@pytest.fixture
def config(runs_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    (tmp_path / "scontrol").write_text("#!/bin/sh\necho JobId=41 Requeue=1 Restarts=0 TimeLimit=01:30:00\n")
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    path = tmp_path / "run.yaml"
    path.write_text(f"{{experiment: exp, runs_dir: {runs_dir}, cluster: {{signal_lead_s: 30}}}}\n")
    return load_config(path)


@pytest.fixture
def supervised(monkeypatch: pytest.MonkeyPatch) -> list[RunDir]:
    found: list[RunDir] = []

    def supervise(run_dir: str) -> State:
        found.append(RunDir.open(Path(run_dir)))
        return State(status="finished")

    monkeypatch.setattr(batch_step, "supervise", supervise)
    return found


@pytest.mark.processes
def test_first_start_creates_a_run_with_the_resources_of_the_job(
    config: Config, supervised: list[RunDir], tmp_path: Path
) -> None:
    assert run_in_job(config, JOB, tmp_path).status == "finished"
    (run,) = supervised
    assert run.name == "ddp-job41"
    assert read_json(run.path / "slurm.json") == {"job_id": "41"}
    assert load_config(run.config).cluster == replace(OF_JOB, signal_lead_s=30)
    assert (read_json(run.environment) or {})["launcher"] == "slurm"


@pytest.mark.processes
@pytest.mark.parametrize("name", ["", "mine"])
def test_requeued_job_continues_its_run(config: Config, supervised: list[RunDir], tmp_path: Path, name: str) -> None:
    config = replace(config, name=name)
    run_in_job(config, JOB, tmp_path)
    (supervised[0].path / "checkpoints" / "step-00000001").mkdir()
    run_in_job(config, JOB, tmp_path)
    assert supervised[0].path == supervised[1].path
    assert (supervised[1].path / "checkpoints" / "step-00000001").is_dir()


@pytest.mark.processes
def test_run_of_another_job_is_an_error(config: Config, supervised: list[RunDir], tmp_path: Path) -> None:
    config = replace(config, name="mine")
    run_in_job(config, JOB, tmp_path)
    with pytest.raises(
        RunFolderError, match=r"/mine exists already: .* \(or leave `name` out: then each job creates a new run"
    ):
        run_in_job(config, {**JOB, "SLURM_JOB_ID": "42"}, tmp_path)
    assert len(supervised) == 1


@pytest.mark.processes
def test_incomplete_run_folder_of_a_killed_start_is_completed(
    config: Config, supervised: list[RunDir], tmp_path: Path
) -> None:
    RunDir.create(Path(config.runs_dir) / "exp" / "ddp-job41")
    run_in_job(config, JOB, tmp_path)
    assert supervised[0].config.is_file()


@pytest.mark.processes
def test_job_without_requeue_logs_a_warning(
    config: Config, supervised: list[RunDir], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_in_job(config, JOB, tmp_path)
    assert caplog.messages == []
    (tmp_path / "scontrol").write_text("#!/bin/sh\necho JobId=41 Requeue=0\n")
    run_in_job(config, JOB, tmp_path)
    (message,) = caplog.messages
    assert message.startswith(
        "Slurm will not requeue this job: without `#SBATCH --requeue` the run saves at the time limit"
    )


@pytest.mark.processes
@pytest.mark.parametrize(
    ("line", "is_warned"),
    [
        ("", True),
        ("#SBATCH --no-kill", False),
        ("#SBATCH --requeue -k", False),
        ("#SBATCH --no-kill=off", True),
        ("##SBATCH --no-kill", True),
    ],
)
def test_elastic_run_in_a_job_that_slurm_kills_with_its_nodes_logs_a_warning(
    config: Config,
    supervised: list[RunDir],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    line: str,
    is_warned: bool,
) -> None:
    (tmp_path / "script").write_text(f"#!/bin/bash\n{line}\n")
    (tmp_path / "scontrol").write_text(
        f"#!/bin/sh\n[ $1 = write ] && exec cat {tmp_path}/script\necho JobId=41 Requeue=1\n"
    )
    elastic = replace(config, cluster=ClusterConfig(nodes=2, min_nodes=1))
    run_in_job(config, JOB, tmp_path)
    run_in_job(elastic, {**JOB, "SLURM_JOB_ID": "43", "SBATCH_NO_KILL": ""}, tmp_path)
    assert caplog.messages == []
    run_in_job(elastic, {**JOB, "SLURM_JOB_ID": "42"}, tmp_path)
    assert [message.partition(" have")[0] for message in caplog.messages] == (
        ["cluster.min_nodes and cluster.spare_nodes"] if is_warned else []
    )


def test_error_outside_a_job(config: Config, supervised: list[RunDir], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^SLURM_JOB_ID is not set: .*: use `sbatch slurm/run\.sbatch CONFIG`, or "):
        run_in_job(config, {}, tmp_path)
    assert not Path(config.runs_dir).exists()


@pytest.mark.parametrize(
    ("env", "changes"),
    [
        ({"SLURM_NTASKS_PER_NODE": "2", "SLURM_TASKS_PER_NODE": "8(x2)"}, {"tasks_per_node": 2}),
        ({"SLURM_TASKS_PER_NODE": "3(x2)"}, {"tasks_per_node": 3}),
        ({"SLURM_TASKS_PER_NODE": "1(x2)", "SLURM_GPUS_ON_NODE": "2"}, {"gpus_per_node": 2}),
        ({"SLURM_TASKS_PER_NODE": "1(x2)", "SLURM_GPUS_PER_NODE": "3"}, {"gpus_per_node": 3}),
    ],
)
def test_cluster_section_is_read_from_the_job(env: dict[str, str], changes: dict[str, Any]) -> None:
    expected = replace(ClusterConfig(nodes=2, max_requeues=3), **changes)
    assert cluster_from_job(ClusterConfig(max_requeues=3), {"SLURM_JOB_NUM_NODES": "2", **env}, None) == expected


def test_nodes_with_different_numbers_of_tasks_are_rejected() -> None:
    with pytest.raises(
        ConfigError, match=r"^2,1 tasks per node: request the same number for each node, with `#SBATCH --ntasks-per-"
    ):
        cluster_from_job(ClusterConfig(), {"SLURM_JOB_NUM_NODES": "2", "SLURM_TASKS_PER_NODE": "2,1"}, None)


@pytest.mark.parametrize(("size", "het"), [("", False), ("2", True)])
def test_job_is_heterogeneous_if_the_script_requests_components(size: str, het: bool) -> None:
    cluster = ClusterConfig(roles={"server": RoleRequest(gpus_per_node=0)})
    assert cluster_from_job(cluster, JOB | {"SLURM_HET_SIZE": size}, 90).het is het


def test_job_with_a_range_of_nodes_may_have_more_nodes_after_a_requeue() -> None:
    cluster = ClusterConfig(nodes=4, min_nodes=1)
    assert cluster_from_job(cluster, JOB, 90.0).nodes == 4
    assert cluster_from_job(replace(cluster, nodes=1), JOB, 90.0).nodes == 2
    assert cluster_from_job(ClusterConfig(spare_nodes=1), JOB, 90.0).nodes == 1
