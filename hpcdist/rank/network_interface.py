"""The network interface over which a node reaches rank 0, for the libraries of the ranks."""

import socket
from collections.abc import Mapping

from hpcdist.errors import TopologyError

#: Port of the discard protocol.
_DISCARD_PORT = 9
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")


def address_towards(host: str) -> str:
    """Return the IPv4 address of this node on its route to a host. Raises OSError if the name does not resolve."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # This sends no packet: connecting a datagram socket only looks up the route. Any port will do.
        probe.connect((socket.gethostbyname(host), _DISCARD_PORT))
        return str(probe.getsockname()[0])


def interface_env(master_addr: str, env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that bind gloo, NCCL and TensorPipe to the interface that routes to the master.

    By default these libraries look up their own host name, which may be slow or resolve to an interface that other
    nodes cannot reach. Variables that are already set are left out. Raises TopologyError if the name of the master does
    not resolve.
    """
    unset = [name for name in INTERFACE_VARIABLES if not env.get(name)]
    if not unset:
        return {}
    try:
        address = address_towards(master_addr)
    except OSError as error:
        raise TopologyError(
            f"the master {master_addr!r} cannot be reached from {socket.gethostname()} ({error}): does its name resolve"
            " on every node? HPCDIST_MASTER_ADDR can name an address instead"
        ) from error
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.family == socket.AF_INET and entry.address == address for entry in addresses):
            return dict.fromkeys(unset, name)
    return {}
