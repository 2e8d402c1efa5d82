"""Command lines of steps, compared whole, and what their ranks find in the environment."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from hpcdist.config.schema import ClusterConfig, Config, LaunchConfig, RoleRequest
from hpcdist.run.attempt import Attempt
from hpcdist.slurm.job.srun import node_names_command, rank_env, srun_command, step_command, watchdog_command

RANK = ["python", "-m", "worker", "/shared/my run"]
#: A rank ignores SIGUSR2 until it can hear it.
WRAPPED = ["sh", "-c", "trap '' USR2; exec \"$@\"", "sh", *RANK]


def test_the_whole_step() -> None:
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


def test_without_gpus_none_are_asked_for_and_a_site_has_the_last_word() -> None:
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


def test_logs_of_tasks_are_where_the_attempt_looks_for_them() -> None:
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


def test_a_step_without_roles_is_the_plain_one() -> None:
    config, attempt = Config(cluster=ClusterConfig(nodes=2, tasks_per_node=2)), Attempt(Path("/a/001"))
    assert step_command(config, attempt, RANK) == srun_command(config.cluster, attempt, RANK)


def test_roles_without_wishes_change_nothing_in_the_step() -> None:
    plain = Config(cluster=ClusterConfig(nodes=2, tasks_per_node=2))
    with_roles = Config(roles={"agent": 1, "observer": 3}, cluster=plain.cluster)
    attempt = Attempt(Path("/a/001"))
    assert step_command(with_roles, attempt, RANK) == step_command(plain, attempt, RANK)


def test_one_step_over_all_components() -> None:
    """Each rank opens its own log: srun's %t counts wrongly there."""
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


def test_a_step_in_which_each_rank_is_told_its_node() -> None:
    """Neither nodes nor tasks per node are said: the host file does."""
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


def test_the_standby_shares_a_node_of_the_second_component() -> None:
    assert watchdog_command("41") == [
        *(
            "srun",
            "--het-group=1",
            "--overlap",
            "--job-name=het-watchdog",
            "--nodes=1",
            "--ntasks=1",
            "--cpus-per-task=1",
        ),
        *("--input=none", sys.executable, "-P", "-m", "hpcdist.slurm.job.het_watchdog", "41"),
    ]


def test_the_roll_call() -> None:
    say = ["sh", "-c", "echo $SLURMD_NODENAME"]
    each = ["--ntasks-per-node=1", "--cpus-per-task=1", "--input=none", *say]
    nodes = [("n1",), ("n2", "n3")]
    beside = ["--overlap", "--job-name=hpcdist-nodes"]
    assert node_names_command(nodes, het=False) == ["srun", *beside, "--nodes=3", "--ntasks=3", *each]
    assert node_names_command(nodes, het=True) == [
        *("srun", "--het-group=0", *beside, "--nodes=1", "--ntasks=1", *each),
        *(":", "--het-group=1", *beside, "--nodes=2", "--ntasks=2", *each),
    ]


def test_ranks_get_threads_and_what_the_config_says() -> None:
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


def test_ranks_on_gpus_leave_the_allocator_alone() -> None:
    env = rank_env(Config(cluster=ClusterConfig(gpus_per_node=1), launch=LaunchConfig(num_threads=3)))
    assert env == {"OMP_NUM_THREADS": "3", "PYTHONUNBUFFERED": "1"}


def test_the_jobs_environment_is_made_for_the_first_component() -> None:
    env = rank_env(roles())
    assert (env["OMP_NUM_THREADS"], "MALLOC_TRIM_THRESHOLD_" in env) == ("4", True)
    env = rank_env(roles(het=False))
    assert (env["OMP_NUM_THREADS"], "MALLOC_TRIM_THRESHOLD_" in env) == ("4", False)
