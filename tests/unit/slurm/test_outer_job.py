"""The variables of another job that a submission does not pass on."""

import pytest

from hpcdist.slurm.outer_job import outer_job, without_outer_job

USER = {
    "PATH": "/bin",
    "SBATCH_QOS": "long",
    "SLURM_CONF": "/etc/slurm.conf",
    "SLURM_CLUSTERS": "big",
    "SLURM_JWT": "key",
    "OMPI_MCA_btl": "tcp",
    "PMIX_MCA_gds": "hash",
    "HPCDIST_RUNS_DIR": "/runs",
}


@pytest.mark.parametrize(
    "outer",
    [
        {"SLURM_JOB_ID": "41", "SLURM_CPU_BIND": "map_cpu:0", "SLURM_MEM_PER_CPU": "100", "SRUN_CPUS_PER_TASK": "1"},
        {"SLURM_ARRAY_JOB_ID": "41", "SLURM_ARRAY_TASK_ID": "3", "SLURMD_NODENAME": "n1", "SUBMITIT_EXECUTOR": "slurm"},
        {"SLURM_JOBID": "41", "SLURM_JOB_GPUS": "2", "CUDA_VISIBLE_DEVICES": "0", "SLURM_WORKING_CLUSTER": "a:b"},
        {"PMI_RANK": "1", "PMIX_RANK": "1", "PMIX_SERVER_URI2": "u", "OMPI_COMM_WORLD_RANK": "1"},
        {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "n1", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "x"},
        {"HPCDIST_ATTEMPT": "2", "HPCDIST_MASTER_ADDR": "n1", "HPCDIST_JOB_ID": "41"},
    ],
    ids=["allocation", "array-task", "devices", "mpi", "torchrun", "hpcdist"],
)
def test_variables_of_another_job_are_removed(outer: dict[str, str]) -> None:
    assert without_outer_job({**USER, **outer}) == USER


def test_settings_outside_of_a_job_stay() -> None:
    settings = {**USER, "SLURM_CPU_BIND": "none", "CUDA_VISIBLE_DEVICES": "1", "HPCDIST_MASTER_ADDR": "n1"}
    assert without_outer_job(settings) == settings


@pytest.mark.parametrize(
    ("env", "name"),
    [
        (USER, ""),
        ({"SLURM_JOB_ID": "41"}, "job 41"),
        ({"SLURM_JOB_ID": "44", "SLURM_ARRAY_JOB_ID": "41", "SLURM_ARRAY_TASK_ID": "3"}, "job 41_3"),
        ({"SLURM_STEP_ID": "0"}, "another job"),
    ],
)
def test_outer_job_is_named(env: dict[str, str], name: str) -> None:
    assert outer_job(env) == name
