"""The supervisor of a run; it runs on the host and never imports torch.

An attempt is one start of all ranks. The supervisor watches the exit codes that their parents report, heartbeats and
requests in the attempt's folder, and restarts the ranks from the newest checkpoint after a failure. A separate process
ships the journal to MLflow; ranks never wait for it.
"""

import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from hpcdist.config.redaction import redact_text
from hpcdist.config.roles import Roles
from hpcdist.config.schema import Config
from hpcdist.errors import HpcdistError, LeaseLostError, PreflightError, UserMistake, error_text
from hpcdist.host import retry
from hpcdist.host.json_files import read_json, write_json
from hpcdist.host.log_files import limit_log
from hpcdist.run import attempt_times
from hpcdist.run.attempt_times import AttemptTimes, Resources, read_times, write_times
from hpcdist.run.fitted_batch import fit
from hpcdist.run.folder import ENDED, Attempt, RunDir, State, StopCause, StopRequest, explain_replacement, require_same
from hpcdist.run.reached_steps import reached_step
from hpcdist.run.resume_text import how_stopped, nothing_saved, resume_point
from hpcdist.supervisor.children import MetricsReader, ShipperProcess
from hpcdist.supervisor.ending import STATUS_AFTER, EndedAttempt, Ending, NodeFindings, Outcome, decide
from hpcdist.supervisor.notifier import Notifier
from hpcdist.supervisor.progress import Reporter
from hpcdist.supervisor.protocols import Launcher, NodeChanges
from hpcdist.supervisor.restart_policy import Failure, Kind, first_failure, killed_beside, late_end
from hpcdist.supervisor.signals import SignalRequests
from hpcdist.supervisor.watch import Allocation, Watch
from hpcdist.tracking.rank_records import URI_VARIABLE, has_metrics

#: Free disk space that a restart needs for the logs and reports of an attempt.
ROOM_FOR_RESTART_BYTES = 2**20
#: End of the reason of a script that has logged nothing.
NO_METRICS = "it logged no metrics: use MLflow, hpcdist.log, TensorBoard, a csv log or tracking.stdout_metrics"
#: Time before the end of an allocation that is reserved for the last write of the state.
LAST_WRITE_S = 10.0
#: Slurm may send the signal ahead of the time limit this much earlier than requested (`sbatch --signal`).
EARLY_SIGNAL_S = 60.0
#: An attempt without a checkpoint that was shorter is repeated to find out whether a node has caused its exception.
SHORT_ATTEMPT_S = 600.0


