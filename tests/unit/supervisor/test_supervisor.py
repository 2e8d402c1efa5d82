"""Supervisor with fake ranks (`support/fake_rank.py`): processes that write the files of a rank."""

import itertools
import json
import os
import pty
import select
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hpcdist_runs import wait_for
from supervisor_scene import DONE, EXIT_0, STOP_ON_REQUEST, STUBBORN, NamedPipe, Scene, ScriptedJob, fails

from hpcdist.errors import HpcdistError, LeaseLostError, RunFolderError
from hpcdist.review.explain import explain
from hpcdist.run.attempt_times import NodeShare, Resources, read_times
from hpcdist.run.fitted_batch import read_fitted
from hpcdist.run.folder import IDENTITY_VARIABLE, Attempt, RunDir, State, StopRequest, identity
from hpcdist.supervisor import supervisor as supervisor_module
from hpcdist.supervisor.local_launcher import LocalLauncher, LocalRanks
from hpcdist.supervisor.parents import ParentRanks
from hpcdist.supervisor.protocols import NodeChanges
from hpcdist.supervisor.signals import SignalRequests
from hpcdist.supervisor.watch import Allocation
from hpcdist.tracking.journal import read_records
from hpcdist.tracking.run_tags import state_tags

#: All tests of this file may start processes.
pytestmark = pytest.mark.processes

#: A rank that got a stop signal without a request.
STOPS: list[list[Any]] = [["report", {"outcome": "stopped"}]]
PEER_LOST = fails("RuntimeError: Connection closed by peer", peer_lost=True)


@pytest.fixture
def scene(runs_dir: Path) -> Scene:
    return Scene(RunDir.create(runs_dir / "exp" / "first"))


@pytest.fixture
def alive(scene: Scene) -> Iterator[NamedPipe]:
    """A pipe that the grandchildren of fake ranks hold open."""
    with NamedPipe(scene.run.path / "alive") as pipe:
        yield pipe


# --- failures


GPU_FULL = "torch.OutOfMemoryError: CUDA out of memory"


def test_micro_batches_are_halved_until_a_step_fits(scene: Scene) -> None:
    scene.launch = {"fit_batch": True, "max_restarts": 0}
    scene.data = {"global_batch_size": 24}
    scene.script(
        first=[fails(GPU_FULL, num_micro_batches=2), EXIT_0],
        second=[EXIT_0, fails(GPU_FULL, num_micro_batches=4)],
        third=[DONE, EXIT_0],
    )
    state = scene.supervise()
    assert (state.status, state.attempt, state.restarts) == ("finished", 3, 2)
    assert read_fitted(scene.run) == 8
    assert state_tags(scene.run, state)["hpcdist.fitted_micro_batches"] == "8", "in MLflow"
    (first, second) = [note for note in scene.report.notes if note.startswith("restart")]
    assert first.endswith("; launch.fit_batch: 4 micro-batches of 6 samples from now on, before 2")
    assert second.endswith("; launch.fit_batch: 8 micro-batches of 3 samples from now on, before 4")
    scene.run.fitted_batch.write_text('{"format": 1, "num_micro_batches": 0, "attempt": 1}')
    with pytest.raises(RunFolderError, match=r"fitted_batch\.json is damaged: 0 micro-batches; remove it"):
        read_fitted(scene.run)


def test_smallest_micro_batches_are_not_halved(scene: Scene) -> None:
    scene.launch = {"fit_batch": True, "max_restarts": 0}
    scene.data = {"global_batch_size": 24}
    scene.script(first=[fails(GPU_FULL, num_micro_batches=8), EXIT_0])
    assert scene.supervise().status == "failed"
    assert "launch.fit_batch: the micro-batches of 3 samples cannot be halved any more" in scene.report.notes
    assert read_fitted(scene.run) is None


CHILD_OF_RANKS = "the kernel killed a child process of the ranks on fakehost: out of memory, with a limit of 8 MiB for"


