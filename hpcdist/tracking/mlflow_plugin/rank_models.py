"""Logged models of the code of a rank: folders in `logged_models/`, which the shipper turns into MLflow's.

logged_models/m-…/model.json     name, type, tags, parameters, status, step
logged_models/m-…/files/         the model in MLflow's format
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

from mlflow.entities import (
    LoggedModel,
    LoggedModelOutput,
    LoggedModelParameter,
    LoggedModelStatus,
    LoggedModelTag,
)
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import RESOURCE_DOES_NOT_EXIST
from mlflow.store.entities.paged_list import PagedList
from mlflow.store.tracking.abstract_store import AbstractStore
from mlflow.utils.search_utils import SearchLoggedModelsUtils

from hpcdist.files.atomic import read_json, write_json
from hpcdist.tracking.mlflow_plugin.rank_records import SCHEME, RankRecords

MODEL_FILE, FILES = "model.json", "files"
_STATUS = {"READY": LoggedModelStatus.READY, "FAILED": LoggedModelStatus.FAILED}


class RankModels(AbstractStore):
    """The part of the tracking store that handles logged models."""

    _records: RankRecords

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._models: dict[str, dict[str, Any]] = {}

    def create_logged_model(
        self,
        experiment_id: str,
        name: str | None = None,
        source_run_id: str | None = None,
        tags: list[LoggedModelTag] | None = None,
        params: list[LoggedModelParameter] | None = None,
        model_type: str | None = None,
    ) -> LoggedModel:
        model_id = f"m-{uuid.uuid4().hex}"
        self._models[model_id] = {
            "name": name or "model",
            "type": model_type,
            "run": source_run_id,
            "created": int(time.time() * 1000),
            "status": "PENDING",
            "step": 0,
            "tags": {tag.key: tag.value for tag in tags or ()},
            "params": {param.key: param.value for param in params or ()},
        }
        self._save(model_id)
        return self.get_logged_model(model_id)

    def get_logged_model(self, model_id: str, allow_deleted: bool = False) -> LoggedModel:
        model = self._model(model_id)
        return LoggedModel(
            experiment_id="0",
            model_id=model_id,
            name=model["name"],
            artifact_location=f"{SCHEME}://{self._records.run.logged_models / model_id / FILES}",
            creation_timestamp=model["created"],
            last_updated_timestamp=model["created"],
            model_type=model["type"],
            source_run_id=model["run"],
            status=_STATUS.get(model["status"], LoggedModelStatus.PENDING),
            tags=dict(model["tags"]),
            params=dict(model["params"]),
        )

    def search_logged_models(
        self,
        experiment_ids: list[str],
        filter_string: str | None = None,
        datasets: list[dict[str, Any]] | None = None,
        max_results: int | None = None,
        order_by: list[dict[str, Any]] | None = None,
        page_token: str | None = None,
    ) -> PagedList[LoggedModel]:
        models = [self.get_logged_model(model_id) for model_id in self._models]
        found = SearchLoggedModelsUtils.filter_logged_models(models, filter_string, datasets)
        return PagedList(SearchLoggedModelsUtils.sort(found, order_by)[:max_results], None)

    def finalize_logged_model(self, model_id: str, status: Any) -> LoggedModel:
        self._model(model_id)["status"] = status.value if isinstance(status, LoggedModelStatus) else str(status)
        self._save(model_id)
        return self.get_logged_model(model_id)

    def set_logged_model_tags(self, model_id: str, tags: Sequence[LoggedModelTag]) -> None:
        self._model(model_id)["tags"].update({tag.key: tag.value for tag in tags})
        self._save(model_id)

    def delete_logged_model_tag(self, model_id: str, key: str) -> None:
        if self._model(model_id)["tags"].pop(key, None) is not None:
            self._save(model_id)

    def log_logged_model_params(self, model_id: str, params: Sequence[LoggedModelParameter]) -> None:
        self._model(model_id)["params"].update({param.key: param.value for param in params})
        self._save(model_id)

    def log_outputs(self, run_id: str, models: Sequence[LoggedModelOutput]) -> None:
        for output in models:
            self._model(output.model_id).update(step=output.step, output=True)
            self._save(output.model_id)

    def outputs_of(self, run_id: str) -> list[LoggedModelOutput]:
        """Return the models that a run has logged."""
        return [
            LoggedModelOutput(model_id, step=model["step"])
            for model_id, model in self._models.items()
            if model.get("output") and model["run"] == run_id
        ]

    def record_logged_model(self, run_id: str, mlflow_model: Any) -> None:
        """Do nothing: MLflow 3 records a model as a logged model, not as a tag of the run."""

    def _model(self, model_id: str) -> dict[str, Any]:
        if model_id not in self._models:
            saved = read_json(self._records.run.logged_models / str(model_id) / MODEL_FILE)
            if saved is None:
                raise MlflowException(f"Logged model {model_id!r} is not of this run", RESOURCE_DOES_NOT_EXIST)
            self._models[model_id] = saved
        return self._models[model_id]

    def _save(self, model_id: str) -> None:
        """Write the model's file; once the model is complete, record an event for the shipper."""
        if not self._records.is_main:
            return
        folder = self._records.run.logged_models / model_id
        (folder / FILES).mkdir(parents=True, exist_ok=True)
        write_json(folder / MODEL_FILE, self._models[model_id])
        if self._models[model_id]["status"] == "READY":
            self._records.record("model", model_id)
