"""The variables of another job around a submission: an allocation, a step of srun, or a launcher of ranks.

sbatch passes its environment on to the new job. There, srun takes `SLURM_CPU_BIND`, `SLURM_MEM_PER_CPU` and many others
as options, `SLURM_ARRAY_JOB_ID` names another job, and libraries take `RANK` or `PMI_RANK` as their own rank.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase

from hpcdist.config.topology import OWN_RENDEZVOUS

#: Slurm sets one of these in each allocation, step and array task. Elsewhere, `SLURM_*` are settings of the user.
_IN_A_JOB = ("SLURM_JOB_ID", "SLURM_JOBID", "SLURM_STEP_ID", "SLURM_ARRAY_JOB_ID", "SLURM_JOB_NODELIST")
#: Variables of a job. srun reads them as options, or as its place in the job; device numbers count the job's own
#: devices.
_OF_THE_JOB = (
    "SLURM_*", "SLURMD_*", "SRUN_*", "SUBMITIT_*", "CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL",
    "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK",
)  # fmt: skip
#: Of these, the ones that select a cluster or identify the user. They are the same in all jobs.
_OF_THE_USER = ("SLURM_CLUSTERS", "SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT", "SLURM_TIME_FORMAT")
#: Variables that srun, mpirun and torchrun set for a rank. `OMPI_MCA_*` and `PMIX_MCA_*` are settings of the user,
#: except those of mpirun's own daemons.
_OF_A_RANK = (
    "PMI_APPNUM", "PMI_CONTROL_*", "PMI_FD", "PMI_ID", "PMI_JOBID", "PMI_LOCAL_*", "PMI_PORT", "PMI_PROCESS_MAPPING",
    "PMI_RANK", "PMI_SIZE", "PMI_SPAWNED", "PMI_UNIVERSE_SIZE", "PMI2_*", "PMIX_BFROP_BUFFER_TYPE", "PMIX_DSTORE_*",
    "PMIX_GDS_MODULE", "PMIX_HOSTNAME", "PMIX_ID", "PMIX_NAMESPACE", "PMIX_PTL_MODULE", "PMIX_RANK",
    "PMIX_SECURITY_MODE", "PMIX_SERVER_*", "PMIX_SYSTEM_TMPDIR", "PMIX_VERSION", "OMPI_APP_CTX_NUM_PROCS", "OMPI_ARGV",
    "OMPI_COMM_WORLD_*", "OMPI_COMMAND", "OMPI_FILE_LOCATION", "OMPI_FIRST_RANKS", "OMPI_MCA_ess*", "OMPI_MCA_orte_*",
    "OMPI_NUM_APP_CTX", "OMPI_UNIVERSE_SIZE", "MPI_LOCALNRANKS", "MPI_LOCALRANKID", "RANK", "WORLD_SIZE", "LOCAL_RANK",
    "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE", "MASTER_ADDR",
    "MASTER_PORT", "TORCHELASTIC_*",
)  # fmt: skip


def without_outer_job(env: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without the variables of another job; `SBATCH_*` and settings of the user stay."""
    removed = list(_OF_A_RANK)
    if outer_job(env):
        removed += _OF_THE_JOB
    if "HPCDIST_ATTEMPT" in env:  # a rank of hpcdist; elsewhere the user has set the others
        removed += OWN_RENDEZVOUS
    kept = {}
    for name, value in env.items():
        if name in _OF_THE_USER or not any(fnmatchcase(name, pattern) for pattern in removed):
            kept[name] = value
    return kept


def outer_job(env: Mapping[str, str]) -> str:
    """Return the name of the job that an environment belongs to, such as `job 41_2`; empty outside of a job."""
    if env.get("SLURM_ARRAY_JOB_ID") and env.get("SLURM_ARRAY_TASK_ID"):
        return f"job {env['SLURM_ARRAY_JOB_ID']}_{env['SLURM_ARRAY_TASK_ID']}"
    job_id = env.get("SLURM_JOB_ID") or env.get("SLURM_JOBID")
    if job_id:
        return f"job {job_id}"
    if any(env.get(name) for name in _IN_A_JOB):
        return "another job"
    return ""


@contextmanager
def hidden() -> Iterator[None]:
    """Remove the variables of another job from this process for the block, because submitit passes all of them on."""
    before = dict(os.environ)
    kept = without_outer_job(before)
    removed = {name: value for name, value in before.items() if name not in kept}
    for name in removed:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(removed)
