"""Hung ranks: their processes, stacks and collectives, collected on every node, and the ranks that the others wait for.

    python -m hpcdist.supervisor.hang stacks ATTEMPT SECONDS     write the snapshots of this node's ranks
    python -m hpcdist.supervisor.hang activity ATTEMPT           print their CPU and GPU use, without a signal to them

The supervisor runs these commands on each node, outside of containers, as the user of the ranks.
"""

import json
import logging
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, Self

import psutil

from hpcdist.config.topology import Topology
from hpcdist.errors import TopologyError, few
from hpcdist.host.files import open_regular, write_atomic
from hpcdist.host.gpu_info import gpus
from hpcdist.host.json_files import read_json, write_json
from hpcdist.rank.processes import PARENT_MODULE, RANK_MODULE, shown_place
from hpcdist.run.folder import Attempt
from hpcdist.supervisor.protocols import Ranks

log = logging.getLogger(__name__)

# Processes of a run's ranks on this machine. Containers share the host's process table: their ranks are found as well,
# if they run as the same user.

#: States in which a process cannot run, whatever its code does. `disk-sleep` waits for a device or a file system.
CANNOT_RUN = (
    psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP, psutil.STATUS_DISK_SLEEP, psutil.STATUS_ZOMBIE,
    psutil.STATUS_DEAD,
)  # fmt: skip


class RankProcess(NamedTuple):
    pid: int
    rank: int


def find_ranks(run: Path, attempt: int | None, node: str = "", *, parents: bool = False) -> list[RankProcess]:
    """Return the processes of this user that are ranks of a run, by rank.

    Command line and environment identify a rank, and its name one that was forked. Its forked children share all of
    them, so a process whose parent is a rank does not count.

    Args:
        node: Slurm's name of this node, because several nodes may share one machine (`slurmd -N`).
        parents: include the tasks of a job that are parents of ranks, in place of their ranks: one without a rank may
            still start it.
    """
    ranks: dict[int, tuple[int, int]] = {}
    for process in psutil.process_iter():
        # A process that has ended, or is not readable, counts as not found.
        with suppress(psutil.Error, OSError, TopologyError):
            if process.uids().real != os.getuid():
                continue
            arguments = process.cmdline()[1:]
            if arguments[:4] == ["-P", "-m", PARENT_MODULE, str(run)]:
                place = shown_place(process.name())
                if place is None and parents:
                    place = Topology.from_env(process.environ()).rank, attempt or 0
            elif arguments == ["-P", "-m", RANK_MODULE, str(run)]:
                topology = Topology.from_env(process.environ())
                place = topology.rank, topology.attempt
            else:
                continue
            if place is None or attempt not in (None, place[1]):
                continue
            if not node or process.environ().get("SLURMD_NODENAME", node) == node:
                ranks[process.pid] = place[0], process.ppid()
    own = [RankProcess(pid, rank) for pid, (rank, parent) in ranks.items() if parent not in ranks]
    return sorted(own, key=lambda process: process.rank)


def family(pid: int) -> list[int]:
    with suppress(psutil.Error):
        return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    return [pid]


def state_of(pid: int) -> str:
    """Return psutil's name of a process's state; empty if it has ended."""
    with suppress(psutil.Error):
        return str(psutil.Process(pid).status())
    return ""


# Stacks that Python's faulthandler prints, https://docs.python.org/3/library/faulthandler.html, and their locations.

_FAULT_THREAD = r"(?:Current thread|Thread) 0x[0-9a-f]+(?: \[.*\])? \(most recent call first\):\n(?:  .*\n|\.\.\.\n)*"
#: A blank line separates two threads, but not two dumps.
_FAULT_DUMP = re.compile(rf"^{_FAULT_THREAD}(?:\n{_FAULT_THREAD})*", re.MULTILINE)
_FAULT_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.+)$', re.MULTILINE)
_STDLIB = re.compile(r"^<|/lib(?:64)?/python3[^/]*/(?!(?:site|dist)-packages/)")
#: Library code: Python's standard library, installed packages, and hpcdist's code around a trainer.
_LIBRARY = re.compile(rf"{_STDLIB.pattern}|^.*/(?:site|dist)-packages/|/hpcdist/(?:rank|checkpoint|tracking)/.*\.py$")
_ROOT = re.compile(r"^.*/(?:site-packages|dist-packages|lib(?:64)?/python3[^/]*)/")


