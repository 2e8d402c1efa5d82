"""Checks of the preflight that compare the answers of all nodes. Pure functions."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from statistics import median
from typing import Any, NamedTuple

from hpcdist.host import machine
from hpcdist.host.machine import MB, Check, Level, failure, ok, warning
from hpcdist.slurm.preflight_probe import ProbeRequest

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
        for check_node in (_software, _names, _gpus, _disk, _infiniband, _interface, _resources):
            found += [replace(check, node=node) for check in check_node(request, node, answer)]
    for check_all in (_unlike_others, _port_in_use, _blocked, _stalled, _slow, _skewed):
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
        names = _listed(check.node for check in group)
        first = group[0]
        fix = first.fix.replace(f" on {first.node}", " on each of them")
        found.append(replace(first, node="", text=f"on {where} ({names}): {first.text}", fix=fix))
    return found


def _versions(request: ProbeRequest, answers: Answers) -> Iterator[Check]:
    """Report nodes whose versions differ from the majority, or from the first node if there is no majority."""
    levels: dict[str, Level] = dict.fromkeys(("python", "hpcdist", "source", "torch"), "failure")
    levels["nccl"] = "failure" if request.backend == "nccl" else "note"
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
        yield Check(name="gpu", level="failure" if request.backend == "nccl" else "warning", text=text, fix=fix)
    for gpu in answer["gpus"]:
        for check in machine.gpu_checks(gpu):
            yield replace(check, name="gpu", text=f"{check.name} {check.text}")


def _disk(request: ProbeRequest, node: str, answer: Mapping[str, Any]) -> Iterator[Check]:
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


def _infiniband(request: ProbeRequest, node: str, answer: Mapping[str, Any]) -> Iterator[Check]:
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
        yield from (
            replace(check, name="infiniband") for check in machine.locked_memory_checks(answer["locked_memory"])
        )
        return
    yield warning("infiniband", text, fix)


def _interface(request: ProbeRequest, node: str, answer: Mapping[str, Any]) -> Iterator[Check]:
    """Report a much faster interface than the one of the nodes' names, which ranks use."""
    up = [card for card in answer.get("interfaces", ()) if card["up"] and card["speed_mbit"]]
    used = [card for card in up if card["address"] in answer["network"]["addresses"]]
    if not used:
        return
    own, best = used[0], max(up, key=lambda card: int(card["speed_mbit"]))
    if best["speed_mbit"] >= 4 * own["speed_mbit"]:
        text = f"the nodes' names resolve to {own['name']} ({own['speed_mbit']:,} Mbit/s), while {best['name']}"
        text += f" ({best['speed_mbit']:,} Mbit/s) is up"
        fix = f"cluster.env.NCCL_SOCKET_IFNAME={best['name']} cluster.env.GLOO_SOCKET_IFNAME={best['name']},"
        fix += " if it reaches all nodes"
        level: Level = "note" if answer.get("infiniband") and request.backend == "nccl" else "warning"
        yield Check(name="interface", level=level, text=text, fix=fix)


def _resources(request: ProbeRequest, node: str, answer: Mapping[str, Any]) -> Iterator[Check]:
    shm, tmp, cores = answer["shm"], answer["tmp"], answer.get("cores")
    if "free" in shm and (request.num_workers or request.backend == "nccl"):
        yield from machine.shm_checks(shm["free"])
    if tmp.get("free", LITTLE_TMP_BYTES) < LITTLE_TMP_BYTES:
        text = f"{tmp['free'] / MB:,.0f} MB are free in {tmp['folder']}"
        yield warning("temporary files", text, "free space, or set cluster.env.TMPDIR")
    if request.num_workers and cores and request.tasks_per_node * (request.num_workers + 1) > 2 * cores:
        text = f"{request.tasks_per_node} ranks with {request.num_workers} data workers each share {cores} cores"
        yield warning("cores", text, "raise cluster.cpus_per_task, or lower data.num_workers")


def _unlike_others(request: ProbeRequest, answers: Answers) -> Iterator[Check]:
    """Report nodes that are slower or have fewer InfiniBand ports than the others."""
    speeds = {
        node: found["bytes_s"] for node, answer in answers.items() if "bytes_s" in (found := answer["checkpoints"])
    }
    for node, speed in speeds.items():
        others = median([other for name, other in speeds.items() if name != node]) if len(speeds) > 2 else 0
        if speed * SLOW_WRITE < others and speed < SLOW_WRITE_BYTES_S:
            text = f"writes {speed / MB:.1f} MB/s to {request.checkpoint_folder}, the other nodes"
            yield warning("disk", f"{text} {others / MB:,.0f} MB/s", f"check the mount on {node}", node=node)
    if request.backend == "nccl":
        ports = {node: len(answer.get("infiniband", {}).get("ports", ())) for node, answer in answers.items()}
        usual = _usual_value(ports.values())
        for node, count in ports.items():
            if count < usual:
                text = f"has {count} active InfiniBand ports, most nodes have {usual}"
                fix = f"see `ibstat` on {node}, or exclude it (cluster.exclude={node})"
                yield warning("infiniband", text, fix, node=node)


