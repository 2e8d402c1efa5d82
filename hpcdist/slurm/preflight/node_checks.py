"""Checks of the preflight that compare the answers of all nodes. Pure functions."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from statistics import median
from typing import Any

from hpcdist.host.machine import LEVELS, Check, Level
from hpcdist.host.machine_checks import (
    MB,
    NO_DISK_BYTES,
    driver_checks,
    gpu_checks,
    locked_memory_checks,
    lookup_checks,
    loopback_checks,
    shm_checks,
    space_checks,
)
from hpcdist.slurm.preflight.network_checks import check_network, listed
from hpcdist.slurm.preflight.probe import Request

Answers = Mapping[str, Mapping[str, Any]]

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
