"""The supervisor of a run; it runs on the host and never imports torch.

An attempt is one start of all ranks. The supervisor watches exit codes, heartbeats and requests in the attempt's
folder, and restarts the ranks from the newest checkpoint after a failure. A separate process ships the journal to
MLflow; ranks never wait for it.
"""

import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, asdict, dataclass, replace
from typing import Protocol

from hpcdist.config.redaction import redact_text
from hpcdist.config.schema import Config
from hpcdist.config.topology import Roles
from hpcdist.errors import HpcdistError, LeaseLostError, PreflightError, UserMistake
from hpcdist.host import retry
from hpcdist.host.files import write_json
from hpcdist.host.log_files import limit_log
from hpcdist.run import records
from hpcdist.run.folder import Attempt, RunDir, State, Status, StopRequest, explain_replacement, require_same
from hpcdist.supervisor.children import ShipperProcess
from hpcdist.supervisor.notifier import Notifier
from hpcdist.supervisor.progress import Reporter
from hpcdist.supervisor.protocols import Launcher, NodeChanges
from hpcdist.supervisor.restart_policy import Failure, Kind, decide, error_text, first_failure
from hpcdist.supervisor.signals import SignalRequests
from hpcdist.supervisor.watch import Allocation, Watch

#: Free disk space that a restart needs for the logs and reports of an attempt.
ROOM_FOR_RESTART_BYTES = 2**20
#: Time before the end of an allocation that is reserved for the last write of the state.
LAST_WRITE_S = 10.0


class Job(Protocol):
    """The Slurm job of a run."""

    @property
    def allocation(self) -> Allocation | None: ...
    @property
    def nodes(self) -> NodeChanges: ...
    def is_ending(self) -> bool:
        """Return whether Slurm is ending the job; its signal may have reached only the ranks."""

    def end_or_requeue(self, state: State) -> State:
        """Called once after the last attempt: requeue the job if the run continues in it. Returns the new state."""


