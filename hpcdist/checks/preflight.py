"""Judgement of the answers of all nodes of a job, for the preflight and `hpcdist doctor RUN`. Pure functions."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from hpcdist.checks import node_facts, node_links
from hpcdist.checks.node_facts import MB, NO_DISK_BYTES
from hpcdist.checks.node_links import OPEN_PORTS, SHOWN
from hpcdist.config.launch_schema import NVIDIA
from hpcdist.errors import few
from hpcdist.host.check_result import LEVELS, Check, Level, failure, note, ok, warning

#: By node: the output of its probe (`hpcdist/checks/node_probe.py`).
Answers = Mapping[str, Mapping[str, Any]]

#: Names of the checks in the order of the report within a level: causes before consequences.
ORDER = (
    "answer",
    "run folder",
    "names",
    "group",
    "port",
    "version",
    "driver",
    "gpu",
    "disk",
    "network",
    "processor",
    "clock",
    "shm",
    "preflight",
)
#: Above this, times of logs, metrics and files of two machines cannot be compared.
SKEW_S = 2.0
#: A lease is renewed every 10 s and stale after 60 s by the reader's clock.
FATAL_SKEW_S = 30.0
#: Number of equal results that are merged, if more than half of the nodes share them.
_MIN_MERGED = 2
#: Replaces the name of a node when results are compared; no text contains it.
_ANY_NODE = "\0"
_NUMBER = re.compile(r"\d+([.,]\d+)*")
#: Names of versions in texts, if they differ from their keys in the answers.
_SHOWN_VERSIONS = {"source": "the code of hpcdist", "nccl": "NCCL"}


@dataclass(frozen=True, kw_only=True)
class Needs:
    """The needs of the ranks of a run on its nodes, and how the nodes were asked."""

    nodes: tuple[str, ...]  #: all nodes by their Slurm names, in the order of the run
    run_folder: str
    checkpoint_bytes: int | None = None  #: size of the newest checkpoint, None without one
    gpus_per_node: int = 0  #: GPUs that ranks need on each node
    gpu_type: str = NVIDIA  #: torch's name of their type
    backend: str = "gloo"  #: backend of the ranks
    join_s: float = 0.0  #: time for the nodes to join a group; 0 if they were not asked to


def check_nodes(needs: Needs, answers: Answers, asked_at: float, answered_at: float) -> list[Check]:
    """Return all results, the worst first, causes before consequences; the last one, of level `ok`, is a summary.

    `asked_at` and `answered_at` are times by the clock of this host.
    """
    answers = {node: answers[node] for node in needs.nodes if node in answers}  # in the order of the run
    checks = []
    for node in needs.nodes:
        if node not in answers:
            fix = f"inspect the node: `scontrol show node {node}`, `srun -w {node} hostname`"
            checks.append(failure("answer", "its preflight did not answer", fix, node=node))
    checks += _versions(needs, answers)
    for node, answer in answers.items():
        for check_node in (_software, _names, _gpus, _disk):
            checks += [replace(check, node=node) for check in check_node(needs, node, answer)]
        checks += _clock(node, answer, asked_at, answered_at)
    checks += _loopback(needs, answers)
    if needs.join_s:
        checks += _group(needs, answers)
    merged = [*_merge_nodes(checks, len(needs.nodes)), _summary(needs, answers)]
    # The last level of LEVELS is the worst.
    return sorted(merged, key=lambda check: (-LEVELS.index(check.level), ORDER.index(check.name)))


def _merge_nodes(checks: Iterable[Check], num_nodes: int) -> list[Check]:
    """Merge results that more than half of the nodes share, apart from numbers, into one result without a node."""
    alike: dict[tuple[str, str, str], list[Check]] = {}
    for check in checks:
        pattern = check.text
        if check.node:
            pattern = pattern.replace(check.node, _ANY_NODE)
        pattern = _NUMBER.sub("#", pattern)
        alike.setdefault((check.name, check.level, pattern), []).append(check)
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
    """Report nodes with other versions than the majority, or than the first node if there is no majority."""
    versions = {node: answer["versions"] for node, answer in answers.items() if "versions" in answer}
    for key, level in _version_levels(needs).items():
        by_node = {node: str(node_versions.get(key, "")) for node, node_versions in versions.items()}
        if key == "source":  # other versions have other sources, so only nodes with the usual version are compared
            usual_release = _usual_value(node_versions.get("hpcdist") for node_versions in versions.values())
            by_node = {node: text for node, text in by_node.items() if versions[node].get("hpcdist") == usual_release}
        usual = _usual_value(by_node.values())
        num_usual = sum(text == usual for text in by_node.values())
        for node, text in by_node.items():
            if text == usual:
                continue
            node_level = level
            if key == "python" and _minor_version(text) == _minor_version(usual):
                node_level = "warning"
            yield _version_check(key, node_level, node, text, usual, num_usual)


def _version_levels(needs: Needs) -> dict[str, Level]:
    """Return the versions that are compared: the level of a difference by their key in the answers."""
    levels: dict[str, Level] = dict.fromkeys(("python", "hpcdist", "source", "torch"), "failure")
    levels["nccl"] = "failure"
    if needs.backend == "gloo":
        levels["nccl"] = "note"
    levels["driver"] = "note"
    if needs.gpus_per_node:
        levels["driver"] = "warning"
    return levels


def _version_check(key: str, level: Level, node: str, version: str, usual: str, num_usual: int) -> Check:
    """Report a version of a node (empty without one) that `num_usual` nodes do not have."""
    name = _SHOWN_VERSIONS.get(key, key)
    package = name.removeprefix("the code of ")
    others = f"the other {num_usual} nodes have"
    if num_usual == 1:
        others = "the first node has"
    text = f"{name} {version or 'is missing'}, {others} {usual or 'none'}"
    fix = f"install {package} as on the others on {node}, or exclude it (cluster.exclude={node})"
    return Check(name="version", level=level, text=text, fix=fix, node=node)


def _minor_version(version: str) -> list[str]:
    """Return `3.12` of `3.12.4`, as its parts."""
    major_and_minor = 2
    return version.split(".")[:major_and_minor]


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
        level: Level = "warning"
        if needs.gpus_per_node:
            level = "failure"
        yield Check(name="driver", level=level, text=text, fix=fix)
    elif needs.gpus_per_node:
        yield from node_facts.driver_checks(answer["versions"])


def _names(needs: Needs, node: str, answer: Mapping[str, Any]) -> Iterator[Check]:
    """Check the lookups of the first node's name and of this node's own, on this node."""
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
    has_nvidia = bool(answer["gpus"] or answer.get("gpu_device_files", 0))
    # Many processors have a graphics unit with AMD's driver beside GPUs of NVIDIA.
    may_be_uncounted = answer.get("amd_driver", False) and not has_nvidia
    if needs.gpu_type != NVIDIA or may_be_uncounted:
        text = f"whether {needs.gpus_per_node} GPUs are usable is unknown: hpcdist counts those of NVIDIA only"
        yield note("gpu", text, f"see `rocm-smi` (AMD) or `xpu-smi discovery` (Intel) on {node}")
        return
    num_usable = answer.get("visible_gpus", 0)
    if num_usable < needs.gpus_per_node:
        reason = ""
        if not answer["gpus"] and answer.get("gpu_device_files", 0):
            reason = "; the driver fails or does not answer"
        text = f"{num_usable} of {needs.gpus_per_node} GPUs are usable{reason}"
        fix = f"see `nvidia-smi` and `dmesg | grep NVRM` on {node}"
        level: Level = "failure"
        if needs.backend == "gloo":  # which needs no GPUs
            level = "warning"
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
        if disk.get("free", NO_DISK_BYTES) < NO_DISK_BYTES:
            problem += f" ({disk['free'] / MB:,.0f} MB are free)"
        text = f"checkpoints cannot be written to {where}: {problem}"
        fix = f"free space (`df -h {where}`, `hpcdist runs`), or set runs_dir to another file system"
        yield failure("disk", text, fix)
    else:
        yield from node_facts.space_checks(disk, needs.checkpoint_bytes)


def _clock(node: str, answer: Mapping[str, Any], asked_at: float, answered_at: float) -> Iterator[Check]:
    """Report a node if its clock shows a time before the question or after the answers."""
    ahead_s = answer["time"] - answered_at
    behind_s = asked_at - answer["time"]
    skew = max(ahead_s, behind_s)
    if skew < SKEW_S:
        return
    direction = "behind"
    if ahead_s > behind_s:
        direction = "ahead of"
    level: Level = "warning"
    why = "logs and metrics of the nodes cannot be aligned"
    if skew >= FATAL_SKEW_S:
        level = "failure"
        why = "a live run could be considered dead"
    yield Check(
        name="clock",
        level=level,
        text=f"its clock is at least {skew:,.1f} s {direction} that of the host that asked: {why}",
        fix=f"see `chronyc tracking` or `timedatectl` on {node}",
        node=node,
    )


def _group(needs: Needs, answers: Answers) -> Iterator[Check]:
    """Report nodes that have not joined the group of all nodes, or are slow in it."""
    groups = _groups(answers)
    reasons = {group["not_imported"] for group in groups.values() if "not_imported" in group}
    if reasons:
        text = f"unknown, since not all nodes can import torch and ZeroMQ ({min(reasons)})"
        yield warning("network", text, "install hpcdist[train] where the ranks run, or set preflight=off")
        return
    # Nodes that do not see the run folder cannot join, which is reported already.
    absent = [node for node, group in groups.items() if not group.get("joined") and answers[node]["witness"]]
    if len(absent) > 1 and absent == list(needs.nodes[1:]):
        reason = _reason(groups[absent[0]])
        text = f"no other node could join it within {needs.join_s:g} s: {reason}"
        yield failure("group", text, OPEN_PORTS, node=needs.nodes[0])
    else:
        for node in absent:
            reason = _reason(groups[node])
            text = f"it has not joined the group of all nodes within {needs.join_s:g} s: {reason}"
            fix = f"see whether {node} imports torch and reaches {needs.nodes[0]}, or raise launch.init_timeout_s"
            yield failure("group", text, fix, node=node)
    if absent or len(answers) < len(needs.nodes):
        return  # the other nodes have waited for these
    blocked = list(node_links.connection_checks(groups))
    yield from blocked
    errors = [f"{node}: {group['error']}" for node, group in groups.items() if "error" in group]
    if errors and not blocked:
        text = f"the nodes are connected, but the transfers between them failed: {errors[0]}"
        fix = "if the nodes have several networks, set cluster.env.GLOO_SOCKET_IFNAME to an interface of a common one"
        yield failure("group", text, fix)
    yield from node_links.rate_checks(node_links.rates(groups))
    yield from node_links.processor_checks(groups)


def _groups(answers: Answers) -> dict[str, Mapping[str, Any]]:
    """Return each node's report about the group of all nodes; empty if it has not tried to join."""
    return {node: answer.get("group", {}) for node, answer in answers.items()}


def _reason(group: Mapping[str, Any]) -> str:
    return str(group.get("error", "its probe has ended without a message"))


def _summary(needs: Needs, answers: Answers) -> Check:
    text = f"{len(answers)} of {len(needs.nodes)} nodes answered"
    rates = node_links.rates(_groups(answers)).values()
    if rates:
        usual = median(rates) / MB
        slowest = min(rates) / MB
        text += f"; {len(rates)} links at {usual:,.0f} MB/s, the slowest at {slowest:,.0f}"
    return ok("preflight", text)
