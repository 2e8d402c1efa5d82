"""MLflow for the code of a rank: a tracking store, an artifact repository and logged models in the run folder.

The shipper uploads their files. `mlflow.log_metric` and all loggers built on it write to the journal.

MLflow loads the store by the entry point `mlflow.tracking_store` for the scheme `hpcdist`; the worker of a rank sets
`MLFLOW_TRACKING_URI`. The store has one experiment with one run, which the shipper uploads:

- `start_run` and `create_run` join this run. A nested run becomes a prefix, `child/loss`, of its names.
- Another experiment is accepted with a warning. The end of the run in a script does not end the run of hpcdist.
- Searches and reads answer from the records of the rank, earlier attempts included.
"""

import logging
import os
import tempfile
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from mlflow import entities
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import INVALID_PARAMETER_VALUE, RESOURCE_DOES_NOT_EXIST
from mlflow.store.artifact.local_artifact_repo import LocalArtifactRepository
from mlflow.store.entities.paged_list import PagedList
from mlflow.store.tracking.abstract_store import AbstractStore
from mlflow.utils.async_logging.run_operations import RunOperations
from mlflow.utils.mlflow_tags import MLFLOW_PARENT_RUN_ID, MLFLOW_RUN_NAME
from mlflow.utils.search_utils import SearchExperimentsUtils, SearchLoggedModelsUtils, SearchUtils

from hpcdist.errors import HpcdistError
from hpcdist.host.json_files import read_json, write_json
from hpcdist.run.attempt_times import began_of
from hpcdist.tracking import rank_records
from hpcdist.tracking.artifacts import SCRIPT_FOLDER, is_own_name
from hpcdist.tracking.rank_records import SCHEME, RankRecords, run_id_of

log = logging.getLogger(__name__)
EXPERIMENT_ID = "0"
MODEL_FILE, FILES = "model.json", "files"
_STATUS = {"READY": entities.LoggedModelStatus.READY, "FAILED": entities.LoggedModelStatus.FAILED}


