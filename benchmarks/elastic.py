"""Cost of elastic training steps, with and without exact sums, compared with plain DDP.

    python benchmarks/elastic.py [--rounds 5] [--ranks 2 4] [--steps 20] [--json]

Gloo ranks with one thread each train with SGD on random images, one micro-batch per rank. `cnn` is `simple_cnn` at
28² with 32 samples per rank, `wide` two linear layers of 2.5 million values with 8 samples, whose time is mainly the
exchange of gradients. All contenders run in the same processes and alternate; a ratio is one of two blocks of steps in
the same round, and the results are medians over rounds. CPU time is that of rank 0's process. `sent` is the number of
bytes that one rank sends per step, as calculated from the algorithms: a ring all-reduce for DDP and the default.
"""

from __future__ import annotations

import itertools
import json
import os
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import MALLOC_ENV, argument_parser, median, median_ratio
from torch import nn
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

from hpcdist.data.datasets import SimpleCNN
from hpcdist.rank.micro_batches import BatchDivision, micro_batches, sum_over_ranks

CONTENDERS = ("DDP", "elastic", "elastic, exact")
#: Samples per rank by model.
SAMPLES = {"cnn": 32, "wide": 8}


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name == "cnn":
        return SimpleCNN(num_classes=10, in_channels=1, image_size=28)
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 3200), nn.ReLU(), nn.Linear(3200, 10))


def contender(kind: str, name: str, rank: int, world_size: int) -> Callable[[int], None]:
    """Return a function that does the step with a given number."""
    size = SAMPLES[name]
    images, labels = torch.randn(8 * size * world_size, 1, 28, 28), torch.randint(10, (8 * size * world_size,))
    model = DistributedDataParallel(
        build(name), gradient_as_bucket_view=True, static_graph=kind == "DDP", bucket_cap_mb=25
    )
    model.broadcast_buffers = kind == "DDP"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
    if kind == "elastic":
        model.register_comm_hook(None, sum_over_ranks)

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    def plain(step: int) -> None:
        begin = step % 8 * size
        F.cross_entropy(model(images[begin : begin + size]), labels[begin : begin + size]).backward()
        update()

    division = BatchDivision(
        num_samples=len(labels),
        global_batch_size=size * world_size,
        num_micro_batches=world_size,
        seed=0,
        rank=rank,
        world_size=world_size,
    )

    def elastic(step: int) -> None:
        for micro in micro_batches(division, model, step, exact=kind == "elastic, exact"):
            loss = F.cross_entropy(model(images[micro.indices]), labels[micro.indices])
            (loss * micro.weight).backward()
        update()

    return plain if kind == "DDP" else elastic


def measure(rank: int, world_size: int, folder: str, rounds: int, num_steps: int) -> None:
    """Measure all contenders in one rank; rank 0 writes (wall, CPU) milliseconds per step of each round."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", world_size)  # type: ignore[attr-defined]  # torch exports it at run time
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(minutes=10))
    times: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for name in SAMPLES:
        steps = {kind: contender(kind, name, rank, world_size) for kind in CONTENDERS}
        numbers = {kind: itertools.count() for kind in CONTENDERS}
        times[name] = {kind: [] for kind in CONTENDERS}
        for number in range(rounds + 1):
            for kind, step in steps.items():
                dist.barrier()
                began, cpu_began = time.perf_counter(), time.process_time()
                for _ in range(num_steps):
                    step(next(numbers[kind]))
                dist.barrier()
                spent = time.perf_counter() - began, time.process_time() - cpu_began
                if number > 0:  # the first round settles buckets, caches and allocators
                    times[name][kind].append((spent[0] * 1000 / num_steps, spent[1] * 1000 / num_steps))
    if rank == 0:
        Path(folder, "times.json").write_text(json.dumps(times))
    dist.destroy_process_group()


def sent_bytes(kind: str, name: str, world_size: int) -> int:
    """Return the bytes that one rank sends in a step, for gradients and buffers.

    With one micro-batch per rank, the exact sum sends as much as a ring all-reduce.
    """
    module = build(name)
    num_values = sum(parameter.numel() for parameter in module.parameters())
    if kind != "DDP":
        num_values += sum(buffer.numel() for buffer in module.buffers())
    return 2 * (world_size - 1) * num_values // world_size * 4


def main() -> None:
    """Run the benchmark and print its table."""
    parser = argument_parser(__doc__, rounds=5)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--steps", type=int, default=20, help="steps of one contender in a round")
    arguments = parser.parse_args()
    os.environ.update(MALLOC_ENV, OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    result: dict[str, object] = {"benchmark": "elastic", "rounds": arguments.rounds, "load": os.getloadavg()[0]}
    print(
        f"{'ranks':>5} {'model':<5} {'contender':<15} {'ms per step':>11} {'over DDP':>9} {'CPU ms':>7}"
        f" {'over DDP':>9} {'sent, MB':>9}"
    )
    for world_size in arguments.ranks:
        with tempfile.TemporaryDirectory(prefix="elastic_") as folder:
            spawn(measure, (world_size, folder, arguments.rounds, arguments.steps), nprocs=world_size)
            times = json.loads(Path(folder, "times.json").read_text())
        for name, by_kind in times.items():
            for kind, values in by_kind.items():
                (wall, cpu), (ddp_wall, ddp_cpu) = zip(*values, strict=True), zip(*by_kind["DDP"], strict=True)
                sent = sent_bytes(kind, name, world_size)
                ratio, cpu_ratio = median_ratio(wall, ddp_wall), median_ratio(cpu, ddp_cpu)
                print(
                    f"{world_size:>5} {name:<5} {kind:<15} {median(wall):>11.2f} {ratio:>9.2f} {median(cpu):>7.2f}"
                    f" {cpu_ratio:>9.2f} {sent / 1e6:>9.2f}"
                )
                result[f"{kind}, {name}, {world_size} ranks"] = {
                    "ms": median(wall),
                    "over_ddp": ratio,
                    "cpu_ms": median(cpu),
                    "cpu_over_ddp": cpu_ratio,
                    "rounds": values,
                    "sent_bytes": sent,
                }
    if arguments.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
