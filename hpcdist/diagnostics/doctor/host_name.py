"""Check of this machine's host name: address, lookup time, and reachability from other machines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpcdist.machine.check import Check, Level, ok

#: Each rank pays this time at its start.
SLOW_S = 1.0
#: glibc queries each server twice for 5 s, forward and reverse.
GIVE_UP_S = 15.0
_SPEED_UP = "RES_OPTIONS='timeout:1 attempts:1' shortens it; names of all nodes in /etc/hosts avoid it"


def host_name_checks(host: str, found: Mapping[str, Any], *, is_node: bool) -> list[Check]:
    """Explain the effect of the resolver's answers on the start of ranks.

    Args:
        found: result of `facts.Lookups` for `host` with the reverse lookup.
        is_node: whether this machine is a node of a cluster. Ranks of one machine use loopback and need no name.
    """
    level: Level = "warning" if is_node else "note"
    note = "" if is_node else "; runs on this machine alone are not affected"
    if "late" in found:
        text = f"the resolver gave no answer for {host} within {found['late']:g} s{note}"
        fix = f"{_SPEED_UP}; /etc/resolv.conf lists the DNS servers"
        return [Check(name="own name", level=level, text=text, fix=fix)]
    forward_s = found["forward_s"]
    if "error" in found:
        text = f"{host} does not resolve here ({found['error']}, {forward_s:.1f} s){note}"
        fix = f"add {host} to DNS, or to /etc/hosts on all machines of a run"
        return [Check(name="own name", level=level, text=text, fix=fix)]
    address = found["address"]
    if address.startswith("127."):
        text = f"{host} resolves to {address}, which other machines use for themselves{note}"
        fix = "set its reachable address in /etc/hosts (Debian's installer writes 127.0.1.1)"
        return [Check(name="own name", level=level, text=text, fix=fix)]
    if forward_s > SLOW_S:
        text = f"{host} → {address} takes {forward_s:.1f} s, and each rank looks it up at its start{note}"
        first = Check(name="own name", level=level, text=text, fix=_SPEED_UP)
    else:
        first = ok("own name", f"{host} → {address} ({1000 * forward_s:.0f} ms)")
    return [first, _reverse(found, level, note)]


def _reverse(found: Mapping[str, Any], level: Level, note: str) -> Check:
    reverse_s, error = found["reverse_s"], found.get("reverse_error", "")
    if reverse_s > SLOW_S:
        took = f"takes {reverse_s:.1f} s" + (f" and fails ({error})" if error else "")
        text = f"the reverse lookup of {found['address']} {took}: process groups start later by that time{note}"
        return Check(name="reverse", level=level, text=text, fix=_SPEED_UP)
    took = f"{1000 * reverse_s:.0f} ms"
    if error:
        return ok("reverse", f"{found['address']} has no name ({error}, {took}): fast, so harmless")
    return ok("reverse", f"{found['address']} → {found['reverse']} ({took})")
