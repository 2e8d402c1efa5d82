"""The trainer `comm`, a communication benchmark: check every operation on every rank, then measure it.

The results are written to the artifact `comm/results.json` (see `hpcdist/trainers/comm/results.py`) and to the metrics
`comm/<operation>/…`. The step of a metric is the binary logarithm of the size, so that MLflow's step axis shows the
size. A step of the run is one point of the measurement plan; a stopped benchmark resumes with the next point.

Sizes and bandwidths are defined as in nccl-tests,
https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md.
"""

from __future__ import annotations

import hashlib
import logging
import os
import socket
from dataclasses import asdict
from datetime import timedelta

import torch
import torch.distributed as dist

from hpcdist.config.schema import Config
from hpcdist.errors import CommError
from hpcdist.host.files import write_atomic
from hpcdist.host.network import bandwidths
from hpcdist.rank.collective_check import Stopwatch, measure
from hpcdist.rank.context import Context
from hpcdist.trainers.comm import MAX_ITERATION_S, MEASURE_S, CommConfig
from hpcdist.trainers.comm.measurement_plan import (
    BYTES,
    CorrectnessCheck,
    Measurement,
    PairRound,
    Point,
    check,
    elements,
    measure_round,
    points,
)
from hpcdist.trainers.comm.operations import DTYPES, OPERATIONS, WORLD, make_teams
from hpcdist.trainers.comm.report import as_text
from hpcdist.trainers.comm.results import ARTIFACT, RankPlace, Results, Row, bottleneck

log = logging.getLogger(__name__)


def train(ctx: Context, cfg: Config) -> None:
    """Execute all points of the measurement plan; times are those of the slowest rank."""
    bench = Bench(ctx, cfg)
    for point in bench.points[bench.done :]:
        bench.do(point)
        bench.done += 1
        step = bench.first_step + bench.done
        stop = ctx.should_stop(step, bench.first_step + len(bench.points))
        if ctx.should_save(step):
            bench.save(step)
        if stop:
            return
    bench.results.complete = True
    bench.write()
    if ctx.is_main:
        for sentence in bottleneck(bench.results):
            log.info("bottleneck: %s", sentence)
        write_atomic(ctx.artifact(ARTIFACT).with_name("report.txt"), as_text(bench.results))
    ctx.end_reason = summary(bench.results)


