"""The connections of RPC: Unix sockets in the attempt folder between ranks of one node, TCP with CURVE between nodes.

Each rank has one socket on which it receives calls and answers, and one socket for each rank to which it sends. One
thread receives, another one watches the connections. The connection to a process that ends breaks at once, which fails
all calls to it. ZeroMQ's heartbeats are not used: a process that is suspended or starved could not answer them. TCP's
keepalive finds a node that is gone instead, because a node answers for its suspended processes.

A message is a JSON header, `[kind, number, rank of the sender, function, value, tensors]`, and the bytes of each
tensor: in one frame between ranks of one node, and in parts between nodes (`frame_parts.py`).
"""

import itertools
import json
import logging
import os
import queue
import shutil
import socket
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, NamedTuple

import psutil
import zmq
from torch import Tensor
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # torch exports it at run time
from zmq.utils.monitor import recv_monitor_message

from hpcdist.errors import PeerLost, RemoteError
from hpcdist.rank.admission import Admission, CurveKeys
from hpcdist.rank.context import Context
from hpcdist.rank.frame_parts import Buffer, cut, split, take_frame
from hpcdist.rank.memory_history import is_out_of_memory
from hpcdist.rank.network_interface import address_towards
from hpcdist.rank.rpc_values import decode, encode, from_parts, to_frames

log = logging.getLogger(__name__)

#: Kinds of messages.
_CALL, _RESULT, _ERROR = range(3)
#: A node that has not answered TCP for this time is gone, in seconds: longer than a network needs to change its routes.
_SILENCE_S = 12
#: Interval of the search for calls after their time limit.
_EXPIRY_CHECK_MS = 100
#: Time for messages to leave a socket that is being closed.
_LINGER_MS = 2000
#: Numbers the transports that this process has opened; all ranks open them in the same order.
_starts = itertools.count()


class _Call(NamedTuple):
    """A call that this rank has received."""

    source: int
    number: int
    function: str
    arguments: tuple[Any, ...]


class _Pending(NamedTuple):
    """A call that this rank has made and that is not answered."""

    future: Future[Any]
    rank: int
    until: float
    timeout_s: float


class _Peer:
    """The socket over which this rank sends to another one, and the state of its connection."""

    def __init__(self, sock: zmq.Socket[bytes], *, is_on_node: bool) -> None:
        self.sock = sock
        self.is_on_node = is_on_node
        self.lock = threading.Lock()
        self.is_connected = False
        self.lost: PeerLost | None = None


