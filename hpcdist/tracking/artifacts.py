"""Artifacts of a run in MLflow: files, checkpoints as logged models, the alias `best` of a registered model."""

import json
import logging
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import yaml

from hpcdist.config.record_schema import CheckpointConfig
from hpcdist.errors import TrackingError
from hpcdist.host import retry
from hpcdist.host.ownership import stays_inside
from hpcdist.review.facts import CheckpointFacts, best_checkpoint, finite_number, read_checkpoints
from hpcdist.review.markdown import PATCH, escaped
from hpcdist.run.checkpoint_files import MANIFEST_FILE, complete_checkpoints, step_of
from hpcdist.run.folder import RunDir
from hpcdist.run.mlflow_limits import clean_name
from hpcdist.tracking.mlflow_client import (
    MlflowRun,
    all_pages,
    clean_text,
    entities,
    is_unsupported,
    require_id,
    tolerated,
    translated,
)

#: Larger logs are uploaded only at the end of the run.
LIVE_LOG_BYTES = 5_000_000
#: Maximum number of ranks of an attempt with uploaded logs.
MAX_RANKS = 64
#: Folder of a script's artifacts with names that hpcdist uses itself.
SCRIPT_FOLDER = "script"


class Artifact(NamedTuple):
    source: Path  #: file or folder
    target: str  #: path in MLflow
    fingerprint: str  #: changes with the content


def is_own_name(path: str) -> bool:
    """Return whether hpcdist uploads artifacts of its own at or below this path."""
    first, _, rest = path.partition("/")
    folders = ("logs", "checkpoints", "model")
    files = ("config.yaml", PATCH, "environment.json", "network.json", "report.html")
    return first in folders or (not rest and (first in files or first.startswith("preflight.")))


def fingerprint(path: Path) -> str:
    """Return name, size and time of a file, or of all files in a folder; empty if there are none."""

    def read() -> str:
        items = path.rglob("*") if path.is_dir() else [path]
        stats = [item.stat() for item in items if item.is_file()]
        if not stats:
            return ""
        size = sum(status.st_size for status in stats)
        time_ns = max(status.st_mtime_ns for status in stats)
        return f"{path.name}:{len(stats)}:{size}:{time_ns}"

    return retry.retry(read, path)


def leaves_folder(source: Path, run: RunDir) -> str:
    """Return why a file or folder must not be uploaded: a link that leaves the run folder; empty if there is none."""
    paths = [source]
    if source.is_dir():
        paths += source.rglob("*")
    for path in paths:
        if not stays_inside(path, run.path):
            return f"{path} is a symbolic link that leaves the run folder"
    return ""


def documents(run: RunDir, *, patch: bool) -> Iterator[Artifact]:
    """Yield the config, the environment, the report, and the newest checks of the nodes.

    Args:
        patch: also yield the uncommitted changes of the code.
    """
    for path in (run.config, run.environment, run.report):
        yield Artifact(path, path.name, fingerprint(path))
    if patch:
        yield Artifact(run.patch, PATCH, fingerprint(run.patch))
    newest_first = run.attempts()[::-1]
    for name in ("preflight.json", "preflight.txt", "network.json"):
        paths = [attempt.path / name for attempt in newest_first]
        newest = next((path for path in paths if path.exists()), None)
        if newest is not None:
            yield Artifact(newest, name, fingerprint(newest))


def trainer_artifacts(run: RunDir) -> Iterator[Artifact]:
    """Yield the files of `ReportData.artifact` under their names; hidden files are incomplete."""
    for path in sorted(run.artifacts.rglob("*")):
        if path.is_file() and not path.name.startswith("."):
            yield Artifact(path, path.relative_to(run.artifacts).as_posix(), fingerprint(path))


