"""Restarts on other nodes: failures that lost nodes explain, nodes that do not answer, and nodes that return."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from supervisor_scene import DONE, STOP_ON_REQUEST, Scene, ScriptedJob, fails

from hpcdist.run.commands import end
from hpcdist.run.folder import Attempt, RunDir
from hpcdist.run.lease import hold
from hpcdist.run.records import read_times
from hpcdist.supervisor.local import LocalRanks

EXIT_0: list[list[Any]] = []
#: All tests of this file may start processes.
pytestmark = pytest.mark.processes


@pytest.fixture
def scene(runs_dir: Path) -> Scene:
    return Scene(RunDir.create(runs_dir / "exp" / "first"))


class Nodes:
    """Node changes that a test prescribes for the first attempts; later ones have none."""

    def __init__(self, *, changes: tuple[str, ...] = (), lost: tuple[int, str] | None = None, growth: str = "") -> None:
        self.changes = list(changes)
        self.silent = lost
        self.more = growth

    def detect_lost(self) -> tuple[int, str] | None:
        return self.silent

    def replace_lost(self) -> str:
        self.silent = None
        return self.changes.pop(0) if self.changes else ""

    def detect_returned(self) -> str:
        return self.more

    def use_returned(self) -> None:
        self.more = ""


def test_failures_that_nodes_explain_do_not_count_against_max_restarts(scene: Scene) -> None:
    scene.launch = {"max_restarts": 0}
    scene.script(first=[fails("peer lost"), EXIT_0], second=[fails("peer lost"), EXIT_0], third=[[*DONE], EXIT_0])
    nodes = Nodes(changes=("no answer from n3: continuing on 3 of 4 nodes", "n4 takes over"))
    supervisor = scene.supervisor(ScriptedJob(nodes=nodes))
    state = scene.supervise(supervisor)
    assert (state.status, state.attempt, state.restarts) == ("finished", 3, 2)
    assert "restart: no answer from n3: continuing on 3 of 4 nodes" in scene.report.notes
    assert scene.run.attempt(1).failure.exists(), "it counts in the search for a failing node"


def test_other_failures_count_as_without_changes_of_nodes(scene: Scene) -> None:
    scene.launch = {"max_restarts": 0}
    scene.script(first=[fails("nan"), EXIT_0])
    supervisor = scene.supervisor(ScriptedJob(nodes=Nodes()))
    assert (scene.supervise(supervisor).status, scene.run.read_state().attempt) == ("failed", 1)


def test_node_without_an_answer_ends_the_attempt(scene: Scene) -> None:
    scene.script(first=[STOP_ON_REQUEST, STOP_ON_REQUEST], second=[[*DONE], EXIT_0])
    nodes = Nodes(changes=("no answer from n2: continuing on 1 of 2 nodes",))
    supervisor = scene.supervisor(ScriptedJob(nodes=nodes))
    scene.report.on_attempt = lambda attempt: setattr(nodes, "silent", (1, "n2") if attempt.number == 1 else None)
    state = scene.supervise(supervisor)
    assert (state.status, state.attempt, state.restarts) == ("finished", 2, 1)
    ((failure, _),) = scene.report.failures
    assert (failure.kind, failure.rank, failure.host) == ("lost", 1, "n2")
    assert failure.sentence().startswith("rank 1 on n2 was lost: its node does not answer")


def test_ranks_are_restarted_on_more_nodes_and_the_run_goes_on(scene: Scene) -> None:
    scene.script(first=[STOP_ON_REQUEST, STOP_ON_REQUEST], second=[[*DONE], EXIT_0])
    nodes = Nodes(growth="n3")
    supervisor = scene.supervisor(ScriptedJob(nodes=nodes))
    scene.report.on_attempt = lambda attempt: setattr(nodes, "more", "n3" if attempt.number == 1 else "")
    state = scene.supervise(supervisor)
    assert (state.status, state.attempt, state.restarts) == ("finished", 2, 1)
    request = scene.run.attempt(1).read_request()
    assert request is not None
    assert (request.cause, request.sentence) == ("growth", "to restart on more nodes: n3 answers again")
    assert scene.run.attempt(2).read_request() is None


def test_nodes_that_the_preflight_check_leaves_out_are_not_recorded(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.script(first=[[*DONE]])
    supervisor = scene.supervisor(ScriptedJob(nodes=Nodes()))
    launcher, found = scene.launcher, []
    start = launcher.start

    def start_on_fewer_nodes(attempt: Attempt) -> LocalRanks:
        times = read_times(attempt)
        assert times is not None
        found.append((scene.run.read_state().world_size, times.num_ranks))
        launcher.num_ranks = 1
        return start(attempt)

    monkeypatch.setattr(launcher, "start", start_on_fewer_nodes)
    state = scene.supervise(supervisor)
    times = read_times(scene.run.attempt(1))
    assert times is not None
    assert found == [(2, 2)]
    assert (state.status, state.world_size, times.num_ranks, times.status) == ("finished", 1, 1, "finished")


def test_end_of_the_job_during_a_restart_on_more_nodes_ends_the_run(scene: Scene) -> None:
    scene.script(first=[STOP_ON_REQUEST, STOP_ON_REQUEST])
    nodes = Nodes(growth="n3")
    supervisor = scene.supervisor(ScriptedJob(nodes=nodes, ending=True))
    state = scene.supervise(supervisor)
    assert (state.status, state.attempt) == ("stopped", 1)
    request = scene.run.attempt(1).read_request()
    assert request is not None
    assert request.cause == "preemption"


@pytest.mark.parametrize("name", ["growth", "preemption", "SIGTERM", "{by}"])
def test_name_of_a_user_is_never_taken_for_the_cause_of_a_request(
    scene: Scene, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOGNAME", name)
    scene.script(first=[STOP_ON_REQUEST, [["await", "{attempt}/request.json"]]], second=[[*DONE], EXIT_0])
    scene.report.on_attempt = lambda attempt: attempt.number == 1 and end(scene.run, "stop")
    with hold(scene.run):
        state = scene.supervise()
    assert (state.status, state.attempt) == ("stopped", 1)
    assert state.reason == f"everything saved (`hpcdist stop` by {name})"
    request = scene.run.attempt(1).read_request()
    assert request is not None
    assert (request.cause, request.by) == ("user", f"`hpcdist stop` by {name}")