class Transport:
    """Connects this rank with all ranks, itself included, and answers their calls in `num_threads` threads.

    Args:
        names: RPC names of all ranks.
        functions: the functions that other ranks may call, by name.
        ends_rank: is called with the error of a call; returns whether this rank ends because of it. Otherwise the
            caller gets the error.
    """

    def __init__(
        self,
        ctx: Context,
        names: Sequence[str],
        functions: Mapping[str, Callable[..., Any]],
        num_threads: int,
        ends_rank: Callable[[Exception], bool],
    ) -> None:
        self.place = f"{names[ctx.rank]} (rank {ctx.rank} on {socket.gethostname()})"
        self._ctx = ctx
        self._attempt = ctx.run.attempt(ctx.topology.attempt)
        self._rank = ctx.rank
        self._names = names
        self._functions = functions
        self._ends_rank = ends_rank
        self._socket_name = f"rpc-{next(_starts)}"
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._keys = CurveKeys(self._attempt.read_key(), f"rpc/{ctx.topology.token}")
        self._pending: dict[int, _Pending] = {}
        self._numbers = itertools.count()
        self._is_closing = False
        self._num_malformed = 0
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._num_threads = num_threads
        self._admission: Admission | None = None
        self._descriptors: list[int] = []
        self._temporary = ""
        self._inbox = self._context.socket(zmq.PULL)
        self._inbox.rcvhwm = 0
        self._inbox.linger = 0
        store = PrefixStore(self._socket_name, ctx.groups.store)
        store.set(f"address/{self._rank}", json.dumps(self._listen()))
        self._peers: list[_Peer] = []
        self._monitors: dict[zmq.Socket[bytes], int] = {}
        for rank in range(len(names)):
            self._connect(rank, json.loads(store.get(f"address/{rank}")))
        loops = [self._receive, self._watch]
        for _ in range(num_threads):
            loops.append(self._work)
        self._threads = [threading.Thread(target=loop, name="hpcdist-rpc", daemon=True) for loop in loops]
        for thread in self._threads:
            thread.start()

    def _listen(self) -> dict[str, Any]:
        """Listen for the other ranks, and return this rank's addresses."""
        topology = self._ctx.topology
        self._inbox.bind("inproc://self")
        folder = str(self._attempt.path)
        name = f"{self._socket_name}-{self._rank}"
        try:
            self._inbox.bind(self._unix(folder, name))
        except zmq.ZMQError as error:
            self._temporary = tempfile.mkdtemp(prefix="hpcdist-rpc-")  # mode 0700
            log.info("RPC: %s holds no Unix sockets (%s): using %s", folder, error, self._temporary)
            self._inbox.bind(self._unix(self._temporary, name))
        addresses: dict[str, Any] = {"node": topology.node_rank, "folder": self._temporary, "name": name}
        if topology.num_nodes > 1:
            self._admission = Admission(self._inbox, self._keys)
            self._inbox.bind(f"tcp://{_own_address(topology.master_addr)}:*")
            addresses["tcp"] = self._inbox.getsockopt_string(zmq.LAST_ENDPOINT)
        return addresses

    def _connect(self, rank: int, addresses: dict[str, Any]) -> None:
        sock = self._context.socket(zmq.PUSH)
        sock.sndhwm = 0
        sock.linger = _LINGER_MS
        monitor = sock.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        monitor.linger = 0
        self._monitors[monitor] = rank
        is_on_node = addresses["node"] == self._ctx.topology.node_rank
        self._peers.append(_Peer(sock, is_on_node=is_on_node))
        if rank == self._rank:
            sock.connect("inproc://self")
        elif is_on_node:
            sock.connect(self._unix(addresses["folder"] or str(self._attempt.path), addresses["name"]))
        else:
            self._keys.be_client(sock)
            sock.tcp_keepalive = 1
            sock.tcp_keepalive_cnt = 3
            sock.tcp_keepalive_idle = _SILENCE_S // 4
            sock.tcp_keepalive_intvl = _SILENCE_S // 4
            sock.tcp_maxrt = 1000 * _SILENCE_S
            sock.connect(addresses["tcp"])

    def _unix(self, folder: str, name: str) -> str:
        # The path of a Unix socket is limited to 107 bytes. The descriptor stays open, because ZeroMQ connects later.
        self._descriptors.append(os.open(folder, os.O_RDONLY | os.O_DIRECTORY))
        return f"ipc:///proc/self/fd/{self._descriptors[-1]}/{name}"

    def call(self, rank: int, function: str, arguments: tuple[Any, ...], timeout_s: float) -> Future[Any]:
        """Call a function of a rank, and return the future of its result; see `RpcGroup.call`."""
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()  # it cannot be cancelled
        number = next(self._numbers)
        self._pending[number] = _Pending(future, rank, time.monotonic() + timeout_s, timeout_s)
        try:
            self._send(rank, _CALL, number, function, arguments)
        except BaseException as error:
            if self._pending.pop(number, None) is None:  # the watching thread has given the call its error
                return future
            if not isinstance(error, PeerLost):
                raise
            future.set_exception(error)
        return future

    def _send(self, rank: int, kind: int, number: int, function: str, value: Any) -> None:
        tensors: list[Tensor] = []
        content = encode(value, tensors)
        descriptions, frames = to_frames(tensors)
        parts = split(json.dumps([kind, number, self._rank, function, content, descriptions]).encode())
        peer = self._peers[rank]
        if peer.is_on_node:
            parts += frames
        else:
            for frame in frames:
                parts += cut(frame)
        with peer.lock:
            if peer.lost is not None:
                raise peer.lost
            peer.sock.send_multipart(parts, copy=False)

    def _receive(self) -> None:
        while not self._is_closing:
            parts: deque[Buffer] = deque(frame.buffer for frame in self._inbox.recv_multipart(copy=False))
            try:
                self._deliver(parts)
            except Exception as error:  # the thread goes on, because it serves all ranks
                self._num_malformed += 1
                if self._num_malformed == 1 and not self._is_closing:
                    log.warning("RPC: ignored a malformed message (%s)", error)

    def _deliver(self, parts: deque[Buffer]) -> None:
        """Pass a message on. Raises an exception if its header is malformed; other errors reach the caller."""
        kind, number, source, function, content, descriptions = json.loads(take_frame(parts))
        if type(source) is not int or source not in range(len(self._peers)):
            raise ValueError(f"there is no rank {source}")
        if kind == _CALL:
            try:
                arguments = self._read(content, descriptions, parts)
                if not isinstance(arguments, tuple):
                    raise ValueError("not the arguments of a call")
            except Exception as error:
                self._send_error(source, number, error)
                return
            self._calls.put(_Call(source, number, str(function), arguments))
            return
        pending = self._pending.get(number)
        if pending is None or pending.rank != source or self._pending.pop(number, None) is None:
            return  # its time was over
        try:
            value = self._read(content, descriptions, parts)
        except Exception as error:
            if is_out_of_memory(error):  # of this rank, which reports it as its own
                pending.future.set_exception(error)
            else:
                pending.future.set_exception(RemoteError.of(error, self.place))
            return
        if kind == _RESULT:
            pending.future.set_result(value)
        else:
            pending.future.set_exception(RemoteError(str(value)))

    def _read(self, content: Any, descriptions: Any, parts: deque[Buffer]) -> Any:
        """Return the value of a message. Raises an exception if it is malformed or if there is no memory for it."""
        tensors = [from_parts(description, parts, self._ctx.device) for description in descriptions]
        if parts:
            raise ValueError(f"{len(parts)} frames without a tensor")
        return decode(content, tensors)

    def _work(self) -> None:
        while True:
            call = self._calls.get()
            if call is None:
                return
            self._execute(call)
            del call  # its tensors, which would otherwise stay until the next call

    def _execute(self, call: _Call) -> None:
        def run() -> Any:
            if call.function not in self._functions:
                offered = sorted(name for name in self._functions if not name.startswith("_"))
                raise RemoteError(
                    f"{self.place}: there is no function {call.function!r} for other ranks; there are:"
                    f" {', '.join(offered) or 'none'}"
                )
            return self._functions[call.function](*call.arguments)

        self._answer(call.source, call.number, run)

    def _answer(self, source: int, number: int, result: Callable[[], Any]) -> None:
        """Send what `result` returns or raises; of a future, when it completes."""
        try:
            value = result()
            if isinstance(value, Future):
                value.add_done_callback(lambda done: self._answer(source, number, done.result))
            else:
                self._send(source, _RESULT, number, "", value)
        except Exception as error:
            self._send_error(source, number, error)

    def _send_error(self, source: int, number: int, error: Exception) -> None:
        if self._ends_rank(error):
            return  # the connection of the caller ends
        with suppress(PeerLost):  # the caller has ended
            self._send(source, _ERROR, number, "", str(RemoteError.of(error, self.place)))

    def _watch(self) -> None:
        """Fail calls to lost ranks, and calls after their time limit; admit clients that know the key."""
        poller = zmq.Poller()
        admission = self._admission
        for sock in self._monitors:
            poller.register(sock, zmq.POLLIN)
        if admission is not None:
            for sock in admission.sockets:
                poller.register(sock, zmq.POLLIN)
        while not self._is_closing:
            for sock, _ in poller.poll(_EXPIRY_CHECK_MS):
                if sock in self._monitors:
                    self._note_event(self._monitors[sock], recv_monitor_message(sock)["event"])
            if admission is not None:
                admission.process()
            now = time.monotonic()
            for number, pending in self._pending.copy().items():
                if now > pending.until:
                    self._fail(number, self._lost(pending.rank, f"no answer in {pending.timeout_s:g} s"))

    def _note_event(self, rank: int, event: int) -> None:
        peer = self._peers[rank]
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            peer.is_connected = True
        elif peer.is_connected and not self._is_closing:
            error = self._lost(rank, "its connection has ended")
            with peer.lock:
                peer.lost = error
            for number, pending in self._pending.copy().items():
                if pending.rank == rank:
                    self._fail(number, error)

    def _fail(self, number: int, error: PeerLost) -> None:
        pending = self._pending.pop(number, None)
        if pending is not None:  # otherwise its answer has just arrived
            pending.future.set_exception(error)

    def _lost(self, rank: int, reason: str) -> PeerLost:
        return PeerLost(f"{self._names[rank]} (rank {rank}) does not answer: {reason}")

    def remove_names(self) -> None:
        """Remove the names of the Unix sockets once every rank is connected: a killed rank leaves none behind."""
        if self._temporary:
            shutil.rmtree(self._temporary, ignore_errors=True)
        with suppress(OSError):
            os.unlink(self._attempt.path / f"{self._socket_name}-{self._rank}")

    def close(self) -> None:
        """End the threads and close the sockets; messages that are not sent yet are sent within two seconds."""
        self._is_closing = True
        with self._peers[self._rank].lock:
            self._peers[self._rank].sock.send(b"")  # wakes the thread that receives
        for _ in range(self._num_threads):
            self._calls.put(None)
        receiving, watching, *_ = self._threads
        receiving.join()
        watching.join()
        for peer, monitor in zip(self._peers, self._monitors, strict=True):
            with peer.lock:
                peer.lost = peer.lost or PeerLost("RPC has been shut down")
                peer.sock.disable_monitor()
                peer.sock.close()
            monitor.close()
        if self._admission is not None:
            self._admission.close()
        self._inbox.close()
        self._context.term()
        for descriptor in self._descriptors:
            os.close(descriptor)


def _own_address(master_addr: str) -> str:
    """Return the address of this node: that of the interface for gloo, else the one that routes to rank 0."""
    for entry in psutil.net_if_addrs().get(os.environ.get("GLOO_SOCKET_IFNAME", ""), []):
        if entry.family == socket.AF_INET:
            return entry.address
    address = address_towards(master_addr)
    if address.startswith("127."):
        return socket.gethostbyname(socket.gethostname())
    return address
