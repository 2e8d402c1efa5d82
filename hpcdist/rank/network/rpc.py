"""RPC between the ranks of a run: start, a check of every pair, commands from rank 0, and a shutdown with a time limit.

    with rpc_group(ctx) as group:
        if ctx.is_main:
            ...                                   # calls the other ranks and sends them commands
        else:
            group.serve({"save": save_my_shard})  # until rank 0 leaves its block

Rank 0 is the leader. The other ranks answer calls in RPC's threads, and execute the commands of rank 0 in their main
thread. A command may contain collectives, because all ranks are in one process group as well.

Reference: https://docs.pytorch.org/docs/stable/rpc.html
"""

from __future__ import annotations

import functools
import itertools
import logging
import queue
import socket
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, ParamSpec, TypeVar

from torch.distributed import PrefixStore, Store, rpc  # type: ignore[attr-defined]  # torch exports them at run time
from torch.distributed.rendezvous import register_rendezvous_handler

from hpcdist.errors import HpcdistError, PeerLost, RemoteError
from hpcdist.rank.context import Context
from hpcdist.rank.network.peer_admission import RpcAdmission
from hpcdist.rank.network.rpc_signing import sign_messages

log = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")

LEAVE = "leave"
#: How often a serving rank updates its heartbeat and checks that rank 0 answers, in seconds.
PULSE_INTERVAL_S = 1.0
#: InfiniBand if available, else TCP. TensorPipe's default on one host, `shm`, listens on a Unix socket to which every
#: local user can connect and for which there is no filter. It also polls without a pause in every rank: on 2 cores the
#: 3 ranks of the RL trainer reached only a quarter to a third of the steps per second.
TRANSPORTS = ("ibv", "uv")
#: Time limit of the graceful shutdown, in seconds: it waits for every rank, also for one that has died.
SHUTDOWN_TIMEOUT_S = 8.0


def remote(function: Callable[P, T]) -> Callable[P, T]:
    """Mark a module-level function or a method as callable from other ranks.

    An exception reaches the caller as a RuntimeError, from which `RemoteError.received` restores role, rank and host.
    """

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            raise RemoteError.received(error) or RemoteError.of(error, _current().place) from None

    return wrapper


class RpcGroup:
    """All ranks of a run by their RPC names, `role:index`."""

    def __init__(self, ctx: Context, timeout_s: float, target: object = None) -> None:
        self._ctx = ctx
        self.target = target
        self._timeout_s = timeout_s
        self._commands: queue.SimpleQueue[tuple[str, tuple[Any, ...]]] = queue.SimpleQueue()
        self.names = tuple(ctx.roles.name_of(rank) for rank in range(ctx.world_size))
        self.token = ctx.topology.token
        store = PrefixStore(f"rpc-{next(_starts)}", ctx.store)
        self.admission = RpcAdmission(PrefixStore("admission", store), ctx.rank, ctx.world_size)
        # This reference keeps the Python object alive; torch keeps only its C++ part.
        self.store = _AnnouncingStore(store, self.admission)
        self.place = f"{self.name} (rank {ctx.rank} on {socket.gethostname()})"

    @property
    def name(self) -> str:
        """RPC name of this rank."""
        return self.names[self._ctx.rank]

    @property
    def peers(self) -> list[str]:
        """RPC names of the other ranks."""
        return [name for name in self.names if name != self.name]

    def of_role(self, role: str) -> list[str]:
        """Return the RPC names of a role's ranks, ordered by index."""
        return [name for name in self.names if name.partition(":")[0] == role]

    def order(self, command: str, *arguments: Any, to: Sequence[str] | None = None) -> None:
        """Send a command from rank 0 to other ranks; does not wait for its execution.

        Each rank executes its commands in its main thread, in the order in which they were sent.

        Args:
            command: a key of the mapping that the receiver passes to `serve`.
            arguments: arguments of the receiver's function.
            to: RPC names of the receivers; None means every other rank.
        """
        names = self.peers if to is None else to
        for future in [rpc.rpc_async(name, _enqueue, (command, arguments)) for name in names]:
            future.wait()

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
                self._pulse(stop=self._ctx.stop_signalled and not is_stop_sent)
                is_stop_sent = self._ctx.stop_signalled
                continue
            if command == LEAVE:
                return
            commands[command](*arguments)

    def _pulse(self, *, stop: bool) -> None:
        try:
            rpc.rpc_sync(self.names[0], _pulse, (stop,), timeout=self._timeout_s)
        except RuntimeError as error:
            raise PeerLost(f"{self.names[0]} (rank 0) does not answer: {_first_line(error)}") from error

    def ping_all(self) -> None:
        """Call every rank once and compare tokens. Raises PeerLost, which names the pair.

        This opens all connections that RPC uses later, including the one of a rank to itself.
        """
        futures = {name: rpc.rpc_async(name, _token, timeout=self._timeout_s) for name in self.names}
        for name, future in futures.items():
            try:
                token = future.wait()
            except RuntimeError as error:
                raise PeerLost(f"{self.place} cannot call {name}: {_first_line(error)}") from error
            if token != self.token:
                raise PeerLost(f"{name} belongs to {token!r}, this is {self.token!r}")


