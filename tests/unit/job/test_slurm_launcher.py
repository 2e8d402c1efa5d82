"""The step of the parents of ranks: what it reports, its attempts, and steps of a killed supervisor."""

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import pytest
from forked_scene import (
    FAKE_SRUN,
    HELD,
    SOON_S,
    TORCH,
    StepScene,
    end_of,
    new_attempt,
    new_run,
    parents_of,
    wait_for_start,
    write_package,
)  # fmt: skip
from hpcdist_runs import wait_for
from supervisor_scene import NamedPipe, Recorder

from hpcdist.config.cluster_schema import ClusterConfig
from hpcdist.config.launch_schema import LaunchConfig
from hpcdist.config.schema import Config
from hpcdist.containers.container_steps import NoContainers
from hpcdist.environments.rank_environment import RankEnvironment
from hpcdist.errors import HpcdistError, PreflightError
from hpcdist.host.json_files import write_json
from hpcdist.job.launcher import RankStep, SlurmLauncher
from hpcdist.job.preflight_step import Preflight
from hpcdist.job.srun import ended_tasks
from hpcdist.run.folder import Attempt, RunDir
from hpcdist.slurm import client
from hpcdist.slurm.client import CurrentJob
from hpcdist.slurm.on_nodes import answer_lines
from hpcdist.supervisor.children import Guard
from hpcdist.supervisor.parents import RankParents
from hpcdist.supervisor.restart_policy import Failure
from hpcdist.supervisor.supervisor import Supervisor

#: All tests of this file may start processes.
pytestmark = pytest.mark.processes


# --- the ranks of a step


class Job:
    """The launcher of a step of four ranks on two nodes, as far as its ranks use it."""

    def __init__(self) -> None:
        self.num_ranks = 4
        self.hosts = ()
        self.parents_are_idle = False
        self.containers = NoContainers()
        self.num_ended = 0  #: steps that were ended
        #: The answers to queries for running ranks.
        self.answers: list[set[int] | None] = []

    def running_ranks(self) -> set[int] | None:
        return self.answers.pop(0)

    def end_step(self) -> None:
        self.num_ended += 1


class Step:
    """Four ranks under a fake srun, which prints the text that the test sends and then ends with exit code 1."""

    def __init__(self, attempt: Attempt, guard: Guard) -> None:
        self.attempt = attempt
        self.job = Job()
        pipe = attempt.path.parent / "messages"
        os.mkfifo(pipe)
        self.parents = RankParents(
            ["sh", "-c", f"cat '{pipe}' >&2; exit 1"],
            guard,
            env=os.environ,
            cwd=attempt.path,
            output=attempt.path / "srun.log",
            num_parents=4,
        )
        self.ranks = RankStep(self.parents, attempt, cast(SlurmLauncher, self.job))
        self._pipe: int | None = os.open(pipe, os.O_WRONLY)

    def print(self, text: str) -> None:
        """Let srun print a text and wait until it is in srun.log."""
        assert self._pipe is not None
        os.write(self._pipe, text.encode())
        while not self.parents.output.read_text().endswith(text):
            self.ranks.wait(0.005)
        self.ranks.wait(0)

    def end(self) -> None:
        """Let srun end and wait for the ranks."""
        if self._pipe is not None:
            os.close(self._pipe)
            self._pipe = None
        while self.ranks.remaining:
            self.ranks.wait(1.0)


@pytest.fixture
def step(runs_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Step]:
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    guard = Guard()
    step = Step(RunDir.create(runs_dir / "exp" / "run").new_attempt(), guard)
    yield step
    step.end()
    step.ranks.close()
    step.parents.close()
    guard.close()


