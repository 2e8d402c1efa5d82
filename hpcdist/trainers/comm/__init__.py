"""Trainer `comm`: checks and measures the communication between ranks (`hpcdist bench comm`)."""

from __future__ import annotations

import subprocess
import sys

from hpcdist.bench import CommConfig
from hpcdist.config.schema import Config, Trainer


def _check(config: Config) -> list[str]:
    if config.launch.device == "cpu" and config.section(CommConfig).backend == "nccl":
        return ["comm.backend=nccl needs GPUs, but launch.device=cpu: use comm.backend=gloo"]
    return []


def _check_host(config: Config) -> list[str]:
    """Check in a process of its own that torch has MPI, since the supervisor does not import torch."""
    if config.section(CommConfig).backend != "mpi" or config.container.runtime != "none":
        return []
    query = "import sys, torch.distributed as dist; sys.exit(0 if dist.is_mpi_available() else 3)"
    if subprocess.run([sys.executable, "-c", query], check=False).returncode != 3:
        return []
    return [
        "comm.backend=mpi needs a torch that was built with MPI, which wheels are not: build torch from source"
        f" beside MPI for {sys.executable}, or use comm.backend=gloo"
    ]


TRAINER = Trainer(section=CommConfig, check=_check, check_host=_check_host, is_benchmark=True)
