"""The network test between the nodes of a job: protocol, peers, and rounds in which every node reaches every other."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import json
import os
import secrets
import socket
import struct
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from hpcdist.host.commands import start
from hpcdist.host.network import tournament

# The probes' protocol: a handshake that authenticates both sides, then frames (message, number, time).
#
#     both:   `hpf2`, a nonce of 16 bytes
#     both:   length, HMAC-SHA256, JSON        keyed with the job's token, over side, both nonces and the JSON
#
# Anyone on the network can connect. Until its HMAC is verified, a connection gets 8 seconds and `MAX_HELLO_BYTES` of
# memory, and nothing of it is parsed. The token itself is never sent.

#: A busy node answers slowly, although the kernel accepts its connections at once.
HELLO_S = 8.0
#: A measurement without an answer for this long is given up.
STALL_S = 4.0
FIRST_BYTES = 64 * 2**10

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


class Message(IntEnum):
    """Kinds of frames; each request is answered by a frame of the same kind."""

    TIME = 0  #: the peer's clock
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

        Raises TimeoutError if a transfer takes more than `STALL_S`.
        """
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
        # The last two transfers, because rate limiters often pass the first bytes at full speed.
        sent = size // 2 + (size // 4 if len(times) > 2 else 0)
        return sent / (times[-1] + times[-2])

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


# The state that a node keeps about each other node.


@dataclass
class Peer:
    """Another node, seen from this one."""

    name: str
    #: `ok`, or the reason for no connection: `refused`, `silent` (packets are dropped), `unreachable`, `stranger`
    #: (another program), `mute` (accepts connections without an answer), `unresolved`, `absent` (never started).
    status: str = "absent"
    detail: str = ""
    #: The same for a port of the ephemeral range.
    ephemeral: str = "ok"
    #: Round trip of a few bytes; bandwidth from and to this node; the peer's clock minus this node's.
    latency_s: float | None = None
    sent_bytes_s: float | None = None
    received_bytes_s: float | None = None
    offset_s: float | None = None
    #: Small messages arrive, large ones do not.
    stalled: bool = False
    alive_at: float = float("inf")
    #: The peer's port of the ephemeral range.
    port: int = 0
    #: Whether small and large messages arrived; `link` may have broken since, or be in use.
    reached: bool = False
    link: Link | None = None
    #: Whether the peer reports that it reached this node.
    mutual: bool = False
    #: Set when the peer has finished the round that it leads.
    done: asyncio.Event = field(default_factory=asyncio.Event)

    def as_answer(self) -> dict[str, Any]:
        """Return the known values for the answer."""
        found: dict[str, Any] = {"status": self.status}
        if self.status != "ok":
            return found | ({"detail": self.detail} if self.detail else {})
        for name in ("latency_s", "sent_bytes_s", "received_bytes_s", "offset_s"):
            if (value := getattr(self, name)) is not None:
                found[name] = float(f"{value:.4g}")
        if self.ephemeral != "ok":
            found["ephemeral"] = self.ephemeral
        return found | ({"stalled": True} if self.stalled else {})


def connection_failure(error: Exception) -> tuple[str, str]:
    """Return the status and the detail of a peer after a failed connection or handshake."""
    if isinstance(error, SilentPeerError):
        return "mute", str(error)
    if isinstance(error, UnknownPeerError):
        return "stranger", str(error)
    if isinstance(error, TimeoutError):
        return "silent", ""
    if isinstance(error, ConnectionRefusedError):
        return "refused", ""
    number = error.errno if isinstance(error, OSError) else None
    return "unreachable", os.strerror(number) if number else str(error)


# Measurement rounds of a node: in each round it measures, or is measured by, at most one other node.

#: Limit for all rounds; pairs of later rounds are not measured.
ROUNDS_S = {"quick": 6.0, "full": 20.0}
#: One burst in one direction grows until it takes this long or is this large.
BURST_S = {"quick": 0.04, "full": 0.2}
BURST_BYTES = {"quick": 4 * 2**20, "full": 64 * 2**20}
#: The best result counts, because other load only makes results worse.
REPEATS = 3


