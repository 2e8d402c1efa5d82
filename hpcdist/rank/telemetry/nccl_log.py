"""Check by NCCL's log that NCCL uses InfiniBand on nodes that have it.

NCCL silently falls back to TCP, at a tenth of the bandwidth, if the image lacks a library, the container lacks a device
or the limit of locked memory is too low.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from hpcdist.rank.topology import Topology
from hpcdist.run.attempt import Attempt

SYSFS = Path("/sys/class/infiniband")
NOT_SEEN, SOCKETS, OTHER = 0, 1, 2
#: `Channel 00/0 : 1[0] -> 0[0] [receive] via NET/Socket/0`
_CHANNEL = re.compile(r"via NET/([A-Za-z]+)")
#: `Using network Socket`
_NETWORK = re.compile(r"Using network (\w+)")


def file_of(attempt: Attempt, node_rank: int) -> Path:
    """Return the path of NCCL's log of one rank on a node."""
    return attempt.path / f"nccl.node-{node_rank:05d}.log"


def log_env(topology: Topology, attempt: Attempt, env: Mapping[str, str], sysfs: Path = SYSFS) -> dict[str, str]:
    """Return the variables that make NCCL write its log, if InfiniBand is active and they are not set already."""
    if topology.local_rank != 0 or topology.num_nodes < 2 or not active_infiniband(sysfs):
        return {}
    if env.get("NCCL_DEBUG") or env.get("NCCL_DEBUG_FILE"):
        return {}
    return {
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": "INIT,NET",
        "NCCL_DEBUG_FILE": str(file_of(attempt, topology.node_rank)),
    }


def active_infiniband(sysfs: Path = SYSFS) -> list[str]:
    """Return the InfiniBand devices with an active port. RoCE devices do not count: not all sites use them."""
    found = set()
    for port in sysfs.glob("*/ports/*"):
        try:
            active = "ACTIVE" in (port / "state").read_text()
            if active and (port / "link_layer").read_text().strip() == "InfiniBand":
                found.add(port.parent.parent.name)
        except OSError:
            continue  # a virtual function that is being removed
    return sorted(found)


def transport(text: str) -> int:
    """Return the transport between nodes in a log of NCCL: that of its channels, otherwise the chosen network."""
    names = _CHANNEL.findall(text) or _NETWORK.findall(text)
    return NOT_SEEN if not names else SOCKETS if "Socket" in names else OTHER


def gather(attempt: Attempt, topology: Topology, control: dist.ProcessGroup) -> list[int]:
    """Return the transport of each node that wrote a log. Call it on every rank."""
    found = torch.zeros(topology.num_nodes, dtype=torch.int64)
    path = file_of(attempt, topology.node_rank)
    if topology.local_rank == 0 and path.exists():
        found[topology.node_rank] = transport(path.read_text(errors="replace"))
    dist.all_reduce(found, group=control)
    return [int(value) for value in found.tolist()]


def judge(transports: Sequence[int], hosts: Sequence[str]) -> list[str]:
    """Return a warning if NCCL uses TCP on nodes with active InfiniBand."""
    slow = [host for host, value in zip(hosts, transports, strict=True) if value == SOCKETS]
    if not slow:
        return []
    return [
        f"NCCL uses TCP sockets on {', '.join(slow)}, although InfiniBand is active there: check that libibverbs is in"
        " the image, /dev/infiniband is in the container, `ulimit -l` is unlimited and NCCL_IB_DISABLE is unset."
        " NCCL's log is nccl.node-*.log in the attempt's folder"
    ]
