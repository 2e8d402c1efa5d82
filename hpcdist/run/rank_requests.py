"""Requests to the ranks of a running attempt: the commands `save` and `profile`, which do not end it.

`RequestReader` also finds a request to stop.

    attempts/001/command-001.json                the command; numbers begin with 1
    attempts/001/command-001.rank-00000.json     the result of a rank

The command line and the shipper write commands. Rank 0 checks for the next number and sends it to the other ranks
(`rank/stopping.py`), which obey it (`rank/live_commands.py`). A command is part of one attempt: a restart drops those
that the ranks have not obeyed.
"""

import itertools
import json
import os
import secrets
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Literal

from hpcdist.config.roles import Roles
from hpcdist.config.written import read_stored
from hpcdist.errors import RunFolderError, UserMistake
from hpcdist.host import retry
from hpcdist.host.files import write_atomic
from hpcdist.host.json_files import fill, read_if_valid, read_json, stamped, write_json
from hpcdist.run.folder import Attempt, RunDir
from hpcdist.run.lease import holder, user_name

Action = Literal["save", "profile"]
DEFAULT_PROFILE_STEPS = 10


@dataclass(frozen=True, kw_only=True)
class LiveCommand:
    """The content of a command's file."""

    action: Action
    by: str = "unknown"  #: name of a user, or `MLflow`
    num_steps: int = DEFAULT_PROFILE_STEPS  #: steps of a profile
    ranks: list[int] = field(default_factory=lambda: [0])  #: ranks of a profile
    time: float = 0.0  #: when the command was sent, in seconds since the epoch
    key: str = ""  #: unique to a command that its sender may repeat after a crash; empty for others


@dataclass(frozen=True, kw_only=True)
class CommandResult:
    """The result of a command on one rank. For `save`, only rank 0 writes one."""

    step: int = 0  #: step of the checkpoint, or first step of the profile
    num_steps: int = 0  #: profiled steps; fewer than requested if the run ended before
    path: str = ""  #: the checkpoint or trace, relative to the run folder
    error: str = ""

    def sentence(self, folder: str = "") -> str:
        """Return the result for a message, with the path below `folder`."""
        if self.error:
            return self.error
        path = os.path.join(folder, self.path)
        if self.num_steps:
            return f"profiled {self.num_steps} steps from step {self.step} on: {path}"
        return f"saved step {self.step}: {path}"


def read_command(attempt: Attempt, number: int, *, within_s: float | None = None) -> LiveCommand | None:
    """Return a command; None if there is none of this number, or it is incomplete."""
    path = attempt.command(number)
    raw = read_json(path, within_s=within_s)
    if raw is None:
        return None
    try:
        return fill(LiveCommand, raw, path)
    except RunFolderError:
        return None


class RequestReader:
    """Reads on one rank the requests to all ranks of an attempt: a stop, and numbered commands.

    Attributes:
        newest: number of the newest command by action; 0 before the first one.
    """

    def __init__(self, attempt: Attempt) -> None:
        self.attempt = attempt
        self.newest: dict[Action, int] = {"save": 0, "profile": 0}
        self._next = 1

    def poll(self) -> bool:
        """Return whether a stop is requested, and note the next command in `newest`.

        A call notes at most one command, because the ranks agree on one number at a time.
        """
        if self.attempt.command(self._next).exists():
            command = read_command(self.attempt, self._next, within_s=0)
            if command is not None:  # else it is half written
                self.newest[command.action] = self._next
                self._next += 1
        return self.attempt.request.exists()


def write_result(attempt: Attempt, number: int, rank: int, result: CommandResult) -> None:
    """Write the result of a command on a rank."""
    write_json(attempt.command_result(number, rank), asdict(result))


def outcome_of(
    attempt: Attempt, number: int, ranks: Sequence[int], *, is_over: bool, folder: str = ""
) -> tuple[list[str], bool] | None:
    """Return one line for each rank, and whether all have obeyed a command; None while a result may follow.

    Args:
        is_over: the attempt has ended, so that no further results follow. Determine it before this call.
        folder: folder of the paths in the lines; by default they are relative to the run folder.
    """
    results = {rank: read_if_valid(CommandResult, attempt.command_result(number, rank)) for rank in ranks}
    if None in results.values() and not is_over:
        return None
    lines = []
    is_done = True
    for rank, result in results.items():
        if result is None:
            sentence = f"attempt {attempt.number} ended before it was done"
            is_done = False
        else:
            sentence = result.sentence(folder)
            is_done = is_done and not result.error
        lines.append(f"rank {rank}: {sentence}")
    return lines, is_done


