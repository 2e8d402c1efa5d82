"""The supervisor in a job: its states, with a fake job, the job's log, and batch scripts of users."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hpcdist_runs import hide_torch

from hpcdist.config.cluster_schema import ClusterConfig
from hpcdist.config.loading import load_config
from hpcdist.config.schema import Config
from hpcdist.config.training_schema import TrainerConfig
from hpcdist.errors import ConfigError, HpcdistError, RunFolderError
from hpcdist.host.json_files import read_json, write_json
from hpcdist.job import batch_step, submitit_entry
from hpcdist.job.batch_step import SupervisedJob, cluster_from_job, run_in_job
from hpcdist.run.create import create_run
from hpcdist.run.folder import ENDED, RunDir, State, Status, StopCause, StopRequest
from hpcdist.run.lease import Held
from hpcdist.slurm.client import CurrentJob
from hpcdist.slurm.output import SlurmError
from hpcdist.supervisor.protocols import NodeChanges
from hpcdist.supervisor.restart_policy import Failure
from hpcdist.supervisor.watch import Allocation


class FakeJob:
    """A job that records its requeues."""

    def __init__(self, restart_count: int = 0, *, requeued: bool | None = False, ending: bool | None = False) -> None:
        self.id = "41"
        self.end_time: float | None = None
        self.restart_count = restart_count
        self.requeues: list[list[str]] = []
        self._requeued = requeued
        self._ending = ending

    def is_requeued(self) -> bool:
        if self._requeued is None:
            raise SlurmError("scontrol did not answer within 60 s")
        return self._requeued

    def is_ending(self) -> bool:
        if self._ending is None:
            raise SlurmError("scontrol did not answer within 60 s")
        return self._ending

    def requeue(self, *, exclude: Sequence[str]) -> None:
        self.requeues.append(list(exclude))


@pytest.fixture
def run(runs_dir: Path) -> RunDir:
    run = RunDir.create(runs_dir / "exp" / "first")
    run.new_attempt()
    return run


def supervised(job: FakeJob, launcher: Any = None, **cluster: Any) -> SupervisedJob:
    return SupervisedJob(ClusterConfig(**cluster), cast(CurrentJob, job), launcher)


def test_job_is_requeued_without_the_nodes_to_avoid() -> None:
    job = FakeJob(restart_count=3)
    found = supervised(job, SimpleNamespace(avoid=["n2"]))
    found.requeue()
    assert (found.restart_count, job.requeues) == (3, [["n2"]])


def test_allocation_ends_the_ranks_before_the_job() -> None:
    job = FakeJob()
    launcher = SimpleNamespace(nodes=NodeChanges())
    assert supervised(job, launcher).allocation is None
    job.end_time = 1000.0
    found = supervised(job, launcher, signal_lead_s=90)
    assert (found.allocation, found.nodes) == (Allocation(910.0, 1000.0), launcher.nodes)


def test_job_of_an_unknown_state_is_neither_ending_nor_requeued(caplog: pytest.LogCaptureFixture) -> None:
    answers = (False, None, True)
    assert [supervised(FakeJob(ending=answer)).is_ending() for answer in answers] == [False, False, True]
    assert [supervised(FakeJob(requeued=answer)).is_requeued() for answer in answers] == [False, False, True]
    assert caplog.messages == ["the state of the job is unknown: scontrol did not answer within 60 s"] * 2


def test_job_of_a_failed_run_fails_and_a_requeued_one_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(submitit_entry, "time", SimpleNamespace(sleep=slept.append))

    def supervise(status: Status) -> str:
        monkeypatch.setattr(batch_step, "supervise_job", lambda run: State(status=status, reason=f"{run} ended"))
        return submitit_entry.supervise_in_job("/runs/first")

    with pytest.raises(HpcdistError, match=r"^/runs/first ended$"):
        supervise("failed")
    assert supervise("stopped") == "stopped: /runs/first ended"
    assert slept == []
    assert supervise("queued") == "queued: /runs/first ended"
    assert slept == [submitit_entry.CREDENTIAL_S]


@pytest.mark.parametrize(
    ("status", "causes", "over"),
    [
        ("finished", (None, "preemption"), True),
        ("cancelled", ("user",), True),
        ("stopped", ("user", "config", "signal"), True),
        ("stopped", ("preemption", "time_limit", "growth", None), False),
        ("failed", (None,), False),
        ("queued", (None,), False),
        ("running", ("user",), False),
    ],
)
def test_restarted_job_continues_a_run_that_no_user_stopped(
    run: RunDir, status: Status, causes: tuple[StopCause | None, ...], over: bool
) -> None:
    """A supervisor whose job was not restarted continues unless the run has an end status."""
    first, restarted = (cast(CurrentJob, FakeJob(count)) for count in (0, 1))
    for cause in causes:
        number = run.new_attempt().number
        if cause is not None:
            run.attempt(number).send_request(StopRequest(cause=cause))
        state = State(status=status, attempt=number)
        assert batch_step._is_over(run, state, restarted) == over
        assert batch_step._is_over(run, state, first) == (status in ENDED)


def test_job_log_contains_attempts_notes_and_failures(
    run: RunDir, caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk does not keep the job from its ranks, which have been started when the job's start is recorded."""
    recorded: list[RunDir] = []

    def record_job_start(run: RunDir, _: object) -> None:
        recorded.append(run)
        raise OSError("No space left on device")

    monkeypatch.setattr(batch_step, "record_job_start", record_job_start)
    report = batch_step.JobLog(run)
    with caplog.at_level(logging.INFO, "hpcdist"):
        report.attempt(run.attempt(1), 4)
        report.attempt(run.attempt(1), 4)
        assert recorded == [run], "with the first attempt"
        report.progress({})
        run.attempt(1).path.mkdir(exist_ok=True)
        write_json(run.attempt(1).network, {"text": "0.2 ms, 9 GB/s", "warnings": ["NCCL goes over TCP"]})
        for _ in range(2):
            report.progress({"step": 1})
        report.output("not for this log")
        report.note("a note")
        failure = Failure(kind="error", rank=3, host="n2", step=5, error="ValueError: x", traceback=("line\n",))
        report.failure(failure, tmp_path)
    start = f"attempt 1: starting 4 ranks, logs in {run.attempt(1).path}"
    assert caplog.messages == [
        start,
        "the nodes and the queue time of this job are not recorded: No space left on device",
        start,
        "preflight: 0.2 ms, 9 GB/s",
        "preflight: NCCL goes over TCP",
        "a note",
        f"rank 3 on n2 failed with ValueError: x after step 5 (full log: {tmp_path})\nline\n",
    ]


