"""Stop requests, and the commands `save` and `profile` on one rank, with a real profiler."""

import errno
import gzip
import json
import logging
import os
import signal
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hpcdist.host.json_files import read_if_valid, write_json
from hpcdist.rank import live_commands, stopping
from hpcdist.rank.live_commands import LiveCommands
from hpcdist.rank.processes import STOP_SIGNALS, StopFlag
from hpcdist.rank.stopping import StopAgreement
from hpcdist.run.folder import Attempt, RunDir
from hpcdist.run.lease import hold
from hpcdist.run.rank_requests import CommandResult, LiveCommand, RequestReader, send_command

SAVE = LiveCommand(action="save")


def profile(num_steps: int, *ranks: int) -> LiveCommand:
    return LiveCommand(action="profile", num_steps=num_steps, ranks=list(ranks))


class OneRank:
    """Rank 0 of a running run with steps of one matrix product."""

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self.attempt = run.attempts()[-1]
        self.step = 0
        self.restart()

    def restart(self) -> None:
        self.agreement = StopAgreement(None, StopFlag(), RequestReader(self.attempt))
        self.commands = LiveCommands(self.run, self.attempt, 0, self.agreement, torch.device("cpu"))

    def send(self, command: LiveCommand) -> int:
        with hold(self.run):
            return send_command(self.run, command)[1]

    def train(self, num_steps: int) -> None:
        for _ in range(num_steps):
            torch.rand(8, 8) @ torch.rand(8, 8)
            self.step += 1
            assert not self.agreement.at_boundary()
            if self.commands.profile_is_due:
                self.commands.step_done(self.step)

    def result(self, number: int) -> CommandResult | None:
        return read_if_valid(CommandResult, self.attempt.command_result(number, 0))


@pytest.fixture
def rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OneRank:
    monkeypatch.setattr(stopping, "REQUEST_INTERVAL_S", 0.0)
    monkeypatch.setattr(stopping, "AGREEMENT_INTERVAL_S", 0.0)
    monkeypatch.setattr(live_commands, "READ_INTERVAL_S", 0.0)
    run = RunDir.create(tmp_path / "runs" / "e" / "r")
    run.config.write_text("trainer: {target: ddp, script: []}\n")
    run.new_attempt()
    run.write_state(replace(run.read_state(), status="running", attempt=1, world_size=2))
    return OneRank(run)


def trace_of(rank: OneRank, result: CommandResult) -> list[str]:
    with gzip.open(rank.run.path / result.path) as file:
        return [str(event.get("name")) for event in json.load(file)["traceEvents"]]


def test_profile_records_the_steps_after_the_first_one(rank: OneRank) -> None:
    rank.train(3)
    assert rank.send(profile(2, 0)) == 1
    rank.train(6)
    result = rank.result(1)
    assert result == CommandResult(
        step=6, num_steps=2, path="artifacts/profiles/step-00000006/rank-00000.pt.trace.json.gz"
    )
    names = trace_of(rank, result)
    assert [name for name in names if name.startswith("ProfilerStep#")] == ["ProfilerStep#1", "ProfilerStep#2"]
    assert names.count("aten::mm") == 2
    assert os.listdir(rank.run.artifacts / "profiles" / "step-00000006") == ["rank-00000.pt.trace.json.gz"]
    assert not rank.commands.profile_is_due


def test_profiles_follow_each_other_and_end_with_the_rank(rank: OneRank) -> None:
    rank.send(profile(1, 0))
    rank.send(profile(100, 0))
    rank.send(profile(1, 0))
    rank.train(8)
    rank.commands.close()
    first, second = rank.result(1), rank.result(2)
    assert first is not None
    assert second is not None
    assert (first.num_steps, second.num_steps > 1) == (1, True)
    assert second.step == first.step + 2
    assert rank.result(3) == CommandResult(error="the ranks ended before the profile began")


def test_profile_is_refused_while_the_code_profiles_itself(rank: OneRank) -> None:
    rank.train(1)
    for _ in range(2):
        rank.send(profile(100, 0))
    with torch.profiler.profile() as own:
        rank.train(4)
    refusal = CommandResult(error="the training code uses torch.profiler itself")
    assert [rank.result(number) for number in (1, 2)] == [refusal] * 2
    assert own.key_averages()


def test_profile_is_refused_while_one_of_the_code_warms_up(rank: OneRank) -> None:
    """Otherwise both would record, and the step of the code's profiler would raise an error."""
    own = torch.profiler.profile(
        schedule=torch.profiler.schedule(wait=0, warmup=5, active=2, repeat=1), acc_events=True
    )
    own.start()
    rank.send(profile(100, 0))
    for _ in range(7):
        rank.train(1)
        own.step()
    assert rank.result(1) == CommandResult(error="the training code uses torch.profiler itself")
    own.stop()


@pytest.mark.parametrize("ends", ["code", "rank"])
def test_profile_that_the_code_has_ended_is_given_up(rank: OneRank, ends: str) -> None:
    rank.send(profile(100, 0))
    rank.train(4)
    own = torch.profiler.profile(schedule=torch.profiler.schedule(wait=0, warmup=1, active=9), acc_events=True)
    own.start()  # torch cancels the other profile
    own.step()
    own.stop()
    if ends == "code":
        rank.train(2)
    else:
        rank.commands.close()
    assert rank.result(1) == CommandResult(error="the training code uses torch.profiler itself")


def test_unwritable_profile_does_not_end_the_training(rank: OneRank, caplog: pytest.LogCaptureFixture) -> None:
    rank.run.artifacts.write_text("a file instead of a folder")
    rank.send(profile(1, 0))
    rank.train(5)
    assert rank.result(1) == CommandResult(error="Not a directory")
    assert caplog.messages == ["the profile cannot be made: Not a directory"]
    assert not rank.commands.profile_is_due


