"""Snapshots of the ranks on one node: their processes, stacks and collectives."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
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

    Command line and environment identify a rank, and its name one that was forked. Its forked children share all of
    them, so a process whose parent is a rank does not count.

    Args:
        attempt: number of the attempt; None for any.
        node: Slurm's name of this node, because several nodes may share one machine (`slurmd -N`).
        with_tasks: whether to return the tasks of forked ranks as well: a task without a rank may still become one.
    """
    ranks: dict[int, tuple[int, psutil.Process]] = {}
    for process in psutil.process_iter():
        try:
            if process.uids().real != os.getuid() or (found := _place(process, run, with_tasks)) is None:
                continue
            rank, its_attempt = found
            if attempt in (None, its_attempt) and (not node or process.environ().get("SLURMD_NODENAME", node) == node):
                ranks[process.pid] = rank, process
        except (psutil.Error, OSError, TopologyError):
            continue  # the process has ended, or is not readable: its rank counts as not found
    return [
        RankProcess(pid=process.pid, rank=rank, children=_children(process))
        for rank, process in sorted(ranks.values(), key=lambda found: found[0])
        if _parent(process) not in ranks
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


# Parsers of the stacks that py-spy and Python's faulthandler print, and the location that a stack is at.
#
# https://github.com/benfred/py-spy, https://docs.python.org/3/library/faulthandler.html. Pure functions.

_SPIED_THREAD = re.compile(r"Thread (?P<id>\S+) \(.*\)(?:: \"(?P<name>.*)\")?")
_SPIED_FRAME = re.compile(r"    (?P<function>.+) \((?P<file>.+):(?P<line>\d+)\)")
_FAULT_THREAD = re.compile(r"(?:Current thread|Thread) 0x[0-9a-f]+(?: \[.*\])? \(most recent call first\):")
_FAULT_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.+)')
_FAULT_OTHER = re.compile(r"|  \.\.\.|\.\.\.|  <no Python frame>|  <.*>")
#: Library code: Python's standard library, installed packages, and hpcdist's code around a trainer.
_STDLIB = re.compile(r"^<|/lib(?:64)?/python3[^/]*/(?!(?:site|dist)-packages/)")
_ROOT = re.compile(r"^.*/(?:site-packages|dist-packages|lib(?:64)?/python3[^/]*)/")
_INSTALLED = re.compile(r"^.*/(?:site|dist)-packages/")
_OURS = re.compile(r"/hpcdist/(?:rank|checkpoint|tracking)/.*\.py$")
_WORKER = re.compile(r"/hpcdist/rank/worker\.py$")


class Frame(NamedTuple):
    """One call on a stack."""

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

    def key(self) -> tuple[str, int, str, int]:
        """Return a key of the location without function names, which py-spy and faulthandler print differently."""
        return (*self.own_key(), self.inner.file, self.inner.line)

    def own_key(self) -> tuple[str, int]:
        """Return a key of the line of user code."""
        return (self.own.file, self.own.line)


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


def parse_py_spy(text: str) -> list[Frame]:
    """Parse `py-spy dump --full-filenames`. Returns the main thread's stack, innermost call first."""
    inside = False
    frames: list[Frame] = []
    for line in text.splitlines():
        if (thread := _SPIED_THREAD.fullmatch(line)) is not None:
            if frames:
                break  # the child processes that follow have main threads, too
            inside = thread["name"] == "MainThread"
        elif inside and (found := _SPIED_FRAME.fullmatch(line)) is not None:
            frames.append(Frame(found["function"], found["file"], int(found["line"])))
    return frames


def parse_faulthandler(log: str) -> tuple[list[Frame], str]:
    """Parse the last dump of faulthandler in a rank's log.

    The main thread is the last one in a dump. Forked children of a rank print to the same log; their stacks contain
    frames of multiprocessing.

    Returns:
        The main thread's stack, and the text of the dump.
    """
    for lines in reversed(_dumps(log)):
        threads: list[list[Frame]] = []
        for line in lines:
            if _FAULT_THREAD.fullmatch(line):
                threads.append([])
            elif threads and (found := _FAULT_FRAME.fullmatch(line)):
                threads[-1].append(Frame(found["function"], found["file"], int(found["line"])))
        if threads and threads[-1] and not any("/multiprocessing/" in frame.file for frame in threads[-1]):
            return threads[-1], "\n".join(lines) + "\n"
    return [], ""


