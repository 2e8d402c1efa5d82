"""Progress of the ranks of one attempt, from their heartbeats: hung ranks, stragglers and the last known steps."""

import json
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
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
#: Size of a test write: a full disk has no room for it, and so none for heartbeats.
_PROBE_BYTES = 1024


class Reporter(Protocol):
    """Receives the events of a run, such as `RunView` in `cli/run_views.py`, which shows them to a user."""

    def attempt(self, attempt: Attempt, num_ranks: int) -> None:
        """Report the begin of an attempt."""

    def progress(self, beat: Mapping[str, Any]) -> None:
        """Report a heartbeat of rank 0."""

    def note(self, text: str) -> None:
        """Report a sentence."""

    def output(self, text: str) -> None:
        """Report new output of a script, or of the user's own trainer."""

    def failure(self, failure: Failure, log: Path) -> None:
        """Report the failure of an attempt; `log` is the log of the failed rank."""


class ProgressMonitor:
    """Detects hung ranks and stragglers in one attempt, and reports the progress of rank 0.

    The cost of a check does not depend on the number of ranks: it covers some of them in turn (`num_due_ranks`). For
    plain scripts the size of the log counts as progress as well, since few of them write heartbeats.

    A rank counts as hung if it has promised heartbeats and sends none: one of a trainer of hpcdist, or of any trainer
    once it reports steps. All other ranks may be silent as long as one of them makes progress, since often rank 0 alone
    prints and logs.

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
        #: Before its first heartbeat a rank imports torch and connects, which may take longer than a short timeout.
        self._first_timeout_s = max(self._timeout_s, config.launch.init_timeout_s)
        self._num_ranks = len(ranks.remaining) + len(ranks.exits)
        self._signs: list[tuple[object, float]] = [(None, now)] * self._num_ranks
        roles = Roles.of(config.roles, self._num_ranks)
        self._stragglers = Stragglers(lambda rank: roles.of_rank(rank)[0])
        self._next_rank = 0
        self._last_check = self._last_progress = now
        self._shown: object = None
        self._diverged = ""
        #: Output of a script or of the user's own trainer; None for a trainer of hpcdist.
        self._output: LogTail | None = None
        if self._is_script or find_trainer(config.trainer.target) is None:
            self._output = LogTail(attempt.log(0))
        self._hides_output = False
        self.unavailable_until = now

    def last_step(self, rank: int) -> int | None:
        """Return the last known step of a rank; None before its first heartbeat."""
        # Heartbeats of large runs may be a minute old; rank 0, at the same step, writes more often.
        is_late = beat_interval_s(rank, self._num_ranks, self._timeout_s) > BEAT_EVERY_S
        step = self._step_in_beat(rank)
        if is_late:
            step_of_rank_0 = self._step_in_beat(0) or 0
            if step is not None:
                return max(step, step_of_rank_0)
        return step

    def _step_in_beat(self, rank: int) -> int | None:
        try:
            beat = read_json(self._attempt.beat(rank)) or {}
        except OSError as error:
            log.warning("%s: %s; the last step of rank %d is unknown", error.filename, error.strerror, rank)
            return None
        step: int | None = beat.get("step")
        return step

    def show(self) -> None:
        """Report a changed heartbeat of rank 0 and, for a script or an own trainer, its new output."""
        try:
            log_sign = None
            if self._output is not None:
                log_sign = _size_and_time(self._attempt.log(0))
            sign = self._sign(0), log_sign
            if sign == self._shown:
                return
            if self._output is not None and log_sign is not None:
                for text in self._output.news():
                    user_output = self._user_output(text)
                    if user_output:
                        self._report.output(user_output)
            beat = read_json(self._attempt.beat(0), within_s=0)
            self._shown = sign
            if beat is not None:
                self._report.progress(beat)
                self._note_divergence(beat.get("diverged", ""))
        except OSError:
            return  # reported with the next change; `Watch` logs an unavailable folder

    def _note_divergence(self, diverged: str) -> None:
        if diverged != self._diverged:
            self._diverged = diverged
            self._report.note(f"{diverged}: the training has diverged; `stop.nan_losses` ends such a run")

    def _user_output(self, text: str) -> str:
        """Return the lines of rank 0's log that the user's code has printed, and warnings; nothing after an error."""
        shown = ""
        for line in text.splitlines(keepends=True):
            match = RANK_LINE.match(line)
            level = match["level"] if match else None
            if level == "ERROR":
                # `Reporter.failure` reports it with its traceback.
                self._hides_output = True
            if not self._hides_output and level in (None, "WARNING"):
                shown += line
        return shown

    def find_hung(self, now: float) -> int | None:
        """Return the rank that made no progress for the longest time, if that exceeds the hang timeout; else None."""
        if not self.look(now):
            return None
        probe = self._attempt.path / ".supervisor.probe"
        try:
            probe.write_bytes(bytes(_PROBE_BYTES))
            probe.unlink()
        except OSError as error:  # ranks cannot write heartbeats either
            log.warning("%s: %s; ranks without a heartbeat do not count as hung", probe, error.strerror)
            self.unavailable_until = now
            return None
        return min(self._ranks.remaining, key=self._last_sign)

    def look(self, now: float) -> bool:
        """Look for progress of the next ranks in turn, and return whether one of them hangs."""
        count = num_due_ranks(self._num_ranks, now - self._last_check, self._timeout_s)
        self._last_check = now
        first = self._next_rank
        self._next_rank = (first + count) % self._num_ranks
        due = ((first + offset) % self._num_ranks for offset in range(count))
        return any(self._is_overdue(rank, now) for rank in due if rank not in self._ranks.exits)

    def silent_s(self, now: float) -> float:
        """Return the seconds since the last progress of any rank, without the time of an unavailable folder."""
        return now - max(self._last_progress, self.unavailable_until)

    def overdue(self, now: float) -> set[int]:
        """Return the remaining ranks that have shown no progress for the hang timeout, as of their last checks."""
        since = now - self._timeout_s
        return {rank for rank in self._ranks.remaining if max(self._signs[rank][1], self.unavailable_until) <= since}

    def ignore_changes(self) -> None:
        """Do not count the changes until now as progress: an examination has made the ranks print their stacks."""
        for rank in self._ranks.remaining:
            with suppress(OSError):  # the change then counts
                self._signs[rank] = self._sign(rank), self._signs[rank][1]

    def postpone(self, now: float) -> None:
        """Count the time from now on as silence, since the ranks do not hang."""
        self._last_progress = now
        self._signs = [(known, now) for known, _ in self._signs]

    def _is_overdue(self, rank: int, now: float) -> bool:
        """Look for progress of a rank, and return whether it hangs; otherwise note the time of its progress."""
        known, since = self._signs[rank]
        try:
            if not self._is_script and self._stragglers.is_due(rank, now):
                sign = self._read_timing(rank, now)
            else:
                sign = self._sign(rank)
            limit_s = self._timeout_s if known is not None else self._first_timeout_s
            if sign == known and now - max(since, self.unavailable_until) >= limit_s:
                if self.silent_s(now) >= self._timeout_s or self._is_regular(rank):
                    return True
                since = self._last_progress  # the next check that reads its heartbeat is due later
        except OSError:
            since, sign = now, known  # an unreadable heartbeat is no sign of a hang
        if sign != known:
            since = now
        self._signs[rank] = (sign, since)
        self._last_progress = max(self._last_progress, since)
        return False

    def _is_regular(self, rank: int) -> bool:
        """Return whether a silent rank hangs although others make progress: its trainer reports each step."""
        if self._is_script:
            return False
        beat = read_json(self._attempt.beat(rank), within_s=0) or {}
        return bool(beat.get("regular", True))

    def _last_sign(self, rank: int) -> tuple[float, float]:
        """Return the time of a rank's last heartbeat, 0 without one, and that of its last progress, for comparisons."""
        _, since = self._signs[rank]
        beat_time = 0.0
        if not self._is_script:
            beat = read_json(self._attempt.beat(rank))
            if beat:
                beat_time = float(beat["time"])
        return beat_time, since

    def _sign(self, rank: int) -> object:
        """Return a value that changes with a rank's progress: of its heartbeat file, and of a plain script's log."""
        beat = _size_and_time(self._attempt.beat(rank))
        if not self._is_script:
            return beat
        return beat, _size_and_time(self._attempt.log(rank))

    def _read_timing(self, rank: int, now: float) -> object:
        """Read a rank's heartbeat for the detection of stragglers; returns its sign of progress, as `_sign` does."""
        try:
            with open_regular(self._attempt.beat(rank)) as beat_file:
                facts = os.fstat(beat_file.fileno())
                text = beat_file.read()
        except FileNotFoundError:
            return None
        sign = facts.st_size, facts.st_mtime_ns
        try:
            beat = parse_json(text)
        except ValueError:  # half written: the next check reads it again
            return sign
        for event in self._stragglers.note(rank, beat, now):
            self._report_straggler(event)
        return sign

    def _report_straggler(self, event: "StragglerEvent") -> None:
        self._report.note(event.text)
        try:
            with open(self._attempt.stragglers, "a") as file:
                file.write(json.dumps({"time": time.time(), **asdict(event)}) + "\n")
        except OSError as error:
            self._report.note(f"{self._attempt.stragglers} cannot be written ({error.strerror})")


