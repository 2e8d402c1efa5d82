"""The preflight probe, which runs on every node before the ranks: `python -P -m hpcdist.slurm.preflight_probe REQUEST`.

It examines its machine, its file systems and its connections to the other nodes, and prints the facts, which
preflight_checks.py compares. The probe needs no torch, because it must start quickly and also work on a node where
torch is broken; psutil and pynvml are imported when their facts are read.
"""

import asyncio
import contextlib
import hashlib
import hmac
import json
import os
import secrets
import shutil
import socket
import struct
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Self

from hpcdist.host import machine, storage
from hpcdist.host.commands import done_within, start
from hpcdist.host.network import tournament
from hpcdist.slurm.on_nodes import node_name, print_answer

#: Limit of a file system's answer.
FOLDER_S = 5.0
#: Limit of a name lookup; torch makes several before ranks have met.
LOOKUP_S = 5.0
#: Bytes of the write test, and its time limit.
WRITE_BYTES, WRITE_S = 4 * 2**20, 1.5
_TOKEN = "HPCDIST_PREFLIGHT_TOKEN"  # noqa: S105  # a name


@dataclass(frozen=True, kw_only=True)
class ProbeRequest:
    """The parameters of the preflight on every node."""

    nodes: tuple[str, ...]  #: all nodes by their Slurm names, in the order of the run
    port: int  #: port of the probes; it should be the one that rank 0 will listen on
    token: str  #: secret that authenticates probes of the same job; not on the command line
    run_folder: str  #: the folder that every node must see
    checkpoint_folder: str  #: it may not exist yet
    witness: str  #: a file with the token, in a folder of this preflight inside the run folder
    checkpoint_bytes: int | None = None  #: size of the newest checkpoint, None without one
    gpus_per_node: int = 0  #: GPUs that ranks need on each node
    backend: str = "gloo"  #: backend of the ranks
    addresses: Mapping[str, str] = field(default_factory=dict)  #: addresses by node, which replace name lookups
    deadline_s: float = 20.0  #: time that a node waits for nodes that have not started

    @classmethod
    def from_json(cls, text: str, token: str) -> Self:
        """Return the request of a JSON document; the token is passed separately."""
        raw = json.loads(text)
        return cls(**{**raw, "nodes": tuple(raw["nodes"]), "token": token})


def probe_command(request: ProbeRequest, python: str = sys.executable) -> list[str]:
    """Return the command that each node executes once with `probe_env`."""
    asked = {name: value for name, value in asdict(request).items() if name != "token"}
    return [python, "-P", "-m", "hpcdist.slurm.preflight_probe", json.dumps(asked, separators=(",", ":"))]


def probe_env(request: ProbeRequest) -> dict[str, str]:
    """Return the probe's variables: other users can read a command line, but not an environment."""
    return {_TOKEN: request.token}


@contextmanager
def witness_in(folder: Path) -> Iterator[tuple[Path, str]]:
    """Create a temporary folder with the file that all nodes must see; yields its path and the token in it."""
    witness, token = folder / "witness", secrets.token_hex(16)
    folder.mkdir(mode=0o700, exist_ok=True)
    witness.write_text(token)
    try:
        yield witness, token
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def answer(request: ProbeRequest, env: Mapping[str, str]) -> dict[str, Any]:
    """Return all facts of this node. Calls that may hang run in threads."""
    node = node_name(env)
    began = time.monotonic()
    names = () if request.addresses else (node, request.nodes[0])
    lookups = {name: start(partial(machine.look_up, name)) for name in names}
    machine_facts = start(partial(read_machine, env))
    # A network file system shows another machine's file only after some time.
    witness = start(lambda: storage.sees(Path(request.witness), request.token, 3.0))
    found: dict[str, Any] = {"node": node, "host": socket.gethostname()}
    found["network"] = test_network(request, node)
    # After the network test, which it would slow down.
    found["checkpoints"] = test_checkpoint_folder(request)
    found["shm"] = storage.describe(Path("/dev/shm"), FOLDER_S)  # noqa: S108
    found["witness"] = done_within(FOLDER_S, witness, False)
    facts: dict[str, Any] = done_within(machine.DRIVER_S, machine_facts, {})
    found |= facts
    found["lookups"] = {name: done_within(LOOKUP_S, one, {"late": LOOKUP_S}) for name, one in lookups.items()}
    return found | {"seconds": round(time.monotonic() - began, 2)}


