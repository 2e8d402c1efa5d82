"""A peer of a ZeroMQ socket without any key: it sends ZMTP's greeting and a frame of a size that it chooses."""

import os
import socket
import struct
from contextlib import suppress

import psutil

#: https://rfc.zeromq.org/spec/37/: signature, version 3.0, mechanism, and role of a client.
GREETING = b"\xff" + bytes(7) + b"\x01\x7f" + b"\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32)
LONG_COMMAND = b"\x06"
BLOCK = bytes(2**20)
DECLARED_BYTES = 1_500_000_000
MB = 1_000_000


def send_frame(sock: socket.socket, num_bytes: int) -> int:
    """Declare a frame of 1.5 GB, and send up to `num_bytes` of it; return what was sent until the peer has closed."""
    sock.sendall(GREETING)
    with suppress(ConnectionError):
        received = 0
        while received < len(GREETING) and (data := sock.recv(len(GREETING) - received)):
            received += len(data)
        sock.sendall(LONG_COMMAND + struct.pack("!Q", DECLARED_BYTES))
    sent = 0
    with suppress(ConnectionError):
        while sent < num_bytes:
            sock.sendall(BLOCK)
            sent += len(BLOCK)
    return sent


def sent_and_kept_mb(port: int, num_bytes: int) -> tuple[float, float]:
    """Send a frame to a port of this process; return what was sent of it, and by how much this process grew, in MB."""
    before = resident_bytes()
    with socket.create_connection(("127.0.0.1", port)) as sock:
        sent = send_frame(sock, num_bytes)
        return sent / MB, (resident_bytes() - before) / MB


def hold_connections(port: int, most: int) -> list[socket.socket]:
    """Open connections to a port that send nothing, until the kernel answers no more or there are `most`.

    A listener that is only busy answers the packet that TCP repeats after one second, hence the longer timeout.
    """
    held: list[socket.socket] = []
    with suppress(TimeoutError):
        while len(held) < most:
            held.append(socket.create_connection(("127.0.0.1", port), timeout=2.5))
    return held


def resident_bytes() -> int:
    return int(psutil.Process(os.getpid()).memory_info().rss)
