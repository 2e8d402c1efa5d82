"""Description, datasets and primary metric of a run, as MLflow's UI shows them beside its metrics."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from hpcdist.errors import RunFolderError, TrackingError
from hpcdist.review.description import describe
from hpcdist.review.facts import RunFacts, read_facts
from hpcdist.review.ledger import read_ledger
from hpcdist.run.folder import RunDir, State
from hpcdist.run.training_record import Dataset
from hpcdist.tracking.mlflow_client import MlflowException, entities, translated
from hpcdist.tracking.mlflow_run import MlflowRun
from hpcdist.tracking.run_metadata import MAX_TAG
from hpcdist.tracking.shipping_state import ShippingState

log = logging.getLogger(__name__)

NOTE_TAG = "mlflow.note.content"
#: Separates text of the user from the description; MLflow's UI does not show it.
MARK = "<!-- hpcdist: text above this line is kept -->"
#: Maximum length of a description without text of the user.
MAX_DESCRIPTION = MAX_TAG - len(MARK) - 4
#: Minimum time between two changes of the description, unless the state of the run changes.
INTERVAL_S = 60.0
_PRIMARY_METRIC = "mlflow.experiment.primaryMetric.name"
_GREATER_IS_BETTER = "mlflow.experiment.primaryMetric.greaterIsBetter"
_CONTEXT_TAG = "mlflow.data.context"
#: Limit of MLflow for the name of a dataset.
_MAX_NAME = 500


class RunPage:
    """Keeps description, datasets and primary metric of one run current."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._shown: object = None
        self._next = 0.0

    def update(self, opened: MlflowRun, state: State, progress: ShippingState, own_note: str) -> None:
        """Send what has changed; `progress.page` records it.

        Args:
            own_note: description that the config of the run sets; it precedes the generated one.

        Raises TrackingError if MLflow fails or the run folder cannot be read.
        """
        now = time.monotonic()
        status = (state.status, state.reason, state.attempt)
        if status == self._shown and now < self._next:
            return
        try:
            facts = read_facts(self._run, state)
            text = describe(facts, read_ledger(self._run), max_chars=MAX_DESCRIPTION - len(own_note))
        except RunFolderError as error:
            raise TrackingError(str(error)) from error
        if progress.page.get("description") != (mark := _hash(text)):
            set_note(opened, text, own_note=own_note)
            progress.page["description"] = mark
        _log_datasets(opened, facts, progress)
        _set_primary_metric(opened, facts, progress)
        _set_lost_steps(opened, facts, progress)
        self._shown, self._next = status, now + INTERVAL_S


def set_note(opened: MlflowRun, text: str, *, own_note: str = "") -> None:
    """Set the description of an MLflow run below the text that a user has written there.

    Args:
        own_note: text above the description if the run has none yet.
    """
    with translated(opened.uri):
        tags = opened.client.get_run(opened.run_id).data.tags
    current = tags.get(NOTE_TAG, "")
    above, mark, _ = current.partition(MARK)
    # Versions before 0.2 wrote state and reason.
    if not mark and current in ("", f"{tags.get('hpcdist.state')}: {tags.get('hpcdist.reason')}"):
        above = own_note
    above = above.strip()
    whole = f"{above}\n\n{MARK}\n\n{text}" if above else f"{MARK}\n\n{text}"
    # A long text of the user is kept, and the end of the description is left out.
    opened.set_tags({NOTE_TAG: whole.encode(errors="replace").decode()[:MAX_TAG]})


def _log_datasets(opened: MlflowRun, facts: RunFacts, progress: ShippingState) -> None:
    if not facts.datasets:
        return
    mark = _hash(json.dumps([asdict(dataset) for dataset in facts.datasets]))
    if progress.page.get("datasets") != mark:
        with translated(opened.uri):
            opened.client.log_inputs(opened.run_id, [_input(dataset) for dataset in facts.datasets])
        progress.page["datasets"] = mark


def _input(dataset: Dataset) -> entities.DatasetInput:
    # MLflow identifies a dataset by name and digest and requires both.
    digest = dataset.digest[:36] or _hash(json.dumps(asdict(dataset)))[:8]
    profile = {} if dataset.num_samples is None else {"num_rows": dataset.num_samples}
    source = dataset.source or dataset.name
    found = entities.Dataset(
        name=dataset.name[:_MAX_NAME],
        digest=digest,
        source_type="hpcdist",
        source=json.dumps({"uri": source}),
        profile=json.dumps(profile),
    )
    return entities.DatasetInput(found, [entities.InputTag(_CONTEXT_TAG, dataset.split[:_MAX_NAME])])


def _set_primary_metric(opened: MlflowRun, facts: RunFacts, progress: ShippingState) -> None:
    """Make the monitored metric the primary one of the experiment, unless the experiment has one already."""
    if "primary_metric" in progress.page or (facts.best is None and facts.monitor not in facts.metrics):
        return
    tags = {_PRIMARY_METRIC: facts.monitor, _GREATER_IS_BETTER: str(facts.monitor_mode == "max")}
    try:
        with translated(opened.uri):
            existing = opened.client.get_experiment(opened.experiment_id).tags
            if _PRIMARY_METRIC not in existing:
                for key, value in tags.items():
                    opened.client.set_experiment_tag(opened.experiment_id, key, value)
    except TrackingError as error:
        cause = error.__cause__
        if not isinstance(cause, MlflowException) or cause.error_code != "PERMISSION_DENIED":
            raise
        log.warning("the primary metric of the experiment is not set: %s", error)
    progress.page["primary_metric"] = facts.monitor


def _set_lost_steps(opened: MlflowRun, facts: RunFacts, progress: ShippingState) -> None:
    """Set the tag with the steps that had, or have, to be done again in all attempts, a column of the view Failures."""
    known = [attempt.steps_lost for attempt in facts.attempts if attempt.steps_lost is not None]
    if known and progress.page.get("lost_steps") != (lost := str(sum(known))):
        opened.set_tags({"hpcdist.lost_steps": lost})
        progress.page["lost_steps"] = lost


def configured_note(config: Mapping[str, Any]) -> str:
    """Return the description that a config sets by `tracking.tags`, empty if it sets none."""
    own = (config.get("tracking") or {}).get("tags") or {}
    note = own.get(NOTE_TAG, "")
    return note if isinstance(note, str) else ""


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode(errors="replace")).hexdigest()[:16]
