"""This machine's own name: what it resolves to, how quickly, and whether other machines could use the answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpcdist.machine.check import Check, Level

#: A resolver that takes longer costs each rank as much at its start.
SLOW_S = 1.0
#: glibc asks each server for 5 s, twice; forward and back.
GIVE_UP_S = 15.0
_SPEED_UP = "RES_OPTIONS='timeout:1 attempts:1' makes it shorter; names of all nodes in /etc/hosts make it go away"


def names(host: str, found: Mapping[str, Any], *, is_node: bool) -> list[Check]:
    """What the resolver's answers mean for ranks that have to find each other.

    Args:
        found: what `machine.Lookups` says of `host`, whose address was looked up in turn.
        is_node: whether this machine is a node of a cluster. On one machine ranks meet on loopback, and ask for no
            name.
    """
    doubt: Level = "warning" if is_node else "note"
    alone = "" if is_node else "; runs on this machine alone do not mind"
    if "late" in found:
        text = f"the resolver gave no answer for {host} within {found['late']:g} s{alone}"
        fix = f"{_SPEED_UP}; which servers are asked stands in /etc/resolv.conf"
        return [Check(name="own name", level=doubt, text=text, fix=fix)]
    forward_s = found["forward_s"]
    if "error" in found:
        text = f"{host} does not resolve here ({found['error']}, {forward_s:.1f} s){alone}"
        fix = f"a line for {host} in /etc/hosts, or in DNS, on all machines of a run"
        return [Check(name="own name", level=doubt, text=text, fix=fix)]
    address = found["address"]
    if address.startswith("127."):
        text = f"{host} resolves to {address}, which other machines take for themselves{alone}"
        fix = f"in /etc/hosts give {host} the address that others reach (Debian's installer writes 127.0.1.1)"
        return [Check(name="own name", level=doubt, text=text, fix=fix)]
    if forward_s > SLOW_S:
        text = f"{host} → {address} takes {forward_s:.1f} s, and each rank asks at its start{alone}"
        first = Check(name="own name", level=doubt, text=text, fix=_SPEED_UP)
    else:
        first = Check(name="own name", level="ok", text=f"{host} → {address} ({1000 * forward_s:.0f} ms)")
    return [first, _reverse(found, doubt, alone)]


def _reverse(found: Mapping[str, Any], doubt: Level, alone: str) -> Check:
    reverse_s, error = found["reverse_s"], found.get("reverse_error", "")
    if reverse_s > SLOW_S:
        said = f"takes {reverse_s:.1f} s" + (f" and fails ({error})" if error else "")
        text = f"the way back from {found['address']} to a name {said}: process groups start that much later{alone}"
        return Check(name="reverse", level=doubt, text=text, fix=_SPEED_UP)
    took = f"{1000 * reverse_s:.0f} ms"
    if error:
        text = f"{found['address']} has no name ({error}, {took}): quick, so harmless"
        return Check(name="reverse", level="ok", text=text)
    return Check(name="reverse", level="ok", text=f"{found['address']} → {found['reverse']} ({took})")
