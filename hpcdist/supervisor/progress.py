"""Progress of the ranks of one attempt, from their heartbeats: hung ranks, stragglers and the last known steps."""

import json
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any, Literal, NamedTuple, Protocol

from hpcdist.config.roles import Roles
from hpcdist.config.schema import Config
from hpcdist.config.trainer_declaration import find_trainer
from hpcdist.host.files import open_regular
from hpcdist.host.json_files import parse_json, read_json
from hpcdist.host.log_files import RANK_LINE, LogTail
from hpcdist.run.folder import BEAT_EVERY_S, Attempt, beat_interval_s, num_due_ranks
from hpcdist.supervisor.protocols import Ranks
from hpcdist.supervisor.restart_policy import Failure

log = logging.getLogger(__name__)


class Reporter(Protocol):
    """Receives the events of a run, such as `RunView` in `cli/run_views.py`, which shows them to a user."""

    def attempt(self, attempt: Attempt, num_ranks: int) -> None: ...  # an attempt begins
    def progress(self, beat: Mapping[str, Any]) -> None: ...  # a heartbeat of rank 0
    def note(self, text: str) -> None: ...
    def output(self, text: str) -> None: ...  # of a script or an own trainer
    def failure(self, failure: Failure, log: Path) -> None: ...  # of an attempt; `log` is that of the failed rank


