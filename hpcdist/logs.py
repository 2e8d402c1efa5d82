"""The output of commands, and log lines with rank and host: both without control characters."""

from __future__ import annotations

import logging
import re
import socket
import sys

from hpcdist.errors import terminal_text

#: The beginning of a line of hpcdist in the log of a rank.
RANK_LINE = re.compile(r"\d\d:\d\d:\d\d (?P<level>[A-Z]+) rank \d+ on \S+: ")


def say(text: object, *, end: str = "\n", error: bool = False, raw: bool = False) -> None:
    """Print text without control characters.

    Args:
        error: to standard error.
        raw: as it is.
    """
    print(str(text) if raw else terminal_text(str(text)), end=end, file=sys.stderr if error else None, flush=True)


class _Clean(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return terminal_text(super().format(record))


def configure(*, rank: int | None = None) -> None:
    """Send log records to stderr: in a rank those of hpcdist, elsewhere also warnings of libraries.

    The lines of a rank name the rank and its host. All other loggers of a rank, and Python's warnings, are left to the
    script or trainer.
    """
    origin = f" rank {rank} on {socket.gethostname()}:" if rank is not None else ""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Clean(f"%(asctime)s %(levelname)s{origin} %(message)s", "%H:%M:%S"))
    ours, root = logging.getLogger("hpcdist"), logging.getLogger()
    ours.setLevel(logging.INFO)
    if rank is not None:
        ours.handlers[:] = [handler]
        ours.propagate = False
    else:
        root.handlers[:] = [handler]
        root.setLevel(logging.WARNING)
        logging.captureWarnings(True)
