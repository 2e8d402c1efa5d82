"""Sentences that describe the bottleneck: the nodes, ranks or pairs that are slower than the others."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from statistics import median

from hpcdist.bench.noise import BUSY, disturbance
from hpcdist.bench.results import Results
from hpcdist.network.slow_links import SlowLinks, find_slow_links
from hpcdist.network.units import rate, seconds, times

#: Source and target rank.
Link = tuple[int, int]
#: A pair is slow by bandwidth from the first factor on, and late by latency from the second factor and difference on.
SLOW_FACTOR, LATE_FACTOR, LATE_S = 1.5, 3.0, 20e-6
#: Maximum number of pairs that are reported individually.
MAX_PAIRS = 4
#: Relative deviation from the median up to which pairs count as equal.
EQUAL_WITHIN = 0.25


def bottleneck(results: Results) -> list[str]:
    """Return a sentence for each finding, the worst first, or the range of bandwidths if there is no finding."""
    speeds = link_speeds(results)
    if not speeds:
        return ["no pairs were measured"]
    late = {(pair.source, pair.target): 1 / pair.latency_s for pair in results.pairs if pair.latency_s}
    names, noise = RankNames(results), disturbance(results)
    found, ranges = [], []
    for nearby in (False, True):
        links = {link: speed for link, speed in speeds.items() if names.share_node(link) is nearby}
        if not links:
            continue
        kind = " within a node" if nearby and len(links) < len(speeds) else ""
        slow = find_slow_links(links, max(SLOW_FACTOR, noise))
        findings = [*_slow_ends(slow, names, kind), *_slow_pairs(slow, names, kind)]
        answers = {link: late[link] for link in links if link in late}
        if answers and not findings:
            slow = find_slow_links(answers, max(LATE_FACTOR, noise), LATE_S)
            findings = [*_late_ends(slow, names, kind), *_late_pairs(slow, names, kind)]
        found += [sentence for _, sentence in sorted(findings, key=lambda item: -item[0])]
        ranges.append(_range(links, names, kind))
    if not found and noise > BUSY:
        ranges.append(
            f"the measurements are noisy: transfers differ by up to {times(noise)}, which hides smaller faults"
        )
    return found or ranges


def link_speeds(results: Results) -> dict[Link, float]:
    """Return the bandwidth of each pair of ranks, in bytes/s."""
    return {(pair.source, pair.target): pair.bandwidth for pair in results.pairs if pair.bandwidth}


class RankNames:
    """Names of ranks: the name of the node if it has only one rank."""

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
        """Yield names and their ranks; all measured ranks of a node are combined under the node's name."""
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
        """Return median speeds by the names of both ends; all measured links between two nodes are combined."""
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


def _slow_ends(slow: SlowLinks[int], names: RankNames, kind: str) -> Iterator[Finding]:
    for name, factor, speed, way in _ends(slow, names):
        against = f"({rate(speed)}, median {rate(slow.usual)})"
        much = f"{times(factor)} slower than the median pair{kind}"
        if way == "both":
            yield factor, f"{name} is {much} in both directions {against}: check its link and network card"
        else:
            other = "receives" if way == "sends" else "sends"
            yield (
                factor,
                f"{name} {way} {much} {against}, and {other} at full speed: check its card, cable and switch port",
            )


def _late_ends(slow: SlowLinks[int], names: RankNames, kind: str) -> Iterator[Finding]:
    for name, factor, speed, _ in _ends(slow, names):
        yield (
            factor,
            (
                f"{name} has {times(factor)} the latency of the median pair{kind}"
                f" ({seconds(1 / speed)}, median {seconds(1 / slow.usual)}) at full bandwidth: check for a busy"
                " processor, power saving and interrupt coalescing"
            ),
        )


def _ends(slow: SlowLinks[int], names: RankNames) -> Iterator[tuple[str, float, float, str]]:
    """Yield name, factor, speed and direction of nodes and ranks that are slow with all partners."""
    for ranks, way in (
        (slow.sends & slow.receives, "both"),
        (slow.sends - slow.receives, "sends"),
        (slow.receives - slow.sends, "receives"),
    ):
        for name, members in names.group(ranks, slow.links):
            speed = slow.of_ends(members)
            yield name, slow.usual / speed, speed, way


def _slow_pairs(slow: SlowLinks[int], names: RankNames, kind: str) -> list[Finding]:
    def describe(name: str, back: str, speed: float, *, both: bool) -> str:
        much = f"{name} is {times(slow.usual / speed)} slower than the median pair{kind}"
        against = f"({rate(speed)}, median {rate(slow.usual)})"
        if both:
            return f"{much} in both directions {against}, and both ends are faster with others: check the path between"
        return f"{much} {against}, but {back} is not: check the route in this direction"

    return _pairs(slow, names, describe)


def _late_pairs(slow: SlowLinks[int], names: RankNames, kind: str) -> list[Finding]:
    def describe(name: str, back: str, speed: float, *, both: bool) -> str:
        return (
            f"{name} has {times(slow.usual / speed)} the latency of the median pair{kind}"
            f" ({seconds(1 / speed)}, median {seconds(1 / slow.usual)}) at full bandwidth: a longer route"
        )

    return _pairs(slow, names, describe)


def _pairs(slow: SlowLinks[int], names: RankNames, describe: Callable[..., str]) -> list[Finding]:
    """Return one finding for both directions of a pair; of more than `MAX_PAIRS` only the worst and the number."""
    by_name = names.group_links(slow.pairs, slow.links)
    found = []
    for (here, there), speed in by_name.items():
        if (back := by_name.get((there, here))) is None:
            found.append((slow.usual / speed, describe(f"{here} → {there}", f"{there} → {here}", speed, both=False)))
        elif here < there:
            slower = min(speed, back)
            found.append((slow.usual / slower, describe(f"{here} ↔ {there}", "", slower, both=True)))
    found.sort(key=lambda finding: -finding[0])
    if len(found) > MAX_PAIRS:
        factor, sentence = found[0]
        found = [(factor, f"{len(slow.pairs)} of {len(slow.links)} pairs are slow. The slowest: {sentence}")]
    return found


def _range(links: Mapping[Link, float], names: RankNames, kind: str) -> str:
    usual = median(links.values())
    slowest, fastest = min(links, key=lambda link: links[link]), max(links, key=lambda link: links[link])
    differ = max(1 - links[slowest] / usual, links[fastest] / usual - 1)
    prefix = f"{kind[1:]}: " if kind else ""
    if len(links) == 1:
        return f"{prefix}one pair was measured, {rate(usual)}: there is no other pair to compare it with"
    if differ <= EQUAL_WITHIN:
        count = "both pairs" if len(links) == 2 else f"all {len(links)} pairs"
        return f"{prefix}{count} have equal bandwidth: {rate(usual)}, within {max(differ, 0.01):.0%}"
    low, high = (" → ".join(map(names.name, link)) for link in (slowest, fastest))
    return (
        f"{prefix}no pair is an outlier: median {rate(usual)}, from {rate(links[slowest])} ({low})"
        f" to {rate(links[fastest])} ({high})"
    )