class Job(Protocol):
    """The Slurm job of a run."""

    @property
    def allocation(self) -> Allocation | None:
        """The time limit of the job; None without one."""

    @property
    def nodes(self) -> NodeChanges:
        """The changes of nodes within the allocation."""

    @property
    def restart_count(self) -> int:
        """How often Slurm has restarted the job."""

    def is_ending(self) -> bool:
        """Return whether Slurm is ending the job; its signal may have reached only the ranks."""

    def is_requeued(self) -> bool:
        """Return whether Slurm has requeued the job since this start of it."""

    def requeue(self) -> None:
        """Requeue the job, without broken nodes. Raises HpcdistError if Slurm refuses."""

    def release_nodes(self) -> None:
        """End the remaining ranks, and give back all nodes but the supervisor's."""


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
        self._allocation: Allocation | None = None
        self._nodes = NodeChanges()
        if self.job is not None:
            self._allocation = self.job.allocation
            self._nodes = self.job.nodes
        #: Failures after which the ranks were restarted on the same nodes.
        self._failures: list[Failure] = []
        self._failure_before: Failure | None = None  #: see `EndedAttempt`
        #: Number of restarts that `launch.max_restarts` does not limit: other or more nodes, smaller micro-batches.
        self._moves = 0
        self._state = State(status="created")
        #: The last attempt with ranks that this process has started; None before the first one.
        self._last_attempt: Attempt | None = None
        self._signals = SignalRequests(in_job=self.job is not None)
        #: Set after the ranks have ended if Slurm is ending the job without a signal to this process.
        self._job_request: StopRequest | None = None
        self._began = time.time()  #: this supervisor, in seconds since the epoch
        #: Of the running or last attempt: the resources of its ranks, and what is recorded about its times.
        self._resources: Resources
        self._times: AttemptTimes
        #: Which processes beside the ranks the kernel has killed for lack of memory in the last attempt: a clause, or
        #: "" without any.
        self._killed_beside = ""
        self._ended_late = ""

    def run(self) -> State:
        """Start attempts until the run ends or its job is requeued, and return its last state.

        Raises LeaseLostError, after which nothing more is written.
        """
        # File operations are repeated for this time while the file system does not answer.
        patience_s = retry.UNATTENDED_S
        if self._allocation is not None:
            patience_s = max(0.0, min(patience_s, self._allocation.end - time.time() - LAST_WRITE_S))
        with (
            explain_replacement(self.folder.path, self.env),
            retry.patient(patience_s),
            self._signals.handled(),
            Notifier(self.folder, self.config.notify, self.env, self.report.note) as notifier,
        ):
            state = replace(
                self.folder.read_state(),
                status="running",
                reason="",
                ended=None,
                rejected=False,
                lost=False,
                world_size=self.launcher.num_ranks,
            )
            self._write(state)
            limit_log(self.folder.path)  # of this process, if its output is a file in the run folder
            shipper = self._start_shipper()
            reader = self._start_reader()
            failure: Exception | None = None
            try:
                # As around the whole block, so that the error handled below already says that the run folder was
                # replaced: the state gets its text.
                with explain_replacement(self.folder.path, self.env):
                    state = self._attempts(notifier)
            except LeaseLostError:
                # The new supervisor has its own processes.
                if shipper is not None:
                    shipper.drain(0)
                if reader is not None:
                    reader.kill()
                raise
            except Exception as error:
                failure = error
                state = self._state_after(error)
            state = self._finish_reading(reader, state)
            try:
                self._write(state)
            except OSError as error:
                self.report.note(f"{self.folder.path}/state.json cannot be written: {error.strerror}")
            event = "requeued" if state.status == "queued" else "ended"
            notifier.send(event, state)
        if shipper is not None:
            self._drain(shipper)
        # The state explains an error of the system, such as a full disk; a traceback would say no more.
        if failure is not None and not isinstance(failure, OSError):
            raise failure
        return state

    def _state_after(self, error: Exception) -> State:
        """Return the state after an exception of this process, which must not leave the run in the state `running`."""
        return replace(
            self._state,
            status="failed",
            reason=error_text(error),
            ended=time.time(),
            rejected=isinstance(error, UserMistake),
        )

    def _start_shipper(self) -> ShipperProcess | None:
        if not self.tracking_uri:
            return None
        try:
            return ShipperProcess(self.folder, self.tracking_uri, self.env)
        except OSError as error:
            self.report.note(f"the shipper cannot be started: {error_text(error)}; run `hpcdist sync` later")
            return None

    def _start_reader(self) -> MetricsReader | None:
        """Start the process that reads metrics in files and output of the ranks; None if the run needs none."""
        tracking = self.config.tracking
        reads_files = self.config.trainer.script and tracking.script_files
        if not reads_files and not tracking.stdout_metrics:
            return None
        try:
            return MetricsReader(self.folder, self.env)
        except OSError as error:
            self.report.note(f"metrics in files of the script are not read: {error_text(error)}")
            return None

    def _finish_reading(self, reader: MetricsReader | None, state: State) -> State:
        """Wait until the metrics of a script are in the journal: the shipper ends after the end of the run is written.

        Returns the state, of a finished script without metrics with the sentence how to log some.
        """
        try:
            if reader is not None:
                for warning in reader.finish():
                    self.report.note(warning)
            is_finished_script = self.config.trainer.script and state.status == "finished"
            logs_elsewhere = URI_VARIABLE in self.config.launch.env
            if not is_finished_script or logs_elsewhere or has_metrics(self.folder):
                return state
        except (HpcdistError, OSError) as error:
            self.report.note(f"the journal cannot be read: {error_text(error)}")
            return state
        return replace(state, reason=f"{state.reason}; {NO_METRICS}")

    def _drain(self, shipper: ShipperProcess) -> None:
        """Wait until MLflow has all records, for a bounded time."""
        has_all = shipper.drain(self.config.tracking.drain_timeout_s, self._note_upload)
        if has_all or not self.folder.path.is_dir():  # the records are in the folder; `run` names a missing one
            return
        self.report.note(
            f"MLflow at {redact_text(self.tracking_uri or '')} has not received all records (see shipper.log);"
            f" none are lost: `hpcdist sync {self.folder.name}` ships the rest"
        )

    def _note_upload(self, text: str) -> None:
        """Report a long upload, and give back the nodes of a run that has ended: the upload needs none of them."""
        self.report.note(text)
        if self.job is not None and self._state.status in ENDED:
            self.job.release_nodes()

    def _write(self, state: State) -> None:
        """Write the state of the run. Raises LeaseLostError if another supervisor holds the run."""
        self.check_lease()
        self._state = state
        self.folder.write_state(state)

    def _attempts(self, notifier: Notifier) -> State:
        """Start attempts until one of them ends the run or requeues its job. Returns the state to be written."""
        event, reason = "started", ""
        restarts_before = self._state.restarts
        while True:
            # Not in a folder that somebody has put in the place of the run's.
            require_same(self.folder.path, self.env)
            attempt = self._begin_attempt(restarts_before + len(self._failures) + self._moves)
            notifier.send(event, replace(self._state, reason=reason))
            outcome = self._with_role(self._run_attempt(attempt))
            require_same(self.folder.path, self.env)
            facts = self._record_end(attempt, outcome)
            ending = decide(facts)
            if ending.kind == "restart":
                assert isinstance(outcome, Failure)
                self._failures.append(outcome)
                self._failure_before = outcome
                self.report.note(f"restart {len(self._failures)} of {self.config.launch.max_restarts}")
            elif ending.kind in ("move", "refit"):
                self._moves += 1
                self._failure_before = None
                self.report.note(f"restart: {ending.reason}")
            elif ending.kind == "grow":
                self._moves += 1
                self._failure_before = None
                self._nodes.use_returned()
            else:
                return self._end_run(attempt, outcome, ending)
            event, reason = "restarted", facts.reason

    def _begin_attempt(self, restarts: int) -> Attempt:
        """Create the folder of an attempt, and record its beginning.

        Args:
            restarts: number of restarts of the run, this one included.
        """
        attempt = self.folder.new_attempt()
        num_ranks = self.launcher.num_ranks
        self._write(replace(self._state, attempt=attempt.number, restarts=restarts, world_size=num_ranks))
        before = self._attempt_before(attempt)
        if before is not None and self._may_have_late_request(before):
            late = self._request_of(before)
            if late is not None and late.ends_run:
                attempt.send_request(late)
        self._resources = self.launcher.resources
        times = AttemptTimes(
            supervised=self._began,
            began=time.time(),
            reached=reached_step(before) if before is not None else 0,
            measured=not self.config.trainer.script,  # a plain script does not report its time
            time_limit=self._allocation.end if self._allocation is not None else None,
        )
        self._times = attempt_times.begin(attempt, self._resources, times)
        return attempt

    def _may_have_late_request(self, before: Attempt) -> bool:
        """Return whether a request in the folder of the last attempt is meant for the next attempt.

        It may have been written after the failure of the last attempt, or while this supervisor prepared its first
        start.
        """
        if self._last_attempt is not None:
            return True
        lease = read_json(self.folder.lease) or {}
        return before.requested_at() > float(lease.get("acquired", self._began))

    def _attempt_before(self, attempt: Attempt) -> Attempt | None:
        """Return the attempt before one, also of an earlier supervisor; None before the first one."""
        if attempt.number == 1:
            return None
        return self.folder.attempt(attempt.number - 1)

    def _run_attempt(self, attempt: Attempt) -> Outcome:
        """Start the ranks, watch them until all have ended, and return how they ended."""
        self._last_attempt = attempt
        self._killed_beside = ""
        self._ended_late = ""
        self._write_request(attempt)  # of a signal that arrived between two attempts
        try:
            # A launcher that raises has already ended the ranks that it had started.
            ranks = retry.retry(lambda: self.launcher.start(attempt), attempt.path)
        except (HpcdistError, OSError) as error:
            kind: Kind = "error"
            if isinstance(error, PreflightError):
                if self.job is not None and self.job.is_ending():
                    return "stopped"  # Slurm has ended the probes with the job, so their missing answers mean nothing
                kind = "unfit"
            elif isinstance(error, UserMistake):
                kind = "rejected"
            return Failure(kind=kind, rank=0, host="", step=None, error=error_text(error))
        if self.launcher.resources != self._resources:  # the preflight check has left out some nodes
            self._times = attempt_times.begin(attempt, self.launcher.resources, self._times)
            self._write(replace(self._state, world_size=self.launcher.num_ranks))
        self.report.attempt(attempt, self.launcher.num_ranks)
        before = self._attempt_before(attempt)
        if before is not None:
            self.report.note(resume_point(self.folder, before, self.config.trainer.script))
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
                idle_s=self.config.launch.idle_s(in_job=self.job is not None),
            )
            failure = watch.until_over()
            self._times = replace(self._times, idle_since=watch.idle_since)
            # A copy, because `close` kills the remaining ranks, which did not fail.
            exits = dict(ranks.exits)
            # Before `close` as well: afterwards srun's last message is about the end of the step.
            unstarted = {rank: ranks.last_message(rank) for rank in ranks.absent()}
        finally:
            ranks.close()
        outcomes = attempt.outcomes()
        if watch.cancelled:
            return "cancelled"
        if failure is not None:
            return failure
        return self._reported_outcome(outcomes, watch, exits, unstarted)

    def _reported_outcome(
        self,
        outcomes: Mapping[int, Mapping[str, Any]],
        watch: Watch,
        exits: Mapping[int, int],
        unstarted: Mapping[int, str],
    ) -> Outcome:
        """Return how an attempt ended if its ranks have ended by themselves.

        Args:
            outcomes: outcome files of the ranks.
            watch: which has watched the ranks.
            exits: exit codes by rank, in the order in which the ranks ended.
            unstarted: reasons of the ranks that did not start.
        """
        ranks = watch.ranks
        last_step = watch.progress.last_step
        self._killed_beside = killed_beside(exits, ranks.memory_kills, ranks.host_of, in_job=self.job is not None)
        failure = first_failure(
            exits,
            outcomes,
            last_step,
            ranks.host_of,
            sent_sigterm=watch.stops_script,
            num_ranks=self.launcher.num_ranks,
            memory_kills=ranks.memory_kills,
            unstarted=unstarted,
        )
        if failure is not None:
            return replace(failure, memory=self._killed_beside)
        late = late_end(exits, outcomes)
        if late is not None:
            self._ended_late = late.sentence
            if self._times.idle_since is None and not late.is_busy:
                self._times = replace(self._times, idle_since=late.since)
        if watch.stops_script:
            return "stopped"
        reported = outcomes.get(0, {}).get("outcome")
        if reported is None:
            why = "exited with code 0 without a report"
            return Failure(kind="vanished", rank=0, host=ranks.host_of(0), step=last_step(0), error=why)
        if reported == "stopped":
            return "stopped"
        if self._killed_beside and self.job is not None and not self._has_done_all(watch.attempt, last_step(0)):
            # Such as a script that ignores the end of the program in which it trains. Slurm, too, reports the job as
            # OUT_OF_MEMORY.
            why = f"ended with exit status 0, but {self._killed_beside}"
            return Failure(kind="child_killed", rank=0, host=ranks.host_of(0), step=last_step(0), error=why)
        return "finished"

    def _has_done_all(self, attempt: Attempt, last_step: int | None) -> bool:
        """Return whether the ranks have surely done their whole training: a script must have reported its steps."""
        if not self.config.trainer.script:
            return True
        total_steps = (attempt.read_beat(0) or {}).get("total_steps")
        return total_steps is not None and last_step is not None and last_step >= total_steps

    def _with_role(self, outcome: Outcome) -> Outcome:
        """Return the outcome; a failure with the role of its rank, in runs with roles."""
        if not isinstance(outcome, Failure) or not self.config.roles:
            return outcome
        roles = Roles.of(self.config.roles, self.launcher.num_ranks)
        return replace(outcome, role=roles.name_of(outcome.rank))

    def _record_end(self, attempt: Attempt, outcome: Outcome) -> EndedAttempt:
        """Record and report how an attempt ended. Returns the facts for the decision about the run."""
        self._times = replace(self._times, ended=time.time(), failed=isinstance(outcome, Failure))
        self._settle_request(attempt, outcome)
        full_disk = ""
        if isinstance(outcome, Failure):
            reason = outcome.sentence()
            self._write_times(attempt, "failed", reason)
            self.report.failure(outcome, self._log_of(attempt, outcome))
            disk = retry.retry(lambda: shutil.disk_usage(self.folder.path), self.folder.path)
            if disk.free < ROOM_FOR_RESTART_BYTES:
                full_disk = str(self.folder.path)
        else:
            request = self._request_of(attempt)
            reason = self._how_ended(attempt, outcome, request)
            self._write_times(attempt, outcome, reason)
            if request is not None and request.ends_run and outcome != "finished":
                reason = request.after(reason)
        return EndedAttempt(
            outcome=outcome,
            reason=reason,
            stop_cause=lambda: self._stop_cause(attempt),
            earlier_failures=self._failures,
            failure_before=self._failure_before,
            failed_before=self._failed_before(attempt),
            max_restarts=self.config.launch.max_restarts,
            check_nodes=lambda failure: self._check_nodes(attempt, failure),
            nothing_saved=lambda: nothing_saved(self.folder, self.config.trainer.script),
            may_be_node=lambda: self._may_be_node(outcome),
            refit=lambda failure: self._refit(attempt, failure),
            full_disk=full_disk,
            job_restarts=self.job.restart_count if self.job is not None else None,
            is_requeued=lambda: self.job is not None and self.job.is_requeued(),
        )

    def _may_be_node(self, outcome: Outcome) -> bool:
        """Return whether a node may have caused a failure: the run has several nodes, and only this one has failed.

        A second failure on the same node then shows it (`restart_policy.suspect`). Only a short attempt is repeated.
        """
        if not isinstance(outcome, Failure) or not outcome.only_there or len(self.launcher.resources.nodes) == 1:
            return False
        assert self._times.ended is not None, "the attempt has ended"
        return self._times.ended - self._times.began < SHORT_ATTEMPT_S

    def _failed_before(self, attempt: Attempt) -> str:
        """Return the reason of the attempt before, which an earlier start of the job may have recorded."""
        before = self._attempt_before(attempt)
        times = read_times(before) if before is not None else None
        if times is None or not times.failed:
            return ""
        return times.reason

    def _settle_request(self, attempt: Attempt, outcome: Outcome) -> None:
        """Ask Slurm whether it ends the job, and write the request to stop into the folder of the ended attempt.

        A next start of the job reads it there: after a kill of this process it is the only record of the cause.
        """
        request = self._request_of(attempt)
        is_unexplained = outcome not in ("finished", "cancelled") and (request is None or not request.ends_run)
        if is_unexplained and self.job is not None and self.job.is_ending():
            # Slurm has signalled the ranks only.
            self._job_request = StopRequest(cause="preemption")
        self._write_request(attempt)

    def _how_ended(self, attempt: Attempt, outcome: Outcome, request: StopRequest | None) -> str:
        """Return how and why an attempt without a failure ended; the caller adds the request to end the run."""
        if outcome == "finished":
            how = str(attempt.outcomes().get(0, {}).get("reason") or "the trainer has finished")
            if self._killed_beside:
                how += f"; but {self._killed_beside}"
            if self._ended_late:
                how += f"; {self._ended_late}"
            return how
        if outcome == "cancelled":
            return ""
        if request is not None and not request.ends_run:
            return "more nodes are available"
        how = how_stopped(self.folder, attempt, self.config.trainer.script, self._times.began)
        if self._ended_late:
            how += f"; {self._ended_late}"
        if request is not None:
            return how
        if self._allocation is not None and time.time() > self._allocation.stop_at - EARLY_SIGNAL_S:
            return f"{how} (time limit)"
        return f"{how} (the ranks received a stop signal)"

    def _log_of(self, attempt: Attempt, failure: Failure) -> Path:
        """Return the file that explains a failure."""
        if failure.kind == "unfit":
            return attempt.preflight_text
        rank_log = attempt.log(failure.rank)
        srun_log = attempt.path / "srun.log"  # on Slurm only
        has_output = bool(failure.host) and rank_log.exists() and rank_log.stat().st_size > 0
        if failure.kind == "not_started" and srun_log.exists() and not has_output:
            return srun_log
        return rank_log

    def _check_nodes(self, attempt: Attempt, failure: Failure) -> NodeFindings:
        """Judge the nodes after a failure, and choose others if they can be replaced within the job."""
        write_json(attempt.failure, asdict(failure))  # nodes are judged by the failures of all attempts
        if failure.kind != "unfit":
            moved = self._nodes.replace_lost()
            if moved:
                return NodeFindings(moved=moved)
        return NodeFindings(broken=self.launcher.broken())

    def _refit(self, attempt: Attempt, failure: Failure) -> str:
        """Halve the micro-batches if a GPU's memory was exhausted and `launch.fit_batch` is set.

        Returns the new number, as the end of a sentence, and "" if the number stays the same.
        """
        number = failure.num_micro_batches
        batch_size = self.config.data.global_batch_size
        if not self.config.launch.fit_batch or number is None or batch_size is None:
            return ""
        fitted = fit(self.folder, attempt.number, batch_size, number)
        if fitted is None:
            self.report.note(
                f"launch.fit_batch: the micro-batches of {batch_size // number} samples cannot be halved any more"
            )
            return ""
        return (
            f"launch.fit_batch: {fitted} micro-batches of {batch_size // fitted} samples from now on, before {number}"
        )

    def _end_run(self, attempt: Attempt, outcome: Outcome, ending: Ending) -> State:
        """End the run, or requeue the job in which it continues. Returns the state to be written."""
        is_rejected = False
        if isinstance(outcome, Failure):
            self._write_times(attempt, "failed", ending.reason)  # may name lost nodes
            is_rejected = outcome.kind == "rejected"
        if ending.kind == "requeue":
            # Before the state is written: after a kill in between, the state is still `running`, and the next start of
            # the job continues the run.
            ending = self._requeue(ending)
        status = STATUS_AFTER[ending.kind]
        ended = None if status == "queued" else time.time()
        state = replace(self._state, status=status, reason=ending.reason, ended=ended, rejected=is_rejected)
        if self.job is not None:
            self.report.note(state.sentence)
        return state

    def _requeue(self, ending: Ending) -> Ending:
        """Requeue the job. Returns the ending; `stopped` if Slurm refuses."""
        assert self.job is not None, "without a job, no run is requeued"
        try:
            self.job.requeue()
        except HpcdistError as error:
            # For example a batch script without `#SBATCH --requeue`. The checkpoint is saved.
            self.report.note(f"Slurm does not requeue the job; continue with `{self.folder.resume_command}`")
            return Ending(kind="stopped", reason=f"{ending.reason}; Slurm does not requeue the job ({error})")
        return ending

    def _write_times(self, attempt: Attempt, status: str, reason: str) -> None:
        write_times(attempt, replace(self._times, status=status, reason=reason))

    def _request_of(self, attempt: Attempt) -> StopRequest | None:
        """Return the request to stop the ranks of an attempt: from its file, a signal to this process, or its job."""
        request = attempt.read_request()
        if request is not None and request.ends_run:
            return request
        return self._own_request() or request

    def _stop_cause(self, attempt: Attempt) -> StopCause | None:
        request = self._request_of(attempt)
        return request.cause if request is not None else None

    def _own_request(self) -> StopRequest | None:
        """Return the request that a signal to this process or the end of its job makes."""
        return self._signals.request() or self._job_request

    def _write_request(self, attempt: Attempt) -> None:
        """Write this process's request to the attempt's folder, unless a request there ends the run already."""
        request = self._own_request()
        try:
            written = attempt.read_request()
            is_final = written is not None and written.ends_run
            if request is not None and not is_final:
                attempt.send_request(request)
        except OSError as error:
            action = request.action if request is not None else "stop"
            self.report.note(f"the request to {action} cannot be written to {attempt.path}: {error}")
