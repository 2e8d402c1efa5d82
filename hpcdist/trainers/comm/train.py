"""The trainer `comm`, a communication benchmark: check every operation on every rank, then measure it.

The results are written to the artifact `comm/results.json` (see `hpcdist/trainers/comm/results.py`) and to the metrics
`comm/<operation>/…`. The step of a metric is the binary logarithm of the size, so that MLflow's step axis shows the
size.

Sizes and bandwidths are defined as in nccl-tests,
https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md.
"""

import logging
import os
import socket
from collections.abc import Iterator
from dataclasses import asdict
from itertools import chain

import torch
import torch.distributed as dist

from hpcdist.config.launch_schema import NVIDIA
from hpcdist.config.schema import Config
from hpcdist.errors import CommError
from hpcdist.host.files import write_atomic
from hpcdist.host.network import bandwidths
from hpcdist.rank.collective_check import Stopwatch, measure
from hpcdist.rank.context import Context
from hpcdist.rank.device import Device
from hpcdist.trainers.comm import COMM_OPERATIONS, CommConfig, parse_bytes
from hpcdist.trainers.comm.operations import DTYPES, OPERATIONS, Operation, OperationKind, check
from hpcdist.trainers.comm.results import ARTIFACT, RankPlace, Results, Row, as_text

log = logging.getLogger(__name__)
#: Data types that are measured: of operations that only move data, and of reductions.
BYTES, NUMBERS = "uint8", "float32"
#: Larger messages of an operation are skipped once one iteration would take longer than this.
MAX_ITERATION_S = 1.0


def train(ctx: Context, cfg: Config) -> None:
    """Check all operations, then measure them; times are those of the slowest rank.

    A step is the check of one operation, or one size of one operation. There are no checkpoints: a stopped benchmark
    starts again.
    """
    bench = Bench(ctx, cfg)
    for step, _ in enumerate(chain(bench.check(), bench.measure()), 1):
        if ctx.should_stop(step):
            bench.write()
            return
    bench.results.complete = True
    bench.write()
    if ctx.is_main:
        write_atomic(ctx.report.artifact(ARTIFACT).with_name("report.txt"), as_text(bench.results))
    ctx.end_reason = summary(bench.results)


