"""What the step timer costs a small DDP step.

    OMP_NUM_THREADS=1 python benchmarks/timing.py [--pairs 3000] [--json]

With the timer: the model of `Context.wrap`, the timer's part of `should_stop`, and a record in the journal every 50
steps. What it adds is lost in the noise of a step of milliseconds. So it is measured on a step that is as short as can
be: in pairs, one step with the timer and one without, in changing order, each after something large has taken the
processor's caches, as a real step's computing does; given is the median of the pairs' differences, with the interval
that holds it with 95 %. It is then compared with steps of the CNN of `ddp_step.py` at 28². One rank: without an
exchange a step is as short as it gets. Times are the processor's for this thread, in which all of a step is done here.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hpcdist.models.image import SimpleCNN
from hpcdist.rank.telemetry.step_timing import HostClock, NodeTimes, StepTimer
from hpcdist.rank.telemetry.timed_ddp import TimedDDP
from hpcdist.rank.topology import Topology
from hpcdist.tracking.journal import JournalWriter

BATCH_SIZES = (8, 64)
#: Larger than the caches of a core.
LARGE_BYTES = 16 * 2**20
LOG_EVERY = 50
ALONE = Topology(
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
OPTIONS = {"gradient_as_bucket_view": True, "static_graph": True}


def stepper(model: nn.Module, images: Tensor, labels: Tensor, after: Callable[[], None]) -> Callable[[], float]:
    """A step of the model; it tells how many seconds it took."""
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


def timed(network: nn.Module, images: Tensor, labels: Tensor, journal: JournalWriter) -> Callable[[], float]:
    timer = StepTimer(HostClock())
    times = NodeTimes(timer, ALONE, LOG_EVERY)
    num_steps = 0

    def after() -> None:
        nonlocal num_steps
        num_steps += 1
        timer.step_done()
        if metrics := times.due(num_steps):
            journal.log(metrics, num_steps)

    return stepper(TimedDDP(network, timer, **OPTIONS), images, labels, after)


def cost_us(num_pairs: int, journal: JournalWriter) -> tuple[float, float, float]:
    """What the timer adds to a step: the median, and the interval that holds it."""
    images, labels = torch.randn(2, 4), torch.tensor([0, 1])
    without = stepper(DistributedDataParallel(nn.Linear(4, 4), **OPTIONS), images, labels, lambda: None)
    with_timer = timed(nn.Linear(4, 4), images, labels, journal)
    differences = []
    for number in range(num_pairs + 100):
        if number % 2:
            before, after = without(), with_timer()
        else:
            after, before = with_timer(), without()
        if number >= 100:
            differences.append(1e6 * (after - before))
    differences.sort()
    # The order statistics around a median follow from the binomial distribution.
    reach, middle = round(0.98 * math.sqrt(num_pairs)), num_pairs // 2
    return differences[middle], differences[max(0, middle - reach)], differences[min(num_pairs - 1, middle + reach)]


def step_us(batch_size: int, num_steps: int) -> float:
    """A step of the CNN without the timer, the median."""
    network = SimpleCNN(num_classes=10, in_channels=1, image_size=28)
    images, labels = torch.randn(batch_size, 1, 28, 28), torch.randint(0, 10, (batch_size,))
    step = stepper(DistributedDataParallel(network, **OPTIONS), images, labels, lambda: None)
    return 1e6 * statistics.median([step() for _ in range(num_steps + 20)][20:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=3_000)
    parser.add_argument("--json", action="store_true", help="end with one JSON line")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name, JournalWriter(Path(name)) as journal:
        dist.init_process_group("gloo", init_method=f"file://{name}/meet", rank=0, world_size=1)
        cost, low, high = cost_us(arguments.pairs, journal)
        steps = {size: step_us(size, max(20, arguments.pairs * 2 // size)) for size in BATCH_SIZES}
        dist.destroy_process_group()
    print(f"{os.cpu_count()} CPUs, {arguments.pairs} pairs of steps\n")
    print(f"the timer takes {cost:.1f} µs a step ({low:.1f} … {high:.1f})")
    rows = {}
    for size, step in steps.items():
        percent = 100 * cost / step
        print(f"batch {size:3}: a step takes {step:.0f} µs, the timer's share is {percent:.2f} %")
        rows[f"batch_{size}"] = {"step_us": step, "percent": percent}
    if arguments.json:
        print(json.dumps({"benchmark": "timing", "cost_us": cost, "low_us": low, "high_us": high, **rows}))


if __name__ == "__main__":
    main()
