"""The run's life from its first attempt to its last sentence. Stands on the host, never imports torch.

One attempt is one start of all ranks. The supervisor watches their exits, their heartbeats and the requests that
people leave in the attempt's folder, and answers a failure with a restart from the newest checkpoint. The journal
is shipped to MLflow by a process of its own, which the ranks never wait for.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from hpcdist.launch.local import Guard, LocalRanks
from hpcdist.launch.plan import Plan, free_ports, rank_command
from hpcdist.launch.policy import Decision, Failure, decide, first_failure
from hpcdist.rundir import Attempt, RunDir, State, Status, read_json
from hpcdist.schema import Config
from hpcdist.tracking.uri import redact_uri

log = logging.getLogger(__name__)
LOOK_EVERY_S = 0.2
#: After the first failure the others get this long to report theirs.
PEER_GRACE_S = 3.0
#: Ranks that hang get this long to print their stacks.
STACKS_S = 1.0
#: Logs and reports of an attempt must have a place; with less than this its failure could not even be told.
ROOM_FOR_RESTART_BYTES = 2**20


class Reporter(Protocol):
    """Who is told while a run goes on; `view.py` has one for people."""

    def attempt(self, attempt: Attempt, num_ranks: int) -> None: ...
    def progress(self, beat: Mapping[str, Any]) -> None: ...
    def note(self, text: str) -> None: ...
    def output(self, text: str) -> None: ...
    def failure(self, failure: Failure, log: Path) -> None: ...


class Supervisor:
    """Runs one run to its end; hold the run's lease around `run`.

    Args:
        env: the environment that ranks inherit.
        import_path: folders that ranks import code from, before all others.
        cwd: the ranks' current folder.
    """

    def __init__(
        self,
        run: RunDir,
        config: Config,
        plan: Plan,
        report: Reporter,
        *,
        tracking_uri: str,
        env: Mapping[str, str],
        import_path: list[str],
        cwd: Path,
    ) -> None:
        self._run = run
        self._config = config
        self._plan = plan
        self._report = report
        self._tracking_uri = tracking_uri
        self._env = dict(env)
        self._env["PYTHONPATH"] = os.pathsep.join([*import_path, *filter(None, [env.get("PYTHONPATH")])])
        self._cwd = cwd
        self._attempt: Attempt | None = None
        self._num_interrupts = 0
        self._signalled: str | None = None
        self._terminals = [descriptor for descriptor in (1, 2) if os.isatty(descriptor)]

    def run(self) -> State:
        """Start attempts until the run is over; returns its last state, which is also in `state.json`."""
        state = replace(self._run.read_state(), status="running", reason="", ended=None, rejected=False)
        self._run.write_state(replace(state, world_size=self._plan.num_ranks))
        guard = Guard()
        shipper = self._start_shipper()
        try:
            with self._signals():
                state = self._attempts(state, guard)
        finally:
            guard.close()
        try:
            self._run.write_state(state)
        except OSError as error:
            self._report.note(f"{self._run.path}/state.json cannot be written: {error.strerror}")
        self._drain(shipper)
        return state

    def _attempts(self, state: State, guard: Guard) -> State:
        failures: list[Failure] = []
        restarts_before = state.restarts
        while True:
            attempt = self._run.new_attempt()
            state = replace(
                state,
                attempt=attempt.number,
                restarts=restarts_before + len(failures),
                world_size=self._plan.num_ranks,
            )
            self._run.write_state(state)
            end, failure = self._one_attempt(attempt, guard)
            if failure is None:
                return replace(state, status=end, reason=self._reason(attempt, end), ended=time.time())
            failures.append(failure)
            self._report.failure(failure, attempt.log(failure.rank))
            decision = decide(failures, self._config.launch.max_restarts, stop_asked=attempt.request.exists())
            if decision.restart and shutil.disk_usage(self._run.path).free < ROOM_FOR_RESTART_BYTES:
                full = f"{failure.sentence()}; no restart, since the disk of {self._run.path} is full"
                decision = Decision(restart=False, reason=full)
            if not decision.restart:
                return replace(
                    state,
                    status="failed",
                    reason=decision.reason,
                    ended=time.time(),
                    rejected=failure.kind == "rejected",
                )
            self._report.note(
                f"restart {len(failures)} of {self._config.launch.max_restarts} from the newest checkpoint"
            )

    def _reason(self, attempt: Attempt, end: Status) -> str:
        if end in ("stopped", "cancelled"):
            request = read_json(attempt.request) or {}
            verb = "stopped with everything saved" if end == "stopped" else "cancelled"
            return f"{verb} ({request.get('reason', 'a stop signal reached the ranks')})"
        return str(attempt.outcomes().get(0, {}).get("reason") or "the trainer reached its end")

    def _one_attempt(self, attempt: Attempt, guard: Guard) -> tuple[Status, Failure | None]:
        """Run the ranks once. Returns how the attempt ended, or the failure that ended it."""
        self._attempt = attempt
        if self._signalled:
            attempt.ask("stop", by="signal", reason=self._signalled)
        job_id = f"{self._run.experiment}/{self._run.name}"
        master_port, rpc_port = free_ports(job_id, attempt.number)
        envs = []
        for rank in range(self._plan.num_ranks):
            place = self._plan.rank_env(
                rank, job_id=job_id, attempt=attempt.number, master_port=master_port, rpc_port=rpc_port
            )
            envs.append(self._env | place)
        logs = [attempt.log(rank) for rank in range(self._plan.num_ranks)]
        ranks = LocalRanks(rank_command(self._run.path), envs, logs, guard, cwd=self._cwd)
        self._report.attempt(attempt, self._plan.num_ranks)
        try:
            watch = Watch(attempt, ranks, self._config, self._report)
            hung = watch.until_over()
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
            failure = first_failure(exits, outcomes, watch.steps(), socket.gethostname())
            return "stopped", failure
        failure = hung or first_failure(exits, outcomes, watch.steps(), socket.gethostname())
        ended = outcomes.get(0, {}).get("outcome")
        if failure is None and ended is None:
            failure = Failure(
                kind="vanished",
                rank=0,
                host=socket.gethostname(),
                step=watch.steps().get(0),
                error="ended with exit code 0 without a report",
            )
        return "stopped" if ended == "stopped" else "finished", failure

    # --- signals to this process

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Ctrl-C, SIGTERM (docker stop) and SIGHUP (closed terminal) save and stop; a second Ctrl-C kills."""
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = [signal.signal(number, self._on_signal) for number in numbers]
        try:
            yield
        finally:
            for number, handler in zip(numbers, before, strict=True):
                signal.signal(number, handler)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        self._num_interrupts += number == signal.SIGINT
        if number == signal.SIGHUP:
            self._leave_terminal()
        self._signalled = f"{name} to the supervisor"
        if self._attempt is None:
            return
        action: Any = "cancel" if self._num_interrupts > 1 else "stop"
        self._attempt.ask(action, by=name, reason=self._signalled)

    def _leave_terminal(self) -> None:
        """Writing to a closed terminal fails, and a message nobody reads must not end the run."""
        with open(os.devnull, "wb") as nowhere:
            for descriptor in self._terminals:
                os.dup2(nowhere.fileno(), descriptor)

    # --- MLflow

    def _start_shipper(self) -> subprocess.Popen[bytes]:
        with open(self._run.path / "shipper.log", "ab") as file:
            return subprocess.Popen(
                [sys.executable, "-P", "-m", "hpcdist.tracking.shipper", str(self._run.path)],
                env=self._env
                | {"HPCDIST_TRACKING_URI": self._tracking_uri, "HPCDIST_SUPERVISOR_PID": str(os.getpid())},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                # The ranks come first, also while they are being started.
                preexec_fn=_be_nice,
            )

    def _drain(self, shipper: subprocess.Popen[bytes]) -> None:
        """Wait until MLflow has everything, but not for ever."""
        try:
            code = shipper.wait(self._config.tracking.drain_timeout_s)
        except subprocess.TimeoutExpired:
            shipper.kill()
            code = shipper.wait()
        if code != 0:
            self._report.note(
                f"MLflow at {redact_uri(self._tracking_uri)} has not taken everything (see shipper.log); nothing is"
                f" lost: `hpcdist sync {self._run.name}` ships the rest"
            )


