"""TCP connections between the nodes of a run: reachability, latency, bandwidth and clock offsets.

Every node listens on the ranks' port and connects to the others, because firewalls may block one direction only.
Nodes start at different times, so a refused connection counts only once the peer is known to listen: it has connected
itself, or its mark file is in the shared folder. From then on it has `GRACE_S`. Pairs that are connected in both
directions are measured in rounds, see `rounds.py`.

Up to `ALL_PAIRS` nodes connect to all others. In larger runs each node connects to fewer than that many, chosen evenly.
Each measures at most seven pairs, so a node's time and output do not grow with the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any

from hpcdist.machine.time_limit import start
from hpcdist.network.tournament import tournament
from hpcdist.preflight.peers import Peer, connection_failure
from hpcdist.preflight.protocol import (
    STALL_S,
    ClosedPeerError,
    Link,
    Message,
    UnknownPeerError,
    connected,
    run_queue_wait_us,
)
from hpcdist.preflight.rounds import ROUNDS_S, Rounds

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
                elif kind is Message.TIME:
                    number = run_queue_wait_us()
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

        async def large() -> None:
            await link.send_frame(Message.PUSH, LARGE_BYTES)
            await link.send(LARGE_BYTES)
            await link.receive_frame()

        sending = asyncio.create_task(large())
        done, _ = await asyncio.wait({sending}, timeout=STALL_S)
        if not done:
            # A peer without CPU time is silent as well, but then it does not answer small messages either.
            status, _, other = await self._connect(peer)
            if other is not None:
                other.close()
            done, _ = await asyncio.wait({sending}, timeout=1.0)
            peer.stalled = not done and status == "ok"
        sending.cancel()
        return bool(done) and sending.exception() is None

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
