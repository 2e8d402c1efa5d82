"""Submission of runs to Slurm with submitit, from a login node."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from hpcdist.config.schema import Config
from hpcdist.environments.rank_environment import record_environment
from hpcdist.errors import UserMistake
from hpcdist.files.atomic import write_json
from hpcdist.run.folder import RunDir, read_record
from hpcdist.run.slurm_job import keep_job
from hpcdist.slurm import client
from hpcdist.slurm.client import SlurmError
from hpcdist.slurm.job.job_function import supervise_in_job
from hpcdist.slurm.job_components import allocations, is_het
from hpcdist.slurm.submit.batch_script import SUPERVISOR, render, sbatch_parameters


def require_sbatch() -> None:
    """Raise UserMistake if sbatch is not installed."""
    if shutil.which("sbatch") is None:
        raise UserMistake("sbatch is not installed here: submit from a login node, or show the script with --dry-run")


def resolve_het(config: Config) -> tuple[Config, str]:
    """Return the config with `cluster.het` off if it is not set and the cluster has no heterogeneous jobs.

    The second value is the message about that change, or empty.
    Raises ConfigError for a request that the resulting kind of job does not support.
    """
    allocations(config)
    if config.cluster.het is not None or not is_het(config) or shutil.which("scontrol") is None:
        return config, ""
    reason = why_no_het_jobs(client.settings())
    if not reason:
        return config, ""
    resolved = replace(config, cluster=replace(config.cluster, het=False))
    allocations(resolved)
    return resolved, f"this cluster does not support heterogeneous jobs ({reason}): the roles share one allocation"


def why_no_het_jobs(settings: Mapping[str, str]) -> str:
    """Return the setting that turns heterogeneous jobs off, by `scontrol show config`; empty if they are available."""
    scheduler = settings.get("SchedulerType", "sched/backfill")
    if scheduler != "sched/backfill":
        return f"SchedulerType={scheduler}"
    if "disable_hetjob_steps" in settings.get("SchedulerParameters", ""):
        return "SchedulerParameters=disable_hetjob_steps"
    return ""


def estimate_start(config: Config, flags: Mapping[str, str] | None = None) -> str:
    """Return Slurm's estimate of the start of a job, without a submission and without side effects.

    Args:
        flags: sbatch flags of this submission only, such as `dependency`.

    Raises UserMistake with Slurm's reason, in one line, if it rejects the job.
    """
    require_sbatch()
    probe = RunDir(Path(config.runs_dir) / config.experiment / (config.name or "probe"))
    script, _ = render(config, probe, flags)
    try:
        text = " ".join(client.estimate_start(script).split()).removeprefix("sbatch: ")
        return text.replace(" a using ", " using ")  # Slurm 26.05 prints a stray word after the time
    except SlurmError as error:
        if error.timed_out:
            raise UserMistake(f"Slurm does not answer ({error}): check `scontrol ping`") from error
        reason = " ".join(error.stderr.split()).removeprefix("allocation failure: ").removeprefix("sbatch: error: ")
        raise UserMistake(f"Slurm rejects this job: {reason}") from error


def submit(config: Config, run: RunDir, flags: Mapping[str, str] | None = None) -> str:
    """Submit a run that has a folder; return the job id, which is also written to `slurm.json` in the folder."""
    from submitit import SlurmExecutor

    executor = SlurmExecutor(run.path / "submitit", python=SUPERVISOR)
    executor.update_parameters(**sbatch_parameters(config, run, flags))
    record_environment(config, [run], os.environ)
    with _queued([run], "job"):
        job = executor.submit(supervise_in_job, str(run.path))
    write_job(run, str(job.job_id), name=f"{run.experiment}/{run.name}")
    return str(job.job_id)


@contextmanager
def _queued(runs: Sequence[RunDir], job: str) -> Iterator[None]:
    """Record runs as queued before their submission in the block; restore their records if there is no job then."""
    from submitit.core.utils import FailedJobError

    before = [(run, run.read_state(), read_record(run.slurm)) for run in runs]
    for run, state, _ in before:
        keep_job(run)
        # Before the status `queued`: a queued run with a previous job that is over counts as lost.
        write_json(run.path / "slurm.json", {"job_id": None})
        # Before the submission: the job may start before sbatch returns.
        run.write_state(replace(state, status="queued", reason="", ended=None, lost=False))
    try:
        yield
    except (FailedJobError, OSError) as error:
        # Not after Ctrl-C, when Slurm may have accepted the job.
        for run, state, record in before:
            run.write_state(state)
            write_json(run.path / "slurm.json", record or {"job_id": None})
        if isinstance(error, OSError):
            raise
        raise UserMistake(f"Slurm rejected the {job}: {' '.join(str(error).split())}") from error


def write_job(run: RunDir, job_id: str, *, name: str) -> None:
    """Write the job of a run to `slurm.json`, with its name and cluster: ids are not unique over time and clusters."""
    try:
        cluster = client.cluster_name()
    except SlurmError:
        cluster = ""
    write_json(run.path / "slurm.json", {"job_id": job_id, "job_name": name, "cluster": cluster})


def submit_array(
    config: Config, sweep: RunDir, runs: Sequence[RunDir], flags: Mapping[str, str], parallelism: int | None
) -> list[str]:
    """Submit runs that have folders as one job array, with at most `parallelism` running at the same time.

    Returns the job ids of the tasks (`41_0`; `41` for a single run), which are also written to each `slurm.json`.
    """
    from submitit import SlurmExecutor

    executor = SlurmExecutor(sweep.path / "submitit", python=SUPERVISOR)
    executor.update_parameters(**sbatch_parameters(config, sweep, flags), array_parallelism=parallelism or len(runs))
    record_environment(config, runs, os.environ)
    with _queued(runs, "job array"):
        jobs = executor.map_array(supervise_in_job, [str(run.path) for run in runs])
    for run, job in zip(runs, jobs, strict=True):
        write_job(run, str(job.job_id), name=f"{sweep.experiment}/{sweep.name}")
        _link_log(run, job.paths.stdout)
    return [str(job.job_id) for job in jobs]


def _link_log(run: RunDir, log: Path) -> None:
    """Link the log of an array task, which is in the sweep's folder, into the run's folder."""
    log.touch()
    folder = run.path / "submitit"
    folder.mkdir(exist_ok=True)
    (folder / log.name).symlink_to(os.path.relpath(log, folder))