class Frame(NamedTuple):
    function: str
    file: str
    line: int

    def text(self) -> str:
        """Return such as `all_reduce (torch/distributed/distributed_c10d.py:4181)` or `train (counting.py:29)`."""
        library = _ROOT.sub("", self.file)
        name = library if library != self.file else self.file.rpartition("/")[2]
        return f"{self.function} ({name}:{self.line})"


def location_of(frames: Sequence[Frame]) -> str:
    """Return such as `wait (threading.py:629), called by train (counting.py:29)`: the innermost call, and user code.

    User code is the innermost frame outside of libraries. If there is none, because the trainer is an installed
    package, it is the function that hpcdist's worker called, or else the worker's own line.
    """
    if not frames:
        return ""
    own = next((frame for frame in frames if not _LIBRARY.search(frame.file)), None)
    if own is None:
        by_worker = (pair for pair in pairwise(frames) if pair[1].file.endswith("/hpcdist/rank/worker.py"))
        inner, outer = next(by_worker, (frames[0], frames[0]))
        own = outer if _STDLIB.search(inner.file) else inner
    if own == frames[0]:
        return own.text()
    return f"{frames[0].text()}, called by {own.text()}"


def parse_faulthandler(text: str) -> tuple[list[Frame], str]:
    """Return the main thread's stack in the last dump of a rank's log, and the text of the dump.

    Forked children of a rank print to the same log; their stacks contain frames of multiprocessing.
    """
    for dump in reversed(_FAULT_DUMP.findall(text + "\n")):
        main = _FAULT_FRAME.finditer(dump.rpartition("\n\n")[2])
        frames = [Frame(found["function"], found["file"], int(found["line"])) for found in main]
        if frames and not any("/multiprocessing/" in frame.file for frame in frames):
            return frames, dump
    return [], ""


# PyTorch's flight recorders keep the last collectives of each process group with their sequence numbers, which are
# equal on all ranks of the group. Ranks write their records on SIGUSR1 (`rank/telemetry.py`).


class Calls(NamedTuple):
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
    """Return a rank's collectives by group, in the order of the last calls, from `_dump_fr_trace_json` by backend."""
    by_group: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for backend, recorded in recorders.items():
        for entry in recorded.get("entries", []):
            if not entry["is_p2p"]:
                by_group.setdefault((backend, str(entry["process_group"][0])), []).append(entry)
    found = []
    for (backend, group), entries in sorted(by_group.items(), key=lambda item: int(item[1][-1]["time_created_ns"])):
        label = str(entries[-1]["process_group"][1])
        label = "" if label in ("undefined", "default_pg") else label  # torch's descriptions of groups that have none
        calls, pending = [], []
        for entry in entries:
            name = str(entry["profiling_name"]).rpartition(":")[2]
            sizes = "×".join(str(size) for size in (entry.get("input_sizes") or [[]])[0])
            calls.append((int(entry["collective_seq_id"]), f"{name} [{sizes}]" if sizes else name))
            pending += calls[-1:] if _is_pending(entry) else []
        found.append(Calls(backend, group, label, *calls[-1], tuple(pending)))
    return found


def _is_pending(entry: Mapping[str, Any]) -> bool:
    # Calls of gloo stay in the state `scheduled`; they are retired when finished.
    return not (entry["retired"] or entry["state"] == "completed")


def compare_calls(calls: Mapping[int, Sequence[Calls]]) -> tuple[set[int], list[str]]:
    """Return the ranks that have not called a collective that others wait in, and sentences on differences.

    For each group there is one sentence at most of each kind: ranks call different collectives under one sequence
    number, since their code paths differ, or have not called one. A rank without any call in a group is not known to
    belong to it.
    """
    groups: dict[tuple[str, str], dict[int, Calls]] = {}
    for rank, own in calls.items():
        for call in own:
            groups.setdefault((call.backend, call.group), {})[rank] = call
    absent: set[int] = set()
    different, missing = [], []
    for _, members in sorted(groups.items()):
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


# Snapshots of the ranks on one node. Ranks print their stacks on SIGUSR1 from the supervisor; a stopped rank cannot.

#: Time for ranks to print their stacks and write their collectives.
PRINT_S = 4.0
_LOG_BYTES = 512 * 1024
_TEXT_CHARS = 64 * 1024


