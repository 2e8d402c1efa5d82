"""Records of PyTorch's flight recorders: the collective that each rank waits in, and the ranks that have not called it.

A recorder keeps the last collectives of each process group with their sequence numbers, which are equal on all ranks
of the group. Ranks write their records on SIGUSR1 (`rank/telemetry/flight_recorder.py`). Pure functions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

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
