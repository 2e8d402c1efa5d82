"""The rendered batch script and rank step, compared as a whole."""

import os
import pickle
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from slurm_recordings import FakeCommands
from submitit.core.utils import DelayedSubmission

from hpcdist.config.cluster_schema import ClusterConfig, ContainerConfig, EnvironmentConfig, RoleRequest
from hpcdist.config.launch_schema import LaunchConfig
from hpcdist.config.record_schema import TrackingConfig
from hpcdist.config.schema import Config
from hpcdist.config.training_schema import TrainerConfig
from hpcdist.errors import ConfigError, HpcdistError, UserMistake
from hpcdist.host.json_files import read_json, write_json
from hpcdist.job import submit
from hpcdist.job.submit_checks import check_config
from hpcdist.run.folder import RunDir
from hpcdist.slurm import client

#: All tests of this file may start processes.
pytestmark = pytest.mark.processes

RUN = RunDir(Path("/shared/my runs/digits/first"))


def sbatch(flags: str) -> list[str]:
    return [f"#SBATCH --{flag}" for flag in flags.split()]


@pytest.mark.parametrize(
    ("cluster", "flags"),
    [
        ({"nodes": 8, "min_nodes": 2, "tasks_per_node": 3, "cpus_per_task": 2}, "mincpus=6 no-kill nodes=2-8"),
        ({"nodes": 2, "spare_nodes": 1}, "cpus-per-task=1 no-kill nodes=3 ntasks-per-node=1"),
        ({"nodes": 8, "min_nodes": 8}, "cpus-per-task=1 nodes=8 ntasks-per-node=1"),
    ],
)
def test_range_of_nodes_and_spare_nodes(cluster: dict[str, Any], flags: str) -> None:
    script, _ = submit.render(Config(cluster=ClusterConfig(**cluster)), RUN)
    of_size = ("mincpus", "no-kill", "nodes", "ntasks", "cpus")
    found = sorted(line for line in script.splitlines() if line.removeprefix("#SBATCH --").startswith(of_size))
    assert found == sbatch(flags)


def test_job_is_requeued_and_roles_share_one_allocation() -> None:
    roles = {
        "cpu": RoleRequest(nodes=2, cpus_per_task=3),
        "gpu": RoleRequest(nodes=2, tasks_per_node=2, gpus_per_node=1),
    }
    cluster = ClusterConfig(roles=roles, sbatch={"segment": "2"})
    script, step = submit.render(Config(roles={"cpu": 2, "gpu": 4}, cluster=cluster), RUN)
    flags = "cpus-per-task=3 gpus-per-node=1 nodes=4 ntasks-per-node=2 requeue segment=2"
    assert set(sbatch(flags)) <= set(script.splitlines())
    assert {"--ntasks=6", "--cpus-per-task=3", "--gpus-per-node=1", "--distribution=arbitrary"} <= set(step.split())
    script, _ = submit.render(Config(cluster=ClusterConfig(sbatch={"requeue": "expedite"})), RUN)
    assert script.count("--requeue") == script.count("#SBATCH --requeue=expedite\n") == 1


@pytest.mark.parametrize(
    ("parts", "how"),
    [
        ({}, "fork"),
        ({"launch": LaunchConfig(fork=False)}, "execute"),
        ({"trainer": TrainerConfig(script=["train.py"])}, "execute"),
    ],
)
def test_tasks_are_parents_with_the_command_of_a_rank(parts: dict[str, Any], how: str) -> None:
    cluster = ClusterConfig(environment=EnvironmentConfig(kind="venv", path="/envs/train"))
    _, step = submit.render(Config(cluster=cluster, **parts), RUN)
    words = shlex.split(step)
    python = "/envs/train/bin/python3"
    command = words[words.index(python) :]
    rank = [python, "-P", "-m", "hpcdist.rank.worker", str(RUN.path)]
    assert command == [python, "-P", "-m", "hpcdist.rank.parent", str(RUN.path), "task", how, "120", *rank]
    assert not any(word.startswith(("--input", "--output")) for word in words), "srun connects requests and reports"


@pytest.mark.parametrize(
    ("command", "code", "starts"),
    [
        ("exit 0", 0, 1),
        ("exit 1", 1, 1),
        ("kill -TERM $$", 143, 1),
        ("kill -KILL $$", 137, 4),
        ("kill -SEGV $$", 139, 4),
        ("test $(wc -l < starts) -ge 2 && exit 0; kill -KILL $$", 0, 2),
        # SIGTERM to the whole job.
        ("kill -TERM $PPID; kill -KILL $$", 137, 1),
    ],
)
def test_killed_supervisor_is_restarted(tmp_path: Path, command: str, code: int, starts: int) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho $4 >> starts\n{command}\n")
    python.chmod(0o755)
    # Set-up lines of a site may contain `set -eu`.
    script = "\n".join(["set -eu", submit._SUPERVISE % f"{python} -u -m MODULE", "supervise argument"])
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert (tmp_path / "starts").read_text() == "argument\n" * starts
    assert done.stdout.count(": restarting it\n") == starts - 1


