"""Upload of one run to MLflow in passes, each of which continues where the last one ended."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable
from itertools import chain

from hpcdist.config.monitor import monitor_of
from hpcdist.errors import TrackingError
from hpcdist.review.allocation_times import allocations_of
from hpcdist.run.folder import ENDED, RunDir, State
from hpcdist.run.polling import CHECKS_PER_S
from hpcdist.tracking.artifacts import run_files
from hpcdist.tracking.artifacts.best_version import move_best
from hpcdist.tracking.artifacts.checkpoint_models import CheckpointModels
from hpcdist.tracking.artifacts.logged_model import log_model, register
from hpcdist.tracking.artifacts.report_writer import ReportWriter
from hpcdist.tracking.artifacts.run_files import Artifact
from hpcdist.tracking.client.mlflow_run import MlflowRun
from hpcdist.tracking.journal.batches import Batches
from hpcdist.tracking.journal.shipping_state import ShippingState, completion_of
from hpcdist.tracking.pages import run_metadata, saved_views
from hpcdist.tracking.pages.parent_run import ParentRun
from hpcdist.tracking.pages.run_page import NOTE_TAG, RunPage, configured_note
from hpcdist.tracking.shipping.changed_names import ChangedNames
from hpcdist.tracking.shipping.command_tag import CommandTag
from hpcdist.tracking.shipping.ledger_metrics import LedgerMetrics
from hpcdist.tracking.shipping.script_delivery import ship_new_events

log = logging.getLogger(__name__)

LOG_INTERVAL_S = 60.0
CHECKPOINTS_INTERVAL_S = 10.0
#: Time limit for the records of a running run in one pass, and for its artifacts; tags and the status follow.
PASS_S = 5.0
#: The folder of a trainer's artifacts is searched less often if a search takes longer, at CHECKS_PER_S.
SEARCH_S = 2.0
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
    """The upload of one run; `journal/shipped.json` records its state for the next process.

    All methods raise TrackingError if MLflow is unavailable or rejects a request, and may then be called again.
    """

    def __init__(self, run: RunDir, uri: str) -> None:
        self.run = run
        self.uri = uri
        self._config_mark = run_files.fingerprint(run.config)
        self.config = run_metadata.read_config(run)
        self.progress = ShippingState()
        self._saved = run.journal / "shipped.json"
        self._names = ChangedNames(run.journal / "names.json")
        self._mlflow: MlflowRun | None = None
        self._parent = ParentRun.of(run, uri)
        self._report = ReportWriter(run)
        self._page = RunPage(run)
        self._ledger = LedgerMetrics(run, lambda: self.progress.save(self._saved))
        self._command = CommandTag(run, lambda: self.progress.save(self._saved))
        #: Status that the pass in progress reports.
        self._state: State | None = None
        #: Error of a request for the commands in this pass.
        self._command_failure: TrackingError | None = None
        self._checkpoints_shipped = -math.inf
        self._logs_shipped = 0.0
        #: Time of the next search for artifacts of the trainer.
        self._search_at = 0.0
        #: Artifacts that are not uploaded, each of which is reported once.
        self._left_out: set[str] = set()
        #: Phase of the run in which the prepared views were written: `live` or `ended`.
        self._views_written = ""
        #: Minimum time before the next pass: polling the journals of many nodes loads the file system.
        self.pause_s = 0.0

    def open_run(self) -> MlflowRun:
        """Find or create the MLflow run, and log the parameters of the config; once."""
        if self._mlflow is None:
            opened = MlflowRun(self.run, self.uri)
            opened.log_params(run_metadata.params(self.run, self.config))
            self._names.note(run_metadata.names(self.run, self.config))
            self._mlflow = opened
            self._load()
        return self._mlflow

    def _load(self) -> None:
        """Load the saved state, unless it belongs to another MLflow run."""
        run_id = self.open_run().run_id
        self.progress = ShippingState.load(self._saved)
        if self.progress.run_id != run_id:
            self.progress = ShippingState(run_id=run_id)
        self._batches = Batches(self.run, self.progress)
        self._checkpoints = CheckpointModels(self.run, self.open_run(), self.progress.checkpoints)

    def ship_once(self, state: State | None = None) -> int:
        """Upload everything once. Returns the number of points sent.

        Args:
            state: State of the run to report; by default that of `state.json`.
        """
        self.open_run()
        self._follow_config()
        state = state or self.run.read_state()
        self._state, self._command_failure = state, None
        self._obey_commands()
        num_points = self.ship_records(state)
        for ship in (self._ship_page, self._ship_tags, self._ship_views, self._ship_ledger):
            ship(state)
            self._obey_during_pass()
        failure = None
        try:
            self._ship_events()
            self._ship_artifacts(state)
            self._ship_checkpoints(state)
            if state.status == "finished":
                self._ship_model()
        except TrackingError as error:
            failure = error  # the status of the run is reported in any case
        self._ship_status(state)
        if failure := failure or self._command_failure:
            raise failure
        if (mark := completion_of(state)) and self.progress.complete != mark:
            self.progress.complete = mark
            self.progress.save(self._saved)
        return num_points

    def _obey_commands(self) -> None:
        """Obey the commands that were set as a tag, at their interval. An error does not stop the upload."""
        assert self._state is not None
        try:
            self._command.update(self.open_run(), self.config, self._state, self.progress)
        except TrackingError as error:
            self._command_failure = error

    def _obey_during_pass(self) -> None:
        """Obey new commands to a running run: with a slow server or large files, a pass takes minutes."""
        if self._command_failure is None and self._state is not None and self._state.status == "running":
            self._obey_commands()

    def _follow_config(self) -> None:
        """Log the keys that a resume has changed, once they are in the config of the run."""
        if self._config_mark != (mark := run_files.fingerprint(self.run.config)):
            self.config = run_metadata.read_config(self.run)
            self.open_run().log_params(run_metadata.params(self.run, self.config))
            self._load()  # with the budgets of the new config
            self._config_mark = mark

    def ship_records(self, state: State) -> int:
        """Send the records that MLflow does not have yet. Returns the number of points sent.

        Limited to PASS_S for a running run, which may log as fast as MLflow accepts records.
        """
        mlflow = self.open_run()
        num_sent, polls_before = 0, self._batches.num_polls
        until = time.monotonic() + PASS_S if state.status == "running" else math.inf
        try:
            while self._batches.plan(state.attempt, over=state.status in ENDED):
                # The intent is saved before sending: after a crash the next process sends the same records again, and
                # MLflow stores equal points once.
                self.progress.save(self._saved)
                points = self._batches.points()
                self._names.note(self._batches.names)
                num_refused = mlflow.log_points(points)
                self.progress.commit()
                self.progress.num_points += len(points) - num_refused
                self.progress.num_refused += num_refused
                self.progress.save(self._saved)
                num_sent += len(points) - num_refused
                self._obey_during_pass()
                if time.monotonic() >= until:
                    break
        except OSError as error:
            self._load()
            raise TrackingError(f"the journal of {self.run.name} cannot be read: {error}") from error
        except TrackingError:
            self._load()
            raise
        self.pause_s = (self._batches.num_polls - polls_before) / CHECKS_PER_S
        return num_sent

    def _ship_tags(self, state: State) -> None:
        tags = (
            run_metadata.fixed_tags(self.run, self.config)
            | run_metadata.job_tags(self.run)
            | run_metadata.state_tags(state)
        )
        if self._parent is not None:
            tags |= self._parent.cell_tags()
        tags.pop(NOTE_TAG, None)  # part of the description, see `_ship_page`
        changed = {key: value for key, value in tags.items() if self.progress.tags.get(key) != value}
        if changed:
            self.open_run().set_tags(changed)
            self.progress.tags = tags
            self.progress.save(self._saved)

    def _ship_page(self, state: State) -> None:
        before = dict(self.progress.page)
        self._page.update(self.open_run(), state, self.progress, configured_note(self.config))
        if self.progress.page != before:
            self.progress.save(self._saved)

    def _ship_events(self) -> None:
        """Upload the parameters, tags, datasets and models that the code of the ranks has logged."""
        for name, offset in ship_new_events(self.open_run(), self.run, self.config, self.progress.events, self._names):
            self.progress.events[name] = offset
            self.progress.save(self._saved)
            self._obey_during_pass()

    def _ship_ledger(self, state: State) -> None:
        self._ledger.ship(state, self.open_run(), self.progress)

    def _ship_views(self, state: State) -> None:
        """Write the prepared views of the experiment in the first pass and at the end of the run.

        At the end, columns appear again that another run has removed by writing at the same time.
        """
        phase = "ended" if state.status in ENDED else "live"
        if self._views_written != phase:
            self._views_written = phase
            saved_views.write(self.open_run(), self.run, self.config)

    def _ship_artifacts(self, state: State) -> None:
        self._report.write_if_due(state, self.progress)
        found = chain(run_files.documents(self.run), run_files.preflight(self.run))
        if state.status in ENDED:
            weights = run_files.checkpoints(self.run, self.config) if state.status != "stopped" else ()
            others = run_files.trainer_artifacts(self.run), run_files.reports(self.run, ended=True), weights
            self._upload(chain(found, *others), counted=True)
            return
        self._upload(found)
        self._ship_trainer_artifacts()
        if time.monotonic() - self._logs_shipped >= LOG_INTERVAL_S:
            self._upload(run_files.reports(self.run, ended=False))
            self._logs_shipped = time.monotonic()

    def _ship_trainer_artifacts(self) -> None:
        """Upload the files of the trainer for PASS_S at most, so that metrics do not wait for many files."""
        if time.monotonic() < self._search_at:
            return
        found = list(run_files.trainer_artifacts(self.run))
        is_complete = self._upload(found, within_s=PASS_S)
        # The search reads the attributes of each file, which loads the file system.
        pause_s = len(found) / CHECKS_PER_S
        self._search_at = time.monotonic() + (pause_s if is_complete and pause_s > SEARCH_S else 0.0)

    def _upload(self, found: Iterable[Artifact], within_s: float = math.inf, *, counted: bool = False) -> bool:
        """Upload the files that MLflow does not have. Returns False if time was too short for all of them.

        Args:
            counted: record how many are left, for `upload_progress`.
        """
        until = time.monotonic() + within_s
        saved_at, num_unsaved = time.monotonic(), 0
        try:
            if counted:
                found = list(found)
                self.progress.left = sum(map(self._is_new, found))
                self.progress.save(self._saved)
            for item in found:
                if self._is_new(item):
                    # Checked right before the upload, which follows links.
                    if reason := run_files.leaves_folder(item, self.run):
                        if item.target not in self._left_out:
                            log.warning("%s: not uploaded", reason)
                        self._left_out.add(item.target)
                        continue
                    self.open_run().upload(item.source, item.target)
                    self.progress.artifacts[item.target] = item.fingerprint
                    self.progress.left = max(0, self.progress.left - 1)
                    num_unsaved += 1
                    self._obey_during_pass()
                    if time.monotonic() - saved_at >= SAVE_S:  # the state is large if the run has many artifacts
                        self.progress.save(self._saved)
                        log.info("%s: %d artifacts uploaded", self.run.name, len(self.progress.artifacts))
                        saved_at, num_unsaved = time.monotonic(), 0
                    if time.monotonic() >= until:
                        return False
        except OSError as error:
            raise TrackingError(f"an artifact of {self.run.name} cannot be read: {error}") from error
        finally:
            if num_unsaved:
                self.progress.save(self._saved)
        return True

    def _is_new(self, item: Artifact) -> bool:
        return item.fingerprint not in ("", self.progress.artifacts.get(item.target))

    def _ship_checkpoints(self, state: State) -> None:
        running = state.status == "running"
        if running and time.monotonic() - self._checkpoints_shipped < CHECKPOINTS_INTERVAL_S:
            return
        try:
            if self._checkpoints.update(all_sent=not running):
                self.progress.save(self._saved)
        except OSError as error:
            raise TrackingError(f"a checkpoint of {self.run.name} cannot be read: {error}") from error
        self._checkpoints_shipped = time.monotonic()

    def _ship_model(self) -> None:
        if not (self.run.model / "MLmodel").is_file():
            return
        model = self.progress.model
        mark = run_files.fingerprint(self.run.model)
        if reason := run_files.leaves_folder(Artifact(self.run.model, "model", mark), self.run):
            raise TrackingError(f"{reason}: the model is not uploaded")
        if model.get("fingerprint") != mark:
            steps = [
                own[1] for key, all_ in self.progress.steps.items() if key[:7] != "system/" for own in all_.values()
            ]
            last_step = max(steps, default=0)
            mlflow = self.open_run()
            description = _FINAL_MODEL.format(run_id=mlflow.run_id, name=self.run.name)
            model_id = log_model(mlflow, self.run.model, mark, last_step, description=description)
            self._checkpoints.log_final_metrics(model_id, last_step)
            model = self.progress.model = {"fingerprint": mark, "model_id": model_id}
            self.progress.save(self._saved)
        name = (self.config.get("tracking") or {}).get("register_as")
        if name and "registered" not in model:
            registered = register(self.open_run(), model["model_id"], name)
            if (monitor := monitor_of(self.config)).metric:
                move_best(self.open_run(), name, registered.rpartition("/")[2], monitor)
            model["registered"] = registered
            self.progress.save(self._saved)

    def _ship_status(self, state: State) -> None:
        status = run_metadata.MLFLOW_STATUS.get(state.status, "RUNNING")
        # The attempt is included, since a resumed run may end with the same status.
        known = f"{status} {state.attempt}"
        if self.progress.status != known:
            ended = state.ended if state.ended is not None else time.time()
            # MLflow's duration is the difference of end and start: without pauses, it is the running time.
            running_ms = int(1000 * sum(one.ended - one.began for one in allocations_of(self.run)))
            end_ms = self.open_run().start_ms + running_ms if running_ms else int(ended * 1000)
            self.open_run().set_status(status, end_ms if state.status in ENDED else None)
            if self._parent is not None:
                self._parent.refresh()
            self.progress.status = known
            self.progress.save(self._saved)
