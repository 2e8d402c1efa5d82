"""The DDP trainer, which fails on some nodes.

`params.broken`: a folder with a file for each faulty node, named after the node.
"""

from __future__ import annotations

import socket
from pathlib import Path

from hpcdist.config.schema import Config
from hpcdist.rank.context import Context
from hpcdist.trainers.ddp import train as ddp


def train(ctx: Context, cfg: Config) -> None:
    """Train like `ddp`; raise RuntimeError on a faulty node."""
    if (Path(cfg.params["broken"]) / socket.gethostname()).exists():
        raise RuntimeError("device lost")
    ddp.train(ctx, cfg)
