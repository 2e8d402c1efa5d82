"""The budget of charts: in runs on many nodes, MLflow gets minimum, median and maximum over the nodes.

The metrics of a node, `system/<node>/…` and `time/<node>/…`, are divided into intervals of time. The value of a node in
an interval is the mean of its records. A complete interval becomes one point of `system/nodes_min/…`,
`…/nodes_median/…` and `…/nodes_max/…`, and rows of `node_metrics.csv.gz`, which holds all records. Stragglers
(`supervisor/stragglers.py`) also keep charts of their own.

`ShippingState` holds the last complete interval, and the offsets from which the records of open intervals are read
again by the next process. Records that arrive after their interval are in the table only.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from statistics import fmean, median
from typing import Any, NamedTuple

from hpcdist.config.schema import TrackingConfig
from hpcdist.run.folder import RunDir
from hpcdist.run.polling import system_interval_s
from hpcdist.tracking.journal.names import clean_metric_name
from hpcdist.tracking.journal.node_table import STEP_TIMES, NodeTable, Row
from hpcdist.tracking.journal.reader import Chunk, Record, read_chunk, read_range
from hpcdist.tracking.journal.shipping_state import ShippingState

#: Minimum length of an interval.
INTERVAL_S = 30.0
#: A node that has logged nothing for this time does not delay the intervals of the others.
SILENT_S = 120.0


class NodeMetric(NamedTuple):
    """The parts of a metric's name: `system/n7/cpu_utilization_percentage`."""

    group: str
    node: str
    name: str


@functools.lru_cache(maxsize=100_000)
def node_metric(key: str) -> NodeMetric | None:
    """Return the parts of the name of a node's metric; None for other metrics."""
    parts = key.split("/")
    if len(parts) != 3 or not all(parts):
        return None
    if parts[0] == "system" or (parts[0] == "time" and parts[2] in STEP_TIMES):
        return NodeMetric(*parts)
    return None


def attempt_of(file_name: str) -> int:
    """Return the attempt of a journal file."""
    return int(file_name.split(".")[0].removeprefix("attempt-"))


