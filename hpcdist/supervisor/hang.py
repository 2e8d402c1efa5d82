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
from hpcdist.run.stack_frames import Frame, location_of
from hpcdist.supervisor.protocols import Ranks

log = logging.getLogger(__name__)

# Processes of a run's ranks on this machine. Containers share the host's process table: their ranks are found as well,
# if they run as the same user.

#: States in which a process cannot run, whatever its code does. `disk-sleep` waits for a device or a file system.
CANNOT_RUN = (
    psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP, psutil.STATUS_DISK_SLEEP, psutil.STATUS_ZOMBIE,
    psutil.STATUS_DEAD,
)  # fmt: skip
#: Beginning of the arguments of a parent of ranks, and all arguments of a rank, without the path of the run at the end.
_PARENT_ARGUMENTS = ["-P", "-m", PARENT_MODULE]
_RANK_ARGUMENTS = ["-P", "-m", RANK_MODULE]


class RankProcess(NamedTuple):
    pid: int
    rank: int


class _Place(NamedTuple):
    rank: int
    attempt: int


def find_ranks(run: Path, attempt: int | None, node: str = "", *, parents: bool = False) -> list[RankProcess]:
    """Return this user's processes on this machine that are ranks of a run, sorted by rank.

    A rank is identified by its command line and environment, and a forked rank by its process name. The children that
    a rank forks inherit all of these, so a child process of a rank does not count.

    Args:
        attempt: number of the attempt; None for the ranks of all attempts.
        node: Slurm's name of this node, because several nodes may share one machine (`slurmd -N`); empty for all nodes.
        parents: include the tasks of a job that are parents of ranks, in place of their ranks: a parent without a rank
            may still start it.
    """
    ranks: dict[int, tuple[int, int]] = {}
    for process in psutil.process_iter():
        # A process that has ended, or is not readable, counts as not found.
        with suppress(psutil.Error, OSError, TopologyError):
            if process.uids().real != os.getuid():
                continue
            place = _place_of(process, run, attempt, parents=parents)
            if place is None or attempt not in (None, place.attempt):
                continue
            if not node or process.environ().get("SLURMD_NODENAME", node) == node:
                ranks[process.pid] = place.rank, process.ppid()
    processes = [RankProcess(pid, rank) for pid, (rank, parent) in ranks.items() if parent not in ranks]
    return sorted(processes, key=lambda process: process.rank)


def _place_of(process: psutil.Process, run: Path, attempt: int | None, *, parents: bool) -> _Place | None:
    """Return rank and attempt of a process; None if it is no rank of the run. See `find_ranks`."""
    arguments = process.cmdline()[1:]
    if arguments == [*_RANK_ARGUMENTS, str(run)]:
        topology = Topology.from_env(process.environ())
        return _Place(topology.rank, topology.attempt)
    # Further arguments of a parent follow.
    command = [*_PARENT_ARGUMENTS, str(run)]
    if arguments[: len(command)] != command:
        return None
    forked = shown_place(process.name())
    if forked is not None:
        return _Place(*forked)
    if not parents:
        return None
    return _Place(Topology.from_env(process.environ()).rank, attempt or 0)


def family(pid: int) -> list[int]:
    """Return the ids of a process and of its children and their children; only `pid` if it has ended."""
    with suppress(psutil.Error):
        return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    return [pid]


def state_of(pid: int) -> str:
    """Return psutil's name of a process's state; empty if it has ended."""
    with suppress(psutil.Error):
        return str(psutil.Process(pid).status())
    return ""


# Stacks that Python's faulthandler prints, https://docs.python.org/3/library/faulthandler.html

_FAULT_THREAD = r"(?:Current thread|Thread) 0x[0-9a-f]+(?: \[.*\])? \(most recent call first\):\n(?:  .*\n|\.\.\.\n)*"
#: A blank line separates two threads, but not two dumps.
_FAULT_DUMP = re.compile(rf"^{_FAULT_THREAD}(?:\n{_FAULT_THREAD})*", re.MULTILINE)
_FAULT_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.+)$', re.MULTILINE)


