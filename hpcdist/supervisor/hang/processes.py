"""The processes of a run's ranks on this machine, as /proc shows them (proc(5)): which they are, and what they do.

Containers share the host's process table, so their ranks are found as well, as long as they run under the same user.
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hpcdist.errors import TopologyError
from hpcdist.rank.topology import Topology

PROC = Path("/proc")
STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "waiting for a device or a file system",
    "T": "stopped",
    "t": "stopped by a debugger",
    "Z": "dead, not collected",
    "X": "dead",
}
#: In these a process cannot run, whatever its code does.
CANNOT_RUN = "TtDZX"
_CLOSE_WAIT = "08"  # include/net/tcp_states.h
#: No more of a process's connections and children are told.
_MOST = 16


@dataclass(frozen=True, kw_only=True)
class RankProcess:
    """One rank's process on this machine."""

    pid: int
    rank: int
    children: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What a process is doing at this moment."""

    state: str  #: a letter of STATES
    wchan: str  #: where in the kernel it waits, as far as the kernel tells
    threads: int
    cpu_s: float  #: processor time that all its threads have used up to now
    half_closed: tuple[str, ...]  #: peers that have closed a TCP connection which this process still holds


def find_ranks(run: Path, attempt: int | None, node: str = "", proc: Path = PROC) -> list[RankProcess]:
    """The processes of this user that are ranks of a run's attempt (None: of any), by rank.

    A rank is known by its command line and environment. What it has forked shares both, so a rank's parent is none.

    Args:
        node: Slurm's name of this node, since several of its nodes may stand on one machine (`slurmd -N`).
    """
    words = ["-P", "-m", "hpcdist.rank.worker", str(run)]
    parents: dict[int, int] = {}
    alike: dict[int, int] = {}
    for pid in [int(entry.name) for entry in proc.iterdir() if entry.name.isdigit()]:
        try:
            if (proc / str(pid)).stat().st_uid != os.getuid():
                continue
            parents[pid] = int(_stat(proc, pid)[1])
            if _words(proc / str(pid) / "cmdline")[1:] == words:
                env = _environment(proc, pid)
                topology = Topology.from_env(env)
                if attempt in (None, topology.attempt) and (not node or env.get("SLURMD_NODENAME", node) == node):
                    alike[pid] = topology.rank
        except (OSError, TopologyError):
            continue  # it has ended meanwhile, or is not to be looked into: then its rank counts as not seen
    return [
        RankProcess(pid=pid, rank=rank, children=_below(pid, parents))
        for pid, rank in sorted(alike.items(), key=lambda item: item[1])
        if parents[pid] not in alike
    ]


def facts_of(pid: int, proc: Path = PROC) -> Facts | None:
    """What a process is doing; None when there is no such process any more."""
    try:
        fields = _stat(proc, pid)
        wchan = (proc / str(pid) / "wchan").read_text()
    except OSError:
        return None
    ticks = int(fields[11]) + int(fields[12])
    return Facts(
        state=fields[0],
        wchan="" if wchan == "0" else wchan,
        threads=int(fields[17]),
        cpu_s=ticks / os.sysconf("SC_CLK_TCK"),
        half_closed=tuple(_half_closed(proc / str(pid))[:_MOST]),
    )


def _stat(proc: Path, pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the third on: the second, a name, may hold anything."""
    return (proc / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()


def _words(path: Path) -> list[str]:
    return path.read_bytes().decode(errors="surrogateescape").split("\0")[:-1]


def _environment(proc: Path, pid: int) -> Mapping[str, str]:
    pairs = (word.partition("=") for word in _words(proc / str(pid) / "environ"))
    return {name: value for name, _, value in pairs}


def _below(pid: int, parents: Mapping[int, int]) -> tuple[int, ...]:
    """All descendants of a process, at most _MOST."""
    found = [pid]
    for above in found:
        found += sorted(child for child, parent in parents.items() if parent == above)
    return tuple(found[1 : _MOST + 1])


def _half_closed(folder: Path) -> list[str]:
    try:
        links = [os.readlink(entry) for entry in (folder / "fd").iterdir()]
        lines = [line for name in ("tcp", "tcp6") for line in (folder / "net" / name).read_text().splitlines()[1:]]
    except OSError:
        return []
    own = {match[1] for link in links if (match := re.fullmatch(r"socket:\[(\d+)\]", link))}
    rows = [line.split() for line in lines]
    return sorted({_address(row[2]) for row in rows if row[3] == _CLOSE_WAIT and row[9] in own})


def _address(text: str) -> str:
    """`0100007F:1F90` → `127.0.0.1:8080`; words of four bytes, each in the machine's order."""
    raw, _, port = text.partition(":")
    words = [int(raw[at : at + 8], 16) for at in range(0, len(raw), 8)]
    packed = b"".join(socket.htonl(word).to_bytes(4, "big") for word in words)
    address = ipaddress.ip_address(packed)
    mapped = getattr(address, "ipv4_mapped", None)
    return f"{mapped or address}:{int(port, 16)}"
