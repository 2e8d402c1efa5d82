"""Authenticated access to the store of the ranks: a client must prove that it knows the attempt's key.

A `TCPStore` serves every client that connects. Its port is therefore on loopback, and the kernel drops all packets to
it except those from ports of this process. Clients connect through a relay in each rank and a gate in rank 0:

    TCPStore client ── relay (rank k, loopback) ── gate (rank 0, rendezvous address) ── TCPStore's daemon (loopback)
                       own process only             both sides prove the key             ports of the gate only

torch's C++ threads connect to the relay, so copies of the store (`store.clone()`) are authenticated as well. After the
proof, data is neither encrypted nor signed: an attacker who can alter packets between the nodes can alter the store.
"""

from __future__ import annotations

import hmac
import logging
import resource
import secrets
import selectors
import socket
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch exports it at run time

from hpcdist.errors import RendezvousError
from hpcdist.rank.network import own_sockets

log = logging.getLogger(__name__)
LOOPBACK = "127.0.0.1"
#: Time limit for a proof, in seconds. A rank answers at once, but its process may have to wait for a processor.
PROOF_TIMEOUT_S = 20.0
#: Maximum number of connections without a proof; beyond it the oldest is closed.
NUM_PENDING = 128
_NUM_BYTES = 32
_CHUNK_BYTES = 1 << 16
#: Number of latest ports in the filter of the store's listening socket; an accepted connection keeps its filter. The
#: kernel limits a filter to about 1,200 ports (net.core.optmem_max).
_NUM_RECENT = 64
#: Maximum number of bytes read from one socket and not yet written to the other.
_MAX_WAITING_BYTES = 1 << 20


def sign(key: bytes, *parts: bytes) -> bytes:
    """Return the HMAC-SHA256 of the parts, 32 bytes."""
    return hmac.digest(key, b"".join(parts), "sha256")


def prove(sock: socket.socket, key: bytes, token: bytes) -> None:
    """Prove to a gate that this process knows the key. Raises RendezvousError if the gate does not know it."""
    theirs = _receive(sock)
    ours = secrets.token_bytes(_NUM_BYTES)
    sock.sendall(ours + sign(key, b"rank", token, theirs, ours))
    if not hmac.compare_digest(_receive(sock), sign(key, b"gate", token, theirs, ours)):
        raise RendezvousError("it does not know this attempt's key")


def check_proof(sock: socket.socket, key: bytes, token: bytes) -> bool:
    """Return whether the client knows the key, and only then prove to it that the gate does; see `prove`."""
    ours = secrets.token_bytes(_NUM_BYTES)
    sock.sendall(ours)
    theirs = _receive(sock)
    if not hmac.compare_digest(_receive(sock), sign(key, b"rank", token, ours, theirs)):
        return False
    sock.sendall(sign(key, b"gate", token, ours, theirs))
    return True


def _receive(sock: socket.socket) -> bytes:
    received = b""
    while len(received) < _NUM_BYTES:
        if not (more := sock.recv(_NUM_BYTES - len(received))):
            raise ConnectionError("the connection was closed before the proof")
        received += more
    return received


class _Splicer(threading.Thread):
    """Copies bytes between pairs of sockets in one thread. Both sockets are closed when either of them is."""

    def __init__(self) -> None:
        super().__init__(name="hpcdist-store", daemon=True)
        # Rank 0 needs three descriptors for each client of the store, and some for connections without a proof.
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        self._selector = selectors.DefaultSelector()
        self._waiting: dict[socket.socket, bytearray] = {}
        self._other: dict[socket.socket, socket.socket] = {}
        self._new: list[tuple[socket.socket, socket.socket]] = []
        self._wake, self._woken = socket.socketpair()
        self._woken.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ)

    def add(self, one: socket.socket, other: socket.socket) -> None:
        self._new.append((one, other))
        self._wake.send(b"\0")

    def run(self) -> None:
        while True:
            for key, _ in self._selector.select():
                sock = key.fileobj
                assert isinstance(sock, socket.socket)
                if sock is self._woken:
                    self._take_new()
                elif sock in self._other:  # otherwise it was closed together with its other end
                    self._serve(sock)

    def _take_new(self) -> None:
        num_new = len(self._woken.recv(_CHUNK_BYTES))
        for one, other in [self._new.pop(0) for _ in range(num_new)]:
            for sock, its_other in ((one, other), (other, one)):
                sock.setblocking(False)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._other[sock], self._waiting[sock] = its_other, bytearray()
                self._selector.register(sock, selectors.EVENT_READ)

    def _serve(self, sock: socket.socket) -> None:
        other = self._other[sock]
        try:
            if self._waiting[sock]:
                self._send(sock)
            if len(self._waiting[other]) < _MAX_WAITING_BYTES:
                with suppress(BlockingIOError):
                    if not (data := sock.recv(_CHUNK_BYTES)):
                        raise ConnectionError
                    self._waiting[other] += data
                    self._send(other)
        except OSError:
            self._end(sock, other)
            return
        self._settle(sock)
        self._settle(other)

    def _send(self, sock: socket.socket) -> None:
        with suppress(BlockingIOError):
            del self._waiting[sock][: sock.send(self._waiting[sock])]

    def _settle(self, sock: socket.socket) -> None:
        """Select for reading if there is space for data, and for writing if data waits."""
        reads = len(self._waiting[self._other[sock]]) < _MAX_WAITING_BYTES
        events = selectors.EVENT_READ * reads | selectors.EVENT_WRITE * bool(self._waiting[sock])
        if self._selector.get_key(sock).events != events:
            self._selector.modify(sock, events)

    def _end(self, *pair: socket.socket) -> None:
        for sock in pair:
            self._selector.unregister(sock)
            del self._other[sock], self._waiting[sock]
            sock.close()


