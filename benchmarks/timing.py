"""Cost of the step timer for a small DDP step.

    OMP_NUM_THREADS=1 python benchmarks/timing.py [--pairs 3000] [--json]

The timer consists of the model of `Context.wrap`, the timing part of `should_stop` with the rank's time account for
the ledger, and one journal record every 50 steps. Its cost is below the noise of a step of milliseconds, so it is
measured on a minimal step: pairs of a step with and a step without the timer, in alternating order. Before each step a
large array is read, which evicts the caches as a real step does. The result is the median of the differences with its
95 % confidence interval, compared with the duration of steps of `ddp_step.py`'s CNN at 28². One rank, because steps
are shortest without a gradient exchange. Times are CPU times of the thread, which executes the whole step.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import argument_parser
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hpcdist.config.topology import Topology
from hpcdist.data.datasets import SimpleCNN
from hpcdist.rank.step_timing import HostClock, NodeTimes, StepTimer, TimedDDP
from hpcdist.tracking.journal import JournalWriter

BATCH_SIZES = (8, 64)
#: Larger than the caches of a core.
LARGE_BYTES = 16 * 2**20
LOG_EVERY = 50
ONE_RANK = Topology(
    rank=0,
    world_size=1,
    local_rank=0,
    local_world_size=1,
    node_rank=0,
    num_nodes=1,
    master_addr="127.0.0.1",
    master_port=1,
    launcher="hpcdist",
    job_id="benchmark",
    attempt=1,
)
OPTIONS: dict[str, Any] = {"gradient_as_bucket_view": True, "static_graph": True}


def make_step(model: nn.Module, images: Tensor, labels: Tensor, after: Callable[[], None]) -> Callable[[], float]:
    """Return a function that does one training step, then calls `after`, and returns its seconds."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, fused=True)
    large = torch.zeros(LARGE_BYTES // 4)

    def step() -> float:
        large.add_(1.0)
        began = time.thread_time()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        after()
        return time.thread_time() - began

    return step


def make_timed_step(network: nn.Module, images: Tensor, labels: Tensor, journal: JournalWriter) -> Callable[[], float]:
    """Return a step with the timer and its journal records."""
    timer = StepTimer(HostClock())
    times = NodeTimes(timer, ONE_RANK, LOG_EVERY)
    num_steps = 0

    def after() -> None:
        nonlocal num_steps
        num_steps += 1
        timer.step_done(num_steps, agreement_s=1e-6)
        if metrics := times.due(num_steps):
            journal.log(metrics, num_steps)

    return make_step(TimedDDP(network, timer, **OPTIONS), images, labels, after)


def timer_cost_us(num_pairs: int, journal: JournalWriter) -> tuple[float, float, float]:
    """Return the median of the timer's cost per step, and the limits of its 95 % confidence interval."""
    images, labels = torch.randn(2, 4), torch.tensor([0, 1])
    without = make_step(DistributedDataParallel(nn.Linear(4, 4), **OPTIONS), images, labels, lambda: None)
    with_timer = make_timed_step(nn.Linear(4, 4), images, labels, journal)
    differences = []
    for number in range(num_pairs + 100):
        if number % 2:
            before, after = without(), with_timer()
        else:
            after, before = with_timer(), without()
        if number >= 100:
            differences.append(1e6 * (after - before))
    differences.sort()
    # The order statistics that limit the interval follow from the binomial distribution.
    margin, middle = round(0.98 * math.sqrt(num_pairs)), num_pairs // 2
    return differences[middle], differences[max(0, middle - margin)], differences[min(num_pairs - 1, middle + margin)]


def step_us(batch_size: int, num_steps: int) -> float:
    """Return the median duration of a step of the CNN without the timer."""
    network = SimpleCNN(num_classes=10, in_channels=1, image_size=28)
    images, labels = torch.randn(batch_size, 1, 28, 28), torch.randint(0, 10, (batch_size,))
    step = make_step(DistributedDataParallel(network, **OPTIONS), images, labels, lambda: None)
    return 1e6 * statistics.median([step() for _ in range(num_steps + 20)][20:])


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--pairs", type=int, default=3_000)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name, JournalWriter(Path(name)) as journal:
        dist.init_process_group("gloo", init_method=f"file://{name}/meet", rank=0, world_size=1)
        cost, low, high = timer_cost_us(arguments.pairs, journal)
        steps = {size: step_us(size, max(20, arguments.pairs * 2 // size)) for size in BATCH_SIZES}
        dist.destroy_process_group()
    print(f"{os.cpu_count()} CPUs, {arguments.pairs} pairs of steps\n")
    print(f"the timer takes {cost:.1f} µs per step ({low:.1f} … {high:.1f})")
    rows = {}
    for size, step in steps.items():
        percent = 100 * cost / step
        print(f"batch {size:3}: a step takes {step:.0f} µs, of which the timer is {percent:.2f} %")
        rows[f"batch_{size}"] = {"step_us": step, "percent": percent}
    if arguments.json:
        print(json.dumps({"benchmark": "timing", "cost_us": cost, "low_us": low, "high_us": high, **rows}))


if __name__ == "__main__":
    main()
