"""Correctness of an operation's result on every rank, at sizes that do not divide evenly."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from hpcdist.bench.groups import Team
from hpcdist.bench.operation import Operation, wait_for
from hpcdist.bench.operations import Barrier, RingAllReduce
from hpcdist.bench.patterns import DTYPES, Reduction
from hpcdist.bench.results import CheckResult
from hpcdist.bench.ring import PIECE_BYTES
from hpcdist.rank.network.collective_timing import synchronize
from hpcdist.rank.network.process_group import Groups

#: Error messages of torch and its backends for an unsupported operation, equal on every rank.
_UNSUPPORTED = re.compile(
    r"not support|unsupported|not implemented|invalid scalar type|no backend type associated|unhandled scalar",
    re.IGNORECASE,
)
#: Numbers of elements (of each rank's part, if there are parts): one, a few, and enough for several messages.
_COUNTS = (1, 7, 20_011)
#: Makes the ring send short data in several pieces, as it sends long data.
_SHORT_PIECE_BYTES = 512
_LATE_S = 0.02
#: Number of the check, equal on all ranks.
_serial = itertools.count()


@dataclass(frozen=True, kw_only=True)
class OperationVariant:
    """An operation, and for a reduction its operator."""

    kind: type[Operation]
    reduction: Reduction | None = None

    @property
    def title(self) -> str:
        """`all_reduce[sum]`"""
        return f"{self.kind.name}[{self.reduction}]" if self.reduction else self.kind.name

    def make(
        self, team: Team, count: int, dtype: torch.dtype, *, root: int = 0, piece_bytes: int = PIECE_BYTES
    ) -> Operation:
        """Create the operation for a team, with `count` elements per piece."""
        return self.kind(team, count, dtype, root=root, reduction=self.reduction or "sum", piece_bytes=piece_bytes)


def check(variant: OperationVariant, team: Team, dtype: str, groups: Groups, *, node: str) -> CheckResult:
    """Compare the result of an operation with the exact expected result. Call it on every rank.

    Args:
        variant: the operation.
        team: the group of this rank.
        dtype: data type, a key of `DTYPES`.
        groups: exchange the results of all ranks; their store counts the ranks in a barrier.
        node: node name of this rank, for the report.
    """
    wrong, unsupported, serial = "", "", next(_serial)
    if team.size >= max(variant.kind.least_ranks, 1 if team.name == "world" else 2):
        try:
            # All cases, also after a wrong result, because the other ranks continue with the next case.
            found = [_compare(operation, groups, serial) for operation in _cases(variant, team, DTYPES[dtype])]
            wrong = next(filter(None, found), "")
        except (RuntimeError, ValueError) as error:
            if not _UNSUPPORTED.search(str(error)):
                raise
            unsupported = " ".join(str(error).split())[:200]
    errors = groups.all_gather(f"rank {dist.get_rank()} on {node}: {wrong}" if wrong else "")
    reasons = list(filter(None, groups.all_gather(unsupported)))
    ok: bool | None = True
    text = ""
    if sentences := list(filter(None, errors)):
        ok, text = False, sentences[0]
        if len(sentences) > 1:
            text += f"; {len(sentences) - 1} more of {len(errors)} ranks have wrong results"
    elif reasons:
        ok, text = None, f"{team.backend} does not support {variant.title} of {dtype}: {reasons[0]}"
    elif team.largest < variant.kind.least_ranks:
        ok, text = None, f"{variant.title} needs {variant.kind.least_ranks} ranks"
    return CheckResult(operation=variant.title, group=team.name, dtype=dtype, ok=ok, error=text)


def _cases(variant: OperationVariant, team: Team, dtype: torch.dtype) -> Iterator[Operation]:
    for count in _COUNTS[:1] if variant.kind is Barrier else _COUNTS:
        # The total does not grow with the world size: checks of a thousand ranks would take minutes.
        whole = max(1, count // team.size) * team.size if variant.kind.has_parts else count
        for root in {0, team.size - 1} if variant.kind.has_root else {0}:
            yield variant.make(team, whole, dtype, root=root)
        if issubclass(variant.kind, RingAllReduce):
            yield variant.make(team, whole, dtype, piece_bytes=_SHORT_PIECE_BYTES)


def _compare(operation: Operation, groups: Groups, serial: int) -> str:
    """Return a description of a wrong result of the blocking or the asynchronous call; empty if both are correct."""
    if isinstance(operation, Barrier):
        return _compare_barrier(operation, groups, serial)
    found = []
    for async_op in (False, True) if operation.can_overlap else (False,):
        operation.fill()
        wait_for(operation.call(async_op=async_op))
        found.append(_difference(operation))
    return next(filter(None, found), "")


def _difference(operation: Operation) -> str:
    if not len(operation.result):
        return ""
    got, expected = operation.result.cpu(), operation.expected()
    if got.dtype == expected.dtype and torch.equal(got, expected):
        return ""
    places = torch.nonzero(got != expected).flatten()
    index = int(places[0])
    title = f"{operation.title} of {len(got)} x {str(got.dtype).removeprefix('torch.')}"
    title += f" (root is rank {operation.group_root})" if operation.has_root else ""
    group = "" if operation.team.name == "world" else f" among ranks {', '.join(map(str, operation.team.ranks))}"
    return (
        f"{title}{group} is wrong: at index {index} expected {expected[index].item():g}, got {got[index].item():g}"
        f" ({len(places)} of {len(got)} differ)"
    )


def _compare_barrier(operation: Barrier, groups: Groups, serial: int) -> str:
    """Let one rank arrive late; no rank may leave the barrier before it."""
    team = operation.team
    for late in (0, team.size - 1):
        key = f"comm/barrier/{serial}/{team.ranks[0]}/{late}"
        if team.index == late:
            time.sleep(_LATE_S)
        groups.store.add(key, 1)
        operation.run()
        synchronize(team.device)
        if (num_arrived := groups.store.add(key, 0)) < team.size:
            return f"a rank left the barrier of {team.size} ranks when {num_arrived} had arrived"
    return ""
