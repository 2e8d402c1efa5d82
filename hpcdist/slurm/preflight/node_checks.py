"""Checks of the preflight that compare the answers of all nodes. Pure functions."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from statistics import mean, median
from typing import Any, NamedTuple

from hpcdist.host.machine import LEVELS, Check, Level
from hpcdist.host.machine_checks import (
    MB,
    NO_DISK_BYTES,
    SKEW_S,
    driver_checks,
    gpu_checks,
    locked_memory_checks,
    lookup_checks,
    loopback_checks,
    shm_checks,
    space_checks,
)
from hpcdist.host.network import find_slow_links
from hpcdist.slurm.preflight.probe import Request

Answers = Mapping[str, Mapping[str, Any]]
Pair = tuple[str, str]

#: Names of the checks in the order of the report within a level: causes before consequences.
ORDER = (
    *("answer", "run folder", "names", "port", "version", "driver", "gpu", "disk", "network", "clock"),
    *("infiniband", "interface", "shm", "cores", "temporary files", "preflight"),
)
LITTLE_TMP_BYTES = 100 * MB
#: A node is reported as slow if it is slower than the others by the factor and slower than the absolute speed.
SLOW_WRITE, SLOW_WRITE_BYTES_S = 10, 10 * MB


def check_nodes(request: Request, answers: Answers) -> list[Check]:
    """Return all results, the worst first, causes before consequences.

    A node without an answer is a failure. A result that most nodes share is reported once, without a `node`. The last
    result, of level `ok`, is a summary.
    """
    found = [
        Check(
            name="answer",
            level="failure",
            text="its preflight did not answer",
            fix=f"inspect the node: `scontrol show node {node}`, `srun -w {node} hostname`",
            node=node,
        )
        for node in request.nodes
        if node not in answers
    ]
    ours = {node: answers[node] for node in request.nodes if node in answers}
    found += check_versions(request, ours)
    for node, answer in ours.items():
        for check_node in (_run_folder, _names, _driver, _gpus, _disk, _infiniband, _interface, _memory, _cores):
            found += [replace(check, node=node) for check in check_node(request, node, answer)]
    found += _unlike_others(request, ours)
    found += check_network(request, ours)
    return in_order(merge_nodes(found, len(request.nodes)))


def in_order(checks: Iterable[Check]) -> list[Check]:
    """Return the checks with the worst levels first."""
    return sorted(checks, key=lambda check: (-LEVELS.index(check.level), ORDER.index(check.name)))


def merge_nodes(checks: Iterable[Check], num_nodes: int) -> list[Check]:
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
        names = listed(check.node for check in group)
        first = group[0]
        fix = first.fix.replace(f" on {first.node}", " on each of them")
        found.append(replace(first, node="", text=f"on {where} ({names}): {first.text}", fix=fix))
    return found


def check_versions(request: Request, answers: Answers) -> Iterator[Check]:
    """Report nodes whose versions differ from the majority, or from the first node if there is no majority."""
    for key, level in _version_levels(request):
        by_node = {
            node: str(answer["versions"].get(key, "")) for node, answer in answers.items() if "versions" in answer
        }
        if key == "source":  # other versions have other sources, so only nodes with the usual version are compared
            usual = usual_value(answers[node]["versions"].get("hpcdist") for node in by_node)
            by_node = {
                node: text for node, text in by_node.items() if answers[node]["versions"].get("hpcdist") == usual
            }
        usual = usual_value(by_node.values())
        num_usual = sum(text == usual for text in by_node.values())
        for node, text in by_node.items():
            if text == usual:
                continue
            name = {"source": "the code of hpcdist", "nccl": "NCCL", "cuda": "CUDA"}.get(key, key)
            others = "the first node has" if num_usual == 1 else f"the other {num_usual} nodes have"
            yield Check(
                name="version",
                level="warning" if key == "python" and _minor(text) == _minor(str(usual)) else level,
                text=f"{name} {text or 'is missing'}, {others} {usual or 'none'}",
                fix=f"install {name.removeprefix('the code of ')} as on the others on {node},"
                f" or exclude it (cluster.exclude={node})",
                node=node,
            )


def _version_levels(request: Request) -> tuple[tuple[str, Level], ...]:
    uses_gpus: Level = "failure" if request.backend == "nccl" else "note"
    drivers: Level = "warning" if request.gpus_per_node else "note"
    return (
        ("python", "failure"),
        ("hpcdist", "failure"),
        ("source", "failure"),
        ("torch", "failure"),
        ("nccl", uses_gpus),
        ("driver", drivers),
    )


def usual_value(values: Iterable[Any]) -> Any:
    """Return the most frequent value, the first of several; None if there are none."""
    counted = Counter(values).most_common(1)
    return counted[0][0] if counted else None


def _minor(version: str) -> list[str]:
    return version.split(".")[:2]


def _run_folder(request: Request, node: str, answer: Mapping[str, Any]) -> Iterator[Check]:
    if not answer["witness"]:
        yield Check(
            name="run folder",
            level="failure",
            text=f"{request.run_folder} is not visible there, or not the same one",
            fix=f"mount the file system on {node}, or set runs_dir to one that all nodes share",
        )


def _names(request: Request, node: str, answer: Mapping[str, Any]) -> Iterator[Check]:
    for name, look in answer["lookups"].items():
        own = "its own name" if name == node else f"the name {name}"
        yield from lookup_checks(own, look)
        # Nodes on one machine, and nodes that reach no others, may use a loopback address.
        elsewhere = any(not address.startswith("127.") for address in answer["network"]["addresses"])
        if name == node == request.nodes[0] and elsewhere:
            yield from loopback_checks(own, look)


def _driver(request: Request, node: str, answer: Mapping[str, Any]) -> Iterator[Check]:
    if "versions" not in answer:
        text = "its driver or Python's file system does not answer: versions and GPUs are unknown"
        fix = f"see `nvidia-smi` and `dmesg | tail` on {node}"
        yield Check(name="driver", level="failure" if request.gpus_per_node else "warning", text=text, fix=fix)
        return
    if request.gpus_per_node:
        yield from driver_checks(answer["versions"])


def _gpus(request: Request, node: str, answer: Mapping[str, Any]) -> Iterator[Check]:
    if not request.gpus_per_node or "gpus" not in answer:
        return
    seen, asked = answer.get("visible_gpus", 0), request.gpus_per_node
    if seen < asked:
        silent = not answer.get("gpus") and answer.get("gpu_device_files", 0)
        yield Check(
            name="gpu",
            level="failure" if request.backend == "nccl" else "warning",
            text=f"{seen} of {asked} GPUs are usable" + ("; the driver fails or does not answer" if silent else ""),
            fix=f"see `nvidia-smi` and `dmesg | grep NVRM` on {node}",
        )
    for gpu in answer.get("gpus", ()):
        for check in gpu_checks(gpu):
            yield replace(check, name="gpu", text=f"{check.name} {check.text}")


def _disk(request: Request, node: str, answer: Mapping[str, Any]) -> Iterator[Check]:
    if not answer["witness"]:
        return  # another folder than that of the checkpoints
    disk = answer["checkpoints"]
    if problem := disk.get("error") or disk.get("write_error"):
        where = disk["folder"]
        text = f"checkpoints cannot be written to {where}: {problem}"
        if disk.get("free", NO_DISK_BYTES) < NO_DISK_BYTES:
            text += f" ({disk['free'] / MB:,.0f} MB are free)"
        fix = f"free space (`df -h {where}`, `hpcdist runs`), or set runs_dir to another file system"
        yield Check(name="disk", level="failure", text=text, fix=fix)
        return
    yield from space_checks(disk, request.checkpoint_bytes)


def _infiniband(request: Request, node: str, answer: Mapping[str, Any]) -> Iterator[Check]:
    found = answer.get("infiniband")
    if not found or request.backend != "nccl":
        return
    ports = f"InfiniBand is active ({', '.join(found['ports'])})"
    if answer["variables"].get("NCCL_IB_DISABLE", "0") not in ("", "0"):
        text, fix = f"{ports}, but NCCL_IB_DISABLE={answer['variables']['NCCL_IB_DISABLE']}", "unset it in cluster.env"
    elif not found["device"]:
        text = f"{ports}, but /dev/infiniband is missing: NCCL will use sockets"
        fix = "pass /dev/infiniband into the container (container.extra_args), or load ib_uverbs on the node"
    elif not found["library"]:
        text = f"{ports}, but libibverbs cannot be loaded: NCCL will use sockets"
        fix = "install libibverbs1 and ibverbs-providers (rdma-core), also in the image"
    else:
        yield from (replace(check, name="infiniband") for check in locked_memory_checks(answer["locked_memory"]))
        return
    yield Check(name="infiniband", level="warning", text=text, fix=fix)


def _interface(request: Request, node: str, answer: Mapping[str, Any]) -> Iterator[Check]:
    """Report a much faster interface than the one of the nodes' names, which ranks use."""
    up = [card for card in answer.get("interfaces", ()) if card["up"] and card["speed_mbit"]]
    used = [card for card in up if card["address"] in answer["network"]["addresses"]]
    if not used:
        return
    own, best = used[0], max(up, key=lambda card: int(card["speed_mbit"]))
    if best["speed_mbit"] >= 4 * own["speed_mbit"]:
        yield Check(
            name="interface",
            level="note" if answer.get("infiniband") and request.backend == "nccl" else "warning",
            text=f"the nodes' names resolve to {own['name']} ({own['speed_mbit']:,} Mbit/s), while {best['name']}"
            f" ({best['speed_mbit']:,} Mbit/s) is up",
            fix=f"cluster.env.NCCL_SOCKET_IFNAME={best['name']} cluster.env.GLOO_SOCKET_IFNAME={best['name']},"
            " if it reaches all nodes",
        )