@dataclass(frozen=True, kw_only=True)
class RankSnapshot:
    """A rank: the state of its process, its stack and its last collectives."""

    rank: int
    host: str
    pid: int
    state: str  #: psutil's name
    frames: tuple[Frame, ...] = ()  #: stack of the main thread, innermost call first; empty if none was printed
    text: str = ""  #: stacks of all threads
    calls: tuple[Calls, ...] = ()  #: the last collectives in the flight recorders, in the order of their calls
    pending_s: float = 0.0  #: time since the call of the oldest unfinished collective; 0 without one

    @property
    def is_stopped(self) -> bool:
        return self.state in CANNOT_RUN

    def row(self) -> str:
        process = f"rank {self.rank} on {self.host}, process {self.pid}: state {self.state}"
        return "; ".join([process, *(call.text() for call in self.calls)])

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        parts = {
            "frames": tuple(Frame(*frame) for frame in value["frames"]),
            "calls": tuple(Calls._make([*call, tuple(map(tuple, pending))]) for *call, pending in value["calls"]),
        }
        return cls(**{**value, **parts})


def take_snapshots(processes: Sequence[RankProcess], attempt: Attempt, node: str, until: float) -> list[RankSnapshot]:
    """Return snapshots of the ranks on this node, taken before `until` on the monotonic clock."""
    began, since = time.monotonic(), time.time() - 60.0  # an older record belongs to an earlier signal
    awaited = [process.rank for process in processes if state_of(process.pid) not in ("", *CANNOT_RUN)]
    while time.monotonic() < min(began + PRINT_S, until) and not all(
        _stack(attempt, rank, since)[0] and _flight_record(attempt, rank, since) for rank in awaited
    ):
        time.sleep(0.05)  # no event shows that another process has written a file
    found = []
    for process in processes:
        if not (state := state_of(process.pid)):
            continue  # the process has ended by itself
        frames, text = _stack(attempt, process.rank, since)
        record = _flight_record(attempt, process.rank, since)
        recorders, at = (record["recorders"], record["time"]) if record else ({}, 0.0)
        entries = [entry for recorded in recorders.values() for entry in recorded.get("entries", [])]
        called = [int(entry["time_created_ns"]) / 1e9 for entry in entries if _is_pending(entry)]  # with p2p calls
        found.append(
            RankSnapshot(
                rank=process.rank,
                host=node,
                pid=process.pid,
                state=state,
                frames=tuple(frames),
                text=text[:_TEXT_CHARS],
                calls=tuple(calls_of(recorders)),
                pending_s=max((at - one for one in called), default=0.0),
            )
        )
    return found


def _flight_record(attempt: Attempt, rank: int, since: float) -> dict[str, Any] | None:
    record = read_json(attempt.flight(rank))
    return record if record and record["time"] >= since else None


def _stack(attempt: Attempt, rank: int, since: float) -> tuple[list[Frame], str]:
    with suppress(FileNotFoundError), open_regular(attempt.log(rank)) as file:
        about = os.fstat(file.fileno())
        if about.st_mtime < since:
            return [], ""  # those of an earlier examination, which a stopped rank cannot replace
        file.seek(max(0, about.st_size - _LOG_BYTES))
        return parse_faulthandler(file.read().decode(errors="replace"))
    return [], ""


# Summary of the snapshots of all ranks, which finds the ranks that the others wait for.

#: Limit of the table rows for ranks and for locations, and of the records of collectives.
MAX_RANKS = 64
#: Ranks whose stacks are part of the summary.
MAX_STACKS = 8
#: Limit of the locations and hosts in the sentence.
_NAMED = 3


@dataclass(frozen=True, kw_only=True)
class Summary:
    sentence: str  #: ends the reason of the run's failure
    suspects: tuple[int, ...]  #: ranks that the others seem to wait for; empty if unclear
    odd_first: tuple[int, ...]  #: all ranks with a snapshot, the suspects first
    text: str  #: the whole summary
    pending_s: Mapping[int, float] = field(default_factory=dict)  #: `RankSnapshot.pending_s` by rank


