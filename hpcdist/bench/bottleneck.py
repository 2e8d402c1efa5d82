"""Where the bottleneck is, in a sentence: which node, rank or pair is slower than the others, and in which way."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from statistics import median

from hpcdist.bench.links import Link, Slow, find_slow
from hpcdist.bench.noise import BUSY, disturbance
from hpcdist.bench.results import Results
from hpcdist.bench.units import rate, seconds, times

#: From which factor on a pair is slow, or late; and a delay below this is nobody's loss.
SLOWER, LATER, LATER_S = 1.5, 3.0, 20e-6
#: Pairs that are told one by one.
TOLD = 4
#: Pairs that differ by no more than this are alike.
ALIKE = 0.25


def bottleneck(results: Results) -> list[str]:
    """A sentence for each finding, the worst first; or one that says how much alike all pairs are."""
    speeds = link_speeds(results)
    if not speeds:
        return ["no pairs were measured"]
    late = {(pair.source, pair.target): 1 / pair.latency_s for pair in results.pairs if pair.latency_s}
    places, usually = Places(results), disturbance(results)
    found, ranges = [], []
    for nearby in (False, True):
        links = {link: speed for link, speed in speeds.items() if places.share_node(link) is nearby}
        if not links:
            continue
        kind = " within a node" if nearby and len(links) < len(speeds) else ""
        slow = find_slow(links, max(SLOWER, usually))
        findings = [*_slow_places(slow, places, kind), *_slow_pairs(slow, places, kind)]
        answers = {link: late[link] for link in links if link in late}
        if answers and not findings:
            slow = find_slow(answers, max(LATER, usually), LATER_S)
            findings = [*_late_places(slow, places, kind), *_late_pairs(slow, places, kind)]
        found += [sentence for _, sentence in sorted(findings, key=lambda item: -item[0])]
        ranges.append(_range(links, places, kind))
    if not found and usually > BUSY:
        ranges.append(
            f"times are uneven: transfers differ by up to {times(usually)}, and what slows one by less cannot be seen"
        )
    return found or ranges


def link_speeds(results: Results) -> dict[Link, float]:
    """Bandwidth of each pair of ranks in bytes/s."""
    return {(pair.source, pair.target): pair.bandwidth for pair in results.pairs if pair.bandwidth}


class Places:
    """Names for ranks: the node's, where that is enough."""

    def __init__(self, results: Results) -> None:
        self._node = {rank.rank: rank.node for rank in results.ranks}
        self._members: dict[str, list[int]] = defaultdict(list)
        for rank, node in self._node.items():
            self._members[node].append(rank)

    def share_node(self, link: Link) -> bool:
        return self._node[link[0]] == self._node[link[1]]

    def name(self, rank: int) -> str:
        node = self._node[rank]
        if len(self._members) == 1:
            return f"rank {rank}"
        return node if len(self._members[node]) == 1 else f"rank {rank} ({node})"

    def group(self, ranks: Iterable[int], measured: Iterable[Link]) -> Iterator[tuple[str, list[int]]]:
        """Ranks by name; all ranks of a node that were measured as that node."""
        known = {rank for link in measured for rank in link}
        left = set(ranks)
        for node, members in self._members.items():
            of_node = known.intersection(members)
            if len(self._members) > 1 and of_node and left.issuperset(of_node):
                left -= of_node
                yield node, sorted(of_node)
        for rank in sorted(left):
            yield self.name(rank), [rank]

    def group_links(self, links: Iterable[Link], measured: Mapping[Link, float]) -> dict[tuple[str, str], float]:
        """Median speeds by the names of both ends; all links from one node to another that were measured as one."""
        of_nodes: dict[tuple[str, str], list[Link]] = defaultdict(list)
        for source, target in measured:
            of_nodes[self._node[source], self._node[target]].append((source, target))
        left, found = set(links), {}
        for (here, there), members in of_nodes.items():
            if here != there and left.issuperset(members):
                left -= set(members)
                found[here, there] = median(measured[link] for link in members)
        return found | {(self.name(source), self.name(target)): measured[source, target] for source, target in left}


Finding = tuple[float, str]


