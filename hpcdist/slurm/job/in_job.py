"""`hpcdist in-job`: the supervisor in a job with a batch script written by the user, such as `slurm/run.sbatch`.

The `#SBATCH` lines of the script are the request, so the config's `cluster` section is taken from the job.
"""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from hpcdist.config.schema import ClusterConfig, Config
from hpcdist.errors import ConfigError, HpcdistError, RunFolderError
from hpcdist.files.atomic import write_json
from hpcdist.run import create
from hpcdist.run.folder import RunDir, State, read_record
from hpcdist.run.origin import Origin
from hpcdist.slurm import client
from hpcdist.slurm.current_job import CurrentJob
from hpcdist.slurm.exposed_secrets import exposed_secrets
from hpcdist.slurm.job.batch_step import supervise
from hpcdist.slurm.nodelist import expand_tasks

log = logging.getLogger(__name__)


def run_in_job(config: Config, env: Mapping[str, str], cwd: Path, origin: Origin | None = None) -> State:
    """Supervise a run in the current job; returns its last state.

    The run folder is created at the first start of the job and found by the job's id after a requeue.
    Raises ConfigError outside of a job, RunFolderError if another run has the name.
    """
    try:
        job = CurrentJob.from_env(env)
    except HpcdistError as error:
        raise ConfigError([f"{error}: use `sbatch slurm/run.sbatch CONFIG`, or `hpcdist submit CONFIG`"]) from error
    if not job.may_requeue:
        log.warning(
            "Slurm will not requeue this job: without `#SBATCH --requeue` the run saves at the time limit and ends"
        )
    if not config.name:
        # The same name after a requeue.
        config = replace(config, name=f"{create.label_of(config)}-job{job.id}")
    run = RunDir(Path(config.runs_dir) / config.experiment / config.name)
    if (read_record(run.slurm) or {}).get("job_id") != job.id:
        if _is_incomplete(run, job.id):
            shutil.rmtree(run.path)
        cluster = cluster_from_job(config.cluster, env, job.time_limit_min)
        if cluster.outlives_nodes and not _has_no_kill(job, env):
            log.warning(
                "cluster.min_nodes and cluster.spare_nodes have no effect in this job once Slurm notices a failed node:"
                " Slurm then kills the job, unless the batch script has `#SBATCH --no-kill`"
            )
        run = _create(replace(config, cluster=cluster), cwd, job.id, origin)
    return supervise(str(run.path))


def cluster_from_job(cluster: ClusterConfig, env: Mapping[str, str], time_limit_min: float | None) -> ClusterConfig:
    """Return the section `cluster` with the job's values, from Slurm's variables, in place of the config's.

    Raises ConfigError if the nodes have different numbers of tasks.
    """
    # Without --ntasks-per-node only the second is set, and may count processors.
    text = env.get("SLURM_NTASKS_PER_NODE") or env["SLURM_TASKS_PER_NODE"]
    tasks = set(expand_tasks(text))
    if len(tasks) != 1:
        raise ConfigError(
            [f"{text} tasks per node: request the same number for each node, with `#SBATCH --ntasks-per-node=N`"]
        )
    num_nodes = int(env["SLURM_JOB_NUM_NODES"]) - cluster.spare_nodes
    # Slurm sets these only if the script requests GPUs.
    gpus = env.get("SLURM_GPUS_PER_NODE") or env.get("SLURM_GPUS_ON_NODE") or "0"
    return replace(
        cluster,
        # The job is heterogeneous if the script has `#SBATCH hetjob` lines.
        het=int(env.get("SLURM_HET_SIZE") or 0) > 1 if cluster.roles else cluster.het,
        partition=env.get("SLURM_JOB_PARTITION"),
        account=env.get("SLURM_JOB_ACCOUNT"),
        qos=env.get("SLURM_JOB_QOS"),
        # A job with a range of nodes may get more of them after a requeue.
        nodes=num_nodes if cluster.min_nodes is None else max(cluster.nodes, num_nodes),
        tasks_per_node=tasks.pop(),
        cpus_per_task=int(env.get("SLURM_CPUS_PER_TASK", "1")),
        gpus_per_node=int(gpus.rpartition(":")[2]),
        mem=env.get("SLURM_MEM_PER_NODE"),
        time_limit_min=int(time_limit_min) if time_limit_min else cluster.time_limit_min,
    )


def _has_no_kill(job: CurrentJob, env: Mapping[str, str]) -> bool:
    """Return whether the job's script or environment requests `--no-kill`; True if Slurm does not return the script.

    Slurm does not show the flag of a job.
    """
    if "SBATCH_NO_KILL" in env:
        return True
    try:
        lines = client.batch_script(job.id).splitlines()
    except HpcdistError:
        return True
    return any(re.match(r"#SBATCH\b.*\s(--no-kill|-k)\b(?!=off)", line) for line in lines)


def _is_incomplete(run: RunDir, job_id: str) -> bool:
    """Return whether the job was killed while it created the folder. The folder's name is unique to the job."""
    return run.name.endswith(f"-job{job_id}") and run.path.is_dir() and not (run.path / "slurm.json").exists()


def _create(config: Config, cwd: Path, job_id: str, origin: Origin | None) -> RunDir:
    create.check_trainer(config, cwd)
    if problems := exposed_secrets(config):
        raise ConfigError(problems)
    try:
        run = create.create_run(config, cwd, launcher="slurm", origin=origin)
    except RunFolderError as error:
        raise RunFolderError(f"{error} (or leave `name` out: then each job creates a new run)") from error
    # Last: with this file the folder is complete, and a requeued job continues with it.
    write_json(run.path / "slurm.json", {"job_id": job_id}, durable=True)
    return run
