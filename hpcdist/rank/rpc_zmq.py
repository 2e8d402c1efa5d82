"""RPC by ZeroMQ: Unix sockets in the attempt folder between ranks of one node, TCP with CURVE between nodes; and the
part that all transports share.
"""

import itertools
import json
import logging
import math
import os
import queue
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any

import psutil
import torch
import zmq
from torch import Tensor
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # torch exports it at run time
from zmq.utils.monitor import recv_monitor_message

from hpcdist.errors import PeerLost, RemoteError
from hpcdist.rank.context import Context
from hpcdist.rank.private_network import address_towards
from hpcdist.rank.rendezvous_store import CurveKeys

# What the transports of RPC share: the place and functions of a rank, the answer to a call, and the form of values.

_starts = itertools.count()


class Endpoint:
    """What a transport needs to know about this rank: its place, its functions, and how to name a peer."""

    def __init__(self, ctx: Context, names: tuple[str, ...], functions: Mapping[str, Callable[..., Any]]) -> None:
        self.ctx, self.names, self.functions = ctx, names, functions
        self.store_name = f"rpc-{next(_starts)}"
        self.store = PrefixStore(self.store_name, ctx.groups.store)
        self.place = f"{names[ctx.rank]} (rank {ctx.rank} on {socket.gethostname()})"

    def lost(self, rank: int, reason: str) -> PeerLost:
        return PeerLost(f"{self.names[rank]} (rank {rank}) does not answer: {reason}")

    def answer(self, function: str, arguments: tuple[Any, ...], reply: Callable[[bool, Any], None]) -> None:
        """Execute a call and pass its result to `reply`: True and the value, or False and the text of the error."""

        def execute() -> Any:
            if function not in self.functions:
                known = ", ".join(sorted(name for name in self.functions if not name.startswith("_"))) or "none"
                text = f"there is no function {function!r} for other ranks; there are: {known}"
                raise RemoteError(f"{self.place}: {text}")
            return self.functions[function](*arguments)

        def settle(run: Callable[[], Any]) -> None:
            try:
                value = run()
                if isinstance(value, Future):
                    value.add_done_callback(lambda done: settle(done.result))
                else:
                    reply(True, value)
            except Exception as error:  # it reaches the caller as text
                with suppress(PeerLost):  # the caller has ended
                    reply(False, str(RemoteError.of(error, self.place)))

        settle(execute)


