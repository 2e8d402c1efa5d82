"""The supervisor in a job that a batch script of the user's own has made: what `slurm/run.sbatch` starts.

The script's `#SBATCH` lines say what is asked of Slurm, so the config's `cluster` section is taken from the job.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from hpcdist.config.schema import ClusterConfig, Config
from hpcdist.errors import ConfigError, HpcdistError, RunFolderError
from hpcdist.run.folder import RunDir, State, read_record, write_json
from hpcdist.slurm.current_job import CurrentJob
from hpcdist.slurm.exposed_secrets import exposed_secrets
from hpcdist.slurm.job.batch_step import supervise
from hpcdist.slurm.nodelist import expand_tasks
from hpcdist.supervisor import start

log = logging.getLogger(__name__)


def run_in_job(config: Config, env: Mapping[str, str], cwd: Path) -> State:
    """Supervise a config's run in the job around this process; returns its last state.

    Its folder is made when the job starts for the first time, and found again by the job's id after a requeue.
    Raises HpcdistError where there is no job, RunFolderError when the run's name belongs to another.
    """
    try:
        job = CurrentJob.from_env(env)
    except HpcdistError as error:
        raise ConfigError(
            [f"{error}: `sbatch slurm/run.sbatch CONFIG`, or `hpcdist submit` writes one for you"]
        ) from error
    if not job.may_requeue:
        log.warning(
            "Slurm will not requeue this job: without `#SBATCH --requeue` it saves at the time limit, and that is all"
        )
    config = named_after(config, job.id)
    own = Path(config.runs_dir) / config.experiment / config.name
    run = RunDir(own)
    if (read_record(run.slurm) or {}).get("job_id") != job.id:
        if _is_half_made(run, job.id):
            shutil.rmtree(own)
        cluster = cluster_of(config.cluster, env, job.time_limit_min)
        run = _create(replace(config, cluster=cluster), cwd, job.id)
    return supervise(str(run.path))


def named_after(config: Config, job_id: str) -> Config:
    """The config with a run name: its own, or one that each life of the job arrives at."""
    return config if config.name else replace(config, name=f"{start.label_of(config)}-job{job_id}")


def cluster_of(cluster: ClusterConfig, env: Mapping[str, str], time_limit_min: float | None) -> ClusterConfig:
    """What the job has, by Slurm's variables, over what the config says.

    Raises ConfigError when the nodes have different numbers of tasks.
    """
    # Without --ntasks-per-node the second is there alone, and may count processors.
    text = env.get("SLURM_NTASKS_PER_NODE") or env["SLURM_TASKS_PER_NODE"]
    tasks = set(expand_tasks(text))
    if len(tasks) != 1:
        raise ConfigError([f"{text} tasks per node: ask for as many on each, with `#SBATCH --ntasks-per-node=N`"])
    # Each is set only where the script asks for it.
    gpus = env.get("SLURM_GPUS_PER_NODE") or env.get("SLURM_GPUS_ON_NODE") or "0"
    return replace(
        cluster,
        # Roles share what the script has asked for, in components where it has made some.
        het=int(env.get("SLURM_HET_SIZE") or 0) > 1 if cluster.roles else cluster.het,
        partition=env.get("SLURM_JOB_PARTITION"),
        account=env.get("SLURM_JOB_ACCOUNT"),
        qos=env.get("SLURM_JOB_QOS"),
        nodes=int(env["SLURM_JOB_NUM_NODES"]),
        tasks_per_node=tasks.pop(),
        cpus_per_task=int(env.get("SLURM_CPUS_PER_TASK", "1")),
        gpus_per_node=int(gpus.rpartition(":")[2]),
        mem=env.get("SLURM_MEM_PER_NODE"),
        time_limit_min=int(time_limit_min) if time_limit_min else cluster.time_limit_min,
    )


def _is_half_made(run: RunDir, job_id: str) -> bool:
    """Whether an earlier life of this job was killed while it made the folder: by its name it can be no other's."""
    return run.name.endswith(f"-job{job_id}") and run.path.is_dir() and not (run.path / "slurm.json").exists()


def _create(config: Config, cwd: Path, job_id: str) -> RunDir:
    start.check_trainer(config, cwd)
    if problems := exposed_secrets(config):
        raise ConfigError(problems)
    try:
        run = start.create_run(config, cwd, launcher="slurm")
    except RunFolderError as error:
        raise RunFolderError(f"{error} (or leave `name` out: then each job has a run of its own)") from error
    # Last: from now on a requeue of this job goes on with this folder.
    write_json(run.path / "slurm.json", {"job_id": job_id}, durable=True)
    return run