def read_machine(env: Mapping[str, str]) -> dict[str, Any]:
    found = machine.gpus()
    return {
        "versions": machine.versions(),
        "gpus": [asdict(gpu) for gpu in found],
        "visible_gpus": machine.visible_gpus(len(found), env),
        "gpu_device_files": machine.gpu_device_files(),
    }


def test_checkpoint_folder(request: ProbeRequest) -> dict[str, Any]:
    """Return the facts of the checkpoints' file system (storage.describe), with `write_error` if it is unusable."""
    folder = Path(request.checkpoint_folder)
    found = storage.describe(folder, FOLDER_S)
    if "error" in found:
        return found
    limit_s = WRITE_S + FOLDER_S
    try:
        start(lambda: storage.write_speed(folder, WRITE_BYTES, WRITE_S)).result(limit_s)
    except TimeoutError:
        found["write_error"] = f"{WRITE_BYTES >> 20} MB were not on disk after {limit_s:g} s"
    except OSError as error:
        found["write_error"] = error.strerror or str(error)
    return found


def test_network(request: ProbeRequest, node: str) -> dict[str, Any]:
    mesh = Mesh(request, node)
    asyncio.run(mesh.run())
    found: dict[str, Any] = {
        "addresses": sorted(mesh.addresses),
        "exchange_bytes": mesh.exchange_bytes,
        "peers": {name: peer.as_answer() for name, peer in mesh.peers.items()},
    }
    if mesh.port_problem:
        found["port_problem"] = mesh.port_problem
    return found


# The network test between the nodes of a job: every node connects to every other, then all exchange data at once.
#
# Every node listens on the ranks' port and connects to the others, because firewalls may block one direction only.
# Nodes start at different times, so a refused connection counts only once the peer has connected itself; from then on
# it has `GRACE_S`. A peer that has not connected at the deadline is absent.
#
# The probes' protocol: a handshake that authenticates both sides, then requests of the side that connected.
#
#     both:     `hpf3`, a nonce of 16 bytes
#     both:     length, HMAC-SHA256, JSON       keyed with the job's token, over side, both nonces and the JSON
#     request:  whether it is the last one, number of bytes; that many bytes of any content
#     answer:   the time, after all bytes have arrived; to the last request, after this node has finished
#
# Anyone on the network can connect. Until its HMAC is verified, a connection gets 8 seconds and the memory of one
# `recv`, and nothing of it is parsed. The token itself is never sent.

#: A busy node answers slowly, although the kernel accepts its connections at once.
HELLO_S = 8.0
MAX_HELLO_BYTES = 1024
_NONCE_BYTES = 16
_MAGIC = b"hpf3"  # the number is the protocol's version
_HEAD = struct.Struct(">H32s")
_REQUEST = struct.Struct(">?Q")
_ANSWER = struct.Struct(">d")
_CONTENT = memoryview(bytes(2**18))


class UnknownPeerError(Exception):
    """The other side is no probe of this job; the message names it."""


class SilentPeerError(UnknownPeerError):
    """The other side accepts the connection but sends nothing; it may be a probe without CPU time."""


async def connected(address: str, port: int, limit_s: float) -> socket.socket:
    """Connect to a port. Raises OSError."""
    sock = socket.socket()
    sock.setblocking(False)
    try:
        try:
            async with asyncio.timeout(limit_s):
                await asyncio.get_running_loop().sock_connect(sock, (address, port))
        except TimeoutError:
            try:
                sock.getpeername()  # without CPU time the limit may pass although the kernel has the connection
            except OSError:
                raise TimeoutError from None
    except BaseException:
        sock.close()
        raise
    return sock


