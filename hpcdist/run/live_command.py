"""Commands to the ranks of a running attempt that do not end it: `save` and `profile`.

    attempts/001/command-001.json                the command; numbers begin with 1
    attempts/001/command-001.rank-00000.json     the result of a rank

`run/command_sender.py` writes commands. Rank 0 checks for the next number and sends it to the other
ranks (`rank/live_commands.py`). A command is part of one attempt: a restart drops commands that the ranks have not
obeyed.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal

from hpcdist.errors import RunFolderError
from hpcdist.files import formats
from hpcdist.files.atomic import read_if_valid, read_json, write_json
from hpcdist.run.attempt import Attempt

Action = Literal["save", "profile"]
DEFAULT_PROFILE_STEPS = 10


@dataclass(frozen=True, kw_only=True)
class LiveCommand:
    """The content of a command file."""

    action: Action
    by: str = "unknown"  #: name of a user, or `MLflow`
    num_steps: int = DEFAULT_PROFILE_STEPS  #: steps of a profile
    ranks: list[int] = field(default_factory=lambda: [0])  #: ranks of a profile
    time: float = 0.0  #: of the command, in seconds since the epoch
    key: str = ""  #: unique to a command whose sender may send it again after a crash; empty for others


@dataclass(frozen=True, kw_only=True)
class CommandResult:
    """The result of a command on one rank; of `save`, rank 0 alone reports."""

    step: int = 0  #: of the checkpoint, or the first step of the profile
    num_steps: int = 0  #: profiled steps; fewer than requested if the run ended before
    path: str = ""  #: the checkpoint or trace, relative to the run folder
    error: str = ""

    def sentence(self, folder: str = "") -> str:
        """Return a text for users, with the path below `folder`."""
        if self.error:
            return self.error
        path = os.path.join(folder, self.path)
        if self.num_steps:
            return f"profiled {self.num_steps} steps from step {self.step} on: {path}"
        return f"saved step {self.step}: {path}"


def read_command(attempt: Attempt, number: int, *, within_s: float | None = None) -> LiveCommand | None:
    """Return a command, or None if there is none of this number, or if it is incomplete."""
    path = attempt.command(number)
    raw = read_json(path, within_s=within_s)
    try:
        return None if raw is None else formats.fill(LiveCommand, raw, path)
    except RunFolderError:
        return None


class CommandFiles:
    """Finds the commands to an attempt in the order of their numbers."""

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt
        self._next = 1

    def poll(self) -> tuple[int, LiveCommand] | None:
        """Return the next command and its number, or None if there is none yet. Raises OSError."""
        if not self._attempt.command(self._next).exists():
            return None
        command = read_command(self._attempt, self._next, within_s=0)
        if command is None:
            return None  # half written
        self._next += 1
        return self._next - 1, command


def write_result(attempt: Attempt, number: int, rank: int, result: CommandResult) -> None:
    """Record the result of a rank. Raises OSError."""
    write_json(attempt.command_result(number, rank), asdict(result))


def read_result(attempt: Attempt, number: int, rank: int) -> CommandResult | None:
    """Return the result of a rank; None if it has not finished, or the file is damaged."""
    return read_if_valid(CommandResult, attempt.command_result(number, rank))


def outcome_of(
    attempt: Attempt, number: int, ranks: Sequence[int], *, is_over: bool, folder: str = ""
) -> tuple[list[str], bool] | None:
    """Return the result of a command, one line for each rank, and whether all ranks have obeyed.

    Returns None while a result may follow.

    Args:
        ranks: the ranks that report: those of a profile, or rank 0.
        is_over: the attempt has ended, so that no further results follow. Determine it before this call.
        folder: of the paths in the lines; by default they are relative to the run folder.
    """
    results = {rank: read_result(attempt, number, rank) for rank in ranks}
    if None in results.values() and not is_over:
        return None
    missing = f"attempt {attempt.number} ended before it was done"
    lines = [f"rank {rank}: {missing if it is None else it.sentence(folder)}" for rank, it in results.items()]
    return lines, all(it is not None and not it.error for it in results.values())
