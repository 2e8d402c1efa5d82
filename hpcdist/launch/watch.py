"""Watching the ranks of one attempt: their ends, their signs of life, and what people ask of them."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

from hpcdist.launch.launcher import Ranks, Reporter
from hpcdist.launch.policy import Failure
from hpcdist.rundir import Attempt, read_json
from hpcdist.schema import Config

LOOK_EVERY_S = 0.2
#: After the first failure the others get this long to report theirs.
PEER_GRACE_S = 3.0
#: Ranks that hang get this long to print their stacks.
STACKS_S = 1.0


class Watch:
    """Watches the ranks of one attempt until none is left."""

    def __init__(
        self,
        attempt: Attempt,
        ranks: Ranks,
        config: Config,
        report: Reporter,
        stop_at: tuple[float, str] | None = None,
    ) -> None:
        self._attempt = attempt
        self._ranks = ranks
        self._config = config
        self._report = report
        self._stop_at = stop_at
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
        whole = lines[: max(lines.rfind(b"\n"), lines.rfind(b"\r")) + 1]
        self._shown_bytes += len(whole)
        if whole:
            self._report.output(whole.decode(errors="replace"))

    def steps(self) -> dict[int, int | None]:
        """The last step that each rank was seen at."""
        return {rank: (read_json(self._attempt.beat(rank)) or {}).get("step") for rank in self._signs}

    def _look_at_requests(self, now: float) -> None:
        request = read_json(self._attempt.request)
        if request is None:
            if self._stop_at is not None and time.time() >= self._stop_at[0]:
                self._attempt.ask("stop", by=self._stop_at[1], reason=self._stop_at[1])
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
            host=self._ranks.host_of(rank),
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
            host=self._ranks.host_of(rank),
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
