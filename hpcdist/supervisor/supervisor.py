"""The run's life from its first attempt to its last sentence. Stands on the host, never imports torch.

One attempt is one start of all ranks. The supervisor watches their exits, their heartbeats and the requests that
people leave in the attempt's folder, and answers a failure with a restart from the newest checkpoint. The journal
is shipped to MLflow by a process of its own, which the ranks never wait for.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from types import FrameType
from typing import Literal

from hpcdist.config.schema import Config
from hpcdist.errors import HpcdistError, LeaseLostError, PreflightError, UserMistake
from hpcdist.files import retry
from hpcdist.files.atomic import write_json
from hpcdist.files.log_limit import limit_log
from hpcdist.rank.roles import Roles
from hpcdist.run.attempt import Attempt, Request
from hpcdist.run.folder import RunDir, State, Status
from hpcdist.run.pending_config import settle
from hpcdist.supervisor.launcher import Launcher, Ranks
from hpcdist.supervisor.reporter import AdoptingReporter, Reporter
from hpcdist.supervisor.restart_policy import Failure, decide, first_failure, not_started
from hpcdist.supervisor.shipper_process import ShipperProcess
from hpcdist.supervisor.watch import Allocation, Watch
from hpcdist.tracking.uri import redact_uri

#: Logs and reports of an attempt must have a place; with less than this its failure could not even be told.
ROOM_FOR_RESTART_BYTES = 2**20
#: What is left of an allocation for the last write of the state, when the run folder does not come back.
LAST_WRITE_S = 10.0


class Supervisor:
    """Runs one run to its end; hold the run's lease around `run`.

    Args:
        launcher: where ranks are started.
        tracking_uri: where to ship to while the run goes on; None leaves that to someone else.
        env: the shipper's environment.
        allocation: how long the ranks may stay, where that has an end.
        conclude: makes the last state of that in which the attempts ended, before anyone sees it: a run that goes on
            elsewhere has not ended.
        check_lease: raises LeaseLostError once another supervisor holds the run (`lease.Held.check`).
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
        allocation: Allocation | None = None,
        conclude: Callable[[State], State] = lambda state: state,
        check_lease: Callable[[], None] = lambda: None,
    ) -> None:
        self._run = run
        self._config = config
        self._launcher = launcher
        self._report = AdoptingReporter(run, report)
        self._tracking_uri = tracking_uri
        self._env = dict(env)
        self._allocation = allocation
        self._conclude = conclude
        self._check_lease = check_lease
        self._state = State(status="created")
        self._attempt: Attempt | None = None
        self._num_interrupts = 0
        self._signalled: str | None = None
        self._terminals = [descriptor for descriptor in (1, 2) if os.isatty(descriptor)]

    def run(self) -> State:
        """Start attempts until the run is over; returns its last state, which is also in `state.json`.

        Raises LeaseLostError when another supervisor has taken the run over: the ranks are killed, nothing is written.
        """
        with retry.patient(self._patience_s()), self._signals():
            state = replace(self._run.read_state(), status="running", reason="", ended=None, rejected=False)
            self._write(replace(state, world_size=self._launcher.num_ranks))
            limit_log(self._run.path, self._config.launch.log_max_mb)
            shipper = self._start_shipper()
            failure: Exception | None = None
            try:
                state = settle(self._run, self._attempts(state), self._report.first_step)
                state = self._conclude(state)
            except LeaseLostError:
                if shipper is not None:
                    shipper.drain(0)  # the successor has one of its own
                raise
            except Exception as error:
                # Whatever it was: nobody is to find this run as "running".
                failure, rejected = error, isinstance(error, UserMistake)
                why = _last_words(error)
                state = replace(self._state, status="failed", reason=why, ended=time.time(), rejected=rejected)
            try:
                self._write(state)
            except OSError as error:
                self._report.note(f"{self._run.path}/state.json cannot be written: {error.strerror}")
        if shipper is not None and not shipper.drain(self._config.tracking.drain_timeout_s):
            self._report.note(
                f"MLflow at {redact_uri(self._tracking_uri or '')} has not taken everything (see shipper.log);"
                f" nothing is lost: `hpcdist sync {self._run.name}` ships the rest"
            )
        if failure is not None and not isinstance(failure, OSError):
            raise failure
        return state

    def _patience_s(self) -> float:
        """How long to wait for the run folder: not past the end of the allocation."""
        if self._allocation is None:
            return retry.UNATTENDED_S
        return max(0.0, min(retry.UNATTENDED_S, self._allocation.end - time.time() - LAST_WRITE_S))

    def _write(self, state: State) -> None:
        """Write the state, unless the run is another supervisor's by now."""
        self._check_lease()
        self._state = state
        self._run.write_state(state)

    def _start_shipper(self) -> ShipperProcess | None:
        if not self._tracking_uri:
            return None
        try:
            return ShipperProcess(self._run, self._tracking_uri, self._env)
        except OSError as error:
            self._report.note(f"nothing is shipped to MLflow while the run goes on: {_last_words(error)}")
            return None

    def _attempts(self, state: State) -> State:
        failures: list[Failure] = []
        restarts_before = state.restarts
        while True:
            attempt = self._run.new_attempt()
            state = replace(
                state,
                attempt=attempt.number,
                restarts=restarts_before + len(failures),
                world_size=self._launcher.num_ranks,
            )
            self._write(state)
            self._take_over_request(attempt)
            end, failure = self._one_attempt(attempt)
            self._write_request(attempt)
            if failure is None:
                return replace(state, status=end, reason=self._reason(attempt, end), ended=time.time())
            if self._config.roles:
                roles = Roles.of(self._config.roles, self._launcher.num_ranks)
                failure = replace(failure, role=roles.name_of(failure.rank))
            failures.append(failure)
            self._report.failure(failure, _log_of(attempt, failure))
            if (over := self._after_failure(state, attempt, failures)) is not None:
                return over
            self._report.note(
                f"restart {len(failures)} of {self._config.launch.max_restarts} from the newest checkpoint"
            )

    def _after_failure(self, state: State, attempt: Attempt, failures: list[Failure]) -> State | None:
        """The state that a failure ends the run in, or None when it is answered by a restart here."""
        failure = failures[-1]
        stop_asked = self._request_of(attempt) is not None
        decision = decide(failures, self._config.launch.max_restarts, stop_asked=stop_asked)
        disk = retry.retry(lambda: shutil.disk_usage(self._run.path), self._run.path)
        disk_full = disk.free < ROOM_FOR_RESTART_BYTES
        if not (stop_asked or disk_full or failure.kind == "rejected"):
            write_json(attempt.failure, asdict(failure))
            if why := self._launcher.broken():
                return replace(state, status="stopped", reason=f"{failure.sentence()}; {why}", ended=time.time())
        if decision.restart and not disk_full:
            return None
        reason = decision.reason
        if decision.restart:
            reason = f"{failure.sentence()}; no restart, since the disk of {self._run.path} is full"
        rejected = failure.kind == "rejected"
        return replace(state, status="failed", reason=reason, ended=time.time(), rejected=rejected)

    def _take_over_request(self, attempt: Attempt) -> None:
        """What was asked of the attempt before, after that had failed, is asked of this one."""
        if self._attempt is not None and (late := self._request_of(self._attempt)) is not None:
            attempt.send_request(late.action, by=late.by, reason=late.reason)

    def _request_of(self, attempt: Attempt) -> Request | None:
        """What was asked of an attempt, by its file or by a signal to this process that no file could take."""
        return attempt.read_request() or self._asked_by_signal()

    def _write_request(self, attempt: Attempt) -> None:
        """Write down what a signal asks of an attempt, for ranks that start and for the commands that look later."""
        asked = self._asked_by_signal()
        try:
            if asked is not None and attempt.read_request() is None:
                attempt.send_request(asked.action, by=asked.by, reason=asked.reason)
        except OSError as error:
            self._report.note(f"the request to {asked.action if asked else 'stop'} is not in {attempt.path}: {error}")

    def _reason(self, attempt: Attempt, end: Status) -> str:
        if end in ("stopped", "cancelled"):
            request = self._request_of(attempt)
            verb = "stopped with everything saved" if end == "stopped" else "cancelled"
            return f"{verb} ({request.reason if request is not None else 'a stop signal reached the ranks'})"
        return str(attempt.outcomes().get(0, {}).get("reason") or "the trainer reached its end")

    def _one_attempt(self, attempt: Attempt) -> tuple[Status, Failure | None]:
        """Run the ranks once. Returns how the attempt ended, or the failure that ended it."""
        self._attempt = attempt
        self._write_request(attempt)
        try:
            # A launcher that meets an error has ended what it had started.
            ranks = retry.retry(lambda: self._launcher.start(attempt), attempt.path)
        except (HpcdistError, OSError) as error:
            kind: Literal["rejected", "unfit", "error"] = "rejected" if isinstance(error, UserMistake) else "error"
            if isinstance(error, PreflightError):
                kind = "unfit"
            return "failed", Failure(kind=kind, rank=0, host="", step=None, error=_last_words(error))
        self._report.attempt(attempt, self._launcher.num_ranks)
        try:
            watch = Watch(
                attempt,
                ranks,
                self._config,
                self._report,
                self._allocation,
                asked_by_signal=self._asked_by_signal,
                check_lease=self._check_lease,
            )
            hung = watch.until_over() or _none_started(ranks)
            # Those that are killed in a moment did not fail.
            exits = dict(ranks.exits)
        finally:
            ranks.close()
        outcomes = attempt.outcomes()
        if watch.cancelled:
            return "cancelled", None
        if watch.stop_asked and self._config.trainer.script and not hung:
            # A plain script that SIGTERM ends has done what it was asked to.
            exits = {rank: 0 if code == -signal.SIGTERM else code for rank, code in exits.items()}
            failure = first_failure(exits, outcomes, watch.steps(), ranks.host_of)
            return "stopped", failure
        failure = hung or first_failure(exits, outcomes, watch.steps(), ranks.host_of)
        ended = outcomes.get(0, {}).get("outcome")
        if failure is None and ended is None:
            failure = Failure(
                kind="vanished",
                rank=0,
                host=ranks.host_of(0),
                step=watch.steps().get(0),
                error="ended with exit code 0 without a report",
            )
        return "stopped" if ended == "stopped" else "finished", failure

    # --- signals to this process

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Ctrl-C, SIGTERM (docker stop) and SIGHUP (closed terminal) save and stop; a second Ctrl-C kills.

        A signal that `conclude` has taken over stays as it is.
        """
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = [signal.signal(number, self._on_signal) for number in numbers]
        try:
            yield
        finally:
            for number, handler in zip(numbers, before, strict=True):
                if signal.getsignal(number) == self._on_signal:
                    signal.signal(number, handler)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        """Only note the signal: writing the request may fail, and does not belong here. `Watch` does that."""
        self._num_interrupts += number == signal.SIGINT
        if number == signal.SIGHUP:
            self._leave_terminal()
        self._signalled = signal.Signals(number).name
        if self._num_interrupts > 1:
            retry.give_up()

    def _asked_by_signal(self) -> Request | None:
        """What signals to this process ask for; the last one counts."""
        if self._signalled is None:
            return None
        action: Literal["cancel", "stop"] = "cancel" if self._num_interrupts > 1 else "stop"
        return Request(action=action, by=self._signalled, reason=f"{self._signalled} to the supervisor")

    def _leave_terminal(self) -> None:
        """Writing to a closed terminal fails, and a message nobody reads must not end the run."""
        with open(os.devnull, "wb") as nowhere:
            for descriptor in self._terminals:
                os.dup2(nowhere.fileno(), descriptor)


def _none_started(ranks: Ranks) -> Failure | None:
    """The failure of a start that has ended badly before there was any rank; None otherwise."""
    if ranks.running or not any(ranks.exits.values()) or len(absent := ranks.absent()) < len(ranks.exits):
        return None
    return not_started(absent, len(absent), f"at all: {ranks.last_words()}", ranks.host_of)


def _log_of(attempt: Attempt, failure: Failure) -> Path:
    """The file that tells more of a failure."""
    if failure.kind == "unfit":
        return attempt.preflight.with_suffix(".txt")
    return attempt.path / "srun.log" if failure.kind == "not_started" else attempt.log(failure.rank)


def _last_words(error: Exception) -> str:
    """One sentence about the error that ends a run or an attempt."""
    if isinstance(error, HpcdistError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename is not None else error.strerror
    return f"the supervisor failed with {type(error).__name__}: {error}"
