"""The function that submitit calls in a job; `submit`, which needs its name only, does not import the supervisor."""

from __future__ import annotations


def supervise_in_job(run_dir: str) -> str:
    """Supervise a run from inside its job and return its final status; see `batch_step.supervise_in_job`."""
    from hpcdist.slurm.job import batch_step

    return batch_step.supervise_in_job(run_dir)
