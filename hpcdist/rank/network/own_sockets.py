"""The TCP sockets that libraries open in this process: list, compare and close them.

gloo accepts any connection and has no interface to change that.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
import tempfile
from collections.abc import Container, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

#: Host and port.
Address = tuple[str, int]

_TCP_INFO = 11
_BYTES_RECEIVED = 128  # offset in struct tcp_info


@dataclass(frozen=True)
class OwnSocket:
    """A TCP socket of this process. `sock` is a duplicate of its descriptor; `tcp_sockets` closes it."""

    descriptor: int
    sock: socket.socket
    inode: int
    local: Address
    peer: Address | None
    """None for a listening socket."""

    @property
    def bytes_received(self) -> int:
        """Number of bytes that the peer has sent, including those not read yet."""
        info = self.sock.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, 256)
        return int(struct.unpack_from("Q", info, _BYTES_RECEIVED)[0])

    def stop_listening(self) -> None:
        """Close a listening socket, whose descriptor becomes that of a socket to which nobody can connect.

        gloo aborts the process if its socket is shut down, or if `accept` fails.
        """
        with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as silent:
            directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            silent.setblocking(False)
            silent.bind(f"/proc/self/fd/{directory}/removed")
            os.close(directory)
            silent.listen()
            self.sock.close()
            os.dup2(silent.fileno(), self.descriptor, inheritable=False)

    def refuse(self) -> None:
        """Close the connection."""
        with suppress(OSError):  # the peer has closed it already
            self.sock.shutdown(socket.SHUT_RDWR)


@contextmanager
def tcp_sockets() -> Iterator[list[OwnSocket]]:
    """Yield the listening and the connected TCP sockets of this process, including those opened by libraries."""
    found: dict[int, OwnSocket] = {}
    try:
        for name in os.listdir("/proc/self/fd"):
            if (own := _open(int(name), found)) is not None:
                found[own.inode] = own
        yield list(found.values())
    finally:
        for own in found.values():
            own.sock.close()


def _open(descriptor: int, known: Container[int]) -> OwnSocket | None:
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISSOCK(status.st_mode) or status.st_ino in known:
            return None
        sock = socket.socket(fileno=os.dup(descriptor))
    except OSError:  # closed in the meantime
        return None
    try:
        if sock.family not in (socket.AF_INET, socket.AF_INET6) or sock.type != socket.SOCK_STREAM:
            sock.close()
            return None
        listens = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        peer = None if listens else _address(sock.getpeername())
        return OwnSocket(descriptor, sock, os.fstat(sock.fileno()).st_ino, _address(sock.getsockname()), peer)
    except OSError:  # neither listening nor connected: still connecting, or reset
        sock.close()
        return None


def _address(raw: tuple[str, int]) -> Address:
    return raw[0].removeprefix("::ffff:"), raw[1]


def inodes() -> frozenset[int]:
    """Return the inodes of the TCP sockets that are open now."""
    with tcp_sockets() as found:
        return frozenset(own.inode for own in found)
