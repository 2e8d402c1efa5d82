"""Checks of the preflight that compare the answers of all nodes. Pure functions."""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from statistics import median
from typing import Any

from hpcdist.errors import few
from hpcdist.host import machine
from hpcdist.host.machine import MB, Check, Level, failure, ok, warning
from hpcdist.slurm.preflight_probe import ProbeRequest

Answers = Mapping[str, Mapping[str, Any]]
Pair = tuple[str, str]

#: Names of the checks in the order of the report within a level: causes before consequences.
ORDER = (
    *("answer", "run folder", "names", "port", "version", "driver", "gpu", "disk", "network", "clock", "shm"),
    "preflight",
)


def check_nodes(request: ProbeRequest, answers: Answers) -> list[Check]:
    """Return all results, the worst first, causes before consequences; the last one, of level `ok`, is a summary."""
    ours = {node: answers[node] for node in request.nodes if node in answers}
    found = []
    for node in request.nodes:
        if node not in answers:
            fix = f"inspect the node: `scontrol show node {node}`, `srun -w {node} hostname`"
            found.append(failure("answer", "its preflight did not answer", fix, node=node))
    found += _versions(request, ours)
    for node, answer in ours.items():
        for check_node in (_software, _names, _gpus, _disk):
            found += [replace(check, node=node) for check in check_node(request, node, answer)]
    for check_all in (_port_in_use, _blocked, _slow, _skewed):
        found += check_all(request, ours)
    merged = [*_merge_nodes(found, len(request.nodes)), _summary(request, ours)]
    return sorted(merged, key=lambda check: (-machine.LEVELS.index(check.level), ORDER.index(check.name)))


def _merge_nodes(checks: Iterable[Check], num_nodes: int) -> list[Check]:
    """Merge results that more than half of the nodes share, apart from numbers, into one result without a node."""
    alike: dict[tuple[str, str, str], list[Check]] = {}
    for check in checks:
        # Without its own name and numbers.
        text = re.sub(r"\d+([.,]\d+)*", "#", check.text.replace(check.node or "\0", "\0"))
        alike.setdefault((check.name, check.level, text), []).append(check)
    found = []
    for group in alike.values():
        if len(group) < 2 or len(group) * 2 <= num_nodes or not group[0].node:
            found += group
            continue
        where = f"all {num_nodes} nodes" if len(group) == num_nodes else f"{len(group)} of {num_nodes} nodes"
        names = few([check.node for check in group], _SHOWN)
        first = group[0]
        fix = first.fix.replace(f" on {first.node}", " on each of them")
        found.append(replace(first, node="", text=f"on {where} ({names}): {first.text}", fix=fix))
    return found


def _versions(request: ProbeRequest, answers: Answers) -> Iterator[Check]:
    """Report nodes whose versions differ from the majority, or from the first node if there is no majority."""
    levels: dict[str, Level] = dict.fromkeys(("python", "hpcdist", "source", "torch"), "failure")
    levels["nccl"] = "note" if request.backend == "gloo" else "failure"
    levels["driver"] = "warning" if request.gpus_per_node else "note"
    versions = {node: answer["versions"] for node, answer in answers.items() if "versions" in answer}
    for key, level in levels.items():
        by_node = {node: str(found.get(key, "")) for node, found in versions.items()}
        if key == "source":  # other versions have other sources, so only nodes with the usual version are compared
            usual = _usual_value(found.get("hpcdist") for found in versions.values())
            by_node = {node: text for node, text in by_node.items() if versions[node].get("hpcdist") == usual}
        usual = _usual_value(by_node.values())
        num_usual = sum(text == usual for text in by_node.values())
        for node, text in by_node.items():
            if text == usual:
                continue
            name = {"source": "the code of hpcdist", "nccl": "NCCL"}.get(key, key)
            others = "the first node has" if num_usual == 1 else f"the other {num_usual} nodes have"
            is_patch = key == "python" and text.split(".")[:2] == usual.split(".")[:2]
            yield Check(
                name="version",
                level="warning" if is_patch else level,
                text=f"{name} {text or 'is missing'}, {others} {usual or 'none'}",
                fix=f"install {name.removeprefix('the code of ')} as on the others on {node},"
                f" or exclude it (cluster.exclude={node})",
                node=node,
            )


