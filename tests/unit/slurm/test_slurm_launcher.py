"""The step that runs the ranks: what srun says of those that ended, and which nodes they have."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import pytest
from supervisor_scene import Recorder

from hpcdist.config.schema import ClusterConfig, Config, LaunchConfig, RoleRequest
from hpcdist.errors import HpcdistError, PreflightError
from hpcdist.files.atomic import write_json
from hpcdist.run.attempt import Attempt
from hpcdist.run.folder import RunDir
from hpcdist.slurm import client
from hpcdist.slurm.current_job import CurrentJob
from hpcdist.slurm.job import orphaned_steps, rank_step
from hpcdist.slurm.job.preflight_step import Preflight
from hpcdist.slurm.job.rank_step import RankStep, ended_tasks
from hpcdist.slurm.job.slurm_launcher import SlurmLauncher, nodes_of
from hpcdist.supervisor.process_guard import Guard
from hpcdist.supervisor.restart_policy import Failure
from hpcdist.supervisor.supervisor import Supervisor

#: All tests of this file may start processes.
pytestmark = pytest.mark.processes


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

    monkeypatch.setattr(client, "node_features", node_features)
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
        self.ranks = RankStep(
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
    monkeypatch.setattr(rank_step, "SEARCH_PAUSE", 0.0)
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
    monkeypatch.setattr(rank_step, "FOLDER_TICK_S", 0.0)
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
    monkeypatch.setattr(rank_step, "SEARCH_PAUSE", 1e9)
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


def test_ranks_that_were_started_have_a_file(four: Step) -> None:
    assert four.ranks.absent() == [0, 1, 2, 3]
    assert four.ranks.last_message() == "no output of srun"
    four.attempt.log(2).touch()
    (four.attempt.path / ".rank-00001.reserve").touch()
    (four.attempt.path / "rank-00003.beat.json").touch()
    assert four.ranks.absent() == [0]
    four.ranks._shows_start = False
    assert four.ranks.absent() == [], "nobody can tell"
    four.say("srun: Job 7 step creation temporarily disabled, retrying (Requested nodes are busy)\n\n")
    said = "srun: Job 7 step creation temporarily disabled, retrying (Requested nodes are busy)"
    assert four.ranks.last_message() == said


def test_ranks_that_nobody_reports_to_srun_are_looked_for(four: Step, monkeypatch: pytest.MonkeyPatch) -> None:
    """After rank 0's own report, and not before."""
    monkeypatch.setattr(four.ranks, "_query_interval_s", 0.0)
    answers: list[set[int] | None] = [None, {2}, set()]
    asked = []

    def living() -> set[int] | None:
        asked.append(answers[0])
        return answers.pop(0)

    monkeypatch.setattr(four.ranks, "_running_ranks", living)
    four.ranks.wait(0)
    four.report(2, "done")
    four.ranks.wait(0.01)
    assert (asked, four.ranks.running) == ([], [0, 1, 2, 3])
    four.report(0, "done")
    while len(asked) < 2:  # the test's own time limit ends a look that never comes
        four.ranks.wait(0.01)
    assert asked == [None, {2}], "a node that does not answer, and a rank that lives"
    assert four.ranks.running == [0, 1, 2, 3]
    four.ranks.wait(0.01)
    assert four.ranks.exits == dict.fromkeys(range(4), 0)
    four.end()
    four.ranks._process.wait()


def test_a_step_that_fails_without_a_word_is_rank_0s_failure(four: Step) -> None:
    four.end()
    assert list(four.ranks.exits.items()) == [(0, 1), (1, 0), (2, 0), (3, 0)]


# --- beside the ranks: what is left of a supervisor before this one, and nodes that are at fault


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with scripts in Slurm's place.

    `steps` is what squeue lists, `nodes` what answers a roll call, `ranks` what nodes answer that kill ranks, `booted`
    what scontrol says of them. Steps end when they are cancelled, unless `stubborn` is there.
    """
    scripts = {
        "squeue": "cat steps",
        "scancel": 'echo "$@" >> cancelled; if test ! -e stubborn; then echo "7.batch batch" > steps; fi',
        "srun": 'case "$*" in *node_ranks*) echo "$@" >> asked; cat ranks;; *) cat nodes;; esac',
        "scontrol": "cat booted",
    }
    for name, text in scripts.items():
        (tmp_path / name).write_text(f"#!/bin/sh\ncd {tmp_path}\n{text}\n")
        (tmp_path / name).chmod(0o755)
    for name, text in {"steps": "7.batch batch", "nodes": "n1\nn2", "ranks": "n1\nn2", "booted": ""}.items():
        (tmp_path / name).write_text(f"{text}\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    return tmp_path


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that do not end are given up at once."""
    for name in ("END_S", "UNKILLABLE_S"):
        monkeypatch.setattr(orphaned_steps, name, 0.0)
    monkeypatch.setattr(client, "JOB_RETRY_S", 0.0)


