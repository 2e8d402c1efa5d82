"""Processes of a run's ranks on this machine, and the state of a process.

Containers share the host's process table: their ranks are found as well, if they run as the same user.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from hpcdist.errors import TopologyError
from hpcdist.machine.process_record import RANK_MODULE, TASK_MODULE
from hpcdist.rank.topology import Topology

#: Letters of process states, see proc(5): psutil's name and a description.
STATES = {
    "R": (psutil.STATUS_RUNNING, "running"),
    "S": (psutil.STATUS_SLEEPING, "sleeping"),
    "D": (psutil.STATUS_DISK_SLEEP, "waiting for a device or a file system"),
    "T": (psutil.STATUS_STOPPED, "stopped"),
    "t": (psutil.STATUS_TRACING_STOP, "stopped by a debugger"),
    "Z": (psutil.STATUS_ZOMBIE, "zombie"),
    "X": (psutil.STATUS_DEAD, "dead"),
}
_LETTERS = {name: letter for letter, (name, _) in STATES.items()}
#: States in which a process cannot run, whatever its code does.
CANNOT_RUN = "TtDZX"
#: Limit of the reported connections and children of a process.
_MAX_REPORTED = 16


@dataclass(frozen=True, kw_only=True)
class RankProcess:
    """Process of one rank on this machine."""

    pid: int
    rank: int
    children: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ProcessState:
    """State of a process at one moment."""

    state: str  #: a letter of STATES
    wchan: str  #: kernel function that the process waits in; empty if it does not wait, or is not readable
    threads: int
    cpu_s: float  #: CPU time of all threads until now
    half_closed: tuple[str, ...]  #: peers that have closed a TCP connection which this process still holds


def find_ranks(run: Path, attempt: int | None, node: str = "", *, with_tasks: bool = False) -> list[RankProcess]:
    """Return the processes of this user that are ranks of a run, by rank.

    Command line and environment identify a rank. Its forked children share both, so a process whose parent is a rank
    does not count.

    Args:
        attempt: number of the attempt; None for any.
        node: Slurm's name of this node, because several nodes may share one machine (`slurmd -N`).
        with_tasks: whether to return the tasks of forked ranks as well: a task without a rank may still become one.
    """
    ranks: dict[int, tuple[int, psutil.Process]] = {}
    for process in psutil.process_iter():
        try:
            if process.uids().real != os.getuid() or not _is_rank(process.cmdline()[1:], run, with_tasks):
                continue
            env = process.environ()
            topology = Topology.from_env(env)
            if attempt in (None, topology.attempt) and (not node or env.get("SLURMD_NODENAME", node) == node):
                ranks[process.pid] = topology.rank, process
        except (psutil.Error, OSError, TopologyError):
            continue  # the process has ended, or is not readable: its rank counts as not found
    return [
        RankProcess(pid=process.pid, rank=rank, children=_children(process))
        for rank, process in sorted(ranks.values(), key=lambda found: found[0])
        if _parent(process) not in ranks
    ]


def _is_rank(arguments: Sequence[str], run: Path, with_tasks: bool) -> bool:
    if arguments == ["-P", "-m", RANK_MODULE, str(run)]:
        return True
    return with_tasks and arguments[:3] == ["-P", "-m", TASK_MODULE] and arguments[-1] == str(run)


def state_of(pid: int) -> ProcessState | None:
    """Return the state of a process; None if it has ended."""
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            cpu = process.cpu_times()
            return ProcessState(
                state=_LETTERS.get(process.status(), "?"),
                wchan=_wchan(pid),
                threads=process.num_threads(),
                cpu_s=cpu.user + cpu.system,
                half_closed=_half_closed(process),
            )
    except (psutil.Error, OSError):
        return None


def _parent(process: psutil.Process) -> int | None:
    try:
        return process.ppid()
    except psutil.Error:
        return None


def _children(process: psutil.Process) -> tuple[int, ...]:
    """Return all descendants of a process, at most _MAX_REPORTED."""
    try:
        return tuple(child.pid for child in process.children(recursive=True)[:_MAX_REPORTED])
    except psutil.Error:
        return ()


def _wchan(pid: int) -> str:
    found = Path(f"/proc/{pid}/wchan").read_text()  # not part of psutil
    return "" if found == "0" else found


def _half_closed(process: psutil.Process) -> tuple[str, ...]:
    try:
        connections = process.net_connections(kind="tcp")
    except psutil.Error:
        return ()
    peers = {
        f"{one.raddr.ip.removeprefix('::ffff:')}:{one.raddr.port}"
        for one in connections
        if one.status == psutil.CONN_CLOSE_WAIT and one.raddr
    }
    return tuple(sorted(peers)[:_MAX_REPORTED])
