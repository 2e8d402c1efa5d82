"""Send a command to the ranks of a running attempt, for `hpcdist save`, `hpcdist profile` and the tag in MLflow."""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Collection, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hpcdist.config.written import plain_tree
from hpcdist.errors import UserMistake
from hpcdist.files import formats, retry
from hpcdist.files.atomic import write_atomic
from hpcdist.rank.roles import Roles
from hpcdist.run.attempt import Attempt
from hpcdist.run.folder import RunDir
from hpcdist.run.lease import holder, user_name
from hpcdist.run.live_command import LiveCommand, read_command

#: Steps of one profile: the events of all of them are in memory until the last one.
MAX_PROFILE_STEPS = 1000


def send_command(run: RunDir, command: LiveCommand) -> tuple[Attempt, int]:
    """Send a command to the ranks of a running run. Returns the attempt and the number of the command.

    A command whose key was sent to this attempt before is not sent again.

    Raises:
        UserMistake: the run has no running ranks, or these ranks cannot obey.
    """
    state = run.read_state()
    attempt = run.attempt(state.attempt)
    if command.key and (number := _number_of(attempt, command.key)):
        return attempt, number
    if state.status != "running" or state.attempt == 0 or holder(run) is None:
        raise UserMistake(f"run {run.name} is not running: its state is {state.status!r}")
    config = plain_tree(run.config)
    if command.action == "profile":
        _require_profiled_ranks(run, config, attempt, command.ranks, state.world_size)
    else:
        _require_steps_of_script(run, config, attempt)
    if request := attempt.read_request():
        raise UserMistake(f"run {run.name} is ending ({request.sentence})")
    text = json.dumps(formats.stamped({**asdict(command), "time": time.time()})) + "\n"
    return attempt, retry.retry(lambda: _create(attempt, text), attempt.path)


def _number_of(attempt: Attempt, key: str) -> int:
    """Return the number of the command with a key; 0 if this attempt has none."""
    number = 1
    while retry.exists(attempt.command(number)):
        found = read_command(attempt, number)
        if found is not None and found.key == key:
            return number
        number += 1
    return 0


def _create(attempt: Attempt, text: str) -> int:
    """Create a command file with the next free number. Returns the number."""
    number = 1
    while not _create_as(attempt.command(number), text):
        number += 1
    return number


def _create_as(path: Path, text: str) -> bool:
    """Create a complete command file; return False if another command has the name."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    write_atomic(temporary, text, mode=0o600)
    try:
        os.link(temporary, path)  # unlike a rename, it fails if another command has the name
    except FileExistsError:
        return False
    finally:
        retry.discard(temporary)
    return True


def _require_profiled_ranks(
    run: RunDir, config: Mapping[str, Any], attempt: Attempt, ranks: Collection[int], world_size: int
) -> None:
    if outside := sorted(rank for rank in ranks if rank >= world_size):
        raise UserMistake(f"run {run.name} has no rank {outside[0]}: its ranks are 0 to {world_size - 1}")
    _require_steps_of_script(run, config, attempt)
    without = [rank for rank in sorted(ranks) if has_no_steps(attempt, rank)]
    if without:
        name = Roles.of(config.get("roles") or {}, world_size).name_of(without[0])
        raise UserMistake(f"rank {without[0]} of run {run.name} ({name}) has no steps to profile: choose another rank")


def _require_steps_of_script(run: RunDir, config: Mapping[str, Any], attempt: Attempt) -> None:
    if (config.get("trainer") or {}).get("script") and attempt.read_beat(0) is None:
        raise UserMistake(
            f"run {run.name} reports no steps: its script must call hpcdist.should_stop(step) after each step"
        )


def has_no_steps(attempt: Attempt, rank: int) -> bool:
    """Return whether a rank is known to have no steps, such as a parameter server."""
    account = (attempt.read_beat(rank) or {}).get("account")
    if not isinstance(account, dict):
        return False
    seconds = account.get("seconds")
    return account.get("cause") == "idle" and isinstance(seconds, dict) and "compile" not in seconds


def parse_ranks(text: str, name: str) -> list[int]:
    """Return the ranks in a text such as `0,3`. Raises UserMistake, which names the option `name`."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() and len(word) < 10 for word in words):
        raise UserMistake(f"{name} {text[:40]!r}: expected ranks, separated by commas, such as 0,3")
    return sorted({int(word) for word in words})


def profile_command(num_steps: int, ranks: list[int], *, by: str = "") -> LiveCommand:
    """Return a command to profile steps. Raises UserMistake for a number of steps that is not supported."""
    if not 1 <= num_steps <= MAX_PROFILE_STEPS:
        raise UserMistake(f"a profile has 1 to {MAX_PROFILE_STEPS} steps, got {num_steps}")
    return LiveCommand(action="profile", by=by or user_name(), num_steps=num_steps, ranks=ranks)
