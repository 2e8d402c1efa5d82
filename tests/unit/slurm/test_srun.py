"""Command lines of steps, compared as a whole, and the environment of their ranks."""

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from forked_scene import hung_ranks
from hpcdist_runs import wait_for

from hpcdist.config.launch_schema import ClusterConfig, LaunchConfig, RoleRequest
from hpcdist.config.schema import Config, TrainerConfig
from hpcdist.run.folder import Attempt, RunDir
from hpcdist.slurm import on_nodes
from hpcdist.slurm.job import node_steps
from hpcdist.slurm.job.node_steps import CONNECT_S, ParentSteps, kill_ranks, main, obstacle_to_fork
from hpcdist.slurm.job.srun import rank_env, step_command
from hpcdist.slurm.on_nodes import JobNodes, announced, answer_lines, ask, nodes_command, read_answers
from hpcdist.supervisor.children import Guard
from hpcdist.supervisor.hang import RankProcess
from hpcdist.supervisor.plan import rank_command

#: Many tests of this file start processes.
pytestmark = pytest.mark.processes
RANK = ["python", "-m", "worker", "/shared/my run"]


def test_rank_environment_has_threads_and_variables_of_the_config() -> None:
    cluster = ClusterConfig(cpus_per_task=6, env={"A": "job", "B": "job"})
    env = rank_env(Config(cluster=cluster, launch=LaunchConfig(env={"B": "rank"})))
    malloc = {"MALLOC_MMAP_THRESHOLD_": "33554432", "MALLOC_TRIM_THRESHOLD_": "1073741824"}
    assert env == {"OMP_NUM_THREADS": "6", "PYTHONUNBUFFERED": "1", **malloc, "A": "job", "B": "rank"}
    env = rank_env(Config(cluster=ClusterConfig(gpus_per_node=1), launch=LaunchConfig(num_threads=3)))
    assert env == {"OMP_NUM_THREADS": "3", "PYTHONUNBUFFERED": "1"}
    roles = {"server": RoleRequest(cpus_per_task=4), "worker": RoleRequest(nodes=2)}
    found = rank_env(Config(roles={"server": 1, "worker": 4}, cluster=ClusterConfig(roles=roles)))
    assert found["OMP_NUM_THREADS"] == "4", "the maximum, which each rank gets"


def test_steps_on_some_nodes_of_an_allocation_name_them() -> None:
    config, attempt = Config(cluster=ClusterConfig(nodes=2, tasks_per_node=2)), Attempt(Path("/a/002"))
    words = step_command(config, attempt, RANK, None, ("n1", "n3"), overlap=True)
    assert {"--nodes=2", "--ntasks=4", "--nodelist=n1,n3", "--overlap"} <= set(words)
    assert "--overlap" not in step_command(config, attempt, RANK, None, ("n1", "n3"))


# --- The step of the processes that fork ranks, with a fake srun that prints what the test has written, and waits.


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
    monkeypatch.setattr(node_steps, "signal_named_steps", lambda name, _: scene.killed.append(name))
    yield scene
    scene.steps.close()
    guard.close()


def test_one_step_serves_all_attempts_on_the_same_nodes(scene: Scene) -> None:
    first, second = scene.steps.task_command(NODES), scene.steps.task_command(NODES)
    *begin, name, connect_s, limit_s, run = first
    assert begin == ["/py", "-P", "-m", "hpcdist.rank.parent_client"]
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


