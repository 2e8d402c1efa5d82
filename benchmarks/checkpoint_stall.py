"""Time for which a checkpoint stops the training thread: hpcdist, `torch.save`, and a bare memcpy.

    OMP_NUM_THREADS=1 python benchmarks/checkpoint_stall.py [--device cuda] [--json] [--folder DIR]

All save the same state (weights and two Adam moments, 200 MB by default), in turn; the results are medians. The stall
is the time until the call returns, with no earlier save in progress. On CUDA there is a second value: the time until
the device has finished the copies that later kernels wait for. The last part measures by how much a background save
slows down a loop that computes in the main thread.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from harness import argument_parser
from torch import Tensor

from hpcdist.checkpoint.saver import AsyncSaver
from hpcdist.checkpoint.store import CheckpointStore, Snapshot

State = dict[str, Any]


def make_state(num_bytes: int, device: torch.device) -> State:
    """Return weights in 160 tensors, as in ResNet50, half of them small, with Adam's state."""
    num_small, num_large = 80, 80
    large = max(1, (num_bytes // 12 - num_small * 256) // num_large)
    sizes = [256, large] * num_large
    model = {f"layer{i}.weight": torch.randn(size, device=device) for i, size in enumerate(sizes)}
    adam = {
        i: {"step": torch.tensor(1.0), "exp_avg": torch.randn_like(w), "exp_avg_sq": torch.randn_like(w)}
        for i, w in enumerate(model.values())
    }
    groups = [{"lr": 1e-3, "betas": (0.9, 0.999), "params": list(range(len(sizes)))}]
    return {"model": model, "trainer": {"optimizer": {"state": adam, "param_groups": groups}}}


def tensors(value: Any) -> list[Tensor]:
    """Return the tensors in nested dicts."""
    if isinstance(value, Tensor):
        return [value]
    return [tensor for item in value.values() for tensor in tensors(item)] if isinstance(value, dict) else []


def timed(call: Callable[[], object]) -> float:
    """Return the seconds that a call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measure_stalls(state: State, folder: Path, device: torch.device, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each kind of save, by round."""

    def sync() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    def memcpy() -> None:
        target.copy_(source)
        sync()

    num_bytes = sum(tensor.nbytes for tensor in tensors(state))
    pinned = device.type == "cuda"
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=pinned)
    times: dict[str, list[float]] = {"torch.save": [], "memcpy": [], "ours": [], "ours, written": []}
    if pinned:
        times["ours, device done"] = []

    with closing(AsyncSaver(CheckpointStore(folder / "checkpoints"))) as saver:
        for step in range(rounds + 1):
            sync()
            saved = timed(lambda: torch.save(state, folder / "plain.pt"))
            copied = timed(memcpy)
            start = time.perf_counter()
            saver.save(Snapshot(step=step, **state, rank_states=[None]))
            stalled = time.perf_counter() - start
            sync()
            device_done = time.perf_counter() - start
            saver.wait()
            written = time.perf_counter() - start
            if step == 0:
                times["ours, first save"] = [stalled]  # allocates the buffers, page by page
                continue
            times["torch.save"].append(saved)
            times["memcpy"].append(copied)
            times["ours"].append(stalled)
            times["ours, written"].append(written)
            if pinned:
                times["ours, device done"].append(device_done)
    return times


def busy_rate(until: threading.Event) -> tuple[float, float]:
    """Return iterations per second of a small loop of tensor and interpreter work, and its longest pause (s)."""
    x = torch.randn(64, 64)
    count, longest = 0, 0.0
    start = last = time.perf_counter()
    while not until.is_set():
        for _ in range(20):
            x @ x
        sum(range(200))
        count += 1
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    return count / (time.perf_counter() - start), longest


def wait_and_set(saver: AsyncSaver, done: threading.Event) -> None:
    saver.wait()
    done.set()


def measure_slowdown(state: State, folder: Path, rounds: int) -> dict[str, list[float]]:
    """Return the speed of a busy loop during a save, relative to its speed without one, and its pauses."""
    result: dict[str, list[float]] = {"speed while saving": [], "longest pause (s)": []}
    with closing(AsyncSaver(CheckpointStore(folder / "slowdown"))) as saver:
        saver.save(Snapshot(step=0, **state, rank_states=[None]))
        saver.wait()
        for step in range(1, rounds + 1):
            done = threading.Event()
            timer = threading.Timer(0.3, done.set)
            timer.start()
            alone, _ = busy_rate(done)
            saver.save(Snapshot(step=step, **state, rank_states=[None]))
            done = threading.Event()
            waiter = threading.Thread(target=wait_and_set, args=(saver, done))
            waiter.start()
            rate, pause = busy_rate(done)
            waiter.join()
            result["speed while saving"].append(rate / alone)
            result["longest pause (s)"].append(pause)
    return result


def main() -> None:
    parser = argument_parser(__doc__, rounds=9)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--folder", type=Path, help="folder of the checkpoints (default: a temporary one)")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    device = torch.device(arguments.device)
    state = make_state(arguments.megabytes * 1_000_000, device)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        times = measure_stalls(state, Path(name), device, arguments.rounds)
        slowdown = measure_slowdown(state, Path(name), min(arguments.rounds, 5))

    medians = {key: statistics.median(values) for key, values in times.items()}
    ratios = {key: value / medians["torch.save"] for key, value in medians.items()}
    all_tensors = tensors(state)
    size = sum(tensor.nbytes for tensor in all_tensors)
    print(f"{size / 1e6:.0f} MB in {len(all_tensors)} tensors on {device}, torch {torch.__version__}, ", end="")
    print(f"{torch.get_num_threads()} thread(s), median of {arguments.rounds}\n")
    print(f"{'':20}{'ms':>8}{'min':>8}{'max':>8}  over torch.save")
    for key, value in medians.items():
        low, high = min(times[key]), max(times[key])
        print(f"{key:20}{value * 1e3:8.1f}{low * 1e3:8.1f}{high * 1e3:8.1f}  {ratios[key]:.3f}")
    speed = statistics.median(slowdown["speed while saving"])
    pause = statistics.median(slowdown["longest pause (s)"])
    print(
        f"\nbusy main thread during a background save: {speed:.2f} times its speed, longest pause {pause * 1e3:.1f} ms"
    )
    if arguments.json:
        record = {
            "benchmark": "checkpoint_stall",
            "device": str(device),
            "num_bytes": size,
            "num_tensors": len(all_tensors),
            "torch": torch.__version__,
            "num_threads": torch.get_num_threads(),
            "cpus": os.cpu_count(),
            "median_s": medians,
            "over_torch_save": ratios,
            "busy_speed_while_saving": speed,
            "busy_longest_pause_s": pause,
        }
        print(json.dumps(record))


if __name__ == "__main__":
    main()
