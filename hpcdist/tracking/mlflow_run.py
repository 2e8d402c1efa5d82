"""One MLflow run, and all that is ever asked of MLflow: the only module that imports it.

Every call may be repeated: after a crash or a lost answer the same call leaves the same result.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from hpcdist.errors import RunFolderError, TrackingError
from hpcdist.files.atomic import write_json
from hpcdist.files.lock import flock_if_possible
from hpcdist.run.folder import RunDir, read_record
from hpcdist.run.runs_dir import make_database
from hpcdist.tracking.names import clean_name
from hpcdist.tracking.tail import Point
from hpcdist.tracking.uri import redact_uri, sqlite_path

# MLflow reads these when it is imported or used. Its own retries would hold a process for minutes, and they could
# create a run twice; the shipper has its own.
for _name, _value in {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "15",
    "MLFLOW_ARTIFACT_UPLOAD_DOWNLOAD_TIMEOUT": "600",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    # At a run's end MLflow prints links with the tracking URI as it is, password included.
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}.items():
    os.environ.setdefault(_name, _value)

from google.protobuf.json_format import ParseError  # type: ignore[import-untyped]  # noqa: E402
from mlflow import MlflowClient  # noqa: E402
from mlflow.entities import LoggedModel, LoggedModelOutput, Metric, Param, Run, RunTag  # noqa: E402
from mlflow.exceptions import MlflowException  # noqa: E402
from requests.exceptions import RequestException  # noqa: E402
from sqlalchemy.exc import SQLAlchemyError  # noqa: E402

log = logging.getLogger(__name__)
# The client comments on answers that are not MLflow's; this module reports them itself, in one line.
for _name in ("mlflow.exceptions", "mlflow.utils.rest_utils"):
    logging.getLogger(_name).setLevel(logging.ERROR)

UID_TAG = "hpcdist.run_uid"
MODEL_NAME = "model"
_MAX_METRICS = 1000
_MAX_TAGS = 100


#: What the client raises when its server, a proxy in between, or its disk fails.
_FAILURES = (MlflowException, RequestException, SQLAlchemyError, OSError)
#: What it raises when a field of an answer is missing or has another type: it does not check its answers.
_MALFORMED = (ParseError, ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError)


@contextmanager
def _translated(uri: str) -> Iterator[None]:
    """Turn every failure of MLflow, its server or its disk into a TrackingError of one line."""
    try:
        yield
    except _FAILURES as error:
        raise TrackingError(f"MLflow at {redact_uri(uri)}: {_reason(error)}") from error
    except _MALFORMED as error:
        raise TrackingError(
            f"MLflow at {redact_uri(uri)}: the answer is not one of MLflow's ({type(error).__name__}: {_reason(error)})"
        ) from error


def _reason(error: Exception) -> str:
    text = " ".join(redact_uri(str(error)[:10_000]).split())
    head, mark, body = text.partition(" Response body: ")
    if mark and "<" in body[:200]:
        text = f"{head} The answer is an HTML page: is this the address of an MLflow server?"
    return f"{text[:300]}{'…' if len(text) > 300 else ''}"


def _identified(value: object, what: str) -> str:
    """Return an identifier of an answer. Raises ValueError where it has none: an empty object parses as any answer."""
    if not isinstance(value, str) or not value:
        raise ValueError(f"{what} without an id")
    return value


def open_client(uri: str) -> MlflowClient:
    """A client on a store that is ready for use.

    A new sqlite database gets its tables here, by one process at a time: several at once would destroy each other's.
    Raises TrackingError when the store cannot be reached, or is a database of another user.
    """
    database = sqlite_path(uri)
    with _translated(uri):
        if database is None:
            return _ready(uri)
        try:
            make_database(database)
        except RunFolderError as error:
            raise TrackingError(str(error)) from error
        with open(f"{database}.lock", "a", opener=partial(os.open, mode=0o600)) as lock:
            flock_if_possible(lock)
            return _ready(uri)


def _ready(uri: str) -> MlflowClient:
    """A client that has asked its store once, which makes the tables of a new database."""
    client = MlflowClient(tracking_uri=uri, registry_uri=uri)
    client.search_experiments(max_results=1)
    return client


class MlflowRun:
    """The MLflow run that belongs to a run folder. All methods raise TrackingError when MLflow refuses or is away."""

    def __init__(self, run: RunDir, uri: str) -> None:
        """Find the run's MLflow run, or create it; `mlflow.json` remembers which one it is."""
        self.uri = uri
        self._client = open_client(uri)
        self._folder = run
        saved = read_record(run.mlflow) or {}
        for key in ("run_uid", "run_id"):
            if not isinstance(saved.get(key, ""), str):
                raise TrackingError(f"{run.mlflow} is damaged: {key} cannot be {str(saved[key])[:40]!r}")
        if "run_uid" not in saved:
            # On disk before the run exists: whoever dies after creating it finds it again by this.
            saved["run_uid"] = uuid.uuid4().hex
            write_json(run.mlflow, saved, durable=True)
        with _translated(uri):
            found = self._known(saved) or self._find_or_create(saved["run_uid"])
            self.run_id = _identified(found.info.run_id, "a run")
            self.experiment_id = _identified(found.info.experiment_id, "a run's experiment")
        ids = {"uri": redact_uri(uri), "experiment_id": self.experiment_id, "run_id": self.run_id}
        if saved | ids != saved:
            write_json(run.mlflow, saved | ids, durable=True)

    def _known(self, saved: Mapping[str, Any]) -> Run | None:
        """The run that `mlflow.json` names; None when there is none, or when the URI is another store's."""
        run_id = saved.get("run_id")
        if not run_id:
            return None
        found = self._get(run_id)
        if found is None and saved.get("uri") == redact_uri(self.uri):
            raise TrackingError(
                f"run {run_id} is not in MLflow at {redact_uri(self.uri)} any more: bring its database back, or"
                f" remove {self._folder.mlflow} to ship everything again as a new run"
            )
        return found

    def _get(self, run_id: str) -> Run | None:
        try:
            found = self._client.get_run(run_id)
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return None
            raise
        if found.info.lifecycle_stage == "deleted":
            raise TrackingError(
                f"run {run_id} is deleted in MLflow at {redact_uri(self.uri)}: bring it back with"
                f" `mlflow runs restore --run-id {run_id}`"
            )
        return found

    def _find_or_create(self, uid: str) -> Run:
        experiment = self._experiment()
        found = self._client.search_runs([experiment], filter_string=f"tags.`{UID_TAG}` = '{uid}'", max_results=1)
        if found:
            return found[0]
        return self._client.create_run(
            experiment,
            start_time=int(self._folder.read_state().created * 1000),
            tags={UID_TAG: uid},
            run_name=self._folder.name,
        )

    def _experiment(self) -> str:
        name = self._folder.experiment
        for _ in range(2):
            found = self._client.get_experiment_by_name(name)
            if found is not None and found.lifecycle_stage == "deleted":
                raise TrackingError(
                    f"experiment {name} is deleted in MLflow at {redact_uri(self.uri)}: bring it back with `mlflow"
                    f" experiments restore --experiment-id {found.experiment_id}`, or choose another `experiment`"
                )
            if found is not None:
                return _identified(found.experiment_id, "an experiment")
            try:
                location = self._artifact_location(name)
                return _identified(self._client.create_experiment(name, location), "an experiment")
            except MlflowException as error:
                if error.error_code != "RESOURCE_ALREADY_EXISTS":
                    raise
        raise TrackingError(f"experiment {name} cannot be created in MLflow at {redact_uri(self.uri)}")

    def _artifact_location(self, experiment: str) -> str | None:
        """With a server its own choice; with a bare database beside it, not wherever this process happens to run."""
        if self.uri.startswith(("http://", "https://", "databricks")):
            return None
        database = sqlite_path(self.uri)
        folder = (database.parent if database is not None else self._folder.path.parent.parent) / "mlartifacts"
        folder.mkdir(mode=0o700, exist_ok=True)  # it holds copies of files that are the owner's alone
        return (folder.absolute() / experiment).as_uri()

    def log_points(self, points: Sequence[Point]) -> int:
        """Send points; returns how many of them MLflow refuses for ever (each with a warning)."""
        refused = 0
        for start in range(0, len(points), _MAX_METRICS):
            refused += self._log_batch(
                [Metric(p.key, p.value, p.time_ms, p.step) for p in points[start:][:_MAX_METRICS]]
            )
        return refused

    def _log_batch(self, metrics: list[Metric]) -> int:
        try:
            with _translated(self.uri):
                self._client.log_batch(self.run_id, metrics=metrics, synchronous=True)
            return 0
        except TrackingError as error:
            cause = error.__cause__
            too_large = isinstance(cause, MlflowException) and " error code 413 " in str(cause) and len(metrics) > 1
            if not too_large:
                if not isinstance(cause, MlflowException) or cause.error_code != "INVALID_PARAMETER_VALUE":
                    raise
                with _translated(self.uri):
                    if self._get(self.run_id) is None:  # a deleted run is refused with the same code
                        raise
            if len(metrics) == 1:
                log.warning("metric %s of step %d left out: %s", metrics[0].key, metrics[0].step, error)
                return 1
            middle = len(metrics) // 2
            return self._log_batch(metrics[:middle]) + self._log_batch(metrics[middle:])

    def log_params(self, params: Mapping[str, str]) -> None:
        """Log parameters. MLflow's cannot change: what a resume changed becomes a tag `hpcdist.changed.<key>`."""
        with _translated(self.uri):
            there = self._client.get_run(self.run_id).data.params
            new = [Param(key, value) for key, value in params.items() if key not in there]
            for start in range(0, len(new), _MAX_TAGS):
                self._client.log_batch(self.run_id, params=new[start : start + _MAX_TAGS], synchronous=True)
        self.set_tags({clean_name(f"hpcdist.changed.{k}"): v for k, v in params.items() if there.get(k, v) != v})

    def set_tags(self, tags: Mapping[str, str]) -> None:
        pairs = [RunTag(key, value) for key, value in tags.items()]
        with _translated(self.uri):
            for start in range(0, len(pairs), _MAX_TAGS):
                self._client.log_batch(self.run_id, tags=pairs[start : start + _MAX_TAGS], synchronous=True)

    def set_status(self, status: str, ended_ms: int | None) -> None:
        """Set MLflow's status: RUNNING without an end, or FINISHED, FAILED, KILLED with one."""
        with _translated(self.uri):
            if ended_ms is None:
                self._client.update_run(self.run_id, status=status)
            else:
                self._client.set_terminated(self.run_id, status, end_time=ended_ms)

    def upload(self, source: Path, target: str) -> None:
        """Upload a file as `target`, or a folder's content into `target`."""
        with _translated(self.uri):
            if source.is_dir():
                self._client.log_artifacts(self.run_id, str(source), target)
                return
            folder, _, name = target.rpartition("/")
            assert name == source.name
            self._client.log_artifact(self.run_id, str(source), folder or None)

    def log_model(self, folder: Path, fingerprint: str, step: int) -> str:
        """Make a folder in MLflow's model layout a logged model of this run; returns its id.

        It loads as `models:/<id>` and as `runs:/<run_id>/model`, and the run's page lists it.
        """
        with _translated(self.uri):
            model = self._find_model(fingerprint) or self._client.create_logged_model(
                self.experiment_id,
                name=MODEL_NAME,
                source_run_id=self.run_id,
                tags={"hpcdist.fingerprint": fingerprint},
                params=self._client.get_run(self.run_id).data.params,
            )
            self._client.log_model_artifacts(model.model_id, str(folder))
            self._describe(model, folder)
            outputs = self._client.get_run(self.run_id).outputs
            if outputs is None or all(item.model_id != model.model_id for item in outputs.model_outputs):
                self._client.log_outputs(self.run_id, [LoggedModelOutput(model.model_id, step=step)])
            self._client.finalize_logged_model(model.model_id, "READY")
            return str(model.model_id)

    def _find_model(self, fingerprint: str) -> LoggedModel | None:
        found = self._client.search_logged_models(
            [self.experiment_id], f"name = '{MODEL_NAME}' AND source_run_id = '{self.run_id}'"
        )
        return next((model for model in found if model.tags.get("hpcdist.fingerprint") == fingerprint), None)

    def _describe(self, model: LoggedModel, folder: Path) -> None:
        """Put the ids into the model's own description, as `mlflow.pytorch.log_model` would have."""
        ids = {"model_id": model.model_id, "model_uuid": model.model_id, "run_id": self.run_id}
        content = yaml.safe_load((folder / "MLmodel").read_text())
        with tempfile.TemporaryDirectory() as temporary:
            path = Path(temporary, "MLmodel")
            path.write_text(yaml.safe_dump(content | ids | {"artifact_path": model.artifact_location}))
            self._client.log_model_artifact(model.model_id, str(path))

    def register(self, model_id: str, name: str) -> str:
        """Register a logged model; returns `name/version`. A model gets one version only."""
        with _translated(self.uri):
            model = self._client.get_logged_model(model_id)
            try:
                self._client.create_registered_model(name)
            except MlflowException as error:
                if error.error_code != "RESOURCE_ALREADY_EXISTS":
                    raise
            known = self._client.search_model_versions(f"name = '{name}' AND run_id = '{self.run_id}'")
            # Not `models:/<id>`: a database would look that up wherever MLflow's global tracking URI points.
            source = model.artifact_location
            found = next((version for version in known if version.source == source), None)
            version = (
                found or self._client.create_model_version(name, source, run_id=self.run_id, model_id=model_id)
            ).version
            versions = json.dumps([{"name": name, "version": int(version)}])
            self._client.set_logged_model_tags(model_id, {"mlflow.modelVersions": versions})
            return f"{name}/{version}"
