"""RPC between the ranks of a run: start, a check of every pair, commands from rank 0, and a shutdown with a time limit.

    with rpc_group(ctx, {"collect": observer.collect}) as group:
        if ctx.is_main:
            rollout = group.call("observer:0", "collect", weights).result()
        else:
            group.serve({"save": save_my_shard})  # until rank 0 leaves its block

Rank 0 is the leader. The other ranks answer calls in threads, and execute the commands of rank 0 in their main thread.
A command may contain collectives, because all ranks are in one process group as well.

ZeroMQ sends the messages: over Unix sockets in the attempt folder between ranks of one node, over TCP with CURVE
between nodes. Values are None, bool, int, float, str, tensors, and lists, tuples and dicts of these. A message is a
JSON header and a frame for each tensor; nothing received is unpickled.
"""

from __future__ import annotations

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import psutil
import torch
import zmq
from torch import Tensor
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # torch exports it at run time
from zmq.utils.monitor import recv_monitor_message

from hpcdist.errors import HpcdistError, PeerLost, RemoteError
from hpcdist.rank.context import Context
from hpcdist.rank.rendezvous_store import CurveKeys

log = logging.getLogger(__name__)
LEAVE = "leave"
#: How often a serving rank updates its heartbeat and checks that rank 0 answers, in seconds.
PULSE_INTERVAL_S = 1.0
#: Time limit of the end of the shutdown, in seconds, when every rank has arrived.
SHUTDOWN_TIMEOUT_S = 8.0