@dataclass
class _JoinedRun:
    """The run of hpcdist (no prefix), or a nested run, as the code of the rank sees it."""

    run_id: str
    name: str
    prefix: str = ""
    parent: str = ""
    status: str = "RUNNING"
    end_time: int | None = None
    datasets: list[entities.DatasetInput] = field(default_factory=list)

    def select(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values with the prefix of this run in their names, by their names without it."""
        selected = {}
        for key, value in values.items():
            if key.startswith(self.prefix):
                selected[key.removeprefix(self.prefix)] = value
        return selected


class RankStore(AbstractStore):
    """The tracking store; MLflow's `AbstractStore` documents the methods."""

    def __init__(self, store_uri: str, artifact_uri: str | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        known = rank_records.current()
        self._records = known if known is not None and known.uri == store_uri else RankRecords.of_uri(store_uri)
        run = self._records.run
        self._started = int(began_of(run) * 1000)
        self._main = _JoinedRun(run_id_of(run), run.name)
        self._runs = {self._main.run_id: self._main}
        self._models: dict[str, dict[str, Any]] = {}
        self._warned: set[str] = set()

    # --- experiments: there is one

    def _experiment(self) -> entities.Experiment:
        location = f"{SCHEME}://{self._records.run.artifacts}"
        name = self._records.run.experiment
        return entities.Experiment(
            EXPERIMENT_ID, name, location, entities.LifecycleStage.ACTIVE, creation_time=self._started
        )

    def get_experiment(self, experiment_id: str) -> entities.Experiment:
        if experiment_id != EXPERIMENT_ID:
            self._note_other("experiment", experiment_id)
        return self._experiment()

    def get_experiment_by_name(self, experiment_name: str) -> entities.Experiment:
        if experiment_name != self._records.run.experiment:
            self._note_other("experiment", experiment_name)
        return self._experiment()

    def create_experiment(self, name: str, *_: Any, **__: Any) -> str:
        self._note_other("experiment", name)
        return EXPERIMENT_ID

    def search_experiments(
        self, view_type: int = 1, max_results: int = 0, filter_string: str | None = None, *_: Any, **__: Any
    ) -> PagedList[entities.Experiment]:
        return PagedList(SearchExperimentsUtils.filter([self._experiment()], filter_string), None)

    def set_experiment_tag(self, experiment_id: str, tag: entities.ExperimentTag) -> None:
        self._note_other("tag of the experiment", tag.key)

    def _note_other(self, kind: str, name: str) -> None:
        text = f"MLflow: the {kind} {str(name)[:80]!r} of the script is not used"
        if text not in self._warned and self._records.is_main:
            run = self._records.run
            log.warning("%s: everything is logged to run %s of experiment %s", text, run.name, run.experiment)
        self._warned.add(text)

    # --- runs: the run of hpcdist, and nested runs

    def _joined(self, run_id: str) -> _JoinedRun:
        """Return the run of hpcdist or a nested run by its id, which may also be the id of the uploaded run."""
        if run_id in self._runs:
            return self._runs[run_id]
        if (read_json(self._records.run.mlflow) or {}).get("run_id") == run_id:
            return self._main
        raise MlflowException(
            f"Run {run_id!r} is not the run of hpcdist in this rank ({self._main.run_id}):"
            " use `mlflow.start_run()` without a run id",
            RESOURCE_DOES_NOT_EXIST,
        )

    def create_run(
        self, experiment_id: str, user_id: str, start_time: int, tags: Sequence[entities.RunTag], run_name: str | None
    ) -> entities.Run:
        given = {tag.key: tag.value for tag in tags or ()}
        name = run_name or given.get(MLFLOW_RUN_NAME) or ""
        parent_id = given.pop(MLFLOW_PARENT_RUN_ID, "")
        if parent_id:
            run = self._nest(self._joined(parent_id), name)
            # A nested run has the same user, source and version as the run itself.
            given = {key: value for key, value in given.items() if not key.startswith("mlflow.")}
        else:
            run = self._main
            if name:
                given[MLFLOW_RUN_NAME] = name
        self._set_tags(run, given)
        return self.get_run(run.run_id)

    def _nest(self, parent: _JoinedRun, name: str) -> _JoinedRun:
        """Create a nested run with a prefix of its own, which has a number if another run has the same name."""
        stem = name.replace("/", "_").strip(". ") or "nested"
        used = {run.prefix for run in self._runs.values()}
        prefix = f"{parent.prefix}{stem}/"
        number = 1
        while prefix in used:
            number += 1
            prefix = f"{parent.prefix}{stem}-{number}/"
        run = _JoinedRun(uuid.uuid4().hex, name or stem, prefix, parent.run_id)
        self._runs[run.run_id] = run
        return run

    def get_run(self, run_id: str) -> entities.Run:
        run = self._joined(run_id)
        records = self._records
        # `latest` comes first: it loads the parameters and tags of earlier attempts, too.
        metrics = [entities.Metric(key, *value) for key, value in run.select(records.latest()).items()]
        tags = run.select(records.tags) | {MLFLOW_RUN_NAME: run.name}
        if run.parent:
            tags[MLFLOW_PARENT_RUN_ID] = run.parent
        params = [entities.Param(*item) for item in run.select(records.params).items()]
        data = entities.RunData(metrics, params, [entities.RunTag(*item) for item in tags.items()])
        info = entities.RunInfo(
            run.run_id,
            EXPERIMENT_ID,
            os.environ.get("USER", ""),
            run.status,
            self._started,
            run.end_time,
            entities.LifecycleStage.ACTIVE,
            f"{SCHEME}://{records.run.artifacts}/{run.prefix}".rstrip("/"),
            run.name,
        )
        outputs = [
            entities.LoggedModelOutput(model_id, step=model["step"])
            for model_id, model in self._models.items()
            if model.get("output") and model["run"] == run.run_id
        ]
        return entities.Run(info, data, entities.RunInputs(run.datasets), entities.RunOutputs(outputs))

    def update_run_info(
        self, run_id: str, run_status: Any, end_time: int | None, run_name: str | None
    ) -> entities.RunInfo:
        run = self._joined(run_id)
        run.status, run.end_time = entities.RunStatus.to_string(run_status), end_time
        if run_name:
            self._set_tags(run, {MLFLOW_RUN_NAME: run_name})
        return self.get_run(run_id).info

    def _search_runs(
        self,
        experiment_ids: list[str],
        filter_string: str,
        run_view_type: str,
        max_results: int,
        order_by: list[str],
        page_token: str | None,
    ) -> tuple[list[entities.Run], str | None]:
        runs = SearchUtils.filter([self.get_run(run_id) for run_id in self._runs], filter_string)
        page, token = SearchUtils.paginate(SearchUtils.sort(runs, order_by), page_token, max_results)
        return page, token

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise MlflowException(
            "The code of a rank cannot delete, restore or rename the run and the experiment that it belongs to",
            INVALID_PARAMETER_VALUE,
        )

    def _refuse_traces(self, *_: Any, **__: Any) -> Any:
        raise MlflowException(
            "hpcdist records no traces in its runs: log texts or files as artifacts, as with mlflow.log_text",
            INVALID_PARAMETER_VALUE,
        )

    start_trace = get_trace_info = search_traces = set_trace_tag = delete_trace_tag = _refuse_traces

    delete_run = restore_run = delete_experiment = restore_experiment = rename_experiment = _refuse
    link_traces_to_run = _refuse

    # --- metrics, parameters and tags

    def log_batch(
        self,
        run_id: str,
        metrics: Sequence[entities.Metric],
        params: Sequence[entities.Param],
        tags: Sequence[entities.RunTag],
    ) -> None:
        run, records = self._joined(run_id), self._records
        try:
            steps: dict[tuple[int, int], dict[str, float]] = {}
            for metric in metrics:
                key = run.prefix + metric.key
                step_and_time = (records.numbered(key, metric.step), metric.timestamp)
                steps.setdefault(step_and_time, {})[key] = metric.value
            given = {metric.step for metric in metrics}
            for (step, time_ms), values in steps.items():
                records.log(values, step, time_ms, is_step=step in given)
            for param in params:
                records.set_param(run.prefix + param.key, str(param.value))
        except (HpcdistError, TypeError, ValueError) as error:
            raise MlflowException(str(error), INVALID_PARAMETER_VALUE) from error
        self._set_tags(run, {tag.key: str(tag.value) for tag in tags})

    def _set_tags(self, run: _JoinedRun, tags: dict[str, str]) -> None:
        for key, value in tags.items():
            self._records.set_tag(run.prefix + key, value)

    def delete_tag(self, run_id: str, key: str) -> None:
        """Empty a tag: one that the shipper has sent is not removed again."""
        self._set_tags(self._joined(run_id), {key: ""})

    # A write takes microseconds, and a rank ends without waiting for the threads of MLflow's own queue.

    def log_batch_async(self, *args: Any, **kwargs: Any) -> RunOperations:
        self.log_batch(*args, **kwargs)
        return RunOperations(operation_futures=[])

    def get_metric_history(self, run_id: str, metric_key: str, *_: Any, **__: Any) -> PagedList[entities.Metric]:
        values = self._records.history(self._joined(run_id).prefix + metric_key)
        return PagedList([entities.Metric(metric_key, *value) for value in values], None)

    def log_inputs(
        self, run_id: str, datasets: Iterable[entities.DatasetInput] | None = None, models: Any = None
    ) -> None:
        run = self._joined(run_id)
        for item in datasets or ():
            run.datasets.append(item)
            self._records.record("dataset", item.to_dictionary())

    # --- logged models: folders in `logged_models/`, which the shipper turns into MLflow's
    #
    # logged_models/m-…/model.json     name, type, tags, parameters, status, step
    # logged_models/m-…/files/         the model in MLflow's format

    def create_logged_model(
        self,
        experiment_id: str,
        name: str | None = None,
        source_run_id: str | None = None,
        tags: list[entities.LoggedModelTag] | None = None,
        params: list[entities.LoggedModelParameter] | None = None,
        model_type: str | None = None,
    ) -> entities.LoggedModel:
        model_id = f"m-{uuid.uuid4().hex}"
        self._models[model_id] = {}
        with self._changed(model_id) as model:
            model["name"] = name or "model"
            model["type"] = model_type
            model["run"] = source_run_id
            model["status"] = "PENDING"
            model["step"] = 0
            model["created"] = int(time.time() * 1000)
            model["tags"] = {tag.key: tag.value for tag in tags or ()}
            model["params"] = {param.key: param.value for param in params or ()}
        return self.get_logged_model(model_id)

    def get_logged_model(self, model_id: str, allow_deleted: bool = False) -> entities.LoggedModel:
        model = self._model(model_id)
        return entities.LoggedModel(
            experiment_id="0",
            model_id=model_id,
            name=model["name"],
            artifact_location=f"{SCHEME}://{self._records.run.logged_models / model_id / FILES}",
            creation_timestamp=model["created"],
            last_updated_timestamp=model["created"],
            model_type=model["type"],
            source_run_id=model["run"],
            status=_STATUS.get(model["status"], entities.LoggedModelStatus.PENDING),
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
    ) -> PagedList[entities.LoggedModel]:
        models = [self.get_logged_model(model_id) for model_id in self._models]
        found = SearchLoggedModelsUtils.filter_logged_models(models, filter_string, datasets)
        return PagedList(SearchLoggedModelsUtils.sort(found, order_by)[:max_results], None)

    def finalize_logged_model(self, model_id: str, status: Any) -> entities.LoggedModel:
        if isinstance(status, entities.LoggedModelStatus):
            status = status.value
        with self._changed(model_id) as model:
            model["status"] = str(status)
        return self.get_logged_model(model_id)

    def set_logged_model_tags(self, model_id: str, tags: Sequence[entities.LoggedModelTag]) -> None:
        with self._changed(model_id) as model:
            model["tags"].update({tag.key: tag.value for tag in tags})

    def delete_logged_model_tag(self, model_id: str, key: str) -> None:
        if key in self._model(model_id)["tags"]:
            with self._changed(model_id) as model:
                del model["tags"][key]

    def log_logged_model_params(self, model_id: str, params: Sequence[entities.LoggedModelParameter]) -> None:
        with self._changed(model_id) as model:
            model["params"].update({param.key: param.value for param in params})

    def log_outputs(self, run_id: str, models: Sequence[entities.LoggedModelOutput]) -> None:
        for output in models:
            with self._changed(output.model_id) as model:
                model.update(step=output.step, output=True)

    def record_logged_model(self, run_id: str, mlflow_model: Any) -> None:
        """Do nothing: MLflow 3 records a model as a logged model, not as a tag of the run."""

    def _model(self, model_id: str) -> dict[str, Any]:
        if model_id not in self._models:
            saved = read_json(self._records.run.logged_models / str(model_id) / MODEL_FILE)
            if saved is None:
                raise MlflowException(f"Logged model {model_id!r} is not of this run", RESOURCE_DOES_NOT_EXIST)
            self._models[model_id] = saved
        return self._models[model_id]

    @contextmanager
    def _changed(self, model_id: str) -> Iterator[dict[str, Any]]:
        """Yield a model, then write its file; once the model is complete, record an event for the shipper."""
        model = self._model(model_id)
        yield model
        if self._records.is_main:
            folder = self._records.run.logged_models / model_id
            (folder / FILES).mkdir(parents=True, exist_ok=True)
            write_json(folder / MODEL_FILE, model)
            if model["status"] == "READY":
                self._records.record("model", model_id)


class RankArtifacts(LocalArtifactRepository):
    """Stores files in a folder of the run folder, which the shipper uploads; those of other ranks than 0 are dropped.

    MLflow loads it by the entry point `mlflow.artifact_repository` for the scheme `hpcdist`.

    A file under a name that hpcdist uses itself, such as `config.yaml`, is stored in the folder `script`. Paths and
    symbolic links that leave the folder are refused.
    """

    def __init__(self, artifact_uri: str, tracking_uri: str | None = None, registry_uri: str | None = None) -> None:
        folder = Path(urlsplit(artifact_uri).path)
        super().__init__(folder.as_uri(), tracking_uri, registry_uri)
        self._folder = folder
        self._records = rank_records.current()
        self._is_dropped = self._records is None or not self._records.is_main
        # The folders of models hold no files of hpcdist.
        self._is_root = self._records is not None and folder == self._records.run.artifacts

    def _placed(self, path: str | None, name: str = "") -> str | None:
        """Return the folder for a file `name` in the folder `path`, both as the script names them."""
        folder = os.path.normpath(path) if path else ""
        if folder == ".":
            folder = ""
        if self._is_root and is_own_name(os.path.join(folder, name)):
            folder = os.path.join(SCRIPT_FOLDER, folder).rstrip("/")
        target = self._folder / folder / name
        if not target.resolve().is_relative_to(self._folder.resolve()):
            raise MlflowException(
                f"Artifact path {str(path or name)!r} leaves the artifact folder {self._folder}",
                INVALID_PARAMETER_VALUE,
            )
        return folder or None

    def log_artifact(self, local_file: str, artifact_path: str | None = None) -> None:
        folder = self._placed(artifact_path, os.path.basename(local_file))
        if not self._is_dropped:
            super().log_artifact(local_file, folder)  # type: ignore[no-untyped-call]

    def log_artifacts(self, local_dir: str, artifact_path: str | None = None) -> None:
        # File by file, because each one is replaced atomically and the shipper reads at the same time.
        for above, _, names in os.walk(local_dir):
            inner = os.path.relpath(above, local_dir)
            folder = os.path.normpath(os.path.join(artifact_path or "", inner))
            for name in names:
                self.log_artifact(os.path.join(above, name), folder)

    def _log_artifact_async(self, filename: str, artifact_path: str | None = None, artifact: Any = None) -> None:
        """Write an image of `mlflow.log_image` at once: a rank ends without waiting for MLflow's threads."""
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, os.path.basename(filename))
            artifact.save(path)
            self.log_artifact(path, artifact_path)

    def delete_artifacts(self, artifact_path: str | None = None) -> None:
        """Delete files of the run folder; uploaded ones stay in MLflow."""
        folder, name = os.path.split(artifact_path or "")
        placed = self._placed(folder, name)
        if not self._is_dropped:
            super().delete_artifacts(os.path.join(placed or "", name))  # type: ignore[no-untyped-call]
