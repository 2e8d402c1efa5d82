"""The logged series of a metric, thinned to a limited size, and the kinds and the order of metrics."""

import math
import re
import statistics
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

from hpcdist.run.mlflow_limits import clean_name

#: Points are kept exactly up to this number; above it, two remain of each of NUM_BINS ranges of steps.
MAX_POINTS = 4096
NUM_BINS = 512
#: Values of a sample for the median, evenly spaced among all of them; at this number every second one is dropped.
NUM_SAMPLED = 2048


class LastValue(NamedTuple):
    """The value of a metric at its last step, which may be NaN or infinite."""

    step: int
    value: float


class Series:
    """Points of one metric, added in any order, in at most 80 KiB; of values that are not finite only the last one.

    Of several points at one step, the last one counts.

    Args:
        is_of_nodes: whether several nodes log the metric, so that each point at a step counts.
    """

    def __init__(self, *, is_of_nodes: bool = False) -> None:
        self._is_of_nodes = is_of_nodes
        self.num_points = 0  #: added, including those that are not kept
        self.num_not_finite = 0
        self.first_not_finite: int | None = None  #: its step
        #: Attempt → lowest and highest step of its points; empty if the attempts are not known.
        self.steps_of_attempts: dict[int, tuple[int, int]] = {}
        self._steps = array("q")
        self._values = array("d")
        self._ends: list[tuple[int, float]] = []  #: the first and the last finite point
        self._last: LastValue | None = None
        self._sample = array("d")  #: each `_spacing`-th value
        self._spacing = 1

    def add(self, step: int, value: float) -> None:
        """Add a point."""
        self.num_points += 1
        if self._last is None or step >= self._last.step:
            self._last = LastValue(step, value)
        if not math.isfinite(value):
            self._count_not_finite(step)
            return
        point = (step, value)
        if not self._ends:
            self._ends = [point, point]
        if step <= self._ends[0][0]:
            self._ends[0] = point
        if step >= self._ends[1][0]:
            self._ends[1] = point
        self._steps.append(step)
        self._values.append(value)
        if (self.num_points - 1) % self._spacing == 0:
            self._sample.append(value)
            if len(self._sample) == NUM_SAMPLED:
                self._sample = self._sample[::2]
                self._spacing *= 2
        if len(self._steps) > MAX_POINTS:
            kept = thinned(self.points, NUM_BINS)
            self._steps = array("q", (step for step, _ in kept))
            self._values = array("d", (value for _, value in kept))

    def _count_not_finite(self, step: int) -> None:
        self.num_not_finite += 1
        if self.first_not_finite is None or step < self.first_not_finite:
            self.first_not_finite = step

    @property
    def points(self) -> list[tuple[int, float]]:
        """The kept points in the order of their steps; the first, last, lowest and highest ones are among them."""
        kept = [*zip(self._steps, self._values, strict=True), *self._ends]
        if self._is_of_nodes:
            return sorted(set(kept))
        return sorted(dict(kept).items())

    @property
    def last(self) -> float | None:
        """The value at the last step, which may be NaN or infinite; None without points."""
        return None if self._last is None else self._last.value

    @property
    def lowest(self) -> float | None:
        """The lowest value; None without points."""
        return min((value for _, value in self.points), default=None)

    @property
    def highest(self) -> float | None:
        """The highest value; None without points."""
        return max((value for _, value in self.points), default=None)

    @property
    def median(self) -> float | None:
        """The median of all parts of the run; `points` has more of its end, and only the extremes of the rest."""
        return statistics.median(self._sample) if self._sample else None


#: Metrics that count something per second.
_SPEED = re.compile(r"(?!system/|comm/)(.*[_/])?per_(s|sec|second)")


def median_speeds(series: Mapping[str, Series]) -> dict[str, float]:
    """Return the throughputs of a run by metric, each as the median of its logged values."""
    medians = {key: series[key].median for key in sorted(series) if _SPEED.fullmatch(key)}
    return {key: median for key, median in medians.items() if median is not None}


def thinned(points: list[tuple[int, float]], num_bins: int) -> list[tuple[int, float]]:
    """Return the lowest and the highest point of each of `num_bins` ranges of steps; `points` are sorted by step."""
    if not points:
        return []
    first, last = points[0][0], points[-1][0]
    width = max(1, -(-(last - first + 1) // num_bins))  # rounded up
    kept = []
    for _, group in groupby(points, key=lambda point: (point[0] - first) // width):
        in_range = list(group)
        kept += sorted({min(in_range, key=itemgetter(1)), max(in_range, key=itemgetter(1))})
    return kept


#: Limit of the metrics that a report reads and draws, to bound its size and the memory of its writer.
MAX_SERIES = 600
#: Number of ranks of an elastic run.
WORLD_SIZE = "world_size"
#: Times of the parts of a step.
_TIME_PREFIX = "time/"
#: System metrics of a node; their steps are seconds.
SYSTEM_PREFIX = "system/"
#: Parts of names that tell apart the same metric on different data.
_SPLITS = ("train", "eval", "val", "valid", "validation", "test")
_STEP_TIMES = "seconds per step"


def is_read(key: str) -> bool:
    """Return whether a metric is of the training: all but system metrics and the times of each node."""
    if key.startswith(SYSTEM_PREFIX):
        return False
    is_of_node = key.startswith(_TIME_PREFIX) and "/" in key.removeprefix(_TIME_PREFIX)
    return not is_of_node


def is_of_hpcdist(key: str) -> bool:
    """Return whether hpcdist itself logs a metric of the journal beside those of the code."""
    return key == WORLD_SIZE or key.startswith((SYSTEM_PREFIX, _TIME_PREFIX))


def group_of(key: str) -> str:
    """Return the title of the chart that shows a metric, with the same metric on different data."""
    split, slash, rest = key.partition("/")
    if split == "time":
        return _STEP_TIMES
    if slash and split in _SPLITS:
        return rest
    return key


def ranked(names: Iterable[str], monitor: str) -> list[str]:
    """Return names of metrics: losses first, then the monitored metric, throughput, step times and the rest."""

    def rank(name: str) -> tuple[int, str]:
        last = name.lower().rpartition("/")[2]
        is_time = name.startswith((_TIME_PREFIX, _STEP_TIMES))
        kinds = [last == "loss", "loss" in last, name == monitor, last.endswith("_per_s"), is_time, True]
        return kinds.index(True), name

    return sorted(names, key=rank)


#: Names of losses such as `train_loss`, `eval/loss` and TensorBoard's `Loss/train`, but not `loss_scale`.
_LOSS = re.compile(r"(?<![a-z])loss(?![a-z]|_scale)", re.IGNORECASE)


def common_metric(logged: Sequence[Iterable[str]], monitor: str, mode: str) -> tuple[str, str]:
    """Return the metric by which to compare runs that have logged values, and whether `max` or `min` is best.

    That is the monitored metric, or else one that most runs have logged, a loss if there is one. Both are empty if
    there is none. The second is empty, too, for another metric than a loss: only its name is known.

    Args:
        logged: the metrics of each run by their names in MLflow.
    """
    counts = Counter(key for metrics in logged for key in metrics if not is_of_hpcdist(key))
    if monitor:
        name = clean_name(monitor)
        if name in counts:
            return name, mode
    most = [key for key, count in counts.items() if count == max(counts.values())]
    losses = ranked(filter(_LOSS.search, most), monitor)
    if losses:
        return losses[0], "min"
    return next(iter(ranked(most, monitor)), ""), ""