def _usual_value(values: Iterable[Any]) -> Any:
    """Return the most frequent value, the first of several; None if there are none."""
    counted = Counter(values).most_common(1)
    return counted[0][0] if counted else None


def _software(request: ProbeRequest, node: str, answer: Mapping[str, Any]) -> Iterator[Check]:
    if not answer["witness"]:
        fix = f"mount the file system on {node}, or set runs_dir to one that all nodes share"
        yield failure("run folder", f"{request.run_folder} is not visible there, or not the same one", fix)
    if "versions" not in answer:
        text = "its driver or Python's file system does not answer: versions and GPUs are unknown"
        fix = f"see `nvidia-smi` and `dmesg | tail` on {node}"
        yield Check(name="driver", level="failure" if request.gpus_per_node else "warning", text=text, fix=fix)
    elif request.gpus_per_node:
        yield from machine.driver_checks(answer["versions"])


def _names(request: ProbeRequest, node: str, answer: Mapping[str, Any]) -> Iterator[Check]:
    for name, look in answer["lookups"].items():
        own = "its own name" if name == node else f"the name {name}"
        yield from machine.lookup_checks(own, look)
        # Nodes on one machine, and nodes that reach no others, may use a loopback address.
        elsewhere = any(not address.startswith("127.") for address in answer["network"]["addresses"])
        if name == node == request.nodes[0] and elsewhere:
            yield from machine.loopback_checks(own, look)


def _gpus(request: ProbeRequest, node: str, answer: Mapping[str, Any]) -> Iterator[Check]:
    if not request.gpus_per_node or "gpus" not in answer:
        return
    seen, asked = answer.get("visible_gpus", 0), request.gpus_per_node
    if seen < asked:
        silent = not answer["gpus"] and answer.get("gpu_device_files", 0)
        text = f"{seen} of {asked} GPUs are usable" + ("; the driver fails or does not answer" if silent else "")
        fix = f"see `nvidia-smi` and `dmesg | grep NVRM` on {node}"
        yield Check(name="gpu", level="warning" if request.backend == "gloo" else "failure", text=text, fix=fix)
    for gpu in answer["gpus"]:
        for check in machine.gpu_checks(gpu):
            yield replace(check, name="gpu", text=f"{check.name} {check.text}")


def _disk(request: ProbeRequest, node: str, answer: Mapping[str, Any]) -> Iterator[Check]:
    if "free" in answer["shm"]:
        yield from machine.shm_checks(answer["shm"]["free"])
    if not answer["witness"]:
        return  # another folder than that of the checkpoints
    disk = answer["checkpoints"]
    if problem := disk.get("error") or disk.get("write_error"):
        where = disk["folder"]
        text = f"checkpoints cannot be written to {where}: {problem}"
        if disk.get("free", machine.NO_DISK_BYTES) < machine.NO_DISK_BYTES:
            text += f" ({disk['free'] / MB:,.0f} MB are free)"
        fix = f"free space (`df -h {where}`, `hpcdist runs`), or set runs_dir to another file system"
        yield failure("disk", text, fix)
    else:
        yield from machine.space_checks(disk, request.checkpoint_bytes)


# The network between nodes: blocked connections, slow links, clock offsets.
#
# A node is reported if most of its pairs are affected. Differences between nodes must be large, and values that suffice
# for training are not reported however much they differ.

#: A node is slow if others are better by this factor and it is worse than the absolute value, because differences
#: between sufficient values do not matter.
SLOW, SLOW_BYTES_S = 4, 125 * MB
_SHOWN = 4


