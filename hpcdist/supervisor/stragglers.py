"""Who holds the others up: a node, or on one machine a rank, whose own part of the step takes longer than the median.

The input is the totals of the ranks' heartbeats (`rank/telemetry/step_timing.py`). Only ranks of one role are
compared, and only by data time and compute, which waiting for others does not make equal. A node is as slow as its
slowest rank. It must have been too slow in every look for a whole minute before anyone is told: busy machines are
uneven for seconds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any, NamedTuple

#: A straggler is slower than the median by this share …
SLOWER = 0.2
#: … which also must be worth something: this share of the whole step.
MIN_SHARE = 0.05
#: … for so long,
OVER_S = 60.0
#: in looks that are so far apart, or farther where there are many ranks.
WINDOW_S = 10.0
#: It is told again when it has become twice as slow, or after so long.
AGAIN_S = 600.0


class Part(NamedTuple):
    """Mean seconds a step between two looks at a rank."""

    data_s: float
    compute_s: float
    step_s: float

    @property
    def own_s(self) -> float:
        return self.data_s + self.compute_s


class Window(NamedTuple):
    """A node or rank in one window, and what the others were like. Times are monotonic."""

    since: float
    until: float
    rank: int  #: of a node the slowest
    own: Part
    others: Part

    @property
    def is_slow(self) -> bool:
        excess = self.own.own_s - self.others.own_s
        return excess > 0 and excess >= SLOWER * self.others.own_s and excess >= MIN_SHARE * self.own.step_s


@dataclass(frozen=True, kw_only=True)
class StragglerEvent:
    """What is told of a node or rank, also in `stragglers.jsonl`. Seconds are means a step."""

    event: str  #: `slow` or `over`
    name: str
    others: str  #: what it is compared with
    host: str
    rank: int
    role: str
    over_s: float  #: how long a time the figures are of
    slower: float  #: 0.34 is 34 %
    data_s: float
    compute_s: float
    others_data_s: float
    others_compute_s: float

    @property
    def text(self) -> str:
        """One line for people."""
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
        look = (
            f"look on {self.host} for other processes (`top`) and slow clocks (`nvidia-smi -q -d PERFORMANCE`)"
            if is_compute
            else f"look on {self.host} how fast its data are read, and whether its data workers have cores (`top`)"
        )
        return look + (f"; `cluster.exclude={self.host}` leaves it out" if self.name == self.host else "")


def _against(own_s: float, other_s: float) -> str:
    unit, digits, scale = ("s", 2, 1.0) if own_s >= 0.1 else ("ms", 1, 1e3)
    return f"{scale * own_s:.{digits}f} {unit} against {scale * other_s:.{digits}f} {unit}"


def _minutes(seconds: float) -> str:
    minutes = round(seconds / 60)
    return f"{seconds:.0f} s" if not minutes else "minute" if minutes == 1 else f"{minutes} minutes"


@dataclass
class _Course:
    """How long one node or rank has been slow, or has not been."""

    looks: deque[Window] = field(default_factory=deque)  #: of the last minute, all slow or all not
    told: float | None = None  #: how much slower it was said to be; None while that is not so
    told_at: float = 0.0


class Stragglers:
    """Takes what heartbeats say, and tells of stragglers.

    Args:
        role_of: a rank's role.
        over_s, window_s: what else OVER_S and WINDOW_S are, for tests.
    """

    def __init__(self, role_of: Callable[[int], str], *, over_s: float = OVER_S, window_s: float = WINDOW_S) -> None:
        self._role_of = role_of
        self._over_s = over_s
        self._window_s = window_s
        self._looked: dict[int, float] = {}
        self._hosts: dict[int, str] = {}
        #: When each rank's window began, and its totals then.
        self._totals: dict[int, tuple[float, Mapping[str, float]]] = {}
        self._since: dict[str, float] = {}  #: by role, when the window began
        self._parts: dict[str, dict[int, Part | None]] = {}  #: by role and rank, once it is known
        self._courses: dict[tuple[str, str], _Course] = {}

    def is_due(self, rank: int, now: float) -> bool:
        """Whether a rank's heartbeat is to be read."""
        return rank not in self._looked or now - self._looked[rank] >= self._window_s

    def note(self, rank: int, beat: Mapping[str, Any], now: float) -> list[StragglerEvent]:
        """Take a heartbeat; returns what is to be told, if this was the last rank of its role in this window."""
        self._looked[rank] = now
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
            return []  # no step since: the window goes on
        self._totals[rank], parts[rank] = (now, timing), part
        known = {one: part for one, part in parts.items() if part is not None}
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
        told = []
        for name, rank in slowest.items():
            others, which = middle, "median"
            if len(slowest) == 2:  # their median is no judge between them
                (others,), which = [parts[one] for one in slowest.values() if one != rank], "other"
            course = self._courses.setdefault((role, name), _Course())
            if (event := self._event(course, Window(since, now, rank, parts[rank], others))) is not None:
                compared_with = f"the {which} {'node' if are_nodes else 'rank'}"
                told.append(self._tell(event, name, compared_with, role, list(course.looks)))
        return told

    def _event(self, course: _Course, look: Window) -> str | None:
        """What there is to tell after one more look."""
        looks = course.looks
        if looks and looks[-1].is_slow != look.is_slow:
            looks.clear()
        looks.append(look)
        while len(looks) > 2 and look.until - looks[1].since >= self._over_s:
            looks.popleft()
        if len(looks) < 2 or look.until - looks[0].since < self._over_s:
            return None
        if not look.is_slow:
            event, course.told = "over" if course.told is not None else None, None
            return event
        slower = _slower(list(looks))
        if course.told is not None and slower < 2 * course.told and look.until - course.told_at < AGAIN_S:
            return None
        course.told, course.told_at = slower, look.until
        return "slow"

    def _tell(self, event: str, name: str, others: str, role: str, looks: list[Window]) -> StragglerEvent:
        own, other = (_mean([getattr(look, whose) for look in looks]) for whose in ("own", "others"))
        return StragglerEvent(
            event=event,
            name=name,
            others=others,
            host=self._hosts[looks[-1].rank],
            rank=looks[-1].rank,
            role=role,
            over_s=looks[-1].until - looks[0].since,
            slower=_slower(looks),
            data_s=own.data_s,
            compute_s=own.compute_s,
            others_data_s=other.data_s,
            others_compute_s=other.compute_s,
        )


def _part(before: Mapping[str, float], after: Mapping[str, float], passed_s: float) -> Part | None:
    """Means between two reports of a rank; None where it has done no step in between.

    Of a rank that counts no steps, its pieces of work come one after the other in the time that has passed.
    """
    own, steps = (after[key] - before[key] for key in ("own_steps", "steps"))
    if own <= 0:
        return None
    data_s, compute_s = ((after[key] - before[key]) / own for key in ("data_s", "compute_s"))
    step_s = (after["step_s"] - before["step_s"]) / steps if steps > 0 else passed_s / own
    return Part(data_s, compute_s, step_s)


def _mean(parts: list[Part]) -> Part:
    return Part(*map(fmean, zip(*parts, strict=True)))


def _slower(looks: list[Window]) -> float:
    own_s, others_s = (sum(getattr(look, whose).own_s for look in looks) for whose in ("own", "others"))
    return own_s / others_s - 1 if others_s else 0.0