def reports(run: RunDir, *, ended: bool) -> Iterator[Artifact]:
    """Yield logs and outcomes of the ranks, long ones only when the run has ended, and stack traces of hung ranks.

    Of an attempt with more than MAX_RANKS ranks, those that reported an outcome first are included, then the lowest.
    """
    for attempt in run.attempts():
        folder = f"logs/attempt-{attempt.number:03d}"
        logs = sorted(attempt.path.glob("rank-*.log"))
        outcomes = sorted(attempt.path.glob("rank-*.outcome.json"))
        if len(logs) > MAX_RANKS:
            outcomes = sorted(outcomes, key=lambda path: path.lstat().st_mtime_ns)[:MAX_RANKS]
            reported = {path.name.split(".")[0] for path in outcomes}
            logs = sorted(logs, key=lambda path: path.stem not in reported)[:MAX_RANKS]
        for path in sorted([*logs, *outcomes, *attempt.path.glob(attempt.stragglers.name)]):
            if path.is_file() and (ended or path.stat().st_size <= LIVE_LOG_BYTES):
                yield Artifact(path, f"{folder}/{path.name}", fingerprint(path))
        # Stack traces of hung ranks once they are summarized, and torch's own dumps after collective timeouts.
        hang_reports = [path for path in (attempt.stacks_summary, attempt.silence) if path.exists()]
        if hang_reports:
            hang_reports += sorted(attempt.path.glob("rank-*.flight.json"))[:MAX_RANKS]
        hang_reports += sorted(attempt.path.glob("flight-rank-*"))[:MAX_RANKS]
        for path in hang_reports:
            if path.is_file() and path.stat().st_size <= LIVE_LOG_BYTES:
                yield Artifact(path, f"{folder}/{path.name}", fingerprint(path))


def checkpoints(run: RunDir, monitored: CheckpointConfig) -> Iterator[Artifact]:
    """Yield the newest checkpoint as `checkpoints/final` and the best one as `checkpoints/best`."""
    complete = read_checkpoints(run)
    if complete:
        newest = complete[-1].path
        yield Artifact(newest, "checkpoints/final", fingerprint(newest))
    best = best_checkpoint(complete, monitored)
    if best is not None:
        yield Artifact(best.path, "checkpoints/best", fingerprint(best.path))


# The alias `best` of a registered model: the version with the best monitored metric.
#
# MLflow has no compare-and-set for an alias, and several runs may register versions at once. Each process therefore
# writes the metric of its version first, then sets the alias to the best of all versions, and repeats the comparison
# until the alias needs no change. A metric that is written later is compared with the alias by its own process. Hence,
# once all processes have finished, the alias is at the best version.

log = logging.getLogger(__name__)

ALIAS = "best"
#: Tags of a version.
METRIC_TAG = "hpcdist.monitor"
VALUE_TAG = "hpcdist.monitor_value"
#: Each repetition means that another process has moved the alias in the same fraction of a second.
_MAX_MOVES = 20
_VERSIONS_PAGE = 200


def move_best(run: MlflowRun, name: str, version: str, monitored: CheckpointConfig) -> None:
    """Record the metric of the version that a run has registered, and set the alias `best` to the best version.

    A version with an equal metric does not replace the one that has the alias. Without the metric in the run, or on a
    server without aliases, the alias is left as it is.
    """
    try:
        with translated(run.uri):
            metric = clean_name(monitored.monitor)
            value = finite_number(run.client.get_run(run.run_id).data.metrics.get(metric))
            if value is None:
                log.debug("%s/%s has no metric %s: the alias %s is not moved", name, version, metric, ALIAS)
                return
            run.client.set_model_version_tag(name, version, METRIC_TAG, metric)
            run.client.set_model_version_tag(name, version, VALUE_TAG, repr(value))
            sign = -1.0 if monitored.monitor_mode == "min" else 1.0
            for _ in range(_MAX_MOVES):
                if not _move_once(run, name, metric, sign):
                    return
            log.warning("the alias %s of %s is moved by other processes all the time", ALIAS, name)
    except TrackingError as error:
        if not is_unsupported(error):
            raise
        log.debug("the alias %s is not moved, which this MLflow does not support: %s", ALIAS, error)


