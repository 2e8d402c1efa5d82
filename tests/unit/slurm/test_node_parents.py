"""The step of the processes that fork ranks, with a fake srun that prints what the test has written, and waits."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hpcdist_runs import wait_for

from hpcdist.config.launch_schema import ClusterConfig, LaunchConfig, RoleRequest
from hpcdist.config.schema import Config, TrainerConfig
from hpcdist.run.folder import RunDir
from hpcdist.slurm.job import node_parents
from hpcdist.slurm.job.node_parents import CONNECT_S, ParentSteps, obstacle_to_fork
from hpcdist.supervisor.launcher import Guard
from hpcdist.supervisor.plan import rank_command

NODES = ("n1", "n2")


class Scene:
    """Steps of parents, and the calls of srun."""

    def __init__(self, folder: Path, run: RunDir, guard: Guard) -> None:
        self.folder = folder
        self.run = run
        #: Names of steps that were killed by scancel.
        self.killed: list[str] = []
        (run.path / "attempts").mkdir(exist_ok=True)
        srun = folder / "srun"
        srun.write_text(
            f'#!/bin/sh\ncd {folder}\necho "$SLURM_CPUS_PER_TASK" "$@" >> calls\n'
            "trap 'echo TERM >> calls; exit' TERM\ntest -e refuses && exit 1\nsleep 600 & wait\n"
        )
        srun.chmod(0o755)
        env = {"PATH": f"{folder}:/usr/bin:/bin", "SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": "4"}
        config = Config(cluster=ClusterConfig(fork=True, nodes=2), launch=LaunchConfig(init_timeout_s=50))
        self.steps = ParentSteps(run, config, guard, env=env, python="/py")
        #: The command of a rank that imports torch itself.
        self.alone = rank_command(run.path, "/py")

    def calls(self, count: int) -> list[str]:
        def lines() -> list[str]:
            path = self.folder / "calls"
            return path.read_text().splitlines() if path.exists() else []

        wait_for(lambda: len(lines()) >= count, "the call of srun")
        return lines()

    def say(self, message: str) -> None:
        with open(self.run.path / "attempts" / "rank-parent.log", "a") as file:
            file.write(message)


@pytest.fixture
def scene(tmp_path: Path, runs_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    guard = Guard()
    scene = Scene(tmp_path, RunDir.create(runs_dir / "exp" / "run"), guard)
    monkeypatch.setattr(node_parents, "signal_named_steps", lambda name, _: scene.killed.append(name))
    yield scene
    scene.steps.close()
    guard.close()


@pytest.mark.processes
def test_one_step_serves_all_attempts_on_the_same_nodes(scene: Scene) -> None:
    first, second = scene.steps.task_command(NODES), scene.steps.task_command(NODES)
    *begin, name, connect_s, limit_s, run = first
    assert begin == ["/py", "-P", "-m", "hpcdist.rank.forked_task"]
    assert name.startswith("7-")
    assert (connect_s, limit_s, run) == (f"{CONNECT_S:g}", "25", str(scene.run.path))
    assert second == [*begin, name, "0", limit_s, run], "its parents listen, or have ended"
    (call,) = scene.calls(1)
    assert call.startswith(" --job-name=rank-parents --overlap --whole --nodes=2 "), "not limited to a task's cores"
    assert call.endswith(f" /py -P -m hpcdist.rank.parent {run} 50 {name}")
    third = scene.steps.task_command(("n1", "n3"))
    assert third[4] != name
    assert third[5] == f"{CONNECT_S:g}"
    assert scene.calls(2)[1].endswith(f" {run} 50 {third[4]} {name}"), "the new parents end the old ones"
    assert scene.killed == []
    scene.steps.close()
    assert scene.calls(3)[2] == "TERM"
    assert scene.killed == ["rank-parents"], "the step on the nodes of before may be left"


@pytest.mark.processes
def test_parent_that_has_ended_is_started_again(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    first = scene.steps.task_command(NODES)
    scene.calls(1)
    scene.say("srun: error: n2: task 1: Killed\n")
    again = scene.steps.task_command(NODES)
    assert again[4] != first[4]
    assert "the parent process of the ranks on n2 has ended and is started again" in caplog.text
    assert scene.steps.task_command(NODES) == [*again[:5], "0", *again[6:]], "messages about the old step do not count"


@pytest.mark.processes
def test_step_of_a_killed_srun_is_ended_and_started_again(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    first = scene.steps.task_command(NODES)
    scene.calls(1)
    current = scene.steps._current
    assert current is not None
    os.killpg(current._process.pid, signal.SIGKILL)
    current._process.wait()
    again = scene.steps.task_command(NODES)
    assert again[4] != first[4]
    assert scene.killed == ["rank-parents"]
    assert "the parent process of the ranks on n1, n2 has ended and is started again" in caplog.text


@pytest.mark.processes
def test_messages_that_cannot_be_read_do_not_fail_the_attempt(scene: Scene) -> None:
    first = scene.steps.task_command(NODES)
    scene.calls(1)
    (scene.run.path / "attempts" / "rank-parent.log").unlink()
    again = scene.steps.task_command(NODES)
    assert again[4] == first[4]


@pytest.mark.processes
def test_parents_that_cannot_fork_have_no_successors(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    first = scene.steps.task_command(NODES)
    scene.calls(1)
    scene.say("srun: error: n1: task 0: Exited with exit code 69\n")
    second = scene.steps.task_command(NODES)
    assert second[4] == first[4], "the other node has a parent"
    scene.say("srun: error: n2: task 1: Alarm clock\n")
    assert scene.steps.task_command(NODES) == scene.alone
    assert scene.steps.task_command(NODES) == scene.alone
    assert "each rank imports torch itself, since their parent processes have ended" in caplog.text
    assert scene.calls(2)[1:] == ["TERM"]


@pytest.mark.processes
def test_step_that_slurm_does_not_start_is_not_tried_again(scene: Scene) -> None:
    (scene.folder / "refuses").touch()
    assert scene.steps.task_command(NODES) != scene.alone
    current = scene.steps._current
    assert current is not None
    current._process.wait()
    assert scene.steps.task_command(NODES) == scene.alone


@pytest.mark.processes
def test_step_that_cannot_be_started_is_not_needed(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    (scene.run.path / "attempts" / "rank-parent.log").mkdir()
    assert scene.steps.task_command(NODES) == scene.alone
    assert "their parent process cannot be started: [Errno 21]" in caplog.text


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ({}, ""),
        ({"cluster": ClusterConfig(srun={"cpu-bind": "cores", "mpi": "none"})}, ""),
        ({"cluster": ClusterConfig(srun={"gpu-bind": "closest"})}, "the srun option --gpu-bind"),
        ({"cluster": ClusterConfig(sbatch={"gpus-per-task": "1"})}, "--gpus-per-task=1 gives each rank GPUs"),
        ({"trainer": TrainerConfig(script=["train.py"])}, "scripts import torch themselves"),
        ({"roles": {"a": 1, "b": 1}, "cluster": ClusterConfig(roles={"a": RoleRequest()})}, "nodes of their own"),
    ],
)
def test_obstacles_to_forks(parts: dict[str, Any], expected: str) -> None:
    assert_obstacle(obstacle_to_fork(Config(**parts), None, {}), expected)


@pytest.mark.parametrize(
    ("variable", "expected"),
    [
        ("SLURM_GPUS_PER_TASK=1", "--gpus-per-task=1 gives"),
        ("SLURM_TRES_PER_TASK=cpu=2,gres/gpu=1", "--tres-per-task=cpu=2,gres/gpu=1 gives"),
        ("SLURM_TRES_PER_TASK=cpu=2", ""),
        ("SLURM_GPU_BIND=single:1", "--gpu-bind=single:1 gives"),
        ("SLURM_GPU_BIND=none", ""),
    ],
)
def test_obstacles_to_forks_from_a_batch_script(variable: str, expected: str) -> None:
    name, _, value = variable.partition("=")
    assert_obstacle(obstacle_to_fork(Config(), None, {name: value}), expected)


def assert_obstacle(found: str, expected: str) -> None:
    assert bool(found) == bool(expected), found
    assert expected in found
