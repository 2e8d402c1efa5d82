"""The kept checkpoints of a run as logged models of MLflow, without an upload of their files.

Each checkpoint on disk has one external logged model with its step, folder, hash and metrics. A model whose checkpoint
was removed is deleted in MLflow, so that the tab *Models* lists the existing checkpoints only.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcdist.errors import TrackingError
from hpcdist.files import retry
from hpcdist.files.bounded_json import read_json_value
from hpcdist.files.ownership import stays_inside
from hpcdist.review.checkpoints import finite_number
from hpcdist.run.folder import RunDir
from hpcdist.run.saved_checkpoints import MANIFEST_FILE, complete_checkpoints
from hpcdist.tracking.artifacts.run_files import fingerprint
from hpcdist.tracking.client.mlflow_client import (
    MlflowException,
    all_pages,
    entities,
    is_unsupported,
    require_id,
    translated,
)
from hpcdist.tracking.client.mlflow_run import MlflowRun
from hpcdist.tracking.journal.names import clean_metric_name

log = logging.getLogger(__name__)

MODEL_TYPE = "checkpoint"
_SHA_TAG = "hpcdist.checkpoint.sha256"
_STEP_TAG = "hpcdist.checkpoint.step"
_NOTE_TAG = "mlflow.note.content"
#: MLflow marks models with this tag if their files are not among its artifacts.
_EXTERNAL_TAG = "mlflow.model.isExternal"
_PAGE = 100


@dataclass(frozen=True, kw_only=True)
class KeptCheckpoint:
    """A complete checkpoint on disk, as its manifest describes it.

    Attributes:
        sha256: SHA-256 of the list of the files' hashes, in the format of the command `sha256sum *.pt`.
        metrics: finite metrics by their names in MLflow.
        created_ms: Unix time in ms.
    """

    folder: Path
    step: int
    created_ms: int
    num_bytes: int
    world_size: int
    sha256: str
    metrics: Mapping[str, float]

    @property
    def key(self) -> tuple[str, str]:
        """Step and hash. Checkpoints of different steps may have the same content."""
        return str(self.step), self.sha256

    @property
    def tags(self) -> dict[str, str]:
        """Tags of the logged model. MLflow's page shows only the description."""
        return {_EXTERNAL_TAG: "true", _SHA_TAG: self.sha256, _STEP_TAG: str(self.step), _NOTE_TAG: self.description}

    @property
    def params(self) -> dict[str, str]:
        """Parameters of the logged model, which MLflow's page shows."""
        return {
            "step": str(self.step),
            "path": _text(str(self.folder)),
            "sha256": self.sha256,
            "bytes": str(self.num_bytes),
            "world_size": str(self.world_size),
        }

    @property
    def description(self) -> str:
        """What the checkpoint is and how to load it, as Markdown."""
        path, name = _text(str(self.folder)), self.folder.parents[1].name
        return (
            f"Checkpoint of step {self.step}, in the run folder: `{path}`\n\n"
            "```python\nfrom hpcdist.checkpoint.weights import load_weights\n\n"
            f"folder = {path!r}\nstate_dict = load_weights(folder)\n```\n\n"
            f"`hpcdist export {_text(name)} --checkpoint {self.step} --format safetensors` writes the weights to a file"
            " that other programs load without hpcdist. The parameter `sha256` is that of the output of"
            " `sha256sum *.pt`.\n"
        )


def _text(name: str) -> str:
    """Return a file name without lone surrogates."""
    return name.encode(errors="replace").decode()


def manifests(run: RunDir) -> dict[str, str]:
    """Return the checkpoint folders that are complete, each with a text that changes with its manifest."""
    found = {}
    for _, folder in complete_checkpoints(run):
        path = folder / MANIFEST_FILE
        # The manifest of a linked folder outside of the run is not this run's.
        if (mark := fingerprint(path)) and stays_inside(path, run.path):
            found[folder.name] = mark
    return found


