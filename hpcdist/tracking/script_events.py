"""Upload of the parameters, tags, datasets and models that the code of the ranks has logged with MLflow."""

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from hpcdist.config.redaction import redact_tree
from hpcdist.errors import TrackingError
from hpcdist.host.json_files import read_json
from hpcdist.run.folder import RunDir
from hpcdist.run.mlflow_limits import clean_name
from hpcdist.tracking import artifacts
from hpcdist.tracking.artifacts import log_model
from hpcdist.tracking.journal import Event
from hpcdist.tracking.mlflow_client import MlflowRun, entities, translated
from hpcdist.tracking.rank_records import SCRIPT_PREFIX

log = logging.getLogger(__name__)

#: Tags of MLflow that hpcdist sets.
_OWN_TAGS = ("hpcdist.", "mlflow.note.content", "mlflow.runName", "mlflow.source.", "mlflow.user", "mlflow.parentRunId")
#: Context of a script's run, which hpcdist records for the run itself.
_CONTEXT_TAGS = ("mlflow.user", "mlflow.source.")
#: Limits of MLflow for the schema and the profile of a dataset.
_MAX_SOURCE = 65_535


def send_events(
    events: Iterable[Event], mlflow_run: MlflowRun, run: RunDir, params_of_config: Mapping[str, str]
) -> None:
    """Upload events. Sending the same ones again leads to the same result.

    Names that hpcdist uses itself get the prefix `script.`: parameters that the config has with another value, the
    tags `hpcdist.…`, and MLflow's own tags of a run, such as its name and its description.

    Args:
        params_of_config: the parameters that MLflow has of the run's config.
    """
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
        else:
            dataset = _dataset(content)
            if dataset is not None:
                datasets.append(dataset)
    mlflow_run.log_params(_params_of_script(redact_tree(params), params_of_config))
    mlflow_run.set_tags(_tags_of_script(redact_tree(tags)))
    if datasets:
        with _skipped_if_rejected(mlflow_run, "datasets"), translated(mlflow_run.uri):
            mlflow_run.client.log_inputs(mlflow_run.run_id, datasets=datasets)
    for model_id in models:
        with _skipped_if_rejected(mlflow_run, f"model {model_id}"):
            _ship_logged_model(mlflow_run, run, model_id)


def _params_of_script(params: Mapping[str, str], params_of_config: Mapping[str, str]) -> dict[str, str]:
    """Return the parameters of a script under the names that they have in MLflow, without those of the config."""
    of_config = {clean_name(key): value for key, value in params_of_config.items()}
    renamed = {}
    for key, value in params.items():
        configured = of_config.get(clean_name(key))
        if configured is None:
            renamed[key] = value
        elif not _is_same(configured, value):
            renamed[SCRIPT_PREFIX + key] = value
    return renamed


@contextmanager
def _skipped_if_rejected(mlflow_run: MlflowRun, what: str) -> Iterator[None]:
    """Log a warning if MLflow rejects a request for good: the rest must be uploaded."""
    try:
        yield
    except TrackingError as error:
        if error.code != "INVALID_PARAMETER_VALUE":
            raise
        mlflow_run.require_active()  # a deleted run gives the same error code
        log.warning("%s of the script: not uploaded: %s", what, error)


def _tags_of_script(tags: Mapping[str, str]) -> dict[str, str]:
    """Return the tags of a script under the names that they have in MLflow, without those of its context."""
    renamed = {}
    for key, value in tags.items():
        if key.startswith(_CONTEXT_TAGS):
            continue
        if key.startswith(_OWN_TAGS):
            key = SCRIPT_PREFIX + key.removeprefix("mlflow.")
        renamed[key] = value
    return renamed


def _is_same(configured: str, value: str) -> bool:
    """Return whether two values of a parameter are equal, also in another notation: 5e-5 and 5e-05, true and True."""
    if configured.lower() == value.lower():
        return True
    try:
        return float(configured) == float(value)
    except ValueError:
        return False


def _dataset(content: Mapping[str, Any]) -> entities.DatasetInput | None:
    """Return the dataset of an event; None if the event is damaged."""
    match content:
        case {"dataset": {"name": str(), "digest": str()} as dataset}:
            keys = ("name", "digest", "source_type", "source", "schema")
            texts = {key: str(dataset.get(key) or "")[:_MAX_SOURCE] for key in keys}
            inputs = [entities.InputTag(key, value) for key, value in _texts_of(content.get("tags")).items()]
            return entities.DatasetInput(entities.Dataset(**texts), inputs)
    return None


def _texts_of(values: object) -> dict[str, str]:
    """Return the keys and values of a part of a file as text; empty if it has none."""
    if not isinstance(values, dict):
        return {}
    return {str(key): str(value) for key, value in values.items()}


def _ship_logged_model(mlflow_run: MlflowRun, run: RunDir, model_id: str) -> None:
    """Upload a model of a rank as a logged model of the run, or only its tags if it has been uploaded."""
    folder = run.logged_models / model_id
    saved = read_json(folder / "model.json") or {}
    reason = artifacts.leaves_folder(folder, run)
    if reason:
        log.warning("%s: the model is not uploaded", reason)
        return
    # Values of another type than the store of a rank writes are replaced by defaults.
    step, name, kind = saved.get("step"), saved.get("name"), saved.get("type")
    logged_id = log_model(
        mlflow_run,
        folder / "files",
        model_id,
        step if type(step) is int else 0,
        name=name if isinstance(name, str) else "model",
        model_type=kind if isinstance(kind, str) else None,
        params=_texts_of(saved.get("params")),
    )
    tags = _texts_of(saved.get("tags"))
    if tags:
        with translated(mlflow_run.uri):
            mlflow_run.client.set_logged_model_tags(logged_id, tags)
