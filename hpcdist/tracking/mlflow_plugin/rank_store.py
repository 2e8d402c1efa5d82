"""MLflow's tracking store for the code of a rank: `mlflow.log_metric` and all loggers built on it write to the journal.

MLflow loads it by the entry point `mlflow.tracking_store` for the scheme `hpcdist`; the worker of a rank sets
`MLFLOW_TRACKING_URI`. The store has one experiment with one run, which the shipper uploads:

- `start_run` and `create_run` join this run. A nested run becomes a prefix, `child/loss`, of its names.
- Another experiment is accepted with a warning. The end of the run in a script does not end the run of hpcdist.
- Searches and reads answer from what was logged in the rank, earlier attempts included.
"""

from __future__ import annotations

import itertools
import logging
import os
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlflow.entities import (
    DatasetInput,
    Experiment,
    ExperimentTag,
    LifecycleStage,
    LoggedModelInput,
    Metric,
    Param,
    Run,
    RunData,
    RunInfo,
    RunInputs,
    RunOutputs,
    RunStatus,
    RunTag,
    ViewType,
)
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import INVALID_PARAMETER_VALUE, RESOURCE_DOES_NOT_EXIST
from mlflow.store.entities.paged_list import PagedList
from mlflow.store.tracking import SEARCH_MAX_RESULTS_DEFAULT
from mlflow.utils.async_logging.run_operations import RunOperations
from mlflow.utils.mlflow_tags import MLFLOW_PARENT_RUN_ID, MLFLOW_RUN_NAME
from mlflow.utils.search_utils import SearchExperimentsUtils, SearchUtils

from hpcdist.errors import HpcdistError
from hpcdist.files.atomic import read_json
from hpcdist.run.attempt_times import began_of
from hpcdist.tracking.mlflow_plugin import rank_records
from hpcdist.tracking.mlflow_plugin.rank_models import RankModels
from hpcdist.tracking.mlflow_plugin.rank_records import SCHEME, RankRecords, run_id_of

log = logging.getLogger(__name__)

EXPERIMENT_ID = "0"


@dataclass
class _JoinedRun:
    """The run of hpcdist (no prefix), or a nested run, as the code of the rank sees it."""

    run_id: str
    name: str
    prefix: str = ""
    parent: str = ""
    status: str = "RUNNING"
    end_time: int | None = None
    datasets: list[DatasetInput] = field(default_factory=list)