class Link:
    """A connection to another probe."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @property
    def address(self) -> str:
        return str(self._writer.get_extra_info("sockname")[0])

    def close(self) -> None:
        self._writer.transport.abort()

    async def handshake(self, token: str, hello: Mapping[str, Any], *, connecting: bool) -> dict[str, Any]:
        """Authenticate both sides by the token and return the other side's hello. Raises UnknownPeerError.

        Which side opened the connection is part of the HMAC, so that a message cannot be sent back as an answer.
        """
        nonce, read = secrets.token_bytes(_NONCE_BYTES), self._reader.readexactly
        try:
            async with asyncio.timeout(HELLO_S):
                self._writer.write(_MAGIC + nonce)
                if await read(len(_MAGIC)) != _MAGIC:
                    raise UnknownPeerError("another program")
                theirs = await read(_NONCE_BYTES)
                nonces = nonce + theirs if connecting else theirs + nonce
                text = json.dumps(hello).encode()
                assert len(text) <= MAX_HELLO_BYTES, "a node's name and a number"
                self._writer.write(_HEAD.pack(len(text), _proof(token, connecting, nonces, text)) + text)
                length, proof = _HEAD.unpack(await read(_HEAD.size))
                if length > MAX_HELLO_BYTES:
                    raise UnknownPeerError("another program")
                text = await read(length)
        except TimeoutError as error:
            raise SilentPeerError("a program that accepts connections without an answer") from error
        except (OSError, EOFError) as error:
            raise UnknownPeerError("a program that closes the connection") from error
        if not hmac.compare_digest(proof, _proof(token, not connecting, nonces, text)):
            raise UnknownPeerError("a probe of another job")
        found: dict[str, Any] = json.loads(text)
        return found

    async def request(self, num_bytes: int = 0, *, last: bool = False) -> float:
        """Send bytes; return the peer's time when they have arrived. Raises OSError or EOFError."""
        self._writer.write(_REQUEST.pack(last, num_bytes))
        for sent in range(0, num_bytes, len(_CONTENT)):
            self._writer.write(_CONTENT[: num_bytes - sent])
            await self._writer.drain()
        (moment,) = _ANSWER.unpack(await self._reader.readexactly(_ANSWER.size))
        return float(moment)

    async def serve(self, finished: asyncio.Event) -> None:
        """Answer requests until the connection ends, which raises OSError or EOFError."""
        while True:
            last, num_bytes = _REQUEST.unpack(await self._reader.readexactly(_REQUEST.size))
            while num_bytes > 0:
                if not (received := len(await self._reader.read(min(num_bytes, len(_CONTENT))))):
                    raise EOFError
                num_bytes -= received
            if last:
                await finished.wait()
            self._writer.write(_ANSWER.pack(time.time()))
            await self._writer.drain()


def _proof(token: str, connecting: bool, nonces: bytes, text: bytes) -> bytes:
    return hmac.digest(token.encode(), bytes([connecting]) + nonces + text, hashlib.sha256)


@dataclass
class Peer:
    """Another node, seen from this one."""

    name: str
    #: `ok`, or the reason for no connection: `refused`, `unreachable`, `stranger` (another program), `busy` (accepts
    #: connections without an answer), `unresolved`, `absent` (never started); `ephemeral` if only ports of that range
    #: cannot be reached.
    status: str = "absent"
    detail: str = ""
    #: The peer's clock minus this node's.
    offset_s: float | None = None
    #: Time of the exchange's data from this node to the peer.
    exchange_s: float | None = None
    alive_at: float = float("inf")
    #: None if the connection has broken.
    link: Link | None = None

    def as_answer(self) -> dict[str, Any]:
        found: dict[str, Any] = {"status": self.status} | ({"detail": self.detail} if self.detail else {})
        for name in ("offset_s", "exchange_s"):
            if (value := getattr(self, name)) is not None:
                found[name] = float(f"{value:.4g}")
        return found


def connection_failure(error: Exception) -> tuple[str, str]:
    """Return the status of a peer and its detail."""
    if isinstance(error, UnknownPeerError):
        return "busy" if isinstance(error, SilentPeerError) else "stranger", str(error)
    if isinstance(error, TimeoutError):
        return "unreachable", "packets to it are dropped"
    if isinstance(error, ConnectionRefusedError):
        return "refused", "connections are refused"
    number = error.errno if isinstance(error, OSError) else None
    return "unreachable", os.strerror(number) if number else str(error)


