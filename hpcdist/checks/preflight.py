"""Judgement of the answers of all nodes of a job, for the preflight and `hpcdist doctor RUN`. Pure functions."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from hpcdist.checks import node_facts, node_links
from hpcdist.checks.node_facts import MB, NO_DISK_BYTES
from hpcdist.checks.node_links import SHOWN
from hpcdist.errors import few
from hpcdist.host.check_result import LEVELS, Check, Level, failure, ok, warning

Answers = Mapping[str, Mapping[str, Any]]

#: Names of the checks in the order of the report within a level: causes before consequences.
ORDER = (
    *("answer", "run folder", "names", "group", "port", "version", "driver", "gpu", "disk", "network", "processor"),
    *("clock", "shm", "preflight"),
)
#: Above this, times of logs, metrics and files of two machines cannot be compared.
SKEW_S = 2.0
#: A lease is renewed every 10 s and stale after 60 s by the reader's clock.
FATAL_SKEW_S = 30.0
#: Number of equal results that are merged, if more than half of the nodes share them.
_MIN_MERGED = 2


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What the ranks of a run need of its nodes, and how the nodes were asked."""

    nodes: tuple[str, ...]  #: all nodes by their Slurm names, in the order of the run
    run_folder: str
    checkpoint_bytes: int | None = None  #: size of the newest checkpoint, None without one
    gpus_per_node: int = 0  #: GPUs that ranks need on each node
    backend: str = "gloo"  #: backend of the ranks
    join_s: float = 0.0  #: time for the nodes to join a group; 0 if they were not asked to


def check_nodes(needs: Needs, answers: Answers, asked_at: float, answered_at: float) -> list[Check]:
    """Return all results, the worst first, causes before consequences; the last one, of level `ok`, is a summary.

    `asked_at` and `answered_at` are times by the clock of this host.
    """
    ours = {node: answers[node] for node in needs.nodes if node in answers}
    found = []
    for node in needs.nodes:
        if node not in answers:
            fix = f"inspect the node: `scontrol show node {node}`, `srun -w {node} hostname`"
            found.append(failure("answer", "its preflight did not answer", fix, node=node))
    found += _versions(needs, ours)
    for node, answer in ours.items():
        for check_node in (_software, _names, _gpus, _disk):
            found += [replace(check, node=node) for check in check_node(needs, node, answer)]
        found += _clock(node, answer, asked_at, answered_at)
    found += _loopback(needs, ours)
    if needs.join_s:
        found += _group(needs, ours)
    merged = [*_merge_nodes(found, len(needs.nodes)), _summary(needs, ours)]
    return sorted(merged, key=lambda check: (-LEVELS.index(check.level), ORDER.index(check.name)))


def _merge_nodes(checks: Iterable[Check], num_nodes: int) -> list[Check]:
    """Merge results that more than half of the nodes share, apart from numbers, into one result without a node."""
    alike: dict[tuple[str, str, str], list[Check]] = {}
    for check in checks:
        # Without its own name and numbers.
        text = re.sub(r"\d+([.,]\d+)*", "#", check.text.replace(check.node or "\0", "\0"))
        alike.setdefault((check.name, check.level, text), []).append(check)
    merged = []
    for group in alike.values():
        is_shared = len(group) >= _MIN_MERGED and len(group) * 2 > num_nodes
        first = group[0]
        if not is_shared or not first.node:
            merged += group
            continue
        where = f"{len(group)} of {num_nodes} nodes"
        if len(group) == num_nodes:
            where = f"all {num_nodes} nodes"
        names = few([check.node for check in group], SHOWN)
        fix = first.fix.replace(f" on {first.node}", " on each of them")
        merged.append(replace(first, node="", text=f"on {where} ({names}): {first.text}", fix=fix))
    return merged


def _versions(needs: Needs, answers: Answers) -> Iterator[Check]:
    """Report nodes whose versions differ from the majority, or from the first node if there is no majority."""
    levels: dict[str, Level] = dict.fromkeys(("python", "hpcdist", "source", "torch"), "failure")
    levels["nccl"] = "note" if needs.backend == "gloo" else "failure"
    levels["driver"] = "warning" if needs.gpus_per_node else "note"
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
            others = f"the other {num_usual} nodes have"
            if num_usual == 1:
                others = "the first node has"
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
    if not counted:
        return None
    value, _ = counted[0]
    return value


def _software(needs: Needs, node: str, answer: Mapping[str, Any]) -> Iterator[Check]:
    if not answer["witness"]:
        fix = f"mount the file system on {node}, or set runs_dir to one that all nodes share"
        yield failure("run folder", f"{needs.run_folder} is not visible there, or not the same one", fix)
    if "versions" not in answer:
        text = "its driver or Python's file system does not answer: versions and GPUs are unknown"
        fix = f"see `nvidia-smi` and `dmesg | tail` on {node}"
        level: Level = "failure" if needs.gpus_per_node else "warning"
        yield Check(name="driver", level=level, text=text, fix=fix)
    elif needs.gpus_per_node:
        yield from node_facts.driver_checks(answer["versions"])


def _names(needs: Needs, node: str, answer: Mapping[str, Any]) -> Iterator[Check]:
    for name, look in answer["lookups"].items():
        called = "its own name" if name == node else f"the name {name}"
        yield from node_facts.lookup_checks(called, look)


