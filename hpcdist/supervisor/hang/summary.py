"""Which rank stands elsewhere than the others. Pure functions over what was seen of each."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from hpcdist.supervisor.hang.flight_records import absences, mismatches, ranks_text
from hpcdist.supervisor.hang.frames import Place
from hpcdist.supervisor.hang.snapshot_of_rank import Look

#: Lines of the tables of ranks and of places, and files that are kept.
MAX_RANKS = 64
#: Places that the sentence names, and hosts.
_NAMED = 3
#: A process that could run all the time has had less than this share of it.
_STARVED = 0.5


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What the looks at all ranks come to."""

    sentence: str  #: for the run's last words
    suspects: tuple[int, ...]  #: ranks that the others seem to wait for; empty where nothing tells
    odd_first: tuple[int, ...]  #: all ranks that were seen, those that tell most first
    hosts: Mapping[int, str]  #: where those ranks are
    text: str  #: the whole summary


def summarize(looks: Sequence[Look], unseen: Mapping[int, str]) -> Summary:
    """Group ranks by where they stand, and find the odd one out.

    Args:
        looks: of the ranks that were found.
        unseen: hosts of the ranks that were not.
    """
    by_rank = {look.rank: look for look in sorted(looks, key=lambda look: look.rank)}
    groups = _groups(by_rank)
    calls = {rank: look.calls for rank, look in by_rank.items()}
    missing = absences(calls)
    torn = mismatches(calls)
    suspects = _suspects(by_rank, groups, {rank for absence in missing for rank in absence.absent})
    told = list(dict.fromkeys([*(item.text() for item in torn), *(item.text() for item in missing)]))
    apart = "; ".join(filter(None, [_starved(by_rank), _unseen(unseen)]))
    sentence = "; ".join(filter(None, [_sentence(groups, suspects, all_seen=not unseen), *told[:1], apart]))
    place = {rank: number for number, ranks in enumerate(groups.values()) for rank in ranks}
    odd_first = tuple(sorted(by_rank, key=lambda rank: (rank not in suspects, -place[rank], rank)))
    return Summary(
        sentence=sentence,
        suspects=suspects,
        odd_first=odd_first,
        hosts={rank: look.host for rank, look in by_rank.items()},
        text=_text(sentence, groups, told, apart, [by_rank[rank] for rank in odd_first]),
    )


def _groups(looks: Mapping[int, Look]) -> dict[str, list[int]]:
    """Ranks by what they are at, the most first.

    Where they are at too many places, as ranks are that compute, only the lines of their own code count.
    """
    found = _by_place(looks, Place.key, Place.text)
    if len(found) > max(_NAMED, len(looks) / 2):
        found = _by_place(looks, Place.own_key, lambda place: place.own.text())
    return dict(sorted(found.items(), key=lambda item: (-len(item[1]), item[1])))


def _by_place(
    looks: Mapping[int, Look], key: Callable[[Place], object], text: Callable[[Place], str]
) -> dict[str, list[int]]:
    texts: dict[object, str] = {}
    found: dict[str, list[int]] = {}
    for rank, look in looks.items():
        place = look.place
        if look.is_stopped:
            where = f" at {place.text()}" if place else ""
            at = f"{look.state_text().partition(',')[0]}{where}"
        elif place is None:
            at = f"no stack, {look.state_text().partition(',')[0]}"
        else:
            at = texts.setdefault(key(place), f"in {text(place)}")
        found.setdefault(at, []).append(rank)
    return found


def _starved(looks: Mapping[int, Look]) -> str:
    """Ranks that do not hang at all: they want to run, and others have the processors."""
    starved = [rank for rank, look in looks.items() if look.facts.state == "R" and look.cpu_s < _STARVED * look.over_s]
    if len(starved) <= len(looks) / 2:
        return ""
    share = max(looks[rank].cpu_s / looks[rank].over_s for rank in starved)
    get = "gets" if len(starved) == 1 else "get"
    return f"{ranks_text(starved)} {get} at most {share:.0%} of a core: too much else runs on their nodes"


def _suspects(
    looks: Mapping[int, Look], groups: Mapping[str, Sequence[int]], absent: Collection[int]
) -> tuple[int, ...]:
    """Whom the others wait for: who cannot run, else who has not come to a collective, else the few among many."""
    if stopped := [rank for rank, look in looks.items() if look.is_stopped]:
        return tuple(stopped)
    if idle := [rank for rank in absent if not any(call.pending for call in looks[rank].calls)]:
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
        return f"{who} stand{'s' * (len(ranks) == 1)} {at}"
    suspected = [item for item in groups.items() if set(item[1]) & set(suspects)]
    others = [item for item in groups.items() if item not in suspected]
    named = [f"{ranks_text(ranks)} {at}" for at, ranks in (*suspected, *others)]
    more = [f"and {len(named) - _NAMED} places more"] if len(named) > _NAMED else []
    said = "; ".join([*named[:_NAMED], *more])
    if len(suspected) != 1 or suspected[0][1] != list(suspects):
        return said
    # Of one place, whose ranks are named already.
    who = ranks_text(suspects)
    return f"{who} stand{'s' * (len(suspects) == 1)} elsewhere than the others:{said.removeprefix(who)}"


def _unseen(unseen: Mapping[int, str]) -> str:
    if not unseen:
        return ""
    hosts = sorted(set(unseen.values()))
    where = ", ".join(hosts[:_NAMED]) + (f" and {len(hosts) - _NAMED} more" if len(hosts) > _NAMED else "")
    return f"nothing was seen of {ranks_text(unseen)} ({where})"


def _text(
    sentence: str, groups: Mapping[str, Sequence[int]], told: Sequence[str], apart: str, looks: Sequence[Look]
) -> str:
    lines = [sentence, "", "where the ranks stand:"]
    rows = [f"  {len(ranks):>5}  {ranks_text(ranks)}: {at}" for at, ranks in groups.items()]
    lines += rows[:MAX_RANKS] + ([f"  and {len(rows) - MAX_RANKS} more places"] if len(rows) > MAX_RANKS else [])
    if told:
        lines += ["", "collectives, by the flight recorders:", *(f"  {text}" for text in told)]
    if apart:
        lines += ["", apart]
    lines += ["", "processes:"]
    for look in looks[:MAX_RANKS]:
        closed = len(look.facts.half_closed)
        peers = f", {closed} connections closed by the other side" if closed else ""
        lines.append(f"  rank {look.rank} on {look.host}: {look.state_text()}{peers}")
    if len(looks) > MAX_RANKS:
        lines.append(f"  and {len(looks) - MAX_RANKS} more")
    problems = sorted({look.problem for look in looks if look.problem})
    lines += ["", *problems[:_NAMED]] if problems else []
    return "\n".join([*lines, "", "the ranks' whole stacks: rank-NNNNN.stacks.txt, beside this file", ""])
