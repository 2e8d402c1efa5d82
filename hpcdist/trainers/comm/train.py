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
#: Seconds for the iterations of one point. A benchmark has hundreds of points.
POINT_BUDGET_S = 0.02


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
        self.ctx = ctx
        self.comm = cfg.section(CommConfig)
        node_and_device = (_node_name(ctx), _device_name(ctx.device))
        places = []
        for rank, (node, device) in enumerate(ctx.groups.all_gather(node_and_device)):
            places.append(RankPlace(rank=rank, node=node, device=device))
        self.nodes = [place.node for place in places]
        backend = dist.get_backend()
        self.device = ctx.device
        if backend == "gloo":
            self.device = torch.device("cpu")
        self.watch = Stopwatch(self.device, backend)
        self.operations = [OPERATIONS[name] for name in COMM_OPERATIONS if name in self.comm.operations]
        nccl = None
        if ctx.device.type == NVIDIA:
            nccl = ".".join(map(str, torch.cuda.nccl.version()))
        self.results = Results(
            backend=backend,
            device=self.device.type,
            world_size=ctx.world_size,
            torch=torch.__version__,
            nccl=nccl,
            partition=os.environ.get("SLURM_JOB_PARTITION"),
            nodes=list(dict.fromkeys(self.nodes)),
            ranks=places,
        )

    def write(self) -> None:
        """Write the results so far, on rank 0."""
        if self.ctx.is_main:
            write_atomic(self.ctx.report.artifact(ARTIFACT), self.results.to_json())

    def check(self) -> Iterator[None]:
        """Check the operations. Raises CommError if a result is wrong."""
        node = self.nodes[self.ctx.rank]
        for kind in self.operations:
            dtypes = list(DTYPES)
            if kind.name == "barrier":  # which has no data
                dtypes = [BYTES]
            for dtype in dtypes:
                result = check(kind, dtype, self.device, self.ctx.groups, node=node)
                self.results.checked.append(result)
                if result.ok is False:
                    self.write()
                    raise CommError(result.error)
                if result.ok is None:
                    log.info("skipped: %s", result.error)
            yield

    def _is_supported(self, kind: OperationKind) -> bool:
        """Return whether the check of the dtype that is measured was not skipped."""
        measured = (kind.name, _measured_dtype(kind))
        return all(
            result.ok is not None for result in self.results.checked if (result.operation, result.dtype) == measured
        )

    def measure(self) -> Iterator[None]:
        """Measure the operations that the backend supports."""
        for kind in self.operations:
            if self._is_supported(kind):
                yield from self._measure(kind)
                self.write()

    def _measure(self, kind: OperationKind) -> Iterator[None]:
        """Measure an operation at all sizes."""
        dtype = DTYPES[_measured_dtype(kind)]
        num_parts = 1
        if kind.has_parts:
            num_parts = self.ctx.world_size
        nominal_sizes = sizes(parse_bytes(self.comm.max_bytes), dtype)
        if kind.name == "barrier":
            nominal_sizes = [0]
        rows: list[Row] = []
        for nominal in nominal_sizes:
            count = elements(nominal, dtype, num_parts)
            num_bytes = 0
            if nominal > 0:
                num_bytes = count * dtype.itemsize
            if rows and rows[-1].bytes == num_bytes:  # rounded up to the previous size
                continue
            if rows:
                reason = self._reason_to_stop(kind, nominal, rows[-1])
                if reason:
                    self.results.notes.append(f"{kind.name}: {reason}")
                    break
            row = self._measure_size(kind, count, dtype, nominal=nominal, num_bytes=num_bytes)
            rows.append(row)
            self.results.rows.append(row)
            self._log_metrics(row)
            yield
        if rows:  # none if `comm.max_bytes` is less than one element
            _log_summary(rows[0], rows[-1])

    def _reason_to_stop(self, kind: OperationKind, nominal: int, last: Row) -> str:
        """Return a note if a call of this size would take too long, judged by the last size; else an empty string."""
        # The times of a row are those of one hop.
        last_call_s = last.median_s * kind.hops(self.ctx.world_size)
        call_s = last_call_s * nominal / last.bytes
        if call_s <= MAX_ITERATION_S:
            return ""
        return f"stopped at {last.size} B, which takes {last_call_s:.2g} s"

    def _measure_size(
        self, kind: OperationKind, count: int, dtype: torch.dtype, *, nominal: int, num_bytes: int
    ) -> Row:
        """Measure an operation with `count` elements of together `num_bytes`: the nominal size, rounded up to parts."""
        num_ranks = self.ctx.world_size
        operation = Operation(kind, count, dtype, self.device)
        timing = measure(
            operation.run,
            self.watch,
            self.ctx.groups,
            budget_s=POINT_BUDGET_S,
            longest_s=MAX_ITERATION_S,
            after_barrier=kind.is_one_way,
            divided_by=kind.hops(num_ranks),
        )
        algbw, busbw = None, None
        if num_bytes > 0:
            algbw, busbw = bandwidths(kind.name, num_bytes, timing.median_s, num_ranks)
        return Row(operation=kind.name, size=nominal, bytes=num_bytes, **asdict(timing), algbw=algbw, busbw=busbw)

    def _log_metrics(self, row: Row) -> None:
        metrics = {f"comm/{row.operation}/median_us": 1e6 * row.median_s}
        if row.busbw is not None:
            metrics[f"comm/{row.operation}/busbw_gb_per_s"] = row.busbw / 1e9
        binary_logarithm = max(row.size, 1).bit_length() - 1
        self.ctx.log(metrics, binary_logarithm)


def _node_name(ctx: Context) -> str:
    if ctx.topology.hosts:
        return ctx.topology.hosts[ctx.topology.node_rank]
    return socket.gethostname()


def _device_name(device: torch.device) -> str:
    if device.type == "cpu":
        return "cpu"
    return Device.of(device, "").name


def _measured_dtype(kind: OperationKind) -> str:
    """Return the name of the data type with which an operation is measured."""
    if kind.reduces:
        return NUMBERS
    return BYTES


def _log_summary(first: Row, last: Row) -> None:
    """Log the time at the smallest size and the bandwidth at the largest one."""
    bandwidth = ""
    if last.busbw is not None:
        bandwidth = f", {last.busbw / 1e9:.2f} GB/s (bus) at {last.size} B"
    log.info("%s: %.0f us at %d B%s", first.operation, 1e6 * first.median_s, first.size, bandwidth)


def sizes(max_bytes: int, dtype: torch.dtype) -> list[int]:
    """Return the powers of two from one element up."""
    return [1 << power for power in range(max_bytes.bit_length()) if 1 << power >= dtype.itemsize]


def elements(size: int, dtype: torch.dtype, num_parts: int) -> int:
    """Return the number of elements of a size in bytes, rounded up to equal parts."""
    count = max(1, size // dtype.itemsize)
    part = -(-count // num_parts)  # rounded up
    return part * num_parts


def summary(results: Results) -> str:
    """Return one line with the number of checks and points, and the bandwidth of the largest all_reduce."""
    num_passed = sum(result.ok is True for result in results.checked)
    text = f"{num_passed} checks passed; {len(results.rows)} points measured"
    rates = [(row.size, row.busbw) for row in results.rows if row.operation == "all_reduce" and row.busbw is not None]
    if rates:
        size, busbw = rates[-1]  # sizes increase
        size_mib = size >> 20
        size_text = f"{size} B"
        if size_mib > 0:
            size_text = f"{size_mib} MiB"
        text += f"; all_reduce of {size_text}: {busbw / 1e9:.2f} GB/s"
    return text
