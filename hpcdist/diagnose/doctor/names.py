"""This machine's own name: what it resolves to, how quickly, and whether other machines could use the answer."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any

from hpcdist.preflight.check import Check, Level

#: A resolver that takes longer costs each rank as much at its start.
SLOW_S = 1.0
#: glibc asks each server for 5 s, twice.
GIVE_UP_S = 8.0
_SPEED_UP = "RES_OPTIONS='timeout:1 attempts:1' makes it shorter; names of all nodes in /etc/hosts make it go away"


@dataclass(frozen=True, kw_only=True)
class Lookup:
    """One question to the resolver."""

    answer: Any = None  #: None where it failed or gave none in time
    error: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Names:
    """What the resolver says of this machine."""

    host: str
    forward: Lookup  #: its addresses by its name, as text
    reverse: Lookup | None  #: the name of its first address that is no loopback's, where it has one


def timed(question: Callable[[], Any], within_s: float = GIVE_UP_S) -> Lookup:
    """Ask in a thread: the resolver's calls know no deadline."""
    answers: queue.SimpleQueue[Lookup] = queue.SimpleQueue()
    begun = time.monotonic()

    def run() -> None:
        try:
            answers.put(Lookup(answer=question(), seconds=time.monotonic() - begun))
        except OSError as error:
            answers.put(Lookup(error=error.strerror or str(error), seconds=time.monotonic() - begun))

    threading.Thread(target=run, daemon=True).start()
    try:
        return answers.get(timeout=within_s)
    except queue.Empty:
        return Lookup(error=f"no answer within {within_s:g} s", seconds=within_s)


def ask_names() -> Names:
    """Look this machine up, and back."""
    host = socket.gethostname()
    forward = timed(lambda: sorted({str(entry[4][0]) for entry in socket.getaddrinfo(host, None)}))
    outside = [address for address in forward.answer or [] if not _is_loopback(address)]
    if not outside:
        return Names(host=host, forward=forward, reverse=None)
    reverse = timed(lambda: socket.gethostbyaddr(outside[0])[0])
    return Names(host=host, forward=forward, reverse=reverse)


def names(found: Names, *, on_cluster: bool) -> list[Check]:
    """What the answers mean for ranks that have to find each other.

    Args:
        on_cluster: whether runs over several machines are to be expected here. On one machine ranks meet on loopback
            and ask for no name.
    """
    doubt: Level = "warning" if on_cluster else "note"
    host, forward = found.host, found.forward
    alone = "" if on_cluster else "; runs on this machine alone do not mind"
    if forward.answer is None:
        text = f"{host} does not resolve here ({forward.error}, {forward.seconds:.1f} s){alone}"
        fix = f"a line for {host} in /etc/hosts, or in DNS, on all machines of a run"
        return [Check(name="own name", level=doubt, text=text, fix=fix)]
    shown = ", ".join(forward.answer[:3])
    checks = []
    if all(map(_is_loopback, forward.answer)):
        text = f"{host} resolves to {shown}, which other machines take for themselves{alone}"
        fix = f"in /etc/hosts give {host} the address that others reach (Debian's installer writes 127.0.1.1)"
        checks.append(Check(name="own name", level=doubt, text=text, fix=fix))
    elif forward.seconds > SLOW_S:
        text = f"{host} → {shown} takes {forward.seconds:.1f} s, and each rank asks at its start{alone}"
        checks.append(Check(name="own name", level=doubt, text=text, fix=_SPEED_UP))
    else:
        checks.append(Check(name="own name", level="ok", text=f"{host} → {shown} ({1000 * forward.seconds:.0f} ms)"))
    if found.reverse is not None:
        checks.append(_reverse(found.reverse, doubt, alone))
    return checks


def _reverse(reverse: Lookup, doubt: Level, alone: str) -> Check:
    if reverse.seconds > SLOW_S:
        said = f"takes {reverse.seconds:.1f} s" + (f" and fails ({reverse.error})" if reverse.error else "")
        text = f"the way back from address to name {said}: process groups start that much later{alone}"
        return Check(name="reverse", level=doubt, text=text, fix=_SPEED_UP)
    if reverse.answer is None:
        text = f"the address has no name ({reverse.error}, {1000 * reverse.seconds:.0f} ms): quick, so harmless"
        return Check(name="reverse", level="ok", text=text)
    return Check(name="reverse", level="ok", text=f"→ {reverse.answer} ({1000 * reverse.seconds:.0f} ms)")


def _is_loopback(address: str) -> bool:
    return ip_address(address.partition("%")[0]).is_loopback
