"""The times of an attempt and the resources of its ranks, in `times.json` of its folder. The supervisor writes it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from hpcdist.errors import RunFolderError
from hpcdist.files import formats
from hpcdist.files.atomic import read_json, write_json
from hpcdist.run.attempt import Attempt
from hpcdist.run.folder import RunDir

log = logging.getLogger(__name__)
#: Number of ranks whose heartbeats show the last step of an attempt.
_MAX_READ_RANKS = 64


@dataclass(frozen=True, kw_only=True)
class NodeShare:
    """GPUs or cores of one node that a run has."""

    allocated: float  #: number of GPUs or cores
    share: float  #: number of them that each of the ranks below uses
    ranks: list[int]  #: ranks on the node that use them


@dataclass(frozen=True, kw_only=True)
class Resources:
    """What is allocated to a run: GPUs, or cores if it has no GPU; by node."""

    unit: Literal["GPU", "core"] = "core"
    nodes: Mapping[str, NodeShare] = field(default_factory=dict)
    idle: tuple[str, ...] = ()  #: those of `nodes` that run no ranks


@dataclass(frozen=True, kw_only=True)
class AttemptTimes:
    """The content of `times.json`. Times are seconds since the epoch."""

    supervised: float  #: when the supervisor of this attempt began
    began: float
    ended: float | None = None  #: None until the end, and if the supervisor was killed
    failed: bool = False
    status: str = ""  #: `finished`, `stopped`, `cancelled` or `failed`; empty until the end
    reason: str = ""  #: one sentence: how and why the attempt ended, without the request to end it
    time_limit: float | None = None  #: end of the allocation; None without a time limit
    reached: int = 0  #: the last step that an earlier attempt had done
    measured: bool = True  #: whether the ranks measure their time; plain scripts report steps at most
    unit: Literal["GPU", "core"] = "core"
    nodes: dict[str, Any] = field(default_factory=dict)  #: see `shares`
    idle: list[str] = field(default_factory=list)  #: nodes of the allocation without ranks

    @property
    def shares(self) -> dict[str, NodeShare]:
        """The resources by node, without damaged records."""
        return {name: NodeShare(**raw) for name, raw in self.nodes.items() if _is_share(raw)}

    @property
    def num_ranks(self) -> int:
        """Number of ranks on all nodes."""
        return sum(len(share.ranks) for share in self.shares.values())


def read_times(attempt: Attempt) -> AttemptTimes | None:
    """Return the times of an attempt; None if an older hpcdist has started it, or if the file is damaged."""
    try:
        found = read_json(attempt.times)
        return None if found is None else formats.fill(AttemptTimes, found, attempt.times)
    except (RunFolderError, IsADirectoryError, NotADirectoryError):
        return None


def began_of(run: RunDir) -> float:
    """Return when the supervisor of the first attempt of a run began; of a run without attempts, its creation."""
    try:
        first = next(iter(run.attempts()), None)
    except RunFolderError:  # a sweep
        first = None
    times = read_times(first) if first is not None else None
    return times.supervised if times is not None else run.read_state().created


def end_of(attempt: Attempt, times: AttemptTimes) -> float:
    """Return when an attempt ended; without a recorded end the time of its last heartbeat, or its begin."""
    if times.ended is not None:
        return times.ended
    beats = (attempt.read_beat(rank) for share in times.shares.values() for rank in share.ranks)
    return max((float(beat["time"]) for beat in beats if beat is not None), default=times.began)


def write_times(attempt: Attempt, times: AttemptTimes) -> None:
    """Write the times of an attempt. A failure is logged: the training does not depend on this file."""
    try:
        write_json(attempt.times, times.__dict__)
    except OSError as error:
        log.warning("%s cannot be written: %s", attempt.times, error.strerror)


def begin(attempt: Attempt, resources: Resources, times: AttemptTimes) -> AttemptTimes:
    """Write the times of an attempt that begins, with the resources of its ranks; returns them."""
    nodes = {name: asdict(share) for name, share in resources.nodes.items()}
    times = replace(times, unit=resources.unit, nodes=nodes, idle=list(resources.idle))
    write_times(attempt, times)
    return times


def reached_before(attempt: Attempt) -> int:
    """Return the last step that earlier attempts have done, as the supervisor has recorded it."""
    times = read_times(attempt)
    return 0 if times is None else times.reached


def reached_step(attempt: Attempt) -> int:
    """Return the largest step that an attempt and those before it have done, or 0.

    It is read from the outcomes of the ranks, and from the heartbeats of the attempt's first ranks. A killed rank has
    no outcome, and its heartbeat may be some seconds older than its end.
    """
    times = read_times(attempt)
    num_ranks = min(times.num_ranks if times is not None else 1, _MAX_READ_RANKS)
    steps = [times.reached if times is not None else 0]
    try:
        steps += [int(beat["step"]) for rank in range(num_ranks) if (beat := attempt.read_beat(rank)) is not None]
        steps += [step for outcome in attempt.outcomes().values() if type(step := outcome.get("step")) is int]
    except (RunFolderError, OSError) as error:
        log.warning("the last step of attempt %d is unknown: %s", attempt.number, error)
    return max(steps)


def _is_share(raw: object) -> bool:
    if not isinstance(raw, dict) or raw.keys() != NodeShare.__dataclass_fields__.keys():
        return False
    numbers = (raw["allocated"], raw["share"])
    return (
        all(type(number) in (int, float) and 0 <= number <= formats.LARGEST for number in numbers)
        and isinstance(raw["ranks"], list)
        and all(type(rank) is int and 0 <= rank <= formats.LARGEST for rank in raw["ranks"])
    )
