"""Straggler detection: nodes, or ranks on a single machine, with a longer data or compute time than the median.

The input is the step timing in the ranks' heartbeats (`rank/step_timing.py`). Only ranks of one role are
compared. Only data time and compute time count, because all ranks of a synchronous step wait for the slowest one, so
that their step times are equal. A node is as slow as its slowest rank. A straggler is reported after it was slow in
every window of one minute, because short fluctuations are normal on busy machines.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any, NamedTuple

#: Minimum excess of a straggler's own time over the median, as a share of the median …
SLOWER = 0.2
#: … and as a share of the whole step.
MIN_SHARE = 0.05
#: A straggler is reported after it was slow for this time.
OVER_S = 60.0
#: Minimum duration of a window; windows are longer with many ranks.
WINDOW_S = 10.0
#: A straggler is reported again after this time, or when its excess has doubled.
AGAIN_S = 600.0


class Part(NamedTuple):
    """Mean seconds per step of a rank during one window."""

    data_s: float
    compute_s: float
    step_s: float

    @property
    def own_s(self) -> float:
        """Seconds per step in which a rank waits for nobody."""
        return self.data_s + self.compute_s


class Window(NamedTuple):
    """Times of a node or rank in one window, and of those that it is compared with."""

    since: float  #: on the monotonic clock
    until: float
    rank: int  #: the slowest rank of a node
    own: Part
    others: Part

    @property
    def is_slow(self) -> bool:
        """Whether the rank delays the others."""
        excess = self.own.own_s - self.others.own_s
        return excess > 0 and excess >= SLOWER * self.others.own_s and excess >= MIN_SHARE * self.own.step_s


@dataclass(frozen=True, kw_only=True)
class StragglerEvent:
    """A report on a node or rank; also a line of `stragglers.jsonl`. Seconds are means per step."""

    event: str  #: `slow` or `over`
    name: str  #: name of the node, or `rank N`
    others: str  #: what it is compared with, such as `the median node`
    host: str
    rank: int
    role: str
    over_s: float  #: duration that the means cover
    slower: float  #: excess as a share: 0.34 is 34 %
    data_s: float
    compute_s: float
    others_data_s: float
    others_compute_s: float

    @property
    def text(self) -> str:
        """One line for the user."""
        where = self.name if self.name == self.host else f"{self.name} (on {self.host})"
        if self.event == "over":
            return f"{where} is as fast as {self.others} again"
        parts = {"data": (self.data_s, self.others_data_s), "compute": (self.compute_s, self.others_compute_s)}
        excess_s = sum(own - other for own, other in parts.values())
        shown = {name: pair for name, pair in parts.items() if pair[0] - pair[1] > 0.2 * excess_s}
        figures = [f"{name} {_against(own, other)} a step" for name, (own, other) in shown.items()]
        alike = "" if len(shown) == 2 else f", {'data' if 'compute' in shown else 'compute'} alike"
        return (
            f"{where} is {self.slower:.0%} slower than {self.others} ({', '.join(figures)}{alike})".replace("%", " %")
            + f" over the last {_minutes(self.over_s)}, and the others wait for it: {self._hint('compute' in shown)}"
        )

    def _hint(self, is_compute: bool) -> str:
        hint = (
            f"check {self.host} for other processes (`top`) and slow clocks (`nvidia-smi -q -d PERFORMANCE`)"
            if is_compute
            else f"check how fast {self.host} reads its data, and whether its data workers have free cores (`top`)"
        )
        return hint + (f"; `cluster.exclude={self.host}` leaves it out" if self.name == self.host else "")


def _against(own_s: float, other_s: float) -> str:
    unit, digits, scale = ("s", 2, 1.0) if own_s >= 0.1 else ("ms", 1, 1e3)
    return f"{scale * own_s:.{digits}f} {unit} against {scale * other_s:.{digits}f} {unit}"


def _minutes(seconds: float) -> str:
    minutes = round(seconds / 60)
    return f"{seconds:.0f} s" if not minutes else "minute" if minutes == 1 else f"{minutes} minutes"


@dataclass
class _History:
    """Recent windows of one node or rank, and its last report."""

    windows: deque[Window] = field(default_factory=deque)  #: of the last minute: all slow, or none
    reported: float | None = None  #: the last reported excess; None while it is not a straggler
    reported_at: float = 0.0


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
        if (part := _part(before, timing, now - began)) is None:
            return []  # no step yet: the window continues
        self._totals[rank], parts[rank] = (now, timing), part
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
            if (event := _update(history, Window(since, now, rank, parts[rank], others))) is not None:
                compared_with = f"the {which} {'node' if are_nodes else 'rank'}"
                events.append(self._describe(event, name, compared_with, role, list(history.windows)))
        return events

    def _describe(self, event: str, name: str, others: str, role: str, windows: list[Window]) -> StragglerEvent:
        own, other = _mean([window.own for window in windows]), _mean([window.others for window in windows])
        return StragglerEvent(
            event=event,
            name=name,
            others=others,
            host=self._hosts[windows[-1].rank],
            rank=windows[-1].rank,
            role=role,
            over_s=windows[-1].until - windows[0].since,
            slower=_excess(windows),
            data_s=own.data_s,
            compute_s=own.compute_s,
            others_data_s=other.data_s,
            others_compute_s=other.compute_s,
        )


def _update(history: _History, window: Window) -> str | None:
    """Add a window to a history. Returns the event to report, `slow` or `over`, or None."""
    windows = history.windows
    if windows and windows[-1].is_slow != window.is_slow:
        windows.clear()
    windows.append(window)
    while len(windows) > 2 and window.until - windows[1].since >= OVER_S:
        windows.popleft()
    if len(windows) < 2 or window.until - windows[0].since < OVER_S:
        return None
    if not window.is_slow:
        event, history.reported = "over" if history.reported is not None else None, None
        return event
    excess = _excess(windows)
    if history.reported is not None and excess < 2 * history.reported and window.until - history.reported_at < AGAIN_S:
        return None
    history.reported, history.reported_at = excess, window.until
    return "slow"


def _part(before: Mapping[str, float], after: Mapping[str, float], passed_s: float) -> Part | None:
    """Return the means between two heartbeats of a rank; None if it has not completed a step in between.

    For a rank that counts no steps, such as an observer, the elapsed time is divided by its units of work.
    """
    own, steps = (after[key] - before[key] for key in ("own_steps", "steps"))
    if own <= 0:
        return None
    data_s, compute_s = ((after[key] - before[key]) / own for key in ("data_s", "compute_s"))
    step_s = (after["step_s"] - before["step_s"]) / steps if steps > 0 else passed_s / own
    return Part(data_s, compute_s, step_s)


def _mean(parts: list[Part]) -> Part:
    return Part(*map(fmean, zip(*parts, strict=True)))


def _excess(windows: Iterable[Window]) -> float:
    own_s, others_s = sum(window.own.own_s for window in windows), sum(window.others.own_s for window in windows)
    return own_s / others_s - 1 if others_s else 0.0
