"""Command lines of steps, compared as a whole, and the environment of their ranks."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from hpcdist.config.launch_schema import ClusterConfig, LaunchConfig, RoleRequest
from hpcdist.config.schema import Config
from hpcdist.run.folder import Attempt
from hpcdist.slurm.job.srun import (
    parents_command,
    rank_env,
    srun_command,
    step_command,
    watchdog_command,
)

RANK = ["python", "-m", "worker", "/shared/my run"]
#: A rank ignores SIGUSR2 until it has a handler.
WRAPPED = ["sh", "-c", "trap '' USR2; exec \"$@\"", "sh", *RANK]


def test_command_of_a_step() -> None:
    cluster = ClusterConfig(nodes=2, tasks_per_node=4, gpus_per_node=4, cpus_per_task=8, srun={"mpi": "none"})
    assert srun_command(cluster, Attempt(Path("/runs/e/r/attempts/012")), RANK) == [
        "srun",
        "--job-name=attempt-012",
        "--nodes=2",
        "--ntasks=8",
        "--ntasks-per-node=4",
        "--cpus-per-task=8",
        "--gpus-per-node=4",
        "--kill-on-bad-exit=1",
        "--input=none",
        "--open-mode=append",
        "--output=/runs/e/r/attempts/012/rank-%5t.log",
        "--mpi=none",
        *WRAPPED,
    ]


def test_flags_of_the_site_override_defaults() -> None:
    cluster = ClusterConfig(srun={"kill-on-bad-exit": "0"})
    command = srun_command(cluster, Attempt(Path("/a/001")), RANK)
    assert command == [
        "srun",
        "--job-name=attempt-001",
        "--nodes=1",
        "--ntasks=1",
        "--ntasks-per-node=1",
        "--cpus-per-task=1",
        "--kill-on-bad-exit=0",
        "--input=none",
        "--open-mode=append",
        "--output=/a/001/rank-%5t.log",
        *WRAPPED,
    ]


def test_output_flag_agrees_with_the_paths_of_rank_logs() -> None:
    attempt = Attempt(Path("/a/001"))
    (output,) = [word for word in srun_command(ClusterConfig(), attempt, RANK) if word.startswith("--output=")]
    for rank in (0, 7, 31999):
        assert output.removeprefix("--output=").replace("%5t", f"{rank:05d}") == str(attempt.log(rank))


def roles(**cluster: Any) -> Config:
    requests = {"server": RoleRequest(cpus_per_task=4), "worker": RoleRequest(nodes=2, gpus_per_node=2)}
    return Config(
        roles={"server": 1, "worker": 4},
        cluster=ClusterConfig(roles=requests, srun={"mpi": "none"}, **cluster),
    )


def test_step_without_roles() -> None:
    config, attempt = Config(cluster=ClusterConfig(nodes=2, tasks_per_node=2)), Attempt(Path("/a/001"))
    assert step_command(config, attempt, RANK) == srun_command(config.cluster, attempt, RANK)


def test_roles_without_requests_do_not_change_the_step() -> None:
    plain = Config(cluster=ClusterConfig(nodes=2, tasks_per_node=2))
    with_roles = Config(roles={"agent": 1, "observer": 3}, cluster=plain.cluster)
    attempt = Attempt(Path("/a/001"))
    assert step_command(with_roles, attempt, RANK) == step_command(plain, attempt, RANK)


def test_step_of_a_heterogeneous_job() -> None:
    """Each rank opens its own log, because srun numbers %t by component."""
    shell = 'trap \'\' USR2; log=$(printf "%s/rank-%05d.log" "$0" "$SLURM_PROCID"); exec "$@" >>"$log" 2>&1'
    assert step_command(roles(), Attempt(Path("/a/001")), RANK) == [
        "srun",
        "--het-group=0",
        "--job-name=attempt-001",
        "--nodes=1",
        "--ntasks=1",
        "--ntasks-per-node=1",
        "--cpus-per-task=4",
        "--kill-on-bad-exit=1",
        "--input=none",
        "--mpi=none",
        *("sh", "-c", shell, "/a/001", *RANK),
        ":",
        "--het-group=1",
        "--job-name=attempt-001",
        "--nodes=2",
        "--ntasks=4",
        "--ntasks-per-node=2",
        "--cpus-per-task=1",
        "--gpus-per-node=2",
        "--kill-on-bad-exit=1",
        "--input=none",
        "--mpi=none",
        *("sh", "-c", shell, "/a/001"),
        *("env", "-u", "MALLOC_MMAP_THRESHOLD_", "-u", "MALLOC_TRIM_THRESHOLD_", "OMP_NUM_THREADS=1", *RANK),
    ]


def test_step_with_a_host_file() -> None:
    """The host file determines nodes and tasks per node."""
    assert step_command(roles(het=False), Attempt(Path("/a/001")), RANK) == [
        "srun",
        "--job-name=attempt-001",
        "--ntasks=5",
        "--cpus-per-task=4",
        "--gpus-per-node=2",
        "--kill-on-bad-exit=1",
        "--input=none",
        "--open-mode=append",
        "--output=/a/001/rank-%5t.log",
        "--mpi=none",
        "--distribution=arbitrary",
        *WRAPPED,
    ]


def test_watchdog_runs_on_a_node_of_the_second_component() -> None:
    assert watchdog_command("41") == [
        *(
            "srun",
            "--het-group=1",
            "--overlap",
            "--job-name=job-watchdog",
            "--nodes=1",
            "--ntasks=1",
            "--cpus-per-task=1",
        ),
        *("--input=none", sys.executable, "-P", "-m", "hpcdist.slurm.job.watchdog", "41"),
    ]


def test_rank_environment_has_threads_and_variables_of_the_config() -> None:
    cluster = ClusterConfig(cpus_per_task=6, env={"A": "job", "B": "job"})
    env = rank_env(Config(cluster=cluster, launch=LaunchConfig(env={"B": "rank"})))
    assert env == {
        "OMP_NUM_THREADS": "6",
        "PYTHONUNBUFFERED": "1",
        "MALLOC_MMAP_THRESHOLD_": "33554432",
        "MALLOC_TRIM_THRESHOLD_": "1073741824",
        "A": "job",
        "B": "rank",
    }


def test_rank_environment_with_gpus_does_not_tune_malloc() -> None:
    env = rank_env(Config(cluster=ClusterConfig(gpus_per_node=1), launch=LaunchConfig(num_threads=3)))
    assert env == {"OMP_NUM_THREADS": "3", "PYTHONUNBUFFERED": "1"}


def test_rank_environment_is_that_of_the_first_component() -> None:
    env = rank_env(roles())
    assert (env["OMP_NUM_THREADS"], "MALLOC_TRIM_THRESHOLD_" in env) == ("4", True)
    env = rank_env(roles(het=False))
    assert (env["OMP_NUM_THREADS"], "MALLOC_TRIM_THRESHOLD_" in env) == ("4", False)


def test_steps_on_some_nodes_of_an_allocation_name_them() -> None:
    config, attempt = Config(cluster=ClusterConfig(nodes=2, tasks_per_node=2)), Attempt(Path("/a/002"))
    words = step_command(config, attempt, RANK, None, ("n1", "n3"), overlap=True)
    assert {"--nodes=2", "--ntasks=4", "--nodelist=n1,n3", "--overlap"} <= set(words)
    words = step_command(config, attempt, RANK, None, ("n1", "n3"))
    assert "--nodelist=n1,n3" in words
    assert "--overlap" not in words
    assert watchdog_command("41", "n3")[1] == "--nodelist=n3"


def test_parents_have_the_processors_of_all_ranks() -> None:
    """The step is not limited to the cores of one task, and its task is not bound."""
    cluster = ClusterConfig(gpus_per_node=4, cpus_per_task=8, srun={"mpi": "none", "cpu-bind": "cores"})
    command = parents_command(cluster, ["n1", "n2"], ["python"], output=Path("/a/rank-parent-%N.log"))
    assert command == [
        *("srun", "--job-name=rank-parents", "--overlap", "--whole", "--nodes=2", "--ntasks=2", "--ntasks-per-node=1"),
        *("--nodelist=n1,n2", "--gpus-per-node=4", "--cpu-bind=none", "--mpi=none", "--kill-on-bad-exit=0", "--wait=0"),
        *("--input=none", "--open-mode=append", "--output=/a/rank-parent-%N.log", "python"),
    ]