class RpcGroup:
    """All ranks of a run by their RPC names, `role:index`."""

    def __init__(
        self, ctx: Context, functions: Mapping[str, Callable[..., Any]], timeout_s: float, num_threads: int
    ) -> None:
        self._ctx = ctx
        self._timeout_s = timeout_s
        self._commands: queue.SimpleQueue[tuple[str, tuple[Any, ...]]] = queue.SimpleQueue()
        self.names = tuple(ctx.roles.name_of(rank) for rank in range(ctx.world_size))
        self.name = self.names[ctx.rank]
        self._ranks = {name: rank for rank, name in enumerate(self.names)}
        self.peers = [name for name in self.names if name != self.name]
        self._arrived: list[Future[None]] = []
        self._gone = threading.Semaphore(0)
        self._lock = threading.Lock()
        own: dict[str, Callable[..., Any]] = {
            "_order": lambda command, arguments: self._commands.put((command, arguments)),
            "_pulse": lambda stop: ctx.request_stop() if stop else None,
            "_token": lambda: ctx.topology.token,
            "_arrive": self._arrive,
            "_bye": self._gone.release,
        }
        self.transport = _Transport(ctx, self.names, {**functions, **own}, num_threads)

    def of_role(self, role: str) -> list[str]:
        """Return the RPC names of a role's ranks, ordered by index."""
        return [name for name in self.names if name.partition(":")[0] == role]

    def call(self, to: str | int, function: str, *arguments: Any, timeout_s: float | None = None) -> Future[Any]:
        """Call a function of another rank, and return the future of its result.

        The result raises RemoteError if the function failed there, and PeerLost if the rank has ended or has not
        answered in time. A tensor must not be changed before the call is answered, because it is not copied.

        Args:
            to: RPC name or rank.
            function: a key of the mapping that the rank passed to `rpc_group`.
            timeout_s: time limit in seconds; None means that of the group.

        Raises TypeError for an argument that cannot be sent.
        """
        rank = to if isinstance(to, int) else self._ranks.get(to, -1)
        if not 0 <= rank < len(self.names):
            raise HpcdistError(f"there is no rank {to!r}: the ranks are {', '.join(self.names)}")
        return self.transport.call(rank, function, arguments, self._timeout_s if timeout_s is None else timeout_s)

    def call_all(
        self, role: str | Sequence[str], function: str, *arguments: Any, timeout_s: float | None = None
    ) -> list[Future[Any]]:
        """Call a function of all ranks of a role, or of the named ranks; see `call`."""
        names = self.of_role(role) if isinstance(role, str) else role
        return [self.call(name, function, *arguments, timeout_s=timeout_s) for name in names]

    def order(self, command: str, *arguments: Any, to: Sequence[str] | None = None) -> None:
        """Send a command from rank 0 to other ranks, by default to all; does not wait for its execution.

        Each rank executes its commands in its main thread, in the order in which they were sent.

        Args:
            command: a key of the mapping that the receiver passes to `serve`.
            arguments: arguments of the receiver's function.
            to: RPC names of the receivers.
        """
        for future in self.call_all(self.peers if to is None else to, "_order", command, arguments):
            future.result()

    def serve(self, commands: Mapping[str, Callable[..., None]], background: Sequence[Future[None]] = ()) -> None:
        """Execute the commands of rank 0 until it leaves its block. Stop signals are forwarded to rank 0.

        Args:
            commands: functions by command name.
            background: futures of this rank's own threads; their exceptions are raised here.

        Raises PeerLost if rank 0 does not answer.
        """
        is_stop_sent = False
        while True:
            for future in background:
                if future.done():
                    future.result()
            try:
                command, arguments = self._commands.get(timeout=PULSE_INTERVAL_S)
            except queue.Empty:
                self._ctx.alive()
                self.call(0, "_pulse", self._ctx.stop_signalled and not is_stop_sent).result()
                is_stop_sent = self._ctx.stop_signalled
                continue
            if command == LEAVE:
                return
            commands[command](*arguments)

    def _arrive(self) -> Future[None]:
        """Return a future for each caller; all of them complete when every rank has called (on rank 0)."""
        mine: Future[None] = Future()
        with self._lock:
            self._arrived.append(mine)
            waiting = self._arrived
            if len(waiting) < len(self.names):
                return mine
            self._arrived = []
        for future in waiting:
            future.set_result(None)
        return mine

    def close(self) -> None:
        """Wait until no rank needs this one, and close the connections.

        A rank may still evaluate, save or export. The supervisor ends the ranks if one of them has ended or hangs.
        """
        arrived = self.call(0, "_arrive", timeout_s=self._ctx.config.launch.hang_s)
        try:
            while not wait([arrived], PULSE_INTERVAL_S).done:
                self._ctx.alive()
            arrived.result()
        except (PeerLost, RemoteError) as error:
            raise PeerLost(f"{self.transport.place}: the other ranks did not shut down RPC: {error}") from error
        # Rank 0 must not end before the others have their answers. It may end while they wait for that of `_bye`.
        if self._ctx.is_main:
            for _ in self.peers:
                self._gone.acquire(timeout=SHUTDOWN_TIMEOUT_S)
        else:
            with suppress(PeerLost):
                self.call(0, "_bye", timeout_s=SHUTDOWN_TIMEOUT_S).result()
        self.transport.close()


@contextmanager
def rpc_group(
    ctx: Context,
    functions: Mapping[str, Callable[..., Any]] | None = None,
    *,
    timeout_s: float = 60.0,
    num_threads: int = 16,
) -> Iterator[RpcGroup]:
    """Start RPC on every rank, check every pair, and shut RPC down on all ranks after the block.

    After an error inside the block there is no shutdown: other ranks may have died, and it would wait for them. The
    worker then ends the process.

    Args:
        ctx: the context of this rank.
        functions: what other ranks may call, by name. A function that returns a `concurrent.futures.Future` is answered
            when that completes.
        timeout_s: default time limit of a call, in seconds.
        num_threads: number of calls that this rank answers at the same time.

    Raises PeerLost, which names a pair of ranks that cannot call each other.
    """
    group = RpcGroup(ctx, functions or {}, timeout_s, num_threads)
    for name, future in zip(group.names, group.call_all(group.names, "_token"), strict=True):
        try:
            token = future.result()
        except (PeerLost, RemoteError) as error:
            raise PeerLost(f"{group.transport.place} cannot call {name}: {error}") from error
        if token != ctx.topology.token:
            raise PeerLost(f"{name} belongs to {token!r}, this is {ctx.topology.token!r}")
    ctx.barrier()
    group.transport.connected()
    log.info("RPC: %s is connected to %d peers", group.name, len(group.peers))
    yield group
    if ctx.is_main:
        group.order(LEAVE)
    group.close()