class Bench:
    """The benchmark in one rank. The results are equal on every rank, and so are the points at which it yields."""

    def __init__(self, ctx: Context, cfg: Config) -> None:
        self.ctx, self.comm = ctx, cfg.section(CommConfig)
        node = ctx.topology.hosts[ctx.topology.node_rank] if ctx.topology.hosts else socket.gethostname()
        device = "cpu" if ctx.device.type == "cpu" else Device.of(ctx.device, "").name
        everyone = ctx.groups.all_gather((node, device))
        self.nodes = [one[0] for one in everyone]
        backend = dist.get_backend()
        self.device = torch.device("cpu") if backend == "gloo" else ctx.device
        self.watch = Stopwatch(self.device, backend)
        self.operations = [OPERATIONS[name] for name in COMM_OPERATIONS if name in self.comm.operations]
        self.results = Results(
            backend=backend,
            device=self.device.type,
            world_size=ctx.world_size,
            torch=torch.__version__,
            nccl=".".join(map(str, torch.cuda.nccl.version())) if ctx.device.type == NVIDIA else None,
            partition=os.environ.get("SLURM_JOB_PARTITION"),
            nodes=list(dict.fromkeys(self.nodes)),
            ranks=[RankPlace(rank=rank, node=one[0], device=one[1]) for rank, one in enumerate(everyone)],
        )

    def write(self) -> None:
        if self.ctx.is_main:
            write_atomic(self.ctx.report.artifact(ARTIFACT), self.results.to_json())

    def check(self) -> Iterator[None]:
        """Check the operations. Raises CommError if a result is wrong."""
        for kind in self.operations:
            for dtype in (BYTES,) if kind.name == "barrier" else DTYPES:
                node = self.nodes[self.ctx.rank]
                found = check(kind, dtype, self.device, self.ctx.groups, node=node)
                self.results.checked.append(found)
                if found.ok is False:
                    self.write()
                    raise CommError(found.error)
                if found.ok is None:
                    log.info("skipped: %s", found.error)
            yield

    def _is_supported(self, kind: OperationKind) -> bool:
        measured = (kind.name, NUMBERS if kind.reduces else BYTES)
        return not any(one.ok is None and (one.operation, one.dtype) == measured for one in self.results.checked)

    def measure(self) -> Iterator[None]:
        for kind in self.operations:
            if self._is_supported(kind):
                yield from self._measure(kind)
                self.write()

    def _measure(self, kind: OperationKind) -> Iterator[None]:
        """Measure an operation at all sizes."""
        dtype, num_ranks = DTYPES[NUMBERS if kind.reduces else BYTES], self.ctx.world_size
        rows: list[Row] = []
        for nominal in sizes(parse_bytes(self.comm.max_bytes), dtype) if kind.name != "barrier" else [0]:
            count = elements(nominal, dtype, num_ranks if kind.has_parts else 1)
            size = count * dtype.itemsize if nominal else 0
            if rows and rows[-1].bytes == size:  # rounded up to the previous size
                continue
            if rows and rows[-1].bytes < nominal:
                call_s = rows[-1].median_s * kind.hops(num_ranks)
                if call_s * nominal / rows[-1].bytes > MAX_ITERATION_S:
                    took = f"stopped at {rows[-1].size} B, which takes {call_s:.2g} s"
                    self.results.notes.append(f"{kind.name}: {took}")
                    break
            timing = measure(
                Operation(kind, count, dtype, self.device).run,
                self.watch,
                self.ctx.groups,
                budget_s=0.02,
                longest_s=MAX_ITERATION_S,
                after_barrier=kind.is_one_way,
                divided_by=kind.hops(num_ranks),
            )
            algbw, busbw = bandwidths(kind.name, size, timing.median_s, num_ranks) if size else (None, None)
            row = Row(operation=kind.name, size=nominal, bytes=size, **asdict(timing), algbw=algbw, busbw=busbw)
            rows.append(row)
            self.results.rows.append(row)
            metrics = {f"comm/{kind.name}/median_us": 1e6 * timing.median_s}
            if busbw is not None:
                metrics[f"comm/{kind.name}/busbw_gb_per_s"] = busbw / 1e9
            self.ctx.log(metrics, max(nominal, 1).bit_length() - 1)
            yield
        if not rows:  # `comm.max_bytes` is less than one element
            return
        first, last = rows[0], rows[-1]
        bandwidth = f", {last.busbw / 1e9:.2f} GB/s (bus) at {last.size} B" if last.busbw is not None else ""
        log.info("%s: %.0f us at %d B%s", kind.name, 1e6 * first.median_s, first.size, bandwidth)


def sizes(max_bytes: int, dtype: torch.dtype) -> list[int]:
    """Return the powers of two from one element up."""
    return [1 << power for power in range(max_bytes.bit_length()) if 1 << power >= dtype.itemsize]


def elements(size: int, dtype: torch.dtype, num_parts: int) -> int:
    """Return the number of elements of a size in bytes, rounded up to equal parts."""
    return -(-max(1, size // dtype.itemsize) // num_parts) * num_parts


def summary(results: Results) -> str:
    num_passed = sum(one.ok is True for one in results.checked)
    text = f"{num_passed} checks passed; {len(results.rows)} points measured"
    rates = [(row.size, row.busbw) for row in results.rows if row.operation == "all_reduce" and row.busbw is not None]
    if rates:
        size, busbw = rates[-1]  # sizes increase
        text += f"; all_reduce of {size >> 20 or size} {'MiB' if size >> 20 else 'B'}: {busbw / 1e9:.2f} GB/s"
    return text
