"""Logging, configured in one function: rank and host in each line, never the environment."""

from __future__ import annotations

import logging
import socket
import sys


def configure(*, rank: int | None = None, level: int = logging.INFO) -> None:
    """Send hpcdist's log (and warnings) to stderr; in a rank every line says which one on which host."""
    where = f" rank {rank} on {socket.gethostname()}:" if rank is not None else ""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)s{where} %(message)s", "%H:%M:%S"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("hpcdist").setLevel(level)
    logging.captureWarnings(True)
