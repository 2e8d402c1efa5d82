"""What probes say to each other: a hello of each side (`hpf1`, a length, JSON), then frames (what, number, time)."""

from __future__ import annotations

import asyncio
import json
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

_HEAD = struct.Struct(">4sH")
_FRAME = struct.Struct(">BQd")
_MAGIC = b"hpf1"
_BUFFER_BYTES = 2**20


class Stranger(Exception):
    """What answers is no probe of this job; the message says what it is instead."""


class Ask(IntEnum):
    """What one probe wants of another; each is answered by a frame of the same kind."""

    TIME = 0  #: the other's clock
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
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))

    @property
    def address(self) -> str:
        """This node's address on the link."""
        return str(self._sock.getsockname()[0])

    def close(self) -> None:
        self._sock.close()

    async def say_hello(self, hello: Mapping[str, Any]) -> None:
        text = json.dumps(hello).encode()
        await self._loop.sock_sendall(self._sock, _HEAD.pack(_MAGIC, len(text)) + text)

    async def hear_hello(self, token: str) -> dict[str, Any]:
        """What the other side says of itself. Raises Stranger, or OSError where the connection breaks."""
        try:
            async with asyncio.timeout(HELLO_S):
                magic, length = _HEAD.unpack(await self._exactly(_HEAD.size))
                if magic != _MAGIC:
                    raise Stranger("another program")
                hello = json.loads(await self._exactly(length))
        except TimeoutError as error:
            raise Stranger("a program that accepts connections and says nothing") from error
        except ValueError as error:
            raise Stranger("another program") from error
        except (ConnectionError, EOFError) as error:
            raise Stranger("a program that closes the connection") from error
        if not isinstance(hello, dict) or hello.get("token") != token:
            raise Stranger("a probe of another job")
        return hello

    async def ask(self, what: Ask, number: int = 0) -> tuple[int, float]:
        """The answer's number and time. Raises OSError or EOFError where the connection breaks."""
        await self.tell(what, number)
        answered, number, moment = await self.hear()
        if answered is not what:
            raise ConnectionError(f"{answered.name} instead of {what.name}")
        return number, moment

    async def tell(self, what: Ask, number: int = 0) -> None:
        await self._loop.sock_sendall(self._sock, _FRAME.pack(what, number, time.time()))

    async def hear(self) -> tuple[Ask, int, float]:
        what, number, moment = _FRAME.unpack(await self._exactly(_FRAME.size))
        return Ask(what), number, moment

    async def send(self, count: int) -> None:
        while count > 0:
            part = min(count, _BUFFER_BYTES)
            await self._loop.sock_sendall(self._sock, self._buffer[:part])
            count -= part

    async def drop(self, count: int) -> None:
        """Take bytes and forget them."""
        while count > 0:
            received = await self._loop.sock_recv_into(self._sock, self._buffer[: min(count, _BUFFER_BYTES)])
            if received == 0:
                raise EOFError("the peer has gone")
            count -= received

    async def ping(self, count: int) -> tuple[float, float]:
        """The shortest of some round trips, in seconds, and the other clock minus this one as that one showed it."""
        best, offset = float("inf"), 0.0
        for _ in range(count):
            sent, began = time.time(), time.perf_counter()
            _, theirs = await self.ask(Ask.TIME)
            trip = time.perf_counter() - began
            if trip < best:
                best, offset = trip, theirs - (sent + trip / 2)
        return best, offset

    async def burst(self, what: Ask, limit_s: float, limit_bytes: int) -> float:
        """Bytes per second in one direction, by transfers that grow and are acknowledged each.

        Raises TimeoutError when a transfer of 64 kB or more does not come through.
        """
        size, spent, times = FIRST_BYTES, 0.0, [0.0]
        while True:
            began = time.perf_counter()
            async with asyncio.timeout(STALL_S):
                if what is Ask.PUSH:
                    await self.tell(what, size)
                    await self.send(size)
                    await self.hear()
                else:
                    await self.ask(what, size)
                    await self.drop(size)
            times.append(time.perf_counter() - began)
            spent += times[-1]
            if spent > limit_s or size >= limit_bytes:
                # The last two: a limit on a rate often lets the first bytes through at full speed.
                whole = size + (size // 2 if len(times) > 2 else 0)
                return whole / (times[-1] + times[-2])
            size *= 2

    async def _exactly(self, count: int) -> bytes:
        parts = bytearray()
        while len(parts) < count:
            part = await self._loop.sock_recv(self._sock, count - len(parts))
            if not part:
                raise EOFError("the peer has gone")
            parts += part
        return bytes(parts)