class RankStore(RankModels):
    """The tracking store; MLflow's `AbstractStore` documents the methods."""

    def __init__(self, store_uri: str, artifact_uri: str | None = None) -> None:
        super().__init__()
        known = rank_records.current()
        self._records = known if known is not None and known.uri == store_uri else RankRecords.of_uri(store_uri)
        run = self._records.run
        self._started = int(began_of(run) * 1000)
        self._main = _JoinedRun(run_id_of(run), run.name)
        self._runs = {self._main.run_id: self._main}
        self._warned: set[str] = set()

    # --- experiments: there is one

    def _experiment(self) -> Experiment:
        location = f"{SCHEME}://{self._records.run.artifacts}"
        name = self._records.run.experiment
        return Experiment(EXPERIMENT_ID, name, location, LifecycleStage.ACTIVE, creation_time=self._started)

    def get_experiment(self, experiment_id: str) -> Experiment:
        if experiment_id != EXPERIMENT_ID:
            self._note_other("experiment", experiment_id)
        return self._experiment()

    def get_experiment_by_name(self, experiment_name: str) -> Experiment:
        if experiment_name != self._records.run.experiment:
            self._note_other("experiment", experiment_name)
        return self._experiment()

    def create_experiment(
        self, name: str, artifact_location: str | None = None, tags: Sequence[ExperimentTag] | None = None
    ) -> str:
        self._note_other("experiment", name)
        return EXPERIMENT_ID

    def search_experiments(
        self,
        view_type: int = ViewType.ACTIVE_ONLY,
        max_results: int = SEARCH_MAX_RESULTS_DEFAULT,
        filter_string: str | None = None,
        order_by: list[str] | None = None,
        page_token: str | None = None,
    ) -> PagedList[Experiment]:
        return PagedList(SearchExperimentsUtils.filter([self._experiment()], filter_string), None)

    def set_experiment_tag(self, experiment_id: str, tag: ExperimentTag) -> None:
        self._note_other("tag of the experiment", tag.key)

    def _note_other(self, kind: str, name: str) -> None:
        """Warn once that a script's choice has no effect."""
        text = f"MLflow: the {kind} {str(name)[:80]!r} of the script is not used"
        if text not in self._warned and self._records.is_main:
            run = self._records.run
            log.warning("%s: everything is logged to run %s of experiment %s", text, run.name, run.experiment)
        self._warned.add(text)

    # --- runs: the run of hpcdist, and nested runs

    def _joined(self, run_id: str) -> _JoinedRun:
        if (found := self._runs.get(run_id)) is not None:
            return found
        if (read_json(self._records.run.mlflow) or {}).get("run_id") == run_id:
            return self._main
        raise MlflowException(
            f"Run {run_id!r} is not the run of hpcdist in this rank ({self._main.run_id}):"
            " use `mlflow.start_run()` without a run id",
            RESOURCE_DOES_NOT_EXIST,
        )

    def create_run(
        self, experiment_id: str, user_id: str, start_time: int, tags: Sequence[RunTag], run_name: str | None
    ) -> Run:
        given = {tag.key: tag.value for tag in tags or ()}
        name = run_name or given.get(MLFLOW_RUN_NAME) or ""
        if parent := given.pop(MLFLOW_PARENT_RUN_ID, ""):
            run = self._nested(self._joined(parent), name)
        else:
            run = self._main
            if name:
                given[MLFLOW_RUN_NAME] = name
        # A nested run has the same user, source and version as the run itself.
        self._set_tags(run, {key: value for key, value in given.items() if not (run.prefix and key[:7] == "mlflow.")})
        return self.get_run(run.run_id)

    def _nested(self, parent: _JoinedRun, name: str) -> _JoinedRun:
        stem = name.replace("/", "_").strip(". ") or "nested"
        used = {run.prefix for run in self._runs.values()}
        numbered = itertools.chain([stem], (f"{stem}-{number}" for number in itertools.count(2)))
        prefix = next(found for it in numbered if (found := f"{parent.prefix}{it}/") not in used)
        run = _JoinedRun(uuid.uuid4().hex, name or stem, prefix, parent.run_id)
        self._runs[run.run_id] = run
        return run

    def get_run(self, run_id: str) -> Run:
        run, records = self._joined(run_id), self._records
        skip = len(run.prefix)
        data = RunData(
            [
                Metric(key[skip:], value.value, value.time_ms, value.step)
                for key, value in records.latest().items()
                if key.startswith(run.prefix)
            ],
            [Param(key[skip:], value) for key, value in records.params.items() if key.startswith(run.prefix)],
            [RunTag(key[skip:], value) for key, value in records.tags.items() if key.startswith(run.prefix)]
            + [RunTag(MLFLOW_RUN_NAME, run.name)]
            + [RunTag(MLFLOW_PARENT_RUN_ID, run.parent)] * bool(run.parent),
        )
        info = RunInfo(
            run.run_id,
            EXPERIMENT_ID,
            os.environ.get("USER", ""),
            run.status,
            self._started,
            run.end_time,
            LifecycleStage.ACTIVE,
            f"{SCHEME}://{records.run.artifacts}/{run.prefix}".rstrip("/"),
            run.name,
        )
        return Run(info, data, RunInputs(run.datasets), RunOutputs(self.outputs_of(run.run_id)))

    def update_run_info(self, run_id: str, run_status: Any, end_time: int | None, run_name: str | None) -> RunInfo:
        run = self._joined(run_id)
        run.status, run.end_time = RunStatus.to_string(run_status), end_time
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
    ) -> tuple[list[Run], str | None]:
        found = SearchUtils.filter([self.get_run(run_id) for run_id in self._runs], filter_string)
        runs, token = SearchUtils.paginate(SearchUtils.sort(found, order_by), page_token, max_results)
        return runs, token

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise MlflowException(
            "The code of a rank cannot delete, restore or rename the run and the experiment that it belongs to",
            INVALID_PARAMETER_VALUE,
        )

    delete_run = restore_run = delete_experiment = restore_experiment = rename_experiment = _refuse
    link_traces_to_run = _refuse

    # --- metrics, parameters and tags

    def log_batch(
        self, run_id: str, metrics: Sequence[Metric], params: Sequence[Param], tags: Sequence[RunTag]
    ) -> None:
        run, records = self._joined(run_id), self._records
        try:
            steps: dict[tuple[int, int], dict[str, float]] = {}
            for metric in metrics:
                key = run.prefix + metric.key
                at = (records.numbered(key, metric.step), metric.timestamp)
                steps.setdefault(at, {})[key] = metric.value
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

    def log_batch_async(
        self, run_id: str, metrics: Sequence[Metric], params: Sequence[Param], tags: Sequence[RunTag]
    ) -> RunOperations:
        self.log_batch(run_id, metrics, params, tags)
        return RunOperations(operation_futures=[])

    def log_metric_async(self, run_id: str, metric: Metric) -> RunOperations:
        return self.log_batch_async(run_id, [metric], [], [])

    def log_param_async(self, run_id: str, param: Param) -> RunOperations:
        return self.log_batch_async(run_id, [], [param], [])

    def set_tag_async(self, run_id: str, tag: RunTag) -> RunOperations:
        return self.log_batch_async(run_id, [], [], [tag])

    def get_metric_history(
        self, run_id: str, metric_key: str, max_results: int | None = None, page_token: str | None = None
    ) -> PagedList[Metric]:
        found = self._records.history(self._joined(run_id).prefix + metric_key)
        return PagedList([Metric(metric_key, it.value, it.time_ms, it.step) for it in found], None)

    def log_inputs(
        self,
        run_id: str,
        datasets: Iterable[DatasetInput] | None = None,
        models: list[LoggedModelInput] | None = None,
    ) -> None:
        run = self._joined(run_id)
        for item in datasets or ():
            run.datasets.append(item)
            self._records.record("dataset", item.to_dictionary())
