"""Whether NCCL goes over InfiniBand where there is some, by NCCL's own log.

NCCL falls back on TCP without a word, at a tenth of the speed: for want of a library in the image, of a device in the
container, or of memory that may be locked.
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
    """What NCCL says of one rank of a node."""
    return attempt.path / f"nccl.node-{node_rank:05d}.log"


def log_env(topology: Topology, attempt: Attempt, env: Mapping[str, str], sysfs: Path = SYSFS) -> dict[str, str]:
    """Variables that let NCCL write its log, where there is InfiniBand to use; nothing where someone has set them."""
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
    """Names of the devices with an active port. Those of Ethernet (RoCE) do not count: not all sites use them."""
    found = set()
    for port in sysfs.glob("*/ports/*"):
        try:
            active = "ACTIVE" in (port / "state").read_text()
            if active and (port / "link_layer").read_text().strip() == "InfiniBand":
                found.add(port.parent.parent.name)
        except OSError:
            continue  # a virtual function that is being taken away
    return sorted(found)


def transport(text: str) -> int:
    """What a log of NCCL's says of the way between nodes: channels that were set up, else what it has chosen."""
    names = _CHANNEL.findall(text) or _NETWORK.findall(text)
    return NOT_SEEN if not names else SOCKETS if "Socket" in names else OTHER


def gather(attempt: Attempt, topology: Topology, control: dist.ProcessGroup) -> list[int]:
    """By node: how its NCCL reaches the others, as far as it was asked to write it down. Call it on every rank."""
    found = torch.zeros(topology.num_nodes, dtype=torch.int64)
    path = file_of(attempt, topology.node_rank)
    if topology.local_rank == 0 and path.exists():
        found[topology.node_rank] = transport(path.read_text(errors="replace"))
    dist.all_reduce(found, group=control)
    return [int(value) for value in found.tolist()]


def judge(transports: Sequence[int], hosts: Sequence[str]) -> list[str]:
    """A line for people where nodes with InfiniBand go over TCP."""
    slow = [host for host, value in zip(hosts, transports, strict=True) if value == SOCKETS]
    if not slow:
        return []
    return [
        f"NCCL goes over TCP sockets on {', '.join(slow)}, though InfiniBand is active there; is libibverbs in the"
        " image, /dev/infiniband in the container, `ulimit -l` unlimited and NCCL_IB_DISABLE unset?"
        " NCCL's own log is in nccl.node-*.log beside the ranks' logs"
    ]
