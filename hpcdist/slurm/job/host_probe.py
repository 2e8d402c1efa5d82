"""Detection of nodes that do not answer any more, by connections that need no service on the node.

A node without power does not close its connections: its peers wait, and Slurm notices it after `SlurmdTimeout`, 300 s
by default. The kernel of a node that lives accepts or refuses a connection at once. Nodes that have never answered, for
example behind a firewall that drops packets, are not judged.
"""

from __future__ import annotations

import errno
import select
import socket
import time
from collections.abc import Iterable, Mapping

#: Shortest time between two connections to a node; with many nodes it is longer.
PROBE_EVERY_S = 1.0
#: Number of connections per second to all nodes together.
PROBES_PER_S = 200.0
#: A connection without an answer is given up after this time.
ANSWER_S = 1.5
#: A node that has not answered for this time is lost; at least this many intervals.
SILENT_S = 4.0
SILENT_INTERVALS = 3
#: After a pause between two calls of `silent`, as of a suspended process, no more than this counts.
PAUSE_S = 1.0
_ANSWERS = (0, errno.ECONNREFUSED, errno.ECONNRESET)


class _Node:
    """The probe of one node: its connection, if one is open, and the time of its last answer."""

    def __init__(self, address: tuple[str, int], family: socket.AddressFamily) -> None:
        self.address = address
        self.family = family
        self.connection: socket.socket | None = None
        self.began = 0.0
        self.answered: float | None = None

    def open(self, now: float) -> None:
        """Begin to connect without waiting."""
        self.began = now
        self.connection = socket.socket(self.family, socket.SOCK_STREAM)
        self.connection.setblocking(False)
        code = self.connection.connect_ex(self.address)
        if code != errno.EINPROGRESS:
            self.close(now, code)

    def close(self, now: float, code: int) -> None:
        """End the connection; `code` is the error with which it has ended."""
        assert self.connection is not None
        self.connection.close()
        self.connection = None
        if code in _ANSWERS:
            self.answered = now


class HostProbe:
    """Finds the nodes that have answered before and do not answer any more. No threads: `silent` does all the work.

    Args:
        addresses: numerical addresses of the nodes, by name.
        port: a port on which nothing has to listen.
    """

    def __init__(self, addresses: Mapping[str, str], port: int) -> None:
        self._nodes = {
            name: _Node((address, port), socket.AF_INET6 if ":" in address else socket.AF_INET)
            for name, address in addresses.items()
        }
        self._every_s = max(PROBE_EVERY_S, len(self._nodes) / PROBES_PER_S)
        self._last_call: float | None = None

    def silent(self, for_s: float = SILENT_S) -> list[str]:
        """Return the nodes that have not answered for some time. Call it several times a second."""
        now = time.monotonic()
        if self._last_call is not None and now - self._last_call > PAUSE_S:
            pause_s = now - self._last_call - PAUSE_S
            for node in self._nodes.values():
                node.answered = node.answered + pause_s if node.answered is not None else None
        self._last_call = now
        self._collect(now)
        for node in self._nodes.values():
            if node.connection is None and now - node.began >= self._every_s:
                node.open(now)
        limit_s = max(for_s, SILENT_INTERVALS * self._every_s)
        return [
            name for name, node in self._nodes.items() if node.answered is not None and now - node.answered > limit_s
        ]

    def _collect(self, now: float) -> None:
        """End the connections that have got an answer, or none in time."""
        waiting = {node.connection.fileno(): node for node in self._nodes.values() if node.connection is not None}
        poll = select.poll()
        for descriptor in waiting:
            poll.register(descriptor, select.POLLOUT)
        ready = {descriptor for descriptor, _ in poll.poll(0)} if waiting else set()
        for descriptor, node in waiting.items():
            assert node.connection is not None
            if descriptor in ready:
                node.close(now, node.connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))
            elif now - node.began > ANSWER_S:
                node.close(now, errno.ETIMEDOUT)

    def close(self) -> None:
        """Close all connections."""
        for node in self._nodes.values():
            if node.connection is not None:
                node.connection.close()
                node.connection = None


def addresses_of(nodes: Iterable[str]) -> dict[str, str]:
    """Return the address of each node whose name can be resolved."""
    found = {}
    for node in nodes:
        try:
            info = socket.getaddrinfo(node, None, type=socket.SOCK_STREAM)[0]
        except OSError:
            continue
        found[node] = str(info[4][0])
    return found
