"""Description and datasets of a run, as MLflow's UI shows them beside its metrics."""

import hashlib
import json
import logging
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING

from hpcdist.errors import RunFolderError, TrackingError
from hpcdist.review.description import describe
from hpcdist.review.facts import RunFacts, interruptions, logged_result, lost_text, read_facts
from hpcdist.review.ledger import Ledger, cost_of, read_ledger
from hpcdist.review.metric_series import median_speeds
from hpcdist.run.figures import read_texts
from hpcdist.run.folder import ENDED, RunDir, State
from hpcdist.run.mlflow_limits import MAX_TAG, clean_name
from hpcdist.run.training_record import DatasetRecord
from hpcdist.tracking.metric_point import Point
from hpcdist.tracking.mlflow_client import MlflowRun, entities, translated
from hpcdist.tracking.series import read_last_values, read_series

if TYPE_CHECKING:
    from hpcdist.review.explain import Finding

log = logging.getLogger(__name__)

NOTE_TAG = "mlflow.note.content"
#: End of the first line of the description, which separates it from text of the user above. MLflow's pages do not show
#: it, but its list of experiments shows the source of a description: that must not begin with it.
MARK = "<!-- hpcdist: text above this line is kept, the line itself is not -->"
#: A line of its own above the description, as earlier versions have written it.
_OLD_MARK = "<!-- hpcdist: text above this line is kept -->"
#: Maximum length of a description without text of the user.
MAX_DESCRIPTION = MAX_TAG - len(MARK) - 4
#: Minimum time between two changes of the description, unless the state of the run changes.
INTERVAL_S = 60.0
#: Name of the metric with the best value, before that of the primary metric; the charts of `usage/` are the last ones.
BEST_PREFIX = "usage/best/"
_CONTEXT_TAG = "mlflow.data.context"
#: Limits of MLflow for the name and the digest of a dataset.
_MAX_NAME = 500
_MAX_DIGEST = 36