class Bench:
    """The benchmark in one rank. The results are equal on every rank."""

    def __init__(self, ctx: Context, cfg: Config) -> None:
        self.ctx, self.comm = ctx, cfg.section(CommConfig)
        self.is_warm = False  #: whether this process has measured a pair
        timeout = timedelta(seconds=cfg.launch.hang_s + 60)
        node = ctx.topology.hosts[ctx.topology.node_rank] if ctx.topology.hosts else socket.gethostname()
        is_gpu = ctx.device.type == "cuda"
        device = torch.cuda.get_device_name(ctx.device) if is_gpu else "cpu"
        everyone = ctx.groups.all_gather((node, device))
        nodes = [one[0] for one in everyone]
        backend = dist.get_backend()
        where = ctx.device if backend == "nccl" else torch.device("cpu")
        self.teams = make_teams(nodes, where, timeout, with_groups="groups" in self.comm.operations)
        self.watch = Stopwatch(where, backend)
        self.points = points(self.comm, nodes)
        self.done = 0
        #: Step of the first point; not 0 if the benchmark had to start again.
        self.first_step = 0
        self.results = Results(
            backend=backend,
            device=where.type,
            world_size=ctx.world_size,
            torch=torch.__version__,
            nccl=".".join(map(str, torch.cuda.nccl.version())) if is_gpu else None,
            partition=os.environ.get("SLURM_JOB_PARTITION"),
            nodes=list(dict.fromkeys(nodes)),
            ranks=[RankPlace(rank=rank, node=one[0], device=one[1]) for rank, one in enumerate(everyone)],
        )
        self._resume()

    # --- save and resume

    def save(self, step: int) -> None:
        """Save the results so far and the plan, from which a restart continues."""
        self.write()
        state = {"results": self.results.to_json(), "done": self.done, "plan": self._plan_digest()}
        self.ctx.save(step, model=None, trainer=state)

    def _resume(self) -> None:
        """Continue after the last saved point, or start again if the plan or the ranks have changed."""
        if (saved := self.ctx.restore()) is None:
            return
        if saved.trainer["plan"] != self._plan_digest():
            log.warning("the number of ranks or the config has changed since the stop: the benchmark starts again")
            self.first_step = saved.step
            return
        before = Results.from_json(saved.trainer["results"])
        if before.nodes != self.results.nodes:
            nodes = ", ".join(before.nodes)
            before.notes.append(
                f"the first {saved.trainer['done']} of {len(self.points)} points were measured on {nodes}"
            )
        self.done, self.first_step = saved.trainer["done"], saved.step - saved.trainer["done"]
        for key in ("checked", "rows", "pairs", "notes"):
            setattr(self.results, key, getattr(before, key))

    def _plan_digest(self) -> str:
        return hashlib.sha256(f"{self.ctx.world_size} {self.points}".encode()).hexdigest()

    def write(self) -> None:
        """Write the results so far."""
        if self.ctx.is_main:
            write_atomic(self.ctx.artifact(ARTIFACT), self.results.to_json())

    # --- points

    def do(self, point: Point) -> None:
        """Execute one point. Raises CommError if a result is wrong."""
        if isinstance(point, CorrectnessCheck):
            self._check(point)
        elif isinstance(point, Measurement):
            self._measure(point)
        else:
            self._measure_pairs(point)

    def _check(self, point: CorrectnessCheck) -> None:
        for dtype in point.dtypes:
            node = self.results.ranks[self.ctx.rank].node
            team = self.teams[point.team]
            kind = OPERATIONS[point.operation]
            found = check(kind, point.reduction, team, dtype, self.ctx.groups, node=node)
            self.results.checked.append(found)
            if found.ok is False:
                self.write()
                raise CommError(found.error)
            if found.ok is None:
                log.info("skipped: %s", found.error)

    def _is_supported(self, operation: str, team: str, dtype: str) -> bool:
        kind = OPERATIONS[operation]
        title = kind.title("sum" if kind.reduces else None)
        return not any(
            one.ok is None and (one.operation, one.group, one.dtype) == (title, team, dtype)
            for one in self.results.checked
        )

    def _measure(self, point: Measurement) -> None:
        team, kind = self.teams[point.team], OPERATIONS[point.operation]
        key = (point.operation, point.team, point.dtype if point.size else "")
        rows = [row for row in self.results.rows if (row.operation, row.group, row.dtype) == key]
        count = elements(point.size, point.dtype, team.largest if kind.has_parts else 1)
        size = count * DTYPES[point.dtype].itemsize if point.size else 0
        is_new = not rows or rows[-1].bytes != size  # a small size may be rounded up to the previous one
        if (
            is_new
            and self._is_supported(point.operation, point.team, point.dtype)
            and not self._stops_before(point, rows)
        ):
            rows.append(self._measure_size(point, size))
        if point.is_last and rows:
            latency = f"{1e6 * rows[0].median_s:.0f} us at {rows[0].size} B"
            busbw = rows[-1].busbw
            rate = f", {busbw / 1e9:.2f} GB/s (bus) at {rows[-1].size} B" if busbw is not None else ""
            log.info("%s: %s%s", _title(point), latency, rate)
            self.write()

    def _measure_size(self, point: Measurement, size: int) -> Row:
        team, kind = self.teams[point.team], OPERATIONS[point.operation]
        mine = elements(point.size, point.dtype, team.size if kind.has_parts else 1)
        is_alone = team.size == 1 and team.name != WORLD  # its group has no communication
        timing = measure(
            (lambda: None) if is_alone else kind(team, mine, DTYPES[point.dtype]).run,
            self.watch,
            self.ctx.groups,
            budget_s=MEASURE_S,
            longest_s=MAX_ITERATION_S,
            after_barrier=kind.is_one_way,
            divided_by=kind.hops(team.largest),
        )
        algbw, busbw = bandwidths(kind.name, size, timing.median_s, team.largest) if size else (None, None)
        row = Row(
            operation=kind.name,
            group=team.name,
            group_size=team.largest,
            dtype=point.dtype if size else "",
            size=point.size,
            bytes=size,
            **asdict(timing),
            algbw=algbw,
            busbw=busbw,
        )
        self.results.rows.append(row)
        names = [
            row.operation,
            row.dtype * (len(self.comm.dtypes) > 1),
            row.group.replace(" ", "_") * (row.group != WORLD),
        ]
        key = f"comm/{'_'.join(filter(None, names))}"
        metrics = {f"{key}/median_us": 1e6 * row.median_s}
        if busbw is not None:
            metrics[f"{key}/busbw_gb_per_s"] = busbw / 1e9
        self.ctx.log(metrics, max(row.size, 1).bit_length() - 1)
        return row

    def _stops_before(self, point: Measurement, rows: list[Row]) -> bool:
        """Return whether this size would take too long, estimated from the previous size."""
        if not rows:
            return False
        last = rows[-1]
        call_s = last.median_s * OPERATIONS[point.operation].hops(last.group_size)
        if last.bytes >= point.size or call_s * point.size / last.bytes <= MAX_ITERATION_S:
            return False
        note = f"{_title(point)}: stopped at {last.size} B, which takes {last.median_s:.2g} s"
        if note not in self.results.notes:
            self.results.notes.append(note)
        return True

    def _measure_pairs(self, point: PairRound) -> None:
        if not self._is_supported("send_recv", WORLD, BYTES):
            return
        if not self.is_warm:  # the first measurement of a process is always slower
            measure_round(point.links, self.teams[WORLD])
            self.is_warm = True
        mine = measure_round(point.links, self.teams[WORLD])
        self.results.pairs += filter(None, self.ctx.groups.all_gather(mine))
        if point.is_last:
            self.write()


def _title(point: Measurement) -> str:
    return ", ".join([point.operation, point.dtype, *([point.team] if point.team != WORLD else [])])


def summary(results: Results) -> str:
    """Return the number of checks and points and the rates at the largest size in one line."""
    num_passed = sum(one.ok is True for one in results.checked)
    text = f"{num_passed} checks passed; {len(results.rows)} points and {len(results.pairs)} pairs of ranks measured"
    largest = {  # sizes increase
        row.operation: row
        for row in results.rows
        if row.operation in ("all_reduce", "ring_all_reduce") and row.group == WORLD
    }
    rates = [
        f"{name} of {row.size >> 20 or row.size} {'MiB' if row.size >> 20 else 'B'}: {row.busbw / 1e9:.2f} GB/s"
        for name, row in largest.items()
        if row.busbw is not None
    ]
    return f"{text}; {', '.join(rates)}" if rates else text