def _move_once(run: MlflowRun, name: str, metric: str, sign: float) -> bool:
    """Set the alias to the best version if that is better than the version that has it. Returns whether it was set."""
    # The alias is read before the versions: a metric that is written in between is compared.
    holder = str((run.client.get_registered_model(name).aliases or {}).get(ALIAS, ""))
    values = {}
    for version in all_pages(run.client.search_model_versions, f"name = '{name}'", max_results=_VERSIONS_PAGE):
        tags = version.tags or {}
        if tags.get(METRIC_TAG) != metric:
            continue
        with suppress(KeyError, ValueError):
            value = finite_number(float(tags[VALUE_TAG]))
            if value is not None:
                values[str(version.version)] = sign * value
    if not values:
        return False
    best = max(values, key=lambda number: (values[number], -int(number)))  # the oldest of equal ones
    if holder in values and values[holder] >= values[best]:
        return False
    run.client.set_registered_model_alias(name, ALIAS, best)
    return True


# The kept checkpoints of a run as logged models of MLflow, without an upload of their files.
#
# Each checkpoint on disk has one external logged model with its step, folder, hash and metrics. A model is
# deleted in MLflow after its checkpoint was removed, so that the tab *Models* lists the existing checkpoints only.

MODEL_TYPE = "checkpoint"
#: Markdown for the page of the logged model of a checkpoint.
_CHECKPOINT = """\
Checkpoint of step {step}, in the run folder: {shown_path}

```python
from hpcdist.checkpoint.state import load_weights

folder = {path!r}
state_dict = load_weights(folder)
```

`hpcdist export {name} --checkpoint {step} --format safetensors` writes the weights to a file that other programs load \
without hpcdist. The parameter `sha256` is the hash of the output of `sha256sum *.pt`.
"""
_SHA_TAG = "hpcdist.checkpoint.sha256"
_STEP_TAG = "hpcdist.checkpoint.step"
_NOTE_TAG = "mlflow.note.content"
#: MLflow marks models with this tag if their files are not among its artifacts.
_EXTERNAL_TAG = "mlflow.model.isExternal"
_MODELS_PAGE = 100


def manifests(run: RunDir) -> dict[str, str]:
    """Return the complete checkpoint folders, each with a text that changes with its manifest."""
    digests = {}
    for _, folder in complete_checkpoints(run):
        path = folder / MANIFEST_FILE
        digest = fingerprint(path)
        # The manifest of a linked folder outside of the run is not this run's.
        if digest and stays_inside(path, run.path):
            digests[folder.name] = digest
    return digests


#: Metric → step → the run's first point at the step.
_Histories = dict[str, dict[int, entities.Metric]]


