"""RPC between the ranks of a run, in one context manager: names, options, a check of every pair, and an end that comes.

    with rpc_group(ctx) as group:
        if ctx.is_main:
            ...                                 # leads: calls the others, tells them when to save
        else:
            group.serve({"save": save_my_part})  # until rank 0 leaves its block

Rank 0 leads. The others answer calls in RPC's own threads, and in their main thread they do what rank 0 orders, so
that orders may hold collectives: all ranks are in one process group as well. Source of the method:
https://docs.pytorch.org/docs/stable/rpc.html
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
#: How often a rank that serves shows a sign of life, and asks rank 0 for one.
PULSE_EVERY_S = 1.0
#: InfiniBand where there is some, sockets elsewhere. TensorPipe's own choice on one host, `shm`, listens on a Unix
#: socket that every local user can connect to and that no filter closes; it also polls without a pause in every rank:
#: on 2 cores the RL trainer's 3 ranks did a quarter to a third of the steps.
TRANSPORTS = ("ibv", "uv")
#: A graceful shutdown waits for every rank; one that has died never comes.
SHUTDOWN_S = 8.0


def remote(function: Callable[P, T]) -> Callable[P, T]:
    """Mark a function of a module's top level, or a method, as one that other ranks call.

    What it raises reaches the caller as a RuntimeError that `RemoteError.received` reads.
    """

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            raise RemoteError.received(error) or RemoteError.of(error, _here().where) from None

    return wrapper


class RpcGroup:
    """All ranks of a run, by the names `role:index` that RPC knows them by."""

    def __init__(self, ctx: Context, timeout_s: float, target: object = None) -> None:
        self._ctx = ctx
        self.target = target
        self._timeout_s = timeout_s
        self._orders: queue.SimpleQueue[tuple[str, tuple[Any, ...]]] = queue.SimpleQueue()
        self.names = tuple(ctx.roles.name_of(rank) for rank in range(ctx.world_size))
        self.token = ctx.topology.token
        store = PrefixStore(f"rpc-{next(_starts)}", ctx.store)
        self.admission = RpcAdmission(PrefixStore("admission", store), ctx.rank, ctx.world_size)
        # Kept here: torch holds the C++ half of it alone.
        self.store = _AnnouncingStore(store, self.admission)
        self.where = f"{self.name} (rank {ctx.rank} on {socket.gethostname()})"

    @property
    def name(self) -> str:
        """This rank's."""
        return self.names[self._ctx.rank]

    @property
    def peers(self) -> list[str]:
        """Everyone's but this rank's."""
        return [name for name in self.names if name != self.name]

    def of_role(self, role: str) -> list[str]:
        """The names of a role's ranks, by index."""
        return [name for name in self.names if name.partition(":")[0] == role]

    def order(self, order: str, *arguments: Any, to: Sequence[str] | None = None) -> None:
        """Rank 0: have others do this in their main threads, after what was ordered before; does not wait.

        Args:
            to: names of those that serve; None means every other rank.
        """
        names = self.peers if to is None else to
        for future in [rpc.rpc_async(name, _take_order, (order, arguments)) for name in names]:
            future.wait()

    def serve(self, orders: Mapping[str, Callable[..., None]], beside: Sequence[Future[None]] = ()) -> None:
        """Do what rank 0 orders, until it leaves. A stop signal that reaches this rank is handed on to rank 0.

        Args:
            beside: work of this rank's own threads; what it raises is raised here.

        Raises PeerLost when rank 0 is gone.
        """
        told = False
        while True:
            for work in beside:
                if work.done():
                    work.result()
            try:
                order, arguments = self._orders.get(timeout=PULSE_EVERY_S)
            except queue.Empty:
                self._ctx.alive()
                self._pulse(stop=self._ctx.stop_signalled and not told)
                told = self._ctx.stop_signalled
                continue
            if order == LEAVE:
                return
            orders[order](*arguments)

    def _pulse(self, *, stop: bool) -> None:
        try:
            rpc.rpc_sync(self.names[0], _pulse, (stop,), timeout=self._timeout_s)
        except RuntimeError as error:
            raise PeerLost(f"{self.names[0]} (rank 0) does not answer: {_first_line(error)}") from error

    def ping_all(self) -> None:
        """Call every rank once and compare tokens, before work starts. Raises PeerLost, naming the pair.

        This makes all connections that RPC will ever use, also the one of a rank to itself.
        """
        futures = {name: rpc.rpc_async(name, _token, timeout=self._timeout_s) for name in self.names}
        for name, future in futures.items():
            try:
                token = future.wait()
            except RuntimeError as error:
                raise PeerLost(f"{self.where} cannot call {name}: {_first_line(error)}") from error
            if token != self.token:
                raise PeerLost(f"{name} belongs to {token!r}, this is {self.token!r}")


