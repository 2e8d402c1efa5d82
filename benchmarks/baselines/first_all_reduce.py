"""The script of `startup.py`: one all-reduce, then write its time. Needs the variables of torchrun."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist


def main() -> None:
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(repr(time.time()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