def _peers(answers: Answers) -> dict[Pair, Mapping[str, Any]]:
    return {(node, to): peer for node, answer in answers.items() for to, peer in answer["network"]["peers"].items()}


def _pair(way: Pair) -> Pair:
    return min(way), max(way)


def _blame(pairs: Collection[Pair], bad: Collection[Pair]) -> tuple[list[str], list[Pair]]:
    """Attribute bad pairs to the nodes of which most pairs are bad, the worst first; return also the other bad pairs.

    Of two nodes it is unknown which one is the cause.
    """
    left, bad, found = list(pairs), list(bad), []
    while bad:
        total, affected = (Counter(node for pair in some for node in pair) for some in (left, bad))
        node = max(affected, key=lambda it: (affected[it] / total[it], affected[it]))
        if affected[node] < 2 or affected[node] * 2 <= total[node]:
            break
        found.append(node)
        left, bad = ([pair for pair in some if node not in pair] for some in (left, bad))
    return found, bad


def _port_in_use(request: ProbeRequest, answers: Answers) -> Iterator[Check]:
    for node, answer in answers.items():
        if problem := answer["network"].get("port_problem"):
            yield Check(
                name="port",
                # Only rank 0 listens on it.
                level="failure" if node == request.nodes[0] else "warning",
                text=f"port {request.port} cannot be used: {problem}",
                fix=f"end the program on {node} that listens on it (`ss -ltnp 'sport = :{request.port}'`), or start the"
                " run again: each attempt uses another port",
                node=node,
            )


def _blocked(request: ProbeRequest, answers: Answers) -> Iterator[Check]:
    pairs, bad = set(), {}
    for way, peer in _peers(answers).items():
        if way[1] not in answers or answers[way[1]]["network"].get("port_problem"):
            continue  # reported by check_nodes or _port_in_use
        pairs.add(_pair(way))
        if peer["status"] not in ("ok", "busy"):
            bad[way] = peer
    nodes, left = _blame(pairs, sorted({_pair(way) for way in bad}))
    for node in nodes:
        into, out = ([way for way in bad if way[end] == node] for end in (1, 0))
        if len(into) >= len(out):
            where, peer = f"{few([source for source, _ in into], _SHOWN)} cannot reach it", bad[into[0]]
        else:
            where, peer = f"it cannot reach {few([target for _, target in out], _SHOWN)}", bad[out[0]]
        yield _unreachable(request, where, peer, node)
    for one, other in left[:_SHOWN]:
        source, target = (one, other) if (one, other) in bad else (other, one)
        yield _unreachable(request, f"{source} cannot reach {target}", bad[source, target], "")


def _unreachable(request: ProbeRequest, where: str, peer: Mapping[str, Any], node: str) -> Check:
    status, detail = peer["status"], peer.get("detail", "")
    if status == "unresolved":
        fix = "add the name to the DNS, or to /etc/hosts on every node"
        return failure("names", f"{where}: the name cannot be looked up ({detail})", fix, node=node)
    if status == "stranger":
        fix = f"identify the program (`ss -ltnp 'sport = :{request.port}'`) and check the nodes' names"
        return failure("port", f"{where}: on port {request.port} answers {detail}", fix, node=node)
    fix = (
        "open all TCP ports from 20480 on between the nodes, or at least 20480-32760 and"
        " net.ipv4.ip_local_port_range (`nft list ruleset`, `iptables -S`)"
    )
    if status == "ephemeral":
        text = f"{where} on ports of the ephemeral range, which gloo, NCCL and RPC use: {detail}"
        return failure("port", text, fix, node=node)
    detail = detail or f"no connection within {request.deadline_s:g} s"  # nobody listened, or it started later
    return failure("port", f"{where} on port {request.port}: {detail}", fix, node=node)