class CheckpointModels:
    """The logged models of one run's checkpoints.

    MLflow holds the state: models are found by the hash of their checkpoint before one is created, and again after
    each failure, so that a checkpoint never has two of them.

    Args:
        done: checkpoint folder → manifest that MLflow has completely, of an earlier process; `update` changes it.
    """

    def __init__(self, run: RunDir, mlflow_run: MlflowRun, done: dict[str, str]) -> None:
        self._run = run
        self._mlflow_run = mlflow_run
        self._done = done
        #: Key of a checkpoint → its logged model; None before the first search.
        self._models: dict[tuple[str, str], entities.LoggedModel] | None = None
        self._is_supported = True

    def update(self, *, all_sent: bool) -> bool:
        """Create, complete and delete logged models as the checkpoints on disk require. Returns whether any changed.

        Unless MLflow has all records of the journal (`all_sent`), metrics that it lacks are left for a later call.
        """
        found = manifests(self._run)
        if found == self._done or not self._is_supported:
            return False
        # A damaged manifest has no time.
        intact = [
            checkpoint
            for checkpoint in read_checkpoints(self._run)
            if checkpoint.path.name in found and checkpoint.created is not None
        ]
        try:
            with translated(self._mlflow_run.uri):
                self._update(found, intact, all_sent)
        except TrackingError as error:
            self._models = None  # a request without a response may have been executed
            if not is_unsupported(error):
                raise
            self._is_supported = False
            log.debug("checkpoints are not logged as models, which this MLflow does not support: %s", error)
        return True

    def log_final_metrics(self, model_id: str, last_step: int) -> None:
        """Give the final model the metrics of the newest checkpoint, unless that is older than the last logged step."""
        newest = next(reversed(manifests(self._run)), "")
        checkpoints = [checkpoint for checkpoint in read_checkpoints(self._run) if checkpoint.path.name == newest]
        if checkpoints and checkpoints[0].step >= last_step:
            with translated(self._mlflow_run.uri):
                model = self._mlflow_run.client.get_logged_model(model_id)
                self._log_metrics(model, checkpoints[0], {}, all_sent=True)

    def _update(self, found: Mapping[str, str], intact: Sequence[CheckpointFacts], all_sent: bool) -> None:
        if self._models is None:
            self._models = self._find_models()
        histories: _Histories = {}
        # Checkpoints of different steps may have the same content.
        checkpoints = {(str(checkpoint.step), checkpoint.sha256): checkpoint for checkpoint in intact}
        for key, checkpoint in checkpoints.items():
            # A model that is complete according to an earlier call, but not in MLflow, was deleted there by a user.
            name = checkpoint.path.name
            if self._done.get(name) != found[name]:
                if key not in self._models:
                    self._models[key] = self._create(checkpoint)
                if self._log_metrics(self._models[key], checkpoint, histories, all_sent=all_sent):
                    self._done[name] = found[name]
        unread = found.keys() - {checkpoint.path.name for checkpoint in intact}  # perhaps for a moment only
        unread_steps = {str(step_of(Path(name))) for name in unread}
        removed = [key for key in self._models if key not in checkpoints and key[0] not in unread_steps]
        for key in removed:
            with tolerated("RESOURCE_DOES_NOT_EXIST"):
                self._mlflow_run.client.delete_logged_model(self._models[key].model_id)
            del self._models[key]
        for name in self._done.keys() - found.keys():
            del self._done[name]

    def _find_models(self) -> dict[tuple[str, str], entities.LoggedModel]:
        """Return the models of checkpoints in MLflow by step and hash of their checkpoint, both as text."""
        search = self._mlflow_run.client.search_logged_models
        of_run = f"source_run_id = '{self._mlflow_run.run_id}'"
        models = {}
        for model in all_pages(search, [self._mlflow_run.experiment_id], of_run, max_results=_MODELS_PAGE):
            if _SHA_TAG in model.tags:
                models[model.tags.get(_STEP_TAG, ""), model.tags[_SHA_TAG]] = model
        return models

    def _create(self, kept: CheckpointFacts) -> entities.LoggedModel:
        step = str(kept.step)
        path = clean_text(str(kept.path))
        name = clean_text(kept.path.parents[1].name)
        note = _CHECKPOINT.format(step=step, path=path, shown_path=escaped(path, 1000), name=name)
        model = self._mlflow_run.client.create_logged_model(
            self._mlflow_run.experiment_id,
            name=re.sub(r"[/:.%'\"]", "_", f"{name} step-{step}"),  # without the characters that MLflow rejects
            source_run_id=self._mlflow_run.run_id,
            # MLflow's page shows the parameters, and of the tags only the description.
            tags={_EXTERNAL_TAG: "true", _SHA_TAG: kept.sha256, _STEP_TAG: step, _NOTE_TAG: note},
            params={"step": step, "path": path, "sha256": kept.sha256},
            model_type=MODEL_TYPE,
        )
        require_id(model.model_id, "a logged model")
        return model

    def _log_metrics(
        self, model: entities.LoggedModel, kept: CheckpointFacts, histories: _Histories, *, all_sent: bool
    ) -> bool:
        """Log the metrics that the model lacks, and set its status to ready. Returns whether it has all metrics.

        MLflow stores a metric of a model as a point of its run, too. Only a point with the time and value of the run's
        own point is stored once. A metric that the trainer has saved in the checkpoint but not logged, which is known
        when all records are sent, has the value and time of the checkpoint.
        """
        client, run_id = self._mlflow_run.client, self._mlflow_run.run_id
        logged = {metric.key for metric in model.metrics or ()}
        own_metrics = {clean_name(key): value for key, value in kept.metrics.items()}
        missing = {key: value for key, value in own_metrics.items() if key not in logged}
        metrics = []
        for key, value in missing.items():
            if key not in histories:  # one request for all checkpoints
                newest_first = reversed(client.get_metric_history(run_id, key))
                histories[key] = {point.step: point for point in newest_first}
            logged_point = histories[key].get(kept.step)
            if logged_point is not None:
                point_value, time_ms = logged_point.value, logged_point.timestamp
            elif all_sent:
                point_value, time_ms = value, int(1000 * (kept.created or 0.0))
            else:
                continue
            metrics.append(entities.Metric(key, point_value, time_ms, kept.step, model_id=model.model_id))
        if metrics:
            client.log_batch(run_id, metrics=metrics, synchronous=True)
        if str(model.status) != "READY":
            client.finalize_logged_model(model.model_id, "READY")
        return len(metrics) == len(missing)


