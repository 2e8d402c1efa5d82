"""The charts of a run on several nodes: MLflow gets statistics over the nodes, not a chart of each node.

The metrics of nodes, `system/<node>/…` and `time/<node>/…`, are divided into intervals of time. A complete interval
becomes one point of each statistic, over all records in it: `time/nodes_min/…`, `…/nodes_mean/…` and `…/nodes_max/…`,
and one of each system metric, so that several nodes have as few of these charts as one. Records that arrive after their
interval was sent are only in the journal.
"""

import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from hpcdist.run.mlflow_limits import clean_name
from hpcdist.tracking import journal
from hpcdist.tracking.system_charts import charted

INTERVAL_MS = 30_000
#: A node that has logged nothing for this time does not delay the intervals of the others.
SILENT_MS = 120_000
_STEP_TIMES = ("step_s", "data_s", "compute_s")
#: System metrics of which the highest value counts, since a full memory or disk ends a run, whichever node it is; of
#: the others the mean.
_FULLEST = ("system_memory_usage_percentage", "disk_usage_percentage", "gpu_memory_usage_percentage")


@functools.lru_cache(maxsize=100_000)
def without_node(key: str) -> str | None:
    """Return the name of a node's metric without the node: `system/cpu` for `system/n7/cpu`; None for others."""
    match key.split("/"):
        case [group, node, name] if group and node and name:
            if group == "system" or (group == "time" and name in _STEP_TIMES):
                return f"{group}/{name}"
    return None


class NodeCharts:
    """Replaces the metrics of nodes by their statistics.

    Args:
        intervals: Attempt → number of its last interval that was sent, `sent`, and `open`: interval → metric →
            minimum, sum, count, maximum, time in ms, step.
        sent_steps: Metric → attempt → lowest and highest step in MLflow.
    """

    def __init__(self, intervals: dict[str, dict[str, Any]], sent_steps: Mapping[str, Mapping[str, list[int]]]) -> None:
        self._intervals = intervals
        self._sent_steps = sent_steps

    def complete(
        self, chunks: Mapping[str, journal.Chunk], times: Mapping[str, int], behind: set[str], *, over: bool
    ) -> dict[str, int]:
        """Return by attempt the last interval that is complete after `chunks`.

        Args:
            times: file → time in ms of its last record.
            behind: files that may hold more records.
            over: whether all attempts have ended.
        """
        attempt = journal.attempt_of(next(iter(chunks))) if chunks else None
        complete = {}
        for other, state in self._intervals.items():
            has_ended = over if attempt is None else int(other) < attempt
            if state["open"] and has_ended:
                complete[other] = max(map(int, state["open"]))
        read_until = {name: times.get(name, 0) for name in {*times, *behind} if journal.attempt_of(name) == attempt}
        if attempt is not None and read_until:
            active = max(read_until.values()) - SILENT_MS
            until = min(time for name, time in read_until.items() if name in behind or time > active)
            complete[str(attempt)] = until // INTERVAL_MS - 1
        return complete

    def reduce(
        self, chunks: Mapping[str, journal.Chunk], complete: Mapping[str, int]
    ) -> Iterator[tuple[int, journal.Record]]:
        """Yield the attempts and records to send instead of those of `chunks`, after which intervals are complete."""
        # In a fixed order, so that a batch that is sent again has sums with equal roundings.
        for name, chunk in sorted(chunks.items()):
            attempt = journal.attempt_of(name)
            for record in chunk.records:
                others = {}
                for key, value in charted(record.metrics).items():
                    metric = without_node(key)
                    if metric is None:
                        others[key] = value
                    else:
                        self._count(attempt, metric, value, record)
                if others:
                    yield attempt, record._replace(metrics=others)
        for attempt_text, until in complete.items():
            state = self._intervals.get(attempt_text)
            if state is None:
                continue
            state["sent"] = max(state["sent"], until)
            intervals = sorted(int(number) for number in state["open"] if int(number) <= until)
            for interval in intervals:
                statistics = state["open"].pop(str(interval))
                for metric, values in sorted(statistics.items()):
                    yield int(attempt_text), self._record(attempt_text, metric, values)

    def _record(self, attempt: str, metric: str, values: list[Any]) -> journal.Record:
        """Return the record of a metric of the nodes in one interval."""
        low, total, count, high, time_ms, step = values
        group, _, name = metric.partition("/")
        statistics = {"min": low, "mean": total / count, "max": high}
        kinds: Iterable[str] = statistics
        if group == "system":
            kinds = ("max",) if name in _FULLEST else ("mean",)
        metrics = {f"{group}/nodes_{kind}/{name}": statistics[kind] for kind in kinds}
        # A long step may be the newest one in two intervals.
        first = clean_name(next(iter(metrics)))
        steps_sent = self._sent_steps.get(first, {}).get(attempt)
        if steps_sent is not None:
            step = max(step, steps_sent[1] + 1)
        return journal.Record(time_ms, step, metrics)

    def _count(self, attempt: int, metric: str, value: float, record: journal.Record) -> None:
        """Add a value to the statistics of its interval; NaN, and values of intervals that were sent, are left out."""
        number = record.time_ms // INTERVAL_MS
        state = self._intervals.setdefault(str(attempt), {"sent": -1, "open": {}})
        if number > state["sent"] and value == value:
            statistics = state["open"].setdefault(str(number), {})
            low, total, count, high, time_ms, step = statistics.get(metric, (value, 0.0, 0, value, 0, record.step))
            ends = max(time_ms, record.time_ms), max(step, record.step)
            statistics[metric] = [min(low, value), total + value, count + 1, max(high, value), *ends]