def parse_faulthandler(text: str) -> tuple[list[Frame], str]:
    """Return the main thread's stack in the last dump of a rank's log, innermost frame first, and the dump's text.

    Both are empty if there is no dump. Forked children of a rank print to the same log; their stacks contain frames of
    multiprocessing and are skipped.
    """
    for dump in reversed(_FAULT_DUMP.findall(text + "\n")):
        main_thread = dump.rpartition("\n\n")[2]
        frames = [
            Frame(match["function"], match["file"], int(match["line"])) for match in _FAULT_FRAME.finditer(main_thread)
        ]
        is_child = any("/multiprocessing/" in frame.file for frame in frames)
        if frames and not is_child:
            return frames, dump
    return [], ""


# PyTorch's flight recorders keep the last collectives of each process group with their sequence numbers, which are
# equal on all ranks of the group. Ranks write their records on SIGUSR1 (`rank/telemetry.py`).


#: Descriptions that torch gives to groups without one.
_NO_LABEL = ("undefined", "default_pg")


class Calls(NamedTuple):
    """The last collectives of one rank in one process group."""

    backend: str
    group: str  #: torch's name of the group, equal on all ranks
    label: str  #: description of the group; empty if it has none
    last: int  #: sequence number of the last call
    operation: str  #: operation of the last call: `all_reduce [4096]`
    pending: tuple[tuple[int, str], ...]  #: sequence numbers and operations of unfinished calls, in order

    @property
    def group_text(self) -> str:
        """The group in a sentence: `the default group` or `group control`."""
        if self.group == "0":
            return "the default group"
        return f"group {self.label or self.group}"

    def text(self) -> str:
        """Return such as `gloo, group control: waits in all_reduce [2] (7)`."""
        if self.pending:
            verb = "waits in"
            number, operation = self.pending[0]
        else:
            verb = "has finished"
            number, operation = self.last, self.operation
        return f"{self.backend}, {self.group_text}: {verb} {operation} ({number})"


def calls_of(recorders: Mapping[str, Any]) -> list[Calls]:
    """Return a rank's collectives by group, in the order of the last calls, from `_dump_fr_trace_json` by backend."""
    by_group: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for backend, recorder in recorders.items():
        for entry in recorder.get("entries", []):
            if not entry["is_p2p"]:
                group = str(entry["process_group"][0])
                by_group.setdefault((backend, group), []).append(entry)
    all_calls = []
    for (backend, group), entries in sorted(by_group.items(), key=lambda item: int(item[1][-1]["time_created_ns"])):
        label = str(entries[-1]["process_group"][1])
        if label in _NO_LABEL:
            label = ""
        pending = tuple(_numbered_operation(entry) for entry in entries if _is_pending(entry))
        last, operation = _numbered_operation(entries[-1])
        all_calls.append(Calls(backend, group, label, last, operation, pending))
    return all_calls


def _numbered_operation(entry: Mapping[str, Any]) -> tuple[int, str]:
    """Return sequence number and operation of a call, such as `all_reduce [4096]`, which has the size of its input."""
    operation = str(entry["profiling_name"]).rpartition(":")[2]
    all_sizes = entry.get("input_sizes") or [[]]
    sizes = "×".join(str(size) for size in all_sizes[0])
    if sizes:
        operation += f" [{sizes}]"
    return int(entry["collective_seq_id"]), operation


def _is_pending(entry: Mapping[str, Any]) -> bool:
    # Calls of gloo stay in the state `scheduled`; they are retired when finished.
    return not (entry["retired"] or entry["state"] == "completed")