@dataclass(eq=False)
class Supervisor:
    """Supervises one run until its end. The caller holds the run's lease."""

    folder: RunDir
    config: Config
    launcher: Launcher
    report: Reporter
    _: KW_ONLY
    tracking_uri: str | None  #: of the shipper; None if another process ships the run
    env: Mapping[str, str]
    check_lease: Callable[[], None] = lambda: None  #: raises LeaseLostError if another supervisor holds the run
    job: Job | None = None

    def __post_init__(self) -> None:
        self._allocation = self.job.allocation if self.job is not None else None
        self._nodes = self.job.nodes if self.job is not None else NodeChanges()
        #: Number of restarts on other nodes, which `launch.max_restarts` does not limit.
        self._moves = 0
        self._state = State(status="created")
        self._attempt: Attempt | None = None
        self._signals = SignalRequests(in_job=self.job is not None)
        #: Set after the ranks have ended if Slurm is ending the job without a signal to this process.
        self._job_request: StopRequest | None = None
        self._began = time.time()

    def run(self) -> State:
        """Start attempts until the run ends, and return its last state. After a lost lease nothing more is written."""
        patience_s = retry.UNATTENDED_S
        if self._allocation is not None:
            patience_s = max(0.0, min(patience_s, self._allocation.end - time.time() - LAST_WRITE_S))
        with (
            explain_replacement(self.folder.path, self.env),
            retry.patient(patience_s),
            self._signals.handled(),
            Notifier(self.folder, self.config.notify, self.env, self.report.note) as notifier,
        ):
            state = replace(self.folder.read_state(), status="running", reason="", ended=None)
            state = replace(state, rejected=False, lost=False, world_size=self.launcher.num_ranks)
            self._write(state)
            limit_log(self.folder.path)
            shipper: ShipperProcess | None = None
            try:
                if self.tracking_uri:
                    shipper = ShipperProcess(self.folder, self.tracking_uri, self.env)
            except OSError as error:
                self.report.note(f"the shipper cannot be started: {error_text(error)}; run `hpcdist sync` later")
            failure: Exception | None = None
            try:
                with explain_replacement(self.folder.path, self.env):
                    state = self._attempts(state, notifier)
                if self.job is not None:
                    # Before the state is written: after a kill in between, the next start continues the run.
                    state = self.job.end_or_requeue(state)
            except LeaseLostError:
                if shipper is not None:
                    shipper.drain(0)  # the new supervisor has its own shipper
                raise
            except Exception as error:
                # No exception may leave the run in the state "running".
                failure, rejected = error, isinstance(error, UserMistake)
                why = error_text(error)
                state = replace(self._state, status="failed", reason=why, ended=time.time(), rejected=rejected)
            try:
                self._write(state)
            except OSError as error:
                self.report.note(f"{self.folder.path}/state.json cannot be written: {error.strerror}")
            notifier.send("requeued" if state.status == "queued" else "ended", state)
        if shipper is not None and not shipper.drain(self.config.tracking.drain_timeout_s, self.report.note):
            self.report.note(
                f"MLflow at {redact_text(self.tracking_uri or '')} has not received all records (see shipper.log);"
                f" none are lost: `hpcdist sync {self.folder.name}` ships the rest"
            )
        if failure is not None and not isinstance(failure, OSError):
            raise failure
        return state

    def _write(self, state: State) -> None:
        self.check_lease()
        self._state = state
        self.folder.write_state(state)

    def _attempts(self, state: State, notifier: Notifier) -> State:
        """Start attempts until one of them ends the run. Returns its final state."""
        event, reason = "started", ""
        restarts_before = state.restarts
        failures: list[Failure] = []
        while True:
            require_same(self.folder.path, self.env)
            attempt = self._begin_attempt(state, restarts_before + len(failures) + self._moves)
            notifier.send(event, replace(self._state, reason=reason))
            end, failure = self._one_attempt(attempt)
            require_same(self.folder.path, self.env)
            state, times = self._state, replace(self._times, ended=time.time(), failed=failure is not None)
            ended_without_request = (end == "stopped" or failure is not None) and self._request_of(attempt) is None
            if ended_without_request and self.job is not None and self.job.is_ending():
                self._job_request = StopRequest(cause="preemption")
            # Although the ranks have ended: `_stop_cause` in slurm/job/batch_step.py reads it, also at the next start.
            self._write_request(attempt)
            if failure is None:
                over = self._after_end(state, attempt, times, end)
            else:
                over = self._after_failure(state, attempt, times, failure, failures)
            if over is not None:
                return over
            event, reason = "restarted", failure.sentence() if failure else "more nodes are available"

    def _begin_attempt(self, state: State, restarts: int) -> Attempt:
        attempt = self.folder.new_attempt()
        self._write(replace(state, attempt=attempt.number, restarts=restarts, world_size=self.launcher.num_ranks))
        # A request may have reached the previous attempt after its failure.
        if self._attempt is not None and (late := self._request_of(self._attempt)) is not None:
            attempt.send_request(late)
        self._resources = self.launcher.resources
        times = records.AttemptTimes(
            supervised=self._began,
            began=time.time(),
            reached=records.reached_step(self.folder.attempt(attempt.number - 1)) if attempt.number > 1 else 0,
            measured=not self.config.trainer.script,
            time_limit=None if self._allocation is None else self._allocation.end,
        )
        self._times = records.begin(attempt, self._resources, times)
        return attempt

    def _one_attempt(self, attempt: Attempt) -> tuple[Status, Failure | None]:
        """Return how the attempt ended, and its failure; with a failure, the first value has no meaning."""
        self._attempt = attempt
        self._write_request(attempt)
        try:
            # A launcher that raises has already ended the ranks that it had started.
            ranks = retry.retry(lambda: self.launcher.start(attempt), attempt.path)
        except (HpcdistError, OSError) as error:
            is_unfit, is_mistake = isinstance(error, PreflightError), isinstance(error, UserMistake)
            kind: Kind = "unfit" if is_unfit else "rejected" if is_mistake else "error"
            return "failed", Failure(kind=kind, rank=0, host="", step=None, error=error_text(error))
        if self.launcher.resources != self._resources:  # the preflight check has left out some nodes
            self._times = records.begin(attempt, self.launcher.resources, self._times)
            self._write(replace(self._state, world_size=self.launcher.num_ranks))
        self.report.attempt(attempt, self.launcher.num_ranks)
        if attempt.number > 1:
            self.report.note(records.resume_point(self.folder, self._times.reached, self.config.trainer.script))
        try:
            watch = Watch(
                attempt,
                ranks,
                self.config,
                self.report,
                self._allocation,
                signal_request=self._signals.request,
                check_lease=self.check_lease,
                nodes=self._nodes,
            )
            found = watch.until_over()
            # A copy, because `close` kills the remaining ranks, which did not fail.
            exits = dict(ranks.exits)
        finally:
            ranks.close()
        outcomes = attempt.outcomes()
        if watch.cancelled:
            return "cancelled", None
        sent_sigterm = watch.stops_script and not found
        last_step = watch.progress.last_step
        num_ranks = self.launcher.num_ranks
        failure = found or first_failure(
            exits, outcomes, last_step, ranks.host_of, sent_sigterm=sent_sigterm, num_ranks=num_ranks
        )
        if sent_sigterm:
            return "stopped", failure
        ended = outcomes.get(0, {}).get("outcome")
        if failure is None and ended is None:
            why = "exited with code 0 without a report"
            failure = Failure(kind="vanished", rank=0, host=ranks.host_of(0), step=last_step(0), error=why)
        return "stopped" if ended == "stopped" else "finished", failure

    def _after_end(self, state: State, attempt: Attempt, times: records.AttemptTimes, end: Status) -> State | None:
        """Return the final state after an attempt without a failure; None if the run is restarted on more nodes."""
        written = attempt.read_request()  # first, so that a stop between the two lines is no growth
        request = self._request_of(attempt)
        if end == "stopped" and request is None and written is not None:  # to grow
            records.write_times(attempt, replace(times, status=end, reason="restarted on more nodes"))
            self._nodes.use_returned()
            self._moves += 1
            return None
        reason = ""
        if end == "finished":
            reason = str(attempt.outcomes().get(0, {}).get("reason") or "the trainer has finished")
        elif end == "stopped":
            reason = records.how_stopped(self.folder, attempt, self.config.trainer.script, self._times.began)
            reason += " (the ranks received a stop signal)" if request is None else ""
        records.write_times(attempt, replace(times, status=end, reason=reason))
        if request is not None and end != "finished":
            reason = request.after(reason)
        return replace(state, status=end, reason=reason, ended=time.time())

    def _after_failure(
        self, state: State, attempt: Attempt, times: records.AttemptTimes, failure: Failure, failures: list[Failure]
    ) -> State | None:
        """Return the final state of the run after a failed attempt; None if the ranks are restarted here.

        Args:
            failures: the earlier failures, to which this one is added unless other nodes replace those that failed.
        """
        if self.config.roles:
            roles = Roles.of(self.config.roles, self.launcher.num_ranks)
            failure = replace(failure, role=roles.name_of(failure.rank))
        why = failure.sentence()
        records.write_times(attempt, replace(times, status="failed", reason=why))
        log = attempt.log(failure.rank)
        if failure.kind == "unfit":
            log = attempt.preflight_text
        elif failure.kind == "not_started" and (srun := attempt.path / "srun.log").exists():  # on Slurm only
            log = srun
        self.report.failure(failure, log)
        stop_requested = self._request_of(attempt) is not None
        disk = retry.retry(lambda: shutil.disk_usage(self.folder.path), self.folder.path)
        is_full = disk.free < ROOM_FOR_RESTART_BYTES
        is_open = not (stop_requested or is_full or failure.kind in ("rejected", "interrupted"))
        if is_open:
            write_json(attempt.failure, asdict(failure))
            if failure.kind != "unfit" and (change := self._nodes.replace_lost()):
                self._moves += 1
                self.report.note(f"restart: {change}")
                return None
        failures.append(failure)
        status: Status = "failed"
        restart, reason = decide(failures, self.config.launch.max_restarts, stop_requested=stop_requested)
        if failure.kind == "interrupted" and not stop_requested:
            status, reason = "stopped", f"{why}; Slurm signals the time limit, so no restart here"
        elif is_open and (broken := self.launcher.broken()):
            # Stopped without a request: on Slurm the batch step requeues the job.
            status, reason = "stopped", f"{why}; {broken}"
        elif restart and is_full:
            reason = f"{why}; no restart, since the disk of {self.folder.path} is full"
        elif restart:
            self.report.note(f"restart {len(failures)} of {self.config.launch.max_restarts}")
            return None
        records.write_times(attempt, replace(times, status="failed", reason=reason))  # may name lost nodes
        rejected = failure.kind == "rejected"
        return replace(state, status=status, reason=reason, ended=time.time(), rejected=rejected)

    def _request_of(self, attempt: Attempt) -> StopRequest | None:
        """Return the request to end the run with an attempt: from its file, a signal to this process, or its job."""
        found = attempt.read_request()
        return found if found is not None and found.ends_run else self._own_request()

    def _own_request(self) -> StopRequest | None:
        return self._signals.request() or self._job_request

    def _write_request(self, attempt: Attempt) -> None:
        asked = self._own_request()
        try:
            found = attempt.read_request()
            if asked is not None and not (found is not None and found.ends_run):
                attempt.send_request(asked)
        except OSError as error:
            self.report.note(
                f"the request to {asked.action if asked else 'stop'} cannot be written to {attempt.path}: {error}"
            )
