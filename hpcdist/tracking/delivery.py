"""Upload of one run to MLflow in passes, each of which continues where the last one ended."""

import logging
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any

from hpcdist.config.redaction import redact_tree
from hpcdist.config.schema import Config
from hpcdist.errors import RunFolderError, TrackingError
from hpcdist.host.json_files import read_json
from hpcdist.review.ledger import Ledger, allocations_of, read_ledger
from hpcdist.run.folder import CHECKS_PER_S, ENDED, RunDir, State
from hpcdist.run.mlflow_names import clean_name
from hpcdist.run.reached_steps import reached_step
from hpcdist.tracking import artifacts, run_tags
from hpcdist.tracking.artifacts import Artifact, CheckpointModels, log_model, move_best, register
from hpcdist.tracking.batches import Batches
from hpcdist.tracking.journal import Event, SentFacts, SentFiles, event_files, read_events, state_key
from hpcdist.tracking.metric_point import Point
from hpcdist.tracking.mlflow_client import MlflowRun, entities, translated
from hpcdist.tracking.parent_run import ParentRun
from hpcdist.tracking.rank_records import SCRIPT_PREFIX
from hpcdist.tracking.run_page import NOTE_TAG, RunPage
from hpcdist.tracking.run_tags import MLFLOW_STATUS, fixed_tags, read_config, state_tags
from hpcdist.tracking.series import read_last_values, read_series

if TYPE_CHECKING:
    from hpcdist.tracking.command_tag import CommandTag

log = logging.getLogger(__name__)
LOG_INTERVAL_S = 60.0
CHECKPOINTS_INTERVAL_S = 10.0
#: Time limit for the records of a running run in one pass, and for its artifacts: commands, tags and the status wait.
PASS_S = 5.0
#: Interval of saving the state during many uploads. After a crash, the artifacts of this time are uploaded again.
SAVE_S = 2.0
_FINAL_MODEL = """\
Final model of {name}

```python
import mlflow

model = mlflow.pytorch.load_model("runs:/{run_id}/model")
```
"""