def summarize(snapshots: Sequence[RankSnapshot], missing_ranks: Mapping[int, str]) -> Summary:
    """Group ranks by the location of their stacks, and find the suspects; `missing_ranks` are hosts by rank."""
    by_rank = {snapshot.rank: snapshot for snapshot in sorted(snapshots, key=lambda snapshot: snapshot.rank)}
    groups = dict(sorted(_by_location(by_rank).items(), key=lambda item: (-len(item[1]), item[1])))
    absent, collectives = compare_calls({rank: snapshot.calls for rank, snapshot in by_rank.items()})
    suspects = _suspects(by_rank, groups, absent)
    unseen = []
    if missing_ranks:
        hosts = sorted(set(missing_ranks.values()))
        unseen = [f"no snapshot of {ranks_text(missing_ranks)} ({few(hosts, _NAMED)})"]
    where = _sentence(groups, suspects, all_seen=not missing_ranks)
    sentence = "; ".join([*filter(None, [where]), *collectives[:1], *unseen])
    group_of = {rank: number for number, ranks in enumerate(groups.values()) for rank in ranks}
    odd_first = tuple(sorted(by_rank, key=lambda rank: (rank not in suspects, -group_of[rank], rank)))
    lines = [sentence, "", "locations of the ranks:"]
    lines += _first([f"  {len(ranks):>5}  {ranks_text(ranks)}: {at}" for at, ranks in groups.items()], " locations")
    if collectives:
        lines += ["", "collectives, from the flight recorders:", *(f"  {text}" for text in collectives)]
    lines += ["", *unseen] if unseen else []
    lines += ["", "processes and last collectives:", *_first([f"  {by_rank[rank].row()}" for rank in odd_first])]
    for rank in odd_first[:MAX_STACKS]:
        lines += ["", f"stacks of rank {rank}:", by_rank[rank].text.rstrip("\n") or "none could be read"]
    return Summary(
        sentence=sentence,
        suspects=suspects,
        odd_first=odd_first,
        text="\n".join([*lines, "the stacks of all ranks are in their logs, rank-NNNNN.log", ""]),
        pending_s={rank: snapshot.pending_s for rank, snapshot in by_rank.items()},
    )


def _first(rows: Sequence[str], kind: str = "") -> list[str]:
    return [*rows[:MAX_RANKS], *([f"  and {len(rows) - MAX_RANKS} more{kind}"] if len(rows) > MAX_RANKS else [])]


