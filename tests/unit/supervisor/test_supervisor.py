"""A run's life under the supervisor, with fake ranks: real processes that only leave behind what workers would."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from named_pipe import NamedPipe
from supervisor_scene import DONE, STOP_ON_REQUEST, Scene, fails

from hpcdist.errors import LeaseLostError
from hpcdist.files.atomic import read_json
from hpcdist.run.folder import RunDir, State
from hpcdist.supervisor.shipper_process import ShipperProcess

#: All tests of this file may start processes.
pytestmark = pytest.mark.processes

FOREVER: list[list[Any]] = [["forever", None]]
STUBBORN: list[list[Any]] = [["ignore", signal.SIGTERM], ["beat", 3], ["forever", None]]
QUIETLY: list[list[Any]] = []
PEER_LOST = fails("RuntimeError: Connection closed by peer", peer_lost=True)


@pytest.fixture
def scene(runs_dir: Path) -> Scene:
    return Scene(RunDir.create(runs_dir / "exp" / "first"))


@pytest.fixture
def said(scene: Scene) -> Iterator[NamedPipe]:
    """What fake ranks say to the test."""
    with NamedPipe(scene.run.path / "said", reopened=True) as pipe:
        yield pipe


@pytest.fixture
def alive(scene: Scene) -> Iterator[NamedPipe]:
    """Held open by what fake ranks have started."""
    with NamedPipe(scene.run.path / "alive") as pipe:
        yield pipe


# --- done


def test_fake_ranks_that_are_done_finish_the_run(scene: Scene) -> None:
    scene.script(first=[[*DONE], QUIETLY])
    before = time.time()
    state = scene.supervise()
    assert (state.status, state.reason) == ("finished", "all epochs are done")
    assert (state.attempt, state.restarts, state.world_size, state.rejected) == (1, 0, 2, False)
    assert state.ended is not None
    assert before <= state.ended <= time.time()
    assert scene.report.attempts == [(1, 2)]
    assert scene.report.notes == []
    assert scene.report.failures == []


def test_progress_of_fake_ranks_is_passed_on_while_the_run_is_running(scene: Scene) -> None:
    scene.script(first=[[["beat", 4], ["await", "seen"], *DONE], QUIETLY])

    def on_progress(beat: Any) -> None:
        assert scene.run.read_state().status == "running"
        assert beat["total_steps"] == 100
        (scene.run.path / "seen").touch()

    scene.report.on_progress = on_progress
    assert scene.supervise().status == "finished"
    assert scene.report.steps[0] == 4


def test_fake_ranks_get_the_environment_the_code_and_their_place(scene: Scene) -> None:
    scene.env |= {"PYTHONPATH": "/callers", "MINE": "1", "SHARED": "caller"}
    scene.launch = {"env": {"SHARED": "launch.env", "PYTHONPATH": "/theirs"}}
    scene.import_path = ["/code/sub", "/code"]
    scene.script(first=[[["environment", None], *DONE], [["environment", None]]])
    scene.supervise()
    for rank in range(2):
        lines = dict(line.split("=", 1) for line in scene.log(rank).splitlines())
        assert lines["PYTHONPATH"] == "/code/sub:/code:/theirs"
        assert (lines["MINE"], lines["SHARED"]) == ("1", "launch.env")
        assert (lines["HPCDIST_RANK"], lines["HPCDIST_WORLD_SIZE"]) == (str(rank), "2")
        assert (lines["HPCDIST_JOB_ID"], lines["HPCDIST_ATTEMPT"]) == ("exp/first", "1")
        assert 20480 <= int(lines["HPCDIST_MASTER_PORT"]) < 32768


# --- failures


def test_a_failing_fake_rank_ends_the_attempt_and_the_next_one_finishes(scene: Scene, alive: NamedPipe) -> None:
    scene.script(
        first=[
            [["grandchild", None], ["touch", "up"], *STUBBORN],
            [["await", "up"], *fails("ValueError: nan", traceback=["Traceback\n", "nan\n"])],
        ],
        second=[[*DONE], QUIETLY],
    )
    state = scene.supervise()
    assert (state.status, state.attempt, state.restarts) == ("finished", 2, 1)
    ((failure, log),) = scene.report.failures
    assert failure.sentence() == "rank 1 on fakehost failed with ValueError: nan at step 5"
    assert failure.traceback == ("Traceback\n", "nan\n")
    assert log == scene.run.attempt(1).log(1)
    assert scene.report.notes == ["restart 1 of 3 from the newest checkpoint"]
    assert alive.is_released(10), "the first attempt's grandchild is still there"


def test_a_killed_fake_rank_is_named_and_not_the_peers_that_lost_it(scene: Scene) -> None:
    scene.script(
        first=[[["await", "gone"], *PEER_LOST], [["beat", 7], ["touch", "gone"], ["kill", signal.SIGKILL]]],
        second=[[*DONE], QUIETLY],
    )
    assert scene.supervise().status == "finished"
    ((failure, _),) = scene.report.failures
    assert failure.kind == "killed"
    assert failure.sentence().startswith("rank 1 on ")
    assert failure.sentence().endswith("was killed by SIGKILL (out of memory?) at step 7")


def test_a_failing_fake_rank_is_named_with_its_role(scene: Scene) -> None:
    scene.roles = {"agent": 1, "observer": 1}
    scene.launch = {"max_restarts": 0}
    scene.script(first=[PEER_LOST, fails("ValueError: nan")])
    assert scene.supervise().reason == "rank 1 (observer:0) on fakehost failed with ValueError: nan at step 5"


def test_a_fake_rank_that_the_supervisor_kills_is_not_blamed(scene: Scene) -> None:
    """Rank 0 hangs, rank 1 loses patience with it and reports a lost peer; that much is known."""
    scene.launch = {"max_restarts": 0}
    scene.script(first=[STUBBORN, PEER_LOST])
    state = scene.supervise()
    assert state.reason == "rank 1 on fakehost failed with RuntimeError: Connection closed by peer at step 5"


def test_the_same_failure_of_fake_ranks_twice_ends_the_run(scene: Scene) -> None:
    deed = [QUIETLY, fails("ValueError: nan")]
    scene.script(first=deed, second=deed)
    state = scene.supervise()
    assert (state.status, state.attempt, state.restarts, state.rejected) == ("failed", 2, 1, False)
    assert state.reason == (
        "rank 1 on fakehost failed with ValueError: nan at step 5, twice in a row: another restart would not help"
    )


def test_fake_ranks_that_fail_differently_use_up_the_restarts(scene: Scene) -> None:
    scene.launch = {"max_restarts": 2}
    scene.script(
        first=[QUIETLY, fails("a", step=1)],
        second=[QUIETLY, fails("a", step=2)],
        third=[fails("b", step=2), QUIETLY],
    )
    state = scene.supervise()
    assert (state.status, state.attempt, state.restarts) == ("failed", 3, 2)
    assert state.reason == (
        "rank 0 on fakehost failed with b at step 2; all launch.max_restarts=2 restarts are used up"
    )
    assert len(scene.report.failures) == 3


def test_a_rejected_config_is_not_tried_again_by_fake_ranks(scene: Scene) -> None:
    rejected = [["report", {"outcome": "rejected", "error": "no such model"}], ["exit", 2]]
    scene.script(first=[rejected, rejected])
    state = scene.supervise()
    assert (state.status, state.attempt, state.rejected) == ("failed", 1, True)
    assert state.reason.endswith("on fakehost failed with no such model at step 0")


def test_a_fake_rank_0_that_ends_well_without_a_report_has_failed(scene: Scene) -> None:
    scene.script(first=[[["beat", 6]], QUIETLY], second=[[*DONE], QUIETLY])
    assert scene.supervise().status == "finished"
    ((failure, _),) = scene.report.failures
    assert (failure.kind, failure.rank, failure.step) == ("vanished", 0, 6)
    assert failure.error == "exited with code 0 without a report"


def test_a_fake_rank_that_hangs_shows_its_stacks_and_ends_the_attempt(scene: Scene, said: NamedPipe) -> None:
    scene.launch = {"hang_timeout_s": 0.5}
    scene.script(
        first=[
            [["say", "up"], ["busy", None]],
            [["on", [signal.SIGUSR1, "my stacks"]], ["beat", 8], ["say", "up"], ["forever", None]],
        ],
        second=[[["say", "up"], *DONE], [["say", "up"]]],
    )
    scene.report.on_attempt = lambda _: [said.line(), said.line()]
    assert scene.supervise().status == "finished"
    ((failure, _),) = scene.report.failures
    assert (failure.kind, failure.rank, failure.step) == ("hung", 1, 8)
    assert failure.error.startswith(
        "made no progress for launch.hang_timeout_s=0.5 s (stack traces of all ranks are in "
    )
    assert scene.log(1) == "my stacks\n"


def test_a_plain_script_that_prints_is_not_hung(scene: Scene, said: NamedPipe) -> None:
    """It writes no heartbeat; its output is its sign of life."""
    scene.launch = {"hang_timeout_s": 0.4, "max_restarts": 0}
    scene.trainer = {"script": ["train.py"]}
    scene.num_ranks = 1
    scene.report.on_attempt = lambda _: said.line()
    scene.script(first=[[["say", "up"], ["chatter", 1.0], *DONE]])
    assert scene.supervise().status == "finished"
    scene.script(second=[[["say", "up"], ["print", "last words"], ["forever", None]]])
    state = scene.supervise()
    assert state.status == "failed"
    assert "made no progress for launch.hang_timeout_s=0.4 s" in state.reason


def test_what_rank_0_of_a_plain_script_prints_is_shown_line_by_line(scene: Scene) -> None:
    scene.trainer = {"script": ["train.py"]}
    scene.script(first=[[["print", "epoch 1: größe"], ["print", "epoch 2"], *DONE], [["print", "rank 1"]]])
    scene.supervise()
    assert scene.report.printed == "epoch 1: größe\nepoch 2\n"
    assert scene.report.steps == []


def test_restarts_of_an_earlier_supervisor_are_counted_on(scene: Scene) -> None:
    scene.run.new_attempt()
    scene.run.write_state(
        replace(scene.run.read_state(), status="failed", attempt=1, restarts=2, reason="x", rejected=True, ended=1.0)
    )
    scene.launch = {"max_restarts": 1}
    scene.script(second=[QUIETLY, fails("a")], third=[[*DONE], QUIETLY])
    state = scene.supervise()
    assert (state.status, state.attempt, state.restarts, state.rejected) == ("finished", 3, 3, False)


# --- requests


def test_fake_ranks_asked_to_stop_are_stopped(scene: Scene) -> None:
    scene.script(first=[STOP_ON_REQUEST, [["await", "{attempt}/request.json"]]])
    scene.report.on_attempt = lambda attempt: attempt.send_request("stop", by="ada", reason="`hpcdist stop` by ada")
    state = scene.supervise()
    assert (state.status, state.attempt, state.restarts) == ("stopped", 1, 0)
    assert state.reason == "stopped with everything saved (`hpcdist stop` by ada)"
    assert "stopping: the ranks save a checkpoint and exit (`hpcdist stop` by ada)" in scene.report.notes


def test_a_stop_that_comes_between_two_attempts_reaches_the_second(scene: Scene) -> None:
    """As the supervisor is asking whether ranks can be started here again."""
    scene.script(
        first=[fails("nan"), QUIETLY],
        second=[STOP_ON_REQUEST, [["await", "{attempt}/request.json"]]],
    )
    supervisor = scene.supervisor()

    def broken() -> str:
        scene.run.send_request("stop", by="ada", reason="`hpcdist stop` by ada")
        return ""

    scene.launcher.broken = broken  # type: ignore[method-assign]
    state = scene.supervise(supervisor)
    assert (state.status, state.attempt) == ("stopped", 2)
    assert state.reason == "stopped with everything saved (`hpcdist stop` by ada)"


def test_the_last_state_is_what_is_made_of_it_and_none_is_seen_before(scene: Scene) -> None:
    scene.script(first=[[["report", {"outcome": "stopped"}]], QUIETLY])
    supervisor = scene.supervisor()
    supervisor._conclude = lambda state: replace(state, reason=f"{scene.run.read_state().status}, {state.status}")
    assert scene.supervise(supervisor).reason == "running, stopped"


def test_a_signal_that_is_taken_over_at_the_end_stays_so(scene: Scene) -> None:
    """A job that has asked for its own requeue is sent SIGTERM while it still waits for MLflow."""
    scene.script(first=[[*DONE], QUIETLY])
    supervisor = scene.supervisor()
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)

    def conclude(state: State) -> State:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        return state

    supervisor._conclude = conclude
    try:
        scene.supervise(supervisor)
        assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == (signal.SIG_IGN, before[1])
    finally:
        signal.signal(signal.SIGTERM, before[0])


def test_fake_ranks_that_are_done_before_they_see_the_request_have_finished(scene: Scene) -> None:
    scene.script(first=[[["await", "{attempt}/request.json"], *DONE], QUIETLY])
    scene.report.on_attempt = lambda attempt: attempt.send_request("stop", by="ada", reason="too late")
    state = scene.supervise()
    assert (state.status, state.reason) == ("finished", "all epochs are done")


def test_fake_ranks_that_heard_a_signal_of_their_own_are_stopped(scene: Scene) -> None:
    scene.script(first=[[["report", {"outcome": "stopped"}]], QUIETLY])
    state = scene.supervise()
    assert state.reason == "stopped with everything saved (the ranks received a stop signal)"


def test_fake_ranks_that_do_not_stop_in_time_fail_without_a_restart(scene: Scene) -> None:
    scene.launch = {"stop_grace_s": 0.3}
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
        "did not save and exit within launch.stop_grace_s=0.3 s at step 3, while it was asked to stop"
    )


def test_a_fake_rank_that_fails_while_stopping_does_not_keep_the_others_waiting(scene: Scene) -> None:
    """The grace of a stop is for saving; once one rank has failed there is nothing to save."""
    scene.launch = {"stop_grace_s": 600.0}
    scene.script(first=[STUBBORN, [["await", "{attempt}/request.json"], *fails("OSError: disk full")]])
    scene.report.on_attempt = lambda attempt: attempt.send_request("stop", by="ada", reason="lunch")
    state = scene.supervise()
    assert (state.status, state.attempt) == ("failed", 1)
    assert state.reason == ("rank 1 on fakehost failed with OSError: disk full at step 5, while it was asked to stop")


def test_a_stop_asked_for_after_a_failure_gives_fake_ranks_no_more_time(scene: Scene) -> None:
    scene.launch = {"stop_grace_s": 600.0}
    scene.script(first=[[["await", "{attempt}/rank-00001.outcome.json"], ["ask", "stop"], *STUBBORN], fails("nan")])
    state = scene.supervise()
    assert state.reason == "rank 1 on fakehost failed with nan at step 5, while it was asked to stop"


def test_cancelled_fake_ranks_are_killed(scene: Scene, alive: NamedPipe) -> None:
    scene.script(first=[[["grandchild", None], *STUBBORN], STUBBORN])
    scene.report.on_progress = lambda _: scene.run.attempt(1).send_request(
        "cancel", by="ada", reason="`hpcdist cancel` by ada"
    )
    state = scene.supervise()
    assert (state.status, state.reason) == ("cancelled", "cancelled (`hpcdist cancel` by ada)")
    assert alive.is_released(10)


def test_a_supervisor_that_was_replaced_kills_its_ranks_and_writes_nothing(scene: Scene, alive: NamedPipe) -> None:
    scene.script(first=[[["grandchild", None], *STUBBORN], STUBBORN])
    supervisor = scene.supervisor()
    successor: list[State] = []

    def check_lease() -> None:
        if successor:
            raise LeaseLostError("run first was taken over by process 7 of ada on n2")

    def take_over(_: object) -> None:
        successor.append(replace(scene.run.read_state(), attempt=2))
        scene.run.write_state(successor[0])

    supervisor._check_lease = check_lease
    scene.report.on_progress = take_over
    with pytest.raises(LeaseLostError, match="taken over by process 7 of ada on n2"):
        scene.supervise(supervisor)
    assert alive.is_released(10)
    assert scene.run.read_state() == successor[0]


def test_an_error_of_the_supervisor_itself_is_the_last_state(scene: Scene, alive: NamedPipe) -> None:
    scene.script(first=[[["grandchild", None], *STUBBORN], STUBBORN])

    def fail(_: object) -> None:
        raise ZeroDivisionError("a mistake of ours")

    scene.report.on_progress = fail
    with pytest.raises(ZeroDivisionError, match="a mistake of ours"):
        scene.supervise()
    assert alive.is_released(10)
    state = scene.run.read_state()
    assert (state.status, state.attempt) == ("failed", 1)
    assert state.reason == "the supervisor failed with ZeroDivisionError: a mistake of ours"
    assert state.ended is not None


def test_a_plain_script_is_asked_to_stop_by_sigterm(scene: Scene) -> None:
    scene.trainer = {"script": ["train.py"]}
    scene.script(first=[[["print", "up"], ["forever", None]], [["print", "up"], ["forever", None]]])
    scene.report.on_attempt = lambda attempt: attempt.send_request("stop", by="ada", reason="lunch")
    state = scene.supervise()
    assert (state.status, state.reason) == ("stopped", "stopped with everything saved (lunch)")


def test_a_plain_script_that_ignores_sigterm_fails_after_the_grace(scene: Scene, said: NamedPipe) -> None:
    scene.trainer = {"script": ["train.py"]}
    scene.launch = {"stop_grace_s": 0.3}
    scene.script(first=[[["ignore", signal.SIGTERM], ["ask", "stop"], ["forever", None]], FOREVER])
    state = scene.supervise()
    assert state.status == "failed"
    assert "rank 0 on " in state.reason
    assert "did not save and exit within launch.stop_grace_s=0.3 s" in state.reason


def test_a_plain_script_that_fails_while_stopping_has_failed(scene: Scene) -> None:
    scene.trainer = {"script": ["train.py"]}
    scene.script(first=[[["ignore", signal.SIGTERM], ["ask", "stop"], *fails("OSError: disk full")], FOREVER])
    state = scene.supervise()
    assert state.status == "failed"
    assert "failed with OSError: disk full" in state.reason


# --- signals


def test_a_signal_before_the_first_attempt_stops_fake_ranks_at_once(scene: Scene) -> None:
    scene.script(first=[STOP_ON_REQUEST, QUIETLY])
    supervisor = scene.supervisor()
    supervisor._on_signal(signal.SIGTERM, None)
    state = scene.supervise(supervisor)
    assert (state.status, state.reason) == (
        "stopped",
        "stopped with everything saved (SIGTERM to the supervisor)",
    )


def test_signal_handlers_are_put_back(scene: Scene) -> None:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    scene.script(first=[[*DONE], QUIETLY])
    scene.supervise()
    assert [signal.getsignal(number) for number in numbers] == before


def with_scene() -> dict[str, str]:
    """Lets another Python find supervisor_scene.py."""
    return {
        "PYTHONPATH": os.pathsep.join(
            [str(Path(__file__).parents[2] / "support"), *filter(None, [os.getenv("PYTHONPATH")])]
        )
    }


@contextmanager
def supervisor_process(scene: Scene) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "supervisor_scene", str(scene.run.path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | with_scene()) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_one_signal_to_the_supervisor_lets_fake_ranks_save(
    scene: Scene, said: NamedPipe, number: signal.Signals
) -> None:
    scene.script(first=[[["say", "up"], *STOP_ON_REQUEST], [["await", "{attempt}/request.json"]]])
    with supervisor_process(scene) as process:
        assert said.line() == "up"
        process.send_signal(number)
        out, _ = process.communicate()
    assert out.splitlines() == [
        f"stopping: the ranks save a checkpoint and exit ({number.name} to the supervisor)",
        f"stopped: stopped with everything saved ({number.name} to the supervisor)",
    ]
    assert process.returncode == 0


def test_a_second_interrupt_kills_fake_ranks(scene: Scene, said: NamedPipe, alive: NamedPipe) -> None:
    scene.script(
        first=[
            [["grandchild", None], ["say", "up"], ["await", "{attempt}/request.json"], ["say", "asked"], *STUBBORN],
            STUBBORN,
        ]
    )
    with supervisor_process(scene) as process:
        assert said.line() == "up"
        process.send_signal(signal.SIGINT)
        assert said.line() == "asked"
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate()
    assert out.splitlines()[-1] == "cancelled: cancelled (SIGINT to the supervisor)"
    assert alive.is_released(10)


def test_no_fake_rank_outlives_a_killed_supervisor(scene: Scene, said: NamedPipe, alive: NamedPipe) -> None:
    scene.script(first=[[["grandchild", None], ["say", "up"], *STUBBORN]] * 2)
    with supervisor_process(scene) as process:
        assert [said.line(), said.line()] == ["up", "up"]
        process.kill()
    assert alive.is_released(10)
    assert scene.run.read_state().status == "running"


def test_fake_ranks_save_when_the_terminal_is_closed(scene: Scene, said: NamedPipe) -> None:
    """Writing to the closed terminal fails; the run must not."""
    scene.script(first=[[["say", "up"], *STOP_ON_REQUEST], [["await", "{attempt}/request.json"]]])
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ.update(with_scene())
        os.execv(sys.executable, [sys.executable, "-m", "supervisor_scene", str(scene.run.path)])
    ended = os.pidfd_open(pid)
    try:
        assert said.line() == "up"
        os.close(terminal)
        assert select.select([ended], [], [], 20)[0]
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(ended)
    state = scene.run.read_state()
    assert (state.status, state.reason) == (
        "stopped",
        "stopped with everything saved (SIGHUP to the supervisor)",
    )


# --- MLflow


def test_the_shipper_gets_the_run_and_the_whole_uri(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    stub = scene.run.path / "python"
    stub.write_text(
        '#!/bin/sh\necho "$@"; echo "$HPCDIST_TRACKING_URI"; cut -d " " -f 19 /proc/self/stat; echo err >&2; cat\n'
    )
    stub.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(stub))
    shipper = ShipperProcess(scene.run, "http://ada:s3cret@mlflow:5000", scene.env)
    assert shipper.drain(60)
    monkeypatch.undo()
    assert (scene.run.path / "shipper.log").read_text().splitlines() == [
        f"-P -m hpcdist.tracking.shipper {scene.run.path}",
        "http://ada:s3cret@mlflow:5000",
        "10",
        "err",
    ]


@pytest.mark.parametrize("shipper", [["false"], ["sleep", "600"]], ids=["failed", "too slow"])
def test_what_mlflow_has_not_taken_is_told_without_the_password(scene: Scene, shipper: list[str]) -> None:
    scene.tracking = {"drain_timeout_s": 0.1}
    scene.shipper = shipper
    scene.tracking_uri = "http://ada:s3cret@mlflow:5000"
    scene.script(first=[[*DONE], QUIETLY])
    assert scene.supervise().status == "finished"
    assert scene.report.notes == [
        "MLflow at http://ada:***@mlflow:5000 has not received all records (see shipper.log); none are lost:"
        " `hpcdist sync first` ships the rest"
    ]


def test_the_state_is_final_before_the_shipper_is_waited_for(scene: Scene) -> None:
    """The shipper ends when it sees that the run has."""
    scene.tracking = {"drain_timeout_s": 20.0}
    scene.shipper = ["sh", "-c", f"until grep -q finished '{scene.run.path}/state.json'; do :; done"]
    scene.script(first=[[*DONE], QUIETLY])
    assert scene.supervise().status == "finished"
    assert scene.report.notes == []
    assert read_json(scene.run.path / "state.json") is not None
