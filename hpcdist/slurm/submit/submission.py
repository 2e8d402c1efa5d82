"""Sending a run to Slurm through submitit. Runs on a login node."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from hpcdist.config.schema import Config
from hpcdist.errors import UserMistake
from hpcdist.run.folder import RunDir, read_record, write_json
from hpcdist.slurm import client
from hpcdist.slurm.client import SlurmError
from hpcdist.slurm.job.batch_step import supervise_in_job
from hpcdist.slurm.job_components import allocations, is_het
from hpcdist.slurm.submit.batch_script import SUPERVISOR, render, sbatch_parameters


def require() -> None:
    """Raise UserMistake where there is no Slurm to submit to."""
    if shutil.which("sbatch") is None:
        raise UserMistake("no sbatch here: submit from a login node, or look at the script with --dry-run")


def settle_het(config: Config) -> tuple[Config, str]:
    """The config as this cluster can run it, and why that is not what was asked for, empty when it is.

    Left open, `cluster.het` is turned off where Slurm has no such jobs; the run's config says so from then on.
    Raises ConfigError for what roles ask and neither can give.
    """
    allocations(config)
    if config.cluster.het is not None or not is_het(config) or shutil.which("scontrol") is None:
        return config, ""
    reason = why_no_het_jobs(client.settings())
    if not reason:
        return config, ""
    settled = replace(config, cluster=replace(config.cluster, het=False))
    allocations(settled)
    return settled, f"this cluster runs no heterogeneous jobs ({reason}): the roles share one allocation"


def why_no_het_jobs(settings: Mapping[str, str]) -> str:
    """Return the setting that turns heterogeneous jobs off, by `scontrol show config`; empty if they are available."""
    scheduler = settings.get("SchedulerType", "sched/backfill")
    if scheduler != "sched/backfill":
        return f"SchedulerType={scheduler}"
    if "disable_hetjob_steps" in settings.get("SchedulerParameters", ""):
        return "SchedulerParameters=disable_hetjob_steps"
    return ""


def check(config: Config, flags: Mapping[str, str] | None = None) -> str:
    """Ask Slurm, before anything is written, whether it would take such a job, and when it would start.

    Args:
        flags: sbatch flags of this submission alone, such as `dependency`.

    Raises UserMistake, in one line, with Slurm's own reason.
    """
    require()
    probe = RunDir(Path(config.runs_dir) / config.experiment / (config.name or "probe"))
    script, _ = render(config, probe, flags)
    try:
        return " ".join(client.estimate_start(script).split()).removeprefix("sbatch: ")
    except SlurmError as error:
        if error.timed_out:
            raise UserMistake(f"Slurm does not answer ({error}): check `scontrol ping`") from error
        reason = " ".join(error.stderr.split()).removeprefix("allocation failure: ").removeprefix("sbatch: error: ")
        raise UserMistake(f"Slurm rejects this job: {reason}") from error


def submit(config: Config, run: RunDir, flags: Mapping[str, str] | None = None) -> str:
    """Submit a run that is made; returns the job id, which `slurm.json` in its folder keeps."""
    from submitit import SlurmExecutor
    from submitit.core.utils import FailedJobError

    before, job_before = run.read_state(), read_record(run.slurm)
    # Before the run waits: one that waits for a job that is over counts as dead.
    write_json(run.path / "slurm.json", {"job_id": None})
    # First, since the job may start before this process goes on.
    run.write_state(replace(before, status="queued", reason="", ended=None))
    executor = SlurmExecutor(run.path / "submitit", python=SUPERVISOR)
    executor.update_parameters(**sbatch_parameters(config, run, flags))
    try:
        job = executor.submit(supervise_in_job, str(run.path))
    except FailedJobError as error:
        run.write_state(before)
        write_json(run.path / "slurm.json", job_before or {"job_id": None})
        raise UserMistake(f"Slurm refused the job: {' '.join(str(error).split())}") from error
    write_job(run, str(job.job_id), name=f"{run.experiment}/{run.name}")
    return str(job.job_id)


def write_job(run: RunDir, job_id: str, *, name: str) -> None:
    """Note in a run's folder which job it is, so that another one of the same id is not taken for it."""
    try:
        cluster = client.cluster_name()
    except SlurmError:
        cluster = ""
    write_json(run.path / "slurm.json", {"job_id": job_id, "job_name": name, "cluster": cluster})


def submit_array(
    config: Config, sweep: RunDir, runs: Sequence[RunDir], flags: Mapping[str, str], parallelism: int | None
) -> list[str]:
    """Submit runs that are made as one job array, at most `parallelism` of them running at a time.

    Returns the tasks' job ids (`41_0`; a single run is an ordinary job), which each run's `slurm.json` keeps.
    """
    from submitit import SlurmExecutor
    from submitit.core.utils import FailedJobError

    before = [(run, run.read_state(), read_record(run.slurm)) for run in runs]
    for run, state, _ in before:
        write_json(run.path / "slurm.json", {"job_id": None})
        run.write_state(replace(state, status="queued", reason="", ended=None))
    executor = SlurmExecutor(sweep.path / "submitit", python=SUPERVISOR)
    executor.update_parameters(**sbatch_parameters(config, sweep, flags), array_parallelism=parallelism or len(runs))
    try:
        jobs = executor.map_array(supervise_in_job, [str(run.path) for run in runs])
    except FailedJobError as error:
        for run, state, job_before in before:
            run.write_state(state)
            write_json(run.path / "slurm.json", job_before or {"job_id": None})
        raise UserMistake(f"Slurm refused the job array: {' '.join(str(error).split())}") from error
    for run, job in zip(runs, jobs, strict=True):
        write_job(run, str(job.job_id), name=f"{sweep.experiment}/{sweep.name}")
        _link_log(run, job.paths.stdout)
    return [str(job.job_id) for job in jobs]


def _link_log(run: RunDir, log: Path) -> None:
    """Show the task's log, which is with the array's, where that of a run submitted alone is."""
    log.touch()
    folder = run.path / "submitit"
    folder.mkdir(exist_ok=True)
    (folder / log.name).symlink_to(os.path.relpath(log, folder))