def encode(value: Any, tensors: list[Tensor]) -> Any:
    """Return a value as JSON types; its tensors are appended to `tensors`. Raises TypeError for other types."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        if value.layout != torch.strided or value.is_quantized:
            raise TypeError(f"RPC sends dense tensors, not {value.layout}: use its indices and values")
        tensors.append(value.detach())
        return {"tensor": len(tensors) - 1}
    if isinstance(value, list):
        return [encode(item, tensors) for item in value]
    if isinstance(value, tuple):
        return {"tuple": [encode(item, tensors) for item in value]}
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {"dict": {key: encode(item, tensors) for key, item in value.items()}}
    kind = "a dict with keys that are not strings" if isinstance(value, dict) else type(value).__name__
    raise TypeError(
        f"RPC cannot send {kind}: use None, bool, int, float, str, tensors, and lists, tuples, dicts of them"
    )


def decode(content: Any, tensors: Sequence[Tensor]) -> Any:
    """Return the value that `encode` was given. Raises ValueError for other content."""
    if isinstance(content, list):
        return [decode(item, tensors) for item in content]
    if not isinstance(content, dict):
        return content
    match content:
        case {"tensor": int(index)} if 0 <= index < len(tensors):
            return tensors[index]
        case {"tuple": list(items)}:
            return tuple(decode(item, tensors) for item in items)
        case {"dict": dict(items)}:
            return {key: decode(item, tensors) for key, item in items.items()}
    raise ValueError("not a value of RPC")


# Each rank has one socket on which it receives calls and answers, and one socket for each rank to which it sends. One
# thread receives, another one watches the connections. The connection to a process that ends breaks at once, which
# fails all calls to it. ZeroMQ's heartbeats are not used: a process that is suspended or starved could not answer them.
# TCP's keepalive finds a node that is gone instead, because a node answers for its suspended processes.
#
# A message is a JSON header and a frame for each tensor: `[kind, number, rank of the sender, function, value,
# tensors]`.

log = logging.getLogger(__name__)
_CALL, _RESULT, _ERROR = range(3)
_DTYPES = {str(dtype)[6:]: dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
#: A node that has not answered TCP for this time is gone, in seconds: longer than a network needs to change its routes.
_SILENCE_S = 12


class _Peer:
    """The socket over which this rank sends to another one."""

    def __init__(self, sock: zmq.Socket[bytes]) -> None:
        self.sock = sock
        self.lock = threading.Lock()
        self.is_connected = False
        self.lost: PeerLost | None = None


class ZmqTransport:
    """Connects this rank with all ranks, itself included, and answers their calls in `num_threads` threads."""

    def __init__(self, endpoint: Endpoint, num_threads: int) -> None:
        ctx = endpoint.ctx
        self._endpoint, self._rank = endpoint, ctx.rank
        self._device = ctx.device
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._keys = CurveKeys(ctx.attempt.read_key(), f"rpc/{ctx.topology.token}")
        self._pending: dict[int, tuple[Future[Any], int, float, float]] = {}
        self._numbers = itertools.count()
        self._is_closing = False
        self._num_malformed = 0
        self._calls: queue.SimpleQueue[tuple[int, int, str, tuple[Any, ...]] | None] = queue.SimpleQueue()
        self._num_threads = num_threads
        self._zap: zmq.Socket[bytes] | None = None
        self._descriptors: list[int] = []
        self._temporary = ""
        self._inbox = self._context.socket(zmq.PULL)
        self._inbox.rcvhwm = 0
        self._inbox.linger = 0
        endpoint.store.set(f"address/{self._rank}", json.dumps(self._listen()))
        self._peers: list[_Peer] = []
        self._monitors: dict[zmq.Socket[bytes], int] = {}
        for rank in range(len(endpoint.names)):
            self._connect(rank, json.loads(endpoint.store.get(f"address/{rank}")))
        loops = [self._receive, self._watch, *[self._work] * num_threads]
        self._threads = [threading.Thread(target=loop, name="hpcdist-rpc", daemon=True) for loop in loops]
        for thread in self._threads:
            thread.start()

    def _listen(self) -> dict[str, Any]:
        """Listen for the other ranks, and return this rank's addresses."""
        topology = self._endpoint.ctx.topology
        self._inbox.bind("inproc://self")
        folder, name = str(self._endpoint.ctx.attempt.path), f"{self._endpoint.store_name}-{self._rank}"
        try:
            self._inbox.bind(self._unix(folder, name))
        except zmq.ZMQError as error:
            self._temporary = tempfile.mkdtemp(prefix="hpcdist-rpc-")  # mode 0700
            log.info("RPC: %s holds no Unix sockets (%s): using %s", folder, error, self._temporary)
            self._inbox.bind(self._unix(self._temporary, name))
        found: dict[str, Any] = {"node": topology.node_rank, "folder": self._temporary, "name": name}
        if topology.num_nodes > 1:
            self._zap = self._keys.be_server(self._inbox)
            self._inbox.bind(f"tcp://{_own_address(topology.master_addr)}:*")
            found["tcp"] = self._inbox.getsockopt_string(zmq.LAST_ENDPOINT)
        return found

    def _connect(self, rank: int, addresses: dict[str, Any]) -> None:
        sock = self._context.socket(zmq.PUSH)
        sock.sndhwm = 0
        sock.linger = 2000
        monitor = sock.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        monitor.linger = 0
        self._monitors[monitor] = rank
        self._peers.append(_Peer(sock))
        if rank == self._rank:
            sock.connect("inproc://self")
        elif addresses["node"] == self._endpoint.ctx.topology.node_rank:
            sock.connect(self._unix(addresses["folder"] or str(self._endpoint.ctx.attempt.path), addresses["name"]))
        else:
            self._keys.be_client(sock)
            sock.tcp_keepalive, sock.tcp_keepalive_cnt = 1, 3
            sock.tcp_keepalive_idle = sock.tcp_keepalive_intvl = _SILENCE_S // 4
            sock.tcp_maxrt = 1000 * _SILENCE_S
            sock.connect(addresses["tcp"])

    def _unix(self, folder: str, name: str) -> str:
        # The path of a Unix socket is limited to 107 bytes. The descriptor stays open, because ZeroMQ connects later.
        self._descriptors.append(os.open(folder, os.O_RDONLY | os.O_DIRECTORY))
        return f"ipc:///proc/self/fd/{self._descriptors[-1]}/{name}"

    def call(self, rank: int, function: str, arguments: tuple[Any, ...], timeout_s: float) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()  # it cannot be cancelled
        number = next(self._numbers)
        self._pending[number] = future, rank, time.monotonic() + timeout_s, timeout_s
        try:
            self._send(rank, _CALL, number, function, arguments)
        except BaseException as error:
            if self._pending.pop(number, None) is None:  # the thread that watches has failed the call
                return future
            if not isinstance(error, PeerLost):
                raise
            future.set_exception(error)
        return future

    def _send(self, rank: int, kind: int, number: int, function: str, value: Any) -> None:
        tensors: list[Tensor] = []
        content = encode(value, tensors)
        described, frames = [], []
        for tensor in tensors:
            # The order of the strides is kept: kernels round differently for channels_last.
            order = list(range(tensor.dim()))
            if not tensor.is_contiguous():
                order.sort(key=tensor.stride, reverse=True)
            described.append([str(tensor.dtype)[6:], list(tensor.shape), order, not tensor.is_cpu])
            frame = tensor.permute(order).contiguous().resolve_conj().resolve_neg()
            if not tensor.is_cpu:  # complete after the stream's synchronization
                pinned = torch.empty(frame.shape, dtype=frame.dtype, pin_memory=True)
                frame = pinned.copy_(frame, non_blocking=True)
            frames.append(frame)
        if on_gpu := [tensor for tensor in tensors if not tensor.is_cpu]:
            torch.accelerator.current_stream(on_gpu[0].device).synchronize()
        header = json.dumps([kind, number, self._rank, function, content, described]).encode()
        data = [frame.view(-1).view(torch.uint8).numpy().data if frame.numel() else b"" for frame in frames]
        peer = self._peers[rank]
        with peer.lock:
            if peer.lost is not None:
                raise peer.lost
            peer.sock.send_multipart([header, *data], copy=False)

    def _receive(self) -> None:
        while not self._is_closing:
            frames = self._inbox.recv_multipart(copy=False)
            try:
                self._deliver(bytes(frames[0].buffer), [frame.buffer for frame in frames[1:]])
            except (ValueError, TypeError, LookupError, RecursionError, RuntimeError, OverflowError) as error:
                self._num_malformed += 1
                if self._num_malformed == 1 and not self._is_closing:
                    log.warning("RPC: ignored a malformed message (%s)", error)

    def _deliver(self, header: bytes, frames: Sequence[memoryview]) -> None:
        kind, number, source, function, content, described = json.loads(header)
        if source not in range(len(self._peers)):
            raise ValueError(f"there is no rank {source}")
        value = decode(content, [self._tensor(each, frame) for each, frame in zip(described, frames, strict=True)])
        if kind == _CALL:
            if not isinstance(value, tuple):
                raise ValueError("not the arguments of a call")
            self._calls.put((source, number, str(function), value))
            return
        entry = self._pending.get(number)
        if entry is None or entry[1] != source or self._pending.pop(number, None) is None:
            return  # its time was over
        if kind == _RESULT:
            entry[0].set_result(value)
        else:
            entry[0].set_exception(RemoteError(str(value)))

    def _tensor(self, description: Any, frame: memoryview) -> Tensor:
        dtype, shape, order, on_gpu = description
        kind = _DTYPES[dtype]
        if sorted(order) != list(range(len(shape))) or math.prod(shape) * kind.itemsize != frame.nbytes:
            raise ValueError(f"{frame.nbytes} bytes for a tensor of shape {shape}")
        # A copy, because the frame is aligned differently, and kernels round differently then.
        tensor = torch.empty([shape[axis] for axis in order], dtype=kind)
        if frame.nbytes:
            tensor.view(-1).view(torch.uint8).numpy().data[:] = frame
        tensor = tensor.permute([order.index(axis) for axis in range(len(shape))])
        return tensor.to(self._device) if on_gpu else tensor

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            source, number, function, arguments = call
            self._endpoint.answer(function, arguments, partial(self._reply, source, number))
            del call, arguments  # its tensors

    def _reply(self, source: int, number: int, is_result: bool, value: Any) -> None:
        self._send(source, _RESULT if is_result else _ERROR, number, "", value)

    def _watch(self) -> None:
        poller = zmq.Poller()
        for sock in filter(None, (*self._monitors, self._zap)):
            poller.register(sock, zmq.POLLIN)
        while not self._is_closing:
            for sock, _ in poller.poll(100):  # ms, after which expired calls are looked for
                if sock is self._zap:
                    self._keys.admit(self._zap)
                    continue
                peer = self._peers[rank := self._monitors[sock]]
                if recv_monitor_message(sock)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    peer.is_connected = True
                elif peer.is_connected and not self._is_closing:
                    error = self._endpoint.lost(rank, "its connection has ended")
                    with peer.lock:
                        peer.lost = error
                    for number, (future, its_rank, _, _) in self._pending.copy().items():
                        if its_rank == rank and self._pending.pop(number, None) is not None:
                            future.set_exception(error)
            now = time.monotonic()
            for number, (future, rank, until, timeout_s) in self._pending.copy().items():
                if now > until and self._pending.pop(number, None) is not None:
                    future.set_exception(self._endpoint.lost(rank, f"no answer in {timeout_s:g} s"))

    def connected(self) -> None:
        """Remove the names of the Unix sockets: every rank is connected, and a killed rank leaves none behind."""
        if self._temporary:
            shutil.rmtree(self._temporary, ignore_errors=True)
        with suppress(OSError):
            os.unlink(self._endpoint.ctx.attempt.path / f"{self._endpoint.store_name}-{self._rank}")

    def close(self) -> None:
        """End the threads and close the sockets; messages that are not sent yet are sent within two seconds."""
        self._is_closing = True
        with self._peers[self._rank].lock:
            self._peers[self._rank].sock.send(b"")  # wakes the thread that receives
        for _ in range(self._num_threads):
            self._calls.put(None)
        for thread in self._threads[:2]:
            thread.join()
        for peer, monitor in zip(self._peers, self._monitors, strict=True):
            with peer.lock:
                peer.lost = peer.lost or PeerLost("RPC has been shut down")
                peer.sock.disable_monitor()
                peer.sock.close()
            monitor.close()
        for sock in filter(None, (self._inbox, self._zap)):
            sock.close()
        self._context.term()
        for descriptor in self._descriptors:
            os.close(descriptor)


def _own_address(master_addr: str) -> str:
    """Return the address of this node: that of the interface for gloo, else the one that routes to rank 0."""
    for entry in psutil.net_if_addrs().get(os.environ.get("GLOO_SOCKET_IFNAME", ""), []):
        if entry.family == socket.AF_INET:
            return entry.address
    address = address_towards(master_addr)
    return socket.gethostbyname(socket.gethostname()) if address.startswith("127.") else address
