"""Ring all-reduce on isend and irecv alone.

Each rank's data are cut into as many segments as there are ranks. In the reduce-scatter phase segments travel round
the ring and each rank adds its own, so that after n - 1 steps each rank holds one segment's whole sum; in the
all-gather phase the sums travel round. Each rank sends 2 (n - 1) / n of the data, which is the least possible.
Source: Patarasuk and Yuan, https://doi.org/10.1016/j.jpdc.2008.09.002.

Segments travel in pieces, and a piece is passed on as soon as it is added up, whatever step the others are in: a rank
computes while its neighbours' pieces are on their way. A segment is added up in one order and then copied, so all
ranks have the same result, bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from hpcdist.bench.groups import Team
from hpcdist.bench.patterns import Reduction

#: Long enough that a message costs little beside its bytes, short enough that adding one up and sending the next
#: overlap. Of four ranks on two cores, 256 KiB cost a quarter more processor time than this.
PIECE_BYTES = 1 << 20
#: Receives that are posted ahead.
AHEAD = 4
_COMBINE: dict[Reduction, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": lambda mine, theirs: torch.add(mine, theirs, out=mine),
    "product": lambda mine, theirs: torch.mul(mine, theirs, out=mine),
    "max": lambda mine, theirs: torch.maximum(mine, theirs, out=mine),
    "min": lambda mine, theirs: torch.minimum(mine, theirs, out=mine),
}


@dataclass(frozen=True)
class _Arrival:
    """A piece that comes from the left."""

    data: Tensor  #: where it belongs
    is_partial: bool  #: to be combined with what is there; else it replaces it
    goes_on: bool  #: the neighbour to the right needs it too


class Ring:
    """All-reduce of one flat tensor in place, as often as `run` is called.

    Args:
        data: contiguous, of one dimension; any length, also shorter than the ring.
        piece_bytes: how much travels at a time, where the backend takes several messages at once.
    """

    def __init__(self, team: Team, data: Tensor, reduction: Reduction, piece_bytes: int = PIECE_BYTES) -> None:
        self._team, self._combine = team, _COMBINE[reduction]
        n, me = team.size, team.index
        ends = [len(data) * i // n for i in range(n + 1)]
        self._segments = [data[ends[i] : ends[i + 1]] for i in range(n)]
        piece = max(1, piece_bytes // data.element_size())
        pieces = [segment.split(piece) if len(segment) else () for segment in self._segments]
        self._first = pieces[me]
        self._arrivals = [
            *(_Arrival(one, is_partial=True, goes_on=True) for s in range(n - 1) for one in pieces[(me - s - 1) % n]),
            *(_Arrival(one, is_partial=False, goes_on=s < n - 2) for s in range(n - 1) for one in pieces[(me - s) % n]),
        ]
        longest = max(len(segment) for segment in self._segments)
        in_steps = team.backend == "nccl"
        length, number = (longest, 1) if in_steps else (min(longest, piece), AHEAD)
        self._buffers = [data.new_empty(length) for _ in range(number)]
        self._run = self._run_in_steps if in_steps else self._run_in_pieces

    def run(self) -> None:
        if self._team.size > 1:
            self._run()

    def _run_in_pieces(self) -> None:
        right, left, group = self._team.neighbour(1), self._team.neighbour(-1), self._team.group
        sent: dict[int, dist.Work] = {}  # by address
        posted: list[tuple[dist.Work, Tensor]] = []

        def send(data: Tensor) -> None:
            sent[data.data_ptr()] = _begun(dist.isend(data, right, group))

        for data in self._first:
            send(data)
        for done, arrival in enumerate(self._arrivals):
            while len(posted) < min(done + AHEAD, len(self._arrivals)):
                coming = self._arrivals[len(posted)]
                into = coming.data
                if coming.is_partial:
                    into = self._buffers[len(posted) % AHEAD][: len(into)]
                elif into.data_ptr() in sent:
                    sent.pop(into.data_ptr()).wait()  # what leaves from here must have left
                else:
                    break  # not even begun to leave
                posted.append((_begun(dist.irecv(into, left, group)), into))
            work, arrived = posted[done]
            work.wait()
            if arrival.is_partial:
                self._combine(arrival.data, arrived)
            if arrival.goes_on:
                send(arrival.data)
        for work in sent.values():
            work.wait()

    def _run_in_steps(self) -> None:
        """One message each way at a time, begun together, since NCCL makes each wait for its turn on a stream."""
        n, me = self._team.size, self._team.index
        for s in range(n - 1):
            mine = self._segments[(me - s - 1) % n]
            arrived = self._buffers[0][: len(mine)]
            self._exchange(self._segments[(me - s) % n], arrived)
            self._combine(mine, arrived)
        for s in range(n - 1):
            self._exchange(self._segments[(me + 1 - s) % n], self._segments[(me - s) % n])

    def _exchange(self, leaving: Tensor, arriving: Tensor) -> None:
        right, left, group = self._team.neighbour(1), self._team.neighbour(-1), self._team.group
        both = [dist.P2POp(dist.isend, leaving, right, group), dist.P2POp(dist.irecv, arriving, left, group)]
        if both := [one for one in both if len(one.tensor)]:
            for work in dist.batch_isend_irecv(both):
                work.wait()


def _begun(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this rank is in the group"
    return work