def rpc_target(kind: type[T]) -> T:
    """Return this rank's object of that class that calls of other ranks are meant for.

    A `@remote` function calls it: the object is the one that this rank has given to `rpc_group`.
    """
    target = _here().target
    if not isinstance(target, kind):
        raise HpcdistError(f"{_here().where} has no {kind.__name__} for calls of other ranks")
    return target


_group: RpcGroup | None = None
_starts = itertools.count()


def _here() -> RpcGroup:
    if _group is None:
        raise HpcdistError("no rpc_group is open in this process")
    return _group


def _take_order(order: str, arguments: tuple[Any, ...]) -> None:
    _here()._orders.put((order, arguments))


def _pulse(stop: bool) -> None:
    if stop:
        _here()._ctx.ask_stop()


def _token() -> str:
    return _here().token


@contextmanager
def rpc_group(
    ctx: Context,
    *,
    timeout_s: float = 60.0,
    num_threads: int = 16,
    device_maps: dict[str, dict[Any, Any]] | None = None,
    target: object = None,
) -> Iterator[RpcGroup]:
    """Start RPC on every rank, check every pair, and end it together after the block.

    An error inside the block is raised at once: peers may be dead, and nobody waits for them. The worker then ends
    the process.

    Args:
        timeout_s: how long a call may take unless it says otherwise.
        num_threads: how many calls this rank answers at once.
        device_maps: by peer, this rank's GPU to that one's; tensors of mapped GPUs travel directly.
        target: the object that calls of other ranks use (`rpc_target`), for as long as the group is open.
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
    log.info("rpc: %s, %d peers answer", group.name, len(group.peers))
    yield group
    if ctx.is_main:
        group.order(LEAVE)
    try:
        with _quiet():
            rpc.shutdown(graceful=True, timeout=SHUTDOWN_S)
        # The end of RPC goes through the store too, which is gone with the first rank that leaves.
        ctx.barrier()
    except RuntimeError as error:
        raise PeerLost(f"{group.where} ended RPC alone: {_first_line(error)}") from error
    _group = None


class _AnnouncingStore(Store):
    """The ranks' store as RPC's start and end use it; it shuts RPC's sockets before their address is told to anyone."""

    def __init__(self, store: Store, admission: RpcAdmission) -> None:
        super().__init__()
        self._store, self._admission = store, admission

    def set(self, key: str, value: str) -> None:
        if b"://" in (value.encode() if isinstance(value, str) else value):
            self._admission.shut()
        else:
            self._admission.begin()
        self._store.set(key, value)

    # torch's C++ calls these by name, on the class.
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
    """Meet in the process group's store, which has shown that it is this job's: no second port, no second guard."""
    group = _here()
    yield group.store, group._ctx.rank, group._ctx.world_size


register_rendezvous_handler("hpcdist", _rendezvous)


@contextmanager
def _quiet() -> Iterator[None]:
    """torch's own start and end of RPC use what torch has deprecated (2.10 to 2.15); users can do nothing about it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="You are using a Backend .* as a ProcessGroup", category=UserWarning)
        yield


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
