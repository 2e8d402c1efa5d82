"""Configuration of logging: rank and host in each line, never values of the environment."""

from __future__ import annotations

import logging
import socket
import sys


def configure(*, rank: int | None = None, level: int = logging.INFO) -> None:
    """Send log records and warnings to stderr; the lines of a rank name the rank and its host."""
    origin = f" rank {rank} on {socket.gethostname()}:" if rank is not None else ""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)s{origin} %(message)s", "%H:%M:%S"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("hpcdist").setLevel(level)
    logging.captureWarnings(True)