class ProgressMonitor:
    """Detects hung ranks and stragglers in one attempt, and reports the progress of rank 0.

    The cost of a check does not depend on the number of ranks: it covers some of them in turn (`num_due_ranks`). For
    plain scripts the size of the log counts as progress as well, since few of them write heartbeats.

    A rank of a trainer that reports each step must go on doing so. All other ranks may be silent as long as one of them
    makes progress, since often rank 0 alone prints and logs.

    Attributes:
        unavailable_until: last time at which the attempt's folder was unavailable; missing heartbeats before it are no
            sign of a hang.
    """

    def __init__(self, attempt: Attempt, ranks: Ranks, config: Config, report: Reporter, now: float) -> None:
        self._attempt = attempt
        self._ranks = ranks
        self._report = report
        self._is_script = bool(config.trainer.script)
        self._timeout_s = config.launch.hang_s
        #: Before its first heartbeat a rank imports torch and connects, for which a short timeout is too short.
        self._first_timeout_s = max(self._timeout_s, config.launch.init_timeout_s)
        self._num_ranks = len(ranks.remaining) + len(ranks.exits)
        self._signs: list[tuple[object, float]] = [(None, now)] * self._num_ranks
        roles = Roles.of(config.roles, self._num_ranks)
        self._stragglers = Stragglers(lambda rank: roles.of_rank(rank)[0])
        self._next_rank = 0
        self._last_check = self._last_progress = now
        self._shown: object = None
        self._diverged = ""
        is_own = self._is_script or find_trainer(config.trainer.target) is None
        self._output = LogTail(attempt.log(0)) if is_own else None
        self._hides_output = False
        self.unavailable_until = now

    def last_step(self, rank: int) -> int | None:
        """Return the last known step of a rank; None before its first heartbeat."""
        # Heartbeats of large runs may be a minute old; rank 0, at the same step, writes more often.
        is_late = beat_interval_s(rank, self._num_ranks, self._timeout_s) > BEAT_EVERY_S
        steps = []
        for one in (rank, 0) if is_late else (rank,):
            try:
                steps.append((read_json(self._attempt.beat(one)) or {}).get("step"))
            except OSError as unread:
                log.warning("%s: %s; the last step of rank %d is unknown", unread.filename, unread.strerror, one)
                steps.append(None)
        return None if steps[0] is None else max(step or 0 for step in steps)

    def show(self) -> None:
        """Report a changed heartbeat of rank 0 and, for a script or an own trainer, its new output."""
        try:
            printed = _size_and_time(self._attempt.log(0)) if self._output is not None else None
            sign = self._sign(0), printed
            if sign == self._shown:
                return
            if self._output is not None and printed is not None:
                for text in self._output.news():
                    if own := self._own_output(text):
                        self._report.output(own)
            beat, self._shown = read_json(self._attempt.beat(0), within_s=0), sign
            if beat is not None:
                self._report.progress(beat)
                if (diverged := beat.get("diverged", "")) != self._diverged:
                    self._diverged = diverged
                    self._report.note(f"{diverged}: the training has diverged; `stop.nan_losses` ends such a run")
        except OSError:
            return  # reported with the next change; `Watch` logs an unavailable folder

    def _own_output(self, text: str) -> str:
        shown = ""
        for line in text.splitlines(keepends=True):
            level = own["level"] if (own := RANK_LINE.match(line)) else None
            self._hides_output |= level == "ERROR"  # `Reporter.failure` reports it with its traceback
            shown += line if not self._hides_output and level in (None, "WARNING") else ""
        return shown

    def find_hung(self, now: float) -> int | None:
        """Return the rank without progress for the longest time if that exceeds the hang timeout, else None."""
        count = num_due_ranks(self._num_ranks, now - self._last_check, self._timeout_s)
        self._last_check = now
        first, self._next_rank = self._next_rank, (self._next_rank + count) % self._num_ranks
        due = ((first + offset) % self._num_ranks for offset in range(count))
        if not any(self._is_overdue(rank, now) for rank in due if rank not in self._ranks.exits):
            return None
        probe = self._attempt.path / ".supervisor.probe"
        try:
            probe.write_bytes(bytes(1024))
            probe.unlink()
        except OSError as error:  # ranks cannot write heartbeats either
            log.warning("%s: %s; ranks without a heartbeat do not count as hung", probe, error.strerror)
            self.unavailable_until = now
            return None
        return min(self._ranks.remaining, key=self._last_sign)

    def silent_s(self, now: float) -> float:
        return now - max(self._last_progress, self.unavailable_until)

    def overdue(self, now: float) -> set[int]:
        since = now - self._timeout_s
        return {rank for rank in self._ranks.remaining if max(self._signs[rank][1], self.unavailable_until) <= since}

    def postpone(self, now: float) -> None:
        """Count the time from now on as silence, since the ranks do not hang."""
        self._last_progress = now
        self._signs = [(known, now) for known, _ in self._signs]

    def _is_overdue(self, rank: int, now: float) -> bool:
        known, since = self._signs[rank]
        try:
            timing_due = not self._is_script and self._stragglers.is_due(rank, now)
            sign = self._read_timing(rank, now) if timing_due else self._sign(rank)
            limit_s = self._timeout_s if known is not None else self._first_timeout_s
            if sign == known and now - max(since, self.unavailable_until) >= limit_s:
                if self.silent_s(now) >= self._timeout_s:
                    return True
                # A trainer that has begun to report each step must go on.
                beat = {"regular": False} if self._is_script else read_json(self._attempt.beat(rank), within_s=0)
                if (beat or {}).get("regular", True):
                    return True
                since = self._last_progress  # the next check that reads its heartbeat is due later
        except OSError:
            since, sign = now, known  # an unreadable heartbeat is no sign of a hang
        if sign != known:
            since = now
        self._signs[rank] = (sign, since)
        self._last_progress = max(self._last_progress, since)
        return False

    def _last_sign(self, rank: int) -> tuple[float, float]:
        beat = None if self._is_script else read_json(self._attempt.beat(rank))
        return float(beat["time"]) if beat else 0.0, self._signs[rank][1]

    def _sign(self, rank: int) -> object:
        """Return a value that changes with a rank's progress: of its heartbeat file, and of a plain script's log."""
        beat = _size_and_time(self._attempt.beat(rank))
        return (beat, _size_and_time(self._attempt.log(rank))) if self._is_script else beat

    def _read_timing(self, rank: int, now: float) -> object:
        try:
            with open_regular(self._attempt.beat(rank)) as beat_file:
                found = os.fstat(beat_file.fileno())
                text = beat_file.read()
        except FileNotFoundError:
            return None
        sign = found.st_size, found.st_mtime_ns
        try:
            beat = parse_json(text)
        except ValueError:  # half written: the next check reads it again
            return sign
        for event in self._stragglers.note(rank, beat, now):
            self._report.note(event.text)
            try:
                with open(self._attempt.stragglers, "a") as file:
                    file.write(json.dumps({"time": time.time(), **asdict(event)}) + "\n")
            except OSError as error:
                self._report.note(f"{self._attempt.stragglers} cannot be written ({error.strerror})")
        return sign


