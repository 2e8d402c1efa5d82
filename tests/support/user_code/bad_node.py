"""The shipped DDP trainer, on a machine room some of whose nodes are broken.

`params.broken`: a folder that holds a file named like each node whose device fails.
"""

from __future__ import annotations

import socket
from pathlib import Path

from hpcdist.config.schema import Config
from hpcdist.rank.context import Context
from hpcdist.trainers.ddp import train as ddp


def train(ctx: Context, cfg: Config) -> None:
    """Train as `ddp` does where the node is whole."""
    if (Path(cfg.params["broken"]) / socket.gethostname()).exists():
        raise RuntimeError("device lost")
    ddp.train(ctx, cfg)
