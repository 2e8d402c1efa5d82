"""Snapshots of the ranks on one node: their processes, stacks and collectives."""

from __future__ import annotations

import os
import re
import socket
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from hpcdist.config.topology import Topology
from hpcdist.errors import TopologyError
from hpcdist.host.files import open_regular, read_json, write_json
from hpcdist.rank.processes import PARENT_MODULE, RANK_MODULE, TASK_MODULE, shown_place
from hpcdist.run.folder import Attempt

# Processes of a run's ranks on this machine, and the state of a process.
#
# Containers share the host's process table: their ranks are found as well, if they run as the same user.

#: States in which a process cannot run, whatever its code does. `disk-sleep` waits for a device or a file system.
CANNOT_RUN = (
    psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP, psutil.STATUS_DISK_SLEEP, psutil.STATUS_ZOMBIE,
    psutil.STATUS_DEAD,
)  # fmt: skip
#: Limit of the reported children of a process.
_MAX_CHILDREN = 16


class RankProcess(NamedTuple):
    pid: int
    rank: int
    children: tuple[int, ...] = ()


class ProcessState(NamedTuple):
    state: str  #: psutil's name
    wchan: str  #: kernel function that the process waits in; empty if it does not wait, or is not readable
    threads: int
    cpu_s: float  #: CPU time of all threads until now


def find_ranks(run: Path, attempt: int | None, node: str = "", *, with_tasks: bool = False) -> list[RankProcess]:
    """Return the processes of this user that are ranks of a run, by rank.

    Command line and environment identify a rank, and its name one that was forked. Its forked children share all of
    them, so a process whose parent is a rank does not count.

    Args:
        attempt: number of the attempt; None for any.
        node: Slurm's name of this node, because several nodes may share one machine (`slurmd -N`).
        with_tasks: whether to return the tasks of forked ranks as well: a task without a rank may still become one.
    """
    ranks: dict[int, tuple[int, int, psutil.Process]] = {}
    for process in psutil.process_iter():
        # A process that has ended, or is not readable, counts as not found.
        with suppress(psutil.Error, OSError, TopologyError):
            if process.uids().real != os.getuid() or (found := _place(process, run, with_tasks)) is None:
                continue
            rank, its_attempt = found
            if attempt in (None, its_attempt) and (not node or process.environ().get("SLURMD_NODENAME", node) == node):
                ranks[process.pid] = rank, process.ppid(), process
    return [
        RankProcess(process.pid, rank, _children(process))
        for rank, parent, process in sorted(ranks.values(), key=lambda found: found[0])
        if parent not in ranks
    ]


def _place(process: psutil.Process, run: Path, with_tasks: bool) -> tuple[int, int] | None:
    """Return rank and attempt of a process; None if it is no rank of the run."""
    arguments = process.cmdline()[1:]
    if arguments[:4] == ["-P", "-m", PARENT_MODULE, str(run)]:
        return shown_place(process.name())
    is_task = with_tasks and arguments[:3] == ["-P", "-m", TASK_MODULE] and arguments[-1] == str(run)
    if not is_task and arguments != ["-P", "-m", RANK_MODULE, str(run)]:
        return None
    topology = Topology.from_env(process.environ())
    return topology.rank, topology.attempt


def _children(process: psutil.Process) -> tuple[int, ...]:
    try:
        return tuple(child.pid for child in process.children(recursive=True)[:_MAX_CHILDREN])
    except psutil.Error:
        return ()


def state_of(pid: int) -> ProcessState | None:
    """Return the state of a process; None if it has ended."""
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            wchan = Path(f"/proc/{pid}/wchan").read_text()  # not part of psutil
            cpu_s = sum(process.cpu_times()[:2])
            return ProcessState(process.status(), wchan.removeprefix("0"), process.num_threads(), cpu_s)
    except (psutil.Error, OSError):
        return None


# Parser of the stacks that Python's faulthandler prints, and the location that a stack is at. Pure functions.
#
# https://docs.python.org/3/library/faulthandler.html

_FAULT_THREAD = r"(?:Current thread|Thread) 0x[0-9a-f]+(?: \[.*\])? \(most recent call first\):\n(?:  .*\n|\.\.\.\n)*"
#: A blank line separates two threads, but not two dumps.
_FAULT_DUMP = re.compile(rf"^{_FAULT_THREAD}(?:\n{_FAULT_THREAD})*", re.MULTILINE)
_FAULT_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.+)$', re.MULTILINE)
#: Library code: Python's standard library, installed packages, and hpcdist's code around a trainer.
_STDLIB = re.compile(r"^<|/lib(?:64)?/python3[^/]*/(?!(?:site|dist)-packages/)")
_ROOT = re.compile(r"^.*/(?:site-packages|dist-packages|lib(?:64)?/python3[^/]*)/")
_INSTALLED = re.compile(r"^.*/(?:site|dist)-packages/")
_OURS = re.compile(r"/hpcdist/(?:rank|checkpoint|tracking)/.*\.py$")
_WORKER = re.compile(r"/hpcdist/rank/worker\.py$")


