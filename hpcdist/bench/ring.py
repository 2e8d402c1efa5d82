"""Ring all-reduce implemented with isend and irecv.

The data of each rank is divided into one segment for each rank. In the reduce-scatter phase the segments circulate and
each rank adds its own values, so that after n - 1 steps each rank holds the sum of one segment. In the all-gather phase
the sums circulate. Each rank sends 2 (n - 1) / n of the data, the minimum.
Reference: Patarasuk and Yuan, https://doi.org/10.1016/j.jpdc.2008.09.002.

Segments are sent in pieces. A rank forwards a piece as soon as it is reduced, independently of the steps of other
ranks, so that computation and communication overlap. Each segment is reduced in one order and then copied, so all ranks
have bit-identical results.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from hpcdist.bench.groups import Team
from hpcdist.bench.patterns import COMBINE, Reduction

#: Large enough to make the cost per message small, small enough to overlap the reduction of one piece with the sending
#: of the next. With four ranks on two cores, 256 KiB needed 25 % more processor time.
PIECE_BYTES = 1 << 20
#: Number of receives that are posted in advance.
AHEAD = 4


@dataclass(frozen=True)
class _Arrival:
    """A piece received from the left neighbour."""

    data: Tensor  #: its destination
    is_partial: bool  #: whether it is combined with the destination, otherwise it replaces it
    goes_on: bool  #: whether it is forwarded to the right neighbour


class Ring:
    """In-place all-reduce of one flat tensor; `run` may be called repeatedly.

    Args:
        team: the group of this rank.
        data: contiguous tensor of one dimension and any length, also shorter than the ring.
        reduction: operator of the reduction.
        piece_bytes: size of a message, for backends with simultaneous messages.
    """

    def __init__(self, team: Team, data: Tensor, reduction: Reduction, piece_bytes: int = PIECE_BYTES) -> None:
        self._team, self._combine = team, COMBINE[reduction]
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
        """Reduce the data over all ranks, in place."""
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
                    sent.pop(into.data_ptr()).wait()  # the destination must have been sent before it is overwritten
                else:
                    break  # its sending has not started
                posted.append((_begun(dist.irecv(into, left, group)), into))
            work, arrived = posted[done]
            work.wait()
            if arrival.is_partial:
                self._combine(arrival.data, arrived, out=arrival.data)
            if arrival.goes_on:
                send(arrival.data)
        for work in sent.values():
            work.wait()

    def _run_in_steps(self) -> None:
        """Send and receive one message at a time in a batch, because NCCL runs messages on a stream one by one."""
        n, me = self._team.size, self._team.index
        for s in range(n - 1):
            mine = self._segments[(me - s - 1) % n]
            arrived = self._buffers[0][: len(mine)]
            self._exchange(self._segments[(me - s) % n], arrived)
            self._combine(mine, arrived, out=mine)
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