def test_command_that_is_not_visible_on_a_node_yet_is_read_later(
    rank: OneRank, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answers: list[LiveCommand | OSError | None] = [
        None,
        OSError(errno.ESTALE, os.strerror(errno.ESTALE)),
        profile(1, 0),
    ]

    def read(*_: object, **__: object) -> LiveCommand | None:
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer

    rank.send(profile(1, 0))
    rank.agreement.newest_profile = 1
    monkeypatch.setattr(live_commands, "read_command", read)
    for step in range(3):
        rank.commands.step_done(step)
    assert rank.commands.profile_is_due
    rank.commands.close()
    assert "Stale file handle; trying again" in caplog.text


def test_node_obeys_all_commands_that_it_sees_at_once(rank: OneRank) -> None:
    for command in (profile(1, 0), SAVE, profile(1, 1), profile(2, 0)):
        rank.send(command)
    rank.agreement.newest_profile = 4
    for step in range(1, 9):
        rank.commands.step_done(step)
    results = [rank.result(number) for number in range(1, 5)]
    assert [result.num_steps if result else None for result in results] == [1, None, None, 2]


def test_save_is_due_until_a_checkpoint_is_saved(rank: OneRank) -> None:
    rank.send(profile(100, 0))
    rank.train(2)
    assert not rank.commands.save_is_due
    rank.send(SAVE)
    rank.send(SAVE)
    rank.train(4)
    assert rank.commands.save_is_due
    written = rank.commands.begin_save(6)
    assert not rank.commands.save_is_due
    assert rank.result(2) is None
    written()
    expected = CommandResult(step=6, path="checkpoints/step-00000006")
    assert [rank.result(number) for number in (1, 2, 3)] == [None, expected, expected], "the profile goes on"
    rank.commands.begin_save(7)()
    assert not rank.attempt.command_result(4, 0).exists()
    rank.commands.close()


def test_half_written_command_is_read_again(rank: OneRank, caplog: pytest.LogCaptureFixture) -> None:
    rank.attempt.command(1).write_text('{"action": "sa')
    rank.train(2)
    assert not rank.commands.save_is_due
    write_json(rank.attempt.command(1), {"action": "save"})
    rank.train(2)
    assert rank.commands.save_is_due
    rank.attempt.command_result(1, 0).mkdir()
    with caplog.at_level(logging.WARNING):
        rank.commands.begin_save(4)()
    assert "command-001.rank-00000.json: Is a directory" in caplog.text


# --- stop requests on a file system that is temporarily unreachable


class OneRankGroup:
    """A group of one rank in place of gloo's: the maximum over its ranks is the message of this one."""

    def is_completed(self) -> bool:
        return True

    def wait(self) -> None:
        """Return at once."""


@pytest.mark.parametrize("group", [None, OneRankGroup()])
def test_script_with_slow_steps_stops_soon_after_the_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: Any
) -> None:
    """A script creates the agreement at its first boundary: nothing is measured by then."""
    now = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    monkeypatch.setattr("torch.distributed.all_reduce", lambda *_, **__: group)
    (attempt := Attempt(tmp_path / "001")).path.mkdir()
    agreement = StopAgreement(None, StopFlag(), RequestReader(attempt))
    agreement.agree_in(group)
    assert not agreement.at_boundary()
    for _ in range(3):
        now += 20.0
        assert not agreement.at_boundary()
    attempt.request.write_text("{}")
    steps = 0
    while not agreement.at_boundary():
        now += 20.0
        steps += 1
    assert steps <= 3


def test_single_rank_with_fast_steps_asks_its_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    (attempt := Attempt(tmp_path / "001")).path.mkdir()
    requests = RequestReader(attempt)
    polls: list[float] = []

    def poll() -> bool:
        polls.append(now)
        return False

    monkeypatch.setattr(requests, "poll", poll)
    agreement = StopAgreement(None, StopFlag(), requests)
    for step_s in [1e-6] * 5000 + [30.0] * 3:
        now += step_s
        agreement.at_boundary()
    assert [round(at - 1000) for at in polls] == [0, 30, 60, 90]


def test_check_for_a_stop_request_is_retried_after_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path := tmp_path / "001").mkdir()
    monkeypatch.setattr(stopping, "REQUEST_INTERVAL_S", 0.0)
    monkeypatch.setattr(stopping, "AGREEMENT_INTERVAL_S", 0.0)
    attempt = Attempt(tmp_path)
    attempt.request.touch()
    errors = [errno.ESTALE, errno.EIO]
    exists = Path.exists

    def fail_first(path: Path) -> bool:
        if errors:
            number = errors.pop(0)
            raise OSError(number, os.strerror(number))
        return exists(path)

    monkeypatch.setattr(Path, "exists", fail_first)
    agreement = StopAgreement(None, StopFlag(), RequestReader(attempt))
    assert [agreement.at_boundary() for _ in range(3)] == [False, False, True]
    assert caplog.messages == [f"{attempt.path}: Stale file handle; the next check for requests is in a second"]


def test_stop_signal_that_was_blocked_sets_the_flag() -> None:
    """Ranks of forked tasks begin so."""
    handlers = [(number, signal.getsignal(number)) for number in STOP_SIGNALS]
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
        flag = StopFlag()
        flag.install()
        assert flag.is_raised
        assert not signal.pthread_sigmask(signal.SIG_BLOCK, []) & {*STOP_SIGNALS}
    finally:
        for number, handler in handlers:
            signal.signal(number, signal.SIG_IGN)  # drops a signal that still waits
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
            signal.signal(number, handler)