def test_step_of_a_killed_srun_is_ended_and_started_again(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    first = scene.steps.task_command(NODES)
    scene.calls(1)
    current = scene.steps._step
    assert current is not None
    os.killpg(current.process.pid, signal.SIGKILL)
    current.process.wait()
    again = scene.steps.task_command(NODES)
    assert again[4] != first[4]
    assert scene.killed == ["rank-parents"]
    assert "the parent process of the ranks on n1, n2 has ended and is started again" in caplog.text


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


def test_step_that_slurm_does_not_start_is_not_tried_again(scene: Scene) -> None:
    (scene.folder / "refuses").touch()
    assert scene.steps.task_command(NODES) != scene.alone
    current = scene.steps._step
    assert current is not None
    current.process.wait()
    assert scene.steps.task_command(NODES) == scene.alone


def test_step_that_cannot_be_started_is_not_needed(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    (scene.run.path / "attempts" / "rank-parent.log").mkdir()
    assert scene.steps.task_command(NODES) == scene.alone
    assert "their parent process cannot be started: [Errno 21]" in caplog.text


@pytest.mark.parametrize(
    ("parts", "env", "expected"),
    [
        ({"cluster": ClusterConfig(srun={"cpu-bind": "cores", "mpi": "none"})}, {}, ""),
        ({"cluster": ClusterConfig(srun={"gpu-bind": "closest"})}, {}, "the srun option --gpu-bind"),
        ({"trainer": TrainerConfig(script=["train.py"])}, {}, "scripts import torch themselves"),
        ({"roles": {"a": 1, "b": 1}, "cluster": ClusterConfig(roles={"a": RoleRequest()})}, {}, "nodes of their own"),
        # From a batch script.
        ({}, {"SLURM_GPUS_PER_TASK": "1"}, "--gpus-per-task=1 gives"),
        ({}, {"SLURM_TRES_PER_TASK": "cpu=2,gres/gpu=1"}, "--tres-per-task=cpu=2,gres/gpu=1 gives"),
        ({}, {"SLURM_TRES_PER_TASK": "cpu=2", "SLURM_GPU_BIND": "none"}, ""),
    ],
)
def test_obstacles_to_forks(parts: dict[str, Any], env: dict[str, str], expected: str) -> None:
    found = obstacle_to_fork(Config(**parts), None, env)
    assert (bool(found), expected in found) == (bool(expected), True), found


# --- A command on each node of a job: its step, the nodes' answers, and the search for ranks on a node.


def test_step_has_one_task_on_each_node() -> None:
    flags = ["--ntasks-per-node=1", "--cpus-per-task=1", "--input=none"]
    step = ["--job-name=hpcdist-nodes", "--overlap"]
    nodes = JobNodes(["n1", "n3"])
    assert nodes_command(nodes, ["look"]) == ["srun", *step, "--nodes=2", "--ntasks=2", *flags, "look"]
    assert "--nodelist=n1,n3" in nodes_command(replace(nodes, chosen=True), ["look"])


def test_damaged_answers_are_omitted() -> None:
    deep = "[" * 100_000
    text = f"hpcdist-node n1 0/1 {deep}\nhpcdist-node n2 0/1 [1]\nhpcdist-node n3 5/1 {{}}\n"
    assert read_answers(f"{text}hpcdist-node n4 0/1 {'9' * 5000}\nhpcdist-node n5 {'9' * 5000}/1 1") == dict.fromkeys(
        ("n1", "n2", "n3", "n4", "n5")
    )


def test_answers_are_read_from_labelled_and_interleaved_output() -> None:
    answers = {"n1": {"text": "ö " * 3000}, "n2": {"text": "short"}}
    lines = [(task, line) for task, node in enumerate(answers) for line in answer_lines(node, answers[node])]
    assert max(len(line.encode()) for _, line in lines) < 1000, "srun splits lines after 1,024 bytes"
    mixed = sorted(lines, key=lambda item: item[1][-1])
    for text in (
        "".join(f"{line}\n" for _, line in lines),
        "some banner\n" + "".join(f" {task}: {line}\n" for task, line in mixed),
    ):
        assert read_answers(text) == answers
    assert read_answers("\n".join(line for _, line in lines[:-2])) == {"n1": None}, "incomplete"


def test_nodes_that_do_not_start_the_command_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_nodes, "PATIENCE_S", 0.0)
    monkeypatch.setattr(on_nodes, "FIRST_ANSWER_S", 0.0)
    answers = answer_lines("n1", {"ranks": [2]}) + answer_lines("n9", {"ranks": []})
    say = ["sh", "-c", 'printf "%s\n" "$@"; exec sleep 1000', "sh"]
    started = announced(["true"])[2].partition(";")[0].replace('"$SLURMD_NODENAME"', "n2").removeprefix("echo ")
    found = ask([*say, *answers], ["n1", "n3"], 60.0, env=os.environ, patient=False)
    assert (found.by_node, found.started) == ({"n1": {"ranks": [2]}}, {"n1"}), "n9 was not asked"
    found = ask([*say, *answers, started], ["n1", "n2"], 0.0, env=os.environ, patient=False)
    assert (found.by_node, found.started) == ({"n1": {"ranks": [2]}}, {"n1", "n2"})
    assert ask(say, ["n1"], 60.0, env=os.environ, patient=False).started == set()
    late = ask(say, ["n1"], 0.2, env=os.environ)
    assert (late.was_killed, late.errors) == (True, "\nno answer within 0.2 s\n")


# --- the ranks on a node


def answers(*ranks: list[int]) -> str:
    return "".join(f"{line}\n" for own in ranks for line in answer_lines("n1", {"ranks": own}))


def test_ranks_are_found_and_killed_with_their_children(
    attempt: Attempt, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    run = attempt.path.parent.parent
    with hung_ranks(attempt, tmp_path, 2) as ranks:
        wait_for(lambda: len(rank_processes()) == 3, "two ranks and a child of rank 1")
        processes = rank_processes()
        main(["list", str(run)])
        main(["list", str(run.parent)])
        assert capsys.readouterr().out == answers([0, 1], [])
        assert ranks.remaining == [0, 1], "nothing was killed"
        monkeypatch.setattr(node_steps, "KILL_S", 30.0)
        main(["kill", str(run)])
        assert capsys.readouterr().out == answers([])
        ranks.wait(30)
        assert set(ranks.exits.values()) == {-9}
        assert all(not child.is_running() or child.status() == psutil.STATUS_ZOMBIE for child in processes)


def rank_processes() -> list[psutil.Process]:
    found = []
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if "-P" in child.cmdline():
                found.append(child)
    return found


def test_ranks_that_survive_sigkill_are_returned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that wait for a file system survive, for example."""
    monkeypatch.setattr(node_steps, "KILL_S", 0.1)
    monkeypatch.setattr(node_steps, "find_ranks", lambda run, attempt, node, with_tasks: [RankProcess(pid=7, rank=3)])
    monkeypatch.setattr(node_steps, "family", lambda pid: [pid, pid + 1])
    killed: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: killed.append(pid))
    assert kill_ranks(tmp_path, "n1") == [3]
    assert set(killed) == {7, 8}
