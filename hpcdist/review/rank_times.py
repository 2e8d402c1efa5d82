"""The time of the ranks of one attempt by cause, from the accounts in their heartbeats."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from hpcdist.files.atomic import read_json_lines
from hpcdist.files.formats import LARGEST
from hpcdist.review.causes import CAUSES, Cause
from hpcdist.run.attempt import Attempt
from hpcdist.run.attempt_times import AttemptTimes

Phase = Literal["start", "compile", "train", "evaluate", "save", "down"]
#: Names of recorded phases on the time axis of a run.
PHASES: dict[str, Phase] = {"start": "start", "compile": "compile", "evaluation": "evaluate", "checkpoint": "save"}


@dataclass(frozen=True, kw_only=True)
class RankAccount:
    """The last account that a rank has written, see `TimeAccount.report`. Times are seconds since the epoch."""

    began: float
    until: float
    cause: Cause
    closed: bool
    seconds: Mapping[Cause, float]


@dataclass(frozen=True, kw_only=True)
class TimedAttempt:
    """An attempt with known times."""

    attempt: Attempt
    times: AttemptTimes
    began: float
    ended: float  #: the recorded end, now for a live attempt, or the last sign of a killed one
    is_live: bool

    @property
    def number(self) -> int:
        """Number of the attempt, from 1."""
        return self.attempt.number

    @property
    def has_failed(self) -> bool:
        """Whether the attempt failed, or its supervisor was killed."""
        return self.times.failed or (self.times.ended is None and not self.is_live)

    @property
    def is_measured(self) -> bool:
        """Whether it is known which time was useful; of a plain script only if it reports steps."""
        return self.times.measured or read_account(self.attempt, 0) is not None

    @property
    def nodes(self) -> dict[str, float]:
        """The allocated GPUs or cores of each node."""
        return {node: share.allocated for node, share in self.times.shares.items()}


def attempt_seconds(timed: TimedAttempt) -> dict[tuple[str, Cause], float]:
    """Return the resource-seconds of an attempt by node and cause. They add up to its duration × resources."""
    sums: dict[tuple[str, Cause], float] = {}
    window = timed.ended - timed.began
    for node, share in timed.times.shares.items():
        unused = share.allocated - share.share * len(share.ranks)
        sums[node, "idle"] = sums.get((node, "idle"), 0.0) + max(0.0, unused) * window
        for rank in share.ranks:
            for cause, seconds in rank_seconds(timed, rank).items():
                sums[node, cause] = sums.get((node, cause), 0.0) + seconds * share.share
    return sums


def rank_seconds(timed: TimedAttempt, rank: int) -> dict[Cause, float]:
    """Return the seconds of a rank by cause; they add up to the duration of the attempt.

    Time before the first account is `start`. Time after the last one is `idle` if the rank had done its work, and
    otherwise `down`: the rank was killed, or did not answer any more. A plain script has an account if it reports
    steps, perhaps on rank 0 only; it continues after its last report.
    """
    began, ended = timed.began, timed.ended
    is_script = not timed.times.measured
    account = read_account(timed.attempt, rank) or (read_account(timed.attempt, 0) if is_script else None)
    if account is None:
        return {"compute" if is_script else "start": ended - began}
    # Clocks of nodes differ, and an account must not contain more time than the attempt.
    first = min(max(account.began, began), ended)
    last = min(max(account.until, first), ended)
    known = sum(account.seconds.values())
    scale = (last - first) / known if known > 0 else 0.0
    sums = {cause: seconds * scale for cause, seconds in account.seconds.items()}
    sums["start"] = sums.get("start", 0.0) + first - began + (last - first if known <= 0 else 0.0)
    goes_on = timed.is_live or (is_script and not account.closed)
    after: Cause = account.cause if goes_on else "idle" if account.closed else "down"
    sums[after] = sums.get(after, 0.0) + ended - last
    return sums


def read_account(attempt: Attempt, rank: int) -> RankAccount | None:
    """Return the last account of a rank; None before the first one, and if it is damaged."""
    found = (attempt.read_beat(rank) or {}).get("account")
    if not isinstance(found, dict) or not isinstance(found.get("seconds"), dict):
        return None
    numbers = [found.get("began"), found.get("until"), *found["seconds"].values()]
    if not all(_is_time(number) for number in numbers) or not {found.get("cause"), *found["seconds"]} <= set(CAUSES):
        return None
    return RankAccount(
        began=found["began"],
        until=found["until"],
        cause=found["cause"],
        closed=found.get("closed") is True,
        seconds=found["seconds"],
    )


def measured_energy(attempt: Attempt, ranks: Iterable[int]) -> dict[str, float]:
    """Return the joules that the ranks of a node have measured, by sensor; several ranks may share a GPU."""
    found: dict[str, float] = {}
    for rank in ranks:
        energy = (attempt.read_beat(rank) or {}).get("energy_j")
        for sensor, joules in energy.items() if isinstance(energy, dict) else ():
            if _is_time(joules):
                found[sensor] = max(found.get(sensor, 0.0), joules)
    return found


def read_phases(attempt: Attempt) -> list[tuple[Phase, float, float]]:
    """Return the recorded phases of rank 0 in order: name of the phase, begin and end, without damaged lines."""
    found = [phase for record in read_json_lines(attempt.phases) if (phase := _parse_phase(record)) is not None]
    return sorted(found, key=lambda phase: phase[1])


def _parse_phase(found: Mapping[str, Any]) -> tuple[Phase, float, float] | None:
    if found.get("cause") not in PHASES:
        return None
    began, ended = found.get("began", -1.0), found.get("ended", -1.0)
    if not (_is_time(began) and _is_time(ended) and began <= ended):
        return None
    return PHASES[found["cause"]], began, ended


def _is_time(value: object) -> bool:
    return type(value) in (int, float) and 0 <= value <= LARGEST  # type: ignore[operator]
