"""Summary of the snapshots of all ranks, which finds the ranks that the others wait for. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from hpcdist.supervisor.hang.flight_records import absences, mismatches, ranks_text
from hpcdist.supervisor.hang.frames import Location
from hpcdist.supervisor.hang.rank_snapshot import RankSnapshot

#: Limit of the table rows for ranks and for locations, and of the stacks files.
MAX_RANKS = 64
#: Limit of the locations and hosts in the sentence.
_NAMED = 3
#: A runnable process that got less than this share of a core is starved.
_STARVED = 0.5


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Summary of a hang."""

    sentence: str  #: ends the reason of the run's failure
    suspects: tuple[int, ...]  #: ranks that the others seem to wait for; empty if unclear
    odd_first: tuple[int, ...]  #: all ranks with a snapshot, the suspects first
    hosts: Mapping[int, str]  #: by rank
    text: str  #: the whole summary
    pending_s: Mapping[int, float] = field(default_factory=dict)  #: `RankSnapshot.pending_s` by rank


def summarize(snapshots: Sequence[RankSnapshot], missing_ranks: Mapping[int, str]) -> Summary:
    """Group ranks by the location of their stacks, and find the suspects.

    Args:
        snapshots: of all ranks that were found.
        missing_ranks: hosts of the ranks that were not found, by rank.
    """
    by_rank = {snapshot.rank: snapshot for snapshot in sorted(snapshots, key=lambda snapshot: snapshot.rank)}
    groups = _groups(by_rank)
    calls = {rank: snapshot.calls for rank, snapshot in by_rank.items()}
    absent_calls = absences(calls)
    suspects = _suspects(by_rank, groups, {rank for absence in absent_calls for rank in absence.absent})
    collectives = list(dict.fromkeys([*mismatches(calls), *(absence.text for absence in absent_calls)]))
    apart = "; ".join(filter(None, [_starved(by_rank), _no_snapshot(missing_ranks)]))
    sentence = "; ".join(
        filter(None, [_sentence(groups, suspects, all_seen=not missing_ranks), *collectives[:1], apart])
    )
    group_of = {rank: number for number, ranks in enumerate(groups.values()) for rank in ranks}
    odd_first = tuple(sorted(by_rank, key=lambda rank: (rank not in suspects, -group_of[rank], rank)))
    return Summary(
        sentence=sentence,
        suspects=suspects,
        odd_first=odd_first,
        hosts={rank: snapshot.host for rank, snapshot in by_rank.items()},
        text=_text(sentence, groups, collectives, apart, [by_rank[rank] for rank in odd_first]),
        pending_s={rank: snapshot.pending_s for rank, snapshot in by_rank.items()},
    )


def _groups(snapshots: Mapping[int, RankSnapshot]) -> dict[str, list[int]]:
    """Group ranks by location, the largest group first.

    If the locations are too many, as they are for computing ranks, only the lines of user code count.
    """
    found = _by_location(snapshots, Location.key, Location.text)
    if len(found) > max(_NAMED, len(snapshots) / 2):
        found = _by_location(snapshots, Location.own_key, lambda location: location.own.text())
    return dict(sorted(found.items(), key=lambda item: (-len(item[1]), item[1])))


def _by_location(
    snapshots: Mapping[int, RankSnapshot], key: Callable[[Location], object], text: Callable[[Location], str]
) -> dict[str, list[int]]:
    texts: dict[object, str] = {}
    found: dict[str, list[int]] = {}
    for rank, snapshot in snapshots.items():
        location = snapshot.location
        if snapshot.is_stopped:
            where = f" at {location.text()}" if location else ""
            at = f"{snapshot.state_text().partition(',')[0]}{where}"
        elif location is None:
            at = f"no stack, {snapshot.state_text().partition(',')[0]}"
        else:
            at = texts.setdefault(key(location), f"in {text(location)}")
        found.setdefault(at, []).append(rank)
    return found


def _starved(snapshots: Mapping[int, RankSnapshot]) -> str:
    """Return a sentence about ranks that do not hang, but get too little CPU time; empty if there are none."""
    starved = [
        rank
        for rank, snapshot in snapshots.items()
        if snapshot.process.state == "R" and snapshot.cpu_s < _STARVED * snapshot.over_s
    ]
    if len(starved) <= len(snapshots) / 2:
        return ""
    share = max(snapshots[rank].cpu_s / snapshots[rank].over_s for rank in starved)
    get = "gets" if len(starved) == 1 else "get"
    return f"{ranks_text(starved)} {get} at most {share:.0%} of a core: other processes use their CPUs"


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


def _no_snapshot(missing_ranks: Mapping[int, str]) -> str:
    if not missing_ranks:
        return ""
    hosts = sorted(set(missing_ranks.values()))
    listed = ", ".join(hosts[:_NAMED]) + (f" and {len(hosts) - _NAMED} more" if len(hosts) > _NAMED else "")
    return f"no snapshot of {ranks_text(missing_ranks)} ({listed})"


def _text(
    sentence: str,
    groups: Mapping[str, Sequence[int]],
    collectives: Sequence[str],
    apart: str,
    snapshots: Sequence[RankSnapshot],
) -> str:
    lines = [sentence, "", "locations of the ranks:"]
    rows = [f"  {len(ranks):>5}  {ranks_text(ranks)}: {at}" for at, ranks in groups.items()]
    lines += rows[:MAX_RANKS] + ([f"  and {len(rows) - MAX_RANKS} more locations"] if len(rows) > MAX_RANKS else [])
    if collectives:
        lines += ["", "collectives, from the flight recorders:", *(f"  {text}" for text in collectives)]
    if apart:
        lines += ["", apart]
    lines += ["", "processes:"]
    for snapshot in snapshots[:MAX_RANKS]:
        closed = len(snapshot.process.half_closed)
        peers = f", {closed} connections closed by the other side" if closed else ""
        lines.append(f"  rank {snapshot.rank} on {snapshot.host}: {snapshot.state_text()}{peers}")
    if len(snapshots) > MAX_RANKS:
        lines.append(f"  and {len(snapshots) - MAX_RANKS} more")
    problems = sorted({snapshot.problem for snapshot in snapshots if snapshot.problem})
    lines += ["", *problems[:_NAMED]] if problems else []
    return "\n".join([*lines, "", "complete stacks: rank-NNNNN.stacks.txt in this folder", ""])
