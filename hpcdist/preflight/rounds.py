"""Measurement rounds of a node: in each round it measures, or is measured by, at most one other node."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

from hpcdist.preflight.peers import Peer
from hpcdist.preflight.protocol import FAST_BYTES_S, STALL_S, Link, Message

#: Limit for all rounds; pairs of later rounds are not measured.
ROUNDS_S = {"quick": 6.0, "full": 20.0}
#: One burst in one direction grows until it takes this long or is this large.
BURST_S = {"quick": 0.04, "full": 0.2}
BURST_BYTES = {"quick": 4 * 2**20, "full": 64 * 2**20}
#: A higher latency, or a bandwidth below `FAST_BYTES_S`, is measured again, because noise only makes results worse.
SUSPECT_LATENCY_S = 2e-3


class Rounds:
    """The rounds of one node.

    Args:
        partners: this node's partner in each round, None in a round without one.
        leads: whether this node measures in each round; otherwise its partner does.
        mode: `quick` or `full`.
    """

    def __init__(self, partners: Sequence[Peer | None], leads: Sequence[bool], mode: str) -> None:
        self._partners, self._leads, self._mode = partners, leads, mode
        self._current = -1
        self._changed = asyncio.Condition()

    async def run(self) -> None:
        """Measure the peers that this node leads, and wait for those that lead, within `ROUNDS_S`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ROUNDS_S[self._mode]):
                for number, (peer, leads) in enumerate(zip(self._partners, self._leads, strict=True)):
                    if peer is None or not peer.mutual:
                        continue
                    await self._enter(number)
                    if leads:
                        await self._lead(peer, number)
                    else:
                        with contextlib.suppress(TimeoutError):
                            async with asyncio.timeout(STALL_S + 1):
                                await peer.done.wait()
                await self._enter(len(self._partners))

    async def reached(self, number: int) -> int:
        """Wait until this node reaches a round; return 1 if it takes part, 0 if it has already passed the round."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._current >= number)
        return int(self._current == number)

    async def _enter(self, number: int) -> None:
        async with self._changed:
            self._current = number
            self._changed.notify_all()

    async def _lead(self, peer: Peer, number: int) -> None:
        link, peer.link = peer.link, None
        assert link is not None, "mutual"
        try:
            present, _ = await link.request(Message.ROUND, number)
            if present:
                await self._measure(peer, link)
                await link.request(Message.DONE)
            peer.link = link
        except (TimeoutError, OSError, EOFError):
            pass  # the connection has broken, or is too slow: not measured

    async def _measure(self, peer: Peer, link: Link) -> None:
        peer.latency_s, peer.offset_s = await link.ping(20)
        if peer.latency_s > SUSPECT_LATENCY_S:
            again, _ = await link.ping(40)
            peer.latency_s = min(peer.latency_s, again)
        limits = BURST_S[self._mode], BURST_BYTES[self._mode]
        best = []
        for direction in (Message.PUSH, Message.PULL):
            found = max([await link.burst(direction, *limits) for _ in range(2)])
            if found < FAST_BYTES_S:
                found = max([found, *[await link.burst(direction, *limits) for _ in range(2)]])
            best.append(found)
        peer.sent_bytes_s, peer.received_bytes_s = best
