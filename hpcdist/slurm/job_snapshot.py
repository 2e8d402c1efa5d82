"""Snapshots of the job that a run was submitted as."""

from __future__ import annotations

from dataclasses import dataclass

from hpcdist.slurm import client
from hpcdist.slurm.client import SlurmError
from hpcdist.slurm.job_info import JobInfo


@dataclass(frozen=True, kw_only=True)
class JobRef:
    """The job that a run was submitted as. Ids are unique within one installation of a cluster only."""

    id: str
    name: str = ""  #: Slurm's name of the job, if known
    cluster: str = ""  #: Slurm's name of the cluster, if known


@dataclass(frozen=True, kw_only=True)
class JobSnapshot:
    """The state of a job at one time, or the reason why Slurm did not answer."""

    info: JobInfo | None = None  #: None also if Slurm does not know the job (any more)
    error: str = ""  #: why Slurm did not answer
    installed: bool = True  #: whether Slurm's commands exist on this machine

    @property
    def is_over(self) -> bool:
        """Whether the job neither runs nor will run, by Slurm's answer."""
        return not self.error and (self.info is None or not self.info.alive)


def take_snapshot(job: JobRef, *, history: bool = False) -> JobSnapshot:
    """Query a job; see `client.query_job`. A job of the same id with another name is not taken for it."""
    try:
        info = client.query_job(job.id, history=history)
        if info is not None and (not job.name or info.name == job.name):
            return JobSnapshot(info=info)
        if job.cluster and (here := client.cluster_name()) != job.cluster:
            return JobSnapshot(error=f"job {job.id} is on cluster {job.cluster}, this is {here}")
        return JobSnapshot()
    except SlurmError as error:
        return JobSnapshot(error=str(error), installed=error.installed)
