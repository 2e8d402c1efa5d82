"""Checks of the network between nodes: blocked connections, slow links, clock offsets. Pure functions.

A node is reported if most of its pairs are affected, otherwise the pair is. Each pair has one short measurement, so
differences must be large, and values that suffice for training are not reported however much they differ.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from statistics import mean, median
from typing import Any, NamedTuple

from hpcdist.host.machine import Check, Level
from hpcdist.host.machine_checks import MB, SKEW_S
from hpcdist.host.network import find_slow_links
from hpcdist.slurm.preflight.probe import Request

Answers = Mapping[str, Mapping[str, Any]]
Pair = tuple[str, str]

#: A node or pair is slow if others are better by this factor and it is worse than the absolute value, because
#: differences between sufficient values do not matter.
SLOW, SLOW_BYTES_S, SLOW_LATENCY_S = 4, 125 * MB, 5e-3
#: Slow enough to be a failure.
CRAWLING, CRAWLING_LATENCY_S = 10, 20e-3
#: A single pair has one measurement, so it is reported only below the rate of a 100 Mbit/s link.
SLOW_PAIR_BYTES_S = 12.5 * MB
#: A lease is renewed every 10 s and stale after 60 s by the reader's clock, so a live run could be considered dead.
FATAL_SKEW_S = 30.0
_SHOWN = 4


class _Problem(NamedTuple):
    """Why a node cannot reach another one."""

    kind: str  #: `Peer.status`, or `ephemeral`
    detail: str


def check_network(request: Request, answers: Answers) -> list[Check]:
    """Return the results about the network; the last one, of level `ok`, is a summary of the measurements."""
    blocked = list(_blocked(request, answers))
    return [
        *_port_in_use(request, answers),
        *_foreign_connections(request, answers),
        *blocked,
        *_stalled(answers),
        *_slow(answers),
        *_skewed(answers),
        _summary(request, answers),
    ]


def _port_in_use(request: Request, answers: Answers) -> Iterator[Check]:
    for node, answer in answers.items():
        if problem := answer["network"].get("port_problem"):
            who = answer["network"].get("listener") or problem
            yield Check(
                name="port",
                # Only rank 0 listens on it.
                level="failure" if node == request.nodes[0] else "warning",
                text=f"port {request.port} is in use: {who}",
                fix=f"end that program on {node} (`ss -ltnp 'sport = :{request.port}'`), or start the run again:"
                " each attempt uses another port",
                node=node,
            )


def _foreign_connections(request: Request, answers: Answers) -> Iterator[Check]:
    for node, answer in answers.items():
        if count := answer["network"].get("strangers"):
            text = f"{count:,} connections to port {request.port} came from other programs and were closed"
            yield Check(name="port", level="note", text=text, node=node)


def _blocked(request: Request, answers: Answers) -> Iterator[Check]:
    """Report nodes that others cannot reach, nodes that cannot reach others, and single pairs."""
    ways: dict[Pair, _Problem | None] = {}
    for source, answer in answers.items():
        for target, peer in answer["network"]["peers"].items():
            if target not in answers or answers[target]["network"].get("port_problem"):
                continue  # reported by _port_in_use
            if peer["status"] != "ok":
                ways[source, target] = _Problem(peer["status"], peer.get("detail", ""))
            else:
                ways[source, target] = _Problem("ephemeral", peer["ephemeral"]) if peer.get("ephemeral") else None
    # A node that answers some of the others is only busy.
    mute = {way for way, problem in ways.items() if problem is not None and problem.kind == "mute"}
    busy = {target for _, target in mute if any((way not in mute) and way[1] == target for way in ways)}
    ways = {way: problem for way, problem in ways.items() if way not in mute or way[1] not in busy}
    bad = {way: problem for way, problem in ways.items() if problem is not None}
    while bad:
        end, node = max(
            ((end, node) for end in (1, 0) for node in answers), key=lambda it: _share(it[1], it[0], ways, bad)
        )
        own = [way for way in bad if way[end] == node]
        if _share(node, end, ways, bad)[0] <= 0.5 or (len(own) < 2 and len(answers) > 2):
            break
        others = listed(way[1 - end] for way in own)
        everyone = len(own) == len([way for way in ways if way[end] == node])
        yield _cut_off(request, node, bad[own[0]], others if not everyone or len(own) == 1 else "", inward=end == 1)
        # Remaining pairs of a reported node are omitted.
        bad = {way: problem for way, problem in bad.items() if node not in way}
        ways = {way: problem for way, problem in ways.items() if node not in way}
    for (source, target), problem in list(bad.items())[:_SHOWN]:
        more = f" (and {len(bad) - _SHOWN} more pairs)" if len(bad) > _SHOWN else ""
        cause, fix = _describe(request, problem, target)
        text = f"{source} cannot reach {target}, though others can: {cause}{more}"
        yield Check(name="port", level="failure", text=text, fix=fix)


def _share(node: str, end: int, ways: Collection[Pair], bad: Collection[Pair]) -> tuple[float, int]:
    total = sum(way[end] == node for way in ways)
    count = sum(way[end] == node for way in bad)
    return (count / total if total else 0.0), count


def _cut_off(request: Request, node: str, problem: _Problem, others: str, *, inward: bool) -> Check:
    cause, fix = _describe(request, problem, node)
    name = "names" if problem.kind == "unresolved" else "port"
    if problem.kind == "ephemeral":
        text = cause
    elif inward:
        text = f"{others or 'no other node'} {'cannot' if others else 'can'} reach it: {cause}"
    else:
        text = f"it cannot reach {others or 'any other node'}: {cause}"
    return Check(name=name, level="failure", text=text, fix=fix, node=node)


def _describe(request: Request, problem: _Problem, node: str) -> tuple[str, str]:
    """Return the problem of a connection to or from a node, and the fix."""
    kind, detail = problem
    port = f"port {request.port}"
    firewall = (
        "open all TCP ports from 20480 on between the nodes, or at least 20480-32760 and"
        f" net.ipv4.ip_local_port_range (on {node}: `nft list ruleset`, `iptables -S`)"
    )
    how = {"silent": "packets to it are dropped", "refused": "connections are refused"}
    if kind == "ephemeral":
        why = how.get(detail, detail)
        return (
            f"{port} is open, but ports of the ephemeral range, which gloo, NCCL and RPC use, are not: {why}",
            firewall,
        )
    if kind == "unresolved":
        return f"its name cannot be looked up ({detail})", "add it to the DNS, or to /etc/hosts on every node"
    if kind in ("stranger", "mute"):
        fix = f"identify the program (`ss -ltnp 'sport = :{request.port}'`) and check the nodes' names"
        return f"on {port} answers {detail}", fix
    if kind == "absent":
        return f"it did not connect within {request.deadline_s:g} s, although it answered later", firewall
    return f"{port} is blocked: {how.get(kind, detail)}", firewall


def listed(names: Iterable[str]) -> str:
    """Return names in the form `n1, n2, n3, n4 and 12 more`."""
    found = list(names)
    return ", ".join(found[:_SHOWN]) + (f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else "")


def _measured(answers: Answers, *keys: str) -> dict[Pair, list[float]]:
    """Return measurements by pair of nodes."""
    return {
        (source, target): [peer[key] for key in keys]
        for source, answer in answers.items()
        for target, peer in answer["network"]["peers"].items()
        if all(key in peer for key in keys)
    }


def _stalled(answers: Answers) -> Iterator[Check]:
    pairs: dict[Pair, float] = {}
    for source, answer in answers.items():
        for target, peer in answer["network"]["peers"].items():
            if peer["status"] == "ok":
                pair = (min(source, target), max(source, target))
                pairs[pair] = max(pairs.get(pair, 0.0), float(peer.get("stalled", False)))
    text = "small messages arrive, large ones do not"
    fix = "compare the MTUs along the path (`ip link`; `ping -M do -s 1472 NODE`, 8972 for jumbo frames)"
    while any(pairs.values()):
        nodes = sorted({node for pair in pairs for node in pair})
        share = {node: mean(stalled for pair, stalled in pairs.items() if node in pair) for node in nodes}
        worst = max(share, key=lambda node: share[node])
        if share[worst] <= 0.5 or len(nodes) == 2:
            for one, other in [pair for pair, stuck in pairs.items() if stuck][:_SHOWN]:
                yield Check(name="network", level="failure", text=f"{one} – {other}: {text}", fix=fix)
            return
        yield Check(name="network", level="failure", text=f"{text} on the way to or from it", fix=fix, node=worst)
        pairs = {pair: stalled for pair, stalled in pairs.items() if worst not in pair}


def _slow(answers: Answers) -> Iterator[Check]:
    rates = _slower_rates(answers)
    # The inverse of a latency is a speed: lower is worse, as for rates.
    speeds = {pair: 1 / latency_s for pair, (latency_s,) in _measured(answers, "latency_s").items()}
    fix = "check its cable, port and speed (`ethtool`), or exclude it (cluster.exclude={node})"
    named = set()
    for own, usual, node in _slow_nodes(rates):
        if own < SLOW_BYTES_S:
            named.add(node)
            text = f"{own / MB:,.1f} MB/s to and from it, {usual / MB:,.0f} MB/s between the other nodes"
            level: Level = "failure" if own * CRAWLING <= usual else "warning"
            yield Check(name="network", level=level, text=text, fix=fix.format(node=node), node=node)
    for own, usual, node in _slow_nodes(speeds):
        if node not in named and 1 / own > SLOW_LATENCY_S:
            text = f"{1e3 / own:,.1f} ms round trip, {1e3 / usual:,.2f} ms between the other nodes"
            level = "failure" if own * CRAWLING <= usual and 1 / own > CRAWLING_LATENCY_S else "warning"
            yield Check(name="network", level=level, text=text, fix=fix.format(node=node), node=node)
    yield from _slow_pairs({pair: rate for pair, rate in rates.items() if not named & set(pair)})


def _slow_nodes(speeds: Mapping[Pair, float]) -> list[tuple[float, float, str]]:
    """Return the slow nodes with the median speeds of their pairs and of the others, the slowest first.

    `find_slow_links` finds the nodes that are slow with all partners. Nodes behind a slow uplink are fast among
    themselves, so nodes whose median pair is slower than the median of the pairs without them are added one by one.
    """
    slow = find_slow_links(_both_ways(speeds), SLOW)
    found = [(slow.of_ends([node]), slow.usual, node) for node in slow.sends]
    left = {pair: speed for pair, speed in speeds.items() if not slow.sends & set(pair)}
    while True:
        slower = []
        for node in {node for pair in left for node in pair}:
            own = median(speed for pair, speed in left.items() if node in pair)
            others = [speed for pair, speed in left.items() if node not in pair]
            if others and own * SLOW < median(others):
                slower.append((own / median(others), own, median(others), node))
        if not slower:
            return sorted(found)
        _, own, usual, worst = min(slower)
        found.append((own, usual, worst))
        left = {pair: speed for pair, speed in left.items() if worst not in pair}


def _slow_pairs(rates: Mapping[Pair, float]) -> Iterator[Check]:
    if not rates:
        return
    usual = median(rates.values())
    usually = f"{usual / MB:,.0f} MB/s in the median pair" if len(rates) > 1 else "too slow for training"
    for rate, (one, other) in sorted((rate, pair) for pair, rate in rates.items())[:_SHOWN]:
        if rate < SLOW_PAIR_BYTES_S and (len(rates) == 1 or rate * CRAWLING < usual):
            text = f"{rate / MB:,.1f} MB/s between {one} and {other}, {usually}"
            yield Check(name="network", level="warning", text=text, fix="check the switches and routes between them")


def _slower_rates(answers: Answers) -> dict[Pair, float]:
    """Return the lower one of a pair's rates in both directions."""
    return {pair: min(both) for pair, both in _measured(answers, "sent_bytes_s", "received_bytes_s").items()}


