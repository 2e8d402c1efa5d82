"""Check the steps of a rank's start: import torch, compute, join a process group, run an all-reduce.

    python -P -m hpcdist.rank.startup_check DEVICE BACKEND RANK WORLD_SIZE FILE

Prints one line of JSON after each stage (`stage`, `seconds` and the stage's results), so that the last line shows how
far a rank came before a hang. `hpcdist doctor` starts it and evaluates the lines.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

#: Time limit for the ranks of one machine to join the process group, in seconds.
JOIN_TIMEOUT_S = 20.0
_SIDE, _ELEMENTS = 256, 2**17


def main(arguments: list[str]) -> int:
    """Run the stages of a trial rank and print a line of JSON for each; return the exit code."""
    device, backend, *numbers, meeting = arguments
    rank, ranks = map(int, numbers)
    stages: dict[str, Callable[[], dict[str, Any]]] = {
        "torch": _import_torch,
        "torchvision": _import_torchvision,
        "compute": lambda: _compute(device, rank),
        "meet": lambda: _meet(device, backend, rank, ranks, meeting),
        "all-reduce": lambda: _all_reduce(device, rank, ranks),
    }
    for stage, run in stages.items():
        begun = time.perf_counter()
        try:
            found = run()
        except Exception as error:  # any error of torch is a finding
            found = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:600]}"}
        print(json.dumps({"stage": stage, "seconds": time.perf_counter() - begun, **found}), flush=True)
        if "error" in found and stage != "torchvision":
            return 1
    return 0


def _import_torch() -> dict[str, Any]:
    import torch

    return {"version": torch.__version__, "cuda": torch.version.cuda or ""}


def _import_torchvision() -> dict[str, Any]:
    """A torchvision that was built for another version of torch fails at import."""
    import torchvision

    return {"version": torchvision.__version__}


def _compute(device: str, rank: int) -> dict[str, Any]:
    """Multiply matrices of ones, which is exact in every precision."""
    import torch

    place = torch.device("cpu")
    found: dict[str, Any] = {}
    if device == "cuda":
        place = torch.device("cuda", rank)
        torch.cuda.set_device(place)
        version = torch.cuda.nccl.version()
        found = {"name": torch.cuda.get_device_name(place), "nccl": ".".join(map(str, version))}
    ones = torch.ones(_SIDE, _SIDE, device=place)
    product = ones @ ones
    wrong = int((product != _SIDE).sum())
    if wrong:
        raise ArithmeticError(f"{wrong} of {_SIDE**2} numbers of a matrix product are wrong")
    return found


def _meet(device: str, backend: str, rank: int, ranks: int, meeting: str) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    dist.init_process_group(
        backend,
        init_method=f"file://{meeting}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=JOIN_TIMEOUT_S),
        device_id=torch.device("cuda", rank) if device == "cuda" else None,
    )
    return {}


def _all_reduce(device: str, rank: int, ranks: int) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    from hpcdist.rank.collective_check import contribution, expected

    sums = contribution(rank, ranks, _ELEMENTS, torch.float32).to(torch.device(device, rank * (device == "cuda")))
    dist.all_reduce(sums)
    if wrong := int((sums.cpu() != expected(ranks, _ELEMENTS, torch.float32)).sum()):
        raise ArithmeticError(f"{wrong} of {sums.numel()} sums are wrong")
    dist.destroy_process_group()
    return {}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
