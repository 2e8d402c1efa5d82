"""What people read: the output of commands, and log lines with rank and host, never with values of the environment.

Logs, names and messages come from programs, other users and servers: they are printed without control characters.
"""

from __future__ import annotations

import logging
import re
import socket
import sys

#: The beginning of a line of hpcdist in the log of a rank.
RANK_LINE = re.compile(r"\d\d:\d\d:\d\d (?P<level>[A-Z]+) rank \d+ on \S+: ")
_COLOUR = re.compile(r"\x1b\[[0-9;:]*m")
#: What controls a terminal or the order of its characters: C0 except tab and newline, DEL, C1, separators, bidi.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def terminal_text(text: str) -> str:
    """Return text without colours, with carriage returns as newlines, and other control characters as escapes."""
    text = _COLOUR.sub("", text).replace("\r\n", "\n").replace("\r", "\n")
    return _CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


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


def configure(*, rank: int | None = None, level: int = logging.INFO) -> None:
    """Send log records to stderr: in a rank those of hpcdist, elsewhere also warnings of libraries.

    The lines of a rank name the rank and its host. All other loggers of a rank, and Python's warnings, are left to the
    script or trainer.
    """
    origin = f" rank {rank} on {socket.gethostname()}:" if rank is not None else ""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Clean(f"%(asctime)s %(levelname)s{origin} %(message)s", "%H:%M:%S"))
    ours, root = logging.getLogger("hpcdist"), logging.getLogger()
    ours.setLevel(level)
    if rank is not None:
        ours.handlers[:] = [handler]
        ours.propagate = False
    else:
        root.handlers[:] = [handler]
        root.setLevel(logging.WARNING)
        logging.captureWarnings(True)
