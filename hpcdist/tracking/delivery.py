"""Upload of one run to MLflow in passes, each of which continues where the last one ended."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from hpcdist.errors import TrackingError
from hpcdist.review.ledger import allocations_of
from hpcdist.run.folder import CHECKS_PER_S, ENDED, RunDir, State
from hpcdist.tracking import artifacts, run_tags
from hpcdist.tracking.batches import PointBatches
from hpcdist.tracking.journal import event_files, read_events
from hpcdist.tracking.ledger_metrics import LedgerMetrics
from hpcdist.tracking.mlflow_client import MlflowRun
from hpcdist.tracking.parent_run import ParentRun
from hpcdist.tracking.report_writer import ReportWriter
from hpcdist.tracking.run_page import NOTE_TAG, RunPage
from hpcdist.tracking.run_tags import MLFLOW_STATUS, fixed_tags, read_config, state_tags
from hpcdist.tracking.script_events import send_events
from hpcdist.tracking.upload_state import SentFacts, state_key
from hpcdist.tracking.uploads import Uploads

if TYPE_CHECKING:
    from hpcdist.tracking.command_tag import CommandTag

#: Time limit for the records of a running run in one pass: commands, tags and the status wait.
PASS_S = 5.0


class Delivery:
    """Uploads one run, and records its state in `journal/` (`Sent`), so that the next process continues there.

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
            self.batches = PointBatches(self.run, opened.run_id)
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
        self._sent_facts.page = ""  # after a failure, the page that MLflow shows is not known
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
            self.batches = PointBatches(self.run, mlflow_run.run_id)
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
                    send_events(events, self.open_run(), self.run, run_tags.params(self.run, self.stored))
                    self._sent_facts.events[path.name] = end
                    self._sent_facts.save(self.run.journal)
                    offset = end
        except OSError as error:
            raise TrackingError(f"the events of {self.run.name} cannot be read: {error}") from error

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

        MLflow's duration is the difference of end and start: without pauses, it is then the running time. A run that
        was cancelled in the queue has none, however late it is closed.
        """
        running_s = sum(allocation.ended - allocation.began for allocation in allocations_of(self.run))
        running_ms = int(1000 * running_s)
        if running_ms:
            return self.open_run().start_ms + running_ms
        if state.attempt == 0:
            return self.open_run().start_ms
        ended = state.ended if state.ended is not None else time.time()
        return int(ended * 1000)


@contextmanager
def _collected(failures: list[TrackingError]) -> Iterator[None]:
    """Append a TrackingError of the block to `failures` instead of raising it."""
    try:
        yield
    except TrackingError as error:
        failures.append(error)
