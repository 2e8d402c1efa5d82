"""The supervisor: starts the attempts of a run and records its final state, or obeys a signal to stop. Runs on the
host, never imports torch.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from types import FrameType
from typing import Literal, Protocol

from hpcdist.config.redaction import redact_text
from hpcdist.config.schema import Config
from hpcdist.config.topology import Roles
from hpcdist.errors import HpcdistError, LeaseLostError, RunFolderError, UserMistake
from hpcdist.host import retry
from hpcdist.host.files import write_json
from hpcdist.host.log_files import limit_log
from hpcdist.run.folder import Attempt, Cause, RunDir, State, Status, StopRequest, explain_replacement, require_same
from hpcdist.run.records import (
    AttemptTimes,
    begin,
    how_stopped,
    reached_step,
    resume_point,
    with_restored_config,
    write_times,
)
from hpcdist.supervisor.children import ShipperProcess
from hpcdist.supervisor.launcher import Launcher, NodeChanges
from hpcdist.supervisor.notifier import Notifier
from hpcdist.supervisor.progress import Reporter, log_of
from hpcdist.supervisor.restart_policy import Failure, decide, error_text, failed_start, first_failure
from hpcdist.supervisor.watch import Allocation, Watch, none_started

# Requests to stop or cancel a run by signals to its supervisor.

_NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class SignalRequests:
    """Ctrl-C, SIGTERM (docker stop) and SIGHUP (closed terminal) stop a run; a second Ctrl-C cancels it.

    The handler only records the signal; `Watch` writes the request, because file operations do not belong in a signal
    handler.

    Args:
        in_job: whether SIGTERM means that Slurm ends the job.
    """

    def __init__(self, *, in_job: bool = False) -> None:
        self._in_job = in_job
        self._name: str | None = None
        self._num_interrupts = 0
        self._terminals = [descriptor for descriptor in (1, 2) if os.isatty(descriptor)]

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Install the handlers inside the block. A handler that is replaced meanwhile is not restored."""
        before = [signal.signal(number, self.on_signal) for number in _NUMBERS]
        try:
            yield
        finally:
            for number, handler in zip(_NUMBERS, before, strict=True):
                if signal.getsignal(number) == self.on_signal:
                    signal.signal(number, handler)

    def request(self) -> StopRequest | None:
        """Return the request of the signals so far, or None."""
        if self._name is None:
            return None
        action: Literal["stop", "cancel"] = "cancel" if self._num_interrupts > 1 else "stop"
        cause: Cause = "preemption" if self._in_job and self._name == "SIGTERM" else "signal"
        return StopRequest(action=action, cause=cause, by=self._name)

    def on_signal(self, number: int, _frame: FrameType | None) -> None:
        """Note a signal, as its handler; `request` returns the request for it."""
        self._num_interrupts += number == signal.SIGINT
        if number == signal.SIGHUP:
            self._leave_terminal()
        self._name = signal.Signals(number).name
        if self._num_interrupts > 1:
            retry.give_up()

    def _leave_terminal(self) -> None:
        """Redirect output from the closed terminal to /dev/null: failed writes must not end the run."""
        with open(os.devnull, "wb") as null:
            for descriptor in self._terminals:
                os.dup2(null.fileno(), descriptor)


# An attempt is one start of all ranks. The supervisor watches exit codes, heartbeats and requests in the attempt's
# folder, and restarts the ranks from the newest checkpoint after a failure. A separate process ships the journal to
# MLflow; ranks never wait for it.

#: Free disk space that a restart needs for the logs and reports of an attempt.
ROOM_FOR_RESTART_BYTES = 2**20
#: Time before the end of an allocation that is reserved for the last write of the state.
LAST_WRITE_S = 10.0


class Job(Protocol):
    """The Slurm job of a run."""

    @property
    def allocation(self) -> Allocation | None:
        """Time limit of the ranks, if there is one."""

    @property
    def nodes(self) -> NodeChanges:
        """Changes of the nodes between attempts."""

    def is_ending(self) -> bool:
        """Return whether Slurm is ending the job, which it may tell the ranks alone."""

    def end_or_requeue(self, state: State) -> State:
        """Requeue the job if the run continues that way. Returns the state to record, for each end of the attempts."""


