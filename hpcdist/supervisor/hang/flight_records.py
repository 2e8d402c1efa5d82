"""What PyTorch's flight recorders tell: which collective each rank waits in, and who has not come to it.

A recorder keeps the last collectives of each process group with their numbers, which are the same on all ranks of the
group. Ranks write theirs down when they are asked (`rank/telemetry/flight_recorder.py`). Pure functions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

#: How torch itself describes groups that nobody has described.
_NO_LABELS = ("undefined", "default_pg", "")


@dataclass(frozen=True, kw_only=True)
class Calls:
    """A rank's collectives in one process group."""

    backend: str
    group: str  #: its name for torch, which is the same on all ranks
    label: str = ""  #: how its maker describes it
    last: int  #: number of the last one that was called
    operation: str  #: which one that was: `all_reduce [4096]`
    pending: tuple[tuple[int, str], ...] = ()  #: those that have not ended, the first called first

    @property
    def group_text(self) -> str:
        return "the default group" if self.group == "0" else f"group {self.label or self.group}"

    def text(self) -> str:
        """`gloo, group control: waits in all_reduce [2] (number 7)`."""
        number, operation = self.pending[0] if self.pending else (self.last, self.operation)
        return (
            f"{self.backend}, {self.group_text}: {'waits in' if self.pending else 'has ended'} {operation} ({number})"
        )


def calls_of(recorders: Mapping[str, Any]) -> list[Calls]:
    """A rank's collectives by group, in the order of the groups' last calls.

    Args:
        recorders: by backend, what its flight recorder wrote as JSON (`_dump_fr_trace_json`).
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


def _is_pending(entry: Mapping[str, Any]) -> bool:
    # gloo's never leave the state `scheduled`, but are retired.
    return not (entry["retired"] or entry["state"] == "completed")


def _operation(entry: Mapping[str, Any]) -> str:
    name = str(entry["profiling_name"]).rpartition(":")[2]
    sizes = "×".join(str(size) for size in (entry.get("input_sizes") or [[]])[0])
    return f"{name} [{sizes}]" if sizes else name


@dataclass(frozen=True, kw_only=True)
class Absence:
    """A collective that some ranks wait in and others have not called."""

    call: Calls  #: one that waits
    number: int
    operation: str
    waiting: tuple[int, ...]
    absent: tuple[int, ...]

    def text(self) -> str:
        return (
            f"{ranks_text(self.absent)} {'has' if len(self.absent) == 1 else 'have'} not called {self.call.backend}"
            f" {self.operation} (number {self.number} of {self.call.group_text}), which {ranks_text(self.waiting)}"
            f" wait{'s' * (len(self.waiting) == 1)} in"
        )


def absences(calls: Mapping[int, Sequence[Calls]]) -> list[Absence]:
    """For each group the first collective that some ranks wait in and others of them have not called yet.

    Args:
        calls: by rank. Who has called nothing of a group so far is not known to belong to it.
    """
    found = []
    for members in _by_group(calls):
        for number in sorted({number for call in members.values() for number, _ in call.pending}):
            waiting = {
                rank: operation for rank, call in members.items() for n, operation in call.pending if n == number
            }
            absent = tuple(sorted(rank for rank, call in members.items() if call.last < number))
            if absent:
                first = min(waiting)
                found.append(
                    Absence(
                        call=members[first],
                        number=number,
                        operation=waiting[first],
                        waiting=tuple(sorted(waiting)),
                        absent=absent,
                    )
                )
                break
    return found


@dataclass(frozen=True, kw_only=True)
class Mismatch:
    """Ranks that call different collectives of a group as the same one: they took different paths in the code."""

    call: Calls
    number: int
    callers: tuple[tuple[str, tuple[int, ...]], ...]  #: by operation, most callers first

    def text(self) -> str:
        said = ", but ".join(
            f"{ranks_text(ranks)} call{'s' * (len(ranks) == 1)} {operation}" for operation, ranks in self.callers
        )
        return f"as {self.call.backend} collective number {self.number} of {self.call.group_text} {said}"


def mismatches(calls: Mapping[int, Sequence[Calls]]) -> list[Mismatch]:
    """For each group the first collective that ranks wait in and that is another one for others of them."""
    found = []
    for members in _by_group(calls):
        callers: dict[int, dict[str, list[int]]] = {}
        for rank, call in sorted(members.items()):
            for number, operation in call.pending:
                callers.setdefault(number, {}).setdefault(operation.partition(" ")[0], []).append(rank)
        torn = next((item for item in sorted(callers.items()) if len(item[1]) > 1), None)
        if torn is not None:
            number, by_operation = torn
            most_first = sorted(by_operation.items(), key=lambda item: -len(item[1]))
            groups = tuple((operation, tuple(ranks)) for operation, ranks in most_first)
            found.append(Mismatch(call=members[groups[0][1][0]], number=number, callers=groups))
    return found


def _by_group(calls: Mapping[int, Sequence[Calls]]) -> list[dict[int, Calls]]:
    """Each group's members with their calls."""
    groups: dict[tuple[str, str], dict[int, Calls]] = {}
    for rank, own in calls.items():
        for call in own:
            groups.setdefault((call.backend, call.group), {})[rank] = call
    return [members for _, members in sorted(groups.items())]


def ranks_text(ranks: Iterable[int], most: int = 6) -> str:
    """`rank 7`, `ranks 0-3, 5`; of more than `most` stretches the rest is counted."""
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