#: Up to this number of nodes connect to all others. In larger runs each node connects to fewer than that many, chosen
#: evenly, so its time and output do not grow with the run.
ALL_PAIRS = 64
#: Time to connect to a node that listens. TCP repeats a lost first packet after one and three seconds.
GRACE_S = 4.0
CONNECT_S = 3.5
#: Limit of unauthenticated connections; beyond it the oldest is closed. Up to `ALL_PAIRS` nodes connect at once.
MAX_UNKNOWN = 2 * ALL_PAIRS
#: Data that each node sends in one exchange, to all peers together.
EXCHANGE_BYTES = 2**20
#: Limit of one transfer, and of all exchanges.
STALL_S, EXCHANGES_S = 8.0, 20.0


class Mesh:
    """One node's connections to the others; it listens on all interfaces, or on the address in the request."""

    def __init__(self, request: ProbeRequest, node: str) -> None:
        self._request, self._node = request, node
        self._began = time.monotonic()
        self._until = self._began + request.deadline_s
        nodes = request.nodes
        me = nodes.index(node)
        partners = {own for turn in tournament(len(nodes), ALL_PAIRS - 1) if (own := turn[me]) is not None}
        self.peers = {nodes[number]: Peer(nodes[number]) for number in sorted(partners)}
        #: Bytes that this node sends to each peer in one exchange: at least 128 KiB, since the processor time of many
        #: small transfers would count as a slow network.
        self.exchange_bytes = max(2**17, EXCHANGE_BYTES // max(1, len(self.peers)))
        #: Error of listening on the port; empty without one.
        self.port_problem = ""
        #: This node's addresses on its connections.
        self.addresses: set[str] = set()
        self._finished = asyncio.Event()
        self._hello: dict[str, Any] = {"node": node}
        #: Connections in their handshake, oldest first.
        self._unknown: dict[Link, None] = {}
        self._serving: set[asyncio.Task[None]] = set()
        self._open = contextlib.ExitStack()

    async def run(self) -> None:
        with self._open:
            await self._listen()
            await asyncio.gather(*map(self._reach, self.peers.values()))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(EXCHANGES_S):
                    await self._exchange()
            self._finished.set()
            # Another node may still wait for one that has not started.
            left_s = max(0.0, self._until - time.monotonic())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left_s + GRACE_S + CONNECT_S + EXCHANGES_S):
                    await asyncio.gather(*map(self._part, self.peers.values()))

    async def _listen(self) -> None:
        options: dict[str, Any] = {"family": socket.AF_INET, "backlog": MAX_UNKNOWN, "limit": MAX_HELLO_BYTES}
        bind = self._request.addresses.get(self._node)
        for port in (self._request.port, 0):
            try:
                server = await asyncio.start_server(self._accept, bind, port, **options)
            except OSError as error:
                if port == 0:
                    raise
                self.port_problem = os.strerror(error.errno) if error.errno else str(error)
                continue
            self._open.callback(server.close)
            self._hello["ephemeral"] = server.sockets[0].getsockname()[1]

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._unknown) >= MAX_UNKNOWN:
            oldest = next(iter(self._unknown))
            del self._unknown[oldest]
            oldest.close()
        self._unknown[link := Link(reader, writer)] = None
        self._serving.add(task := asyncio.create_task(self._serve(link)))
        task.add_done_callback(self._serving.discard)

    async def _serve(self, link: Link) -> None:
        with contextlib.suppress(UnknownPeerError, OSError, EOFError), contextlib.closing(link):
            try:
                hello = await link.handshake(self._request.token, self._hello, connecting=False)
            finally:
                self._unknown.pop(link, None)
            if (peer := self.peers.get(hello["node"])) is not None:  # not this node itself, through a wrong name
                peer.alive_at = min(peer.alive_at, time.monotonic())
                await link.serve(self._finished)

    async def _reach(self, peer: Peer) -> None:
        other = ("absent", "")  # the last answer of another program, or of another node, instead of the peer's
        while True:
            tried = time.monotonic()
            try:
                address = await self.address_of(peer.name)
            except OSError as error:
                peer.status, peer.detail = "unresolved", error.strerror or str(error)
                known = self._began
            else:
                try:
                    return await self._connect(peer, address)
                except (UnknownPeerError, OSError) as error:
                    peer.status, peer.detail = connection_failure(error)
                known = peer.alive_at
            is_unheard = known == float("inf")
            answers = peer.status in ("stranger", "busy")
            if answers:
                other = (peer.status, peer.detail)
            # A failure before the peer's start does not count, unless another program has answered.
            if (is_unheard or tried > known or answers) and time.monotonic() > min(known + GRACE_S, self._until):
                # A refusal from a node that never started is an absent node, or the end of what answered before.
                if peer.status == "refused" and is_unheard:
                    peer.status, peer.detail = other
                return None
            await asyncio.sleep(0.1)

    async def address_of(self, name: str) -> str:
        """Return the address of a node. Raises OSError."""
        if name in self._request.addresses:
            return self._request.addresses[name]
        return await asyncio.wrap_future(start(lambda: socket.gethostbyname(name)))

    async def _connect(self, peer: Peer, address: str) -> None:
        """Connect to a peer, and to its port of the ephemeral range. Raises UnknownPeerError or OSError."""
        sock = await connected(address, self._request.port, CONNECT_S)
        link = Link(*await asyncio.open_connection(sock=sock))
        try:
            hello = await link.handshake(self._request.token, self._hello, connecting=True)
            if hello["node"] != peer.name:
                raise UnknownPeerError(f"{hello['node']}, to which the name {peer.name} resolves")
        except UnknownPeerError:
            link.close()
            raise
        self._open.callback(link.close)
        peer.status, peer.detail, peer.link = "ok", "", link
        peer.alive_at = min(peer.alive_at, time.monotonic())
        self.addresses.add(link.address)
        try:
            (await connected(address, hello["ephemeral"], CONNECT_S)).close()
        except OSError as error:
            peer.status, peer.detail = "ephemeral", connection_failure(error)[1]

    async def _exchange(self) -> None:
        """Compare the clocks, then send to all peers at once while they do the same."""
        shortest_s: dict[str, float] = {}
        for _ in range(3):
            for peer, trip_s, offset_s in await self._requests(0):
                if trip_s < shortest_s.get(peer.name, STALL_S):
                    shortest_s[peer.name], peer.offset_s = trip_s, offset_s
        for _ in range(5):  # the shortest counts, because other load and TCP's slow start only prolong it
            for peer, taken_s, _ in await self._requests(self.exchange_bytes):
                peer.exchange_s = min(taken_s, peer.exchange_s or taken_s)

    async def _requests(self, num_bytes: int) -> list[tuple[Peer, float, float]]:
        """Send bytes to all connected peers at once; return those left, their seconds (at most STALL_S) and offsets."""

        async def request(peer: Peer, link: Link) -> tuple[Peer, float, float] | None:
            peer.link = None  # the link of an incomplete transfer cannot be used again
            sent, began = time.time(), time.perf_counter()
            try:
                async with asyncio.timeout(STALL_S):
                    theirs = await link.request(num_bytes)
            except TimeoutError:
                return peer, STALL_S, 0.0
            except (OSError, EOFError):
                return None  # the peer's own answer, or its absence, has the reason
            peer.link, taken_s = link, time.perf_counter() - began
            return peer, taken_s, theirs - (sent + taken_s / 2)

        requests = [request(peer, peer.link) for peer in self.peers.values() if peer.link is not None]
        return [found for found in await asyncio.gather(*requests) if found is not None]

    async def _part(self, peer: Peer) -> None:
        """Wait until the peer needs this node no longer."""
        if peer.link is not None:
            with contextlib.suppress(OSError, EOFError):
                await peer.link.request(last=True)


if __name__ == "__main__":
    print_answer(answer(ProbeRequest.from_json(sys.argv[1], os.environ[_TOKEN]), os.environ))