MODEL_NAME = "model"
_FINGERPRINT_TAG = "hpcdist.fingerprint"
#: Description of a registered model that `register` creates.
_REGISTERED = (
    "Final models of the finished runs of hpcdist. The alias `best` is the version with the best last value of the"
    " metric that selects checkpoints; the best checkpoint of a run may be better."
)


def log_model(
    run: MlflowRun,
    folder: Path,
    fingerprint: str,
    step: int,
    *,
    name: str = MODEL_NAME,
    model_type: str | None = None,
    params: Mapping[str, str] | None = None,
    description: str = "",
) -> str:
    """Log a folder in MLflow's model format as a logged model of a run, once. Returns the id of the model.

    The model loads as `models:/<id>` and `runs:/<run_id>/<name>`, and is listed on the page of the run.
    """
    with translated(run.uri):
        same = f"name = '{name}' AND source_run_id = '{run.run_id}'"
        models = run.client.search_logged_models([run.experiment_id], same)
        model = next((model for model in models if model.tags.get(_FINGERPRINT_TAG) == fingerprint), None)
        if model is None:
            tags = {_FINGERPRINT_TAG: fingerprint}
            if description:
                tags[_NOTE_TAG] = description
            model = run.client.create_logged_model(
                run.experiment_id,
                name=name,
                source_run_id=run.run_id,
                tags=tags,
                params=dict(params or {}),
                model_type=model_type,
            )
        run.client.log_model_artifacts(model.model_id, str(folder))
        if (folder / "MLmodel").is_file():  # with the ids added, as `mlflow.pytorch.log_model` does
            ids = {"model_id": model.model_id, "model_uuid": model.model_id, "run_id": run.run_id}
            content = yaml.safe_load((folder / "MLmodel").read_text()) | ids
            with tempfile.TemporaryDirectory() as temporary:
                path = Path(temporary, "MLmodel")
                path.write_text(yaml.safe_dump(content | {"artifact_path": model.artifact_location}))
                run.client.log_model_artifact(model.model_id, str(path))
        outputs = run.client.get_run(run.run_id).outputs
        if outputs is None or all(item.model_id != model.model_id for item in outputs.model_outputs):
            run.client.log_outputs(run.run_id, [entities.LoggedModelOutput(model.model_id, step=step)])
        run.client.finalize_logged_model(model.model_id, "READY")
        return str(model.model_id)


def register(run: MlflowRun, model_id: str, name: str) -> str:
    """Register a logged model, once. Returns `name/version`."""
    with translated(run.uri):
        model = run.client.get_logged_model(model_id)
        with tolerated("RESOURCE_ALREADY_EXISTS"):
            run.client.create_registered_model(name, description=_REGISTERED)
        versions = run.client.search_model_versions(f"name = '{name}' AND run_id = '{run.run_id}'")
        # A database would look up `models:/<id>` at MLflow's global tracking URI.
        source = model.artifact_location
        version = next((version for version in versions if version.source == source), None)
        if version is None:
            version = run.client.create_model_version(name, source, run_id=run.run_id, model_id=model_id)
        number = version.version
        tag = json.dumps([{"name": name, "version": int(number)}])
        run.client.set_logged_model_tags(model_id, {"mlflow.modelVersions": tag})
        return f"{name}/{number}"
