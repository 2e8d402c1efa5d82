"""The other nodes as one of them sees them, and the order in which nodes are measured."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from hpcdist.preflight.protocol import Link


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
