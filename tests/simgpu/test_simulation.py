"""What the simulated GPUs (`conftest.py`) must show: memory that the host cannot read, late work, and its order."""

import ctypes
import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.processes

COPY_MS = 50.0


def observe() -> dict[str, Any]:
    """Use two devices in a process of its own."""
    import torch

    found: dict[str, Any] = {}
    ones = torch.ones(1000, device="cuda")
    libc = ctypes.CDLL(None, use_errno=True)
    libc.write.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t]
    found["host reads"] = (libc.write(1, ones.data_ptr(), 4), ctypes.get_errno())

    buffer = torch.zeros(1000, pin_memory=True)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    buffer.copy_(ones, non_blocking=True)
    end.record()
    found["before the event"] = (end.query(), float(buffer.sum()))
    end.synchronize()
    found["after the event"] = (end.query(), float(buffer.sum()), begin.elapsed_time(end) >= COPY_MS)

    gradients = []
    for device in ("cpu", "cuda"):
        norm = torch.nn.RMSNorm(8).to(device)
        rows = torch.arange(24.0).view(3, 8).sin().to(device).requires_grad_()
        norm(rows).cos().sum().backward()
        assert rows.grad is not None
        assert norm.weight.grad is not None
        gradients.append(torch.cat([rows.grad.cpu(), norm.weight.grad.cpu()[None]]))
    found["gradients of a norm"] = float((gradients[0] - gradients[1]).abs().max())

    joined = []
    for device in ("cpu", "cuda"):
        rows_of_two_types = [torch.arange(6.0).view(3, 2).to(device), torch.ones(2, 2, dtype=torch.bfloat16).to(device)]
        joined.append(torch.zeros(2, 6, device=device))
        torch.ops.fsdp.chunk_cat_mixed_dtype(rows_of_two_types, dim=0, num_chunks=2, out=joined[-1])
    found["gradients of two types"] = float((joined[0] - joined[1].cpu()).abs().max())

    second = torch.cuda.Stream()
    for is_ordered in (True, False):
        buffer.copy_(ones, non_blocking=True)
        if is_ordered:
            second.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(second):
            ones += 1
        torch.cuda.synchronize()
        log = Path(os.environ["SIMGPU_FOLDER"], "log")
        found[f"races, ordered: {is_ordered}"] = [line.partition(": ")[2] for line in log.open() if "RACE" in line]
    try:
        torch.empty(1 << 30, device="cuda:1")
    except torch.OutOfMemoryError as error:
        found["full"] = str(error)
    return found


def test_simulation_shows_what_a_gpu_would(gpus: Path) -> None:
    env = {**os.environ, "SIMGPU_COPY_US": f"{1000 * COPY_MS:.0f}", "SIMGPU_MEMORY_MB": "1000"}
    done = subprocess.run([sys.executable, __file__], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["host reads"] == [-1, errno.EFAULT]
    assert found["before the event"] == [False, 0]
    assert found["after the event"] == [True, 1000, True]
    assert found["gradients of a norm"] < 1e-6
    assert found["gradients of two types"] == 0
    assert found["races, ordered: True"] == []
    (race,) = found["races, ordered: False"]
    assert race.startswith("RACE: add_ writes on stream 1 what copy reads on stream 0, without an order between them")
    assert found["full"].startswith(
        "CUDA out of memory. Tried to allocate 4.00 GiB. GPU 1 has a total capacity of 1000"
    )
    (gpus / "log").write_text("")  # the race was wanted


if __name__ == "__main__":
    print(json.dumps(observe()))
