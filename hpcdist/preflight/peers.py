"""The state that a node keeps about each other node."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass, field
from typing import Any

from hpcdist.preflight.protocol import Link, SilentPeerError, UnknownPeerError


@dataclass
class Peer:
    """Another node, seen from this one."""

    name: str
    #: `ok`, or the reason for no connection: `refused`, `silent` (packets are dropped), `unreachable`, `stranger`
    #: (another program), `mute` (accepts connections without an answer), `unresolved`, `absent` (never started).
    status: str = "absent"
    detail: str = ""
    #: The same for a port of the ephemeral range.
    ephemeral: str = "ok"
    #: Round trip of a few bytes; bandwidth from and to this node; the peer's clock minus this node's.
    latency_s: float | None = None
    sent_bytes_s: float | None = None
    received_bytes_s: float | None = None
    offset_s: float | None = None
    #: Small messages arrive, large ones do not.
    stalled: bool = False
    alive_at: float = float("inf")
    #: The peer's port of the ephemeral range.
    port: int = 0
    #: Whether small and large messages arrived; `link` may have broken since, or be in use.
    reached: bool = False
    link: Link | None = None
    #: Whether the peer reports that it reached this node.
    mutual: bool = False
    #: Set when the peer has finished the round that it leads.
    done: asyncio.Event = field(default_factory=asyncio.Event)

    def as_answer(self) -> dict[str, Any]:
        """Return the known values for the answer."""
        found: dict[str, Any] = {"status": self.status}
        if self.status != "ok":
            return found | ({"detail": self.detail} if self.detail else {})
        for name in ("latency_s", "sent_bytes_s", "received_bytes_s", "offset_s"):
            if (value := getattr(self, name)) is not None:
                found[name] = float(f"{value:.4g}")
        if self.ephemeral != "ok":
            found["ephemeral"] = self.ephemeral
        return found | ({"stalled": True} if self.stalled else {})


def connection_failure(error: Exception) -> tuple[str, str]:
    """Return the status and the detail of a peer after a failed connection or handshake."""
    if isinstance(error, SilentPeerError):
        return "mute", str(error)
    if isinstance(error, UnknownPeerError):
        return "stranger", str(error)
    if isinstance(error, TimeoutError):
        return "silent", ""
    if isinstance(error, ConnectionRefusedError):
        return "refused", ""
    number = error.errno if isinstance(error, OSError) else None
    return "unreachable", os.strerror(number) if number else str(error)