def _size_and_time(path: Path) -> tuple[int, int] | None:
    """Return size and modification time in nanoseconds of a file; None if it does not exist."""
    try:
        facts = path.stat()
    except FileNotFoundError:
        return None
    return facts.st_size, facts.st_mtime_ns


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
#: A single window, however long, is not enough for a report.
_LEAST_WINDOWS = 2
#: A report names data or compute time if it causes more than this share of the excess.
_NAMED_SHARE = 0.2
#: Shorter times are shown in milliseconds.
_SHOWN_IN_MS_S = 0.1


class Part(NamedTuple):
    """Mean seconds per step of a rank during one window."""

    data_s: float
    compute_s: float
    step_s: float

    @property
    def own_s(self) -> float:
        """Seconds per step in which the rank does not wait for others."""
        return self.data_s + self.compute_s


class Window(NamedTuple):
    """Times of a node or rank in one window, and of the nodes or ranks that it is compared with."""

    since: float  #: on the monotonic clock
    until: float
    own: Part
    others: Part

    @property
    def is_slow(self) -> bool:
        """Whether the node or rank is a straggler in this window."""
        excess_s = self.own.own_s - self.others.own_s
        least_s = max(SLOWER * self.others.own_s, MIN_SHARE * self.own.step_s)
        return excess_s > 0 and excess_s >= least_s


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
    """Return a sentence on a straggler.

    Args:
        place: name of the node or rank.
        host: its node.
        windows: those in which it was slow.
        others: name of the node, rank or median that it is compared with.
    """
    own = _mean([window.own for window in windows])
    other = _mean([window.others for window in windows])
    excess_s = own.own_s - other.own_s
    is_data_slow = own.data_s - other.data_s > _NAMED_SHARE * excess_s
    is_compute_slow = own.compute_s - other.compute_s > _NAMED_SHARE * excess_s
    figures = []
    if is_data_slow:
        figures.append(f"data {_against(own.data_s, other.data_s)} a step")
    if is_compute_slow:
        figures.append(f"compute {_against(own.compute_s, other.compute_s)} a step")
    if not is_data_slow:
        figures.append("data alike")
    elif not is_compute_slow:
        figures.append("compute alike")
    if is_compute_slow:
        hint = f"check {host} for other processes (`top`) and slow clocks (`nvidia-smi -q -d PERFORMANCE`)"
    else:
        hint = f"check how fast {host} reads its data, and whether its data workers have free cores (`top`)"
    if place == host:
        hint += f"; `cluster.exclude={host}` leaves it out"
    slower = "slower"
    if other.own_s:
        slower = f"{100 * excess_s / other.own_s:.0f} % slower"
    over_s = windows[-1].until - windows[0].since
    return (
        f"{place} is {slower} than {others} ({', '.join(figures)})"
        f" over the last {over_s:.0f} s, and the others wait for it: {hint}"
    )


