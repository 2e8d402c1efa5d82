"""The probes' protocol: a handshake that authenticates both sides, then frames (message, number, time).

    both:   `hpf2`, a nonce of 16 bytes
    both:   length, HMAC-SHA256, JSON        keyed with the job's token, over side, both nonces and the JSON

Anyone on the network can connect. Until its HMAC is verified, a connection gets 8 seconds and `MAX_HELLO_BYTES` of
memory, and nothing of it is parsed. The token itself is never sent.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import secrets
import socket
import struct
import time
from collections.abc import Mapping
from enum import IntEnum
from typing import Any

#: A busy node answers slowly, although the kernel accepts its connections at once.
HELLO_S = 8.0
#: Without any bytes for this long, a large message counts as lost.
STALL_S = 4.0
FIRST_BYTES = 64 * 2**10
MAX_STARVED = 0.8
#: A link of 1 Gbit/s; faster results are not measured again.
FAST_BYTES_S = 125e6

MAX_HELLO_BYTES = 1024
_NONCE_BYTES = 16
_HEAD = struct.Struct(">H32s")
_FRAME = struct.Struct(">BQd")
_MAGIC = b"hpf2"  # the number is the protocol's version
#: Shared by all links: the content of transfers has no meaning.
_BUFFER = memoryview(bytearray(2**20))


class UnknownPeerError(Exception):
    """The other side is no probe of this job; the message names it."""


class SilentPeerError(UnknownPeerError):
    """The other side accepts the connection but sends nothing; it may be a probe without CPU time."""


class ClosedPeerError(UnknownPeerError):
    """The other side closes the connection before the handshake, as a probe does to test whether a port is open."""


async def connected(address: str, port: int, limit_s: float) -> socket.socket:
    """Connect to a port.

    Raises:
        TimeoutError: the kernel has no connection either; a process without CPU time may pass its limit although the
            connection exists.
        OSError: the connection failed.
    """
    sock = socket.socket()
    sock.setblocking(False)
    try:
        try:
            async with asyncio.timeout(limit_s):
                await asyncio.get_running_loop().sock_connect(sock, (address, port))
        except TimeoutError:
            try:
                sock.getpeername()
            except OSError:
                raise TimeoutError from None
    except BaseException:
        sock.close()
        raise
    return sock


def run_queue_wait_us() -> int:
    """Return the microseconds that this thread waited for a processor; 0 if the kernel does not record them."""
    try:
        with open("/proc/thread-self/schedstat") as file:
            return int(file.read().split()[1]) // 1000
    except (OSError, IndexError):
        return 0


class Message(IntEnum):
    """Kinds of frames; each request is answered by a frame of the same kind."""

    TIME = 0  #: the peer's clock, and its time without CPU (`run_queue_wait_us`)
    REACHED = 1  #: whether the peer has reached this node (1 or 0), once it knows
    ROUND = 2  #: answered when the peer comes to this round
    PUSH = 3  #: the peer receives this many bytes
    PULL = 4  #: the peer sends this many bytes after its answer
    DONE = 5  #: the end of this round
    LEAVE = 6  #: answered when the peer has finished


class Link:
    """A connected, non-blocking socket."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock = sock
        self._loop = asyncio.get_running_loop()

    @property
    def address(self) -> str:
        """This node's address on the connection."""
        return str(self._sock.getsockname()[0])

    def close(self) -> None:
        """Close the connection."""
        self._sock.close()

    async def handshake(self, token: str, hello: Mapping[str, Any], *, connecting: bool) -> dict[str, Any]:
        """Authenticate both sides by the token and return the other side's hello.

        Args:
            connecting: whether this side opened the connection. It is part of the HMAC, so that a message of this side
                cannot be sent back as an answer.

        Raises UnknownPeerError if the other side is no probe of this job, or OSError if the connection breaks.
        """
        nonce = secrets.token_bytes(_NONCE_BYTES)
        try:
            async with asyncio.timeout(HELLO_S):
                await self._loop.sock_sendall(self._sock, _MAGIC + nonce)
                if await self._exactly(len(_MAGIC)) != _MAGIC:
                    raise UnknownPeerError("another program")
                theirs = await self._exactly(_NONCE_BYTES)
                nonces = nonce + theirs if connecting else theirs + nonce
                text = json.dumps(hello).encode()
                assert len(text) <= MAX_HELLO_BYTES, "a node's name and two numbers"
                proof = _proof(token, connecting, nonces, text)
                await self._loop.sock_sendall(self._sock, _HEAD.pack(len(text), proof) + text)
                length, proof = _HEAD.unpack(await self._exactly(_HEAD.size))
                if length > MAX_HELLO_BYTES:
                    raise UnknownPeerError("another program")
                text = await self._exactly(length)
        except TimeoutError as error:
            raise SilentPeerError("a program that accepts connections without an answer") from error
        except (ConnectionError, EOFError) as error:
            raise ClosedPeerError("a program that closes the connection") from error
        if not hmac.compare_digest(proof, _proof(token, not connecting, nonces, text)):
            raise UnknownPeerError("a probe of another job")
        found: dict[str, Any] = json.loads(text)
        return found

    async def request(self, kind: Message, number: int = 0) -> tuple[int, float]:
        """Send a request; return the answer's number and time. Raises OSError or EOFError if the connection breaks."""
        await self.send_frame(kind, number)
        answered, number, moment = await self.receive_frame()
        if answered is not kind:
            raise ConnectionError(f"{answered.name} instead of {kind.name}")
        return number, moment

    async def send_frame(self, kind: Message, number: int = 0) -> None:
        """Send a message with this host's time."""
        await self._loop.sock_sendall(self._sock, _FRAME.pack(kind, number, time.time()))

    async def receive_frame(self) -> tuple[Message, int, float]:
        """Receive a message; return kind, number and time of sending. Raises ConnectionError for an unknown kind."""
        kind, number, moment = _FRAME.unpack(await self._exactly(_FRAME.size))
        try:
            return Message(kind), number, moment
        except ValueError as error:
            raise ConnectionError(f"{kind} is no message of the protocol") from error

    async def send(self, count: int) -> None:
        """Send `count` bytes of arbitrary content."""
        while count > 0:
            part = min(count, len(_BUFFER))
            await self._loop.sock_sendall(self._sock, _BUFFER[:part])
            count -= part

    async def discard(self, count: int) -> None:
        """Receive bytes and discard them."""
        while count > 0:
            received = await self._loop.sock_recv_into(self._sock, _BUFFER[: min(count, len(_BUFFER))])
            if received == 0:
                raise EOFError("the peer closed the connection")
            count -= received

    async def ping(self, count: int) -> tuple[float, float]:
        """Return the shortest of some round trips in seconds, and the peer's clock minus this one in it."""
        best, offset = float("inf"), 0.0
        for _ in range(count):
            sent, began = time.time(), time.perf_counter()
            _, theirs = await self.request(Message.TIME)
            trip = time.perf_counter() - began
            if trip < best:
                best, offset = trip, theirs - (sent + trip / 2)
        return best, offset

    async def burst(self, kind: Message, limit_s: float, limit_bytes: int) -> float:
        """Return bytes per second in one direction, measured by acknowledged transfers of growing size.

        The time that either side waited for a processor is subtracted, at most `MAX_STARVED` of the total and up to a
        result of `FAST_BYTES_S`.

        Raises:
            TimeoutError: a transfer takes more than `STALL_S`.
        """
        starved = -run_queue_wait_us() - (await self.request(Message.TIME))[0]
        size, times = FIRST_BYTES, [0.0]
        while sum(times) <= limit_s and size <= limit_bytes:
            began = time.perf_counter()
            async with asyncio.timeout(STALL_S):
                if kind is Message.PUSH:
                    await self.send_frame(kind, size)
                    await self.send(size)
                    await self.receive_frame()
                else:
                    await self.request(kind, size)
                    await self.discard(size)
            times.append(time.perf_counter() - began)
            size *= 2
        starved += run_queue_wait_us() + (await self.request(Message.TIME))[0]
        # The last two transfers, because rate limiters often pass the first bytes at full speed.
        sent = size // 2 + (size // 4 if len(times) > 2 else 0)
        rate = sent / (times[-1] + times[-2])
        return max(rate, min(FAST_BYTES_S, rate / (1 - min(MAX_STARVED, starved / 1e6 / sum(times)))))

    async def _exactly(self, count: int) -> bytes:
        parts = bytearray()
        while len(parts) < count:
            part = await self._loop.sock_recv(self._sock, count - len(parts))
            if not part:
                raise EOFError("the peer closed the connection")
            parts += part
        return bytes(parts)


def _proof(token: str, connecting: bool, nonces: bytes, text: bytes) -> bytes:
    return hmac.digest(token.encode(), bytes([connecting]) + nonces + text, hashlib.sha256)
