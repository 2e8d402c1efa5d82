"""The step that runs the ranks: what srun says of those that ended, and which nodes they have."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import pytest

from hpcdist.errors import HpcdistError, PreflightError
from hpcdist.launch.guard import Guard
from hpcdist.launch.job import step, step_ranks
from hpcdist.launch.job.preflight import Preflight
from hpcdist.launch.job.scontrol import Job
from hpcdist.launch.job.step import StepLauncher, end_old_steps, nodes_of
from hpcdist.launch.job.step_ranks import StepRanks, ended_tasks
from hpcdist.launch.policy import Failure
from hpcdist.rundir import Attempt, RunDir, write_json
from hpcdist.schema import ClusterConfig, Config, RoleRequest


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


def test_tasks_of_a_further_component_are_counted_from_its_first_rank() -> None:
    """As 22.05 said it of ranks 3 and 0 of a heterogeneous step with 1 and 4 tasks."""
    messages = "srun: error: n3: task 2: Killed\nsrun: error: n1: task 0: Terminated\n"
    assert ended_tasks(messages, {"n1": 0, "n2": 1, "n3": 1}) == {
        3: ("n3", -signal.SIGKILL),
        0: ("n1", -signal.SIGTERM),
    }


def roles(**worker: object) -> Config:
    requests = {"worker": RoleRequest(nodes=2, **worker)}  # type: ignore[arg-type]
    return Config(roles={"server": 1, "worker": 4}, cluster=ClusterConfig(roles=requests))


def test_the_nodes_of_each_component(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = {"SLURM_JOB_NODELIST": "n[1-3]"}
    assert nodes_of(Config(), whole) == [("n1", "n2", "n3")]
    assert nodes_of(roles(), whole) == [("n1",), ("n2", "n3")]
    # In the batch step of a heterogeneous job the plain list is the first component's.
    het = {
        "SLURM_JOB_NODELIST": "n2",
        "SLURM_JOB_NODELIST_HET_GROUP_0": "n2",
        "SLURM_JOB_NODELIST_HET_GROUP_1": "n[3-4]",
    }
    assert nodes_of(roles(gpus_per_node=1), het) == [("n2",), ("n3", "n4")]

    def node_features(nodes: Sequence[str]) -> dict[str, frozenset[str]]:
        return {node: frozenset({"fast"} if node in ("n1", "n2") else ()) for node in nodes}

    monkeypatch.setattr(step, "node_features", node_features)
    wanting = roles(constraint="fast")
    placed = Config(roles=wanting.roles, cluster=ClusterConfig(roles=wanting.cluster.roles, het=False))
    assert nodes_of(placed, whole) == [("n3",), ("n1", "n2")]


# --- the ranks of a step


class Step:
    """Four ranks under a stand-in for srun, which says what the test tells it and then ends with exit code 1."""

    def __init__(self, attempt: Attempt, guard: Guard) -> None:
        self.attempt = attempt
        pipe = attempt.path.parent / "words"
        os.mkfifo(pipe)
        self.ranks = StepRanks(
            ["sh", "-c", f"cat '{pipe}'; exit 1"], dict(os.environ), 4, attempt, guard, cwd=attempt.path
        )
        self._words: int | None = os.open(pipe, os.O_WRONLY)

    def say(self, text: str) -> None:
        assert self._words is not None
        os.write(self._words, text.encode())
        log = self.attempt.path / "srun.log"
        while not log.read_text().endswith(text):  # the test's own time limit ends a stand-in that does nothing
            self.ranks.wait(0.005)
        self.ranks.wait(0)

    def report(self, rank: int, outcome: str, **details: Any) -> None:
        write_json(self.attempt.outcome(rank), {"outcome": outcome, "time": 1000.0 + rank, **details})

    def end(self) -> None:
        """srun ends; the ranks are waited for."""
        if self._words is not None:
            os.close(self._words)
            self._words = None
        while self.ranks.running:
            self.ranks.wait(1.0)


@pytest.fixture
def four(runs_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Step]:
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    monkeypatch.setattr(step_ranks, "SEARCH_PAUSE", 0.0)
    guard = Guard()
    opened = Step(RunDir.create(runs_dir / "exp" / "run").new_attempt(), guard)
    yield opened
    opened.end()
    opened.ranks.close()
    guard.close()


@pytest.fixture
def searches(four: Step, monkeypatch: pytest.MonkeyPatch) -> list[set[int]]:
    """Each search through the attempt's folder: the ranks whose reports it read."""
    found: list[set[int]] = []
    real = Attempt.outcomes

    def outcomes(attempt: Attempt, **options: Any) -> dict[int, dict[str, Any]]:
        result = real(attempt, **options)
        found.append(set(result))
        return result

    monkeypatch.setattr(Attempt, "outcomes", outcomes)
    return found


