"""Command lines of steps, compared as a whole, and the environment of their ranks."""

import os
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from forked_scene import hung_ranks
from hpcdist_runs import wait_for

from hpcdist.config.cluster_schema import ClusterConfig, RoleRequest
from hpcdist.config.launch_schema import LaunchConfig
from hpcdist.config.schema import Config
from hpcdist.job import node_steps
from hpcdist.job.node_steps import kill_ranks, main
from hpcdist.job.srun import rank_env, step_command
from hpcdist.run.folder import Attempt
from hpcdist.slurm import on_nodes
from hpcdist.slurm.on_nodes import JobNodes, announced, answer_lines, ask, nodes_command, read_answers
from hpcdist.supervisor.hang import RankProcess
from hpcdist.supervisor.local_launcher import LocalRanks

#: Many tests of this file start processes.
pytestmark = pytest.mark.processes
RANK = ["python", "-m", "worker", "/shared/my run"]


def test_rank_environment_has_threads_and_configured_variables() -> None:
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


def test_loss_of_a_task_does_not_end_the_others() -> None:
    words = step_command(Config(cluster=ClusterConfig(nodes=2)), Attempt(Path("/a/002")), RANK)
    assert {"--job-name=ranks-002", "--kill-on-bad-exit=0", "--wait=0", "--error=/a/002/rank-%5t.log"} <= set(words)


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
        wait_for(lambda: len(rank_processes(ranks)) == 3, "two ranks and a child of rank 1")
        processes = rank_processes(ranks)
        main(["list", str(run)])
        main(["list", str(run.parent)])
        assert capsys.readouterr().out == answers([0, 1], [])
        assert ranks.remaining == [0, 1], "nothing was killed"
        monkeypatch.setattr(node_steps, "KILL_S", 30.0)
        main(["kill", str(run)])
        assert capsys.readouterr().out == answers([])
        while ranks.remaining:
            ranks.wait(30)
        assert set(ranks.exits.values()) == {-9}
        assert all(not child.is_running() or child.status() == psutil.STATUS_ZOMBIE for child in processes)


def rank_processes(ranks: LocalRanks) -> list[psutil.Process]:
    return psutil.Process(ranks.parents.process.pid).children(recursive=True)


def test_ranks_that_survive_sigkill_are_returned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that wait for a file system survive, for example."""
    monkeypatch.setattr(node_steps, "KILL_S", 0.1)
    monkeypatch.setattr(node_steps, "find_ranks", lambda run, attempt, node, parents: [RankProcess(pid=7, rank=3)])
    monkeypatch.setattr(node_steps, "family", lambda pid: [pid, pid + 1])
    killed: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: killed.append(pid))
    assert kill_ranks(tmp_path, "n1") == [3]
    assert set(killed) == {7, 8}