class Frame(NamedTuple):
    function: str
    file: str
    line: int

    def text(self) -> str:
        """Return such as `all_reduce (torch/distributed/distributed_c10d.py:4181)` or `train (counting.py:29)`."""
        library = _ROOT.sub("", self.file)
        name = library if library != self.file else self.file.rpartition("/")[2]
        return f"{self.function} ({name}:{self.line})"


class Location(NamedTuple):
    """Location of a stack: its innermost call, and the line of user code that led there."""

    inner: Frame
    own: Frame

    def text(self) -> str:
        """Return such as `wait (threading.py:629), called by train (counting.py:29)`."""
        return self.inner.text() + (f", called by {self.own.text()}" if self.own != self.inner else "")


def location_of(frames: Sequence[Frame]) -> Location | None:
    """Return the location of a stack (innermost call first), or None if it has no frames.

    User code is the innermost frame outside of libraries. If there is none, because the trainer is an installed
    package, it is the function that hpcdist's worker called, or else the worker's own line.
    """
    if not frames:
        return None
    own = next((frame for frame in frames if not _is_library(frame.file)), None)
    if own is None:
        by_worker = [(inner, outer) for inner, outer in pairwise(frames) if _WORKER.search(outer.file)]
        inner, outer = by_worker[0] if by_worker else (frames[0], frames[0])
        own = outer if _STDLIB.search(inner.file) else inner
    return Location(frames[0], own)


def _is_library(file: str) -> bool:
    return any(pattern.search(file) for pattern in (_STDLIB, _INSTALLED, _OURS))


def parse_faulthandler(log: str) -> tuple[list[Frame], str]:
    """Parse the last dump of faulthandler in a rank's log.

    The main thread is the last one in a dump. Forked children of a rank print to the same log; their stacks contain
    frames of multiprocessing.

    Returns:
        The main thread's stack, and the text of the dump.
    """
    for dump in reversed(_FAULT_DUMP.findall(log + "\n")):
        main = _FAULT_FRAME.finditer(dump.rpartition("\n\n")[2])
        frames = [Frame(found["function"], found["file"], int(found["line"])) for found in main]
        if frames and not any("/multiprocessing/" in frame.file for frame in frames):
            return frames, dump
    return [], ""


# Records of PyTorch's flight recorders: the collective that each rank waits in, and the ranks that have not called it.
#
# A recorder keeps the last collectives of each process group with their sequence numbers, which are equal on all ranks
# of the group. Ranks write their records on SIGUSR1 (`rank/telemetry.py`). Pure functions.

#: torch's descriptions of groups that have none.
_NO_LABELS = ("undefined", "default_pg", "")


class Calls(NamedTuple):
    """Collectives of a rank in one process group."""

    backend: str
    group: str  #: torch's name of the group, equal on all ranks
    label: str  #: description of the group; empty if it has none
    last: int  #: sequence number of the last call
    operation: str  #: operation of the last call: `all_reduce [4096]`
    pending: tuple[tuple[int, str], ...]  #: sequence numbers and operations of unfinished calls, in order

    @property
    def group_text(self) -> str:
        return "the default group" if self.group == "0" else f"group {self.label or self.group}"

    def text(self) -> str:
        """Return such as `gloo, group control: waits in all_reduce [2] (7)`."""
        number, operation = self.pending[0] if self.pending else (self.last, self.operation)
        verb = "waits in" if self.pending else "has finished"
        return f"{self.backend}, {self.group_text}: {verb} {operation} ({number})"


def calls_of(recorders: Mapping[str, Any]) -> list[Calls]:
    """Return a rank's collectives by group, in the order of the groups' last calls.

    Args:
        recorders: JSON of the flight recorder (`_dump_fr_trace_json`), by backend.
    """
    by_group: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for backend, recorded in recorders.items():
        for entry in recorded.get("entries", []):
            if not entry["is_p2p"]:
                by_group.setdefault((backend, str(entry["process_group"][0])), []).append(entry)
    found = []
    for (backend, group), entries in sorted(by_group.items(), key=lambda item: int(item[1][-1]["time_created_ns"])):
        label = str(entries[-1]["process_group"][1])
        last, operation = int(entries[-1]["collective_seq_id"]), _operation(entries[-1])
        pending = tuple((int(e["collective_seq_id"]), _operation(e)) for e in entries if _is_pending(e))
        found.append(Calls(backend, group, "" if label in _NO_LABELS else label, last, operation, pending))
    return found


