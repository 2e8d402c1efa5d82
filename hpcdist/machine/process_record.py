"""Command line and environment that the kernel shows of this process, in `ps` and in /proc.

A forked process shows those of its parent. `pkill` and `supervisor/hang/processes.py`, among others, identify a rank by
both, so a forked rank overwrites them in place. This needs no privilege, but neither part may grow: the new command
line has the length of the old one, and the new variables replace one that was reserved for them.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from pathlib import Path

#: Module of a rank's command.
RANK_MODULE = "hpcdist.rank.worker"
#: Forks the ranks. The names have the same length, because a forked process changes its command line in place.
PARENT_MODULE = "hpcdist.rank.parent"
#: Task of srun that waits for its forked rank, and ends with it.
TASK_MODULE = "hpcdist.rank.forked_task"
#: Exit code of the process that forks ranks if it cannot fork.
CANNOT_FORK = 69
#: A variable of the parent process whose memory the variables of a rank replace.
SPACE = "HPCDIST_ENV_SPACE"
#: Enough for ten variables with a long job id.
SPACE_BYTES = 2048
#: Positions in /proc/self/stat behind the name in parentheses, see proc(5): arg_start, arg_end, env_start, env_end.
_ADDRESSES = slice(45, 49)


def replace_word(old: str, new: str) -> None:
    """Replace a word of the shown command line by one of the same length."""
    assert len(old) == len(new), "the memory of the command line cannot grow"
    start, end, _, _ = _addresses()
    _overwrite(start, end, b"\0" + old.encode() + b"\0", b"\0" + new.encode() + b"\0")


def show_variables(variables: Mapping[str, str], space_bytes: int = SPACE_BYTES) -> None:
    """Add variables to the shown environment, in the place of SPACE; without enough space they are not shown.

    Args:
        space_bytes: length of the value with which SPACE was set at the start of the parent.
    """
    _, _, start, end = _addresses()
    reserved = f"{SPACE}={' ' * space_bytes}".encode()
    shown = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in variables.items())
    rest = len(reserved) - len(shown) - len(SPACE) - 1
    if rest >= 0:
        _overwrite(start, end, reserved, shown + SPACE.encode() + b"=" + b" " * rest)


def _addresses() -> tuple[int, int, int, int]:
    fields = Path("/proc/self/stat").read_bytes().rpartition(b") ")[2].split()
    arg_start, arg_end, env_start, env_end = map(int, fields[_ADDRESSES])
    return arg_start, arg_end, env_start, env_end


def _overwrite(start: int, end: int, old: bytes, new: bytes) -> None:
    """Overwrite the first occurrence of `old` between two addresses; nothing if there is none."""
    found = ctypes.string_at(start, end - start).find(old)
    if found >= 0:
        ctypes.memmove(start + found, new, len(new))