class NodeCharts:
    """Replaces the metrics of nodes by those over all nodes, in attempts of runs on more nodes than have charts.

    Args:
        config: Config of the run. `tracking.charted_nodes` and `cluster.nodes` count when an attempt starts.
    """

    def __init__(self, run: RunDir, progress: ShippingState, config: Mapping[str, Any]) -> None:
        self._run = run
        self._progress = progress
        tracking, nodes = config.get("tracking") or {}, int((config.get("cluster") or {}).get("nodes", 1))
        self._max_nodes = int(tracking.get("charted_nodes", TrackingConfig.charted_nodes))
        self._is_reduced = nodes > self._max_nodes
        interval_s = max(INTERVAL_S, 2 * system_interval_s(float(tracking.get("system_interval_s", 0)), nodes))
        self._interval_ms = int(1000 * interval_s)
        self._table = NodeTable(run.node_metrics, progress)
        #: Attempt → interval → its records.
        self._open: dict[int, dict[int, list[Row]]] = defaultdict(lambda: defaultdict(list))
        #: File → interval → offset of the first chunk with records of it.
        self._starts: dict[str, dict[int, int]] = defaultdict(dict)
        for name, offset in progress.floors.items():
            self._read_again(name, offset)

    def _read_again(self, name: str, offset: int) -> None:
        """Read the records of open intervals from their offset."""
        end = self._progress.offsets.get(name, 0)
        attempt = attempt_of(name)
        while offset < end:
            chunk = read_chunk(self._run.journal / name, offset)
            if chunk.offset > end:
                chunk = read_range(self._run.journal / name, offset, end)
            if chunk.offset == offset:
                break
            for record in chunk.records:
                self._keep(attempt, name, offset, _rows(record))
            offset = chunk.offset

    def plan(self, chunks: Mapping[str, Chunk], times: Mapping[str, int], behind: set[str], *, over: bool) -> None:
        """Decide which intervals are complete after `chunks`; part of the intent, which a next process repeats.

        Args:
            times: File → time of its last record.
            behind: Files of the attempt that may hold more records than `chunks`.
            over: Whether the run has ended.
        """
        if not chunks:
            if over:
                self._close_before(None)
            return
        attempt = attempt_of(next(iter(chunks)))
        reduced = {"interval_ms": self._interval_ms, "closed": 0} if self._is_reduced else {}
        state = self._progress.nodes.setdefault(str(attempt), reduced)
        self._close_before(attempt)
        if not state:
            return
        self._find_stragglers(attempt)
        closed_ms = (state["closed"] + 1) * state["interval_ms"]
        known = {name for name in (*self._progress.floors, *chunks) if attempt_of(name) == attempt}
        read_until = {name: times.get(name, closed_ms) for name in known | behind}
        newest = max(read_until.values())
        complete = min(t for name, t in read_until.items() if name in behind or t > newest - 1000 * SILENT_S)
        if (until := complete // state["interval_ms"] - 1) > state["closed"]:
            self._progress.closing[str(attempt)] = until

    def _close_before(self, attempt: int | None) -> None:
        """Close all intervals of earlier attempts; of all attempts if there is no `attempt`."""
        for other, intervals in self._open.items():
            if intervals and (attempt is None or other < attempt):
                self._progress.closing[str(other)] = max(intervals)

    def _find_stragglers(self, attempt: int) -> None:
        for event in self._run.attempt(attempt).straggler_events():
            host, apart = event.get("host"), self._progress.apart
            if (
                event["event"] == "slow"
                and isinstance(host, str)
                and host not in apart
                and len(apart) < self._max_nodes
            ):
                apart.append(host)

    def reduced(self, chunks: Mapping[str, Chunk]) -> Iterator[tuple[int, Record]]:
        """Yield the attempts and records to send instead of those of `chunks`, and write the table.

        The intervals that `plan` has chosen end with these chunks.
        """
        rows: list[Row] = []
        for name, chunk in chunks.items():
            attempt = attempt_of(name)
            is_reduced = self._progress.nodes.get(str(attempt))
            begin = self._progress.offsets.get(name, 0)
            for record in chunk.records:
                if is_reduced and (own := _rows(record)):
                    rows += self._keep(attempt, name, begin, own)
                    record = self._without_nodes(record)
                if record.metrics:
                    yield attempt, record
        for text, until in self._progress.closing.items():
            attempt = int(text)
            self._progress.nodes[text]["closed"] = max(until, self._progress.nodes[text]["closed"])
            intervals = self._open[attempt]
            for interval in sorted(number for number in intervals if number <= until):
                closed = intervals.pop(interval)
                rows += closed
                yield from ((attempt, record) for record in self._over_nodes(attempt, closed))
        self._set_floors(chunks)
        self._table.append(rows)

    def _without_nodes(self, record: Record) -> Record:
        """Return a record without metrics of nodes, except stragglers."""
        apart = self._progress.apart
        kept = {
            key: value
            for key, value in record.metrics.items()
            if (metric := node_metric(key)) is None or metric.node in apart
        }
        return record._replace(metrics=kept)

    def _keep(self, attempt: int, name: str, begin: int, rows: Iterable[Row]) -> list[Row]:
        """Add records to open intervals. Returns those of complete intervals, which count no more."""
        state = self._progress.nodes[str(attempt)]
        late = []
        for row in rows:
            row = row._replace(attempt=attempt)
            interval = row.time_ms // state["interval_ms"]
            self._progress.floors.setdefault(name, begin)
            if interval <= state["closed"]:
                late.append(row)
                continue
            self._open[attempt][interval].append(row)
            self._starts[name].setdefault(interval, begin)
        return late

    def _set_floors(self, chunks: Mapping[str, Chunk]) -> None:
        """Record from where a next process must read each file."""
        ends = self._progress.offsets | {name: chunk.offset for name, chunk in chunks.items()}
        for name in self._progress.floors:
            state, starts = self._progress.nodes[str(attempt_of(name))], self._starts[name]
            for interval in [number for number in starts if number <= state["closed"]]:
                del starts[interval]
            self._progress.floors[name] = min(starts.values(), default=ends.get(name, 0))

    def _over_nodes(self, attempt: int, rows: Iterable[Row]) -> Iterator[Record]:
        """Yield minimum, median and maximum over the nodes in one interval, a record for each metric."""
        values: dict[tuple[str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        steps: dict[str, int] = {}
        time_ms = 0
        for row in rows:
            time_ms = max(time_ms, row.time_ms)
            steps[row.group] = max(row.step, steps.get(row.group, row.step))
            for name, value in row.metrics.items():
                if value == value:
                    values[row.group, name][row.node].append(value)
        for (group, name), by_node in sorted(values.items()):
            means = [fmean(found) for found in by_node.values()]
            metrics = {
                f"{group}/nodes_{kind}/{name}": function(means)
                for kind, function in (("min", min), ("median", median), ("max", max))
            }
            yield Record(time_ms, self._next_step(attempt, next(iter(metrics)), steps[group]), metrics)

    def _next_step(self, attempt: int, key: str, step: int) -> int:
        """Return a step above those of earlier intervals: nodes may log the same step in two intervals."""
        sent = self._progress.steps.get(clean_metric_name(key), {}).get(str(attempt))
        return step if sent is None else max(step, sent[1] + 1)


def _rows(record: Record) -> list[Row]:
    """Return the metrics of nodes in a record."""
    rows: dict[tuple[str, str], Row] = {}
    for key, value in record.metrics.items():
        if (metric := node_metric(key)) is not None:
            empty = Row(0, metric.node, metric.group, record.time_ms, record.step, {})
            rows.setdefault((metric.group, metric.node), empty).metrics[metric.name] = value
    return list(rows.values())
