"""Sentences that describe the bottleneck: the nodes, ranks or pairs that are slower than the others."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
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
        findings = _findings(slow, names, kind)
        answers = {link: late[link] for link in links if link in late}
        if answers and not findings:
            slow = find_slow_links(answers, max(LATE_FACTOR, noise), LATE_S)
            findings = _findings(slow, names, kind, late=True)
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
        """Return whether both ranks of a link are on one node."""
        return self._node[link[0]] == self._node[link[1]]

    def name(self, rank: int) -> str:
        """Return a rank's name in messages, with its node if there are several."""
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


def _findings(slow: SlowLinks[int], names: RankNames, kind: str, *, late: bool = False) -> list[Finding]:
    """Return the slow nodes, ranks and pairs, or those of high latency, with their factors."""

    def compared(name: str, verb: str, speed: float, more: str = "") -> str:
        factor = times(slow.usual / speed)
        if late:
            span = f"({seconds(1 / speed)}, median {seconds(1 / slow.usual)})"
            return f"{name} has {factor} the latency of the median pair{kind} {span} at full bandwidth"
        span = f"({rate(speed)}, median {rate(slow.usual)})"
        return f"{name} {verb} {factor} slower than the median pair{kind}{more} {span}"

    both = " in both directions"
    found = []
    for ranks, verb, more, advice in (
        (slow.sends & slow.receives, "is", both, ": check its link and network card"),
        (
            slow.sends - slow.receives,
            "sends",
            "",
            ", and receives at full speed: check its card, cable and switch port",
        ),
        (
            slow.receives - slow.sends,
            "receives",
            "",
            ", and sends at full speed: check its card, cable and switch port",
        ),
    ):
        if late:
            advice = ": check for a busy processor, power saving and interrupt coalescing"
        for name, members in names.group(ranks, slow.links):
            speed = slow.of_ends(members)
            found.append((slow.usual / speed, compared(name, verb, speed, more) + advice))
    pairs: list[Finding] = []
    by_name = names.group_links(slow.pairs, slow.links)
    for (here, there), speed in by_name.items():
        if (back := by_name.get((there, here))) is None:
            advice = f", but {there} → {here} is not: check the route in this direction"
            text = compared(f"{here} → {there}", "is", speed)
        elif here < there:
            speed = min(speed, back)
            advice = ", and both ends are faster with others: check the path between"
            text = compared(f"{here} ↔ {there}", "is", speed, both)
        else:
            continue
        pairs.append((slow.usual / speed, text + (": a longer route" if late else advice)))
    if len(pairs) > MAX_PAIRS:
        factor, sentence = max(pairs)
        pairs = [(factor, f"{len(slow.pairs)} of {len(slow.links)} pairs are slow. The slowest: {sentence}")]
    return found + pairs


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