def test_batch_step_runs_submitits_pickle_without_numpy(tmp_path: Path) -> None:
    delayed = DelayedSubmission(os.path.basename, "/a/b")
    delayed.set_timeout(1, 0)
    delayed.dump(tmp_path / "7_submitted.pkl")
    task = {"SUBMITIT_EXECUTOR": "slurm", "SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    one = {"SLURM_NTASKS": "1", "SLURM_JOB_NUM_NODES": "1", "SLURM_NODEID": "0", "SLURM_JOB_NODELIST": "n1"}
    words = ["-u", "-m", "hpcdist.job.submitit_entry", "-u", "-m", "submitit.core._submit", str(tmp_path)]
    command, env = [sys.executable, "-X", "importtime", *words], {**os.environ, **task, **one}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert pickle.loads((tmp_path / "7_0_result.pkl").read_bytes()) == ("success", "b")
    assert "submitit.core.submission" in done.stderr
    assert "numpy." not in done.stderr, "submodules: the failed import of numpy itself is listed"


def test_script_and_step_contain_no_secret() -> None:
    env = {"WANDB_API_KEY": "s3cret", "HTTPS_PROXY": "http://u:s3cret@proxy", "PLAIN": "visible"}
    other = {"A_TOKEN": "s3cret"}
    config = Config(
        cluster=ClusterConfig(env=env),
        launch=LaunchConfig(env=other),
        tracking=TrackingConfig(uri="http://u:s3cret@mlflow"),
        container=ContainerConfig(runtime="apptainer", image="/i.sif"),
    )
    script, step = submit.render(config, RUN)
    assert "s3cret" not in script + step
    assert "# The supervisor sets WANDB_API_KEY from secrets.json in the run folder" in script
    assert "export PLAIN=visible" in script


# --- Submission with a fake sbatch: job id and errors.


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


def test_submission_in_a_job_hides_the_variables_of_that_job(
    commands: FakeCommands, runs_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SLURM_ARRAY_TASK_ID", "SLURM_CPU_BIND", "SLURM_JOB_ID", "RANK", "SBATCH_QOS", "SLURM_CONF"):
        monkeypatch.setenv(name, "7")
    before = dict(os.environ)
    commands.add_script("sbatch", "env > env.txt; echo 'Submitted batch job 41'")

    def passed() -> set[str]:
        names = {line.partition("=")[0] for line in (commands.folder / "env.txt").read_text().splitlines()}
        return {name for name in names if name.startswith(("SBATCH", "SLURM", "RANK"))}

    submit.submit(Config(runs_dir=str(runs_dir)), RunDir.create(runs_dir / "exp" / "first"))
    assert passed() == {"SBATCH_QOS", "SLURM_CONF"}
    assert dict(os.environ) == before
    submit.estimate_start(Config(name="probe"))
    assert passed() == {"SBATCH_QOS", "SLURM_CONF", "SLURM_TIME_FORMAT"}


@pytest.mark.parametrize(
    ("sbatch", "error", "message"),
    [
        ("#!/bin/sh\necho 'sbatch: error: Batch job submission failed: Invalid qos' >&2; exit 1", UserMistake,
         r"^Slurm rejected the job: .*Invalid qos"),
        ("#!/no/such/interpreter\n", OSError, "No such file"),
    ],
)  # fmt: skip
def test_rejected_submission_does_not_change_the_run(
    commands: FakeCommands,
    runs_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    sbatch: str,
    error: type[Exception],
    message: str,
) -> None:
    """A run that were queued with the id of its previous job would count as dead."""
    run = RunDir.create(runs_dir / "exp" / "first")
    state = replace(run.read_state(), status="stopped", attempt=1)
    run.write_state(state)
    write_json(run.path / "slurm.json", {"job_id": "40"})
    commands.add_script("sbatch", "")
    (commands.folder / "sbatch").write_text(sbatch)
    monkeypatch.setenv("PATH", str(commands.folder))
    with pytest.raises(error, match=message):
        submit.submit(Config(runs_dir=str(runs_dir)), run)
    assert run.read_state() == state
    assert read_json(run.path / "slurm.json") == {"job_id": "40"}


@pytest.mark.parametrize(
    ("squeue", "scancel", "message"),
    [
        ("echo 41", "", r"job 41 was queued nevertheless and has been cancelled: submit again$"),
        ("true", "", r"no job has been queued: submit again$"),
        ("echo 'Unable to contact slurm controller' >&2; exit 1", "", r"`squeue --me --name=exp/first` shows it"),
        ("echo 41", "echo 'Unable to contact slurm controller' >&2; exit 1", r"the job may be queued nevertheless"),
    ],
    ids=["queued", "not-queued", "no-answer", "not-cancelled"],
)
def test_submission_without_an_answer_is_no_rejection(
    commands: FakeCommands, runs_dir: Path, monkeypatch: pytest.MonkeyPatch, squeue: str, scancel: str, message: str
) -> None:
    """sbatch may time out after the controller has queued the job."""
    monkeypatch.setattr(submit, "FIND_S", 0.1)
    run = RunDir.create(runs_dir / "exp" / "first")
    before = run.read_state()
    late = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"
    commands.add_script("sbatch", f"echo '{late}' >&2; exit 1")
    commands.add_script("squeue", squeue)
    commands.add_script("scancel", scancel)
    commands.add("scontrol", "JobId=41 JobState=PENDING Reason=None\n")
    with pytest.raises(HpcdistError, match=message) as caught:
        submit.submit(Config(runs_dir=str(runs_dir)), run)
    assert not isinstance(caught.value, UserMistake)
    assert run.read_state() == before
    assert ("scancel 41" in commands.calls()) == (squeue == "echo 41")


def test_percent_signs_of_folders_are_refused(tmp_path: Path) -> None:
    """Slurm and submitit would replace `%d` and the like, and could not create the file."""
    run = RunDir(tmp_path / "50%done" / "exp" / "first")
    message = "50%done/exp.*: Slurm replaces % in the names of output files: choose a runs_dir without it"
    with pytest.raises(UserMistake, match=message):
        submit.render(Config(), run)
    with pytest.raises(ConfigError, match=message):
        check_config(Config(runs_dir=str(tmp_path / "50%done"), experiment="exp"), None)
