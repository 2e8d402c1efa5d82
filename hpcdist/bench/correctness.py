"""Is an operation's result right, on every rank, at sizes that cut badly?"""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]  # torch exports it at run time

from hpcdist.bench.data_movement import Barrier
from hpcdist.bench.groups import Team, Words
from hpcdist.bench.operation import Operation, wait_for
from hpcdist.bench.operations import RingAllReduce
from hpcdist.bench.patterns import DTYPES, Reduction
from hpcdist.bench.results import Checked
from hpcdist.bench.ring import PIECE_BYTES

#: How torch and its backends say that they cannot do something at all, on every rank alike.
_UNSUPPORTED = re.compile(
    r"not support|unsupported|not implemented|invalid scalar type|no backend type associated|unhandled scalar",
    re.IGNORECASE,
)
#: Elements (of each rank's part, where it has one): one, some, and enough for several messages.
_COUNTS = (1, 7, 20_011)
#: The ring as it works on long data, on short ones.
_SHORT_PIECE_BYTES = 512
_LATE_S = 0.02
#: Equal on all ranks, as all of them check the same.
_serial = itertools.count()


@dataclass(frozen=True, kw_only=True)
class Variety:
    """An operation, and of a reduction which."""

    kind: type[Operation]
    reduction: Reduction | None = None

    @property
    def title(self) -> str:
        """`all_reduce[sum]`"""
        return f"{self.kind.name}[{self.reduction}]" if self.reduction else self.kind.name

    def make(
        self, team: Team, count: int, dtype: torch.dtype, *, root: int = 0, piece_bytes: int = PIECE_BYTES
    ) -> Operation:
        return self.kind(team, count, dtype, root=root, reduction=self.reduction or "sum", piece_bytes=piece_bytes)


def check(variety: Variety, team: Team, dtype: str, words: Words, store: Store, *, node: str) -> Checked:
    """Compare the operation with the exact expectation; call it on every rank, with that rank's own team.

    Args:
        store: in which a barrier is counted.
        node: this rank's, for the report.
    """
    wrong, cannot, serial = "", "", next(_serial)
    if team.size >= max(variety.kind.least_ranks, 1 if team.name == "world" else 2):
        try:
            # All cases, also after a wrong one: the other ranks may have seen nothing wrong.
            found = [_compare(operation, store, serial) for operation in _cases(variety, team, DTYPES[dtype])]
            wrong = next(filter(None, found), "")
        except (RuntimeError, ValueError) as error:
            if not _UNSUPPORTED.search(str(error)):
                raise
            cannot = " ".join(str(error).split())[:200]
    said = words.everyones(f"rank {dist.get_rank()} on {node}: {wrong}" if wrong else "")
    cannots = list(filter(None, words.everyones(cannot)))
    ok: bool | None = True
    text = ""
    if sentences := list(filter(None, said)):
        ok, text = False, sentences[0]
        if len(sentences) > 1:
            text += f"; {len(sentences) - 1} more of {len(said)} ranks are wrong too"
    elif cannots:
        ok, text = None, f"{team.backend} has no {variety.title} of {dtype}: {cannots[0]}"
    elif team.largest < variety.kind.least_ranks:
        ok, text = None, f"{variety.title} needs {variety.kind.least_ranks} ranks"
    return Checked(operation=variety.title, group=team.name, dtype=dtype, ok=ok, error=text)


def _cases(variety: Variety, team: Team, dtype: torch.dtype) -> Iterator[Operation]:
    for count in _COUNTS[:1] if variety.kind is Barrier else _COUNTS:
        # Not the world's size times the longest: a thousand ranks would check for minutes.
        whole = max(1, count // team.size) * team.size if variety.kind.has_parts else count
        for root in {0, team.size - 1} if variety.kind.has_root else {0}:
            yield variety.make(team, whole, dtype, root=root)
        if issubclass(variety.kind, RingAllReduce):
            yield variety.make(team, whole, dtype, piece_bytes=_SHORT_PIECE_BYTES)


def _compare(operation: Operation, store: Store, serial: int) -> str:
    """What is wrong after the operation, blocking and not; empty where nothing is."""
    if isinstance(operation, Barrier):
        return _compare_barrier(operation, store, serial)
    found = []
    for async_op in (False, True) if operation.can_overlap else (False,):
        operation.fill()
        wait_for(operation.call(async_op=async_op))
        found.append(_difference(operation))
    return next(filter(None, found), "")


def _difference(operation: Operation) -> str:
    if (result := operation.result()) is None:
        return ""
    got, expected = result.cpu(), operation.expected()
    if got.dtype == expected.dtype and torch.equal(got, expected):
        return ""
    places = torch.nonzero(got != expected).flatten()
    index = int(places[0])
    what = f"{operation.title} of {len(got)} x {str(got.dtype).removeprefix('torch.')}"
    what += f" (root is rank {operation.group_root})" if operation.has_root else ""
    group = "" if operation.team.name == "world" else f" among ranks {', '.join(map(str, operation.team.ranks))}"
    return (
        f"{what}{group} is wrong: at index {index} expected {expected[index].item():g}, got {got[index].item():g}"
        f" ({len(places)} of {len(got)} differ)"
    )


def _compare_barrier(operation: Barrier, store: Store, serial: int) -> str:
    """Each rank in turn comes late; nobody may leave before it has been counted."""
    team = operation.team
    for late in (0, team.size - 1):
        key = f"comm/barrier/{serial}/{team.ranks[0]}/{late}"
        if team.index == late:
            time.sleep(_LATE_S)
        store.add(key, 1)
        operation.run()
        if team.device.type == "cuda":
            torch.cuda.synchronize(team.device)
        if (came := store.add(key, 0)) < team.size:
            return f"barrier of {team.size} ranks was left when {came} had come"
    return ""