def _dumps(log: str) -> list[list[str]]:
    """Return the dumps of faulthandler in a log, each as lines from the first thread's header to the last frame."""
    found: list[list[str]] = []
    lines: list[str] = []
    ended = True
    for line in log.splitlines():
        if _FAULT_THREAD.fullmatch(line):
            # A blank line separates two threads, but not two dumps.
            if ended or (lines and lines[-1]):
                lines = []
                found.append(lines)
            ended = False
            lines.append(line)
        elif not ended and (_FAULT_FRAME.fullmatch(line) or _FAULT_OTHER.fullmatch(line)):
            lines.append(line)
        else:
            ended = True
    return found


# Records of PyTorch's flight recorders: the collective that each rank waits in, and the ranks that have not called it.
#
# A recorder keeps the last collectives of each process group with their sequence numbers, which are equal on all ranks
# of the group. Ranks write their records on SIGUSR1 (`rank/telemetry.py`). Pure functions.

#: torch's descriptions of groups that have none.
_NO_LABELS = ("undefined", "default_pg", "")


@dataclass(frozen=True, kw_only=True)
class Calls:
    """Collectives of a rank in one process group."""

    backend: str
    group: str  #: torch's name of the group, equal on all ranks
    label: str = ""  #: description of the group, if it has one
    last: int  #: sequence number of the last call
    operation: str  #: operation of the last call: `all_reduce [4096]`
    pending: tuple[tuple[int, str], ...] = ()  #: sequence numbers and operations of unfinished calls, in order

    @property
    def group_text(self) -> str:
        """The process group, for a message."""
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
        found.append(
            Calls(
                backend=backend,
                group=group,
                label="" if label in _NO_LABELS else label,
                last=int(entries[-1]["collective_seq_id"]),
                operation=_operation(entries[-1]),
                pending=tuple((int(e["collective_seq_id"]), _operation(e)) for e in entries if _is_pending(e)),
            )
        )
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


class Absence(NamedTuple):
    """A collective that some ranks wait in, and others have not called."""

    absent: list[int]
    text: str


def absences(calls: Mapping[int, Sequence[Calls]]) -> list[Absence]:
    """Return, for each group, the first collective that some of its ranks wait in and others have not called.

    Args:
        calls: by rank. A rank without any call in a group is not known to belong to it.
    """
    found = []
    for members in _by_group(calls):
        for number in sorted({number for call in members.values() for number, _ in call.pending}):
            absent = sorted(rank for rank, call in members.items() if call.last < number)
            if absent:
                found.append(_absence(members, number, absent))
                break
    return found


def _absence(members: Mapping[int, Calls], number: int, absent: list[int]) -> Absence:
    waiting = {rank: operation for rank, call in members.items() for n, operation in call.pending if n == number}
    first = min(waiting)
    text = (
        f"{ranks_text(absent)} {'has' if len(absent) == 1 else 'have'} not called {members[first].backend}"
        f" {waiting[first]} (number {number} of {members[first].group_text}), which {ranks_text(waiting)}"
        f" wait{'s' * (len(waiting) == 1)} in"
    )
    return Absence(absent, text)


def mismatches(calls: Mapping[int, Sequence[Calls]]) -> list[str]:
    """Return, for each group, a sentence about the first sequence number under which ranks call different collectives.

    The code paths of these ranks differ.
    """
    found = []
    for members in _by_group(calls):
        callers: dict[int, dict[str, list[int]]] = {}
        for rank, call in sorted(members.items()):
            for number, operation in call.pending:
                callers.setdefault(number, {}).setdefault(operation.partition(" ")[0], []).append(rank)
        mismatch = next((item for item in sorted(callers.items()) if len(item[1]) > 1), None)
        if mismatch is not None:
            number, by_operation = mismatch
            most_first = sorted(by_operation.items(), key=lambda item: -len(item[1]))
            group = members[most_first[0][1][0]]
            texts = [f"{ranks_text(ranks)} call{'s' * (len(ranks) == 1)} {name}" for name, ranks in most_first]
            where = f"{group.backend} collective number {number} of {group.group_text}"
            found.append(f"as {where} {', but '.join(texts)}")
    return found