class Delivery:
    """Uploads one run, and records in `journal/` what MLflow has (`Sent`), so that the next process continues there.

    All methods raise TrackingError if MLflow is unavailable or rejects a request, and may then be called again.
    """

    def __init__(self, run: RunDir, uri: str) -> None:
        self.run = run
        self.uri = uri
        self.stored = read_config(run)
        self._config_fingerprint = ""
        self._mlflow_run: MlflowRun | None = None
        self._sweep_run = ParentRun.of(run, uri)
        self._report = ReportWriter(run)
        self._page = RunPage(run)
        self._ledger = LedgerMetrics(run)
        self._command: CommandTag | None = None
        #: State that MLflow shows.
        self._status = ""
        #: Minimum time before the next pass: polling the journals of many nodes loads the file system.
        self.pause_s = 0.0

    def open_run(self) -> MlflowRun:
        """Return the MLflow run, which the first call finds or creates."""
        if self._mlflow_run is None:
            opened = MlflowRun(self.run, self.uri)
            self._sent_facts = SentFacts.load(self.run.journal, opened.run_id)
            self.batches = Batches(self.run, opened.run_id)
            self.uploads = Uploads(self.run, opened)
            self._mlflow_run = opened
        return self._mlflow_run

    def ship_once(self, state: State | None = None) -> int:
        """Upload everything once, and obey the command that was set as a tag. Returns the number of points sent.

        Without `state` that of `state.json` is reported.
        """
        mlflow_run = self.open_run()
        config_now = artifacts.fingerprint(self.run.config)
        if self._config_fingerprint != config_now:  # at the start, and after a resume
            self.stored = read_config(self.run)
            mlflow_run.log_params(run_tags.params(self.run, self.stored))
            self._config_fingerprint = config_now
        state = state or self.run.read_state()
        config = self.stored.config
        # An error of the command or of a file stops neither the upload of metrics nor that of the status.
        failures: list[TrackingError] = []
        if config.tracking.commands:
            with _collected(failures):
                if self._command is None:
                    from hpcdist.tracking.command_tag import CommandTag  # with modules that no other run needs

                    self._command = CommandTag(self.run)
                self._command.update(mlflow_run, config.tracking.commands, state)
        num_points = self.ship_records(state)
        self._ship_tags(state)
        has_new_end = state.status in ENDED and self._sent_facts.complete != state_key(state)
        if has_new_end and state.ended is not None:
            from hpcdist.tracking import experiment_table  # with modules that no live run needs

            with _collected(failures):
                experiment_table.update(mlflow_run, self.run, state)
        if state.status == "finished":
            with _collected(failures):
                from hpcdist.tracking.final_model import complete_model  # with modules that no live run needs

                complete_model(self.run, self.uri)  # before the description, which says how to load it
        self._ship_page(state)
        self._ledger.ship(state, mlflow_run)
        with _collected(failures):
            self._ship_events()
            if self._report.write_if_due(state, self._sent_facts.report, has_new_points=num_points > 0):
                self._sent_facts.report = state_key(state)
                self._sent_facts.save(self.run.journal)
            self.uploads.ship(state, config, self.batches.last_step)
        self._ship_status(state)
        if failures:
            raise failures[0]
        if has_new_end:
            self._sent_facts.complete = state_key(state)
            self._sent_facts.save(self.run.journal)
        return num_points

    def _ship_tags(self, state: State) -> None:
        mlflow_run = self.open_run()
        tags = fixed_tags(self.run, self.stored) | state_tags(self.run, state)
        if self._sweep_run is not None:
            tags |= self._sweep_run.cell_tags()
        changed = {key: value for key, value in tags.items() if self._sent_facts.tags.get(key) != value}
        if not changed:
            return
        mlflow_run.set_tags(changed)
        self._sent_facts.tags = tags
        if NOTE_TAG in changed:  # it has replaced the description, which follows it again
            self._sent_facts.page = ""
        self._sent_facts.save(self.run.journal)

    def _ship_page(self, state: State) -> None:
        last = self._sent_facts.page
        self._sent_facts.page = ""  # after a failure, it is not known what MLflow shows
        try:
            self._sent_facts.page = self._page.update(self.open_run(), state, last)
        finally:
            if self._sent_facts.page != last:
                self._sent_facts.save(self.run.journal)

    def ship_records(self, state: State) -> int:
        """Send the records that MLflow does not have yet. Returns the number of points sent.

        Limited to PASS_S for a running run, which may log as fast as MLflow accepts records.
        """
        mlflow_run = self.open_run()
        num_before = self.batches.counts.num_points
        polls_before = self.batches.tail.num_polls
        until = math.inf
        if state.status == "running":
            until = time.monotonic() + PASS_S
        try:
            while True:
                points = self.batches.next(state.attempt, over=state.status in ENDED)
                if points is None:
                    break
                num_refused = mlflow_run.log_points(points)
                self.batches.commit(num_refused)
                if time.monotonic() >= until:
                    break
        except (OSError, TrackingError) as error:
            self.batches = Batches(self.run, mlflow_run.run_id)
            if isinstance(error, TrackingError):
                raise
            raise TrackingError(f"the journal of {self.run.name} cannot be read: {error}") from error
        self.pause_s = (self.batches.tail.num_polls - polls_before) / CHECKS_PER_S
        return self.batches.counts.num_points - num_before

    def _ship_events(self) -> None:
        try:
            for path in event_files(self.run.journal):
                offset = self._sent_facts.events.get(path.name, 0)
                while path.stat().st_size > offset:
                    events, end = read_events(path, offset)
                    if end == offset:
                        break
                    self._ship_events_once(events)
                    self._sent_facts.events[path.name] = end
                    self._sent_facts.save(self.run.journal)
                    offset = end
        except OSError as error:
            raise TrackingError(f"the events of {self.run.name} cannot be read: {error}") from error

    def _ship_events_once(self, events: Iterable[Event]) -> None:
        """Upload events. Sending the same ones again leads to the same result.

        Names that hpcdist uses itself get the prefix `script.`: parameters that the config has with another value, the
        tags `hpcdist.…`, and MLflow's own tags of a run, such as its name and its description.
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
        mlflow_run = self.open_run()
        mlflow_run.log_params(self._params_of_script(redact_tree(params)))
        mlflow_run.set_tags(_tags_of_script(redact_tree(tags)))
        if datasets:
            with _skipped_if_rejected(mlflow_run, "datasets"), translated(mlflow_run.uri):
                mlflow_run.client.log_inputs(mlflow_run.run_id, datasets=datasets)
        for model_id in models:
            with _skipped_if_rejected(mlflow_run, f"model {model_id}"):
                _ship_logged_model(mlflow_run, self.run, model_id)

    def _params_of_script(self, params: Mapping[str, str]) -> dict[str, str]:
        """Return the parameters of a script under the names that they have in MLflow, without those of the config."""
        of_config = {clean_name(key): value for key, value in run_tags.params(self.run, self.stored).items()}
        renamed = {}
        for key, value in params.items():
            configured = of_config.get(clean_name(key))
            if configured is None:
                renamed[key] = value
            elif not _is_same(configured, value):
                renamed[SCRIPT_PREFIX + key] = value
        return renamed

    def _ship_status(self, state: State) -> None:
        if self._status == state_key(state):
            return
        end_ms = None
        if state.status in ENDED:
            end_ms = self._end_ms(state)
        self.open_run().set_status(MLFLOW_STATUS.get(state.status, "RUNNING"), end_ms)
        if self._sweep_run is not None:
            self._sweep_run.refresh()
        self._status = state_key(state)

    def _end_ms(self, state: State) -> int:
        """Return the end time for MLflow.

        MLflow's duration is the difference of end and start: without pauses, it is then the running time.
        """
        running_s = sum(allocation.ended - allocation.began for allocation in allocations_of(self.run))
        running_ms = int(1000 * running_s)
        if running_ms:
            return self.open_run().start_ms + running_ms
        ended = state.ended if state.ended is not None else time.time()
        return int(ended * 1000)


@contextmanager
def _collected(failures: list[TrackingError]) -> Iterator[None]:
    """Append a TrackingError of the block to `failures` instead of raising it."""
    try:
        yield
    except TrackingError as error:
        failures.append(error)


class Uploads:
    """Uploads the files of one run that MLflow does not have: artifacts, and checkpoints and the final model as models.

    Like `Delivery`, it may be called again after a TrackingError.
    """

    def __init__(self, run: RunDir, mlflow_run: MlflowRun) -> None:
        self._run = run
        self._mlflow_run = mlflow_run
        self.sent_files = SentFiles.load(run.journal, mlflow_run.run_id)
        self._checkpoints = CheckpointModels(run, mlflow_run, self.sent_files.checkpoints)
        self._checkpoints_shipped = -math.inf
        self._logs_shipped = 0.0
        #: Time of the next search for artifacts of the trainer.
        self._search_at = 0.0
        #: Artifacts that are not uploaded, each of which is reported once.
        self._left_out: set[str] = set()

    def ship(self, state: State, config: Config, last_step: int) -> None:
        """Upload what is new or has changed; `last_step` is that of the training in MLflow."""
        try:
            documents = artifacts.documents(self._run, patch=config.tracking.patch)
            if state.status in ENDED:
                parts = [documents, artifacts.trainer_artifacts(self._run), artifacts.reports(self._run, ended=True)]
                if state.status != "stopped":
                    parts.append(artifacts.checkpoints(self._run, config.checkpoint))
                self._upload(chain(*parts))
            else:
                self._upload(documents)
                if time.monotonic() >= self._search_at:
                    self._upload_trainer_artifacts()
                if time.monotonic() - self._logs_shipped >= LOG_INTERVAL_S:
                    self._upload(artifacts.reports(self._run, ended=False))
                    self._logs_shipped = time.monotonic()
            is_running = state.status == "running"
            if not is_running or time.monotonic() - self._checkpoints_shipped >= CHECKPOINTS_INTERVAL_S:
                if self._checkpoints.update(all_sent=not is_running):
                    self._save()
                self._checkpoints_shipped = time.monotonic()
            if state.status == "finished" and (self._run.model / "MLmodel").is_file():
                self._ship_final_model(config, last_step)
        except OSError as error:
            raise TrackingError(f"a file of {self._run.name} cannot be uploaded: {error}") from error

    def _upload_trainer_artifacts(self) -> None:
        """Upload artifacts of the trainer for a limited time: metrics do not wait for many files."""
        files = list(artifacts.trainer_artifacts(self._run))
        is_complete = self._upload(files, within_s=PASS_S)
        self._search_at = time.monotonic()
        if is_complete:  # the search reads the attributes of each file, which loads the file system
            self._search_at += len(files) / CHECKS_PER_S

    def _upload(self, found: Iterable[Artifact], within_s: float = math.inf) -> bool:
        """Upload the files that MLflow does not have. Returns False if time was too short for all of them."""
        saved_at = time.monotonic()
        until = saved_at + within_s
        is_unsaved = False
        new = [item for item in found if item.fingerprint not in ("", self.sent_files.artifacts.get(item.target))]
        try:
            for number, item in enumerate(new, 1):
                # Checked right before the upload, which follows links.
                reason = artifacts.leaves_folder(item.source, self._run)
                if reason:
                    if item.target not in self._left_out:
                        log.warning("%s: not uploaded", reason)
                    self._left_out.add(item.target)
                else:
                    self._mlflow_run.upload(item.source, item.target)
                    self.sent_files.artifacts[item.target] = item.fingerprint
                    is_unsaved = True
                if time.monotonic() - saved_at >= SAVE_S:  # the state is large if the run has many artifacts
                    self._save()
                    log.info("%s: %d artifacts uploaded", self._run.name, len(self.sent_files.artifacts))
                    saved_at = time.monotonic()
                    is_unsaved = False
                if time.monotonic() >= until:
                    return number == len(new)
        finally:
            if is_unsaved:
                self._save()
        return True

    def _save(self) -> None:
        self.sent_files.save(self._run.journal)

    def _ship_final_model(self, config: Config, last_step: int) -> None:
        model = self.sent_files.model
        mlflow_run = self._mlflow_run
        folder = self._run.model
        fingerprint = artifacts.fingerprint(folder)
        reason = artifacts.leaves_folder(folder, self._run)
        if reason:
            raise TrackingError(f"{reason}: the model is not uploaded")
        if model.get("fingerprint") != fingerprint:
            description = _FINAL_MODEL.format(run_id=mlflow_run.run_id, name=self._run.name)
            model_id = log_model(mlflow_run, folder, fingerprint, last_step, description=description)
            self._checkpoints.log_final_metrics(model_id, last_step)
            model = {"fingerprint": fingerprint, "model_id": model_id}
            self.sent_files.model = model
            self._save()
        name = config.tracking.register_as
        if name and "registered" not in model:
            registered = register(mlflow_run, model["model_id"], name)
            if config.checkpoint.monitor:
                move_best(mlflow_run, name, registered.rpartition("/")[2], config.checkpoint)
            model["registered"] = registered
            self._save()


#: Interval of the metrics of a running run.
LEDGER_INTERVAL_S = 60.0
#: MLflow draws the charts of metrics in the order of their prefixes: these come after `eval/` and `train/`.
LEDGER_PREFIX = "usage/"
#: Significant digits: MLflow's list of runs shows all digits of a number.
_DIGITS = 4


class LedgerMetrics:
    """Logs the ledger of a run once a minute while it runs, and when it has stopped or ended.

    The step of a record is the last training step, or the one after the step of the record before if that is larger:
    training steps are repeated after a restart, and accounting may change the ledger of an ended run. No two records
    have the same step, and a later record has a later time, also if another process uploads it: the first request is
    for the last record in MLflow.
    """

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._logged_at = time.monotonic()
        self._state = ""
        self._values: dict[str, float] | None = None  #: in MLflow; None if not known
        self._step, self._time_ms = 0, 0  #: of these values

    def ship(self, state: State, mlflow_run: MlflowRun) -> None:
        """Log the ledger if it is due. A run of which nothing was measured has none. Raises TrackingError."""
        now = time.monotonic()
        current = state_key(state)
        is_due = current != self._state
        if state.status == "running":
            is_due = now - self._logged_at >= LEDGER_INTERVAL_S
        if not is_due:
            return
        try:
            ledger = read_ledger(self._run)
            last_step = reached_step(self._run.attempt(state.attempt)) if state.attempt else 0
        except RunFolderError as error:  # a damaged file, which must not prevent the upload of everything else
            log.warning("the ledger of %s is not uploaded: %s", self._run.name, error)
            ledger = Ledger()
            last_step = 0
        values = _ledger_values(ledger)
        if values:
            if self._values is None:
                self._values = self._read_last(mlflow_run)
            known = self._values
            if not values.items() <= known.items():
                step = max(last_step, self._step + 1)
                time_ms = max(self._time_ms + 1, int(1000 * ledger.ended))
                self._values = None  # if the response is lost
                mlflow_run.log_points([Point(key, value, time_ms, step) for key, value in values.items()])
                self._values = values
                self._step = step
                self._time_ms = time_ms
        self._state = current
        self._logged_at = now

    def _read_last(self, mlflow_run: MlflowRun) -> dict[str, float]:
        """Return the last values in MLflow, and note their step and time."""
        logged = mlflow_run.current().data.metrics
        values = {key: value for key, value in logged.items() if key.startswith(LEDGER_PREFIX)}
        history = []
        if values:
            key = f"{LEDGER_PREFIX}allocated_hours"
            with translated(mlflow_run.uri):
                history = mlflow_run.client.get_metric_history(mlflow_run.run_id, key)
        self._step, self._time_ms = max(((point.step, point.timestamp) for point in history), default=(0, 0))
        return values


def _ledger_values(ledger: Ledger) -> dict[str, float]:
    """Return the metrics of a ledger; empty if nothing was measured. Its causes are in the description and report."""
    if not ledger.entries:
        return {}
    values = {"allocated_hours": ledger.allocated_s / 3600, "queue_hours": ledger.queue_s / 3600}
    if ledger.goodput is not None:
        values["goodput"] = ledger.goodput
    if ledger.energy_kwh is not None:
        values["energy_kwh"] = ledger.energy_kwh
    return {LEDGER_PREFIX + name: float(f"{value:.{_DIGITS}g}") for name, value in values.items()}


# What the code of the ranks has logged with MLflow, besides metrics and artifacts.

#: Tags of MLflow that hpcdist sets.
_OWN_TAGS = ("hpcdist.", "mlflow.note.content", "mlflow.runName", "mlflow.source.", "mlflow.user", "mlflow.parentRunId")
#: Context of a script's run, which hpcdist records for the run itself.
_CONTEXT_TAGS = ("mlflow.user", "mlflow.source.")
#: Limits of MLflow for the schema and the profile of a dataset.
_MAX_SOURCE = 65_535


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


#: Minimum interval between two reports of a run whose state does not change.
REPORT_INTERVAL_S = 300.0


class ReportWriter:
    """Writes the report of a run to its folder."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._next = -math.inf
        self._tried = ""

    def write_if_due(self, state: State, last: str, *, has_new_points: bool) -> bool:
        """Write the report if the run has another state than in the last one. Returns whether it was written.

        A failure is logged, not raised. New points may arrive after the end of the run.
        """
        current = state_key(state)
        if current in (last, self._tried):
            is_due = has_new_points if state.status in ENDED else time.monotonic() >= self._next
            if not is_due:
                return False
        self._tried = current
        try:
            from hpcdist.review.report import write_report  # other commands that import this module draw nothing

            write_report(self._run, read_series, read_last_values)
        except Exception:  # a report must not stop the upload of the metrics
            log.warning("the report of %s cannot be written", self._run.name, exc_info=True)
            return False
        finally:
            self._next = time.monotonic() + REPORT_INTERVAL_S
        return True
