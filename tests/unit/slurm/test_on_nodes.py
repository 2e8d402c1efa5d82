"""A command on each node of a job: its step, the nodes' answers, and the search for ranks on a node."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from hpcdist_runs import wait_for
from hung_ranks import hung_ranks

from hpcdist.run.folder import Attempt, RunDir
from hpcdist.slurm import on_nodes
from hpcdist.slurm.job import node_ranks
from hpcdist.slurm.job.node_ranks import kill_ranks, main
from hpcdist.slurm.on_nodes import JobNodes, announced, answer_lines, ask, nodes_command, read_answers

NODES = JobNodes([("n1",), ("n2", "n3")])


def test_step_has_one_task_on_each_node() -> None:
    flags = ["--ntasks-per-node=1", "--cpus-per-task=1", "--input=none"]
    step = ["--job-name=hpcdist-nodes", "--overlap"]
    assert nodes_command(NODES, ["look"]) == ["srun", *step, "--nodes=3", "--ntasks=3", *flags, "look"]
    assert nodes_command(JobNodes(NODES.by_component, het=True), ["look"]) == [
        *("srun", "--het-group=0", *step, "--nodes=1", "--ntasks=1", *flags, "look"),
        *(":", "--het-group=1", *step, "--nodes=2", "--ntasks=2", *flags, "look"),
    ]
    assert "--nodelist=n1,n3" in nodes_command(JobNodes([("n1", "n3")], chosen=True), ["look"])


def test_damaged_answers_are_omitted() -> None:
    deep = "[" * 100_000
    text = f"hpcdist-node n1 0/1 {deep}\nhpcdist-node n2 0/1 [1]\nhpcdist-node n3 5/1 {{}}\n"
    assert read_answers(f"{text}hpcdist-node n4 0/1 {'9' * 5000}\nhpcdist-node n5 {'9' * 5000}/1 1") == {}


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


def test_incomplete_answer_is_omitted() -> None:
    lines = answer_lines("n1", {"text": "a" * 3000})
    assert read_answers("\n".join(lines[:-1])) == {}


@pytest.mark.processes
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
    assert (late.is_late, late.errors) == (True, "\nno answer within 0.2 s\n")


# --- the ranks on a node


def answers(*ranks: list[int]) -> str:
    return "".join(f"{line}\n" for own in ranks for line in answer_lines("n1", {"ranks": own}))


@pytest.fixture
def attempt(runs_dir: Path) -> Attempt:
    return RunDir.create(runs_dir / "exp" / "run").new_attempt()


@pytest.mark.processes
def test_ranks_are_found_and_killed_with_their_children(
    attempt: Attempt, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    run = attempt.path.parent.parent
    with hung_ranks(attempt, tmp_path, 2) as ranks:
        wait_for(lambda: len(rank_processes()) == 3, "two ranks and a child of rank 1")
        processes = rank_processes()
        main([str(run), "list"])
        main([str(run.parent), "list"])
        assert capsys.readouterr().out == answers([0, 1], [])
        assert ranks.running == [0, 1], "nothing was killed"
        monkeypatch.setattr(node_ranks, "KILL_S", 30.0)
        main([str(run), "kill"])
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
    monkeypatch.setattr(node_ranks, "KILL_S", 0.1)
    monkeypatch.setattr(node_ranks, "find_ranks", lambda run, attempt, node, with_tasks: [Survivor()])
    killed: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: killed.append(pid))
    assert kill_ranks(tmp_path, "n1") == [3]
    assert set(killed) == {7, 8}


class Survivor:
    pid, rank, children = 7, 3, (8,)
