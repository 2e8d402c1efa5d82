"""Capabilities of this process, see capabilities(7)."""

from __future__ import annotations

from pathlib import Path

CAP_SYS_RESOURCE = 24
STATUS = Path("/proc/self/status")


def has_capability(number: int) -> bool:
    """Return whether this process has a capability in its effective set."""
    lines = STATUS.read_text().splitlines()
    effective = next((line.split()[1] for line in lines if line.startswith("CapEff:")), "0")
    return bool(int(effective, 16) >> number & 1)