def _size_and_time(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_size, found.st_mtime_ns


# Straggler detection: nodes, or ranks on a single machine, with a longer data or compute time than the median, by the
# step timing in the ranks' heartbeats (`rank/step_timing.py`). Only ranks of one role are compared. Step times do not
# count: all ranks of a synchronous step wait for the slowest one. A node is as slow as its slowest rank. A straggler is
# reported after it was slow in every window of one minute, because short fluctuations are normal on busy machines.

#: Minimum excess of a straggler's own time over the median, as a share of the median …
SLOWER = 0.2
#: … and as a share of the whole step.
MIN_SHARE = 0.05
#: A straggler is reported after it was slow for this time.
OVER_S = 60.0
#: Minimum duration of a window; windows are longer with many ranks.
WINDOW_S = 10.0


class Part(NamedTuple):
    """Mean seconds per step of a rank during one window."""

    data_s: float
    compute_s: float
    step_s: float

    @property
    def own_s(self) -> float:
        return self.data_s + self.compute_s


class Window(NamedTuple):
    """Times of a node or rank in one window, and of those that it is compared with."""

    since: float  #: on the monotonic clock
    until: float
    own: Part
    others: Part

    @property
    def is_slow(self) -> bool:
        excess = self.own.own_s - self.others.own_s
        return excess > 0 and excess >= SLOWER * self.others.own_s and excess >= MIN_SHARE * self.own.step_s


@dataclass(frozen=True, kw_only=True)
class StragglerEvent:
    """A report on a node or rank; also a line of `stragglers.jsonl`."""

    event: Literal["slow", "over"]
    name: str  #: name of the node, or `rank N`
    host: str
    rank: int
    role: str
    text: str


def _describe(place: str, host: str, windows: Sequence[Window], others: str) -> str:
    """Return a sentence on a straggler; `place` names the node or rank, `others` what it is compared with."""
    own, other = _mean([window.own for window in windows]), _mean([window.others for window in windows])
    excess_s = own.own_s - other.own_s
    pairs = {"data": (own.data_s, other.data_s), "compute": (own.compute_s, other.compute_s)}
    shown = {name: pair for name, pair in pairs.items() if pair[0] - pair[1] > 0.2 * excess_s}
    figures = []
    for name, (own_s, other_s) in shown.items():
        unit, digits, scale = ("s", 2, 1.0) if own_s >= 0.1 else ("ms", 1, 1e3)
        against = f"{scale * own_s:.{digits}f} {unit} against {scale * other_s:.{digits}f} {unit}"
        figures.append(f"{name} {against} a step")
    alike = "" if len(shown) == 2 else f", {'data' if 'compute' in shown else 'compute'} alike"
    hint = (
        f"check {host} for other processes (`top`) and slow clocks (`nvidia-smi -q -d PERFORMANCE`)"
        if "compute" in shown
        else f"check how fast {host} reads its data, and whether its data workers have free cores (`top`)"
    )
    hint += f"; `cluster.exclude={host}` leaves it out" if place == host else ""
    slower = f"{100 * excess_s / other.own_s:.0f} % slower" if other.own_s else "slower"
    over_s = windows[-1].until - windows[0].since
    return (
        f"{place} is {slower} than {others} ({', '.join(figures)}{alike})"
        f" over the last {over_s:.0f} s, and the others wait for it: {hint}"
    )


def _mean(parts: list[Part]) -> Part:
    return Part(*map(fmean, zip(*parts, strict=True)))


@dataclass
class _History:
    """Recent windows of one node or rank, and whether it was reported as a straggler."""

    windows: deque[Window] = field(default_factory=deque)  #: of the last minute: all slow, or none
    is_reported: bool = False

    def add(self, window: Window) -> Literal["slow", "over"] | None:
        windows = self.windows
        if windows and windows[-1].is_slow != window.is_slow:
            windows.clear()
        windows.append(window)
        while len(windows) > 2 and window.until - windows[1].since >= OVER_S:
            windows.popleft()
        if len(windows) < 2 or window.until - windows[0].since < OVER_S or window.is_slow == self.is_reported:
            return None
        self.is_reported = window.is_slow
        return "slow" if window.is_slow else "over"


class Stragglers:
    """Detects stragglers from the heartbeats of all ranks."""

    def __init__(self, role_of: Callable[[int], str]) -> None:
        self._role_of = role_of
        self._read_at: dict[int, float] = {}  #: time of each rank's last heartbeat that was passed to `note`
        self._hosts: dict[int, str] = {}
        self._totals: dict[int, tuple[float, Mapping[str, float]]] = {}  #: begin of each rank's window, and its totals
        self._since: dict[str, float] = {}  #: begin of the window, by role
        self._parts: dict[str, dict[int, Part | None]] = {}  #: means of the window by role and rank, once known
        self._histories: dict[tuple[str, str], _History] = {}

    def is_due(self, rank: int, now: float) -> bool:
        """Return whether the caller should pass the rank's heartbeat to `note`."""
        return rank not in self._read_at or now - self._read_at[rank] >= WINDOW_S

    def note(self, rank: int, beat: Mapping[str, Any], now: float) -> list[StragglerEvent]:
        """Record a heartbeat. Returns events if this completes the window of the rank's role."""
        self._read_at[rank] = now
        timing: Mapping[str, float] = beat.get("timing") or {}
        if not timing.get("own_steps"):
            return []
        role = self._role_of(rank)
        parts = self._parts.setdefault(role, {})
        began, before = self._totals.setdefault(rank, (now, timing))
        parts.setdefault(rank, None)
        self._hosts[rank] = str(beat["host"])
        since = self._since.setdefault(role, now)
        own, steps = (timing[key] - before[key] for key in ("own_steps", "steps"))
        if own <= 0:
            return []  # no step yet: the window continues
        data_s, compute_s = ((timing[key] - before[key]) / own for key in ("data_s", "compute_s"))
        # A rank that counts no steps, such as an observer, has units of work.
        step_s = (timing["step_s"] - before["step_s"]) / steps if steps > 0 else (now - began) / own
        self._totals[rank], parts[rank] = (now, timing), Part(data_s, compute_s, step_s)
        known = {other: part for other, part in parts.items() if part is not None}
        if len(known) < len(parts):
            return []
        self._since[role], self._parts[role] = now, dict.fromkeys(parts)
        return self._judge(role, known, since, now)

    def _judge(self, role: str, parts: Mapping[int, Part], since: float, now: float) -> list[StragglerEvent]:
        are_nodes = len({self._hosts[rank] for rank in parts}) > 1
        slowest: dict[str, int] = {}
        for rank in sorted(parts, key=lambda rank: parts[rank].own_s):
            slowest[self._hosts[rank] if are_nodes else f"rank {rank}"] = rank
        if len(slowest) < 2:
            return []
        middle = Part(*map(median, zip(*(parts[rank] for rank in slowest.values()), strict=True)))
        events = []
        for name, rank in slowest.items():
            others, which = middle, "median"
            if len(slowest) == 2:  # the median of two is halfway between them
                (others,), which = [parts[other] for other in slowest.values() if other != rank], "other"
            history = self._histories.setdefault((role, name), _History())
            if (event := history.add(Window(since, now, parts[rank], others))) is None:
                continue
            host, which = self._hosts[rank], f"the {which} {'node' if are_nodes else 'rank'}"
            place = name if name == host else f"{name} (on {host})"
            text = f"{place} is as fast as {which} again"
            if event == "slow":
                text = _describe(place, host, history.windows, which)
            events.append(StragglerEvent(event=event, name=name, host=host, rank=rank, role=role, text=text))
        return events
