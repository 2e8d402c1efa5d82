"""The metric series of a run as MLflow shows them, for reports and comparisons."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpcdist.errors import RunFolderError
from hpcdist.host.json_files import fill, read_json, write_json
from hpcdist.host.ownership import is_mine
from hpcdist.host.retry import retry
from hpcdist.review.metric_series import MAX_SERIES, SYSTEM_PREFIX, LastValue, Series, is_read
from hpcdist.run.folder import ENDED, RunDir
from hpcdist.tracking.journal import journal_files
from hpcdist.tracking.journal_tail import JournalTail
from hpcdist.tracking.metric_point import Point
from hpcdist.tracking.node_charts import without_node
from hpcdist.tracking.sent_points import SentPoints, is_of_script

#: In the folder of the journal.
LAST_VALUES_FILE = "last-values.json"
#: Rises when other points count: a file of an older hpcdist is then computed again.
LAST_VALUES_RULE = 3


@dataclass(frozen=True, kw_only=True)
class KeptValues:
    """The content of LAST_VALUES_FILE."""

    rule: int  #: LAST_VALUES_RULE
    sizes: dict[str, int]  #: journal file → bytes of which these are the last values
    values: dict[str, Any]  #: metric → step and value


def read_series(run: RunDir) -> dict[str, Series]:
    """Return the series of a run by metric, thinned; metrics after the first MAX_SERIES are left out.

    A system metric is one series over all nodes.
    """
    series: dict[str, Series] = {}
    read = SentPoints(newest_counts=is_of_script(run))
    for point in _points(run, read):
        key = point.key
        is_system = key.startswith(SYSTEM_PREFIX)
        if is_system:
            key = without_node(key) or key
        if key not in series and len(series) < MAX_SERIES and (is_system or is_read(key)):
            series[key] = Series(is_of_nodes=is_system)
        if key in series:
            series[key].add(point.step, point.value)
    for key, found in series.items():
        for attempt, (low, high) in read.steps.get(key, {}).items():
            found.steps_of_attempts[int(attempt)] = (low, high)
    return series


def read_last_values(run: RunDir) -> dict[str, LastValue]:
    """Return the last value of each metric, whoever logged it: the code of a rank, or the reader of a script's files.

    The values are those of `read_series`: at the largest step, which of a script is that of the newest attempt. System
    metrics are left out. Those of an ended run of this user are kept in a file beside the journal, which takes seconds
    to read if it is long: pages of sweeps and lists of the best runs need the values of many runs.
    """
    # The names in the file of another user may hold anything, while those of records are cleaned.
    is_kept = run.read_state().status in ENDED and is_mine(run.path)
    if not is_kept:
        return _compute_last_values(run)
    files = [file.path for file in journal_files(run.journal)]
    sizes = {path.name: retry(path.stat, path).st_size for path in files}
    path = run.journal / LAST_VALUES_FILE
    kept = _read_kept(path)
    if kept is not None and kept.rule == LAST_VALUES_RULE and kept.sizes == sizes:
        return {key: LastValue(*last) for key, last in kept.values.items()}
    values = _compute_last_values(run)
    with suppress(OSError):  # a full disk: the next reader computes them again
        write_json(path, asdict(KeptValues(rule=LAST_VALUES_RULE, sizes=sizes, values=dict(values))))
    return values


def _read_kept(path: Path) -> KeptValues | None:
    """Return the values in a file; None if it is missing or damaged."""
    try:
        kept = fill(KeptValues, read_json(path) or {}, path)
    except (RunFolderError, OSError):
        return None
    for last in kept.values.values():
        match last:
            case [int(), int() | float()]:
                continue
        return None
    return kept


def _compute_last_values(run: RunDir) -> dict[str, LastValue]:
    last_values: dict[str, LastValue] = {}
    for point in _points(run):
        if not is_read(point.key):
            continue
        known = last_values.get(point.key)
        if known is None or point.step >= known.step:
            last_values[point.key] = LastValue(point.step, point.value)
    return last_values


def read_values(run: RunDir) -> dict[str, dict[int, float]]:
    """Return all logged values of a run by metric and step, without system metrics."""
    values: dict[str, dict[int, float]] = {}
    for point in _points(run):
        if is_read(point.key):
            values.setdefault(point.key, {})[point.step] = point.value
    return values


def _points(run: RunDir, sent: SentPoints | None = None) -> Iterator[Point]:
    """Yield the points that count, of several at one step the latest one last.

    An attempt of a script counts up to the first step in a later one. Files of several processes are read in parts, and
    the order is that of their times within a part.

    Args:
        sent: has the steps of each attempt afterwards.
    """
    state = run.read_state()
    if sent is None:
        sent = SentPoints(newest_counts=is_of_script(run))
    tail = JournalTail(run.journal, sent)
    while chunks := tail.next_chunks(state.attempt, over=state.status in ENDED):
        yield from sorted(tail.new_points(chunks), key=lambda point: point.time_ms)
        sent.offsets |= {name: chunk.offset for name, chunk in chunks.items()}