def launcher_of(slurm: Path, runs_dir: Path, spare: str = "", **cluster: Any) -> SlurmLauncher:
    run = RunDir.create(runs_dir / "exp" / "first")
    env = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_ID": "7", "PATH": f"{slurm}:/usr/bin:/bin"}
    config = Config(cluster=ClusterConfig(nodes=2, **cluster))
    return SlurmLauncher(run, config, cast(CurrentJob, FakeJob(spare)), env=env, import_path=[], cwd=slurm)


def test_steps_of_a_killed_supervisor_are_ended(slurm: Path, runs_dir: Path) -> None:
    names = ("batch", "attempt-001", "het-watchdog", "preflight", "mine", "hpcdist-nodes", "hpcdist-containers")
    listing = "".join(f"7.{number} {name}\n" for number, name in enumerate(names))
    (slurm / "steps").write_text(listing)
    with launcher_of(slurm, runs_dir):
        assert (slurm / "cancelled").read_text() == "--signal=KILL 7.1 7.2 7.3 7.5 7.6\n"
        assert not (slurm / "asked").exists(), "they have ended: no node need look for their ranks"


def test_the_standby_of_this_supervisor_is_left_alone(slurm: Path, runs_dir: Path) -> None:
    (slurm / "steps").write_text("7.1 het-watchdog\n7.2 attempt-001\n")
    assert launcher_of(slurm, runs_dir).broken() == ""
    assert (slurm / "cancelled").read_text() == "--signal=KILL 7.2\n"