def _slow_places(slow: Slow, places: Places, kind: str) -> Iterator[Finding]:
    for name, factor, speed, way in _places(slow, places):
        against = f"({rate(speed)} against {rate(slow.usual)})"
        much = f"{times(factor)} slower than the median pair{kind}"
        if way == "both":
            yield factor, f"{name} is {much} in both directions {against}: its link or card"
        else:
            other = "receives" if way == "sends" else "sends"
            yield factor, f"{name} {way} {much} {against}, and {other} at full speed: its card, cable or switch port"


def _late_places(slow: Slow, places: Places, kind: str) -> Iterator[Finding]:
    for name, factor, speed, _ in _places(slow, places):
        yield (
            factor,
            (
                f"{name} answers {times(factor)} later than the median pair{kind}"
                f" ({seconds(1 / speed)} against {seconds(1 / slow.usual)}), at full bandwidth: a busy processor, or an"
                " interface that saves power or collects interrupts"
            ),
        )


def _places(slow: Slow, places: Places) -> Iterator[tuple[str, float, float, str]]:
    """Name, factor, speed and direction of what is slow with all its partners."""
    for ranks, way in (
        (slow.sends & slow.receives, "both"),
        (slow.sends - slow.receives, "sends"),
        (slow.receives - slow.sends, "receives"),
    ):
        for name, members in places.group(ranks, slow.links):
            speed = slow.of_ranks(members)
            yield name, slow.usual / speed, speed, way


def _slow_pairs(slow: Slow, places: Places, kind: str) -> list[Finding]:
    def say(name: str, back: str, speed: float, *, both: bool) -> str:
        much = f"{name} is {times(slow.usual / speed)} slower than the median pair{kind}"
        against = f"({rate(speed)} against {rate(slow.usual)})"
        if both:
            return f"{much} in both directions {against}, and both ends are faster with others: what lies between them"
        return f"{much} {against}, {back} is not: the way in that direction"

    return _pairs(slow, places, say)


def _late_pairs(slow: Slow, places: Places, kind: str) -> list[Finding]:
    def say(name: str, back: str, speed: float, *, both: bool) -> str:
        return (
            f"{name} takes {times(slow.usual / speed)} longer than the median pair{kind}"
            f" ({seconds(1 / speed)} against {seconds(1 / slow.usual)}), at full bandwidth: a longer way"
        )

    return _pairs(slow, places, say)


def _pairs(slow: Slow, places: Places, say: Callable[..., str]) -> list[Finding]:
    """Both directions of a pair in one finding; of many pairs the worst, and how many there are."""
    named = places.group_links(slow.pairs, slow.links)
    found = []
    for (here, there), speed in named.items():
        if (back := named.get((there, here))) is None:
            found.append((slow.usual / speed, say(f"{here} → {there}", f"{there} → {here}", speed, both=False)))
        elif here < there:
            slower = min(speed, back)
            found.append((slow.usual / slower, say(f"{here} ↔ {there}", "", slower, both=True)))
    found.sort(key=lambda finding: -finding[0])
    if len(found) > TOLD:
        factor, sentence = found[0]
        found = [(factor, f"{len(slow.pairs)} of {len(slow.links)} pairs are slow. The slowest: {sentence}")]
    return found


def _range(links: Mapping[Link, float], places: Places, kind: str) -> str:
    usual = median(links.values())
    slowest, fastest = min(links, key=lambda link: links[link]), max(links, key=lambda link: links[link])
    differ = max(1 - links[slowest] / usual, links[fastest] / usual - 1)
    where = f"{kind[1:]}: " if kind else ""
    if len(links) == 1:
        return f"{where}one pair was measured, {rate(usual)}: nothing to compare it with"
    if differ <= ALIKE:
        count = "both pairs" if len(links) == 2 else f"all {len(links)} pairs"
        return f"{where}{count} are alike: {rate(usual)}, within {max(differ, 0.01):.0%}"
    low, high = (" → ".join(map(places.name, link)) for link in (slowest, fastest))
    return (
        f"{where}no pair stands out: {rate(usual)} in the median, from {rate(links[slowest])} ({low})"
        f" to {rate(links[fastest])} ({high})"
    )
