"""Batches of points for MLflow, each point once, also after a crash."""

from hpcdist.run.folder import RunDir
from hpcdist.tracking.journal_tail import JournalTail
from hpcdist.tracking.metric_point import Point
from hpcdist.tracking.node_charts import NodeCharts
from hpcdist.tracking.point_budget import PointBudget
from hpcdist.tracking.sent_points import SentPoints, is_of_script


class PointBatches:
    """One batch after another: take the `next`, send it, and `commit` it.

    The state determines the points of a batch, so that a process that continues after a crash sends equal points. After
    an OSError, a TrackingError or a failed request, make a new object, which loads the saved state.
    """

    def __init__(self, run: RunDir, run_id: str = "") -> None:
        self._folder = run.journal
        sent = SentPoints.load(run.journal, run_id)
        self._sent = sent
        sent.newest_counts = is_of_script(run)
        self._nodes = NodeCharts(sent.node_intervals, sent.steps)
        self.tail = JournalTail(run.journal, sent, self._nodes)
        self.counts = self.tail.counts
        self._budget = PointBudget(sent.series)
        self._num_points = 0  #: in the last batch

    @property
    def last_step(self) -> int:
        """The last step of the training in MLflow; system metrics count seconds."""
        last_steps: list[int] = []
        for key, by_attempt in self._sent.steps.items():
            if not key.startswith("system/"):
                last_steps += [highest for _, highest in by_attempt.values()]
        return max(last_steps, default=0)

    def next(self, newest_attempt: int, *, over: bool) -> list[Point] | None:
        """Return the points of the next batch, which may be an empty list; None if there is nothing to send.

        The content of a batch is saved before it is returned: after a crash the next process returns the same points.
        If the newest attempt is `over`, the last batch holds the points that wait for the end of a bucket or interval.
        """
        sent, tail = self._sent, self.tail
        repeated = sent.is_sending
        chunks = tail.next_chunks(newest_attempt, over=over)
        if not repeated:
            sent.closing = self._nodes.complete(chunks, tail.times, tail.behind, over=over)
            sent.intent = {name: chunk.offset for name, chunk in chunks.items()}
            sent.flushing = False
            if over and not chunks:
                sent.flushing = bool(sent.closing) or any(series.get("held") for series in sent.series.values())
            if not sent.is_sending:
                return None
            sent.save(self._folder)  # before `new_points` changes it: after a crash the same points result
        points = self._budget.select(tail.new_points(chunks))
        if sent.flushing:
            points += self._budget.flush()
        self._num_points = len(points)
        return points

    def commit(self, num_refused: int = 0) -> None:
        """Record that MLflow has the last batch, without the points that it refuses for good."""
        self._sent.commit()
        self._sent.save(self._folder)
        self.counts.num_points += self._num_points - num_refused
        self.counts.num_refused += num_refused