def _both_ways(values: Mapping[Pair, float]) -> dict[Pair, float]:
    return {**values, **{(other, one): value for (one, other), value in values.items()}}


def _skewed(answers: Answers) -> Iterator[Check]:
    """Compare each node's clock with the median of its peers' clocks."""
    skews = {}
    for node, answer in answers.items():
        offsets = [peer["offset_s"] for peer in answer["network"]["peers"].values() if "offset_s" in peer]
        if offsets:
            skews[node] = -median([*offsets, 0.0]) if len(offsets) > 1 else -offsets[0]
    for node, skew in skews.items():
        # With two nodes, the wrong clock is unknown; only one of them is reported.
        if abs(skew) < SKEW_S or (len(skews) == 2 and node == next(iter(skews))):
            continue
        fatal = abs(skew) >= FATAL_SKEW_S
        why = "a live run could be considered dead" if fatal else "logs and metrics of the nodes cannot be aligned"
        yield Check(
            name="clock",
            level="failure" if fatal else "warning",
            text=f"its clock is {abs(skew):,.1f} s {'ahead of' if skew > 0 else 'behind'} the others: {why}",
            fix=f"see `chronyc tracking` or `timedatectl` on {node}",
            node=node,
        )


def _summary(request: Request, answers: Answers) -> Check:
    peers = [peer for answer in answers.values() for peer in answer["network"]["peers"].values()]
    num_ways = sum(peer["status"] == "ok" for peer in peers)
    text = f"{len(answers)} of {len(request.nodes)} nodes answered, {num_ways} of {len(peers)} connections work"
    rates = sorted(_slower_rates(answers).values())
    delays = [value for (value,) in _measured(answers, "latency_s").values()]
    if rates:
        text += f"; {median(rates) / MB:,.0f} MB/s in the median pair, {rates[0] / MB:,.0f} in the slowest"
        text += f", {median(delays) * 1e3:.2f} ms round trip"
    seconds = max((answer.get("seconds", 0.0) for answer in answers.values()), default=0.0)
    return Check(name="preflight", level="ok", text=f"{text}; took {seconds:.1f} s")