def compare_calls(calls: Mapping[int, Sequence[Calls]]) -> tuple[set[int], list[str]]:
    """Return the ranks that have not called a collective that others wait in, and sentences on differences.

    For each group there are at most two sentences. The first one names ranks that call different collectives under one
    sequence number, because their code paths differ. The second one names ranks that have not called a collective. A
    rank without any call in a group is ignored, because it may not belong to the group.

    Args:
        calls: the last calls of each rank.
    """
    groups: dict[tuple[str, str], dict[int, Calls]] = {}
    for rank, calls_of_rank in calls.items():
        for call in calls_of_rank:
            groups.setdefault((call.backend, call.group), {})[rank] = call
    absent: set[int] = set()
    different = []
    missing = []
    for _, members in sorted(groups.items()):
        waiting: dict[int, dict[int, str]] = {}
        for rank, call in sorted(members.items()):
            for number, operation in call.pending:
                waiting.setdefault(number, {})[rank] = operation
        difference = _first_difference(members, waiting)
        if difference:
            different.append(difference)
        late, sentence = _first_missing(members, waiting)
        if late:
            absent.update(late)
            missing.append(sentence)
    return absent, [*different, *missing]


def _first_difference(members: Mapping[int, Calls], waiting: Mapping[int, Mapping[int, str]]) -> str:
    """Return a sentence on the first sequence number under which ranks wait in different collectives, or "".

    Args:
        members: the last calls of each rank of one group.
        waiting: the operations in which the ranks wait, by sequence number and rank.
    """
    any_call = next(iter(members.values()))
    for number, operations in sorted(waiting.items()):
        callers: dict[str, list[int]] = {}
        for rank, operation in operations.items():
            name = operation.partition(" ")[0]
            callers.setdefault(name, []).append(rank)
        if len(callers) > 1:
            most_first = sorted(callers.items(), key=lambda item: -len(item[1]))
            texts = [f"{ranks_text(ranks)} {_verb('call', ranks)} {name}" for name, ranks in most_first]
            where = f"{any_call.backend} collective number {number} of {any_call.group_text}"
            return f"as {where} {', but '.join(texts)}"
    return ""


def _first_missing(members: Mapping[int, Calls], waiting: Mapping[int, Mapping[int, str]]) -> tuple[list[int], str]:
    """Return the ranks that have not made the first call in which others wait, and a sentence; else both are empty.

    The arguments are those of `_first_difference`.
    """
    any_call = next(iter(members.values()))
    for number, operations in sorted(waiting.items()):
        late = [rank for rank, call in members.items() if call.last < number]
        if late:
            have = "has" if len(late) == 1 else "have"
            call_text = f"{any_call.backend} {operations[min(operations)]} (number {number} of {any_call.group_text})"
            wait = _verb("wait", operations)
            return late, f"{ranks_text(late)} {have} not called {call_text}, which {ranks_text(operations)} {wait} in"
    return [], ""


def _verb(verb: str, ranks: Collection[int]) -> str:
    """Return a verb for the subject `ranks_text(ranks)`: `calls` for one rank, otherwise `call`."""
    return f"{verb}s" if len(ranks) == 1 else verb


def ranks_text(ranks: Iterable[int], most: int = 6) -> str:
    """Return such as `rank 7` or `ranks 0-3, 5`; after `most` ranges, only the number of further ranks."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    words = [str(first) if first == last else f"{first}-{last}" for first, last in spans]
    is_one = len(spans) == 1 and spans[0][0] == spans[0][1]
    noun = "rank" if is_one else "ranks"
    text = f"{noun} {', '.join(words[:most])}"
    num_more = sum(last - first + 1 for first, last in spans[most:])
    if num_more:
        text += f" and {num_more} more"
    return text


# Snapshots of the ranks on one node. The supervisor sends SIGUSR1, on which ranks print their stacks. Stopped ranks
# cannot print.

#: Time for ranks to print their stacks and write their collectives.
PRINT_S = 4.0
#: Stacks and records that are older than this belong to an earlier examination.
_RECENT_S = 60.0
#: Interval of looks at files that another process writes, which no event announces.
_POLL_S = 0.05
#: Part of a rank's log, from its end, in which its stacks are searched.
_LOG_BYTES = 512 * 1024
#: Limit of the stacks of one rank in a snapshot.
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
        """Whether the process cannot run, whatever its code does."""
        return self.state in CANNOT_RUN

    def row(self) -> str:
        """Return the line of the summary about this rank: its process and its last collectives."""
        process = f"rank {self.rank} on {self.host}, process {self.pid}: state {self.state}"
        return "; ".join([process, *(call.text() for call in self.calls)])

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Return a snapshot from its fields, as `asdict` and JSON make them: named tuples are lists."""
        frames = tuple(Frame(*frame) for frame in value["frames"])
        calls = []
        for *fields, pending in value["calls"]:
            pending_calls = tuple((number, operation) for number, operation in pending)
            calls.append(Calls._make([*fields, pending_calls]))
        return cls(**{**value, "frames": frames, "calls": tuple(calls)})


