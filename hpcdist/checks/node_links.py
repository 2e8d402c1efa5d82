"""Links between the nodes of a job: which ones are tried, and which nodes cause the bad ones. Pure functions.

Differences between nodes must be large, and values that suffice for training are not reported however much they differ.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from statistics import median
from typing import Any

from hpcdist.checks.node_facts import MB
from hpcdist.errors import few
from hpcdist.host.check_result import Check, Level, failure, warning

#: Source and target.
Link = tuple[str, str]
#: The observations of the nodes in the group, by node.
Seen = Mapping[str, Mapping[str, Any]]

#: Number of rings, unless there are fewer other nodes. The time of the check does not grow with the run.
MAX_RINGS = 4
#: Data of one transfer.
TRANSFER_BYTES = 2**20
#: A link or a processor is slow if others are better by this factor, and unfit from the second factor on.
SLOW, UNFIT = 4.0, 10.0
#: Links that are at least this fast are never slow.
SUFFICIENT_BYTES_S = 125 * MB
#: A pair of nodes has no others to compare with: its link is slow below the rate of one with 100 Mbit/s.
LITTLE_BYTES_S = 12.5 * MB
_PAIR = 2
#: Number of names in a sentence, and of single links that are reported.
SHOWN = 4

OPEN_PORTS = (
    "open all TCP ports from 20480 on between the nodes, or at least 20480-32760 and net.ipv4.ip_local_port_range"
    " (`nft list ruleset`, `iptables -S`)"
)


def shifts(num_nodes: int) -> list[int]:
    """Return by how many places each ring passes data on.

    The distances are spread evenly, because near nodes may share a switch.
    """
    others = num_nodes - 1
    count = min(MAX_RINGS, others)
    return [1 + number * others // count for number in range(count)]


def blame(links: Collection[Link], bad: Collection[Link]) -> tuple[list[str], list[Link]]:
    """Return the nodes that cause bad links, the worst first, and the bad links that no node explains.

    A node is blamed if all its links in one direction are bad, and there are at least two. A healthy node beside it has
    good links with others. Of two nodes it is unknown which one is the cause.
    """
    left, bad, blamed = set(links), set(bad), []
    while bad:
        counts = Counter(node for link in bad for node in link)
        worst_first = sorted(counts, key=lambda node: (-counts[node], node))
        culprit = next((node for node in worst_first if _is_culprit(node, left, bad)), None)
        if culprit is None:
            break
        blamed.append(culprit)
        left = {link for link in left if culprit not in link}
        bad = {link for link in bad if culprit not in link}
    return blamed, sorted(bad)


def _is_culprit(node: str, links: Collection[Link], bad: Collection[Link]) -> bool:
    for direction in (0, 1):
        links_of_node = [link for link in links if link[direction] == node]
        if len(links_of_node) > 1 and all(link in bad for link in links_of_node):
            return True
    return False


def connection_checks(seen: Seen) -> Iterator[Check]:
    """Report nodes that others cannot reach, or that cannot reach others."""
    tried: dict[Link, str] = {}
    for source, group in seen.items():
        for target, reason in group.get("connections", {}).items():
            tried[source, target] = reason
    reasons = {link: reason for link, reason in tried.items() if reason}
    nodes, left = blame(tried, reasons)
    for node in nodes:
        into = [link for link in reasons if link[1] == node]
        out_of = [link for link in reasons if link[0] == node]
        if len(into) >= len(out_of):
            sources = few([source for source, _ in into], SHOWN)
            reason = reasons[into[0]]
            yield failure("port", f"{sources} cannot reach it: {reason}", OPEN_PORTS, node=node)
        else:
            targets = few([target for _, target in out_of], SHOWN)
            reason = reasons[out_of[0]]
            yield failure("port", f"it cannot reach {targets}: {reason}", OPEN_PORTS, node=node)
    for source, target in left[:SHOWN]:
        reason = reasons[source, target]
        yield failure("port", f"{source} cannot reach {target}: {reason}", OPEN_PORTS)


def rates(seen: Seen) -> dict[Link, float]:
    """Return bytes per second of the transfers, by their source and target."""
    found = {}
    for target, group in seen.items():
        for source, seconds in group.get("received_s", {}).items():
            found[source, target] = TRANSFER_BYTES / seconds
    return found


def rate_checks(found: Mapping[Link, float]) -> Iterator[Check]:
    """Report nodes that send or receive slowly."""
    if not found:
        return
    ends = {node for link in found for node in link}
    # The usual rate is the median of each node's fastest link. Most links may be slow: those of nodes behind the same
    # uplink, or those with a slow node.
    fastest = [max(rate for link, rate in found.items() if node in link) for node in ends]
    usual = sorted(fastest)[len(fastest) // 2]
    slow = [link for link, rate in found.items() if rate * SLOW < usual and rate < SUFFICIENT_BYTES_S]
    slow_nodes, _ = blame(found, slow)
    for node in slow_nodes:
        rate_of_node = median(found[link] for link in slow if node in link)
        text = f"{rate_of_node / MB:,.1f} MB/s to or from it, {usual / MB:,.0f} MB/s between the other nodes"
        fix = (
            "check its cable, port and speed (`ethtool`) and the MTUs along the path (`ping -M do -s 1472 NODE`),"
            f" or exclude it (cluster.exclude={node})"
        )
        yield Check(name="network", level=_level(usual / rate_of_node), text=text, fix=fix, node=node)
    if len(ends) == _PAIR and usual < LITTLE_BYTES_S:
        first, second = sorted(ends)
        text = f"{usual / MB:,.1f} MB/s between {first} and {second}, too slow for training"
        fix = (
            "check their cables, ports and speeds (`ethtool`), and the MTUs along the path (`ping -M do -s 1472 NODE`)"
        )
        yield warning("network", text, fix)


def processor_checks(seen: Seen) -> Iterator[Check]:
    """Report nodes that compute slowly."""
    times = {node: float(group["compute_s"]) for node, group in seen.items() if "compute_s" in group}
    if not times:
        return
    ordered = sorted(times.values())
    usual = ordered[(len(ordered) - 1) // 2]
    for node, seconds in times.items():
        factor = seconds / usual
        if factor < SLOW:
            continue
        text = f"a computation on one core takes {factor:.1f} times as long as on the other nodes"
        fix = f"look for other processes (`top`), a CPU quota and a reduced clock (`cpupower frequency-info`) on {node}"
        yield Check(name="processor", level=_level(factor), text=text, fix=fix, node=node)


def _level(factor: float) -> Level:
    return "failure" if factor >= UNFIT else "warning"
