"""The batches of points that the shipper sends: the records of the journal within the budgets of charts and points."""

from __future__ import annotations

from hpcdist.run.folder import RunDir
from hpcdist.tracking.journal.node_charts import NodeCharts
from hpcdist.tracking.journal.point_budget import PointBudget
from hpcdist.tracking.journal.reader import Chunk
from hpcdist.tracking.journal.shipping_state import ShippingState
from hpcdist.tracking.journal.tail import JournalTail, Point


class Batches:
    """One batch after another, each in three steps: `plan` it, save the state, get its `points` and send them.

    The state determines the points of a batch, so that a process that continues after a crash sends equal points. Both
    methods raise OSError if the journal cannot be read; then, as after a failed request, make a new object with the
    saved state.
    """

    def __init__(self, run: RunDir, progress: ShippingState) -> None:
        self._progress = progress
        self._nodes = NodeCharts(progress.node_intervals, progress.steps)
        self._tail = JournalTail(run.journal, progress, self._nodes)
        self._budget = PointBudget(progress)
        self._chunks: dict[str, Chunk] = {}

    @property
    def names(self) -> set[tuple[str, str]]:
        """Pairs (original, cleaned) of metric names in the last batch."""
        return self._tail.names

    @property
    def num_polls(self) -> int:
        """Number of times that a journal file was polled."""
        return self._tail.num_polls

    def plan(self, newest_attempt: int, *, over: bool) -> bool:
        """Record in the state what the next batch holds. Returns False if there is nothing to send.

        Args:
            newest_attempt: The last attempt that was started.
            over: Whether it has ended: the last batch holds the points that wait for the end of a bucket or interval.
        """
        progress = self._progress
        repeated = progress.is_sending
        self._chunks = self._tail.next_chunks(newest_attempt, over=over)
        if not repeated:
            tail = self._tail
            progress.closing = self._nodes.complete(self._chunks, tail.times, tail.behind, over=over)
            progress.intent = {name: chunk.offset for name, chunk in self._chunks.items()}
            progress.flushing = not self._chunks and over and (bool(progress.closing) or self._budget.is_holding)
        return progress.is_sending

    def points(self) -> list[Point]:
        """Return the points of the planned batch; the state records them as sent."""
        points = self._budget.select(self._tail.new_points(self._chunks))
        return points + self._budget.flush() if self._progress.flushing else points