def pending_s(recorders: Mapping[str, Any], now: float) -> float:
    """Return the seconds since the call of the oldest unfinished collective, send or receive; 0 without one."""
    pending = [entry for recorded in recorders.values() for entry in recorded.get("entries", []) if _is_pending(entry)]
    return max((now - int(entry["time_created_ns"]) / 1e9 for entry in pending), default=0.0)


def _is_pending(entry: Mapping[str, Any]) -> bool:
    # Calls of gloo stay in the state `scheduled`; they are retired when finished.
    return not (entry["retired"] or entry["state"] == "completed")


def _operation(entry: Mapping[str, Any]) -> str:
    name = str(entry["profiling_name"]).rpartition(":")[2]
    sizes = "×".join(str(size) for size in (entry.get("input_sizes") or [[]])[0])
    return f"{name} [{sizes}]" if sizes else name


def compare_calls(calls: Mapping[int, Sequence[Calls]]) -> tuple[set[int], list[str]]:
    """Compare the collectives of the ranks of each group.

    Args:
        calls: by rank. A rank without any call in a group is not known to belong to it.

    Returns:
        The ranks that have not called a collective that others wait in; and sentences, of each kind one for a group:
        ranks call different collectives under one sequence number, since their code paths differ, or have not called
        one.
    """
    absent: set[int] = set()
    different, missing = [], []
    for members in _by_group(calls):
        one = next(iter(members.values()))
        waiting: dict[int, dict[int, str]] = {}
        for rank, call in sorted(members.items()):
            for number, operation in call.pending:
                waiting.setdefault(number, {})[rank] = operation
        for number, operations in sorted(waiting.items()):
            callers: dict[str, list[int]] = {}
            for rank, operation in operations.items():
                callers.setdefault(operation.partition(" ")[0], []).append(rank)
            if len(callers) > 1:
                most_first = sorted(callers.items(), key=lambda item: -len(item[1]))
                texts = [f"{ranks_text(ranks)} call{'s' * (len(ranks) == 1)} {name}" for name, ranks in most_first]
                where = f"{one.backend} collective number {number} of {one.group_text}"
                different.append(f"as {where} {', but '.join(texts)}")
                break
        for number, operations in sorted(waiting.items()):
            if late := [rank for rank, call in members.items() if call.last < number]:
                absent.update(late)
                missing.append(
                    f"{ranks_text(late)} {'has' if len(late) == 1 else 'have'} not called {one.backend}"
                    f" {operations[min(operations)]} (number {number} of {one.group_text}), which"
                    f" {ranks_text(operations)} wait{'s' * (len(operations) == 1)} in"
                )
                break
    return absent, [*different, *missing]


def _by_group(calls: Mapping[int, Sequence[Calls]]) -> list[dict[int, Calls]]:
    groups: dict[tuple[str, str], dict[int, Calls]] = {}
    for rank, own in calls.items():
        for call in own:
            groups.setdefault((call.backend, call.group), {})[rank] = call
    return [members for _, members in sorted(groups.items())]


def ranks_text(ranks: Iterable[int], most: int = 6) -> str:
    """Return such as `rank 7` or `ranks 0-3, 5`; after `most` ranges, only the number of further ranks."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    words = [str(first) if first == last else f"{first}-{last}" for first, last in spans]
    rest = sum(last - first + 1 for first, last in spans[most:])
    is_one = len(spans) == 1 and spans[0][0] == spans[0][1]
    return f"rank{'s' * (not is_one)} {', '.join(words[:most])}" + (f" and {rest} more" if rest else "")


# Snapshot of one hung rank.


@dataclass(frozen=True, kw_only=True)
class RankSnapshot:
    """State of a rank: its process, its stack and its last collectives."""

    rank: int
    host: str
    pid: int
    frames: tuple[Frame, ...] = ()  #: stack of the main thread, innermost call first; empty if none was printed
    text: str = ""  #: stacks of all threads
    calls: tuple[Calls, ...] = ()  #: the last collectives in the flight recorders, in the order of their calls
    pending_s: float = 0.0  #: time since the call of the oldest unfinished collective; 0 without one
    process: ProcessState
    cpu_s: float  #: CPU time that the process used during `over_s` seconds
    over_s: float

    @property
    def location(self) -> Location | None:
        return location_of(self.frames)

    @property
    def is_stopped(self) -> bool:
        """Whether the process cannot run, whatever its code does."""
        return self.process.state in CANNOT_RUN

    def state_text(self) -> str:
        """Return such as `state sleeping, in futex_wait_queue, 12 threads, 0.02 s of CPU in 1.1 s`."""
        wchan = f", in {self.process.wchan}" if self.process.wchan else ""
        used = f"{self.cpu_s:.2f} s of CPU in {self.over_s:.1f} s"
        return f"state {self.process.state}{wchan}, {self.process.threads} threads, {used}"

    def whole_text(self) -> str:
        """Return the text of the rank's stacks file."""
        lines = [f"rank {self.rank} on {self.host}, process {self.pid}: {self.state_text()}"]
        lines += [f"flight recorder, {call.text()}" for call in self.calls]
        lines.append("stacks by faulthandler:" if self.text else "no stack could be read")
        return "\n".join(lines) + "\n\n" + self.text

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> RankSnapshot:
        parts = {
            "frames": tuple(Frame(*frame) for frame in value["frames"]),
            "calls": tuple(Calls._make([*call, tuple(map(tuple, pending))]) for *call, pending in value["calls"]),
            "process": ProcessState(*value["process"]),
        }
        return cls(**{**value, **parts})


