"""The metric series of a run as MLflow shows them, read from the journal for reports and comparisons."""

from __future__ import annotations

from hpcdist.review.metric_charts import MAX_SERIES, is_read
from hpcdist.review.series import Series
from hpcdist.run.folder import ENDED, RunDir
from hpcdist.tracking.journal_tail import JournalTail
from hpcdist.tracking.shipping_state import ShippingState


def read_series(run: RunDir) -> dict[str, Series]:
    """Return the series of a run by metric: all ranks and attempts, without the steps that a later attempt repeats.

    Memory is bounded: a series is thinned, and metrics after the first MAX_SERIES are left out.
    """
    state = run.read_state()
    progress = ShippingState()
    tail = JournalTail(run.journal, progress)
    series: dict[str, Series] = {}
    while chunks := tail.next_chunks(state.attempt, over=state.status in ENDED):
        for point in tail.new_points(chunks):
            found = series.get(point.key)
            if found is None:
                if len(series) >= MAX_SERIES or not is_read(point.key):
                    continue
                found = series[point.key] = Series()
            found.add(point.step, point.value)
        progress.offsets |= {name: chunk.offset for name, chunk in chunks.items()}
    return series
