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
    """The GPUs or cores of a node, and their division among its ranks."""

    allocated: float  #: number of GPUs or cores
    share: float  #: number of them that each of the ranks below uses
    ranks: list[int]  #: ranks on the node that use them


@dataclass(frozen=True, kw_only=True)
class Resources:
    """The resources of a run by node: GPUs, or cores if it has no GPU."""

    unit: Literal["GPU", "core"] = "core"
    nodes: Mapping[str, NodeShare] = field(default_factory=dict)
    idle: tuple[str, ...] = ()  #: nodes of the allocation without ranks


#: The causes of the time of a GPU or core, in the order of the ledger (`review/ledger.py`).
Cause = Literal[
    "start", "compile", "data", "compute", "communication", "checkpoint", "evaluation", "redone", "discarded", "finish",
    "idle", "down", "unknown",
]  # fmt: skip
CAUSES: tuple[Cause, ...] = get_args(Cause)


@dataclass(frozen=True, kw_only=True)
class AttemptTimes:
    """The content of `times.json`. Times are seconds since the epoch."""

    supervised: float  #: when the supervisor of this attempt began
    began: float  #: when the attempt began
    ended: float | None = None  #: None until the end, and if the supervisor was killed
    failed: bool = False
    status: str = ""  #: `finished`, `stopped`, `cancelled` or `failed`; empty until the end
    reason: str = ""  #: one sentence: how and why the attempt ended, without the request to end it
    time_limit: float | None = None  #: end of the allocation; None without a time limit
    reached: int = 0  #: the last step of the earlier attempts
    measured: bool = True  #: whether the ranks measure their time; plain scripts report at most their steps
    unit: Literal["GPU", "core"] = "core"
    nodes: dict[str, Any] = field(default_factory=dict)  #: see `shares`
    idle: list[str] = field(default_factory=list)  #: nodes of the allocation without ranks
    idle_since: float | None = None  #: when the ranks began to do nothing, if they were stopped for it

    @property
    def shares(self) -> dict[str, NodeShare]:
        """The resources by node, without damaged entries."""
        shares = {}
        for node, raw in self.nodes.items():
            if not isinstance(raw, dict):
                continue
            with suppress(RunFolderError):
                share = fill(NodeShare, raw, Path())
                are_ranks = all(type(rank) is int and 0 <= rank <= LARGEST for rank in share.ranks)
                if are_ranks and share.allocated >= 0 and share.share >= 0:
                    shares[node] = share
        return shares

    @property
    def num_ranks(self) -> int:
        return sum(len(share.ranks) for share in self.shares.values())


def read_times(attempt: Attempt) -> AttemptTimes | None:
    """Return the content of `times.json`; None if the file is missing or damaged."""
    return read_if_valid(AttemptTimes, attempt.times)


def began_of(run: RunDir) -> float:
    """Return when the supervisor of a run's first attempt began; without attempts, when the run was created."""
    times = None
    with suppress(RunFolderError):  # a sweep has no attempts
        attempts = run.attempts()
        if attempts:
            times = read_times(attempts[0])
    if times is None:
        return run.read_state().created
    return times.supervised


def end_of(attempt: Attempt, times: AttemptTimes) -> float:
    """Return when an attempt ended. Without a record, return the time of its last heartbeat, or its begin."""
    if times.ended is not None:
        return times.ended
    beat_times = []
    for share in times.shares.values():
        for rank in share.ranks:
            beat = attempt.read_beat(rank)
            if beat is not None:
                beat_times.append(float(beat["time"]))
    return max(beat_times, default=times.began)


def write_times(attempt: Attempt, times: AttemptTimes) -> None:
    """Write the times of an attempt. A failure is logged: the training does not depend on this file."""
    try:
        write_json(attempt.times, times.__dict__)
    except OSError as error:
        log.warning("%s cannot be written: %s", attempt.times, error.strerror)


def begin(attempt: Attempt, resources: Resources, times: AttemptTimes) -> AttemptTimes:
    """Add the resources of the ranks to the times of an attempt, and write them. Returns both."""
    nodes = {name: asdict(share) for name, share in resources.nodes.items()}
    times = replace(times, unit=resources.unit, nodes=nodes, idle=list(resources.idle))
    write_times(attempt, times)
    return times
