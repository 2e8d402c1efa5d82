"""The TCP sockets that libraries open in this process: list them, and filter the packets that they receive.

gloo and TensorPipe accept any connection and have no interface to change that. Their connections are therefore limited
from outside: by classic BPF filters on the listening sockets, if the kernel allows them
(https://docs.kernel.org/networking/filter.html), and by comparing both ends of every connection.
"""

from __future__ import annotations

import ctypes
import logging
import os
import socket
import stat
import struct
import threading
from collections.abc import Collection, Container, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache

import psutil

#: Host and port.
Address = tuple[str, int]
#: Operation code, jump offsets if a comparison is true and if it is false, and operand.
Instruction = tuple[int, int, int, int]

log = logging.getLogger(__name__)
_listing = threading.Lock()
_SO_ATTACH_FILTER = 26
_SO_DETACH_FILTER = 27
_TCP_INFO = 11
_BYTES_RECEIVED = 128  # offset in struct tcp_info
_LOAD_WORD, _LOAD_HALF, _LOAD_BYTE, _LOAD_LENGTH = 0x20, 0x28, 0x30, 0x80
_AND, _SHIFT_RIGHT, _TO_X, _SUBTRACT_X, _IF_EQUAL, _RETURN = 0x54, 0x74, 0x07, 0x1C, 0x15, 0x06
_IP_HEADER = 0xFFF00000  # SKF_NET_OFF
_PASS: Instruction = (_RETURN, 0, 0, 0xFFFFFFFF)
_DROP: Instruction = (_RETURN, 0, 0, 0)

#: Drops all packets; no handshake is answered.
NOTHING = (_DROP,)
#: Accepts connections but drops all data from the peer. Offsets count from the TCP header.
NO_DATA = (
    (_LOAD_BYTE, 0, 0, 12),  # the upper four bits hold the header length in words of four bytes
    (_AND, 0, 0, 0xF0),
    (_SHIFT_RIGHT, 0, 0, 2),
    (_TO_X, 0, 0, 0),
    (_LOAD_LENGTH, 0, 0, 0),
    (_SUBTRACT_X, 0, 0, 0),
    (_IF_EQUAL, 0, 1, 0),
    _PASS,
    _DROP,
)


def only_from(host: str, ports: Iterable[int]) -> tuple[Instruction, ...]:
    """Return a filter that passes only packets from these ports of one IPv4 address."""
    (address,) = struct.unpack("!I", socket.inet_aton(host))
    wanted = [instruction for port in ports for instruction in ((_IF_EQUAL, 0, 1, port), _PASS)]
    return (
        (_LOAD_WORD, 0, 0, _IP_HEADER + 12),
        (_IF_EQUAL, 1, 0, address),
        _DROP,
        (_LOAD_HALF, 0, 0, 0),
        *wanted,
        _DROP,
    )


def attach(sock: socket.socket, program: Collection[Instruction]) -> None:
    """Filter the packets of a socket, if the kernel allows it. Connections accepted from now on inherit the filter."""
    if can_filter():
        _attach(sock, program)


@cache
def can_filter() -> bool:
    """Return whether this process may filter its sockets; some kernels (6.18, measured) require CAP_NET_ADMIN."""
    try:
        with socket.socket() as trial:
            _attach(trial, NOTHING)
    except PermissionError:
        log.warning(
            "this kernel allows socket filters only to processes with CAP_NET_ADMIN: while the ranks start, other users"
            " of this node can connect to the sockets of gloo and RPC (see SECURITY.md)"
        )
        return False
    return True


def _attach(sock: socket.socket, program: Collection[Instruction]) -> None:
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *instruction) for instruction in program))
    sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HP", len(program), ctypes.addressof(code)))


def detach(sock: socket.socket) -> None:
    """Remove the filter of a socket."""
    with suppress(FileNotFoundError, PermissionError):  # the socket has no filter, or filters are not allowed
        sock.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)


@dataclass(frozen=True)
class OwnSocket:
    """A TCP socket of this process. `sock` is a duplicate of its descriptor; `tcp_sockets` closes it."""

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

    def refuse(self) -> None:
        """Close the connection. Data that the peer sends later is answered with a reset."""
        with suppress(OSError):  # the peer has closed it already
            attach(self.sock, NOTHING)
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
        return OwnSocket(sock, os.fstat(sock.fileno()).st_ino, _address(sock.getsockname()), peer)
    except OSError:  # neither listening nor connected: still connecting, or reset
        sock.close()
        return None


def _address(raw: tuple[str, int]) -> Address:
    return raw[0].removeprefix("::ffff:"), raw[1]


def inodes() -> frozenset[int]:
    """Return the inodes of the TCP sockets that are open now."""
    with tcp_sockets() as found:
        return frozenset(own.inode for own in found)


def is_own_connection(peer: Address, local: Address) -> bool:
    """Return whether the peer of an accepted connection is a socket of this process."""
    # One thread at a time: each listing needs as many descriptors as there are sockets.
    with _listing, tcp_sockets() as found:
        return any((own.local, own.peer) == (peer, local) for own in found)


def connections_to(port: int) -> set[Address]:
    """Return the peers of all connections to a port of this machine, including those not accepted yet."""
    ended = (psutil.CONN_LISTEN, psutil.CONN_TIME_WAIT)
    return {
        _address(found.raddr or ("an unknown address", 0))  # psutil omits an address with port 0
        for found in psutil.net_connections("tcp")
        if found.laddr and found.laddr.port == port and found.status not in ended
    }
