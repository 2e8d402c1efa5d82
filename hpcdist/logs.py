"""Configuration of logging: rank and host in each line, never values of the environment."""

from __future__ import annotations

import logging
import re
import socket
import sys

#: The beginning of a line of hpcdist in the log of a rank.
RANK_LINE = re.compile(r"\d\d:\d\d:\d\d (?P<level>[A-Z]+) rank \d+ on \S+: ")


def configure(*, rank: int | None = None, level: int = logging.INFO) -> None:
    """Send log records to stderr: in a rank those of hpcdist, elsewhere also warnings of libraries.

    The lines of a rank name the rank and its host. All other loggers of a rank, and Python's warnings, are left to the
    script or trainer.
    """
    origin = f" rank {rank} on {socket.gethostname()}:" if rank is not None else ""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)s{origin} %(message)s", "%H:%M:%S"))
    ours, root = logging.getLogger("hpcdist"), logging.getLogger()
    ours.setLevel(level)
    if rank is not None:
        ours.handlers[:] = [handler]
        ours.propagate = False
    else:
        root.handlers[:] = [handler]
        root.setLevel(logging.WARNING)
        logging.captureWarnings(True)
