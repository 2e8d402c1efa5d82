"""The probes' protocol: a handshake that authenticates both sides, then frames (what, number, time).

    both:   `hpf2`, a nonce of 16 bytes
    both:   length, HMAC-SHA256, JSON        keyed with the job's token, over side, both nonces and the JSON

Anyone on the network can connect. Until its HMAC has been compared, a connection is given 8 seconds, no memory beyond
`MAX_HELLO_BYTES`, and no parser. The token itself is never sent.
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

#: A busy node is slow to answer, but not to accept: that the kernel does.
HELLO_S = 8.0
#: No bytes for this long: small messages pass, large ones do not.
STALL_S = 4.0
FIRST_BYTES = 64 * 2**10
MAX_STARVED = 0.8
#: What is faster is no reason for suspicion: a link of 1 Gbit/s.
FAST_BYTES_S = 125e6

MAX_HELLO_BYTES = 1024
_NONCE_BYTES = 16
_HEAD = struct.Struct(">H32s")
_FRAME = struct.Struct(">BQd")
_MAGIC = b"hpf2"  # another number for another form of what follows
#: Shared by all links: what is sent has no meaning, and what is received is dropped.
_BUFFER = memoryview(bytearray(2**20))


class UnknownPeerError(Exception):
    """What answers is no probe of this job; the message says what it is instead."""


class SilentPeerError(UnknownPeerError):
    """What accepts a connection and then says nothing: perhaps a probe that gets no processor."""


class ClosedPeerError(UnknownPeerError):
    """What closes the connection before its hello is complete, as a probe does that tests whether a port is open."""


async def connected(address: str, port: int, limit_s: float) -> socket.socket:
    """A connection. Raises OSError; TimeoutError only where the kernel has no answer either.

    (A process that got no processor meanwhile finds its time over, and its connection made.)
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
    """Microseconds that this thread has been ready to run without a processor; 0 where the kernel does not count."""
    try:
        with open("/proc/thread-self/schedstat") as file:
            return int(file.read().split()[1]) // 1000
    except (OSError, IndexError):
        return 0


class Message(IntEnum):
    """What one probe wants of another; each is answered by a frame of the same kind."""

    TIME = 0  #: the other's clock, and how long it has been starved (`starved_us`)
    REACHED = 1  #: once that is known: whether it has reached this node (1 or 0)
    ROUND = 2  #: an answer when it has come to this round
    PUSH = 3  #: to take so many bytes
    PULL = 4  #: to send so many bytes, after its answer
    DONE = 5  #: nothing more in this round
    LEAVE = 6  #: an answer when it needs nobody any more


class Link:
    """A connected socket that does not block."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock = sock
        self._loop = asyncio.get_running_loop()

    @property
    def address(self) -> str:
        """This node's address on the link."""
        return str(self._sock.getsockname()[0])

    def close(self) -> None:
        self._sock.close()

    async def handshake(self, token: str, hello: Mapping[str, Any], *, connecting: bool) -> dict[str, Any]:
        """Exchange hellos with the other side, each proving that it holds the token; returns the other side's.

        Args:
            connecting: whether this side has made the connection; the other side proves the opposite, so that an answer
                cannot be this side's own message sent back.

        Raises UnknownPeerError where the other side is no probe of this job, or OSError where the connection breaks.
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
            raise SilentPeerError("a program that accepts connections and says nothing") from error
        except (ConnectionError, EOFError) as error:
            raise ClosedPeerError("a program that closes the connection") from error
        if not hmac.compare_digest(proof, _proof(token, not connecting, nonces, text)):
            raise UnknownPeerError("a probe of another job")
        found: dict[str, Any] = json.loads(text)
        return found

    async def request(self, what: Message, number: int = 0) -> tuple[int, float]:
        """The answer's number and time. Raises OSError or EOFError where the connection breaks."""
        await self.send_frame(what, number)
        answered, number, moment = await self.receive_frame()
        if answered is not what:
            raise ConnectionError(f"{answered.name} instead of {what.name}")
        return number, moment

    async def send_frame(self, what: Message, number: int = 0) -> None:
        await self._loop.sock_sendall(self._sock, _FRAME.pack(what, number, time.time()))

    async def receive_frame(self) -> tuple[Message, int, float]:
        what, number, moment = _FRAME.unpack(await self._exactly(_FRAME.size))
        try:
            return Message(what), number, moment
        except ValueError as error:
            raise ConnectionError(f"{what} is nothing that a probe says") from error

    async def send(self, count: int) -> None:
        while count > 0:
            part = min(count, len(_BUFFER))
            await self._loop.sock_sendall(self._sock, _BUFFER[:part])
            count -= part

    async def discard(self, count: int) -> None:
        """Take bytes and forget them."""
        while count > 0:
            received = await self._loop.sock_recv_into(self._sock, _BUFFER[: min(count, len(_BUFFER))])
            if received == 0:
                raise EOFError("the peer has gone")
            count -= received

    async def ping(self, count: int) -> tuple[float, float]:
        """The shortest of some round trips, in seconds, and the other clock minus this one as that one showed it."""
        best, offset = float("inf"), 0.0
        for _ in range(count):
            sent, began = time.time(), time.perf_counter()
            _, theirs = await self.request(Message.TIME)
            trip = time.perf_counter() - began
            if trip < best:
                best, offset = trip, theirs - (sent + trip / 2)
        return best, offset

    async def burst(self, what: Message, limit_s: float, limit_bytes: int) -> float:
        """Bytes per second in one direction, by transfers that grow and are acknowledged each.

        Time in which either side waited for a processor is not the network's: up to `MAX_STARVED` of the whole does not
        count, as far as that makes the difference between slow and `FAST_BYTES_S`.
        Raises TimeoutError when a transfer takes more than `STALL_S`.
        """
        starved = -run_queue_wait_us() - (await self.request(Message.TIME))[0]
        size, times = FIRST_BYTES, [0.0]
        while sum(times) <= limit_s and size <= limit_bytes:
            began = time.perf_counter()
            async with asyncio.timeout(STALL_S):
                if what is Message.PUSH:
                    await self.send_frame(what, size)
                    await self.send(size)
                    await self.receive_frame()
                else:
                    await self.request(what, size)
                    await self.discard(size)
            times.append(time.perf_counter() - began)
            size *= 2
        starved += run_queue_wait_us() + (await self.request(Message.TIME))[0]
        # The last two: a limit on a rate often lets the first bytes through at full speed.
        sent = size // 2 + (size // 4 if len(times) > 2 else 0)
        rate = sent / (times[-1] + times[-2])
        return max(rate, min(FAST_BYTES_S, rate / (1 - min(MAX_STARVED, starved / 1e6 / sum(times)))))

    async def _exactly(self, count: int) -> bytes:
        parts = bytearray()
        while len(parts) < count:
            part = await self._loop.sock_recv(self._sock, count - len(parts))
            if not part:
                raise EOFError("the peer has gone")
            parts += part
        return bytes(parts)


def _proof(token: str, connecting: bool, nonces: bytes, text: bytes) -> bytes:
    return hmac.digest(token.encode(), bytes([connecting]) + nonces + text, hashlib.sha256)
