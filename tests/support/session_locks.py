"""Locks by which the test sessions of a machine take turns."""

import fcntl
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import IO

#: Returns a block whose output reaches the terminal; `conftest.py` sets that of pytest, which captures it otherwise.
uncaptured: Callable[[], AbstractContextManager[None]] = nullcontext


def lock_in_turn(file: IO[str]) -> None:
    """Lock an open file until it is closed; say on the terminal if another process holds the lock."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        with uncaptured():
            print(f"\nwaiting for another test session, which has locked {file.name}", file=sys.stderr, flush=True)
        fcntl.flock(file, fcntl.LOCK_EX)
