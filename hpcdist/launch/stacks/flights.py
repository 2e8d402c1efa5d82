"""What PyTorch's flight recorders tell: which collective each rank waits in, and who has not come to it.

A recorder keeps the last collectives of each process group with their numbers, which are the same on all ranks of the
group. Ranks write theirs down when they are asked (`runtime/flight.py`). Pure functions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Calls:
    """A rank's collectives in one process group."""

    backend: str
    group: str
    last: int  #: number of the last one that it has called
    operation: str  #: which one that was: `all_reduce [4096]`
    waiting: bool  #: whether that one has not ended


@dataclass(frozen=True, kw_only=True)
class Absence:
    """A collective that some ranks wait in and others have not called."""

    backend: str
    group: str
    number: int
    operation: str
    waiting: tuple[int, ...]
    absent: tuple[int, ...]

    def text(self) -> str:
        return (
            f"{ranks_text(self.absent)} {'has' if len(self.absent) == 1 else 'have'} not called {self.backend}"
            f" {self.operation} number {self.number} of {_group_text(self.group)}, which {ranks_text(self.waiting)}"
            f" wait{'s' * (len(self.waiting) == 1)} in"
        )


def calls_of(recorders: Mapping[str, Any]) -> list[Calls]:
    """The last collective of each group, in the order of the groups' last calls.

    Args:
        recorders: by backend, what its flight recorder wrote as JSON (`_dump_fr_trace_json`).
    """
    newest: dict[tuple[str, str], Mapping[str, Any]] = {}
    for backend, recorded in recorders.items():
        for entry in recorded.get("entries", []):
            if not entry["is_p2p"]:
                newest[backend, str(entry["process_group"][0])] = entry
    return [
        Calls(
            backend=backend,
            group=group,
            last=int(entry["collective_seq_id"]),
            operation=_operation(entry),
            waiting=not (entry["retired"] or entry["state"] == "completed"),
        )
        for (backend, group), entry in sorted(newest.items(), key=lambda item: int(item[1]["time_created_ns"]))
    ]


@dataclass(frozen=True, kw_only=True)
class Mismatch:
    """Ranks that call different collectives of a group as the same one."""

    backend: str
    group: str
    number: int
    callers: tuple[tuple[str, tuple[int, ...]], ...]  #: by operation, most callers first

    def text(self) -> str:
        said = " but ".join(
            f"{ranks_text(ranks)} call{'s' * (len(ranks) == 1)} {operation}" for operation, ranks in self.callers
        )
        return f"as {self.backend} collective number {self.number} of {_group_text(self.group)} {said}"


def _group_text(group: str) -> str:
    return "the default group" if group == "0" else f"group {group}"


def _operation(entry: Mapping[str, Any]) -> str:
    name = str(entry["profiling_name"]).rpartition(":")[2]
    sizes = "×".join(str(size) for size in (entry.get("input_sizes") or [[]])[0])
    return f"{name} [{sizes}]" if sizes else name


def absences(calls: Mapping[int, Sequence[Calls]]) -> list[Absence]:
    """Collectives that some ranks wait in and others of their group have not called yet.

    Args:
        calls: by rank. Whoever has called nothing of a group so far is not known to belong to it.
    """
    found = []
    for (backend, group), members in _by_group(calls).items():
        front = max(call.last for call in members.values())
        at_front = {rank: call for rank, call in members.items() if call.last == front}
        waiting = tuple(sorted(rank for rank, call in at_front.items() if call.waiting))
        absent = tuple(sorted(members.keys() - at_front.keys()))
        if waiting and absent:
            operation = at_front[waiting[0]].operation
            found.append(
                Absence(backend=backend, group=group, number=front, operation=operation, waiting=waiting, absent=absent)
            )
    return found


def mismatches(calls: Mapping[int, Sequence[Calls]]) -> list[Mismatch]:
    """Collectives that ranks wait in and that are not the same ones: they took different paths through the code."""
    found = []
    for (backend, group), members in _by_group(calls).items():
        front = max(call.last for call in members.values())
        callers: dict[str, list[int]] = {}
        for rank, call in sorted(members.items()):
            if call.last == front and call.waiting:
                callers.setdefault(call.operation.partition(" ")[0], []).append(rank)
        if len(callers) > 1:
            most_first = sorted(callers.items(), key=lambda item: -len(item[1]))
            groups = tuple((operation, tuple(ranks)) for operation, ranks in most_first)
            found.append(Mismatch(backend=backend, group=group, number=front, callers=groups))
    return found


def _by_group(calls: Mapping[int, Sequence[Calls]]) -> dict[tuple[str, str], dict[int, Calls]]:
    groups: dict[tuple[str, str], dict[int, Calls]] = {}
    for rank, own in calls.items():
        for call in own:
            groups.setdefault((call.backend, call.group), {})[rank] = call
    return dict(sorted(groups.items()))


def ranks_text(ranks: Iterable[int], most: int = 6) -> str:
    """`rank 7`, `ranks 0-3, 5`."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    words = [str(first) if first == last else f"{first}-{last}" for first, last in spans]
    shown = ", ".join(words[:most]) + (f" and {sum(b - a + 1 for a, b in spans[most:])} more" if words[most:] else "")
    return f"rank{'s' * (len(spans) > 1 or spans[0][0] != spans[0][1])} {shown}"