# The network between nodes: blocked connections, slow links, clock offsets.
#
# A node is reported if most of its pairs are affected, otherwise the pair is. Differences between nodes must be large,
# and values that suffice for training are not reported however much they differ.

#: A node or pair is slow if others are better by this factor and it is worse than the absolute value, because
#: differences between sufficient values do not matter.
SLOW, SLOW_BYTES_S = 4, 125 * MB
#: Slow enough to be a failure.
CRAWLING = 10
#: A single slow pair is reported only below the rate of a 100 Mbit/s link.
SLOW_PAIR_BYTES_S = 12.5 * MB
#: A lease is renewed every 10 s and stale after 60 s by the reader's clock, so a live run could be considered dead.
FATAL_SKEW_S = 30.0
_SHOWN = 4


class _Blamed(NamedTuple):
    """A node to which most of its pairs with a problem are attributed."""

    node: str
    end: int  #: 0 if the problem is in its connections to others, 1 in those from others
    ways: list[Pair]  #: the affected ones
    is_everyone: bool  #: whether all of its connections of this direction are affected


def _peers(answers: Answers) -> dict[Pair, Mapping[str, Any]]:
    return {(node, to): peer for node, answer in answers.items() for to, peer in answer["network"]["peers"].items()}


def _blame(ways: Iterable[Pair], bad: Iterable[Pair]) -> tuple[list[_Blamed], list[Pair]]:
    """Attribute bad connections to the nodes of which most are bad, the worst first; return also the other bad ones."""
    left, bad, found = list(ways), list(bad), []
    nodes = dict.fromkeys(node for way in left for node in way)
    while bad:
        total, affected = (Counter((end, way[end]) for way in some for end in (1, 0)) for some in (left, bad))
        end, node = max(affected, key=lambda it: (affected[it] / total[it], affected[it]))
        is_single = affected[end, node] < 2 and len(nodes) > 2
        if affected[end, node] <= 0.5 * total[end, node] or is_single:
            break
        own = [way for way in bad if way[end] == node]
        found.append(_Blamed(node, end, own, len(own) == total[end, node]))
        left, bad = ([way for way in some if node not in way] for some in (left, bad))
    return found, bad


def _port_in_use(request: ProbeRequest, answers: Answers) -> Iterator[Check]:
    for node, answer in answers.items():
        found = answer["network"]
        if problem := found.get("port_problem"):
            yield Check(
                name="port",
                # Only rank 0 listens on it.
                level="failure" if node == request.nodes[0] else "warning",
                text=f"port {request.port} is in use: {found.get('listener') or problem}",
                fix=f"end that program on {node} (`ss -ltnp 'sport = :{request.port}'`), or start the run again:"
                " each attempt uses another port",
                node=node,
            )


def _blocked(request: ProbeRequest, answers: Answers) -> Iterator[Check]:
    #: Kind (`Peer.status`, or `ephemeral`) and detail of each problem; None without one.
    ways: dict[Pair, tuple[str, str] | None] = {}
    for way, peer in _peers(answers).items():
        if way[1] not in answers or answers[way[1]]["network"].get("port_problem"):
            continue  # reported by _port_in_use
        if peer["status"] != "ok":
            ways[way] = (peer["status"], peer.get("detail", ""))
        else:
            ways[way] = ("ephemeral", peer["ephemeral"]) if peer.get("ephemeral") else None
    # A node that answers some of the others is only busy.
    mute = {way for way, problem in ways.items() if problem is not None and problem[0] == "mute"}
    answering = {target for source, target in ways if (source, target) not in mute}
    ways = {way: problem for way, problem in ways.items() if way not in mute or way[1] not in answering}
    bad = {way: problem for way, problem in ways.items() if problem is not None}
    nodes, pairs = _blame(ways, bad)
    for found in nodes:
        kind, detail = bad[found.ways[0]]
        cause, fix = _describe(request, kind, detail, found.node)
        others = "" if found.is_everyone and len(found.ways) > 1 else _listed(way[1 - found.end] for way in found.ways)
        if kind == "ephemeral":
            text = cause
        elif found.end == 1:
            text = f"{others or 'no other node'} {'cannot' if others else 'can'} reach it: {cause}"
        else:
            text = f"it cannot reach {others or 'any other node'}: {cause}"
        name = "names" if kind == "unresolved" else "port"
        yield failure(name, text, fix, node=found.node)
    for source, target in pairs[:_SHOWN]:
        more = f" (and {len(pairs) - _SHOWN} more pairs)" if len(pairs) > _SHOWN else ""
        cause, fix = _describe(request, *bad[source, target], target)
        yield failure("port", f"{source} cannot reach {target}, though others can: {cause}{more}", fix)


