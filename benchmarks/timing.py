"""What the step timer costs: small DDP steps with it and without, in turns within one process.

    OMP_NUM_THREADS=1 python benchmarks/timing.py [--pairs 3000] [--json]

The CNN of `ddp_step.py` at 28², batches of 8 and 64, one rank: without an exchange the step is as short as it can be,
and the timer's share of it as large. With: the model of `Context.wrap`, the timer's part of `should_stop`, and a record
in the journal every 50 steps. A pair is a step of each, one after the other, in changing order; given is the median of
the pairs' differences, with the interval that holds it with 95 %. Times are the processor's for this thread, in which
all of a step is done here: what else the machine does falls out.
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
from torch.nn.parallel import DistributedDataParallel

from hpcdist.cluster.topology import Topology
from hpcdist.models.image import SimpleCNN
from hpcdist.runtime.timed_ddp import TimedDDP
from hpcdist.runtime.timing import HostClock, NodeTimes, StepTimer
from hpcdist.tracking.journal import JournalWriter

#: Pairs of steps by batch size, as shares of what is asked for: where the step is long, the timer matters little.
SHARES = {8: 1.0, 64: 0.1}
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


def network() -> SimpleCNN:
    torch.manual_seed(0)
    return SimpleCNN(num_classes=10, in_channels=1, image_size=28)


def stepper(model: DistributedDataParallel, batch_size: int, after: Callable[[], None]) -> Callable[[], float]:
    """A step of the model; it tells how many seconds it took."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    images, labels = torch.randn(batch_size, 1, 28, 28), torch.randint(0, 10, (batch_size,))

    def step() -> float:
        began = time.thread_time()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        after()
        return time.thread_time() - began

    return step


def timed_stepper(batch_size: int, journal: JournalWriter) -> Callable[[], float]:
    timer = StepTimer(HostClock())
    times = NodeTimes(timer, ALONE, LOG_EVERY)
    num_steps = 0

    def after() -> None:
        nonlocal num_steps
        num_steps += 1
        timer.step_done()
        if metrics := times.due(num_steps):
            journal.log(metrics, num_steps)

    return stepper(TimedDDP(network(), timer, **OPTIONS), batch_size, after)


def measure(batch_size: int, num_pairs: int, journal: JournalWriter) -> dict[str, float]:
    """Microseconds: of a step without the timer, and what the timer adds."""
    without = stepper(DistributedDataParallel(network(), **OPTIONS), batch_size, lambda: None)
    with_timer = timed_stepper(batch_size, journal)
    bare, differences = [], []
    for number in range(num_pairs + 100):
        if number % 2:
            first, second = without(), with_timer()
        else:
            second, first = with_timer(), without()
        if number >= 100:
            bare.append(first)
            differences.append(second - first)
    differences.sort()
    # The order statistics around a median follow from the binomial distribution.
    reach = round(0.98 * math.sqrt(num_pairs))
    middle = num_pairs // 2
    step_us, cost_us = 1e6 * statistics.median(bare), 1e6 * differences[middle]
    return {
        "step_us": step_us,
        "cost_us": cost_us,
        "low_us": 1e6 * differences[max(0, middle - reach)],
        "high_us": 1e6 * differences[min(num_pairs - 1, middle + reach)],
        "percent": 100 * cost_us / step_us,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=3_000)
    parser.add_argument("--json", action="store_true", help="end with one JSON line")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name, JournalWriter(Path(name)) as journal:
        dist.init_process_group("gloo", init_method=f"file://{name}/meet", rank=0, world_size=1)
        rows = {f"batch_{size}": measure(size, int(arguments.pairs * share), journal) for size, share in SHARES.items()}
        dist.destroy_process_group()
    print(f"{os.cpu_count()} CPUs, medians of {arguments.pairs} pairs of steps, processor time of this thread\n")
    print(f"{'':12}{'step µs':>10}{'timer µs':>10}{'95 %':>16}{'of the step':>13}")
    for name, row in rows.items():
        interval = f"{row['low_us']:.1f} … {row['high_us']:.1f}"
        print(f"{name:12}{row['step_us']:10.0f}{row['cost_us']:10.1f}{interval:>16}{row['percent']:11.2f} %")
    if arguments.json:
        print(json.dumps({"benchmark": "timing", **rows}))


if __name__ == "__main__":
    main()