def _be_nice() -> None:
    os.nice(10)


class Watch:
    """Watches the ranks of one attempt until none is left."""

    def __init__(self, attempt: Attempt, ranks: LocalRanks, config: Config, report: Reporter) -> None:
        self._attempt = attempt
        self._ranks = ranks
        self._config = config
        self._report = report
        self._clock: Callable[[], float] = time.monotonic
        self._signs: dict[int, tuple[object, float]] = {rank: (None, self._clock()) for rank in ranks.running}
        self._kill_at: float | None = None
        self._shown_bytes = 0
        self.stop_asked = False
        self.cancelled = False

    def until_over(self) -> Failure | None:
        """Return when all ranks have ended, or with the failure of a hang. What still runs then may be killed."""
        while self._ranks.running:
            self._ranks.wait(LOOK_EVERY_S)
            now = self._clock()
            self._look_at_requests(now)
            if self.cancelled:
                return None
            failed = any(self._is_failure(code) for code in self._ranks.exits.values())
            if failed:
                self._kill_by(now + PEER_GRACE_S)
            if self._kill_at is not None and now >= self._kill_at:
                return None if failed else self._overdue()
            if self._kill_at is None and (hung := self._hung(now)) is not None:
                return hung
            self._show_progress()
        return None

    def _show_progress(self) -> None:
        """Rank 0's heartbeat or, since a plain script has none, what it prints."""
        if not self._config.trainer.script:
            if (beat := read_json(self._attempt.beat(0))) is not None:
                self._report.progress(beat)
            return
        with open(self._attempt.log(0), "rb") as file:
            file.seek(self._shown_bytes)
            lines = file.read()
        whole = lines[: lines.rfind(b"\n") + 1]
        self._shown_bytes += len(whole)
        if whole:
            self._report.output(whole.decode(errors="replace"))

    def steps(self) -> dict[int, int | None]:
        """The last step that each rank was seen at."""
        return {rank: (read_json(self._attempt.beat(rank)) or {}).get("step") for rank in self._signs}

    def _look_at_requests(self, now: float) -> None:
        request = read_json(self._attempt.request)
        if request is None:
            return
        if request["action"] == "cancel":
            self.cancelled = True
        elif not self.stop_asked:
            self.stop_asked = True
            self._kill_by(now + self._config.launch.stop_grace_s)
            self._report.note(f"stopping: the ranks save and leave ({request['reason']})")
            if self._config.trainer.script:
                # A plain script knows nothing of requests; the signal is all that it can hear.
                self._ranks.signal(signal.SIGTERM)

    def _kill_by(self, then: float) -> None:
        self._kill_at = then if self._kill_at is None else min(self._kill_at, then)

    def _is_failure(self, code: int) -> bool:
        obeyed = self.stop_asked and bool(self._config.trainer.script) and code == -signal.SIGTERM
        return code != 0 and not obeyed

    def _overdue(self) -> Failure:
        rank = self._ranks.running[0]
        return Failure(
            kind="hung",
            rank=rank,
            host=socket.gethostname(),
            step=self.steps()[rank],
            error=f"did not save and leave within launch.stop_grace_s={self._config.launch.stop_grace_s:g} s",
        )

    def _hung(self, now: float) -> Failure | None:
        """The rank that has shown no progress for longest, once that is too long."""
        if not self._ranks.running:
            return None
        for rank in self._ranks.running:
            sign = self._sign(rank)
            if sign != self._signs[rank][0]:
                self._signs[rank] = (sign, now)
        rank, since = min(((rank, self._signs[rank][1]) for rank in self._ranks.running), key=lambda item: item[1])
        if now - since < self._config.launch.hang_timeout_s:
            return None
        self._ranks.signal(signal.SIGUSR1)  # faulthandler prints the stacks into the logs
        until = self._clock() + STACKS_S
        while self._ranks.running and (left := until - self._clock()) > 0:
            self._ranks.wait(left)
        return Failure(
            kind="hung",
            rank=rank,
            host=socket.gethostname(),
            step=self.steps()[rank],
            error=f"made no progress for launch.hang_timeout_s={self._config.launch.hang_timeout_s:g} s"
            f" (stacks of all ranks are in {self._attempt.path})",
        )

    def _sign(self, rank: int) -> object:
        """Something that changes as long as a rank makes progress: its heartbeat, or a plain script's output."""
        path = self._attempt.log(rank) if self._config.trainer.script else self._attempt.beat(rank)
        try:
            found = path.stat()
        except FileNotFoundError:
            return None
        return found.st_size, found.st_mtime_ns
