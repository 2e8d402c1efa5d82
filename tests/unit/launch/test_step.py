"""The step that runs the ranks: its command line, and what srun says of ranks that ended."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from hpcdist.launch.step import ended_tasks, srun_command
from hpcdist.rundir import Attempt
from hpcdist.schema import ClusterConfig

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


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ("", {}),
        ("srun: error: n2: task 3: Killed\n", {3: ("n2", -signal.SIGKILL)}),
        ("srun: error: n2: tasks 2-3: Terminated\n", {2: ("n2", -signal.SIGTERM), 3: ("n2", -signal.SIGTERM)}),
        ("srun: error: n1: task 0: Exited with exit code 1\n", {0: ("n1", 1)}),
        (
            "srun: error: g7.site: tasks 1,4-5: Exited with exit code 143\n",
            dict.fromkeys((1, 4, 5), ("g7.site", 143)),
        ),
        ("srun: error: n1: task 0: Segmentation fault (core dumped)\n", {0: ("n1", -signal.SIGSEGV)}),
        ("srun: error: n1: task 0: Out Of Memory\n", {0: ("n1", -signal.SIGKILL)}),
        ("srun: error: n1: task 0: Aborted (core dumped)\n", {0: ("n1", -signal.SIGABRT)}),
        ("srun: error: n1: task 0: Something new\n", {0: ("n1", 1)}),
        ("srun: error: Node failure on n2\nsrun: Job step aborted: Waiting up to 7 seconds\n", {}),
        ("slurmstepd-n1: error: *** STEP 4.0 ON n1 CANCELLED AT 2026-11-20T06:41:50 ***\n", {}),
    ],
)
def test_what_srun_reports(messages: str, expected: dict[int, tuple[str, int]]) -> None:
    assert ended_tasks(messages) == expected


def test_the_first_word_on_a_task_counts_and_the_order_is_kept() -> None:
    found = ended_tasks(
        "srun: error: n2: task 3: Killed\n"
        "srun: Terminating StepId=5.0\n"
        "slurmstepd-n1: error: *** STEP 5.0 ON n1 CANCELLED AT 2026-11-20T06:36:00 ***\n"
        "srun: error: n1: tasks 0-1: Terminated\n"
        "srun: error: n2: tasks 2-3: Terminated\n"
    )
    assert list(found) == [3, 0, 1, 2]
    assert found[3] == ("n2", -signal.SIGKILL)
