"""The times of an attempt and the resources of its ranks, in `times.json` of its folder. The supervisor writes it."""

import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

from hpcdist.errors import RunFolderError
from hpcdist.host.json_files import LARGEST, fill, read_if_valid, write_json
from hpcdist.run.folder import Attempt, RunDir

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class NodeShare:
    allocated: float  #: number of GPUs or cores
    share: float  #: number of them that each of the ranks below uses
    ranks: list[int]  #: ranks on the node that use them


@dataclass(frozen=True, kw_only=True)
class Resources:
    """The resources of a run by node: GPUs, or cores if it has no GPU."""

    unit: Literal["GPU", "core"] = "core"
    nodes: Mapping[str, NodeShare] = field(default_factory=dict)
    idle: tuple[str, ...] = ()  #: those of `nodes` that run no ranks


#: What the time of a GPU or core is spent on, in the order of the ledger (`review/ledger.py`).
Cause = Literal[
    "start", "compile", "data", "compute", "communication", "checkpoint", "evaluation", "redone", "discarded", "finish",
    "idle", "down", "unknown",
]  # fmt: skip
CAUSES: tuple[Cause, ...] = get_args(Cause)


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
        found = {}
        for name, raw in self.nodes.items():
            with suppress(RunFolderError):
                share = fill(NodeShare, raw if isinstance(raw, dict) else {}, Path())
                are_ranks = all(type(rank) is int and 0 <= rank <= LARGEST for rank in share.ranks)
                if are_ranks and min(share.allocated, share.share) >= 0:
                    found[name] = share
        return found

    @property
    def num_ranks(self) -> int:
        return sum(len(share.ranks) for share in self.shares.values())


def read_times(attempt: Attempt) -> AttemptTimes | None:
    return read_if_valid(AttemptTimes, attempt.times)


def began_of(run: RunDir) -> float:
    """Return when the supervisor of a run's first attempt began; without attempts, when the run was created."""
    try:
        first = next(iter(run.attempts()), None)
    except RunFolderError:  # a sweep
        first = None
    times = read_times(first) if first is not None else None
    return times.supervised if times is not None else run.read_state().created


def end_of(attempt: Attempt, times: AttemptTimes) -> float:
    """Return when an attempt ended; without a record, the time of its last heartbeat, or its begin."""
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
    nodes = {name: asdict(share) for name, share in resources.nodes.items()}
    times = replace(times, unit=resources.unit, nodes=nodes, idle=list(resources.idle))
    write_times(attempt, times)
    return times