class Rounds:
    """The rounds of one node.

    Args:
        partners: this node's partner in each round, None in a round without one.
        leads: whether this node measures in each round; otherwise its partner does.
        mode: `quick` or `full`.
    """

    def __init__(self, partners: Sequence[Peer | None], leads: Sequence[bool], mode: str) -> None:
        self._partners, self._leads, self._mode = partners, leads, mode
        self._current = -1
        self._changed = asyncio.Condition()

    async def run(self) -> None:
        """Measure the peers that this node leads, and wait for those that lead, within `ROUNDS_S`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ROUNDS_S[self._mode]):
                for number, (peer, leads) in enumerate(zip(self._partners, self._leads, strict=True)):
                    if peer is None or not peer.mutual:
                        continue
                    await self._enter(number)
                    if leads:
                        await self._lead(peer, number)
                    else:
                        with contextlib.suppress(TimeoutError):
                            async with asyncio.timeout(STALL_S + 1):
                                await peer.done.wait()
                await self._enter(len(self._partners))

    async def reached(self, number: int) -> int:
        """Wait until this node reaches a round; return 1 if it takes part, 0 if it has already passed the round."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._current >= number)
        return int(self._current == number)

    async def _enter(self, number: int) -> None:
        async with self._changed:
            self._current = number
            self._changed.notify_all()

    async def _lead(self, peer: Peer, number: int) -> None:
        link, peer.link = peer.link, None
        assert link is not None, "mutual"
        try:
            present, _ = await link.request(Message.ROUND, number)
            if present:
                await self._measure(peer, link)
                await link.request(Message.DONE)
            peer.link = link
        except (TimeoutError, OSError, EOFError):
            pass  # the connection has broken, or is too slow: not measured

    async def _measure(self, peer: Peer, link: Link) -> None:
        peer.latency_s, peer.offset_s = await link.ping(40)
        limits = BURST_S[self._mode], BURST_BYTES[self._mode]
        peer.sent_bytes_s, peer.received_bytes_s = [
            max([await link.burst(direction, *limits) for _ in range(REPEATS)])
            for direction in (Message.PUSH, Message.PULL)
        ]


# TCP connections between the nodes of a run: reachability, latency, bandwidth and clock offsets.
#
# Every node listens on the ranks' port and connects to the others, because firewalls may block one direction only.
# Nodes start at different times, so a refused connection counts only once the peer is known to listen: it has connected
# itself, or its mark file is in the shared folder. From then on it has `GRACE_S`. Pairs that are connected in both
# directions are measured in rounds (`Rounds`).
#
# Up to `ALL_PAIRS` nodes connect to all others. In larger runs each node connects to fewer than that many, chosen
# evenly. Each measures at most seven pairs, so a node's time and output do not grow with the run.

ALL_PAIRS = 64
MEASURED_ROUNDS = 7
#: Time to connect to a node that listens. TCP repeats a lost first packet after one and three seconds.
GRACE_S = 4.0
CONNECT_S = 3.5
RETRY_S = 0.1
#: Interval of reading the mark files in the shared folder.
MARKS_INTERVAL_S = 0.5
LARGE_BYTES = 2**14
#: Limit of unauthenticated connections; beyond it the oldest is closed. Up to `ALL_PAIRS` nodes connect at once.
MAX_UNKNOWN = 2 * ALL_PAIRS
#: Pause after an error of accept(), such as too many open files.
ACCEPT_AGAIN_S = 0.05