def test_only_complete_lines_of_srun_are_parsed(step: Step) -> None:
    step.print("srun: error: n2: task 3: Ki")
    assert step.ranks.exits == {}
    step.print("lled\nsrun: error: n1: task 0: Exited with exit code 7\n")
    assert list(step.ranks.exits.items()) == [(3, -signal.SIGKILL), (0, 7)]
    assert (step.ranks.host_of(3), step.ranks.remaining) == ("n2", [1, 2])
    step.print("srun: error: n9: tasks 2-3: Terminated")
    assert 2 not in step.ranks.exits
    step.end()
    assert list(step.ranks.exits.items()) == [(3, -9), (0, 7), (2, -15), (1, 1)]
    assert step.ranks.host_of(3) == "n2", "the first message counts"


def test_rank_whose_parent_has_not_reported_has_not_started(step: Step) -> None:
    assert step.ranks.absent() == [0, 1, 2, 3]
    assert step.ranks.last_message(2) == "no output of srun"
    step.print("srun: Job 7 step creation temporarily disabled, retrying (Requested nodes are busy)\n\n")
    message = "srun: Job 7 step creation temporarily disabled, retrying (Requested nodes are busy)"
    assert step.ranks.last_message(2) == message
    assert step.ranks.absent() == [0, 1, 2, 3]
    step.attempt.log(2).write_text("slurmstepd: error: execve(): sh: No such file or directory\n")
    of_task = "slurmstepd: error: execve(): sh: No such file or directory"
    assert step.ranks.last_message(2) == f"{of_task} ({message})"
    assert step.ranks.last_message(0) == message, "that of rank 2 says nothing about others"


def test_nodes_are_asked_for_running_ranks_after_rank_0_ended(step: Step, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step.ranks, "_query_interval_s", 0.0)
    answers = step.job.answers = [None, {2}, set()]
    step.ranks.wait(0)
    write_json(step.attempt.outcome(2), {"outcome": "done"})
    step.ranks.wait(0.01)
    assert (len(answers), step.ranks.remaining) == (3, [0, 1, 2, 3])
    write_json(step.attempt.outcome(0), {"outcome": "done"})
    while len(answers) > 1:
        step.ranks.wait(0.01)
    # A node without an answer, then a running rank.
    assert step.ranks.remaining == [0, 1, 2, 3]
    step.ranks.wait(0.01)
    assert step.ranks.exits == dict.fromkeys(range(4), 0)