def test_beside_old_ranks_none_are_started(
    slurm: Path, runs_dir: Path, impatient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is the job given up for it: the failed start is followed by the question of what is broken."""
    monkeypatch.setattr(Preflight, "run", lambda self, attempt: None)
    (slurm / "stubborn").touch()
    (slurm / "steps").write_text("7.0 attempt-001\n")
    launcher = launcher_of(slurm, runs_dir)
    attempt = RunDir(runs_dir / "exp" / "first").new_attempt()
    lost_track = r"step 7\.0 \(attempt-001\) does not end, although none of its ranks is left"
    with launcher, pytest.raises(HpcdistError, match=f"^{lost_track}$"):
        launcher.start(attempt)
    (slurm / "squeue").write_text("#!/bin/sh\nexit 1\n")
    silent = "squeue: exit code 1"
    with launcher, pytest.raises(HpcdistError, match=f"^{silent}$"):
        launcher.start(attempt)
    assert launcher.broken() == silent


@pytest.mark.parametrize(
    ("ranks", "booted", "spare", "why", "avoid"),
    [
        # Slurm has lost track of the step: another life of the job is rid of it, on whatever nodes.
        ("n1\nn2", "2026-11-22T01:00:00", "n1 n2", ", although none of its ranks is left", []),
        ("n1\nn2", "2036-11-22T01:00:00", "n1 n2", ", although none of its ranks is left (n2 has rebooted)", []),
        ("n1\nn2 2 3", "", "n1 n2", ": ranks on n2 may survive SIGKILL, avoided from now on", ["n2"]),
        ("n1\nn2 2 3", "", "", ": ranks on n2 may survive SIGKILL", []),
        ("n2", "", "n1", ": ranks on n1 may survive SIGKILL, avoided from now on", ["n1"]),
    ],
)
def test_a_step_that_does_not_end_keeps_ranks_from_starting_here(
    slurm: Path, runs_dir: Path, impatient: None, ranks: str, booted: str, spare: str, why: str, avoid: list[str]
) -> None:
    (slurm / "stubborn").touch()
    (slurm / "steps").write_text("7.0 attempt-001\n")
    (slurm / "ranks").write_text(f"{ranks}\n")
    (slurm / "booted").write_text(f"NodeName=n1 BootTime=2026-11-22T01:00:00\nNodeName=n2 BootTime={booted}\n")
    launcher = launcher_of(slurm, runs_dir, spare)
    assert launcher.broken() == f"step 7.0 (attempt-001) does not end{why}"
    assert launcher.avoid == avoid
    run = runs_dir / "exp" / "first"
    assert f"-m hpcdist.slurm.job.node_ranks {run} kill\n" in (slurm / "asked").read_text()


def test_a_step_that_ends_late_is_waited_for(
    slurm: Path, runs_dir: Path, impatient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its ranks waited for a file system, say, and were gone in the end."""
    (slurm / "stubborn").touch()
    (slurm / "steps").write_text("7.0 attempt-001\n")
    (slurm / "srun").write_text(
        f'#!/bin/sh\ncd {slurm}\ncase "$*" in *node_ranks*) echo "n1 0"; echo n2; rm stubborn;; *) cat nodes;; esac\n'
    )
    monkeypatch.setattr(orphaned_steps, "UNKILLABLE_S", 30.0)
    assert launcher_of(slurm, runs_dir).broken() == ""


def test_no_node_is_taken_for_lost_while_the_controller_is_away(
    slurm: Path, runs_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (slurm / "squeue").write_text(f"#!/bin/sh\ncd {slurm}\necho x >> tries\ntest $(wc -l < tries) -gt 2 && cat steps\n")
    (slurm / "srun").write_text(f"#!/bin/sh\ncd {slurm}\ntest $(wc -l < tries) -gt 2 && cat nodes\n")
    assert launcher_of(slurm, runs_dir).broken() == ""


@pytest.mark.parametrize(("refuses", "why"), [(False, "within launch.init_timeout_s=0.5 s"), (True, "at all")])
def test_a_step_that_gets_no_processors_is_a_failure_in_sruns_own_words(
    slurm: Path, runs_dir: Path, monkeypatch: pytest.MonkeyPatch, refuses: bool, why: str
) -> None:
    """srun itself would wait for them without end, and `hang_timeout_s` is for ranks that train."""
    monkeypatch.setattr(Preflight, "run", lambda self, attempt: None)
    busy = "srun: Job 7 step creation temporarily disabled, retrying (Requested nodes are busy)"
    then = "exit 1" if refuses else "exec sleep 1000"
    script = f"case \"$*\" in *attempt-*) echo x >> starts; echo '{busy}' >&2; {then};; esac"
    (slurm / "srun").write_text(f"#!/bin/sh\ncd {slurm}\n{script}\ncat nodes\n")
    launcher = launcher_of(slurm, runs_dir)
    run = RunDir(runs_dir / "exp" / "first")
    config = Config(cluster=ClusterConfig(nodes=2), launch=LaunchConfig(init_timeout_s=0.5))
    report = Recorder()
    with launcher:
        state = Supervisor(run, config, launcher, report, tracking_uri=None, env={}).run()
    sentence = f"no rank was started {why}: {busy}"
    assert (state.status, state.reason) == ("failed", f"{sentence}, twice in a row: another restart would not help")
    assert [(failure.kind, log.name) for failure, log in report.failures] == [("not_started", "srun.log")] * 2
    assert (slurm / "starts").read_text() == "x\n" * 2


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
    launcher = SlurmLauncher(
        run, Config(cluster=ClusterConfig(nodes=2)), cast(CurrentJob, job), env=env, import_path=[], cwd=slurm
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

    monkeypatch.setattr(Preflight, "run", look)
    run = RunDir.create(runs_dir / "exp" / "first")
    config = Config(cluster=ClusterConfig(nodes=2))
    env = {"SLURM_JOB_NODELIST": "n[1-2]", "PATH": f"{slurm}:/usr/bin:/bin"}
    launcher = SlurmLauncher(run, config, cast(CurrentJob, FakeJob("")), env=env, import_path=[], cwd=slurm)
    with pytest.raises(PreflightError, match=r"^preflight: n2: disk: full$"):
        launcher.start(run.new_attempt())
    # Nobody would answer: there is no file with nodes.
    assert (launcher.broken(), launcher.avoid) == (why, avoid)


def test_the_nodes_of_a_step_are_examined_beside_its_ranks(
    slurm: Path, runs_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Preflight, "run", lambda self, attempt: None)
    (slurm / "srun").write_text('#!/bin/sh\necho "$@"\n')
    (slurm / "steps").write_text("7.batch batch\n")
    run = RunDir.create(runs_dir / "exp" / "first")
    attempt = run.new_attempt()
    env = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_ID": "7", "PATH": f"{slurm}:/usr/bin:/bin"}
    config = Config(cluster=ClusterConfig(nodes=2))
    with SlurmLauncher(run, config, cast(CurrentJob, FakeJob("")), env=env, import_path=[], cwd=slurm) as launcher:
        ranks = launcher.start(attempt)
        said = attempt.path / "stacks.log"
        ranks.examine(["python", "-m", "look"], output=said, limit_s=60, interrupted=lambda: False)
        ranks.close()
    each = "--overlap --job-name=hpcdist-nodes --nodes=2 --ntasks=2 --ntasks-per-node=1 --cpus-per-task=1 --input=none"
    assert said.read_text() == f"{each} python -m look\n"