def _by_group(calls: Mapping[int, Sequence[Calls]]) -> list[dict[int, Calls]]:
    """Return the calls of each group, by rank."""
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
    """State of a rank: its process, its stack and its last collectives.

    Attributes:
        frames: stack of the main thread, innermost call first; empty if none could be read.
        source: program that printed the stacks, `py-spy` or `faulthandler`.
        problem: why py-spy failed, if it was tried.
        text: stacks of all threads; with py-spy also of all child processes.
        calls: the last collectives in the flight recorders, in the order of their calls.
        pending_s: time since the call of the oldest unfinished collective; 0 without one.
        process: state of the process.
        cpu_s, over_s: CPU time that the process used during `over_s` seconds.
    """

    rank: int
    host: str
    pid: int
    frames: tuple[Frame, ...] = ()
    source: str = ""
    problem: str = ""
    text: str = ""
    calls: tuple[Calls, ...] = ()
    pending_s: float = 0.0
    process: ProcessState
    cpu_s: float
    over_s: float

    @property
    def location(self) -> Location | None:
        """The location of the stack; None if it has no frames."""
        return location_of(self.frames)

    @property
    def is_stopped(self) -> bool:
        """Whether the process cannot run, whatever its code does."""
        return self.process.state in CANNOT_RUN

    def state_text(self) -> str:
        """Return such as `state S (sleeping), in futex_wait_queue, 12 threads, 0.02 s of CPU in 1.1 s`."""
        _, description = STATES.get(self.process.state, ("", "see proc(5)"))
        state = f"state {self.process.state} ({description})"
        wchan = f", in {self.process.wchan}" if self.process.wchan else ""
        return f"{state}{wchan}, {self.process.threads} threads, {self.cpu_s:.2f} s of CPU in {self.over_s:.1f} s"

    def whole_text(self) -> str:
        """Return the text of the rank's stacks file."""
        lines = [f"rank {self.rank} on {self.host}, process {self.pid}: {self.state_text()}"]
        if self.process.half_closed:
            lines.append(f"TCP connections closed by the peer: {', '.join(self.process.half_closed)}")
        lines += [f"flight recorder, {call.text()}" for call in self.calls]
        if self.problem:
            lines.append(self.problem)
        lines.append(f"stacks by {self.source}:" if self.text else "no stack could be read")
        return "\n".join(lines) + "\n\n" + self.text

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> RankSnapshot:
        """Return the snapshot from the JSON of `dataclasses.asdict`."""
        parts = {
            "frames": tuple(Frame(*frame) for frame in value["frames"]),
            "calls": tuple(
                Calls(**{**call, "pending": tuple((int(at), str(name)) for at, name in call["pending"])})
                for call in value["calls"]
            ),
            "process": ProcessState(**{**value["process"], "half_closed": tuple(value["process"]["half_closed"])}),
        }
        return cls(**{**value, **parts})


# Take snapshots of the ranks on one node, and write them to the attempt's folder.
#
#     python -m hpcdist.supervisor.hang_node ATTEMPT SECONDS
#
# Stacks come from py-spy if it is installed and permitted to read the processes, otherwise from the ranks' logs: ranks
# print their stacks on SIGUSR1, which the supervisor sends. Runs outside of containers, as the user of the ranks.