# Values as JSON, with their tensors beside it.


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


# The sockets.
#
# Each rank has one socket on which it receives calls and answers, and one socket for each rank to which it sends. One
# thread receives, another one watches the connections. The connection to a process that ends breaks at once, which
# fails all calls to it. ZeroMQ's heartbeats are not used: a process that is suspended or starved could not answer them.
# TCP's keepalive finds a node that is gone instead, because a node answers for its suspended processes.
#
# The header of a message is `[kind, number, rank of the sender, function, value, tensors]`.

_starts = itertools.count()
_CALL, _RESULT, _ERROR = range(3)
_DTYPES = {str(dtype)[6:]: dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
#: How often expired calls are looked for, in milliseconds.
_TICK_MS = 100
#: A node that has not answered TCP for this time is gone, in seconds: longer than a network needs to change its routes.
_SILENCE_S = 12


class _Peer:
    """The socket over which this rank sends to another one."""

    def __init__(self, sock: zmq.Socket[bytes]) -> None:
        self.sock = sock
        self.lock = threading.Lock()
        self.is_connected = False
        self.lost: PeerLost | None = None


class _Transport:
    """Connects this rank with all ranks, itself included, and answers their calls in `num_threads` threads."""

    def __init__(
        self, ctx: Context, names: Sequence[str], functions: Mapping[str, Callable[..., Any]], num_threads: int
    ) -> None:
        self._ctx, self._names, self._functions, self._num_threads = ctx, names, functions, num_threads
        self._folder = str(ctx.attempt.path)
        self._start = f"rpc-{next(_starts)}"
        self.place = f"{names[ctx.rank]} (rank {ctx.rank} on {socket.gethostname()})"
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._keys = CurveKeys(ctx.attempt.read_key(), f"rpc/{ctx.topology.token}")
        self._pending: dict[int, tuple[Future[Any], int, float, float]] = {}
        self._numbers = itertools.count()
        self._is_closing = False
        self._num_malformed = 0
        self._calls: queue.SimpleQueue[tuple[int, int, str, tuple[Any, ...]] | None] = queue.SimpleQueue()
        self._zap: zmq.Socket[bytes] | None = None
        self._descriptors: list[int] = []
        self._temporary = ""
        self._inbox = self._context.socket(zmq.PULL)
        self._inbox.rcvhwm = 0
        self._inbox.linger = 0
        store = PrefixStore(self._start, ctx.groups.store)
        store.set(f"address/{ctx.rank}", json.dumps(self._listen()))
        self._peers: list[_Peer] = []
        self._monitors: dict[zmq.Socket[bytes], int] = {}
        for rank in range(len(names)):
            self._connect(rank, json.loads(store.get(f"address/{rank}")))
        loops = [self._receive, self._watch, *[self._work] * num_threads]
        self._threads = [threading.Thread(target=loop, name="hpcdist-rpc", daemon=True) for loop in loops]
        for thread in self._threads:
            thread.start()

    def _listen(self) -> dict[str, Any]:
        """Listen for the other ranks, and return this rank's addresses."""
        topology = self._ctx.topology
        self._inbox.bind("inproc://self")
        found: dict[str, Any] = {"node": topology.node_rank, "folder": "", "name": f"{self._start}-{topology.rank}"}
        try:
            self._inbox.bind(self._unix(self._folder, found["name"]))
        except zmq.ZMQError as error:
            self._temporary = found["folder"] = tempfile.mkdtemp(prefix="hpcdist-rpc-")  # mode 0700
            log.info("RPC: %s holds no Unix sockets (%s): using %s", self._folder, error, self._temporary)
            self._inbox.bind(self._unix(self._temporary, found["name"]))
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
        if rank == self._ctx.rank:
            sock.connect("inproc://self")
        elif addresses["node"] == self._ctx.topology.node_rank:
            sock.connect(self._unix(addresses["folder"] or self._folder, addresses["name"]))
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
        """Send a call; see `RpcGroup.call`."""
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
            described.append([str(tensor.dtype)[6:], list(tensor.shape), order, tensor.is_cuda])
            frame = tensor.permute(order).contiguous().resolve_conj().resolve_neg()
            if tensor.is_cuda:  # complete after the stream's synchronization
                pinned = torch.empty(frame.shape, dtype=frame.dtype, pin_memory=True)
                frame = pinned.copy_(frame, non_blocking=True)
            frames.append(frame)
        if on_gpu := [tensor for tensor in tensors if tensor.is_cuda]:
            torch.cuda.current_stream(on_gpu[0].device).synchronize()
        header = json.dumps([kind, number, self._ctx.rank, function, content, described]).encode()
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
        return tensor.to(self._ctx.device) if on_gpu and self._ctx.device.type == "cuda" else tensor

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            source, number, function, arguments = call
            self._answer(source, number, partial(self._execute, function, arguments))
            del call, arguments  # its tensors

    def _execute(self, function: str, arguments: tuple[Any, ...]) -> Any:
        if function not in self._functions:
            known = ", ".join(sorted(name for name in self._functions if not name.startswith("_"))) or "none"
            raise RemoteError(f"{self.place}: there is no function {function!r} for other ranks; there are: {known}")
        return self._functions[function](*arguments)

    def _answer(self, source: int, number: int, run: Callable[[], Any]) -> None:
        """Send the result or the error of `run`; for a future, that of the future once it completes."""
        try:
            value = run()
            if isinstance(value, Future):
                value.add_done_callback(lambda done: self._answer(source, number, done.result))
            else:
                self._send(source, _RESULT, number, "", value)
        except Exception as error:  # it reaches the caller as text
            with suppress(PeerLost):  # the caller has ended
                self._send(source, _ERROR, number, "", str(RemoteError.of(error, self.place)))

    def _watch(self) -> None:
        poller = zmq.Poller()
        for sock in [*self._monitors, *([] if self._zap is None else [self._zap])]:
            poller.register(sock, zmq.POLLIN)
        while not self._is_closing:
            for sock, _ in poller.poll(_TICK_MS):
                if sock is self._zap:
                    self._keys.admit(self._zap)
                    continue
                peer = self._peers[rank := self._monitors[sock]]
                if recv_monitor_message(sock)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    peer.is_connected = True
                elif peer.is_connected and not self._is_closing:
                    error = self._lost(rank, "its connection has ended")
                    with peer.lock:
                        peer.lost = error
                    for number, (future, its_rank, _, _) in self._pending.copy().items():
                        if its_rank == rank and self._pending.pop(number, None) is not None:
                            future.set_exception(error)
            now = time.monotonic()
            for number, (future, rank, until, timeout_s) in self._pending.copy().items():
                if now > until and self._pending.pop(number, None) is not None:
                    future.set_exception(self._lost(rank, f"no answer in {timeout_s:g} s"))

    def _lost(self, rank: int, reason: str) -> PeerLost:
        return PeerLost(f"{self._names[rank]} (rank {rank}) does not answer: {reason}")

    def connected(self) -> None:
        """Remove the names of the Unix sockets: every rank is connected."""
        if self._temporary:
            shutil.rmtree(self._temporary, ignore_errors=True)
        with suppress(OSError):
            os.unlink(f"{self._folder}/{self._start}-{self._ctx.rank}")

    def close(self) -> None:
        """End the threads and close the sockets; messages that are not sent yet are sent within two seconds."""
        self._is_closing = True
        with self._peers[self._ctx.rank].lock:
            self._peers[self._ctx.rank].sock.send(b"")  # wakes the thread that receives
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
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((socket.gethostbyname(master_addr), 9))  # sends no packet
        address = str(probe.getsockname()[0])
    return socket.gethostbyname(socket.gethostname()) if address.startswith("127.") else address