def _describe(request: ProbeRequest, kind: str, detail: str, node: str) -> tuple[str, str]:
    port = f"port {request.port}"
    firewall = (
        "open all TCP ports from 20480 on between the nodes, or at least 20480-32760 and"
        f" net.ipv4.ip_local_port_range (on {node}: `nft list ruleset`, `iptables -S`)"
    )
    how = {"silent": "packets to it are dropped", "refused": "connections are refused"}
    if kind == "ephemeral":
        which = "ports of the ephemeral range, which gloo, NCCL and RPC use, are not"
        return f"{port} is open, but {which}: {how.get(detail, detail)}", firewall
    if kind == "unresolved":
        return f"its name cannot be looked up ({detail})", "add it to the DNS, or to /etc/hosts on every node"
    if kind in ("stranger", "mute"):
        fix = f"identify the program (`ss -ltnp 'sport = :{request.port}'`) and check the nodes' names"
        return f"on {port} answers {detail}", fix
    if kind == "absent":
        why = "connections are refused in both directions, or it started later"
        return f"it did not connect within {request.deadline_s:g} s: {why}", firewall
    return f"{port} is blocked: {how.get(kind, detail)}", firewall


def _listed(names: Iterable[str]) -> str:
    """Return names in the form `n1, n2, n3, n4 and 12 more`."""
    found = list(names)
    return ", ".join(found[:_SHOWN]) + (f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else "")


def _blame_pairs(pairs: Collection[Pair], bad: Collection[Pair]) -> tuple[list[str], list[Pair]]:
    """Attribute bad pairs, which have no direction, to nodes; of two nodes it is unknown which one is the cause."""
    if len({node for pair in pairs for node in pair}) < 3:
        return [], list(bad)
    nodes, left = _blame(
        *([way for one, other in some for way in ((one, other), (other, one))] for some in (pairs, bad))
    )
    return [found.node for found in nodes], [pair for pair in left if pair in bad]


def _stalled(request: ProbeRequest, answers: Answers) -> Iterator[Check]:
    stalled: dict[Pair, bool] = {}
    for (source, target), peer in _peers(answers).items():
        if peer["status"] == "ok":
            pair = (min(source, target), max(source, target))
            stalled[pair] = stalled.get(pair, False) or peer.get("stalled", False)
    text = "small messages arrive, large ones do not"
    fix = "compare the MTUs along the path (`ip link`; `ping -M do -s 1472 NODE`, 8972 for jumbo frames)"
    nodes, pairs = _blame_pairs(stalled, [pair for pair, is_stalled in stalled.items() if is_stalled])
    for node in nodes:
        yield failure("network", f"{text} on the way to or from it", fix, node=node)
    for one, other in pairs[:_SHOWN]:
        yield failure("network", f"{one} – {other}: {text}", fix)


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
    nodes, _ = _blame_pairs(rates, slow)
    healthy = {pair: rate for pair, rate in rates.items() if not {*nodes} & {*pair}}
    usual = median(healthy.values() or [usual])
    for node in nodes:
        own = median(rates[pair] for pair in slow if node in pair)
        yield Check(
            name="network",
            level="failure" if own * CRAWLING <= usual else "warning",
            text=f"{own / MB:,.1f} MB/s to and from it, {usual / MB:,.0f} MB/s between the other nodes",
            fix=f"check its cable, port and speed (`ethtool`), or exclude it (cluster.exclude={node})",
            node=node,
        )
    for rate, (one, other) in sorted((rate, pair) for pair, rate in healthy.items())[:_SHOWN]:
        alone = rate / len(answers[one]["network"]["peers"])
        usually = f"{usual / MB:,.0f} MB/s in the median pair" if len(rates) > 1 else "too slow for training"
        if alone < SLOW_PAIR_BYTES_S and (len(rates) == 1 or rate * CRAWLING < usual):
            text = f"{alone / MB:,.1f} MB/s between {one} and {other}, {usually}"
            yield warning("network", text, "check the switches and routes between them")


def _rates(answers: Answers) -> dict[Pair, float]:
    """Return bytes per second of a node's exchange with all peers at the same time, as far as the pair allows."""
    # A slow link of a node delays its data to all peers alike. A single slow pair is slower by the number of peers.
    rates: dict[Pair, float] = {}
    for (source, target), peer in _peers(answers).items():
        if "exchange_s" in peer:
            own, pair = answers[source]["network"], (min(source, target), max(source, target))
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
        fatal = abs(skew) >= FATAL_SKEW_S
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