# Take snapshots of the ranks on one node, and write them to the attempt's folder.
#
#     python -m hpcdist.supervisor.hang_node ATTEMPT SECONDS
#
# Ranks print their stacks on SIGUSR1, which the supervisor sends; a stopped rank cannot. Runs outside of containers, as
# the user of the ranks.

#: Time for ranks to print their stacks and write their collectives.
PRINT_S = 4.0
#: Minimum duration for measuring CPU time.
CPU_OVER_S = 1.0
#: An older record of collectives belongs to an earlier signal.
FRESH_S = 60.0
_LOG_BYTES = 512 * 1024
_TEXT_CHARS = 64 * 1024
_POLL_S = 0.05


def main(argv: Sequence[str]) -> None:
    """Take the stacks of this node's ranks within a time limit and write them to the attempt's folder."""
    folder, limit_s = argv
    attempt = Attempt(Path(folder))
    slurm_node = os.environ.get("SLURMD_NODENAME", "")
    node = slurm_node or socket.gethostname()
    processes = find_ranks(attempt.path.parent.parent, attempt.number, slurm_node)
    if snapshots := take_snapshots(processes, attempt, node, time.monotonic() + float(limit_s)):
        write_json(attempt.node_stacks(node), {"ranks": [asdict(snapshot) for snapshot in snapshots]})


def take_snapshots(processes: Sequence[RankProcess], attempt: Attempt, node: str, until: float) -> list[RankSnapshot]:
    """Return snapshots of the ranks on this node, taken before `until` on the monotonic clock."""
    began, since = time.monotonic(), time.time() - FRESH_S
    before = {process: state for process in processes if (state := state_of(process.pid)) is not None}

    def has_printed(process: RankProcess) -> bool:
        return bool(_stack(attempt, process.rank, since)[0] and _flight_record(attempt, process.rank, since))

    awaited = [process for process, state in before.items() if state.state not in CANNOT_RUN]
    while time.monotonic() < min(began + PRINT_S, until) and not all(map(has_printed, awaited)):
        time.sleep(_POLL_S)  # no event shows that another process has written a file
    # CPU time distinguishes computing from waiting only after a while.
    time.sleep(max(0.0, min(began + CPU_OVER_S, until) - time.monotonic()))
    found = []
    for process, first in before.items():
        last = state_of(process.pid)
        if last is None:
            continue  # the process has ended by itself
        frames, text = _stack(attempt, process.rank, since)
        record = _flight_record(attempt, process.rank, since)
        found.append(
            RankSnapshot(
                rank=process.rank,
                host=node,
                pid=process.pid,
                frames=tuple(frames),
                text=text[:_TEXT_CHARS],
                calls=tuple(calls_of(record["recorders"])) if record else (),
                pending_s=pending_s(record["recorders"], record["time"]) if record else 0.0,
                process=last,
                cpu_s=last.cpu_s - first.cpu_s,
                over_s=time.monotonic() - began,
            )
        )
    return found


def _flight_record(attempt: Attempt, rank: int, since: float) -> dict[str, Any] | None:
    record = read_json(attempt.flight(rank))
    return record if record and record["time"] >= since else None


def _stack(attempt: Attempt, rank: int, since: float) -> tuple[list[Frame], str]:
    """Return the last stacks in the log of a rank that has written to it `since`, see `parse_faulthandler`."""
    with suppress(FileNotFoundError), open_regular(attempt.log(rank)) as file:
        about = os.fstat(file.fileno())
        if about.st_mtime < since:
            return [], ""  # those of an earlier examination, which a stopped rank cannot replace
        file.seek(max(0, about.st_size - _LOG_BYTES))
        return parse_faulthandler(file.read().decode(errors="replace"))
    return [], ""


if __name__ == "__main__":
    main(sys.argv[1:])