def test_messages_of_srun_count_only_for_lost_parents(
    tmp_path: Path, runs_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    scene = StepScene(tmp_path / "code", runs_dir, num_tasks=4)
    stay = "import signal; signal.pause()"
    attempt = new_attempt(scene.run, "import sys; sys.exit(5)", stay, stay, stay)
    job = Job()
    try:
        ranks = RankStep(scene.parents, attempt, cast(SlurmLauncher, job))
        while ranks.absent() or 0 in ranks.remaining:
            ranks.wait(SOON_S)
        assert (ranks.exits, scene.parents.output.read_text()) == ({0: 5}, "")
        assert [ranks.host_of(rank) for rank in range(4)] == ["n1", "n1", "n2", "n2"]
        for pid in parents_of(scene.run)[:2]:
            os.kill(pid, signal.SIGKILL)
        while 1 in ranks.remaining or scene.parents.output.read_text().count("Killed") < 2:
            ranks.wait(0.01)
        ranks.wait(0.01)
        assert (ranks.exits, ranks.remaining) == ({0: 5, 1: -9}, [2, 3])
        ranks.close()
        assert (ranks.exits, job.num_ended) == ({0: 5, 1: -9, 2: -9, 3: -9}, 1)
    finally:
        scene.close()


# --- steps of a killed supervisor, and faulty nodes


def alive(*names: str) -> str:
    return "".join(f"hpcdist-node {name}\n" for name in names)


def surviving(**ranks: list[int]) -> str:
    return "".join(f"{line}\n" for node, own in ranks.items() for line in answer_lines(node, {"ranks": own}))


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of fake Slurm commands, the first one on PATH.

    Files of this folder contain their output: `steps` that of squeue, `nodes` the node names, `ranks` the answers to
    the request to kill ranks. Steps end when they are cancelled, unless `stubborn` exists.
    """
    for name, text in {
        "squeue": "cat steps",
        "scancel": 'echo "$@" >> cancelled; if test ! -e stubborn; then echo "7.batch batch" > steps; fi',
        "srun": f'{IF_KILL} echo "$@" >> asked; cat ranks;; *) cat nodes;; esac',
    }.items():
        fake(tmp_path, name, text)
    outputs = {"steps": "7.batch batch\n", "nodes": alive("n1", "n2"), "ranks": surviving(n1=[], n2=[])}
    for name, text in outputs.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    return tmp_path


IF_KILL = 'case "$*" in *"node_steps kill"*)'
OF_RANKS = "*--job-name=ranks-*"


def fake(folder: Path, name: str, script: str) -> None:
    """Let a command of Slurm run a script in the folder."""
    (folder / name).write_text(f"#!/bin/sh\ncd {folder}\n{script}\n")
    (folder / name).chmod(0o755)


def stay(slurm: Path) -> None:
    """Let a step of an attempt not end when it is cancelled."""
    (slurm / "stubborn").touch()
    (slurm / "steps").write_text("7.0 ranks-001\n")


@pytest.fixture
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the time limits for the end of steps to 0."""
    for name in ("END_S", "UNKILLABLE_S"):
        monkeypatch.setattr(client, name, 0.0)
    monkeypatch.setattr(client, "JOB_RETRY_S", 0.0)


def launcher_of(slurm: Path, runs_dir: Path, spare: str = "", host: str = "", **cluster: Any) -> SlurmLauncher:
    """Return the launcher of a run on two nodes, in a partition that can replace the nodes in `spare`."""
    run = RunDir(runs_dir / "exp" / "first")
    if not run.path.exists():
        RunDir.create(run.path)
    env = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_ID": "7", "PATH": f"{slurm}:/usr/bin:/bin"}
    env["SLURMD_NODENAME"] = host
    environment, job = RankEnvironment(python=sys.executable, env=env), cast(CurrentJob, FakeJob(spare))
    config = Config(cluster=ClusterConfig(nodes=2, **cluster))
    return SlurmLauncher(run, config, job, environment, import_path=[str(slurm / "code")], cwd=slurm)


def preflight(monkeypatch: pytest.MonkeyPatch, error: HpcdistError | None = None, **results: Any) -> None:
    """Let the preflight check end with an error, and with values of its attributes."""

    def run_preflight(self: Preflight, _: Attempt) -> None:
        vars(self).update(results)
        if error is not None:
            raise error

    monkeypatch.setattr(Preflight, "run", run_preflight)


def test_steps_of_a_killed_supervisor_are_cancelled(slurm: Path, runs_dir: Path) -> None:
    names = ("batch", "ranks-001", "job-watchdog", "preflight", "mine", "hpcdist-nodes", "hpcdist-containers")
    listing = "".join(f"7.{number} {name}\n" for number, name in enumerate(names))
    (slurm / "steps").write_text(listing)
    with launcher_of(slurm, runs_dir) as launcher:
        assert (slurm / "cancelled").read_text() == "--signal=KILL 7.1 7.2 7.3 7.5 7.6\n"
        assert not (slurm / "asked").exists(), "the steps have ended: no search for their ranks"
        (slurm / "steps").write_text("7.1 job-watchdog\n7.2 ranks-001\n")
        assert launcher.broken() == ""
        assert (slurm / "cancelled").read_text().endswith("\n--signal=KILL 7.2\n"), "not its own watchdog"


def test_no_ranks_start_while_an_old_step_remains(
    slurm: Path, runs_dir: Path, no_waiting: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    preflight(monkeypatch)
    stay(slurm)
    launcher = launcher_of(slurm, runs_dir)
    attempt = RunDir(runs_dir / "exp" / "first").new_attempt()
    error = r"^step 7\.0 \(ranks-001\) does not end, although none of its ranks is left$"
    with launcher, pytest.raises(HpcdistError, match=error):
        launcher.start(attempt)
    fake(slurm, "squeue", "exit 1")
    with launcher, pytest.raises(HpcdistError, match=r"^squeue: exit code 1$"):
        launcher.start(attempt)
    assert launcher.broken() == "squeue: exit code 1"


@pytest.mark.parametrize(
    ("ranks", "spare", "why", "avoid"),
    [
        # Only Slurm's record of the step remains: a restart of the job on any nodes removes it.
        (surviving(n1=[], n2=[]), "n1 n2", ", although none of its ranks is left", []),
        (surviving(n1=[], n2=[2, 3]), "n1 n2", ": ranks on n2 may survive SIGKILL, avoided from now on", ["n2"]),
        (surviving(n2=[]), "n1", ": ranks on n1 may survive SIGKILL, avoided from now on", ["n1"]),
    ],
)  # fmt: skip
def test_step_that_does_not_end_is_a_reason_to_requeue(
    slurm: Path, runs_dir: Path, no_waiting: None, ranks: str, spare: str, why: str, avoid: list[str]
) -> None:
    stay(slurm)
    (slurm / "ranks").write_text(ranks)
    launcher = launcher_of(slurm, runs_dir, spare)
    assert launcher.broken() == f"step 7.0 (ranks-001) does not end{why}"
    assert launcher.avoid == avoid
    run = runs_dir / "exp" / "first"
    assert f"-m hpcdist.job.node_steps kill {run}\n" in (slurm / "asked").read_text()


def test_step_that_ends_late_is_no_reason_to_requeue(
    slurm: Path, runs_dir: Path, no_waiting: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks may have waited for a file system."""
    stay(slurm)
    (slurm / "ranks").write_text(surviving(n1=[0], n2=[]))
    fake(slurm, "srun", f"{IF_KILL} cat ranks; rm stubborn;; *) cat nodes;; esac")
    monkeypatch.setattr(client, "UNKILLABLE_S", 30.0)
    assert launcher_of(slurm, runs_dir).broken() == ""


def test_unreachable_controller_does_not_make_nodes_lost(slurm: Path, runs_dir: Path) -> None:
    """A restarted controller starts steps once its nodes have answered it."""
    for name, output, tries in (("squeue", "steps", 2), ("srun", "nodes", 4)):
        fake(slurm, name, f"echo {name} >> tries\ntest $(wc -l < tries) -gt {tries} && cat {output}")
    assert launcher_of(slurm, runs_dir).broken() == ""
    assert (slurm / "tries").read_text().split()[:5] == ["squeue"] * 3 + ["srun"] * 2


def test_refusal_of_srun_does_not_make_nodes_lost(
    slurm: Path, runs_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """No node can cure it, and waiting does not either."""
    refusal = "srun: fatal: --gpus-per-node and --gres=gpu are mutually exclusive"
    fake(slurm, "srun", f"echo x >> tries; echo '{refusal}' >&2; exit 1")
    launcher = launcher_of(slurm, runs_dir, "n1 n2")
    assert launcher.broken() == ""
    assert launcher.avoid == []
    assert (slurm / "tries").read_text() == "x\n"
    assert f"Slurm starts no step on any node: {refusal}" in caplog.text


def test_nodes_are_lost_if_a_step_starts_on_this_host_only(slurm: Path, runs_dir: Path) -> None:
    """A step with a lost node may start on none."""
    fake(slurm, "srun", f"case \"$*\" in *--nodelist=n1*) echo '{alive('n1').strip()}';; *) exit 1;; esac")
    launcher = launcher_of(slurm, runs_dir, "n1 n2", host="n1")
    assert launcher.broken() == "lost n2, avoided from now on"
    assert launcher.avoid == ["n2"]


@pytest.mark.parametrize(
    ("refuses", "limit_s", "why"), [(False, 0.5, "within launch.init_timeout_s=0.5 s"), (True, 600.0, "at all")]
)
def test_step_that_starts_no_rank_fails_with_the_message_of_srun(
    slurm: Path, runs_dir: Path, monkeypatch: pytest.MonkeyPatch, refuses: bool, limit_s: float, why: str
) -> None:
    """srun waits for processors without a limit, and `hang_timeout_s` applies to ranks that have started."""
    preflight(monkeypatch)
    busy = "srun: Job 7 step creation temporarily disabled, retrying (Requested nodes are busy)"
    then = "exit 1" if refuses else "exec sleep 1000"
    fake(slurm, "srun", f"case \"$*\" in {OF_RANKS}) echo x >> starts; echo '{busy}' >&2; {then};; esac\ncat nodes")
    launcher = launcher_of(slurm, runs_dir)
    run = RunDir(runs_dir / "exp" / "first")
    config = Config(cluster=ClusterConfig(nodes=2), launch=LaunchConfig(init_timeout_s=limit_s))
    report = Recorder()
    start = launcher.start

    def start_until_message(attempt: Attempt) -> Any:
        """Let the time limit begin once srun has printed its message."""
        ranks = start(attempt)
        wait_for(lambda: busy in ranks.last_message(0), "the message of srun")
        return ranks

    monkeypatch.setattr(launcher, "start", start_until_message)
    with launcher:
        state = Supervisor(run, config, launcher, report, tracking_uri=None, env={}).run()
    reason = f"no rank was started {why}: {busy}, twice in a row: another restart would not help"
    assert (state.status, state.reason) == ("failed", reason)
    assert [(failure.kind, log.name) for failure, log in report.failures] == [("not_started", "srun.log")] * 2
    assert (slurm / "starts").read_text() == "x\n" * 2


class FakeJob:
    """A job in a partition that can replace the nodes in `spare`."""

    def __init__(self, spare: str) -> None:
        self.spare = spare
        self.id = "7"
        self.nodes = ("n1", "n2")
        self.queries: list[tuple[list[str], bool]] = []

    def allocated(self) -> tuple[str, ...]:
        return self.nodes

    def replaceable(self, nodes: Sequence[str], *, idle_only: bool) -> bool:
        self.queries.append((list(nodes), idle_only))
        return set(nodes) <= set(self.spare.split())


@pytest.mark.parametrize(
    ("answers", "failed_on", "spare", "why", "avoid", "idle_only"),
    [
        ("n1", [], "", "lost n2", [], True),
        ("n1", [], "n2", "lost n2, avoided from now on", ["n2"], True),
        ("n1 n2", ["n2.site", "n2.site"], "", "", [], False),
        ("n1 n2", ["n2.site", "n2.site"], "n2",
         "ranks on n2 have failed twice in a row, and on no other node: avoided from now on", ["n2"], False),
    ],
)  # fmt: skip
def test_lost_and_failing_nodes_are_avoided_if_replaceable(
    slurm: Path, runs_dir: Path, answers: str, failed_on: list[str], spare: str, why: str, avoid: list[str],
    idle_only: bool,
) -> None:  # fmt: skip
    (slurm / "nodes").write_text(alive(*answers.split()))
    run = RunDir.create(runs_dir / "exp" / "first")
    for host in failed_on:
        failure = Failure(kind="error", rank=0, host=host, step=1, error="device lost", traceback=("Traceback",))
        write_json(run.new_attempt().failure, asdict(failure))
    launcher = launcher_of(slurm, runs_dir, spare)
    assert (launcher.broken(), launcher.avoid) == (why, avoid)
    assert cast(FakeJob, launcher.job).queries == [(["n2"], idle_only)]


FULL = PreflightError("preflight: n1: disk: full")


@pytest.mark.parametrize(("avoid", "why"), [([], ""), (["n2"], "n2 avoided from now on")])
def test_nodes_are_not_queried_after_a_failed_preflight(
    slurm: Path, runs_dir: Path, monkeypatch: pytest.MonkeyPatch, avoid: list[str], why: str
) -> None:
    preflight(monkeypatch, FULL, failed=True, avoid=avoid)
    with launcher_of(slurm, runs_dir) as launcher:
        with pytest.raises(PreflightError, match=r"^preflight: n1: disk: full$"):
            launcher.start(launcher.run.new_attempt())
        assert (launcher.broken(), launcher.avoid) == (why, avoid)


def test_elastic_run_continues_without_a_node_failing_preflight(
    slurm: Path, runs_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    preflight(monkeypatch, FULL, failed=True, blamed=["n1"])
    (slurm / "ranks").write_text(surviving(n1=[]))
    fake(slurm, "srun", f'{IF_KILL} cat ranks;; *) echo "$@" >&2;; esac')
    launcher = launcher_of(slurm, runs_dir, min_nodes=1, tasks_per_node=2)
    cast(FakeJob, launcher.job).id = "5_2"
    with launcher:
        assert (launcher.num_ranks, launcher.nodes.used.names) == (4, ("n1", "n2"))
        ranks = launcher.start(launcher.run.new_attempt())
        ranks.wait(10)
        ranks.close()
        assert (launcher.num_ranks, launcher.nodes.used.names) == (2, ("n2",))
        assert launcher.resources.idle == ("n1",)
        assert launcher.resources.nodes["n2"].ranks == [0, 1]
        assert ranks.host_of(1) == "n2"
        watchdog = launcher.run.path / "attempts" / "job-watchdog.log"
        wait_for(lambda: "--nodelist=n2" in watchdog.read_text(), "the watchdog on a node other than the batch host")
        assert watchdog.read_text().endswith(" 5_2\n"), "it must not requeue the whole array"
    words = (ranks.attempt.path / "srun.log").read_text()
    assert "--nodes=1 --ntasks=2" in words
    assert "--nodelist=n2" in words


def test_node_that_dies_before_the_ranks_start_is_left_out(
    slurm: Path, runs_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    preflight(monkeypatch, HpcdistError("environment on n2: no answer"))
    fake(slurm, "srun", "cat ranks")
    (slurm / "ranks").write_text(surviving(n1=[]))
    with launcher_of(slurm, runs_dir, min_nodes=1) as launcher:
        with pytest.raises(HpcdistError, match="no answer"):
            launcher.start(launcher.run.new_attempt())
        assert launcher.nodes.replace_lost() == "no answer from n2: continuing on 1 of 2 nodes"


def test_examine_runs_a_command_once_per_node_beside_the_ranks(
    slurm: Path, runs_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    preflight(monkeypatch)
    fake(slurm, "srun", 'echo "$@"')
    with launcher_of(slurm, runs_dir) as launcher:
        ranks = launcher.start(launcher.run.new_attempt())
        output = ranks.examine(["python", "-m", "look"], limit_s=60, interrupted=lambda: False)
        ranks.close()
    options = "--job-name=hpcdist-nodes --overlap --nodes=2 --ntasks=2 --ntasks-per-node=1 --cpus-per-task=1"
    assert output == f"{options} --input=none python -m look\n"


# --- the parents of all attempts


@pytest.fixture
def parents(slurm: Path, runs_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlurmLauncher]:
    """A launcher on two nodes, whose step consists of real parents. `starts` has the name of each step."""
    preflight(monkeypatch)
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    new_run(runs_dir)
    write_package(slurm / "code", TORCH)
    start = f"echo \"$1\" >> starts; echo '7.4 '${{1#*=}} >> steps; FAKE_SRUN_TASKS={slurm}/tasks"
    start += f' exec {sys.executable} -IS {FAKE_SRUN} "$@";;'
    fake(slurm, "srun", f'{IF_KILL} cat ranks;; {OF_RANKS}) {start} *) echo "$1" >> asked; cat nodes;; esac')
    fake(slurm, "scancel", 'echo "$@" >> cancelled; echo "7.batch batch" > steps; kill -KILL $(cat tasks)')
    launcher = launcher_of(slurm, runs_dir)
    with launcher:
        yield launcher
    assert parents_of(launcher.run) == []


def finish(launcher: SlurmLauncher, *codes: str) -> dict[int, int]:
    return end_of(launcher.start(new_attempt(launcher.run, *codes)))


def test_attempts_share_the_step_of_their_parents(slurm: Path, parents: SlurmLauncher) -> None:
    assert finish(parents, "import sys; sys.exit(3)", "pass") == {0: 3, 1: 0}
    before = parents_of(parents.run)
    assert parents.broken() == ""
    assert not (slurm / "asked").exists(), "the parents have just answered from all nodes"
    assert finish(parents, "pass", "import os; os.kill(os.getpid(), 9)") == {0: 0, 1: -9}
    assert parents_of(parents.run) == before
    assert (slurm / "starts").read_text() == "--job-name=ranks-001\n"
    assert not (slurm / "cancelled").exists()


def test_lost_parent_is_replaced_by_a_new_step(slurm: Path, parents: SlurmLauncher, tmp_path: Path) -> None:
    """The ranks on the other node end with the old step."""
    with NamedPipe(tmp_path / "pipe") as pipe:
        code = HELD.format(pipe=str(pipe.path))
        ranks = parents.start(new_attempt(parents.run, code, code))
        wait_for_start(ranks, pipe)
        os.kill(parents_of(parents.run)[1], signal.SIGKILL)
        while 1 in ranks.remaining:
            ranks.wait(0.01)  # no report follows
        assert ranks.exits == {1: -9}
        ranks.close()
        assert pipe.is_released(SOON_S)
    assert (slurm / "cancelled").read_text() == "--signal=KILL 7.4\n"
    assert parents.broken() == ""
    assert "--job-name=hpcdist-nodes" in (slurm / "asked").read_text(), "a node may be lost"
    assert finish(parents, "import sys; sys.exit(3)", "pass") == {0: 3, 1: 0}
    assert (slurm / "starts").read_text() == "--job-name=ranks-001\n--job-name=ranks-002\n"


def test_tasks_of_a_killed_srun_end_before_the_next_attempt(
    slurm: Path, parents: SlurmLauncher, tmp_path: Path
) -> None:
    with NamedPipe(tmp_path / "pipe") as pipe:
        code = HELD.format(pipe=str(pipe.path))
        ranks = parents.start(new_attempt(parents.run, code, code))
        wait_for_start(ranks, pipe)
        os.kill(ranks.parents.process.pid, signal.SIGKILL)
        assert end_of(ranks) == {0: -9, 1: -9}
        assert parents.broken() == ""
        assert pipe.is_released(SOON_S)
    assert (slurm / "cancelled").read_text() == "--signal=KILL 7.4\n"
    assert finish(parents, "pass", "pass") == {0: 0, 1: 0}


# --- exit codes of tasks from the messages of srun


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ("srun: error: g7.site: tasks 1,4-5: Exited with exit code 143\n", dict.fromkeys((1, 4, 5), ("g7.site", 143))),
        ("srun: error: n1: task 0: Segmentation fault (core dumped)\n", {0: ("n1", -signal.SIGSEGV)}),
        ("srun: error: n1: task 0: Out Of Memory\n", {0: ("n1", -signal.SIGKILL)}),
        ("srun: error: n1: task 0: Something new\n", {0: ("n1", 1)}),
        ("srun: error: Node failure on n2\nsrun: Job step aborted: Waiting up to 7 seconds\n", {}),
    ],
)
def test_messages_of_srun_give_exit_codes_by_task(messages: str, expected: dict[int, tuple[str, int]]) -> None:
    assert ended_tasks(messages) == expected