@pytest.mark.processes
def test_supervisor_starts_no_ranks_without_torch(
    runs_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide_torch(monkeypatch)
    config = load_config("ddp_digits", [f"runs_dir={runs_dir}", "name=first"])
    run = create_run(config, tmp_path, launcher="slurm")
    with pytest.raises(ConfigError, match=r"^trainer\.target=ddp needs torch, .* or set container\.image or cluster"):
        batch_step._supervise(run, cast(CurrentJob, FakeJob()), cast(Held, None))


# --- a run in a job of the user's own batch script


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
    gpu_type="a100",
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
def supervised_runs(monkeypatch: pytest.MonkeyPatch) -> list[RunDir]:
    found: list[RunDir] = []

    def supervise_job(run_dir: str) -> State:
        found.append(RunDir.open(Path(run_dir)))
        return State(status="finished")

    monkeypatch.setattr(batch_step, "supervise_job", supervise_job)
    return found


@pytest.mark.processes
def test_job_creates_its_run_and_continues_it_after_a_requeue(
    config: Config, supervised_runs: list[RunDir], tmp_path: Path
) -> None:
    for _ in range(2):
        assert run_in_job(config, JOB, tmp_path).status == "finished"
        run = supervised_runs[-1]
        (run.path / "checkpoints" / "step-00000001").mkdir(exist_ok=True)
    assert supervised_runs[0].path == run.path
    assert run.name == "ddp-job41"
    assert read_json(run.path / "slurm.json") == {"job_id": "41"}
    assert load_config(run.config).cluster == replace(OF_JOB, signal_lead_s=30)
    assert (read_json(run.environment) or {})["launcher"] == "slurm"
    named = replace(config, name="mine")
    for _ in range(2):
        run_in_job(named, JOB, tmp_path)
    with pytest.raises(
        RunFolderError, match=r"/mine exists already: .* \(or leave `name` out: then each job creates a new run"
    ):
        run_in_job(named, {**JOB, "SLURM_JOB_ID": "42"}, tmp_path)
    assert [run.name for run in supervised_runs] == ["ddp-job41"] * 2 + ["mine"] * 2


@pytest.mark.processes
def test_job_refuses_tasks_of_a_script_that_starts_its_own_ranks(config: Config, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import torch.distributed as dist\nimport torch.multiprocessing as mp\n"
        "def run(rank): dist.init_process_group('gloo')\nmp.spawn(run, nprocs=2)\n"
    )
    config = replace(config, trainer=TrainerConfig(script=[str(tmp_path / "train.py")]))
    with pytest.raises(ConfigError, match=r"cluster\.tasks_per_node=\d, but train\.py starts its own ranks"):
        run_in_job(config, JOB, tmp_path)


@pytest.mark.processes
def test_flags_that_the_batch_script_lacks_are_named(
    config: Config, supervised_runs: list[RunDir], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "hpcdist")
    run_in_job(config, JOB, tmp_path)
    assert "#SBATCH" not in caplog.text
    (tmp_path / "scontrol").write_text("#!/bin/sh\necho JobId=41 Requeue=0\n")
    elastic = replace(config, cluster=ClusterConfig(nodes=2, min_nodes=1))
    run_in_job(elastic, {**JOB, "SLURM_JOB_ID": "42"}, tmp_path)
    assert "without `#SBATCH --requeue` the run saves at the time limit and ends" in caplog.text
    assert "cluster.min_nodes and cluster.spare_nodes need `#SBATCH --no-kill`" in caplog.text


@pytest.mark.processes
def test_incomplete_run_folder_of_a_killed_start_is_completed(
    config: Config, supervised_runs: list[RunDir], tmp_path: Path
) -> None:
    RunDir.create(Path(config.runs_dir) / "exp" / "ddp-job41")
    run_in_job(config, JOB, tmp_path)
    assert supervised_runs[0].config.is_file()


def test_error_outside_a_job(config: Config, supervised_runs: list[RunDir], tmp_path: Path) -> None:
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
        ({"SLURM_TASKS_PER_NODE": "1(x2)", "SLURM_GPUS_PER_NODE": "1g.5gb:7"},
         {"gpus_per_node": 7, "gpu_type": "1g.5gb"}),
        ({"SLURM_TASKS_PER_NODE": "1(x2)", "SLURM_GPUS_PER_NODE": "a100"}, {"gpus_per_node": 1, "gpu_type": "a100"}),
        ({"SLURM_TASKS_PER_NODE": "1(x2)", "SLURM_GPUS_PER_NODE": "a100:2,v100:1"}, {"gpus_per_node": 3}),
    ],
)  # fmt: skip
def test_cluster_section_is_read_from_the_job(env: dict[str, str], changes: dict[str, Any]) -> None:
    mine = ClusterConfig(signal_lead_s=30, gpu_type="h100")
    expected = replace(ClusterConfig(nodes=2, signal_lead_s=30), **changes)
    assert cluster_from_job(mine, {"SLURM_JOB_NUM_NODES": "2", **env}, None) == expected


def test_uneven_and_heterogeneous_jobs_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"^2,1 tasks per node: request the same number for each node, with `#SBATCH --ntasks-per-"
    ):
        cluster_from_job(ClusterConfig(), {"SLURM_JOB_NUM_NODES": "2", "SLURM_TASKS_PER_NODE": "2,1"}, None)
    with pytest.raises(ConfigError, match=r"^the job is heterogeneous \(`#SBATCH hetjob`\), and a run needs one alloc"):
        cluster_from_job(ClusterConfig(), JOB | {"SLURM_HET_SIZE": "2"}, 90)


def test_nodes_of_a_job_with_a_range_of_nodes() -> None:
    # After a requeue the job may have more nodes.
    ranges = (ClusterConfig(nodes=4, min_nodes=1), ClusterConfig(min_nodes=1), ClusterConfig(spare_nodes=1))
    assert [cluster_from_job(cluster, JOB, 90.0).nodes for cluster in ranges] == [4, 2, 1]