def _memory(request: Request, node: str, answer: Mapping[str, Any]) -> Iterator[Check]:
    shm, tmp = answer["shm"], answer["tmp"]
    if "free" in shm and (request.num_workers or request.backend == "nccl"):
        yield from shm_checks(shm["free"])
    if tmp.get("free", LITTLE_TMP_BYTES) < LITTLE_TMP_BYTES:
        text = f"{tmp['free'] / MB:,.0f} MB are free in {tmp['folder']}"
        yield Check(name="temporary files", level="warning", text=text, fix="free space, or set cluster.env.TMPDIR")


def _cores(request: Request, node: str, answer: Mapping[str, Any]) -> Iterator[Check]:
    cores, wanted = answer.get("cores"), request.tasks_per_node * (request.num_workers + 1)
    if request.num_workers and cores and wanted > 2 * cores:
        yield Check(
            name="cores",
            level="warning",
            text=f"{request.tasks_per_node} ranks with {request.num_workers} data workers each share {cores} cores",
            fix="raise cluster.cpus_per_task, or lower data.num_workers",
        )


def _unlike_others(request: Request, answers: Answers) -> Iterator[Check]:
    """Report nodes that are slower or have fewer InfiniBand ports than the others."""
    speeds = {
        node: found["bytes_s"] for node, answer in answers.items() if "bytes_s" in (found := answer["checkpoints"])
    }
    for node, speed in speeds.items():
        others = median([other for name, other in speeds.items() if name != node]) if len(speeds) > 2 else 0
        if speed * SLOW_WRITE < others and speed < SLOW_WRITE_BYTES_S:
            folder = request.checkpoint_folder
            text = f"writes {speed / MB:.1f} MB/s to {folder}, the other nodes {others / MB:,.0f} MB/s"
            yield Check(name="disk", level="warning", text=text, fix=f"check the mount on {node}", node=node)
    if request.backend == "nccl":
        ports = {node: len(answer.get("infiniband", {}).get("ports", ())) for node, answer in answers.items()}
        usual = usual_value(ports.values())
        for node, count in ports.items():
            if count < usual:
                text = f"has {count} active InfiniBand ports, most nodes have {usual}"
                fix = f"see `ibstat` on {node}, or exclude it (cluster.exclude={node})"
                yield Check(name="infiniband", level="warning", text=text, fix=fix, node=node)


# The network between nodes: blocked connections, slow links, clock offsets.
#
# A node is reported if most of its pairs are affected, otherwise the pair is. Each pair has one short measurement, so
# differences must be large, and values that suffice for training are not reported however much they differ.

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
    slow = find_slow_links({**speeds, **{(other, one): speed for (one, other), speed in speeds.items()}}, SLOW)
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
