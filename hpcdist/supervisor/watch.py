"""Watching the ranks of one attempt: their ends, their signs of life, and what people ask of them."""

from __future__ import annotations

import json
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from functools import cached_property
from typing import Any, NamedTuple

from hpcdist.config.schema import Config
from hpcdist.files.atomic import read_json
from hpcdist.files.bounded_json import parse_json
from hpcdist.files.log_text import LogTail
from hpcdist.rank.roles import Roles
from hpcdist.run.attempt import Attempt, Request
from hpcdist.run.polling import BEAT_EVERY_S, beat_interval_s, num_due_ranks
from hpcdist.supervisor.hang.collect import collect
from hpcdist.supervisor.launcher import Ranks
from hpcdist.supervisor.reporter import Reporter
from hpcdist.supervisor.restart_policy import Failure, not_started
from hpcdist.supervisor.stragglers import Stragglers, Told

log = logging.getLogger(__name__)
LOOK_EVERY_S = 0.2
#: A request that could not be written is written again after this time.
ASK_AGAIN_S = 1.0
#: After this time of failed writes the ranks are asked by SIGTERM, which would kill one that still starts.
ASK_BY_SIGNAL_S = 3.0
#: A look at files that takes longer has waited for the file system.
SLOW_LOOK_S = 2.0
#: After the first failure the others get this long to report theirs.
PEER_GRACE_S = 3.0
#: Nodes get this long to tell what ranks that hang are doing; one that is dead does not answer at all.
STACKS_S = 15.0
#: In less time than this nothing could be found out.
LEAST_STACKS_S = 3.0
#: What is left of an allocation for ending ranks that have not left, and for queueing the job again.
REST_S = 15.0


class Allocation(NamedTuple):
    """How long the ranks may stay where they are. Unix times."""

    stop_at: float  #: when they are asked to save and leave
    by: str  #: who asks then
    end: float  #: when everything here is killed


class LastSteps(Mapping[int, int | None]):
    """The last step that each rank was seen at. A heartbeat is read when it is asked for."""

    def __init__(self, attempt: Attempt, num_ranks: int, hang_timeout_s: float) -> None:
        self._attempt = attempt
        self._num_ranks = num_ranks
        self._hang_timeout_s = hang_timeout_s

    def __getitem__(self, rank: int) -> int | None:
        if not 0 <= rank < self._num_ranks:
            raise KeyError(rank)
        step: int | None = self._beat(rank).get("step")
        if step is not None and beat_interval_s(rank, self._num_ranks, self._hang_timeout_s) > BEAT_EVERY_S:
            # What many ranks write may be a minute old; rank 0, which goes along with them, is nearer to the truth.
            step = max(step, self._front)
        return step

    @cached_property
    def _front(self) -> int:
        return int(self._beat(0).get("step", 0))

    def _beat(self, rank: int) -> dict[str, Any]:
        try:
            return read_json(self._attempt.beat(rank)) or {}
        except OSError as unread:
            log.warning("%s: %s; its last step is unknown", unread.filename, unread.strerror)
            return {}

    def __iter__(self) -> Iterator[int]:
        return iter(range(self._num_ranks))

    def __len__(self) -> int:
        return self._num_ranks


