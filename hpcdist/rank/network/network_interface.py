"""The network interface over which a node reaches rank 0."""

from __future__ import annotations

import socket
from collections.abc import Mapping

from hpcdist.errors import TopologyError

INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")


def interface_env(master_addr: str, env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that bind gloo, NCCL and TensorPipe to the interface that routes to the master.

    By default these libraries look up their own host name, which may be slow or resolve to an interface that other
    nodes cannot reach. Variables that are already set are left out.

    Raises TopologyError if the master's name cannot be resolved or there is no route to it.
    """
    missing = [name for name in INTERFACE_VARIABLES if not env.get(name)]
    if not missing:
        return {}
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            # This sends no packet: connecting a datagram socket only looks up the route.
            probe.connect((socket.gethostbyname(master_addr), 9))
            address = probe.getsockname()[0]
    except OSError as error:
        raise TopologyError(
            f"the master {master_addr!r} cannot be reached from {socket.gethostname()} ({error}): does its name resolve"
            " on every node? HPCDIST_MASTER_ADDR can name an address instead"
        ) from error
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.family == socket.AF_INET and entry.address == address for entry in addresses):
            return dict.fromkeys(missing, name)
    return {}