def rpc_target(kind: type[T]) -> T:
    """Return the object that this rank passed to `rpc_group`, for use in a `@remote` function.

    Args:
        kind: class of the object.

    Raises HpcdistError if this rank passed no object of this class.
    """
    target = _current().target
    if not isinstance(target, kind):
        raise HpcdistError(f"{_current().place} has no {kind.__name__} for calls from other ranks")
    return target


_group: RpcGroup | None = None
_starts = itertools.count()


def _current() -> RpcGroup:
    if _group is None:
        raise HpcdistError("no rpc_group is open in this process")
    return _group


def _enqueue(command: str, arguments: tuple[Any, ...]) -> None:
    _current()._commands.put((command, arguments))


def _pulse(stop: bool) -> None:
    if stop:
        _current()._ctx.request_stop()


def _token() -> str:
    return _current().token


@contextmanager
def rpc_group(
    ctx: Context,
    *,
    timeout_s: float = 60.0,
    num_threads: int = 16,
    device_maps: dict[str, dict[Any, Any]] | None = None,
    target: object = None,
) -> Iterator[RpcGroup]:
    """Start RPC on every rank, check every pair, and shut RPC down on all ranks after the block.

    After an error inside the block there is no shutdown: other ranks may have died, and it would wait for them. The
    worker then ends the process.

    Args:
        ctx: the context of this rank.
        timeout_s: default time limit of a call, in seconds.
        num_threads: number of calls that this rank answers at the same time.
        device_maps: by RPC name, a map from this rank's GPU to that rank's GPU; tensors on mapped GPUs are sent
            directly.
        target: the object that calls from other ranks use (`rpc_target`) while the group is open.
    """
    global _group
    group = RpcGroup(ctx, timeout_s, target)
    _group = group
    sign_messages(ctx.attempt.read_key())
    options = rpc.TensorPipeRpcBackendOptions(
        num_worker_threads=num_threads,
        rpc_timeout=timeout_s,
        init_method="hpcdist://",
        device_maps=device_maps,
        _transports=list(TRANSPORTS),
    )
    with _quiet(), group.admission.open():
        rpc.init_rpc(group.name, rank=ctx.rank, world_size=ctx.world_size, rpc_backend_options=options)
        group.ping_all()
    log.info("RPC: %s is connected to %d peers", group.name, len(group.peers))
    yield group
    if ctx.is_main:
        group.order(LEAVE)
    try:
        with _quiet():
            rpc.shutdown(graceful=True, timeout=SHUTDOWN_TIMEOUT_S)
        # RPC's shutdown uses the store of rank 0, so rank 0 must not exit before all ranks have finished it.
        ctx.barrier()
    except RuntimeError as error:
        raise PeerLost(f"{group.place}: the other ranks did not shut down RPC: {_first_line(error)}") from error
    _group = None


class _AnnouncingStore(Store):
    """The store that RPC uses to start and shut down; it closes RPC's sockets before it publishes their addresses."""

    def __init__(self, store: Store, admission: RpcAdmission) -> None:
        super().__init__()
        self._store, self._admission = store, admission

    def set(self, key: str, value: str) -> None:
        if b"://" in (value.encode() if isinstance(value, str) else value):
            self._admission.shut()
        else:
            self._admission.begin()
        self._store.set(key, value)

    # torch's C++ code looks these methods up by name on the class.
    def get(self, key: str) -> bytes:
        return self._store.get(key)

    def add(self, key: str, amount: int) -> int:
        return self._store.add(key, amount)

    def wait(self, *arguments: Any) -> None:
        self._store.wait(*arguments)

    def check(self, keys: list[str]) -> bool:
        return self._store.check(keys)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return self._store.compare_set(key, expected, desired)

    def delete_key(self, key: str) -> bool:
        return self._store.delete_key(key)

    def set_timeout(self, timeout: timedelta) -> None:
        self._store.set_timeout(timeout)


def _rendezvous(url: str, **_: Any) -> Iterator[tuple[Store, int, int]]:
    """Use the process group's store, which is authenticated already: RPC needs no second port and no second proof."""
    group = _current()
    yield group.store, group._ctx.rank, group._ctx.world_size


register_rendezvous_handler("hpcdist", _rendezvous)


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress a deprecation warning that torch's own start and shutdown of RPC cause (torch 2.10 to 2.15)."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="You are using a Backend .* as a ProcessGroup", category=UserWarning)
        yield


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