def read_checkpoint(folder: Path) -> KeptCheckpoint | None:
    """Return the checkpoint in a folder; None if it has just been removed or its manifest is damaged.

    Raises OSError if the manifest cannot be read.
    """
    path = folder / MANIFEST_FILE
    try:
        raw = retry.retry(lambda: read_json_value(path), path)
        files = sorted((str(name), str(one["sha256"]), int(one["bytes"])) for name, one in raw["files"].items())
        metrics = {clean_metric_name(key): finite_number(value) for key, value in raw["metrics"].items()}
        return KeptCheckpoint(
            folder=folder,
            step=int(raw["step"]),
            created_ms=int(1000 * raw["created"]),
            num_bytes=sum(size for _, _, size in files),
            world_size=int(raw["world_size"]),
            sha256=hashlib.sha256("".join(f"{sha}  {name}\n" for name, sha, _ in files).encode()).hexdigest(),
            metrics={key: value for key, value in metrics.items() if value is not None},
        )
    except (FileNotFoundError, ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        log.debug("checkpoint %s is not logged as a model: %s", folder, error)
        return None


class CheckpointModels:
    """The logged models of one run's checkpoints. Methods raise TrackingError if MLflow fails or rejects a request.

    MLflow holds the state: models are found by the hash of their checkpoint before one is created, and again after
    each failure, so that a checkpoint never has two of them.

    Args:
        done: checkpoint folder → manifest that MLflow has completely, of an earlier process; `update` changes it.
    """

    def __init__(self, run: RunDir, mlflow: MlflowRun, done: dict[str, str]) -> None:
        self._run = run
        self._mlflow = mlflow
        self._done = done
        #: Key of a checkpoint → its logged model; None before the first search.
        self._models: dict[tuple[str, str], entities.LoggedModel] | None = None
        self._is_supported = True

    def update(self, *, all_sent: bool) -> bool:
        """Create, complete and delete logged models as the checkpoints on disk require. Returns whether any changed.

        Args:
            all_sent: MLflow has all records of the journal. If not, metrics that it lacks are left for a later call.
        """
        found = manifests(self._run)
        if found == self._done or not self._is_supported:
            return False
        all_kept = {name: read_checkpoint(self._run.checkpoints / name) for name in found}
        try:
            with translated(self._mlflow.uri):
                points = _RunPoints(self._mlflow, all_sent=all_sent)
                self._update(found, {name: kept for name, kept in all_kept.items() if kept is not None}, points)
        except TrackingError as error:
            self._models = None  # a request without a response may have been executed
            cause = error.__cause__
            if not isinstance(cause, MlflowException) or not is_unsupported(cause):
                raise
            self._is_supported = False
            log.debug("checkpoints are not logged as models, which this MLflow does not support: %s", error)
        return True

    def log_final_metrics(self, model_id: str, last_step: int) -> None:
        """Give the final model the metrics of the newest checkpoint, unless that is older than the last logged step."""
        newest = next(reversed(manifests(self._run)), None)
        kept = read_checkpoint(self._run.checkpoints / newest) if newest is not None else None
        if kept is not None and kept.step >= last_step:
            with translated(self._mlflow.uri):
                model = self._mlflow.client.get_logged_model(model_id)
                self._log_metrics(model, kept, _RunPoints(self._mlflow, all_sent=True))

    def _update(self, found: Mapping[str, str], kept: Mapping[str, KeptCheckpoint], points: _RunPoints) -> None:
        if self._models is None:
            self._models = {
                (model.tags.get(_STEP_TAG, ""), model.tags[_SHA_TAG]): model
                for model in self._search()
                if _SHA_TAG in model.tags
            }
        for name, one in kept.items():
            # A model that is complete according to an earlier call, but not in MLflow, was deleted there by a user.
            if self._done.get(name) != found[name]:
                model = self._models.get(one.key) or self._create(one)
                self._models[one.key] = model
                if self._log_metrics(model, one, points):
                    self._done[name] = found[name]
        for key in self._models.keys() - {one.key for one in kept.values()}:
            self._delete(self._models[key].model_id)
            del self._models[key]
        for name in self._done.keys() - found.keys():
            del self._done[name]

    def _search(self) -> Iterator[entities.LoggedModel]:
        yield from all_pages(
            self._mlflow.client.search_logged_models,
            [self._mlflow.experiment_id],
            f"source_run_id = '{self._mlflow.run_id}'",
            max_results=_PAGE,
        )

    def _create(self, kept: KeptCheckpoint) -> entities.LoggedModel:
        model = self._mlflow.client.create_logged_model(
            self._mlflow.experiment_id,
            name=kept.folder.name,
            source_run_id=self._mlflow.run_id,
            tags=kept.tags,
            params=kept.params,
            model_type=MODEL_TYPE,
        )
        require_id(model.model_id, "a logged model")
        return model

    def _log_metrics(self, model: entities.LoggedModel, kept: KeptCheckpoint, points: _RunPoints) -> bool:
        """Log the metrics that the model lacks, and set its status to ready. Returns whether it has all metrics."""
        logged = {metric.key for metric in model.metrics or ()}
        missing = {key: value for key, value in kept.metrics.items() if key not in logged}
        metrics = [
            entities.Metric(key, *point, kept.step, model_id=model.model_id)
            for key, value in missing.items()
            if (point := points.at(key, kept, value)) is not None
        ]
        if metrics:
            self._mlflow.client.log_batch(self._mlflow.run_id, metrics=metrics, synchronous=True)
        if str(model.status) != "READY":
            self._mlflow.client.finalize_logged_model(model.model_id, "READY")
        return len(metrics) == len(missing)

    def _delete(self, model_id: str) -> None:
        try:
            self._mlflow.client.delete_logged_model(model_id)
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise


class _RunPoints:
    """The points of the run at the steps of checkpoints.

    MLflow stores a metric of a model as a point of its run, too. Only a point with the time and value of the run's own
    point is stored once.
    """

    def __init__(self, mlflow: MlflowRun, *, all_sent: bool) -> None:
        self._mlflow = mlflow
        self._all_sent = all_sent
        self._points: dict[str, dict[int, tuple[float, int]]] = {}

    def at(self, key: str, kept: KeptCheckpoint, value: float) -> tuple[float, int] | None:
        """Return value and time in ms of a metric at the step of a checkpoint; None if the run's point is to come.

        A metric that the trainer has saved in the checkpoint but not logged has the value and time of the checkpoint.
        """
        if key not in self._points:
            history: list[Any] = self._mlflow.client.get_metric_history(self._mlflow.run_id, key)
            self._points[key] = {metric.step: (metric.value, metric.timestamp) for metric in reversed(history)}
        point = self._points[key].get(kept.step)
        return point or ((value, kept.created_ms) if self._all_sent else None)