def test_a_failure_that_srun_says_nothing_of_is_found_in_the_reports(four: Step) -> None:
    """srun goes on waiting for tasks of a dead node."""
    four.ranks.wait(0)
    assert four.ranks.running == [0, 1, 2, 3]
    four.report(2, "failed")
    four.report(1, "rejected")
    four.report(0, "done")
    four.ranks.wait(0)
    assert (list(four.ranks.exits.items()), four.ranks.running) == ([(1, 2), (2, 1)], [0, 3])


def test_a_report_is_read_once(four: Step, searches: list[set[int]]) -> None:
    for rank in (3, 1):
        four.report(rank, "failed")
        four.ranks.wait(0)
        four.ranks.wait(0)
    assert [found for found in searches if found] == [{3}, {1}]


def test_a_folder_that_does_not_change_is_not_searched(
    four: Step, searches: list[set[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_ranks, "FOLDER_TICK_S", 0.0)
    four.ranks.wait(0)
    searches.clear()
    for _ in range(20):
        four.ranks.wait(0)
    assert searches == []
    four.report(3, "failed")
    four.ranks.wait(0)
    four.ranks.wait(0)
    assert searches == [{3}]


def test_a_report_in_the_same_tick_of_the_folders_clock_is_found_all_the_same(
    four: Step, searches: list[set[int]]
) -> None:
    four.ranks.wait(0)
    before = four.attempt.path.stat()
    four.report(3, "failed")
    os.utime(four.attempt.path, ns=(before.st_atime_ns, before.st_mtime_ns))
    four.ranks.wait(0)
    assert searches[-1] == {3}


def test_a_search_that_takes_long_is_not_repeated_at_once(
    four: Step, searches: list[set[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    four.ranks.wait(0)
    searches.clear()
    monkeypatch.setattr(step_ranks, "SEARCH_PAUSE", 1e9)
    for rank in range(1, 4):
        four.report(rank, "failed")
        four.ranks.wait(0)
    assert searches == [{1}]
    four.end()
    assert searches == [{1}, {2, 3}], "at the end in any case"


def test_srun_is_heard_a_whole_line_at_a_time(four: Step) -> None:
    four.say("srun: error: n2: task 3: Ki")
    assert four.ranks.exits == {}
    four.say("lled\nsrun: error: n1: task 0: Exited with exit code 7\n")
    assert list(four.ranks.exits.items()) == [(3, -signal.SIGKILL), (0, 7)]
    assert (four.ranks.host_of(3), four.ranks.running) == ("n2", [1, 2])
    four.say("srun: error: n9: tasks 2-3: Terminated")
    assert 2 not in four.ranks.exits
    four.end()
    assert list(four.ranks.exits.items()) == [(3, -9), (0, 7), (2, -15), (1, 0)]
    assert four.ranks.host_of(3) == "n2", "its first word counts"


def test_a_step_that_fails_without_a_word_is_rank_0s_failure(four: Step) -> None:
    four.end()
    assert list(four.ranks.exits.items()) == [(0, 1), (1, 0), (2, 0), (3, 0)]


# --- beside the ranks: what is left of a supervisor before this one, and nodes that are at fault


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with scripts in Slurm's place: `steps` is what squeue lists, `nodes` what answers a roll call."""
    scripts = {
        "squeue": "cat steps",
        "scancel": 'echo "$@" >> cancelled; if test ! -e stubborn; then echo "7.batch batch" > steps; fi',
        "srun": "cat nodes",
    }
    for name, text in scripts.items():
        (tmp_path / name).write_text(f"#!/bin/sh\ncd {tmp_path}\n{text}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    return tmp_path


def test_steps_of_a_killed_supervisor_are_ended(slurm: Path) -> None:
    (slurm / "steps").write_text("7.batch batch\n7.0 attempt-001\n7.2 attempt-002\n7.3 mine\n")
    end_old_steps()
    assert (slurm / "cancelled").read_text() == "--signal=KILL 7.0 7.2\n"
    end_old_steps()
    assert (slurm / "cancelled").read_text() == "--signal=KILL 7.0 7.2\n", "there was nothing more to end"


def test_beside_old_ranks_none_are_started(slurm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "OLD_STEPS_S", 0.0)
    (slurm / "stubborn").touch()
    (slurm / "steps").write_text("7.0 attempt-001\n")
    with pytest.raises(HpcdistError, match=r"^step 7\.0 does not end: it has ranks of a supervisor before this one$"):
        end_old_steps()
    (slurm / "squeue").write_text("#!/bin/sh\nexit 1\n")
    with pytest.raises(
        HpcdistError, match=r"^squeue does not answer: are there ranks of a supervisor before this one$"
    ):
        end_old_steps()


class FakeJob:
    """A job in a partition that can do without the nodes named `spare`."""

    def __init__(self, spare: str) -> None:
        self.spare = spare
        self.asked: list[tuple[list[str], bool]] = []

    def replaceable(self, nodes: Sequence[str], *, idle_only: bool) -> bool:
        self.asked.append((list(nodes), idle_only))
        return set(nodes) <= set(self.spare.split())


@pytest.mark.parametrize(
    ("answers", "failed_on", "spare", "why", "avoid", "idle_only"),
    [
        ("n1 n2", [], "n1 n2", "", [], None),
        ("n1", [], "", "lost n2", [], True),
        ("n1", [], "n2", "lost n2, avoided from now on", ["n2"], True),
        ("n1 n2", ["n2.site", "n2.site"], "", "", [], False),
        (
            "n1 n2",
            ["n2.site", "n2.site"],
            "n2",
            "ranks on n2.site have failed twice in a row, and on no other node: avoided from now on",
            ["n2"],
            False,
        ),
        ("n1 n2", ["n9", "n9"], "n9", "", [], None),
    ],
)
def test_nodes_at_fault(
    slurm: Path,
    runs_dir: Path,
    answers: str,
    failed_on: list[str],
    spare: str,
    why: str,
    avoid: list[str],
    idle_only: bool | None,
) -> None:
    (slurm / "nodes").write_text("\n".join(answers.split()) + "\n")
    run = RunDir.create(runs_dir / "exp" / "first")
    for host in failed_on:
        failure = Failure(kind="error", rank=0, host=host, step=1, error="device lost", traceback=("Traceback",))
        write_json(run.new_attempt().failure, asdict(failure))
    job = FakeJob(spare)
    env = {"SLURM_JOB_NODELIST": "n[1-2]", "PATH": f"{slurm}:/usr/bin:/bin"}
    launcher = StepLauncher(
        run, Config(cluster=ClusterConfig(nodes=2)), cast(Job, job), env=env, import_path=[], cwd=slurm
    )
    assert (launcher.broken(), launcher.avoid) == (why, avoid)
    assert job.asked == ([] if idle_only is None else [(["n2"], idle_only)])


@pytest.mark.parametrize(("avoid", "why"), [([], ""), (["n2"], "n2 avoided from now on")])
def test_nodes_that_are_not_fit_need_no_roll_call(
    slurm: Path, runs_dir: Path, monkeypatch: pytest.MonkeyPatch, avoid: list[str], why: str
) -> None:
    def look(self: Preflight, _: Attempt) -> None:
        self.failed, self.avoid = True, avoid
        raise PreflightError("preflight: n2: disk: full")

    monkeypatch.setattr(Preflight, "look", look)
    run = RunDir.create(runs_dir / "exp" / "first")
    config = Config(cluster=ClusterConfig(nodes=2))
    env = {"SLURM_JOB_NODELIST": "n[1-2]", "PATH": f"{slurm}:/usr/bin:/bin"}
    launcher = StepLauncher(run, config, cast(Job, FakeJob("")), env=env, import_path=[], cwd=slurm)
    with pytest.raises(PreflightError, match=r"^preflight: n2: disk: full$"):
        launcher.start(run.new_attempt())
    # Nobody would answer: there is no file with nodes.
    assert (launcher.broken(), launcher.avoid) == (why, avoid)


def test_the_nodes_of_a_step_are_examined_beside_its_ranks(
    slurm: Path, runs_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Preflight, "look", lambda self, attempt: None)
    (slurm / "srun").write_text('#!/bin/sh\necho "$@"\n')
    (slurm / "steps").write_text("7.batch batch\n")
    run = RunDir.create(runs_dir / "exp" / "first")
    attempt = run.new_attempt()
    env = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_ID": "7", "PATH": f"{slurm}:/usr/bin:/bin"}
    config = Config(cluster=ClusterConfig(nodes=2))
    with StepLauncher(run, config, cast(Job, FakeJob("")), env=env, import_path=[], cwd=slurm) as launcher:
        ranks = launcher.start(attempt)
        said = attempt.path / "stacks.log"
        ranks.examine(["python", "-m", "look"], output=said, limit_s=60, interrupted=lambda: False)
        ranks.close()
    each = "--overlap --nodes=2 --ntasks=2 --ntasks-per-node=1 --cpus-per-task=1 --input=none"
    assert said.read_text() == f"{each} python -m look\n"