def take_snapshots(processes: Sequence[RankProcess], attempt: Attempt, node: str, until: float) -> list[RankSnapshot]:
    """Return snapshots of the ranks on this node, without those that have ended.

    Args:
        until: time on the monotonic clock until which the ranks may write their stacks and collectives.
    """
    until = min(until, time.monotonic() + PRINT_S)
    since = time.time() - _RECENT_S
    # Stopped ranks write nothing.
    awaited = [process.rank for process in processes if state_of(process.pid) not in ("", *CANNOT_RUN)]
    while time.monotonic() < until and not all(_has_written(attempt, rank, since) for rank in awaited):
        time.sleep(_POLL_S)
    snapshots = []
    for process in processes:
        state = state_of(process.pid)
        if not state:
            continue  # the process has ended by itself
        frames, text = _stack(attempt, process.rank, since)
        calls: list[Calls] = []
        pending_s = 0.0
        record = _flight_record(attempt, process.rank, since)
        if record is not None:
            calls = calls_of(record["recorders"])
            pending_s = _pending_s(record)
        snapshots.append(
            RankSnapshot(
                rank=process.rank,
                host=node,
                pid=process.pid,
                state=state,
                frames=tuple(frames),
                text=text[:_TEXT_CHARS],
                calls=tuple(calls),
                pending_s=pending_s,
            )
        )
    return snapshots


def _has_written(attempt: Attempt, rank: int, since: float) -> bool:
    frames, _ = _stack(attempt, rank, since)
    return bool(frames) and _flight_record(attempt, rank, since) is not None


def _pending_s(record: Mapping[str, Any]) -> float:
    """Return the time between the oldest unfinished call, point-to-point calls included, and the record."""
    oldest = record["time"]
    for recorder in record["recorders"].values():
        for entry in recorder.get("entries", []):
            if _is_pending(entry):
                oldest = min(oldest, int(entry["time_created_ns"]) / 1e9)
    return float(record["time"] - oldest)


def _flight_record(attempt: Attempt, rank: int, since: float) -> dict[str, Any] | None:
    record = read_json(attempt.flight(rank))
    if not record or record["time"] < since:
        return None
    return record


def _stack(attempt: Attempt, rank: int, since: float) -> tuple[list[Frame], str]:
    """Return the last stack in a rank's log, as `parse_faulthandler` does; empty if the log is older than `since`."""
    with suppress(FileNotFoundError), open_regular(attempt.log(rank)) as file:
        facts = os.fstat(file.fileno())
        if facts.st_mtime < since:
            return [], ""  # stacks of an earlier examination, which a stopped rank cannot replace
        file.seek(max(0, facts.st_size - _LOG_BYTES))
        return parse_faulthandler(file.read().decode(errors="replace"))
    return [], ""


# Summary of the snapshots of all ranks, which finds the ranks that the others wait for.

