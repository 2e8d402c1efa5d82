"""Search for ranks on a node, and their end, without Slurm."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from hpcdist_runs import wait_for
from hung_ranks import hung_ranks

from hpcdist.run.folder import Attempt, RunDir
from hpcdist.slurm.job import node_ranks
from hpcdist.slurm.job.node_ranks import kill_ranks, main, parse_rank_answers


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
        assert capsys.readouterr().out == "n1 0 1\nn1\n"
        assert ranks.running == [0, 1], "nothing was killed"
        monkeypatch.setattr(node_ranks, "KILL_S", 30.0)
        main([str(run), "kill"])
        assert capsys.readouterr().out == "n1\n"
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


def test_lines_of_other_nodes_are_ignored() -> None:
    output = "srun: something\nn2 0 5\n\nn9 1\nn1\n"
    assert parse_rank_answers(output, ["n1", "n2", "n3"]) == {"n1": [], "n2": [0, 5]}
