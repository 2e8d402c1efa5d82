"""The trainer `comm`, a communication benchmark: check every operation on every rank, then measure it.

The results are written to the artifact `comm/results.json` (see `hpcdist/bench/results.py`) and to the metrics
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
from pathlib import Path

import torch

from hpcdist.bench import MAX_ITERATION_S, MEASURE_S, CommConfig, measurement_plan, report
from hpcdist.bench.measurement_plan import (
    BYTES,
    DEPTH,
    CorrectnessCheck,
    Measurement,
    OverlapPoint,
    PairRound,
    Point,
    RpcPoint,
    Series,
    check,
    elements,
    measure_overlap,
    points,
)
from hpcdist.bench.operations import DTYPES, WORLD, choose_backend, make_teams, run_together
from hpcdist.bench.report import as_csv, as_text
from hpcdist.bench.results import ARTIFACT, RankPlace, Results, Row, bottleneck
from hpcdist.config.schema import Config
from hpcdist.errors import CommError
from hpcdist.host.files import write_atomic
from hpcdist.host.network import bandwidths
from hpcdist.rank.collective_check import Stopwatch, measure
from hpcdist.rank.context import Context

log = logging.getLogger(__name__)


def train(ctx: Context, cfg: Config) -> None:
    """Execute all points of the measurement plan; times are those of the slowest rank."""
    bench = Bench(ctx, cfg)
    while (index := bench.done) < len(bench.points):
        bench.do(bench.points[index])
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
        write_files(bench.results, ctx.artifact(ARTIFACT).parent)
    ctx.end_reason = summary(bench.results)


def write_files(results: Results, folder: Path) -> None:
    """Write the report, the measurements as CSV and the plots beside `results.json`, and log the bottleneck."""
    for sentence in bottleneck(results):
        log.info("bottleneck: %s", sentence)
    write_atomic(folder / "report.txt", as_text(results))
    write_atomic(folder / "results.csv", as_csv(results))
    try:
        report.draw(results, folder)
    except ImportError as error:
        log.warning("no plots: %s (install matplotlib with the extra `train`)", error)


class Bench:
    """The benchmark in one rank. The results are equal on every rank, except those of RPC, which only rank 0 has."""

    def __init__(self, ctx: Context, cfg: Config) -> None:
        self.ctx, self.cfg = ctx, cfg.section(CommConfig)
        self.is_warm = False  #: whether this process has measured a pair
        timeout = timedelta(seconds=cfg.launch.hang_s + 60)
        node = ctx.topology.hosts[ctx.topology.node_rank] if ctx.topology.hosts else socket.gethostname()
        is_gpu = ctx.device.type == "cuda"
        device = torch.cuda.get_device_name(ctx.device) if is_gpu else "cpu"
        everyone = ctx.groups.all_gather((node, device, ctx.device.index))
        nodes = [one[0] for one in everyone]
        self.gpus: list[int | None] = [one[2] for one in everyone]
        backend, where = choose_backend(self.cfg.backend, ctx.device)
        self.teams = make_teams(nodes, backend, where, timeout, with_groups="groups" in self.cfg.operations)
        self.watch = Stopwatch(where, backend)
        self.points = points(self.cfg, nodes)
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
        state = {"results": self.results.to_json(), "done": self.done, "plan": self._plan()}
        self.ctx.save(step, model=None, trainer=state)

    def _resume(self) -> None:
        """Continue after the last saved point, or start again if the plan or the ranks have changed."""
        if (saved := self.ctx.restore()) is None:
            return
        if saved.trainer["plan"] != self._plan():
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
        for key in ("checked", "rows", "pairs", "overlap", "rpc", "notes"):
            setattr(self.results, key, getattr(before, key))

    def _plan(self) -> str:
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
        elif isinstance(point, PairRound):
            self._measure_pairs(point)
        elif isinstance(point, OverlapPoint):
            self._measure_overlap(point)
        elif isinstance(point, RpcPoint):
            self.results.rpc += measurement_plan.measure_calls(self.ctx, self.results.ranks, self.gpus, cfg=self.cfg)
            self.write()

    def _check(self, point: CorrectnessCheck) -> None:
        for dtype in point.dtypes:
            node = self.results.ranks[self.ctx.rank].node
            team = self.teams[point.team]
            found = check(point.variant, team, dtype, self.ctx.groups, node=node)
            self.results.checked.append(found)
            if found.ok is False:
                self.write()
                raise CommError(found.error)
            if found.ok is None:
                log.info("skipped: %s", found.error)

    def _is_there(self, title: str, team: str, dtype: str) -> bool:
        return not any(
            one.ok is None and (one.operation, one.group, one.dtype) == (title, team, dtype)
            for one in self.results.checked
        )

    def _measure(self, point: Measurement) -> None:
        series, team = point.series, self.teams[point.series.team]
        kind, rows = series.variant.kind, self._rows_of(series)
        count = elements(point.size, series.dtype, team.largest if kind.has_parts else 1)
        size = count * DTYPES[series.dtype].itemsize if point.size else 0
        is_new = not rows or rows[-1].bytes != size  # a small size may be rounded up to the previous one
        is_there = self._is_there(series.variant.title, series.team, series.dtype)
        if is_new and is_there and not self._is_cut(series, point, rows):
            self._measure_size(point, size)
        if point.is_last:
            self._log_series(series)
            self.write()

    def _measure_size(self, point: Measurement, size: int) -> None:
        series, team = point.series, self.teams[point.series.team]
        kind, depth = series.variant.kind, DEPTH if series.mode == "async" else 1
        operations = []
        if team.size > 1 or team.name == WORLD:
            mine = elements(point.size, series.dtype, team.size if kind.has_parts else 1)
            operations = [series.variant.make(team, mine, DTYPES[series.dtype]) for _ in range(depth)]
        timing = measure(
            lambda: run_together(operations),
            self.watch,
            self.ctx.groups,
            budget_s=MEASURE_S,
            longest_s=MAX_ITERATION_S,
            after_barrier=kind.is_one_way,
            divided_by=depth * kind.hops(team.largest),
        )
        algbw, busbw = bandwidths(kind.name, size, timing.median_s, team.largest) if size else (None, None)
        row = Row(
            operation=kind.name,
            variant=series.variant.reduction or "",
            mode=series.mode,
            depth=depth,
            group=team.name,
            group_size=team.largest,
            dtype=series.dtype if size else "",
            size=point.size,
            bytes=size,
            **asdict(timing),
            algbw=algbw,
            busbw=busbw,
        )
        self.results.rows.append(row)
        self._log(series, row)

    def _rows_of(self, series: Series) -> list[Row]:
        key = (series.variant.kind.name, series.variant.reduction or "", series.mode, series.team)
        return [
            row
            for row in self.results.rows
            if (row.operation, row.variant, row.mode, row.group) == key and row.dtype in (series.dtype, "")
        ]

    def _is_cut(self, series: Series, point: Measurement, rows: list[Row]) -> bool:
        """Return whether this size would take too long, estimated from the previous size."""
        if not rows:
            return False
        last = rows[-1]
        calls_s = last.median_s * last.depth * series.variant.kind.hops(last.group_size)
        if last.bytes >= point.size or calls_s * point.size / last.bytes <= MAX_ITERATION_S:
            return False
        note = f"{series.title}: stopped at {last.size} B, which takes {last.median_s:.2g} s"
        if note not in self.results.notes:
            self.results.notes.append(note)
        return True

    def _log(self, series: Series, row: Row) -> None:
        names = [row.operation, row.variant * (row.variant != "sum"), row.mode * (row.mode == "async")]
        names += [row.dtype * (len(self.cfg.dtypes) > 1), row.group.replace(" ", "_") * (row.group != WORLD)]
        key = f"comm/{'_'.join(filter(None, names))}"
        metrics = {f"{key}/median_us": 1e6 * row.median_s}
        if row.busbw is not None:
            metrics[f"{key}/busbw_gb_per_s"] = row.busbw / 1e9
        self.ctx.log(metrics, max(row.size, 1).bit_length() - 1)

    def _log_series(self, series: Series) -> None:
        """Log one line for the series."""
        if not (rows := self._rows_of(series)):
            return
        latency = f"{1e6 * rows[0].median_s:.0f} us at {rows[0].size} B"
        rate = f", {rows[-1].busbw / 1e9:.2f} GB/s (bus) at {rows[-1].size} B" if rows[-1].busbw is not None else ""
        log.info("%s: %s%s", series.title, latency, rate)

    def _measure_pairs(self, point: PairRound) -> None:
        if not self._is_there("send_recv", WORLD, BYTES):
            return
        if not self.is_warm:  # the first measurement of a process is always slower
            measurement_plan.measure_round(point.links, self.teams[WORLD])
            self.is_warm = True
        mine = measurement_plan.measure_round(point.links, self.teams[WORLD])
        self.results.pairs += filter(None, self.ctx.groups.all_gather(mine))
        if point.is_last:
            self.write()

    def _measure_overlap(self, point: OverlapPoint) -> None:
        team, dtype = self.teams[WORLD], self.cfg.dtypes[0] if point.variant.kind.reduces else BYTES
        series = Series(variant=point.variant, mode="blocking", team=WORLD, dtype=dtype)
        if not any(row.size >= point.size for row in self._rows_of(series)):
            return  # not supported, or stopped at a smaller size
        count = elements(point.size, dtype, team.size if point.variant.kind.has_parts else 1)
        operation = point.variant.make(team, count, DTYPES[dtype])
        self.results.overlap.append(measure_overlap(operation, self.ctx.groups, longest_s=MAX_ITERATION_S))
        self.write()


def summary(results: Results) -> str:
    """Return the number of checks and points and the rates at the largest size in one line."""
    num_passed = sum(one.ok is True for one in results.checked)
    text = f"{num_passed} checks passed; {len(results.rows)} points and {len(results.pairs)} pairs of ranks measured"
    largest = {  # sizes increase
        row.operation: row
        for row in results.rows
        if row.operation in ("all_reduce", "ring_all_reduce")
        and (row.variant, row.mode, row.group, row.busbw is not None) == ("sum", "blocking", WORLD, True)
    }
    rates = [
        f"{name} of {row.size >> 20 or row.size} {'MiB' if row.size >> 20 else 'B'}: {row.busbw / 1e9:.2f} GB/s"
        for name, row in largest.items()
        if row.busbw is not None
    ]
    return f"{text}; {', '.join(rates)}" if rates else text
