"""Upload of what the code of the ranks has logged with MLflow, besides metrics and artifacts.

Names that hpcdist uses itself get the prefix `script.`: parameters that the config has with another value, the tags
`hpcdist.…`, and MLflow's own tags of a run, such as its name and its description.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from hpcdist.config.redaction import redact_tree
from hpcdist.errors import TrackingError
from hpcdist.files.atomic import read_json
from hpcdist.files.ownership import stays_inside
from hpcdist.run.folder import RunDir
from hpcdist.tracking.artifacts.logged_model import log_model
from hpcdist.tracking.client.mlflow_client import MlflowException, entities, translated
from hpcdist.tracking.client.mlflow_run import MlflowRun
from hpcdist.tracking.journal.names import clean_name
from hpcdist.tracking.journal.rank_events import Event, event_files, read_events
from hpcdist.tracking.pages import run_metadata
from hpcdist.tracking.shipping.changed_names import ChangedNames

log = logging.getLogger(__name__)

PREFIX = "script."
#: Tags of MLflow that hpcdist sets.
_OWN_TAGS = ("hpcdist.", "mlflow.note.content", "mlflow.runName", "mlflow.source.", "mlflow.user", "mlflow.parentRunId")
#: Context of a script's run, which hpcdist records for the run itself.
_CONTEXT_TAGS = ("mlflow.user", "mlflow.source.")
#: Limits of MLflow for the schema and the profile of a dataset.
_MAX_SOURCE = 65_535


def ship_new_events(
    mlflow: MlflowRun, run: RunDir, config: Mapping[str, Any], offsets: Mapping[str, int], names: ChangedNames
) -> Iterator[tuple[str, int]]:
    """Upload the events after `offsets`; yields the name of each file and its new offset.

    Sending the same events again leads to the same result. Raises TrackingError if MLflow rejects a request or a file
    cannot be read.
    """
    try:
        for path in event_files(run.journal):
            while True:
                offset = offsets.get(path.name, 0)
                if path.stat().st_size <= offset:
                    break
                events, end = read_events(path, offset)
                if end == offset:
                    break
                _ship(mlflow, run, config, events, names)
                yield path.name, end
    except OSError as error:
        raise TrackingError(f"the events of {run.name} cannot be read: {error}") from error


def _ship(
    mlflow: MlflowRun, run: RunDir, config: Mapping[str, Any], events: Iterable[Event], names: ChangedNames
) -> None:
    params: dict[str, str] = {}
    tags: dict[str, str] = {}
    models: dict[str, None] = {}
    datasets = []
    for kind, content in events:
        if kind == "param":
            params = content | params  # the first value counts, as in MLflow
        elif kind == "tag":
            tags |= content
        elif kind == "model":
            models[content] = None
        elif (dataset := _dataset(content)) is not None:
            datasets.append(dataset)
    own = run_metadata.params(run, config)
    shown = {
        PREFIX + key if clean_name(key) in own else key: value
        for key, value in _redacted(params).items()
        if not _is_same(own.get(clean_name(key)), value)
    }
    shown_tags = {_tag_name(key): value for key, value in _redacted(tags).items() if not key.startswith(_CONTEXT_TAGS)}
    names.note((key, clean_name(key)) for key in [*shown, *shown_tags])
    mlflow.log_params({clean_name(key): value[: run_metadata.MAX_PARAM] for key, value in shown.items()})
    mlflow.set_tags({clean_name(key): value[: run_metadata.MAX_TAG] for key, value in shown_tags.items()})
    if datasets:
        with _skipped_if_rejected(mlflow, "datasets"), translated(mlflow.uri):
            mlflow.client.log_inputs(mlflow.run_id, datasets=datasets)
    for model_id in models:
        with _skipped_if_rejected(mlflow, f"model {model_id}"):
            _ship_model(mlflow, run, model_id)


@contextmanager
def _skipped_if_rejected(mlflow: MlflowRun, what: str) -> Iterator[None]:
    """Log a warning instead of the TrackingError if MLflow rejects a request for good: the rest must be uploaded."""
    try:
        yield
    except TrackingError as error:
        cause = error.__cause__
        if not isinstance(cause, MlflowException) or cause.error_code != "INVALID_PARAMETER_VALUE":
            raise
        mlflow.require_active()  # a deleted run gives the same error code
        log.warning("%s of the script: not uploaded: %s", what, error)


def _redacted(values: Mapping[str, str]) -> dict[str, str]:
    return {key: run_metadata.clean_text(str(value)) for key, value in redact_tree(values).items()}


def _is_same(own: str | None, value: str) -> bool:
    """Return whether a parameter of hpcdist has this value, also in another notation: 5e-5 and 5e-05, true and True."""
    if own is None or own.lower() == value.lower():
        return own is not None
    try:
        return float(own) == float(value)
    except ValueError:
        return False


def _tag_name(key: str) -> str:
    return PREFIX + key.removeprefix("mlflow.") if key.startswith(_OWN_TAGS) else key


def _dataset(content: Mapping[str, Any]) -> entities.DatasetInput | None:
    """Return a dataset; None if the event does not describe one."""
    found, tags = content.get("dataset"), content.get("tags")
    if not isinstance(found, dict) or not all(isinstance(found.get(key), str) for key in ("name", "digest")):
        return None
    texts = {
        key: str(found.get(key) or "")[:_MAX_SOURCE] for key in ("name", "digest", "source_type", "source", "schema")
    }
    pairs = tags.items() if isinstance(tags, dict) else ()
    return entities.DatasetInput(
        entities.Dataset(**texts), [entities.InputTag(str(key), str(value)) for key, value in pairs]
    )


def _ship_model(mlflow: MlflowRun, run: RunDir, model_id: str) -> None:
    """Upload a model of a rank as a logged model of the run, or only its tags if it has been uploaded."""
    folder = run.logged_models / model_id
    saved = read_json(folder / "model.json") or {}
    tags, params = saved.get("tags"), saved.get("params")
    for path in folder.rglob("*"):
        if not stays_inside(path, run.path):
            log.warning("%s is a symbolic link that leaves the run folder: the model is not uploaded", path)
            return
    step, name, kind = saved.get("step"), saved.get("name"), saved.get("type")
    found = log_model(
        mlflow,
        folder / "files",
        model_id,
        step if type(step) is int else 0,
        name=name if isinstance(name, str) else "model",
        model_type=kind if isinstance(kind, str) else None,
        params={str(key): str(value) for key, value in params.items()} if isinstance(params, dict) else {},
    )
    if isinstance(tags, dict) and tags:
        with translated(mlflow.uri):
            mlflow.client.set_logged_model_tags(found, {str(key): str(value) for key, value in tags.items()})