class _Acceptor(threading.Thread):
    """Accepts connections on a listening socket and splices each with the socket that `connect` returns for it.

    `connect` is called in a thread with an accepted connection and its peer; None refuses the connection.
    """

    def __init__(
        self,
        listener: socket.socket,
        connect: Callable[[socket.socket, own_sockets.Address], socket.socket | None],
    ) -> None:
        super().__init__(name="hpcdist-gate", daemon=True)
        self._listener = listener
        self._splicer = _Splicer()
        self._connect = connect
        self._pending: OrderedDict[int, socket.socket] = OrderedDict()
        self._lock = threading.Lock()
        self._refused = 0

    def run(self) -> None:
        self._splicer.start()
        while True:
            try:
                sock, raw = self._listener.accept()
            except OSError:  # the peer has closed the connection, or no descriptor is free
                time.sleep(0.05)
                continue
            with self._lock:
                if len(self._pending) >= NUM_PENDING:
                    _, oldest = self._pending.popitem(last=False)
                    with suppress(OSError):
                        oldest.shutdown(socket.SHUT_RDWR)  # its thread closes it
                self._pending[id(sock)] = sock
            threading.Thread(target=self._admit, args=(sock, (raw[0], raw[1])), daemon=True).start()

    def _admit(self, sock: socket.socket, peer: own_sockets.Address) -> None:
        sock.settimeout(PROOF_TIMEOUT_S)
        try:
            target = self._connect(sock, peer)
        except OSError:
            target = None
        with self._lock:
            self._pending.pop(id(sock), None)
        if target is None:
            sock.close()
            self._refused += 1
            if self._refused == 1:  # only once, so that an attacker cannot fill the log
                port = self._listener.getsockname()[1]
                log.warning("refused a connection to port %d from %s:%d without this attempt's key", port, *peer)
        else:
            self._splicer.add(sock, target)


class _Daemon:
    """torch's TCPStore on a loopback port that only this process can reach."""

    def __init__(self, world_size: int, timeout: timedelta) -> None:
        for _ in range(5):
            with socket.create_server((LOOPBACK, 0), backlog=1024) as listener:
                self.address = listener.getsockname()[:2]
                self._listener = listener.dup()
                # The store's own client connects from a port that is not known in advance.
                self.store = TCPStore(
                    LOOPBACK,
                    self.address[1],
                    world_size,
                    is_master=True,
                    timeout=timeout,
                    wait_for_workers=False,
                    master_listen_fd=listener.detach(),
                )
            self._recent: deque[tuple[int, socket.socket]] = deque(maxlen=_NUM_RECENT)
            self._lock = threading.Lock()
            own_sockets.attach(self._listener, own_sockets.NOTHING)
            strangers = own_sockets.connections_to(self.address[1])
            with own_sockets.tcp_sockets() as found:
                strangers -= {own.local for own in found if own.peer == self.address}
            if not strangers:
                return
            log.warning(
                "another process connected to the store before it was protected: opening a store on another port"
            )
        raise RendezvousError("another process on this machine connects to every port that rank 0 opens")

    def connect(self) -> socket.socket:
        """Return a new connection to the store."""
        sock = socket.socket()
        sock.bind((LOOPBACK, 0))
        with self._lock:
            self._recent.append((sock.getsockname()[1], sock))
            held = [port for port, one in self._recent if one.fileno() >= 0]
            own_sockets.attach(self._listener, own_sockets.only_from(LOOPBACK, held))
            sock.connect(self.address)
        return sock


class StoreServer:
    """The store of rank 0 and the gate in front of it, which listens on the address of the rendezvous.

    Each proof depends on the key and the token of the attempt. `timeout` is that of the store's operations.

    Raises RendezvousError if rank 0 cannot listen on the address.
    """

    def __init__(
        self,
        address: own_sockets.Address,
        key: bytes,
        token: str,
        *,
        world_size: int,
        timeout: timedelta,
        has_remote_ranks: bool = False,
    ) -> None:
        self._key, self._token = key, token.encode()
        host, port = address
        try:
            family, *_, resolved = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            local_host = str(resolved[0])
            if has_remote_ranks and local_host.startswith("127."):
                # On Debian a host name resolves to loopback on its own host, and to an address elsewhere.
                local_host = ""
            listener = socket.create_server((local_host, port), family=family, backlog=1024)
        except OSError as error:
            raise RendezvousError(f"rank 0 cannot listen on {host}:{port}: {error}") from error
        self._daemon = _Daemon(world_size, timeout)
        _Acceptor(listener, self._admit).start()

        self.connect = self._daemon.connect  #: returns a new connection of rank 0 itself to the store

    def _admit(self, sock: socket.socket, _: own_sockets.Address) -> socket.socket | None:
        return self._daemon.connect() if check_proof(sock, self._key, self._token) else None


def open_relay(connect: Callable[[], socket.socket]) -> int:
    """Listen on loopback and forward connections of this process to `connect()`; return the port."""
    listener = socket.create_server((LOOPBACK, 0), backlog=1024)
    local = listener.getsockname()[:2]

    def connect_own(_: socket.socket, peer: own_sockets.Address) -> socket.socket | None:
        return connect() if own_sockets.is_own_connection(peer, local) else None

    _Acceptor(listener, connect_own).start()
    return int(local[1])