def _slow(request: ProbeRequest, answers: Answers) -> Iterator[Check]:
    rates = _rates(answers)
    if not rates:
        return
    # Most nodes may be fast with a few partners only: those behind the same uplink, or those that are not slow.
    fastest = [
        max(rate for pair, rate in rates.items() if node in pair) for node in {n for pair in rates for n in pair}
    ]
    usual = sorted(fastest)[len(fastest) // 2]
    slow = [pair for pair, rate in rates.items() if rate * SLOW < usual and rate < SLOW_BYTES_S]
    for node in _blame(rates, slow)[0]:
        own = median(rates[pair] for pair in slow if node in pair)
        yield Check(
            name="network",
            level="failure" if own * 10 <= usual else "warning",
            text=f"{own / MB:,.1f} MB/s to and from it, {usual / MB:,.0f} MB/s between the other nodes",
            fix="check its cable, port and speed (`ethtool`) and the MTUs along the path (`ping -M do -s 1472 NODE`),"
            f" or exclude it (cluster.exclude={node})",
            node=node,
        )
    # Two nodes have no others to compare with: the rate of a 100 Mbit/s link.
    if len(rates) == 1 and usual < 12.5 * MB:
        ((one, other),) = rates
        fix = (
            "check their cables, ports and speeds (`ethtool`), and the MTUs along the path (`ping -M do -s 1472 NODE`)"
        )
        yield warning("network", f"{usual / MB:,.1f} MB/s between {one} and {other}, too slow for training", fix)


def _rates(answers: Answers) -> dict[Pair, float]:
    """Return bytes per second of a node's exchange with all peers at the same time, as far as the pair allows."""
    # A slow link of a node delays its data to all peers alike. A single slow pair is slower by the number of peers.
    rates: dict[Pair, float] = {}
    for (source, target), peer in _peers(answers).items():
        if "exchange_s" in peer:
            own, pair = answers[source]["network"], _pair((source, target))
            rate = own["exchange_bytes"] * len(own["peers"]) / peer["exchange_s"]
            rates[pair] = min(rate, rates.get(pair, rate))
    return rates


def _skewed(request: ProbeRequest, answers: Answers) -> Iterator[Check]:
    """Compare each node's clock with the median of its peers' clocks."""
    skews = {}
    for node, answer in answers.items():
        offsets = [peer["offset_s"] for peer in answer["network"]["peers"].values() if "offset_s" in peer]
        if offsets:
            skews[node] = -median([*offsets, 0.0]) if len(offsets) > 1 else -offsets[0]
    for node, skew in skews.items():
        # With two nodes, the wrong clock is unknown; only one of them is reported.
        if abs(skew) < machine.SKEW_S or (len(skews) == 2 and node == next(iter(skews))):
            continue
        fatal = abs(skew) >= 30.0  # a lease is renewed every 10 s and stale after 60 s by the reader's clock
        why = "a live run could be considered dead" if fatal else "logs and metrics of the nodes cannot be aligned"
        yield Check(
            name="clock",
            level="failure" if fatal else "warning",
            text=f"its clock is {abs(skew):,.1f} s {'ahead of' if skew > 0 else 'behind'} the others: {why}",
            fix=f"see `chronyc tracking` or `timedatectl` on {node}",
            node=node,
        )


def _summary(request: ProbeRequest, answers: Answers) -> Check:
    peers = _peers(answers).values()
    num_ways = sum(peer["status"] == "ok" for peer in peers)
    text = f"{len(answers)} of {len(request.nodes)} nodes answered, {num_ways} of {len(peers)} connections work"
    if rates := _rates(answers).values():
        text += f"; exchange of all at {median(rates) / MB:,.0f} MB/s, the slowest pair at {min(rates) / MB:,.0f}"
    seconds = max((answer.get("seconds", 0.0) for answer in answers.values()), default=0.0)
    return ok("preflight", f"{text}; took {seconds:.1f} s")