def _by_location(snapshots: Mapping[int, RankSnapshot]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for rank, snapshot in snapshots.items():
        state = f"state {snapshot.state}"
        location = location_of(snapshot.frames)
        if snapshot.is_stopped:
            at = f"{state} at {location}" if location else state
        else:
            at = f"in {location}" if location else f"no stack, {state}"
        found.setdefault(at, []).append(rank)
    return found


def _suspects(
    snapshots: Mapping[int, RankSnapshot], groups: Mapping[str, Sequence[int]], absent: Collection[int]
) -> tuple[int, ...]:
    """Return the ranks that cannot run; else those that have not called a collective; else a small minority."""
    if stopped := [rank for rank, snapshot in snapshots.items() if snapshot.is_stopped]:
        return tuple(stopped)
    if idle := [rank for rank in absent if not any(call.pending for call in snapshots[rank].calls)]:
        return tuple(sorted(idle))
    most, *others = groups.values() if groups else [[]]
    few = sorted(rank for ranks in others for rank in ranks)
    return tuple(few) if len(most) > 2 * len(few) or (len(most) > 1 and len(few) == 1) else ()


def _sentence(groups: Mapping[str, Sequence[int]], suspects: Sequence[int], *, all_seen: bool) -> str:
    if not groups:
        return ""
    if len(groups) == 1:
        ((at, ranks),) = groups.items()
        who = "all ranks" if all_seen and len(ranks) > 1 else ranks_text(ranks)
        return f"{who} {'is' if len(ranks) == 1 else 'are'} {at}"
    suspected = [item for item in groups.items() if set(item[1]) & set(suspects)]
    others = [item for item in groups.items() if item not in suspected]
    named = [f"{ranks_text(ranks)} {at}" for at, ranks in (*suspected, *others)]
    more = [f"and {len(named) - _NAMED} more locations"] if len(named) > _NAMED else []
    text = "; ".join([*named[:_NAMED], *more])
    if len(suspected) != 1 or suspected[0][1] != list(suspects):
        return text
    # All suspects are at one location, whose ranks the sentence names first.
    who = ranks_text(suspects)
    return f"{who} differ{'s' * (len(suspects) == 1)} from the others:{text.removeprefix(who)}"


# The supervisor's side.

#: Hung ranks get this time to print their stacks, even if no node answers.
LEAST_PRINT_S = 1.0
#: A rank that has used more than this share of a core computes.
_BUSY_SHARE = 0.1
_COMMAND = (sys.executable, "-P", "-m", "hpcdist.supervisor.hang")


def collect(attempt: Attempt, ranks: Ranks, *, limit_s: float, interrupted: Callable[[], bool]) -> Summary | None:
    """Collect the stacks of the running ranks whose nodes answer within `limit_s`; None if there are none."""
    began = time.monotonic()
    # faulthandler prints the stacks to the logs, and `rank/telemetry.py` writes the collectives.
    ranks.signal(signal.SIGUSR1)
    printed_at = time.monotonic() + LEAST_PRINT_S
    # Sending the signal takes a while if Slurm's controller does not answer.
    left_s = max(0.0, began + limit_s - time.monotonic())
    # A share of 0.35 is for the start of the command on all nodes.
    command = [*_COMMAND, "stacks", str(attempt.path), f"{0.65 * left_s:.1f}"]
    snapshots: dict[int, RankSnapshot] = {}
    try:
        if messages := ranks.examine(command, limit_s=left_s, interrupted=interrupted):
            (attempt.path / "stacks.log").write_text(messages)
        while ranks.remaining and (left_s := printed_at - time.monotonic()) > 0 and not interrupted():
            ranks.wait(left_s)
        for path in sorted(attempt.path.glob(attempt.node_stacks("*").name)):
            for value in (read_json(path) or {"ranks": []})["ranks"]:
                snapshots[value["rank"]] = RankSnapshot.from_json(value)
            path.unlink()
        if not snapshots:
            return None
        missing = {rank: ranks.host_of(rank) for rank in ranks.remaining if rank not in snapshots}
        summary = summarize(list(snapshots.values()), missing)
        write_atomic(attempt.stacks_summary, summary.text)
        for rank in summary.odd_first[MAX_RANKS:]:
            attempt.flight(rank).unlink(missing_ok=True)
        return summary
    except OSError as error:
        # Most likely a full disk, which must not prevent the end of the ranks.
        log.warning("stack traces cannot be collected in %s: %s", attempt.path, error)
        return None


class Activity(NamedTuple):
    time: float
    cpu_s: float  #: CPU time until now, with that of children that have ended
    on_gpu: bool  #: whether a GPU that they use computes now


def read_activities(
    attempt: Attempt, ranks: Ranks, *, limit_s: float, interrupted: Callable[[], bool]
) -> dict[int, Activity]:
    """Return the activities of the ranks on the nodes that answer within `limit_s`, by rank."""
    try:
        output = ranks.examine([*_COMMAND, "activity", str(attempt.path)], limit_s=limit_s, interrupted=interrupted)
        rows = [json.loads(line) for line in output.splitlines() if line.startswith("[")]
        return {rank: Activity(*row) for rank, *row in rows}
    except (OSError, ValueError, TypeError) as error:
        log.warning("the CPU time of the ranks is unknown: %s", error)
        return {}


def busy_ranks(before: Mapping[int, Activity], after: Mapping[int, Activity]) -> set[int]:
    return {
        rank
        for rank, now in after.items()
        if now.on_gpu
        or (rank in before and now.cpu_s - before[rank].cpu_s > _BUSY_SHARE * (now.time - before[rank].time))
    }


def main(what: str, folder: str, limit_s: str = "0") -> None:
    """Examine this node's ranks: write their snapshots, or print their activities, one JSON line each."""
    attempt = Attempt(Path(folder))
    slurm_node = os.environ.get("SLURMD_NODENAME", "")
    processes = find_ranks(attempt.path.parent.parent, attempt.number, slurm_node)
    if what == "stacks":
        node = slurm_node or socket.gethostname()
        if snapshots := take_snapshots(processes, attempt, node, time.monotonic() + float(limit_s)):
            write_json(attempt.node_stacks(node), {"ranks": [asdict(snapshot) for snapshot in snapshots]})
        return
    on_gpu = {pid for gpu in gpus() if gpu.busy for pid in gpu.pids}
    for pid, rank in processes:
        pids, cpu_s = family(pid), 0.0
        for one in pids:
            with suppress(psutil.Error):  # it has just ended
                cpu_s += sum(psutil.Process(one).cpu_times()[:4])
        print(json.dumps([rank, time.time(), cpu_s, not on_gpu.isdisjoint(pids)]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