def _loopback(needs: Needs, answers: Answers) -> Iterator[Check]:
    """Report the first node, to which the others connect, if its own name is a loopback address there alone."""
    first = needs.nodes[0]
    looks = {node: answer["lookups"].get(first, {}) for node, answer in answers.items()}
    # Where all names are loopback addresses, all nodes are on one machine.
    if first in looks and not all(node_facts.is_loopback(look) for look in looks.values()):
        for check in node_facts.loopback_checks("its own name", looks[first]):
            yield replace(check, node=first)


def _gpus(needs: Needs, node: str, answer: Mapping[str, Any]) -> Iterator[Check]:
    if not needs.gpus_per_node or "gpus" not in answer:
        return
    num_usable = answer.get("visible_gpus", 0)
    if num_usable < needs.gpus_per_node:
        text = f"{num_usable} of {needs.gpus_per_node} GPUs are usable"
        if not answer["gpus"] and answer.get("gpu_device_files", 0):
            text += "; the driver fails or does not answer"
        fix = f"see `nvidia-smi` and `dmesg | grep NVRM` on {node}"
        level: Level = "warning" if needs.backend == "gloo" else "failure"
        yield Check(name="gpu", level=level, text=text, fix=fix)
    for gpu in answer["gpus"]:
        for check in node_facts.gpu_checks(gpu):
            yield replace(check, name="gpu", text=f"{check.name} {check.text}")


def _disk(needs: Needs, node: str, answer: Mapping[str, Any]) -> Iterator[Check]:
    if "free" in answer["shm"]:
        yield from node_facts.shm_checks(answer["shm"]["free"])
    if not answer["witness"]:
        return  # another folder than that of the checkpoints
    disk = answer["checkpoints"]
    problem = disk.get("error") or disk.get("write_error")
    if problem:
        where = disk["folder"]
        text = f"checkpoints cannot be written to {where}: {problem}"
        if disk.get("free", NO_DISK_BYTES) < NO_DISK_BYTES:
            text += f" ({disk['free'] / MB:,.0f} MB are free)"
        fix = f"free space (`df -h {where}`, `hpcdist runs`), or set runs_dir to another file system"
        yield failure("disk", text, fix)
    else:
        yield from node_facts.space_checks(disk, needs.checkpoint_bytes)


def _clock(node: str, answer: Mapping[str, Any], asked_at: float, answered_at: float) -> Iterator[Check]:
    """Report a node whose clock shows a time before the question or after the answers."""
    ahead, behind = answer["time"] - answered_at, asked_at - answer["time"]
    skew = max(ahead, behind)
    if skew < SKEW_S:
        return
    is_fatal = skew >= FATAL_SKEW_S
    direction = "ahead of" if ahead > behind else "behind"
    why = "a live run could be considered dead" if is_fatal else "logs and metrics of the nodes cannot be aligned"
    yield Check(
        name="clock",
        level="failure" if is_fatal else "warning",
        text=f"its clock is at least {skew:,.1f} s {direction} that of the host that asked: {why}",
        fix=f"see `chronyc tracking` or `timedatectl` on {node}",
        node=node,
    )


def _group(needs: Needs, answers: Answers) -> Iterator[Check]:
    """Report nodes that have not joined the group of all nodes, or are slow in it."""
    seen = {node: answer.get("group", {}) for node, answer in answers.items()}
    reasons = {group["not_imported"] for group in seen.values() if "not_imported" in group}
    if reasons:
        text = f"unknown, since not all nodes can import torch and ZeroMQ ({min(reasons)})"
        yield warning("network", text, "install hpcdist[train] where the ranks run, or set preflight=off")
        return
    absent = [node for node, group in seen.items() if not group.get("joined") and answers[node]["witness"]]
    if len(absent) > 1 and absent == list(needs.nodes[1:]):
        text = f"no other node could join it within {needs.join_s:g} s: {_reason(seen[absent[0]])}"
        yield failure("group", text, node_links.OPEN_PORTS, node=needs.nodes[0])
    else:
        for node in absent:
            text = f"it has not joined the group of all nodes within {needs.join_s:g} s: {_reason(seen[node])}"
            fix = f"see whether {node} imports torch and reaches {needs.nodes[0]}, or raise launch.init_timeout_s"
            yield failure("group", text, fix, node=node)
    if absent or len(answers) < len(needs.nodes):
        return  # the other nodes have waited for these
    blocked = list(node_links.connection_checks(seen))
    yield from blocked
    errors = [f"{node}: {group['error']}" for node, group in seen.items() if "error" in group]
    if errors and not blocked:
        text = f"the nodes are connected, but the transfers between them failed: {errors[0]}"
        fix = "if the nodes have several networks, set cluster.env.GLOO_SOCKET_IFNAME to an interface of a common one"
        yield failure("group", text, fix)
    yield from node_links.rate_checks(node_links.rates(seen))
    yield from node_links.processor_checks(seen)


def _reason(group: Mapping[str, Any]) -> str:
    return str(group.get("error", "its probe has ended without a message"))


def _summary(needs: Needs, answers: Answers) -> Check:
    text = f"{len(answers)} of {len(needs.nodes)} nodes answered"
    seen = {node: answer.get("group", {}) for node, answer in answers.items()}
    rates = node_links.rates(seen).values()
    if rates:
        usual, slowest = median(rates) / MB, min(rates) / MB
        text += f"; {len(rates)} links at {usual:,.0f} MB/s, the slowest at {slowest:,.0f}"
    return ok("preflight", text)
