"""The other nodes as one of them sees them, and the order in which nodes are measured."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from hpcdist.preflight.wire import Link


@dataclass
class Peer:
    """Another node as this one sees it."""

    name: str
    #: `ok`, or why it cannot be reached: `refused`, `silent` (packets vanish), `unreachable`, `stranger`,
    #: `mute` (connects, and says nothing), `unresolved`, `absent` (nobody has heard of it).
    status: str = "absent"
    detail: str = ""
    #: Whether a port of the ephemeral range can be reached as well, in the same words.
    ephemeral: str = "ok"
    #: A round trip of a few bytes; bandwidths from this node and to it; the peer's clock minus this node's.
    latency_s: float | None = None
    sent_bytes_s: float | None = None
    received_bytes_s: float | None = None
    offset_s: float | None = None
    #: Small messages pass, large ones do not.
    stalled: bool = False
    alive_at: float = float("inf")
    #: Its port of the ephemeral range.
    port: int = 0
    #: Whether it was reached by small and large messages; `link` may since have broken, or be in use.
    reached: bool = False
    link: Link | None = None
    #: Whether the peer has reached this node, as it says.
    mutual: bool = False
    #: The peer has ended the round that it leads.
    done: asyncio.Event = field(default_factory=asyncio.Event)

    def as_answer(self) -> dict[str, Any]:
        """What is known, without what is not."""
        found: dict[str, Any] = {"status": self.status}
        if self.status != "ok":
            return found | ({"detail": self.detail} if self.detail else {})
        for name in ("latency_s", "sent_bytes_s", "received_bytes_s", "offset_s"):
            if (value := getattr(self, name)) is not None:
                found[name] = float(f"{value:.4g}")
        if self.ephemeral != "ok":
            found["ephemeral"] = self.ephemeral
        return found | ({"stalled": True} if self.stalled else {})


def tournament(num_nodes: int, num_rounds: int) -> list[list[int | None]]:
    """Who meets whom: for each round a partner by node, None for who sits it out. Rounds are spread evenly.

    The circle method: in round r of m the nodes i and r - i (modulo m) meet, and who would meet itself meets the last.
    """
    circle = num_nodes if num_nodes % 2 else num_nodes - 1
    wanted = min(num_rounds, circle)
    rounds = []
    for turn in (step * circle // wanted for step in range(wanted)):
        partners: list[int | None] = [(turn - node) % circle for node in range(circle)]
        alone = next(node for node in range(circle) if partners[node] == node)
        partners[alone] = None
        if circle < num_nodes:
            partners[alone] = circle
            partners.append(alone)
        rounds.append(partners)
    return rounds