class Watch:
    """Watches the ranks of one attempt until none is left.

    A look costs the same however many ranks there are: it is for their ends, for requests, for rank 0, and for some
    of the others in turn (`pace.num_due_ranks`).
    """

    def __init__(
        self,
        attempt: Attempt,
        ranks: Ranks,
        config: Config,
        report: Reporter,
        allocation: Allocation | None = None,
        *,
        asked_by_signal: Callable[[], Request | None] = lambda: None,
        check_lease: Callable[[], None] = lambda: None,
    ) -> None:
        self._attempt = attempt
        self._ranks = ranks
        self._config = config
        self._report = report
        self._allocation = allocation
        self._asked_by_signal = asked_by_signal
        self._check_lease = check_lease
        self._clock: Callable[[], float] = time.monotonic
        self._num_ranks = len(ranks.running) + len(ranks.exits)
        self._signs: list[tuple[object, float]] = [(None, self._clock())] * self._num_ranks
        roles = Roles.of(config.roles, self._num_ranks)
        self._stragglers = Stragglers(lambda rank: roles.of_rank(rank)[0])
        self._turn = 0
        self._looked = self._clock()
        self._all_started = False
        #: When the attempt's folder was last away: a rank's silence before that says nothing.
        self._away_until = self._looked
        self._away_since: float | None = None
        self._ask_at = 0.0
        self._asking_since: float | None = None
        self._asked_ranks = False
        self._kill_at: float | None = None
        self._shown: object = None
        self._output = LogTail(attempt.log(0))
        self.stop_asked = False
        self.cancelled = False

    def until_over(self) -> Failure | None:
        """Return when all ranks have ended, or with the failure of ranks that hang or are not started.

        What still runs then may be killed.
        """
        while self._ranks.running:
            began = self._clock()
            self._ranks.wait(LOOK_EVERY_S)
            self._check_lease()
            now = self._clock()
            self._note_delay(began, now)
            self._look_at_requests(now)
            if self.cancelled:
                return None
            failed = any(self._is_failure(code) for code in self._ranks.exits.values())
            if failed:
                self._kill_by(now + PEER_GRACE_S)
            if self._kill_at is not None and now >= self._kill_at:
                return None if failed else self._overdue()
            if self._kill_at is None and (failure := self._late(now) or self._hung(now)) is not None:
                return failure
            self._show_progress()
            self._note_delay(now, self._clock())
        return None

    def _late(self, now: float) -> Failure | None:
        """The failure of ranks that were not started in time: one look at the end of that time, none before."""
        limit_s = self._config.launch.init_timeout_s
        if self._all_started or now < self._away_until + limit_s:
            return None
        absent = self._ranks.absent()
        self._all_started = not absent
        why = f"within launch.init_timeout_s={limit_s:g} s: {self._ranks.last_words()}" if absent else ""
        return not_started(absent, self._num_ranks, why, self._ranks.host_of)

    def _note_delay(self, began: float, now: float) -> None:
        """Where a look has waited for the file system, the ranks had to wait for it as well."""
        if now - began > SLOW_LOOK_S:
            self._away_until = now

    def _show_progress(self) -> None:
        """Rank 0's heartbeat or, since a plain script has none, what it prints; once it has changed."""
        try:
            sign = self._sign(0)
            if sign == self._shown:
                return
            if not self._config.trainer.script:
                beat, self._shown = read_json(self._attempt.beat(0), within_s=0), sign
                if beat is not None:
                    self._report.progress(beat)
                return
            for text in self._output.news():
                self._report.output(text)
            self._shown = sign
        except OSError:
            return  # it is shown with the next change; `_look_at_requests` reports a folder that is away

    def steps(self) -> Mapping[int, int | None]:
        """The last step that each rank was seen at."""
        return LastSteps(self._attempt, self._num_ranks, self._config.launch.hang_timeout_s)

    def _look_at_requests(self, now: float) -> None:
        request = self._request(now)
        if request is None:
            return
        if request.action == "cancel":
            self.cancelled = True
        elif not self.stop_asked:
            self.stop_asked = True
            self._kill_by(now + self._grace_s())
            self._report.note(f"stopping: the ranks save and leave ({request.reason})")
            if self._config.trainer.script:
                # A plain script knows nothing of requests; the signal is all that it can hear.
                self._ask_ranks()

    def _request(self, now: float) -> Request | None:
        """What is asked of the attempt: in its folder, by a signal to this process, or by the allocation's end."""
        found = self._read_request(now)
        asked = self._asked_by_signal()
        if asked is None and self._allocation is not None and time.time() >= self._allocation.stop_at:
            asked = Request(action="stop", by=self._allocation.by, reason=self._allocation.by)
        if asked is None or (found is not None and (asked.action == "stop" or found.action == "cancel")):
            return found
        if now >= self._ask_at:
            self._ask_at = now + ASK_AGAIN_S
            self._leave(asked, now)
        return asked

    def _read_request(self, now: float) -> Request | None:
        try:
            found = self._attempt.read_request(within_s=0)
        except OSError as error:
            if self._away_since is None:
                self._away_since = now
                log.warning("%s: %s; the ranks go on", error.filename, error.strerror)
            self._away_until = now
            return None
        if self._away_since is not None:
            log.warning("%s is available again after %.1f s", self._attempt.path, now - self._away_since)
            self._away_since = None
        return found

    def _leave(self, asked: Request, now: float) -> None:
        """Write a request where the ranks look for it; where that goes on failing, reach them by a signal."""
        try:
            self._attempt.send_request(asked.action, by=asked.by, reason=asked.reason, within_s=0)
        except OSError as error:
            self._asking_since = now if self._asking_since is None else self._asking_since
            late = now - self._asking_since >= ASK_BY_SIGNAL_S
            if late and asked.action == "stop" and not self._asked_ranks:
                self._report.note(f"{self._attempt.request}: {error.strerror}; the ranks are asked by SIGTERM")
                self._ask_ranks()

    def _ask_ranks(self) -> None:
        if not self._asked_ranks:
            self._asked_ranks = True
            self._ranks.signal(signal.SIGTERM)

    def _grace_s(self) -> float:
        """How long the ranks may take to save and leave: not beyond the allocation's end."""
        grace_s = self._config.launch.stop_grace_s
        if self._allocation is None:
            return grace_s
        left_s = max(0.0, self._allocation.end - time.time())
        return min(grace_s, max(left_s - REST_S, left_s / 2))

    def _kill_by(self, then: float) -> None:
        self._kill_at = then if self._kill_at is None else min(self._kill_at, then)

    def _is_failure(self, code: int) -> bool:
        obeyed = self.stop_asked and bool(self._config.trainer.script) and code == -signal.SIGTERM
        return code != 0 and not obeyed

    def _overdue(self) -> Failure:
        return self._stood_still(
            self._ranks.running[0],
            f"did not save and leave within launch.stop_grace_s={self._config.launch.stop_grace_s:g} s"
            + (", or before the end of the allocation" if self._allocation is not None else ""),
        )

    def _stood_still(self, rank: int, error: str) -> Failure:
        """The failure of ranks that are killed for standing still, once it is known where they stand.

        Args:
            rank: whose fault it is as long as nothing else is found out.
        """
        left_s = STACKS_S
        if self._allocation is not None:
            left_s = min(left_s, self._allocation.end - time.time() - REST_S)
        found = None
        if left_s >= LEAST_STACKS_S:
            try:
                found = collect(self._attempt, self._ranks, limit_s=left_s, interrupted=self._is_cancelled)
            except OSError as away:
                log.warning("%s: %s; there are no stack traces of this hang", away.filename, away.strerror)
        if found is not None and len(found.suspects) == 1:
            (rank,) = found.suspects
        return Failure(
            kind="hung",
            rank=rank,
            host=(found.hosts.get(rank) if found is not None else None) or self._ranks.host_of(rank),
            step=self.steps()[rank],
            error=error,
            detail=found.sentence if found is not None else "",
        )

    def _is_cancelled(self) -> bool:
        self._look_at_requests(self._clock())
        return self.cancelled

    def _hung(self, now: float) -> Failure | None:
        """The rank that has shown no progress for longest, once that is too long."""
        if not any(self._is_overdue(rank, now) for rank in self._in_turn(now)) or not self._takes_writes(now):
            return None
        return self._stood_still(
            min(self._ranks.running, key=self._last_sign),
            f"made no progress for launch.hang_timeout_s={self._config.launch.hang_timeout_s:g} s"
            f" (stacks of all ranks are in {self._attempt.path})",
        )

    def _in_turn(self, now: float) -> list[int]:
        """The ranks whose signs of life are due for a look."""
        count = num_due_ranks(self._num_ranks, now - self._looked, self._config.launch.hang_timeout_s)
        self._looked = now
        first, self._turn = self._turn, (self._turn + count) % self._num_ranks
        ranks = ((first + place) % self._num_ranks for place in range(count))
        return [rank for rank in ranks if rank not in self._ranks.exits]

    def _is_overdue(self, rank: int, now: float) -> bool:
        known, since = self._signs[rank]
        try:
            sign = self._read(rank, now) if self._is_due(rank, now) else self._sign(rank)
        except OSError:
            self._signs[rank] = (known, now)  # time in which nobody can look is no silence
            return False
        if sign != known:
            self._signs[rank] = (sign, now)
            return False
        return now - max(since, self._away_until) >= self._config.launch.hang_timeout_s

    def _takes_writes(self, now: float) -> bool:
        """Whether ranks can write their heartbeats; where they cannot, their silence says nothing."""
        probe = self._attempt.path / ".supervisor.probe"
        try:
            probe.write_bytes(bytes(1024))
            probe.unlink()
        except OSError as error:
            log.warning("%s: %s; ranks without a heartbeat are not taken for hung", probe, error.strerror)
            self._away_until = now
            return False
        return True

    def _is_due(self, rank: int, now: float) -> bool:
        """Whether to look at what a rank's steps are spent on, too. A plain script does not tell."""
        return not self._config.trainer.script and self._stragglers.is_due(rank, now)

    def _read(self, rank: int, now: float) -> object:
        """The same as `_sign`, by reading the heartbeat, which also tells of stragglers."""
        try:
            with open(self._attempt.beat(rank), "rb") as file:
                found = os.fstat(file.fileno())
                text = file.read()
        except FileNotFoundError:
            return None
        sign = found.st_size, found.st_mtime_ns
        try:
            beat = parse_json(text)
        except ValueError:  # half written: it is due again at the next turn
            return sign
        for told in self._stragglers.note(rank, beat, now):
            self._tell(told)
        return sign

    def _tell(self, told: Told) -> None:
        self._report.note(told.text)
        line = json.dumps({"time": time.time(), "text": told.text, **asdict(told)})
        try:
            with open(self._attempt.stragglers, "a") as file:
                file.write(line + "\n")
        except OSError as error:
            self._report.note(f"that is not in {self._attempt.stragglers} ({error.strerror})")

    def _last_sign(self, rank: int) -> tuple[float, float]:
        """When a rank was last alive: by its own word, which is exact however seldom it writes, or by what was seen."""
        beat = None if self._config.trainer.script else read_json(self._attempt.beat(rank))
        return (float(beat["time"]) if beat else 0.0, self._signs[rank][1])

    def _sign(self, rank: int) -> object:
        """Something that changes as long as a rank makes progress: its heartbeat, or a plain script's output."""
        path = self._attempt.log(rank) if self._config.trainer.script else self._attempt.beat(rank)
        try:
            found = path.stat()
        except FileNotFoundError:
            return None
        return found.st_size, found.st_mtime_ns