#: Limit of the table rows for ranks and for locations, and of the records of collectives.
MAX_RANKS = 64
#: Ranks with their stacks in the summary.
MAX_STACKS = 8
#: Limit of the locations and hosts in the sentence.
_NAMED = 3


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The summary of the snapshots of all ranks."""

    sentence: str  #: ends the reason of the run's failure
    suspects: tuple[int, ...]  #: ranks that the others seem to wait for; empty if unclear
    odd_first: tuple[int, ...]  #: all ranks with a snapshot, the suspects first
    text: str  #: the whole summary
    pending_s: Mapping[int, float] = field(default_factory=dict)  #: `RankSnapshot.pending_s` by rank


def summarize(snapshots: Sequence[RankSnapshot], missing_ranks: Mapping[int, str]) -> Summary:
    """Group ranks by the location of their stacks, and find the suspects.

    Args:
        missing_ranks: hosts of the running ranks without a snapshot, by rank.
    """
    by_rank = {snapshot.rank: snapshot for snapshot in sorted(snapshots, key=lambda snapshot: snapshot.rank)}
    groups = _by_location(by_rank)
    absent, collectives = compare_calls({rank: snapshot.calls for rank, snapshot in by_rank.items()})
    suspects = _suspects(by_rank, groups, absent)
    unseen = ""
    if missing_ranks:
        hosts = sorted(set(missing_ranks.values()))
        unseen = f"no snapshot of {ranks_text(missing_ranks)} ({few(hosts, _NAMED)})"
    locations = _sentence(groups, suspects, all_seen=not missing_ranks)
    sentence = "; ".join(filter(None, [locations, *collectives[:1], unseen]))
    group_of: dict[int, int] = {}
    for number, ranks in enumerate(groups.values()):
        group_of |= dict.fromkeys(ranks, number)
    odd_first = tuple(sorted(by_rank, key=lambda rank: (rank not in suspects, -group_of[rank], rank)))

    lines = [sentence, "", "locations of the ranks:"]
    location_rows = [f"  {len(ranks):>5}  {ranks_text(ranks)}: {location}" for location, ranks in groups.items()]
    lines += _first(location_rows, " locations")
    if collectives:
        lines += ["", "collectives, from the flight recorders:"]
        lines += [f"  {text}" for text in collectives]
    if unseen:
        lines += ["", unseen]
    lines += ["", "processes and last collectives:"]
    lines += _first([f"  {by_rank[rank].row()}" for rank in odd_first])
    for rank in odd_first[:MAX_STACKS]:
        lines += ["", f"stacks of rank {rank}:", by_rank[rank].text.rstrip("\n") or "none could be read"]
    lines += ["the stacks of all ranks are in their logs, rank-NNNNN.log", ""]
    return Summary(
        sentence=sentence,
        suspects=suspects,
        odd_first=odd_first,
        text="\n".join(lines),
        pending_s={rank: snapshot.pending_s for rank, snapshot in by_rank.items()},
    )


def _first(rows: Sequence[str], kind: str = "") -> list[str]:
    """Return the first MAX_RANKS rows of a table, and a row with the number of further ones."""
    num_more = len(rows) - MAX_RANKS
    if num_more <= 0:
        return list(rows)
    return [*rows[:MAX_RANKS], f"  and {num_more} more{kind}"]


def _by_location(snapshots: Mapping[int, RankSnapshot]) -> dict[str, list[int]]:
    """Return the ranks at each location, the largest group first."""
    groups: dict[str, list[int]] = {}
    for rank, snapshot in snapshots.items():
        groups.setdefault(_location_text(snapshot), []).append(rank)
    return dict(sorted(groups.items(), key=lambda item: (-len(item[1]), item[1])))


def _location_text(snapshot: RankSnapshot) -> str:
    state = f"state {snapshot.state}"
    location = location_of(snapshot.frames)
    if not location:
        return state if snapshot.is_stopped else f"no stack, {state}"
    if snapshot.is_stopped:
        return f"{state} at {location}"
    return f"in {location}"


def _suspects(
    snapshots: Mapping[int, RankSnapshot], groups: Mapping[str, Sequence[int]], absent: Collection[int]
) -> tuple[int, ...]:
    """Return the ranks that the others seem to wait for.

    These are the ranks that cannot run. Without such ranks, they are the ranks that have not called a collective, and
    otherwise a small minority at other locations than the majority.
    """
    stopped = [rank for rank, snapshot in snapshots.items() if snapshot.is_stopped]
    if stopped:
        return tuple(stopped)
    idle = [rank for rank in absent if not any(call.pending for call in snapshots[rank].calls)]
    if idle:
        return tuple(sorted(idle))
    if not groups:
        return ()
    majority, *others = groups.values()
    minority = sorted(rank for ranks in others for rank in ranks)
    is_small = len(majority) > 2 * len(minority)
    is_single = len(majority) > 1 and len(minority) == 1
    if not is_small and not is_single:
        return ()
    return tuple(minority)


def _sentence(groups: Mapping[str, Sequence[int]], suspects: Sequence[int], *, all_seen: bool) -> str:
    """Return a sentence on the locations of the ranks, which begins with the suspects; empty without groups."""
    if not groups:
        return ""
    if len(groups) == 1:
        ((location, ranks),) = groups.items()
        who = "all ranks" if all_seen and len(ranks) > 1 else ranks_text(ranks)
        verb = "is" if len(ranks) == 1 else "are"
        return f"{who} {verb} {location}"
    suspected = [group for group in groups.items() if set(group[1]) & set(suspects)]
    others = [group for group in groups.items() if group not in suspected]
    texts = [f"{ranks_text(ranks)} {location}" for location, ranks in (*suspected, *others)]
    if len(texts) > _NAMED:
        texts = [*texts[:_NAMED], f"and {len(texts) - _NAMED} more locations"]
    text = "; ".join(texts)
    if len(suspected) != 1 or suspected[0][1] != list(suspects):
        return text
    # All suspects are at one location. The sentence names its ranks first.
    who = ranks_text(suspects)
    return f"{who} {_verb('differ', suspects)} from the others:{text.removeprefix(who)}"


# The supervisor's side.

#: Hung ranks get this time to print their stacks, even if no node answers.
LEAST_PRINT_S = 1.0
#: A rank that has used more than this share of a core computes.
_BUSY_SHARE = 0.1
#: A rank that has read and written more than this a second works, such as on a large file on a slow file system.
#: Heartbeats, logs and measurements of the system take less.
_BUSY_BYTES_PER_S = 1_000_000
#: Share of the time limit in which the ranks of a node print. The rest is for the start of the command on all nodes.
_PRINT_SHARE = 0.65
_COMMAND = (sys.executable, "-P", "-m", "hpcdist.supervisor.hang")


def collect(attempt: Attempt, ranks: Ranks, *, limit_s: float, interrupted: Callable[[], bool]) -> Summary | None:
    """Collect the stacks of the running ranks on the nodes that answer within `limit_s` seconds.

    The summary is also written to the attempt's folder. Returns None if there are no stacks, or if they cannot be
    written.

    Args:
        interrupted: whether to give up; called several times a second.
    """
    began = time.monotonic()
    # faulthandler prints the stacks to the logs, and `rank/telemetry.py` writes the collectives.
    ranks.signal(signal.SIGUSR1)
    printed_at = time.monotonic() + LEAST_PRINT_S
    # Sending the signal takes a while if Slurm's controller does not answer.
    left_s = max(0.0, began + limit_s - time.monotonic())
    command = [*_COMMAND, "stacks", str(attempt.path), f"{_PRINT_SHARE * left_s:.1f}"]
    try:
        messages = ranks.examine(command, limit_s=left_s, interrupted=interrupted)
        if messages:
            (attempt.path / "stacks.log").write_text(messages)
        _wait_until(printed_at, ranks, interrupted)
        snapshots = _take_reports(attempt)
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


def _wait_until(until: float, ranks: Ranks, interrupted: Callable[[], bool]) -> None:
    """Wait until a time on the monotonic clock, or until all ranks have ended."""
    while ranks.remaining:
        left_s = until - time.monotonic()
        if left_s <= 0 or interrupted():
            return
        ranks.wait(left_s)


def _take_reports(attempt: Attempt) -> dict[int, RankSnapshot]:
    """Return the snapshots that the nodes have written, by rank, and remove their files."""
    snapshots = {}
    for path in sorted(attempt.path.glob(attempt.node_stacks("*").name)):
        report = read_json(path) or {"ranks": []}
        for value in report["ranks"]:
            snapshots[value["rank"]] = RankSnapshot.from_json(value)
        path.unlink()
    return snapshots


class Activity(NamedTuple):
    """Use of CPU, GPU and files by a rank at one time."""

    time: float  #: seconds since the epoch, by the clock of the rank's node
    cpu_s: float  #: CPU time until now, with that of children that have ended
    on_gpu: bool  #: whether a GPU that they use computes now
    io_bytes: int = 0  #: bytes read and written until now, also through mapped memory


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


def busy_ranks(before: Mapping[int, Activity], after: Mapping[int, Activity], share: float = _BUSY_SHARE) -> set[int]:
    """Return the ranks that work, by their activities at two times: on a GPU now, or on a CPU or files in between.

    Args:
        share: of a core, above which a rank works.
    """
    busy = set()
    for rank, now in after.items():
        if now.on_gpu or (rank in before and _is_busy(before[rank], now, share)):
            busy.add(rank)
    return busy


def _is_busy(before: Activity, now: Activity, share: float) -> bool:
    elapsed_s = now.time - before.time
    computes = now.cpu_s - before.cpu_s > share * elapsed_s
    return computes or now.io_bytes - before.io_bytes > _BUSY_BYTES_PER_S * elapsed_s


def main(what: str, folder: str, limit_s: str = "0") -> None:
    """Examine this node's ranks: write their snapshots, or print their activities, one JSON line each."""
    attempt = Attempt(Path(folder))
    slurm_node = os.environ.get("SLURMD_NODENAME", "")
    processes = find_ranks(attempt.path.parent.parent, attempt.number, slurm_node)
    if what == "stacks":
        node = slurm_node or socket.gethostname()
        snapshots = take_snapshots(processes, attempt, node, time.monotonic() + float(limit_s))
        if snapshots:
            write_json(attempt.node_stacks(node), {"ranks": [asdict(snapshot) for snapshot in snapshots]})
        return
    pids_on_gpu: set[int] = set()
    for gpu in gpus():
        if gpu.busy:
            pids_on_gpu.update(gpu.pids)
    for pid, rank in processes:
        pids = family(pid)
        cpu_s = _cpu_s(pids)
        is_on_gpu = not pids_on_gpu.isdisjoint(pids)
        print(json.dumps([rank, time.time(), cpu_s, is_on_gpu, _io_bytes(pids)]), flush=True)


def _cpu_s(pids: Iterable[int]) -> float:
    """Return the CPU time of processes and of their ended children."""
    seconds = 0.0
    for pid in pids:
        with suppress(psutil.Error):  # the process has just ended
            times = psutil.Process(pid).cpu_times()
            seconds += times.user + times.system + times.children_user + times.children_system
    return seconds


def _io_bytes(pids: Iterable[int]) -> int:
    """Return the bytes that processes and their ended children have read and written; 0 if the kernel hides them.

    Calls count in full, also if the page cache answers; disks and network file systems count reads of mapped memory.
    """
    num_bytes = 0
    for pid in pids:
        # psutil lacks the method if the kernel does not count; the RuntimeError is about an empty file in /proc.
        with suppress(psutil.Error, AttributeError, RuntimeError):
            counters = psutil.Process(pid).io_counters()
            num_bytes += counters.read_chars + counters.write_chars + counters.read_bytes
    return num_bytes


if __name__ == "__main__":
    main(*sys.argv[1:])
