"""The MLflow run of a run folder.

All methods are idempotent: after a crash or a lost response, the same call leads to the same result.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpcdist.config.redaction import redact_text
from hpcdist.errors import TrackingError
from hpcdist.host.files import make_private, write_json
from hpcdist.run.folder import RunDir, own_place, read_record
from hpcdist.run.records import began_of
from hpcdist.tracking.journal import clean_name
from hpcdist.tracking.mlflow_client import entities, open_client, require_id, tolerated, translated
from hpcdist.tracking.points import Point
from hpcdist.tracking.uri import sqlite_path

log = logging.getLogger(__name__)

UID_TAG = "hpcdist.run_uid"
#: Limits of one request to MLflow.
_MAX_METRICS = 1000
_MAX_TAGS = 100


class MlflowRun:
    """The MLflow run of a run folder. All methods raise TrackingError if MLflow fails or rejects a request."""

    def __init__(self, run: RunDir, uri: str) -> None:
        """Find or create the MLflow run; `mlflow.json` records its id."""
        self.uri = uri
        self.client = open_client(uri)
        self._folder = run
        saved = read_record(run.mlflow) or {}
        for key in ("run_uid", "run_id"):
            if not isinstance(saved.get(key, ""), str):
                raise TrackingError(f"{run.mlflow} is damaged: {key} cannot be {str(saved[key])[:40]!r}")
        if "run_uid" not in saved:
            # Written before the run is created: after a crash the run is found by this tag.
            saved["run_uid"] = uuid.uuid4().hex
            write_json(run.mlflow, saved, durable=True)
        with translated(uri):
            found = self._known(saved) or self._find_or_create(saved["run_uid"])
            self.start_ms = int(found.info.start_time or 0)
            self.run_id = require_id(found.info.run_id, "a run")
            self.experiment_id = require_id(found.info.experiment_id, "a run's experiment")
        ids = {"uri": redact_text(uri), "experiment_id": self.experiment_id, "run_id": self.run_id}
        if saved | ids != saved:
            write_json(run.mlflow, saved | ids, durable=True)

    def _known(self, saved: Mapping[str, Any]) -> entities.Run | None:
        """Return the run that `mlflow.json` names; None if it names none, or one of another store."""
        run_id = saved.get("run_id")
        if not run_id:
            return None
        found = self._get(run_id)
        if found is None and saved.get("uri") == redact_text(self.uri):
            raise TrackingError(
                f"run {run_id} is no longer in MLflow at {redact_text(self.uri)}: restore its database, or"
                f" remove {self._folder.mlflow} to upload everything again as a new run"
            )
        return found

    def _get(self, run_id: str) -> entities.Run | None:
        found = None
        with tolerated("RESOURCE_DOES_NOT_EXIST"):
            found = self.client.get_run(run_id)
        if found is not None and found.info.lifecycle_stage == "deleted":
            raise TrackingError(
                f"run {run_id} is deleted in MLflow at {redact_text(self.uri)}: restore it with"
                f" `mlflow runs restore --run-id {run_id}`"
            )
        return found

    def _find_or_create(self, uid: str) -> entities.Run:
        experiment = self._experiment()
        found = self.client.search_runs([experiment], filter_string=f"tags.`{UID_TAG}` = '{uid}'", max_results=1)
        if found:
            return found[0]
        return self.client.create_run(
            experiment,
            start_time=int(began_of(self._folder) * 1000),
            tags={UID_TAG: uid},
            run_name=self._folder.name,
        )

    def _experiment(self) -> str:
        name = self._folder.experiment
        for _ in range(2):
            found = self.client.get_experiment_by_name(name)
            if found is not None and found.lifecycle_stage == "deleted":
                raise TrackingError(
                    f"experiment {name} is deleted in MLflow at {redact_text(self.uri)}: restore it with `mlflow"
                    f" experiments restore --experiment-id {found.experiment_id}`, or choose another `experiment`"
                )
            if found is not None:
                return require_id(found.experiment_id, "an experiment")
            with tolerated("RESOURCE_ALREADY_EXISTS"):
                location = self._artifact_location(name)
                return require_id(self.client.create_experiment(name, location), "an experiment")
        raise TrackingError(f"experiment {name} cannot be created in MLflow at {redact_text(self.uri)}")

    def _artifact_location(self, experiment: str) -> str | None:
        """Return a folder beside a local database; None for a server, which chooses the location itself."""
        if self.uri.startswith(("http://", "https://", "databricks")):
            return None
        database = sqlite_path(self.uri)
        place = database.parent if database is not None else own_place(self._folder.path.parent.parent)
        make_private(folder := place / "mlartifacts")  # it holds copies of private files
        return (folder.absolute() / experiment).as_uri()

    def log_points(self, points: Sequence[Point]) -> int:
        """Log points. Returns the number that MLflow rejects permanently, each with a warning."""
        refused = 0
        for start in range(0, len(points), _MAX_METRICS):
            refused += self._log_batch(
                [entities.Metric(p.key, p.value, p.time_ms, p.step) for p in points[start:][:_MAX_METRICS]]
            )
        return refused

    def _log_batch(self, metrics: list[entities.Metric]) -> int:
        try:
            with translated(self.uri):
                self.client.log_batch(self.run_id, metrics=metrics, synchronous=True)
            return 0
        except TrackingError as error:
            if len(metrics) == 1 or " error code 413 " not in str(error.__cause__):
                if error.code != "INVALID_PARAMETER_VALUE":
                    raise
                self.require_active()  # a deleted run gives the same error code
            if len(metrics) == 1:
                log.warning("metric %s of step %d is omitted: %s", metrics[0].key, metrics[0].step, error)
                return 1
            middle = len(metrics) // 2
            return self._log_batch(metrics[:middle]) + self._log_batch(metrics[middle:])

    def require_active(self) -> None:
        """Raise TrackingError if the run is no longer in MLflow, or is deleted there."""
        with translated(self.uri):
            if self._get(self.run_id) is None:
                raise TrackingError(f"run {self.run_id} is no longer in MLflow at {redact_text(self.uri)}")

    def log_params(self, params: Mapping[str, str]) -> None:
        """Log parameters; since MLflow's are immutable, a changed one becomes a tag `hpcdist.changed.<key>`."""
        with translated(self.uri):
            data = self.client.get_run(self.run_id).data
            logged, tag = data.params, "hpcdist.changed.{}".format
            new = [entities.Param(key, value) for key, value in params.items() if key not in logged]
            for start in range(0, len(new), _MAX_TAGS):
                self.client.log_batch(self.run_id, params=new[start : start + _MAX_TAGS], synchronous=True)
        tags = {clean_name(tag(k)): (v, logged.get(k, v)) for k, v in params.items()}
        self.set_tags({name: now for name, (now, first) in tags.items() if data.tags.get(name, first) != now})

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Set tags of the run."""
        pairs = [entities.RunTag(key, value) for key, value in tags.items()]
        with translated(self.uri):
            for start in range(0, len(pairs), _MAX_TAGS):
                self.client.log_batch(self.run_id, tags=pairs[start : start + _MAX_TAGS], synchronous=True)

    def current(self) -> entities.Run:
        """Return the run as MLflow has it now."""
        with translated(self.uri):
            return self.client.get_run(self.run_id)

    def delete_tag(self, key: str) -> None:
        """Delete a tag of the run, if it has it."""
        with translated(self.uri), tolerated("RESOURCE_DOES_NOT_EXIST"):
            self.client.delete_tag(self.run_id, key)

    def set_status(self, status: str, ended_ms: int | None) -> None:
        """Set MLflow's status; FINISHED, FAILED and KILLED come with an end time."""
        with translated(self.uri):
            if ended_ms is None:
                self.client.update_run(self.run_id, status=status)
            else:
                self.client.set_terminated(self.run_id, status, end_time=ended_ms)

    def upload(self, source: Path, target: str) -> None:
        """Upload a file as `target`, or the content of a folder into `target`."""
        with translated(self.uri):
            if source.is_dir():
                self.client.log_artifacts(self.run_id, str(source), target)
                return
            folder, _, name = target.rpartition("/")
            if name == source.name:
                self.client.log_artifact(self.run_id, str(source), folder or None)
                return
            with tempfile.TemporaryDirectory() as temporary:  # MLflow takes the name from the file
                path = shutil.copyfile(source, Path(temporary, name))
                self.client.log_artifact(self.run_id, str(path), folder or None)
