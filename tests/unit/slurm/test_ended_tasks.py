"""Exit codes of tasks from the messages of srun."""

from __future__ import annotations

import signal

import pytest

from hpcdist.slurm.job.rank_step import ended_tasks


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
def test_messages_of_srun_give_exit_codes_by_task(messages: str, expected: dict[int, tuple[str, int]]) -> None:
    assert ended_tasks(messages) == expected


def test_first_message_about_a_task_counts_and_order_is_kept() -> None:
    found = ended_tasks(
        "srun: error: n2: task 3: Killed\n"
        "srun: Terminating StepId=5.0\n"
        "slurmstepd-n1: error: *** STEP 5.0 ON n1 CANCELLED AT 2026-11-20T06:36:00 ***\n"
        "srun: error: n1: tasks 0-1: Terminated\n"
        "srun: error: n2: tasks 2-3: Terminated\n"
    )
    assert list(found) == [3, 0, 1, 2]
    assert found[3] == ("n2", -signal.SIGKILL)


def test_task_numbers_of_a_heterogeneous_step_are_offset_by_component() -> None:
    """Messages of Slurm 22.05 about ranks 3 and 0 of a step with components of 1 and 4 tasks."""
    messages = "srun: error: n3: task 2: Killed\nsrun: error: n1: task 0: Terminated\n"
    assert ended_tasks(messages, {"n1": 0, "n2": 1, "n3": 1}) == {
        3: ("n3", -signal.SIGKILL),
        0: ("n1", -signal.SIGTERM),
    }