class Supervisor:
    """Supervises one run until its end. The caller holds the run's lease.

    Args:
        tracking_uri: tracking server or database for the shipper; None if another process ships the run.
        check_lease: raises LeaseLostError if another supervisor holds the run (`lease.Held.check`).
    """

    def __init__(
        self,
        run: RunDir,
        config: Config,
        launcher: Launcher,
        report: Reporter,
        *,
        tracking_uri: str | None,
        env: Mapping[str, str],
        check_lease: Callable[[], None] = lambda: None,
        job: Job | None = None,
    ) -> None:
        self._job = job
        self._allocation = job.allocation if job is not None else None
        self._nodes = job.nodes if job is not None else NodeChanges()
        #: Number of restarts on other nodes, which `launch.max_restarts` does not limit.
        self._moves = 0
        self._run = run
        self._config = config
        self._launcher = launcher
        self._report = report
        self._tracking_uri = tracking_uri
        self._env = dict(env)
        self._check_lease = check_lease
        self._state = State(status="created")
        self._attempt: Attempt | None = None
        self._signals = SignalRequests(in_job=job is not None)
        #: Request of a job that Slurm is ending without a signal to this process.
        self._job_request: StopRequest | None = None
        self._began = time.time()

    def run(self) -> State:
        """Start attempts until the run ends. Returns its last state, which is also in `state.json`.

        Raises LeaseLostError if another supervisor has taken over the run. The ranks are killed, and nothing is
        written.
        """
        with (
            explain_replacement(self._run.path, self._env),
            retry.patient(self._patience_s()),
            self._signals.handled(),
            Notifier(self._run, self._config.notify, self._env, self._report.note) as notifier,
        ):
            state = replace(self._run.read_state(), status="running", reason="", ended=None, rejected=False, lost=False)
            self._write(replace(state, world_size=self._launcher.num_ranks))
            limit_log(self._run.path, self._config.launch.log_max_mb)
            shipper = self._start_shipper()
            failure: Exception | None = None
            try:
                with explain_replacement(self._run.path, self._env):
                    state = self._attempts(state, notifier)
                if self._job is not None:
                    state = self._job.end_or_requeue(state)
            except LeaseLostError:
                if shipper is not None:
                    shipper.drain(0)  # the new supervisor has its own shipper
                raise
            except Exception as error:
                # No exception may leave the run in the state "running".
                failure, rejected = error, isinstance(error, UserMistake)
                why = error_text(error)
                state = replace(self._state, status="failed", reason=why, ended=time.time(), rejected=rejected)
            state = self._with_restored_config(state)  # after a requeue, the run continues with the changed keys
            try:
                self._write(state)
            except OSError as error:
                self._report.note(f"{self._run.path}/state.json cannot be written: {error.strerror}")
            notifier.send("requeued" if state.status == "queued" else "ended", state)
        if shipper is not None and not shipper.drain(self._config.tracking.drain_timeout_s, self._report.note):
            self._report.note(
                f"MLflow at {redact_text(self._tracking_uri or '')} has not received all records (see shipper.log);"
                f" none are lost: `hpcdist sync {self._run.name}` ships the rest"
            )
        if failure is not None and not isinstance(failure, OSError):
            raise failure
        return state

    def _with_restored_config(self, state: State) -> State:
        """Call `with_restored_config`; its errors do not keep the state from being written."""
        try:
            return with_restored_config(self._run, state)
        except (OSError, RunFolderError) as error:
            self._report.note(f"config.yaml cannot be restored: {error}")
            return state

    def _patience_s(self) -> float:
        """Return the retry time for the run folder, which ends before the allocation does."""
        if self._allocation is None:
            return retry.UNATTENDED_S
        return max(0.0, min(retry.UNATTENDED_S, self._allocation.end - time.time() - LAST_WRITE_S))

    def _write(self, state: State) -> None:
        """Write the state, unless another supervisor holds the run."""
        self._check_lease()
        self._state = state
        self._run.write_state(state)

    def _start_shipper(self) -> ShipperProcess | None:
        if not self._tracking_uri:
            return None
        try:
            return ShipperProcess(self._run, self._tracking_uri, self._env)
        except OSError as error:
            self._report.note(f"the shipper cannot be started: {error_text(error)}; run `hpcdist sync` later")
            return None

    def _attempts(self, state: State, notifier: Notifier) -> State:
        """Start attempts until one of them ends the run. Returns the final state of the run."""
        event, reason = "started", ""
        restarts_before = state.restarts
        failures: list[Failure] = []
        while True:
            require_same(self._run.path, self._env)
            attempt = self._begin_attempt(state, restarts_before + len(failures) + self._moves)
            notifier.send(event, replace(self._state, reason=reason))
            end, failure = self._one_attempt(attempt)
            require_same(self._run.path, self._env)
            state, times = self._state, replace(self._times, ended=time.time(), failed=failure is not None)
            unasked = (end == "stopped" or failure is not None) and self._request_of(attempt) is None
            if unasked and self._job is not None and self._job.is_ending():
                self._job_request = StopRequest(cause="preemption")
            self._write_request(attempt)
            if failure is None:
                over = self._after_end(state, attempt, times, end)
            else:
                over = self._after_failure(state, attempt, times, failure, failures)
            if over is not None:
                return over
            event, reason = "restarted", failure.sentence() if failure else "more nodes are available"

    def _one_attempt(self, attempt: Attempt) -> tuple[Status, Failure | None]:
        """Run the ranks once. Returns the final status of the attempt, and its failure if it failed."""
        self._attempt = attempt
        self._write_request(attempt)
        try:
            # A launcher that raises has already ended the ranks that it had started.
            ranks = retry.retry(lambda: self._launcher.start(attempt), attempt.path)
        except (HpcdistError, OSError) as error:
            return "failed", failed_start(error)
        self._record_other_nodes(attempt)
        self._report.attempt(attempt, self._launcher.num_ranks)
        if attempt.number > 1:
            is_script = bool(self._config.trainer.script)
            self._report.note(resume_point(self._run, self._times.reached, is_script=is_script))
        try:
            watch = Watch(
                attempt,
                ranks,
                self._config,
                self._report,
                self._allocation,
                signal_request=self._signals.request,
                check_lease=self._check_lease,
                nodes=self._nodes,
            )
            hung = watch.until_over() or none_started(ranks)
            # A copy, because `close` kills the remaining ranks, which did not fail.
            exits = dict(ranks.exits)
        finally:
            ranks.close()
        outcomes = attempt.outcomes()
        if watch.cancelled:
            return "cancelled", None
        sent_sigterm = watch.stops_script and not hung
        failure = hung or first_failure(
            exits, outcomes, watch.progress.last_step, ranks.host_of, sent_sigterm=sent_sigterm
        )
        if sent_sigterm:
            return "stopped", failure
        ended = outcomes.get(0, {}).get("outcome")
        if failure is None and ended is None:
            failure = Failure(
                kind="vanished",
                rank=0,
                host=ranks.host_of(0),
                step=watch.progress.last_step(0),
                error="exited with code 0 without a report",
            )
        return "stopped" if ended == "stopped" else "finished", failure

    def _begin_attempt(self, state: State, restarts: int) -> Attempt:
        """Create the next attempt, and record its beginning in the state of the run and in its own times."""
        attempt = self._run.new_attempt()
        self._write(replace(state, attempt=attempt.number, restarts=restarts, world_size=self._launcher.num_ranks))
        self._forward_request(attempt)
        self._times = self._begin_times(attempt)
        return attempt

    def _after_end(self, state: State, attempt: Attempt, times: AttemptTimes, end: Status) -> State | None:
        """Return the final state after an attempt without a failure; None if the run is restarted on more nodes."""
        if end == "stopped" and self._grows(attempt):
            write_times(attempt, replace(times, status=end, reason="restarted on more nodes"))
            self._nodes.use_returned()
            self._moves += 1
            return None
        request = None if end == "finished" else self._request_of(attempt)
        reason = self._how(attempt, end) + " (the ranks received a stop signal)" * (end == "stopped" and not request)
        write_times(attempt, replace(times, status=end, reason=reason))
        reason = request.after(reason) if request is not None else reason
        return replace(state, status=end, reason=reason, ended=time.time())

    def _after_failure(
        self, state: State, attempt: Attempt, times: AttemptTimes, failure: Failure, failures: list[Failure]
    ) -> State | None:
        """Return the final state of the run after a failed attempt; None if the ranks are restarted here.

        Args:
            failures: the earlier failures, to which this one is added unless other nodes replace those that failed.
        """
        if self._config.roles:
            roles = Roles.of(self._config.roles, self._launcher.num_ranks)
            failure = replace(failure, role=roles.name_of(failure.rank))
        write_times(attempt, replace(times, status="failed", reason=failure.sentence()))
        self._report.failure(failure, log_of(attempt, failure))
        if change := self._new_nodes(attempt, failure):
            self._moves += 1
            self._report.note(f"restart: {change}")
            return None
        failures.append(failure)
        if (over := self._end_by_failure(state, attempt, failures)) is not None:
            write_times(attempt, replace(times, status="failed", reason=over.reason))  # may name lost nodes
            return over
        self._report.note(f"restart {len(failures)} of {self._config.launch.max_restarts}")
        return None

    def _begin_times(self, attempt: Attempt) -> AttemptTimes:
        self._resources = self._launcher.resources
        return begin(
            attempt,
            self._resources,
            AttemptTimes(
                supervised=self._began,
                began=time.time(),
                reached=reached_step(self._run.attempt(attempt.number - 1)) if attempt.number > 1 else 0,
                measured=not self._config.trainer.script,
                time_limit=None if self._allocation is None else self._allocation.end,
            ),
        )

    def _record_other_nodes(self, attempt: Attempt) -> None:
        """Record the nodes of the ranks again if the preflight check has left out some."""
        if self._launcher.resources == self._resources:
            return
        self._times = begin(attempt, self._launcher.resources, self._times)
        self._write(replace(self._state, world_size=self._launcher.num_ranks))

    def _grows(self, attempt: Attempt) -> bool:
        """Return whether the ranks have stopped to be restarted on more nodes, and for no other reason."""
        found = attempt.read_request()
        return found is not None and not found.ends_run and self._request_of(attempt) is None

    def _new_nodes(self, attempt: Attempt, failure: Failure) -> str:
        """Return a sentence if the run continues on other nodes than those of a failed attempt; otherwise ""."""
        if failure.kind in ("rejected", "unfit", "interrupted") or self._request_of(attempt) is not None:
            return ""
        if self._disk_is_full():
            return ""
        write_json(attempt.failure, asdict(failure))
        return self._nodes.replace_lost()

    def _end_by_failure(self, state: State, attempt: Attempt, failures: list[Failure]) -> State | None:
        """Return the final state of the run if the last of its failures ends it; None if the ranks are restarted."""
        failure = failures[-1]
        stop_requested = self._request_of(attempt) is not None
        if failure.kind == "interrupted" and not stop_requested:
            reason = f"{failure.sentence()}; Slurm signals the time limit, so no restart here"
            return replace(state, status="stopped", reason=reason, ended=time.time())
        restart, reason = decide(failures, self._config.launch.max_restarts, stop_requested=stop_requested)
        disk_full = self._disk_is_full()
        if not (stop_requested or disk_full or failure.kind == "rejected"):
            write_json(attempt.failure, asdict(failure))
            if why := self._launcher.broken():
                # Stopped without a request: on Slurm the batch step requeues the job.
                return replace(state, status="stopped", reason=f"{failure.sentence()}; {why}", ended=time.time())
        if restart and not disk_full:
            return None
        if restart:
            reason = f"{failure.sentence()}; no restart, since the disk of {self._run.path} is full"
        rejected = failure.kind == "rejected"
        return replace(state, status="failed", reason=reason, ended=time.time(), rejected=rejected)

    def _disk_is_full(self) -> bool:
        disk = retry.retry(lambda: shutil.disk_usage(self._run.path), self._run.path)
        return disk.free < ROOM_FOR_RESTART_BYTES

    def _forward_request(self, attempt: Attempt) -> None:
        """Forward a request that reached the previous attempt after its failure."""
        if self._attempt is not None and (late := self._request_of(self._attempt)) is not None:
            attempt.send_request(late)

    def _request_of(self, attempt: Attempt) -> StopRequest | None:
        """Return the request to end the run with an attempt: from its file, a signal to this process, or its job."""
        found = attempt.read_request()
        return found if found is not None and found.ends_run else self._own_request()

    def _own_request(self) -> StopRequest | None:
        return self._signals.request() or self._job_request

    def _write_request(self, attempt: Attempt) -> None:
        """Write a request that is not from the attempt's folder to it, for starting ranks and for later commands."""
        asked = self._own_request()
        try:
            found = attempt.read_request()
            if asked is not None and not (found is not None and found.ends_run):
                attempt.send_request(asked)
        except OSError as error:
            self._report.note(
                f"the request to {asked.action if asked else 'stop'} cannot be written to {attempt.path}: {error}"
            )

    def _how(self, attempt: Attempt, end: Status) -> str:
        """Return how an attempt has ended that did not fail; "" if its status says it."""
        if end == "cancelled":
            return ""
        if end == "stopped":
            return how_stopped(self._run, attempt, self._config.trainer.script, self._times.began)
        return str(attempt.outcomes().get(0, {}).get("reason") or "the trainer has finished")