class Mesh:
    """One node's connections to the others.

    Args:
        nodes: names of all nodes; `node` is this one's.
        port: port that all nodes listen on.
        token: shared secret, which every probe of this job proves to know in its handshake.
        resolve: returns the address of a name; raises OSError if there is none.
        bind: address to listen on, None for all interfaces.
        mark: creates this node's mark file; called in a thread.
        marks: returns the nodes with a mark file; called repeatedly in a thread.
        deadline_s: limit of waiting for nodes that have not started.
    """

    def __init__(
        self,
        nodes: Sequence[str],
        node: str,
        *,
        port: int,
        token: str,
        mode: str = "quick",
        resolve: Callable[[str], Awaitable[str]],
        bind: str | None = None,
        mark: Callable[[], None],
        marks: Callable[[], Iterable[str]],
        deadline_s: float = 30.0,
    ) -> None:
        self._port, self._token, self._mode = port, token, mode
        self._resolve, self._bind, self._mark, self._marks = resolve, bind, mark, marks
        self._began = time.monotonic()
        self._until = self._began + deadline_s
        me = nodes.index(node)
        measured = [partners[me] for partners in tournament(len(nodes), MEASURED_ROUNDS)]
        connected_to: set[int | None] = set(range(len(nodes)))
        if len(nodes) > ALL_PAIRS:
            more = tournament(len(nodes), ALL_PAIRS - MEASURED_ROUNDS - 1)
            connected_to = {*measured, *(partners[me] for partners in more)}
        self.peers = {nodes[i]: Peer(nodes[i]) for i in range(len(nodes)) if i in connected_to and i != me}
        self._rounds = Rounds(
            [None if i is None else self.peers[nodes[i]] for i in measured],
            [i is not None and me < i for i in measured],
            mode,
        )
        #: Error of listening on the port; empty without one.
        self.port_problem = ""
        #: This node's addresses on its connections.
        self.addresses: set[str] = set()
        self._all_tried = asyncio.Event()
        self._leaving = asyncio.Event()
        self._hello: dict[str, Any] = {"node": node}
        #: Number of connections from other programs.
        self.num_foreign = 0
        #: Connections in their handshake, oldest first.
        self._unknown: dict[Link, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._listening: list[socket.socket] = []

    async def run(self) -> None:
        """Connect to all peers and measure; return when all results are known or have timed out."""
        try:
            await self._listen()
            await asyncio.gather(*map(self._reach, self.peers.values()))
            self._all_tried.set()
            await asyncio.gather(*map(self._agree, self.peers.values()))
            await self._rounds.run()
            self._leaving.set()
            await asyncio.gather(*map(self._part, self.peers.values()))
        finally:
            for task in self._tasks:
                task.cancel()
            for sock in self._listening:
                sock.close()

    async def _listen(self) -> None:
        for port in (self._port, 0):
            try:
                sock = socket.create_server((self._bind or "", port), backlog=1024)
            except OSError as error:
                if port == 0:
                    raise
                self.port_problem = os.strerror(error.errno) if error.errno else str(error)
                continue
            sock.setblocking(False)
            self._hello["ephemeral"] = sock.getsockname()[1]
            self._listening.append(sock)
            self._start(self._accept(sock))
        self._start(self._watch_marks())

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _accept(self, listening: socket.socket) -> None:
        while True:
            try:
                sock, _ = await asyncio.get_running_loop().sock_accept(listening)
                link = Link(sock)
            except OSError:
                # The connection has closed, or no file descriptor is free: keep listening in both cases.
                await asyncio.sleep(ACCEPT_AGAIN_S)
                continue
            if len(self._unknown) >= MAX_UNKNOWN:
                oldest = next(iter(self._unknown))
                self.num_foreign += 1
                self._unknown.pop(oldest).cancel()
            self._unknown[link] = self._start(self._serve(link))
            # sock_accept does not suspend while connections are queued: let other tasks run.
            await asyncio.sleep(0)

    async def _watch_marks(self) -> None:
        """Read the mark files: they also show nodes that are blocked in both directions."""
        with contextlib.suppress(OSError):  # reported by the check of the file systems
            await asyncio.wrap_future(start(self._mark))
            while waiting := [peer for peer in self.peers.values() if peer.alive_at == float("inf")]:
                names = set(await asyncio.wrap_future(start(self._marks)))
                for peer in waiting:
                    if peer.name in names:
                        self._seen(peer)
                await asyncio.sleep(MARKS_INTERVAL_S)

    def _seen(self, peer: Peer) -> None:
        peer.alive_at = min(peer.alive_at, time.monotonic())

    async def _serve(self, link: Link) -> None:
        """Answer one connection until it ends."""
        with contextlib.suppress(OSError, EOFError), contextlib.closing(link):
            try:
                hello = await link.handshake(self._token, self._hello, connecting=False)
            except UnknownPeerError as error:
                self.num_foreign += not isinstance(error, ClosedPeerError)
                return
            finally:
                self._unknown.pop(link, None)
            peer = self.peers.get(hello["node"])
            if peer is None:
                return  # perhaps this node itself, through a wrong name
            self._seen(peer)
            while True:
                kind, number, _ = await link.receive_frame()
                if kind is Message.REACHED:
                    # Rounds must not begin while this node still connects to others.
                    await self._all_tried.wait()
                    number = int(peer.reached)
                elif kind is Message.ROUND:
                    number = await self._rounds.reached(number)
                elif kind is Message.PUSH:
                    await link.discard(number)
                elif kind is Message.LEAVE:
                    await self._leaving.wait()
                await link.send_frame(kind, number)
                if kind is Message.PULL:
                    await link.send(number)
                elif kind is Message.DONE:
                    peer.done.set()

    async def _reach(self, peer: Peer) -> None:
        other = ("absent", "")  # the last answer of another program, or of another node, instead of the peer's
        while True:
            tried = time.monotonic()
            status, peer.detail, link = await self._connect(peer)
            if link is not None:
                self._seen(peer)
                self.addresses.add(link.address)
            known = peer.alive_at if status != "unresolved" else self._began
            unheard = known == float("inf")
            if status in ("stranger", "mute"):
                other = (status, peer.detail)
            # A failure before the peer's start does not count, unless another program has answered.
            counts = unheard or tried > known or status in ("stranger", "mute")
            give_up = counts and time.monotonic() > min(known + GRACE_S, self._until)
            if link is not None or give_up:
                # A refusal from a node that never started is an absent node, or the end of what answered before.
                peer.status, peer.detail = other if status == "refused" and unheard else (status, peer.detail)
                break
            await asyncio.sleep(RETRY_S)
        if link is not None:
            peer.ephemeral = await self._reach_ephemeral(peer)
            if await self._carries(peer, link):
                peer.reached, peer.link = True, link

    async def _connect(self, peer: Peer) -> tuple[str, str, Link | None]:
        """Return status, detail, and the link if the status is `ok`."""
        try:
            address = await self._resolve(peer.name)
        except OSError as error:
            return "unresolved", error.strerror or str(error), None
        try:
            link = Link(await connected(address, self._port, CONNECT_S))
        except OSError as error:
            return (*connection_failure(error), None)
        try:
            hello = await link.handshake(self._token, self._hello, connecting=True)
            if hello["node"] != peer.name:
                raise UnknownPeerError(f"{hello['node']}, to which the name {peer.name} resolves")
        except (UnknownPeerError, OSError) as error:
            link.close()
            return (*connection_failure(error), None)
        peer.port = hello["ephemeral"]
        return "ok", "", link

    async def _reach_ephemeral(self, peer: Peer) -> str:
        try:
            (await connected(await self._resolve(peer.name), peer.port, CONNECT_S)).close()
        except OSError as error:
            return connection_failure(error)[0]
        return "ok"

    async def _carries(self, peer: Peer, link: Link) -> bool:
        """Return whether a message larger than any packet arrives; set `stalled` if only small ones do."""
        try:
            async with asyncio.timeout(HELLO_S):
                await link.send_frame(Message.PUSH, LARGE_BYTES)
                await link.send(LARGE_BYTES)
                await link.receive_frame()
        except TimeoutError:
            peer.stalled = True
        except (OSError, EOFError):
            return False
        return not peer.stalled

    async def _agree(self, peer: Peer) -> None:
        """Exchange clocks with a connected peer, and whether it has reached this node."""
        if peer.link is None:
            return
        try:
            async with asyncio.timeout(max(0.0, self._until - time.monotonic()) + GRACE_S + CONNECT_S):
                _, peer.offset_s = await peer.link.ping(3)
                reached, _ = await peer.link.request(Message.REACHED)
                peer.mutual = reached == 1
        except (TimeoutError, OSError, EOFError):
            peer.link = None  # the connection has broken since; the peer's own answer has the reason

    async def _part(self, peer: Peer) -> None:
        """Wait until the peer needs this node no longer."""
        if peer.link is not None:
            with contextlib.suppress(TimeoutError, OSError, EOFError):
                async with asyncio.timeout(ROUNDS_S[self._mode]):
                    await peer.link.request(Message.LEAVE)