#: Time limit of py-spy for one process; it usually takes some 10 ms.
SPY_S = 5.0
#: Time for ranks to print their stacks and write their collectives.
PRINT_S = 4.0
#: Minimum duration for measuring CPU time.
CPU_OVER_S = 1.0
#: An older record of collectives belongs to an earlier signal.
FRESH_S = 60.0
_LOG_BYTES = 512 * 1024
_TEXT_CHARS = 64 * 1024
_POLL_S = 0.05
_AT_ONCE = 4


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
    began = time.monotonic()
    before = {process: state for process in processes if (state := state_of(process.pid)) is not None}
    spy = py_spy(os.environ)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        results = pool.map(lambda process: _run_py_spy(spy, process, until), before)
        stacks = dict(zip(before, results, strict=True))
    prints = RankPrints(attempt, [process.rank for process, stack in stacks.items() if not stack.frames])
    awaited = [process.rank for process, state in before.items() if state.state not in CANNOT_RUN]
    while awaited and time.monotonic() < min(began + PRINT_S, until) and not prints.are_complete(awaited):
        time.sleep(_POLL_S)  # no event shows that another process has written a file
    # CPU time distinguishes computing from waiting only after a while.
    time.sleep(max(0.0, min(began + CPU_OVER_S, until) - time.monotonic()))
    found = []
    for process, first in before.items():
        last = state_of(process.pid)
        if last is None:
            continue  # the process has ended by itself
        stack = stacks[process] if stacks[process].frames else prints.stack(process.rank, stacks[process].problem)
        record = prints.flight_record(process.rank)
        found.append(
            RankSnapshot(
                rank=process.rank,
                host=node,
                pid=process.pid,
                frames=tuple(stack.frames),
                source=stack.source,
                problem=stack.problem,
                text=stack.text[:_TEXT_CHARS],
                calls=tuple(calls_of(record["recorders"])) if record else (),
                pending_s=pending_s(record["recorders"], record["time"]) if record else 0.0,
                process=last,
                cpu_s=last.cpu_s - first.cpu_s,
                over_s=time.monotonic() - began,
            )
        )
    return found


class Stack(NamedTuple):
    """Stacks of a process as text, and the main thread's as frames; or the reason why there are none."""

    frames: Sequence[Frame] = ()
    text: str = ""
    source: str = ""
    problem: str = ""


class RankPrints:
    """Output of ranks on SIGUSR1: stacks in their logs, collectives in a file.

    Args:
        unread: ranks whose stacks py-spy could not read.
    """

    def __init__(self, attempt: Attempt, unread: Sequence[int]) -> None:
        self._attempt = attempt
        self._unread = unread
        self._since = time.time() - FRESH_S

    def are_complete(self, ranks: Sequence[int]) -> bool:
        """Return whether these ranks have written their collectives, and their stacks if py-spy could not read them."""
        return all(self.flight_record(rank) is not None for rank in ranks) and all(
            self.stack(rank).frames for rank in ranks if rank in self._unread
        )

    def flight_record(self, rank: int) -> dict[str, Any] | None:
        """Return a rank's flight record with its collectives; None if there is no new one."""
        record = read_json(self._attempt.flight(rank))
        return record if record and record["time"] >= self._since else None

    def stack(self, rank: int, problem: str = "") -> Stack:
        """Return the stack that a rank has written to its log."""
        try:
            with open_regular(self._attempt.log(rank)) as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - _LOG_BYTES))
                frames, text = parse_faulthandler(file.read().decode(errors="replace"))
        except FileNotFoundError:
            frames, text = [], ""
        return Stack(frames, text, "faulthandler" if frames else "", problem)


def py_spy(env: Mapping[str, str]) -> str | None:
    """Return the path of py-spy, in PATH or in the folder of this Python; None if it is not installed."""
    return shutil.which("py-spy", path=env.get("PATH")) or shutil.which("py-spy", path=str(Path(sys.executable).parent))


def _run_py_spy(spy: str | None, process: RankProcess, until: float) -> Stack:
    left_s = min(SPY_S, until - time.monotonic())
    if spy is None or left_s <= 0:
        return Stack()
    # Without pausing the process: a stopped process cannot be stopped again, and a false alarm has no effect.
    command = [spy, "dump", "--nonblocking", "--full-filenames", "--pid", str(process.pid)]
    command += ["--subprocesses"] if process.children else []
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=left_s, check=False)
    except subprocess.TimeoutExpired:
        return Stack(problem=f"py-spy did not answer within {left_s:.0f} s")
    frames = parse_py_spy(done.stdout)
    if frames:
        return Stack(frames, done.stdout, "py-spy")
    messages = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    # The first line is a title; the reason follows `Caused by:`.
    reason = next((line for above, line in pairwise(messages) if above == "Caused by:"), "")
    reason = reason or (messages[0] if messages else "no output")
    return Stack(problem=f"py-spy could not read the process: {reason}")


if __name__ == "__main__":
    main(sys.argv[1:])