def kill_child(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the parents report that the kernel has killed a child process of each rank."""
    kill = {"count": 1, "scope": "step", "limit_bytes": 2**23}
    note = ParentRanks._note

    def note_with_kill(ranks: ParentRanks, report: Mapping[str, Any]) -> None:
        if "code" in report:
            report = {**report, "memory_kill": kill}
        note(ranks, report)

    monkeypatch.setattr(ParentRanks, "_note", note_with_kill)
    monkeypatch.setattr(LocalRanks, "host_of", lambda ranks, rank: "fakehost")


@pytest.mark.parametrize(
    ("trainer", "steps", "job", "status", "reason"),
    [
        ({}, 9, ScriptedJob(), "finished", f"all epochs are done; but {CHILD_OF_RANKS} the Slurm step"),
        ({"script": ["train.py"]}, 9, ScriptedJob(), "failed",
         f"rank 0 on fakehost ended with exit status 0, but {CHILD_OF_RANKS} the Slurm step"),
        # A script that reports its steps, and has done all of them.
        ({"script": ["train.py"]}, 100, ScriptedJob(), "finished", f"all epochs are done; but {CHILD_OF_RANKS}"),
        # Outside a job, the control group may contain other programs.
        ({"script": ["train.py"]}, 9, None, "finished", "all epochs are done; but the kernel killed a process beside"),
    ],
    ids=["trainer", "script", "complete script", "on this machine"],
)  # fmt: skip
def test_child_killed_for_memory_is_never_left_out(
    scene: Scene,
    monkeypatch: pytest.MonkeyPatch,
    trainer: dict[str, Any],
    steps: int,
    job: ScriptedJob | None,
    status: str,
    reason: str,
) -> None:
    kill_child(monkeypatch)
    scene.trainer = trainer
    scene.script(first=[[["beat", steps], *DONE[1:]], EXIT_0])
    state = scene.supervise(scene.supervisor(job))
    assert (state.status, state.restarts) == (status, 0)
    assert state.reason.startswith(reason)
    assert explain(scene.run).cause == "the processes of the Slurm step on a node needed more memory than it has there"


def test_attempt_after_a_failed_rank_finishes(scene: Scene, alive: NamedPipe) -> None:
    add_checkpoint(scene, 3)
    scene.peer_grace_s = 0.3
    scene.script(
        first=[
            [["grandchild", None], ["touch", "up"], *STUBBORN],
            [["await", "up"], *fails("ValueError: nan\nadvice", traceback=["Traceback\n", "nan\n"])],
        ],
        second=[[*DONE], EXIT_0],
    )
    state = scene.supervise()
    assert (state.status, state.attempt, state.restarts) == ("finished", 2, 1)
    ((failure, log),) = scene.report.failures
    assert failure.sentence() == "rank 1 on fakehost failed with ValueError: nan after step 5"
    assert failure.traceback == ("Traceback\n", "nan\n")
    assert log == scene.run.attempt(1).log(1)
    assert scene.report.notes == ["restart 1 of 3", "resuming at step 3, 2 steps lost (4 to 5)"]
    assert alive.is_released(60), "a grandchild of the first attempt is alive"


def add_checkpoint(scene: Scene, step: int) -> None:
    checkpoint = scene.run.checkpoints / f"step-{step:08d}"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").write_text("{}")


RAISED = "rank 0 on fakehost failed with ValueError: nan after step 5"


@pytest.mark.parametrize("is_script", [False, True])
def test_exception_of_code_that_saved_nothing_ends_the_run(scene: Scene, is_script: bool) -> None:
    nothing_saved = "there is no checkpoint (checkpoint.every_steps)"
    if is_script:
        scene.trainer = {"script": ["train.py"]}
        nothing_saved = "train.py has saved nothing in hpcdist.checkpoint_dir()"
        add_checkpoint(scene, 3)  # not one of a script
    scene.script(first=[fails("ValueError: nan", traceback=["Traceback\n"]), EXIT_0])
    state = scene.supervise()
    assert (state.status, state.attempt) == ("failed", 1)
    assert state.reason == f"{RAISED}; no restart from the beginning, since {nothing_saved}"


def test_script_that_saved_is_restarted_after_its_exception(scene: Scene) -> None:
    scene.trainer = {"script": ["train.py"]}
    scene.run.checkpoints.mkdir(exist_ok=True)
    (scene.run.checkpoints / "model.pt").touch()
    scene.script(first=[fails("ValueError: nan", traceback=["Traceback\n"]), EXIT_0], second=[[*DONE], EXIT_0])
    assert scene.supervise().status == "finished"


@pytest.mark.parametrize(("longest_s", "status"), [(600.0, "finished"), (0.0, "failed")])
def test_short_attempt_is_repeated_where_a_node_may_be_the_cause(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, longest_s: float, status: str
) -> None:
    share = NodeShare(allocated=1, share=1, ranks=[0])
    two_nodes = Resources(unit="core", nodes={"n1": share, "n2": share})
    monkeypatch.setattr(LocalLauncher, "resources", two_nodes)
    monkeypatch.setattr(supervisor_module, "SHORT_ATTEMPT_S", longest_s)
    scene.script(first=[fails("ValueError: nan", traceback=["Traceback\n"]), EXIT_0], second=[[*DONE], EXIT_0])
    assert scene.supervise().status == status


def test_first_failure_is_the_reason_and_names_the_role(scene: Scene) -> None:
    """Rank 0 hangs, rank 1 reports a lost peer; the supervisor then kills rank 0."""
    scene.roles = {"agent": 1, "observer": 1}
    scene.launch = {"max_restarts": 0}
    scene.peer_grace_s = 0.3
    scene.script(first=[STUBBORN, PEER_LOST])
    reason = "rank 1 (observer:0) on fakehost failed with RuntimeError: Connection closed by peer after step 5"
    assert scene.supervise().reason == reason


@pytest.mark.parametrize("number", [1, 2], ids=["first write", "write of an attempt"])
def test_missing_file_of_a_replaced_folder_is_not_the_reason(scene: Scene, number: int) -> None:
    scene.env[IDENTITY_VARIABLE] = identity(scene.run.path)
    scene.script(first=[[["beat", 4], *DONE], EXIT_0])

    writes = itertools.count(1)

    def before_write() -> None:
        if next(writes) == number:
            scene.run.path.rename(scene.run.path.with_name("old"))
            scene.run.path.write_text("not a folder")

    supervisor = scene.supervisor(check_lease=before_write)
    with pytest.raises(RunFolderError, match="has been replaced by another one since this run was started"):
        scene.supervise_unchecked(supervisor)


def test_removed_folder_is_the_reason_and_its_records_are_lost(scene: Scene) -> None:
    scene.env[IDENTITY_VARIABLE] = identity(scene.run.path)
    scene.tracking_uri = "http://mlflow:5000"
    scene.shipper = ["false"]
    scene.script(first=[[["beat", 4], *DONE], EXIT_0])
    writes = itertools.count(1)

    def before_write() -> None:
        if next(writes) == 2:
            scene.run.path.rename(scene.run.path.with_name("old"))

    supervisor = scene.supervisor(check_lease=before_write)
    with pytest.raises(RunFolderError, match="has been moved or deleted since this run was started"):
        scene.supervise_unchecked(supervisor)
    assert "none are lost" not in "".join(scene.report.notes)


def test_output_of_rank_0_is_reported_without_hpcdists_own_lines(scene: Scene) -> None:
    own = [
        "11:02:03 INFO rank 0 on n1: resumed at step 7",
        "epoch 1: größe",
        "11:02:04 WARNING rank 0 on n1: metrics are kept in memory",
        "11:02:05 ERROR rank 0 on n1: Traceback (most recent call last):\nValueError",
    ]
    lines: list[list[Any]] = [["print", line] for line in own]
    scene.script(first=[[*lines, *DONE], [["print", "rank 1"]]], second=[[*lines, *DONE], EXIT_0])
    scene.trainer = {"target": "mine:train"}
    scene.supervise()
    assert scene.report.printed == f"{own[1]}\n{own[2]}\n"
    assert set(scene.report.steps) == {9}
    scene.trainer = {"target": "ddp"}
    scene.supervise()
    assert scene.report.printed == f"{own[1]}\n{own[2]}\n", "of a trainer of hpcdist"


def test_restart_count_continues_from_an_earlier_supervisor(scene: Scene) -> None:
    scene.run.new_attempt()
    scene.run.write_state(
        replace(scene.run.read_state(), status="failed", attempt=1, restarts=2, reason="x", rejected=True, ended=1.0)
    )
    scene.launch = {"max_restarts": 1}
    scene.script(second=[EXIT_0, fails("a")], third=[[*DONE], EXIT_0])
    state = scene.supervise()
    assert (state.status, state.attempt, state.restarts, state.rejected) == ("finished", 3, 3, False)


def test_rank_that_did_not_start_has_the_last_message_about_it(scene: Scene) -> None:
    scene.launch = {"max_restarts": 0}
    scene.script(first=[fails("Connection closed by peer", peer_lost=True), [["exit", 7]]])
    supervisor = scene.supervisor()
    start = scene.launcher.start

    def start_without_rank_1(attempt: Attempt) -> Any:
        ranks = start(attempt)
        ranks.absent = lambda: [1]  # type: ignore[method-assign]
        ranks.last_message = lambda rank: f"about rank {rank}"  # type: ignore[method-assign]
        close = ranks.close

        def close_and_change() -> None:
            close()
            ranks.last_message = lambda rank: "Killed"  # type: ignore[method-assign]

        ranks.close = close_and_change  # type: ignore[method-assign]
        return ranks

    scene.launcher.start = start_without_rank_1  # type: ignore[method-assign]
    state = scene.supervise(supervisor)
    assert state.reason == f"rank 1 on {os.uname().nodename} was not started: about rank 1"


# --- requests


def test_stop_request_between_two_attempts_reaches_the_second(scene: Scene) -> None:
    """The request is sent while the supervisor checks whether ranks can be restarted on this machine."""
    scene.script(first=[fails("nan"), EXIT_0], second=[STOP_ON_REQUEST, [["await", "{attempt}/request.json"]]])
    supervisor = scene.supervisor()

    def broken() -> str:
        scene.run.send_request(StopRequest(cause="user", by="`hpcdist stop` by ada"))
        return ""

    scene.launcher.broken = broken  # type: ignore[method-assign]
    state = scene.supervise(supervisor)
    assert (state.status, state.attempt) == ("stopped", 2)
    assert state.reason == "everything saved (`hpcdist stop` by ada)"


def test_stop_request_while_a_resume_prepares_its_start_counts(scene: Scene) -> None:
    """Until then, the newest attempt is that of the supervisor before."""
    scene.launch = {"max_restarts": 0}
    scene.script(first=[fails("nan"), EXIT_0], second=[STOP_ON_REQUEST, [["await", "{attempt}/request.json"]]])
    assert scene.supervise().status == "failed"
    supervisor = scene.supervisor()
    scene.run.send_request(StopRequest(cause="user", by="`hpcdist stop` by ada"))
    state = scene.supervise(supervisor)
    assert (state.status, state.attempt) == ("stopped", 2)
    assert state.reason == "everything saved (`hpcdist stop` by ada)"


def test_attempt_records_the_nodes_that_were_lost(scene: Scene) -> None:
    scene.launch = {"max_restarts": 3}
    scene.script(first=[fails("nan"), EXIT_0])
    supervisor = scene.supervisor(ScriptedJob())
    scene.launcher.broken = lambda: "lost n2"  # type: ignore[method-assign]
    state = scene.supervise(supervisor)
    times = read_times(scene.run.attempt(1))
    assert times is not None
    assert (state.status, times.status, times.reason) == ("queued", "failed", state.reason)
    assert times.reason.endswith("; lost n2")


def test_same_failure_on_the_same_nodes_after_a_requeue_is_final(scene: Scene) -> None:
    """Else a node that always fails would requeue the job up to 50 times."""
    scene.launch = {"max_restarts": 3}
    scene.script(first=[fails("nan"), EXIT_0], second=[fails("nan"), EXIT_0], third=[DONE, EXIT_0])
    states = []
    for _ in range(2):
        supervisor = scene.supervisor(ScriptedJob())
        scene.launcher.broken = lambda: "lost n2"  # type: ignore[method-assign]
        states.append(scene.supervise(supervisor))
    assert [state.status for state in states] == ["queued", "failed"]
    assert states[1].reason == f"{states[0].reason}, twice in a row: another start would not help"


@pytest.mark.parametrize("outcome", ["stopped", "failed"])
def test_end_of_the_job_after_an_attempt_counts_as_its_request(scene: Scene, outcome: str) -> None:
    """Slurm may have signalled the ranks only: then they are not restarted, and their job has not failed."""
    scene.launch = {"max_restarts": 3}
    scene.script(first=[fails("killed") if outcome == "failed" else STOPS, EXIT_0])
    supervisor = scene.supervisor(ScriptedJob(ending=True))
    state = scene.supervise(supervisor)
    assert (state.status, state.attempt) == (outcome, 1)
    request = scene.run.attempt(1).read_request()
    assert request is not None
    assert request.cause == "preemption"


def test_state_is_written_after_the_requeue_of_the_job(scene: Scene) -> None:
    """A supervisor that is killed in between leaves `running`, which the next start of the job continues."""
    scene.script(first=[STOPS, EXIT_0])
    written: list[State] = []
    state = scene.supervise(scene.supervisor(ScriptedJob(on_requeue=lambda: written.append(scene.run.read_state()))))
    assert [(found.status, found.ended) for found in written] == [("running", None)]
    assert (state.status, state.ended) == ("queued", None)
    assert state.reason == "everything saved (the ranks received a stop signal)"
    assert scene.report.notes[-1] == f"queued: {state.reason}"


def test_early_signal_of_the_time_limit_is_named(scene: Scene) -> None:
    """Slurm's signal may reach the ranks up to a minute before the supervisor's request."""
    scene.script(first=[STOPS, EXIT_0])
    now = time.time()
    job = ScriptedJob(allocation=Allocation(stop_at=now + 30, end=now + 3600))
    state = scene.supervise(scene.supervisor(job))
    assert (state.status, state.reason) == ("queued", "everything saved (time limit)")


def test_run_is_stopped_if_slurm_refuses_the_requeue(scene: Scene) -> None:
    scene.script(first=[STOPS, EXIT_0])

    def refuse() -> None:
        raise HpcdistError("Requested operation is disabled")

    state = scene.supervise(scene.supervisor(ScriptedJob(on_requeue=refuse)))
    assert (state.status, state.ended is None) == ("stopped", False)
    assert state.reason.endswith("; Slurm does not requeue the job (Requested operation is disabled)")
    hint = f"Slurm does not requeue the job; continue with `{scene.run.resume_command}`"
    assert hint in scene.report.notes


def test_job_gives_its_nodes_back_before_a_long_upload(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("hpcdist.supervisor.children.NOTE_AFTER_S", 0.1)
    released = tmp_path / "released"
    scene.shipper = ["sh", "-c", f"until [ -e {released} ]; do sleep 0.02; done"]  # uploads until then
    scene.script(first=[DONE, EXIT_0])
    state = scene.supervise(scene.supervisor(ScriptedJob(on_release=released.touch)))
    assert state.status == "finished"
    assert released.exists()


@pytest.mark.parametrize(("shipper", "ends"), [("true", True), ("sleep 2", False)], ids=["short upload", "requeue"])
def test_job_keeps_its_nodes(scene: Scene, monkeypatch: pytest.MonkeyPatch, shipper: str, *, ends: bool) -> None:
    monkeypatch.setattr("hpcdist.supervisor.children.NOTE_AFTER_S", 0.1)
    scene.shipper = shipper.split()
    scene.script(first=[DONE if ends else STOPS, EXIT_0])
    releases: list[str] = []
    state = scene.supervise(scene.supervisor(ScriptedJob(on_release=lambda: releases.append("released"))))
    assert state.status == ("finished" if ends else "queued")
    assert releases == []


@pytest.mark.parametrize("outcome", ["stopped", "failed"])
def test_job_that_slurm_has_requeued_is_queued_and_not_requeued(scene: Scene, outcome: str) -> None:
    scene.script(first=[fails("killed") if outcome == "failed" else STOPS, EXIT_0])
    requeues: list[str] = []
    job = ScriptedJob(ending=True, requeued=True, on_requeue=lambda: requeues.append("requeue"))
    state = scene.supervise(scene.supervisor(job))
    assert (state.status, state.ended, requeues) == ("queued", None, [])


def test_attempt_ended_for_growth_is_followed_by_a_larger_one(scene: Scene) -> None:
    class ReturnedNodes(NodeChanges):
        used = 0

        def detect_returned(self) -> str:
            return "" if self.used else "n2"

        def use_returned(self) -> None:
            self.used += 1

    nodes = ReturnedNodes()
    scene.launch = {"max_restarts": 0}
    scene.script(first=[STOP_ON_REQUEST, [["await", "{attempt}/request.json"]]], second=[[*DONE], EXIT_0])
    state = scene.supervise(scene.supervisor(ScriptedJob(nodes=nodes)))
    assert (state.status, state.attempt, state.restarts, nodes.used) == ("finished", 2, 1, 1)
    times = read_times(scene.run.attempt(1))
    assert times is not None
    assert (times.status, times.reason, times.failed) == ("stopped", "more nodes are available", False)


def test_signal_handler_replaced_by_requeue_is_not_restored(scene: Scene) -> None:
    """A job that has requested its own requeue gets SIGTERM while it still waits for MLflow."""
    scene.script(first=[STOPS, EXIT_0])
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)]

    supervisor = scene.supervisor(ScriptedJob(on_requeue=lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN)))
    try:
        assert scene.supervise(supervisor).status == "queued"
        after = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)]
        assert after == [signal.SIG_IGN, *before[1:]]
    finally:
        signal.signal(signal.SIGTERM, before[0])


def test_run_stopped_after_its_last_step_is_finished(scene: Scene) -> None:
    scene.script(first=[[["await", "{attempt}/request.json"], *DONE], EXIT_0])
    scene.report.on_attempt = lambda attempt: attempt.send_request(StopRequest(cause="user"))
    state = scene.supervise()
    assert (state.status, state.reason) == ("finished", "all epochs are done")


def test_interrupted_container_start_is_not_restarted(scene: Scene) -> None:
    """Slurm signals ahead of the time limit: the job is requeued, and no restart is counted."""
    scene.launch = {"max_restarts": 3}
    scene.script(first=[fails("pyxis could not start the container", interrupted=True), EXIT_0])
    state = scene.supervise(scene.supervisor(ScriptedJob()))
    assert (state.status, state.attempt, state.restarts) == ("queued", 1, 0)
    assert state.reason.endswith(
        "pyxis could not start the container after step 5; Slurm signals the time limit, so no restart here"
    )


def test_ranks_that_exceed_the_stop_grace_fail_without_a_restart(scene: Scene) -> None:
    scene.launch = {"stop_grace_s": 3.0}  # a busy machine needs a part of it for the end of rank 0
    scene.script(
        first=[
            [["await", "up"], ["ask", "stop"], ["report", {"outcome": "stopped"}]],
            [["ignore", signal.SIGTERM], ["beat", 3], ["touch", "up"], ["forever", None]],
        ]
    )
    state = scene.supervise()
    assert (state.status, state.attempt) == ("failed", 1)
    assert "rank 1 on " in state.reason
    assert state.reason.endswith(
        "did not save and exit within launch.stop_grace_s=3 s after step 3, while it was asked to stop"
    )


def test_failure_during_a_stop_ends_the_grace_period(scene: Scene) -> None:
    """The grace period is for saving, which is impossible after the failure of a rank."""
    scene.launch = {"stop_grace_s": 600.0}
    scene.peer_grace_s = 0.3
    scene.script(first=[STUBBORN, [["await", "{attempt}/request.json"], *fails("OSError: disk full")]])
    scene.report.on_attempt = lambda attempt: attempt.send_request(StopRequest(cause="user", by="lunch"))
    state = scene.supervise()
    assert (state.status, state.attempt) == ("failed", 1)
    assert state.reason == (
        "rank 1 on fakehost failed with OSError: disk full after step 5, while it was asked to stop"
    )


def test_cancel_request_kills_the_ranks(scene: Scene, alive: NamedPipe) -> None:
    scene.script(first=[[["grandchild", None], *STUBBORN], STUBBORN])
    scene.report.on_progress = lambda _: scene.run.attempt(1).send_request(
        StopRequest(action="cancel", cause="user", by="`hpcdist cancel` by ada")
    )
    state = scene.supervise()
    assert (state.status, state.reason) == ("cancelled", "`hpcdist cancel` by ada")
    assert alive.is_released(60)


def test_supervisor_that_lost_its_lease_writes_nothing(scene: Scene, alive: NamedPipe) -> None:
    scene.script(first=[[["grandchild", None], *STUBBORN], STUBBORN])
    supervisor = scene.supervisor()
    successor: list[State] = []

    def check_lease() -> None:
        if successor:
            raise LeaseLostError("run first was taken over by process 7 of ada on n2")

    def take_over(_: object) -> None:
        successor.append(replace(scene.run.read_state(), attempt=2))
        scene.run.write_state(successor[0])

    supervisor.check_lease = check_lease
    scene.report.on_progress = take_over
    with pytest.raises(LeaseLostError, match="taken over by process 7 of ada on n2"):
        scene.supervise(supervisor)
    assert alive.is_released(60)
    assert scene.run.read_state() == successor[0]


#: A rank of a script that saves at SIGTERM, after it has stopped the run itself.
ASK_AND_SAVE: list[list[Any]] = [
    ["block", signal.SIGTERM],
    ["ask", "stop"],
    ["await_signal", signal.SIGTERM],
    ["touch", "checkpoints/new.pt"],
    ["report", {"outcome": "stopped", "reason": "train.py ended with exit status 0"}],
]


def test_stop_of_a_plain_script_names_the_file_that_it_has_saved(scene: Scene) -> None:
    scene.trainer, scene.num_ranks = {"script": ["train.py"]}, 1
    (scene.run.checkpoints / "old.pt").touch()
    os.utime(scene.run.checkpoints / "old.pt", (1, 1))
    scene.script(first=[[["ask", "stop"], ["forever", None]]], second=[ASK_AND_SAVE])
    assert scene.supervise().reason == (
        "train.py was ended by SIGTERM and saved nothing in hpcdist.checkpoint_dir(); a resume starts it again, with"
        " its files in the run's checkpoints/ (a rank)"
    )
    assert "stopping: the script gets SIGTERM, and SIGKILL unless it ends within 120 s (a rank)" in scene.report.notes
    state = scene.supervise()
    assert state.status == "stopped"
    assert state.reason == (
        "train.py ended with exit status 0 and saved checkpoints/new.pt; a resume starts it again, with its files in"
        " the run's checkpoints/ (a rank)"
    )


def test_script_output_is_in_the_journal_before_the_run_ends(scene: Scene) -> None:
    scene.trainer, scene.tracking, scene.num_ranks = {"script": ["train.py"]}, {"stdout_metrics": {"loss": "(.+)"}}, 1
    scene.run.config.write_text("{trainer: {script: [train.py]}, tracking: {stdout_metrics: {loss: '(.+)'}}}")
    scene.script(first=[[["print", "0.5"], *fails("nan")]], second=[[["print", "0.25"], *DONE]])
    at_end: list[set[str]] = []
    supervisor = scene.supervisor()
    write = supervisor._write

    def note_files(state: State) -> None:
        if state.status == "finished":
            at_end.append({path.name for path in scene.run.journal.glob("*.jsonl")})
        write(state)

    supervisor._write = note_files  # type: ignore[method-assign]
    assert scene.supervise(supervisor).reason == "all epochs are done"
    names = ("attempt-001.rank-00000.files.jsonl", "attempt-002.rank-00000.files.jsonl")
    assert at_end == [set(names)]
    values = [record.metrics for name in names for record in read_records(scene.run.journal / name)[0]]
    assert values == [{"loss": 0.5}, {"loss": 0.25}]


def test_script_that_logs_nothing_ends_with_the_ways_to_log(scene: Scene) -> None:
    scene.trainer, scene.tracking, scene.num_ranks = {"script": ["train.py"]}, {"script_files": False}, 1
    scene.script(first=[DONE], second=[fails("nan")])
    assert scene.supervise().reason == (
        "all epochs are done; it logged no metrics: use MLflow, hpcdist.log, TensorBoard, a csv log or"
        " tracking.stdout_metrics"
    )
    scene.launch = {"env": {"MLFLOW_TRACKING_URI": "https://mlflow.example.org"}}
    (scene.run.path / "script.json").write_text(json.dumps({"2.0": DONE, "3.0": DONE}))
    assert scene.supervise().reason == "all epochs are done"
    scene.launch, scene.trainer = {}, {"target": "ddp"}
    assert scene.supervise().reason == "all epochs are done"


@pytest.mark.parametrize("is_busy", [False, True])
def test_late_end_of_a_rank_is_idle_unless_it_computes(scene: Scene, is_busy: bool) -> None:
    late = {"since": 50.0, "what": "thread 'save'", "busy": is_busy}
    scene.num_ranks = 1
    outcome = {"outcome": "done", "reason": "all epochs are done", "time": 60.0, "late": late}
    scene.script(first=[[["report", outcome]]])
    reason = scene.supervise().reason
    assert reason.startswith("all epochs are done; the process of rank 0 did not end for 10 s: thread 'save'")
    times = read_times(scene.run.attempt(1))
    assert times is not None
    assert times.idle_since == (None if is_busy else 50.0)


def test_run_ends_although_its_metrics_cannot_be_read(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    scene.trainer, scene.num_ranks = {"script": ["train.py"]}, 1
    monkeypatch.setattr(supervisor_module, "MetricsReader", Mock(side_effect=OSError(12, "Cannot allocate memory")))
    shutil.rmtree(scene.run.journal)
    scene.script(first=[DONE])
    assert scene.supervise().reason == "all epochs are done"
    assert scene.report.notes == [
        "metrics in files of the script are not read: Cannot allocate memory",
        f"the journal cannot be read: {scene.run.journal}: No such file or directory",
    ]


def test_script_rank_saves_although_another_loses_its_peer(scene: Scene) -> None:
    scene.trainer = {"script": ["train.py"]}
    scene.peer_grace_s = 0.3
    failed: list[list[Any]] = [["await", "{attempt}/rank-00001.outcome.json"], ["sleep", 1.0]]
    scene.script(
        first=[
            [["await", "up"], *ASK_AND_SAVE[:3], *failed, *ASK_AND_SAVE[3:]],
            [["ignore", signal.SIGTERM], ["touch", "up"], ["await", "{attempt}/request.json"], *PEER_LOST],
        ]
    )
    state = scene.supervise()
    assert (state.status, (scene.run.checkpoints / "new.pt").exists()) == ("stopped", True)


# --- signals to the supervisor


def test_signal_before_the_first_attempt_stops_the_run(scene: Scene) -> None:
    scene.script(first=[STOP_ON_REQUEST, EXIT_0])
    supervisor = scene.supervisor()
    supervisor._signals.on_signal(signal.SIGTERM, None)
    state = scene.supervise(supervisor)
    assert (state.status, state.reason) == ("stopped", "everything saved (SIGTERM to the supervisor)")


def test_closed_terminal_stops_the_run(scene: Scene) -> None:
    """Writes to the closed terminal fail, and must not fail the run."""
    scene.script(first=[[["touch", "up"], *STOP_ON_REQUEST], [["await", "{attempt}/request.json"]]])
    pid, terminal = pty.fork()
    if pid == 0:
        support = str(Path(__file__).parents[2] / "support")
        os.environ["PYTHONPATH"] = os.pathsep.join([support, os.getenv("PYTHONPATH", "")])
        os.execv(sys.executable, [sys.executable, "-m", "supervisor_scene", str(scene.run.path)])
    ended = os.pidfd_open(pid)
    try:
        wait_for((scene.run.path / "up").exists, "rank 0")
        os.close(terminal)
        assert select.select([ended], [], [], 20)[0]
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(ended)
    state = scene.run.read_state()
    assert (state.status, state.reason) == ("stopped", "everything saved (SIGHUP to the supervisor)")


@pytest.mark.parametrize(
    ("number", "in_job", "cause"),
    [
        (signal.SIGTERM, False, "signal"),
        (signal.SIGINT, True, "signal"),
        (signal.SIGHUP, True, "signal"),
        (signal.SIGTERM, True, "preemption"),
    ],
)
def test_sigterm_in_a_job_means_that_slurm_ends_it(number: signal.Signals, in_job: bool, cause: str) -> None:
    signals = SignalRequests(in_job=in_job)
    assert signals.request() is None
    signals.on_signal(number, None)
    request = signals.request()
    assert request is not None
    assert (request.action, request.cause, request.by) == ("stop", cause, number.name)
