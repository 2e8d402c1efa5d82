"""Description, datasets and primary metric of a run, as MLflow's UI shows them beside its metrics."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from hpcdist.errors import RunFolderError, TrackingError
from hpcdist.review.attempts import interruptions
from hpcdist.review.description import describe
from hpcdist.review.facts import RunFacts, read_facts
from hpcdist.review.ledger import Ledger, percent, read_ledger
from hpcdist.run.folder import RunDir, State
from hpcdist.run.training_record import Dataset
from hpcdist.tracking.client.mlflow_client import MlflowException, entities, translated
from hpcdist.tracking.client.mlflow_run import MlflowRun
from hpcdist.tracking.journal.shipping_state import ShippingState
from hpcdist.tracking.pages.run_metadata import MAX_TAG, clean_text

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
#: Limits of MLflow for the name and the digest of a dataset.
_MAX_NAME = 500
_MAX_DIGEST = 36


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
            ledger = read_ledger(self._run)
            text = describe(facts, ledger, max_chars=MAX_DESCRIPTION - len(own_note))
        except RunFolderError as error:
            raise TrackingError(str(error)) from error
        if progress.page.get("description") != (mark := _hash(text)):
            set_note(opened, text, own_note=own_note)
            progress.page["description"] = mark
        _log_datasets(opened, facts, progress)
        _set_primary_metric(opened, facts, progress)
        _set_tags(opened, facts, ledger, progress)
        self._shown, self._next = status, now + INTERVAL_S


def set_note(opened: MlflowRun, text: str, *, own_note: str = "") -> None:
    """Set the description of an MLflow run below the text that a user has written there.

    Args:
        own_note: text above the description if the run has none yet.
    """
    with translated(opened.uri):
        current = opened.client.get_run(opened.run_id).data.tags.get(NOTE_TAG, "")
    above = (current.partition(MARK)[0] if current else own_note).strip()
    whole = f"{above}\n\n{MARK}\n\n{text}" if above else f"{MARK}\n\n{text}"
    # A long text of the user is kept, and the end of the description is left out.
    opened.set_tags({NOTE_TAG: whole.encode(errors="replace").decode()[:MAX_TAG]})


def _log_datasets(opened: MlflowRun, facts: RunFacts, progress: ShippingState) -> None:
    if not facts.datasets:
        return
    mark = _hash(json.dumps([asdict(dataset) for dataset in facts.datasets]))
    if progress.page.get("datasets") != mark:
        with translated(opened.uri):
            opened.client.log_inputs(opened.run_id, [_input(dataset, facts.datasets) for dataset in facts.datasets])
        progress.page["datasets"] = mark


def _input(dataset: Dataset, datasets: Iterable[Dataset]) -> entities.DatasetInput:
    # MLflow identifies a dataset by name and digest and requires both. Splits of one file may have the same digest.
    digest = dataset.digest or _hash(json.dumps(asdict(dataset)))[:8]
    if any((one.name, one.digest) == (dataset.name, dataset.digest) and one.split != dataset.split for one in datasets):
        digest = f"{digest[: _MAX_DIGEST // 2]}-{dataset.split}"
    profile = {} if dataset.num_samples is None else {"num_rows": dataset.num_samples}
    source = dataset.source or dataset.name
    found = entities.Dataset(
        name=dataset.name[:_MAX_NAME],
        digest=digest[:_MAX_DIGEST],
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


def view_tags(facts: RunFacts, ledger: Ledger) -> dict[str, str]:
    """Return the tags that the prepared views show as columns: texts with rounded numbers, and facts of all attempts.

    MLflow's list of runs shows the last value of a metric, with all digits of the number.
    """
    tags = {}
    if facts.best is not None and facts.best_value is not None:
        tags["hpcdist.best"] = f"{facts.best_value:.6g} at step {facts.best.step:,}"
    if ledger.entries:
        hours = ledger.allocated_s / 3600
        tags["hpcdist.cost"] = f"{hours:.3g} {ledger.unit}-hours, goodput {percent(ledger.goodput)}"
    if causes := interruptions(facts.attempts, MAX_TAG):
        tags["hpcdist.interruptions"] = clean_text(causes)[:MAX_TAG]
    if known := [attempt.steps_lost for attempt in facts.attempts if attempt.steps_lost is not None]:
        tags["hpcdist.lost_steps"] = str(sum(known))
    return tags


def _set_tags(opened: MlflowRun, facts: RunFacts, ledger: Ledger, progress: ShippingState) -> None:
    tags = view_tags(facts, ledger)
    mark = _hash(json.dumps(tags))
    if tags and progress.page.get("tags") != mark:
        opened.set_tags(tags)
        progress.page["tags"] = mark


def configured_note(config: Mapping[str, Any]) -> str:
    """Return the description that a config sets by `tracking.tags`, empty if it sets none."""
    own = (config.get("tracking") or {}).get("tags") or {}
    note = own.get(NOTE_TAG, "")
    return note if isinstance(note, str) else ""


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode(errors="replace")).hexdigest()[:16]