#: Limit of the steps of a profile: its events stay in memory until its last step.
MAX_PROFILE_STEPS = 1000
#: Limit of the digits of a rank; a run has at most 262,144 ranks.
_MAX_DIGITS = 9


def send_command(run: RunDir, command: LiveCommand) -> tuple[Attempt, int]:
    """Send a command to the ranks of a running run, unless its key was sent to this attempt before.

    Returns the attempt and the number of the command. Raises UserMistake if the run has no ranks that can obey.
    """
    state = run.read_state()
    attempt = run.attempt(state.attempt)
    if command.key:
        number = _number_of(attempt, command.key)
        if number is not None:
            return attempt, number
    if state.status != "running" or state.attempt == 0 or holder(run) is None:
        raise UserMistake(f"run {run.name} is not running: its state is {state.status!r}")
    config = read_stored(run.config).config
    profiled: list[int] = []
    if command.action == "profile":
        profiled = sorted(command.ranks)
    for rank in profiled:
        if rank >= state.world_size:
            raise UserMistake(f"run {run.name} has no rank {rank}: its ranks are 0 to {state.world_size - 1}")
    if config.trainer.script and attempt.read_beat(0) is None:
        raise UserMistake(
            f"run {run.name} reports no steps: its script must call hpcdist.should_stop(step) after each step"
        )
    for rank in profiled:
        if _has_no_steps(attempt, rank):
            name = Roles.of(config.roles, state.world_size).name_of(rank)
            raise UserMistake(f"rank {rank} of run {run.name} ({name}) has no steps to profile: choose another rank")
    request = attempt.read_request()
    if request is not None:
        raise UserMistake(f"run {run.name} is ending ({request.sentence})")
    text = json.dumps(stamped({**asdict(command), "time": time.time()})) + "\n"
    return attempt, retry.retry(lambda: _add_command(attempt, text), attempt.path)


def _number_of(attempt: Attempt, key: str) -> int | None:
    """Return the number of the command with a key; None if the attempt has no such command."""
    number = 1
    while retry.exists(attempt.command(number)):
        command = read_command(attempt, number)
        if command is not None and command.key == key:
            return number
        number += 1
    return None


def _has_no_steps(attempt: Attempt, rank: int) -> bool:
    """Return whether a rank's heartbeat shows that it only waits for requests, such as a parameter server."""
    beat = attempt.read_beat(rank) or {}
    account = beat.get("account")
    if not isinstance(account, dict) or account.get("cause") != "idle":
        return False
    # `compile` is the first step of an attempt, which a rank that trains has had even if it is idle now.
    seconds = account.get("seconds")
    return isinstance(seconds, dict) and "compile" not in seconds


def _add_command(attempt: Attempt, text: str) -> int:
    """Write the file of a command under the first free number. Returns the number."""
    temporary = attempt.path / f".command.{os.getpid()}.{secrets.token_hex(4)}"
    write_atomic(temporary, text, mode=0o600)
    try:
        for number in itertools.count(1):
            # Unlike a rename, a link fails if another sender has taken the number.
            with suppress(FileExistsError):
                os.link(temporary, attempt.command(number))
                break
    finally:
        retry.discard(temporary)
    return number


def parse_ranks(text: str, name: str) -> list[int]:
    """Return the ranks in a text such as `0,3`, the value of option `name`."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() and len(word) <= _MAX_DIGITS for word in words):
        raise UserMistake(f"{name} {text[:40]!r}: expected ranks, separated by commas, such as 0,3")
    return sorted({int(word) for word in words})


def profile_command(num_steps: int, ranks: list[int], *, by: str = "") -> LiveCommand:
    """Return the command to profile some steps of some ranks; `by` is its author, by default the user.

    Raises UserMistake if the number of steps is not from 1 to MAX_PROFILE_STEPS.
    """
    if not 1 <= num_steps <= MAX_PROFILE_STEPS:
        raise UserMistake(f"a profile has 1 to {MAX_PROFILE_STEPS} steps, got {num_steps}")
    return LiveCommand(action="profile", by=by or user_name(), num_steps=num_steps, ranks=ranks)