def _against(own_s: float, other_s: float) -> str:
    """Return such as `0.25 s against 0.10 s` or `25.0 ms against 10.0 ms`."""
    if own_s >= _SHOWN_IN_MS_S:
        return f"{own_s:.2f} s against {other_s:.2f} s"
    return f"{1000 * own_s:.1f} ms against {1000 * other_s:.1f} ms"


def _mean(parts: list[Part]) -> Part:
    return Part(*map(fmean, zip(*parts, strict=True)))


def _median(parts: list[Part]) -> Part:
    return Part(*map(median, zip(*parts, strict=True)))


@dataclass
class _History:
    """Recent windows of one node or rank, and whether it was reported as a straggler."""

    windows: deque[Window] = field(default_factory=deque)  #: of the last minute: all slow, or none
    is_reported: bool = False

    def add(self, window: Window) -> Literal["slow", "over"] | None:
        """Add a window. Returns the event that it completes: the begin or the end of a slow period; else None."""
        windows = self.windows
        if windows and windows[-1].is_slow != window.is_slow:
            windows.clear()
        windows.append(window)
        while len(windows) > _LEAST_WINDOWS and window.until - windows[1].since >= OVER_S:
            windows.popleft()
        is_long_enough = len(windows) >= _LEAST_WINDOWS and window.until - windows[0].since >= OVER_S
        if not is_long_enough or window.is_slow == self.is_reported:
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
        num_own_steps = timing["own_steps"] - before["own_steps"]
        num_steps = timing["steps"] - before["steps"]
        if num_own_steps <= 0:
            return []  # no step yet: the window continues
        # A rank that counts no steps, such as an observer, has units of work.
        step_s = (now - began) / num_own_steps
        if num_steps > 0:
            step_s = (timing["step_s"] - before["step_s"]) / num_steps
        self._totals[rank] = (now, timing)
        parts[rank] = Part(
            data_s=(timing["data_s"] - before["data_s"]) / num_own_steps,
            compute_s=(timing["compute_s"] - before["compute_s"]) / num_own_steps,
            step_s=step_s,
        )
        known = {other: part for other, part in parts.items() if part is not None}
        if len(known) < len(parts):
            return []
        self._since[role] = now
        self._parts[role] = dict.fromkeys(parts)
        return self._judge(role, known, since, now)

    def _judge(self, role: str, parts: Mapping[int, Part], since: float, now: float) -> list[StragglerEvent]:
        """Compare the nodes, or the ranks of a single node, in a complete window of a role."""
        are_nodes = len({self._hosts[rank] for rank in parts}) > 1
        unit = "node" if are_nodes else "rank"
        slowest: dict[str, int] = {}  # the slowest rank of each node, or each rank
        for rank in sorted(parts, key=lambda rank: parts[rank].own_s):
            name = self._hosts[rank] if are_nodes else f"rank {rank}"
            slowest[name] = rank
        if len(slowest) <= 1:
            return []
        median_part = _median([parts[rank] for rank in slowest.values()])
        events = []
        for name, rank in slowest.items():
            other_ranks = [other for other in slowest.values() if other != rank]
            if len(other_ranks) == 1:
                # The median of two is halfway between them.
                others, others_name = parts[other_ranks[0]], f"the other {unit}"
            else:
                others, others_name = median_part, f"the median {unit}"
            history = self._histories.setdefault((role, name), _History())
            event = history.add(Window(since, now, parts[rank], others))
            if event is None:
                continue
            host = self._hosts[rank]
            place = name if name == host else f"{name} (on {host})"
            if event == "slow":
                text = _describe(place, host, history.windows, others_name)
            else:
                text = f"{place} is as fast as {others_name} again"
            events.append(StragglerEvent(event=event, name=name, host=host, rank=rank, role=role, text=text))
        return events