class RunPage:
    """Keeps the page of a run in MLflow up to date: its description, datasets, summary tags and best value."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._shown: object = None
        self._next = 0.0

    def update(self, opened: MlflowRun, state: State, sent: str) -> str:
        """Send the page if it has changed. Returns its digest.

        Args:
            sent: digest of the page in MLflow. If nothing has changed since, no request is made.
        """
        now = time.monotonic()
        # An earlier pass may have failed to write the final model.
        has_model = state.status == "finished" and (self._run.model / "MLmodel").is_file()
        status = (state.status, state.reason, state.attempt, has_model)
        if status == self._shown and now < self._next:
            return sent
        with as_tracking_error():
            facts = replace(read_facts(self._run, state), texts=read_texts(self._run.artifacts))
            if state.status in ENDED:  # a long journal takes seconds
                speeds = median_speeds(read_series(self._run))
                logged = logged_result(facts, partial(read_last_values, self._run))
                facts = replace(facts, speeds=speeds, logged=logged)
            ledger = read_ledger(self._run)
            finding = _cause(self._run, state)
            text = describe(facts, ledger, finding, max_chars=MAX_DESCRIPTION)
        tags = summary_tags(facts, ledger)
        shown = json.dumps([text, [asdict(dataset) for dataset in facts.datasets], tags])
        digest = hashlib.sha256(shown.encode()).hexdigest()
        if digest != sent:
            set_note(opened, text)
            if facts.datasets:
                inputs = [_input(dataset, facts.datasets) for dataset in facts.datasets]
                with translated(opened.uri):
                    opened.client.log_inputs(opened.run_id, inputs)
            opened.set_tags(tags)
            if facts.best is not None:
                time_ms = int(1000 * (facts.best.created or 0.0))  # the same in each request: it is stored once
                opened.log_points([Point(best_metric(facts.monitor), facts.best_value, time_ms, facts.best.step)])
        self._shown = status
        self._next = now + INTERVAL_S
        return digest


def best_metric(monitor: str) -> str:
    """Return the metric with the best value, by which MLflow can sort runs: its other metrics are last values."""
    return clean_name(f"{BEST_PREFIX}{monitor}")


def _cause(run: RunDir, state: State) -> "Finding | None":
    """Return why a run has failed; None if it has not, or if the cause is unknown."""
    if state.status != "failed":
        return None
    from hpcdist.review.explain import explain_failure  # only failures need it

    try:
        return explain_failure(run, state)
    except Exception:  # a damaged file of a rank must not stop the upload of the metrics
        log.warning("the failure of %s cannot be explained", run.name, exc_info=True)
        return None


@contextmanager
def as_tracking_error() -> Iterator[None]:
    """Raise a TrackingError for files of a run that are damaged or cannot be read."""
    try:
        yield
    except (RunFolderError, OSError) as error:
        raise TrackingError(str(error)) from error


def set_note(opened: MlflowRun, text: str) -> None:
    """Set the description of an MLflow run below the text of its user."""
    whole = below_text_of_user(opened.current().data.tags.get(NOTE_TAG, ""), text)
    with translated(opened.uri):
        opened.client.set_tag(opened.run_id, NOTE_TAG, whole)


def below_text_of_user(current: str, text: str) -> str:
    """Return a description below the text of its user in the current one: the lines above that with the mark."""
    above, _, _ = current.partition(_OLD_MARK)
    before, mark, _ = above.partition(MARK)
    if mark:
        above, _, _ = before.rpartition("\n")
    above = above.strip()
    if len(above) > MAX_DESCRIPTION:
        return above  # a part of the mark would be a comment without an end, and count as text of the user
    first, end, rest = text.partition("\n")
    first = first[: MAX_DESCRIPTION - len(above)]  # the mark must not be cut off
    whole = f"{first} {MARK}{end}{rest}"
    if above:
        whole = f"{above}\n\n{whole}"
    # A long text of the user is kept unchanged, and the end of the description left out.
    return whole.encode(errors="replace").decode()[:MAX_TAG]


def _input(dataset: DatasetRecord, datasets: Iterable[DatasetRecord]) -> entities.DatasetInput:
    # MLflow identifies a dataset by name and digest and requires both. Splits of one file may have the same digest.
    digest = dataset.digest
    if not digest:
        digest = hashlib.sha256(json.dumps(asdict(dataset)).encode()).hexdigest()[:8]
    same_files = [other for other in datasets if (other.name, other.digest) == (dataset.name, dataset.digest)]
    if any(other.split != dataset.split for other in same_files):
        digest = f"{digest[: _MAX_DIGEST // 2]}-{dataset.split}"
    profile = {}
    if dataset.num_samples is not None:
        profile["num_rows"] = dataset.num_samples
    entity = entities.Dataset(
        name=dataset.name[:_MAX_NAME],
        digest=digest[:_MAX_DIGEST],
        source_type="hpcdist",
        source=json.dumps({"uri": dataset.source or dataset.name}),
        profile=json.dumps(profile),
    )
    return entities.DatasetInput(entity, [entities.InputTag(_CONTEXT_TAG, dataset.split[:_MAX_NAME])])


def summary_tags(facts: RunFacts, ledger: Ledger) -> dict[str, str]:
    """Return the result, cost and interruptions of a run as text, for columns in MLflow's list of runs."""
    tags = {}
    if facts.best is not None:
        tags["hpcdist.best"] = facts.best_at_step
    if ledger.entries:
        tags["hpcdist.cost"] = f"{cost_of([ledger])}, goodput {ledger.goodput_text}"
    causes = interruptions(facts.attempts, MAX_TAG)
    if not causes and facts.state.status == "failed":  # a run may fail before its first attempt
        causes = facts.state.reason
    if causes:
        tags["hpcdist.interruptions"] = causes
    steps_lost = lost_text(facts.attempts)
    if steps_lost:
        tags["hpcdist.lost_steps"] = steps_lost
    return tags
