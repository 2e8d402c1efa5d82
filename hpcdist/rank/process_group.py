"""Seeds and torch.distributed of a rank: authenticated rendezvous, and gloo connections between ranks only."""

import json
import logging
import os
import random
import secrets
import socket
import stat
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store, distributed_c10d  # type: ignore[attr-defined]

from hpcdist.config.topology import Topology
from hpcdist.errors import RendezvousError
from hpcdist.rank.device import refuse_shared_gpu
from hpcdist.rank.rendezvous_store import CurveKeys, Meeting, RendezvousStore, has_unix_sockets

T = TypeVar("T")


@dataclass(frozen=True)
class Groups:
    """A group of ranks for small values in host memory, which wait for no device, and the store of all ranks."""

    control: dist.ProcessGroup | None
    """A gloo group; None for a single rank."""
    store: Store  #: of the rendezvous, closed to other users

    def barrier(self) -> None:
        if self.control is not None:
            dist.barrier(group=self.control)

    def sum(self, values: Sequence[float]) -> list[float]:
        """Return the sum of each value over all ranks, in double precision, on every rank."""
        return self._all_reduce(values, dist.ReduceOp.SUM)

    def max(self, values: Sequence[float]) -> list[float]:
        return self._all_reduce(values, dist.ReduceOp.MAX)

    def _all_reduce(self, values: Sequence[float], op: dist.ReduceOp.RedOpType) -> list[float]:
        tensor = torch.tensor(values, dtype=torch.float64)
        if self.control is not None:
            dist.all_reduce(tensor, op, group=self.control)
        return [float(value) for value in tensor.tolist()]

    def all_gather(self, value: T) -> list[T]:
        if self.control is None:
            return [value]
        found: list[Any] = [None] * dist.get_world_size(self.control)
        dist.all_gather_object(found, value, group=self.control)
        return found

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks on rank 0, and an empty list on the others."""
        if self.control is None:
            return [value]
        is_main = dist.get_rank() == 0
        found: list[Any] = [None] * dist.get_world_size(self.control)
        dist.gather_object(value, found if is_main else None, dst=0, group=self.control)
        return found if is_main else []

    def broadcast(self, value: T) -> T:
        values = [value]
        if self.control is not None:
            dist.broadcast_object_list(values, src=0, group=self.control)
        return values[0]


@contextmanager
def process_groups(
    topology: Topology,
    device: torch.device,
    backend: str,
    key: bytes,
    folder: Path,
    *,
    init_timeout_s: float,
    timeout_s: float,
    on_expiry: Callable[[], None],
) -> Iterator[Groups]:
    """Initialise torch.distributed for this rank, and destroy the process group after the block.

    After an error inside the block nothing is destroyed: other ranks may have died, and the shutdown would wait for
    them. The worker then ends the process.

    `init_timeout_s` limits the rendezvous (see `deadline`), `timeout_s` one collective.
    """
    control: dist.ProcessGroup | int | None = None
    with deadline(init_timeout_s, on_expiry):
        store = open_store(topology, key, init_timeout_s, folder)
        refuse_shared_gpu(device, topology, store, os.environ)
        guard_gloo()
        dist.init_process_group(
            backend,
            store=PrefixStore("hpcdist", store),
            rank=topology.rank,
            world_size=topology.world_size,
            timeout=timedelta(seconds=timeout_s),
            # A GPU bound to a default group of gloo would make each NCCL group a split of it, which fails (torch 2.11).
            device_id=None if backend == "gloo" else device,
        )
        if topology.world_size > 1:
            control = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s), group_desc="control")
    assert control is None or isinstance(control, dist.ProcessGroup)
    yield Groups(control, store)
    dist.destroy_process_group()


def gloo_group(ranks: Sequence[int], timeout: timedelta) -> dist.ProcessGroup | None:
    """Return a gloo group of these ranks, and None on the others; every rank has to take part."""
    # Before torch 2.15, ranks outside the group would split a default group of NCCL that is bound to a GPU, and wait
    # for its other ranks, which as members of a gloo group split nothing.
    world: Any = dist.group.WORLD
    bound, world.bound_device_id = world.bound_device_id, None
    try:
        group = dist.new_group([*ranks], timeout, "gloo")
    finally:
        world.bound_device_id = bound
    return group if isinstance(group, dist.ProcessGroup) else None


@contextmanager
def deadline(seconds: float, on_expiry: Callable[[], None]) -> Iterator[None]:
    """Call `on_expiry` from a thread if the block takes longer than `seconds`.

    `on_expiry` must report the error and end the process: the creation of a group waits inside of C++, with the longer
    time limit of a collective.
    """
    timer = threading.Timer(seconds, on_expiry)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def open_store(topology: Topology, key: bytes, timeout_s: float, folder: Path) -> Store:
    """Return the store of all ranks.

    Ranks on one machine meet in `folder`, which only its user can enter: no port is open, and no key is needed. Others
    need the attempt's key. Raises RendezvousError if the port is in use, no process listens on it, or the listener is
    not rank 0 of this attempt.
    """
    if topology.world_size == 1:
        return HashStore()
    has_remote_ranks = topology.num_nodes > 1
    meeting = Meeting(
        token=topology.token,
        folder=folder,
        host=topology.master_addr,
        port=topology.master_port,
        keys=CurveKeys(key, topology.token) if has_remote_ranks or not has_unix_sockets(folder) else None,
        has_remote_ranks=has_remote_ranks,
    )
    try:
        return RendezvousStore(meeting, timedelta(seconds=max(timeout_s, 1.0)), serve=topology.rank == 0)
    except OSError as error:
        raise RendezvousError(f"rank {topology.rank} cannot reach the master at {meeting}: {error}") from error


# The TCP sockets that libraries open in this process: gloo accepts any connection, and has no interface to change that.

#: Host and port.
Address = tuple[str, int]


@dataclass(frozen=True)
class OwnSocket:
    """A TCP socket of this process. `sock` is a duplicate of its descriptor; `tcp_sockets` closes it."""

    descriptor: int
    sock: socket.socket
    inode: int
    local: Address
    peer: Address | None
    """None for a listening socket."""

    def stop_listening(self) -> None:
        # gloo aborts the process if its socket is shut down, or if `accept` fails: the descriptor becomes that of a
        # socket to which nobody can connect.
        with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as silent:
            directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            silent.setblocking(False)
            silent.bind(f"/proc/self/fd/{directory}/removed")
            os.close(directory)
            silent.listen()
            self.sock.close()
            os.dup2(silent.fileno(), self.descriptor, inheritable=False)


@contextmanager
def tcp_sockets() -> Iterator[list[OwnSocket]]:
    """Yield the listening and the connected TCP sockets of this process, including those opened by libraries."""
    found: dict[int, OwnSocket] = {}
    try:
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            try:
                status = os.fstat(descriptor)
                if not stat.S_ISSOCK(status.st_mode) or status.st_ino in found:
                    continue
                sock = socket.socket(fileno=os.dup(descriptor))
            except OSError:  # closed in the meantime
                continue
            try:
                if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM:
                    listens = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                    peer = None if listens else _address(sock.getpeername())
                    inode = os.fstat(sock.fileno()).st_ino
                    found[inode] = OwnSocket(descriptor, sock, inode, _address(sock.getsockname()), peer)
                    continue
            except OSError:  # neither listening nor connected: still connecting, or reset
                pass
            sock.close()
        yield list(found.values())
    finally:
        for own in found.values():
            own.sock.close()


def _address(raw: tuple[str, int]) -> Address:
    return raw[0].removeprefix("::ffff:"), raw[1]


def inodes() -> frozenset[int]:
    """Return the inodes of the TCP sockets that are open now."""
    with tcp_sockets() as found:
        return frozenset(own.inode for own in found)


# Admission of peers: only ranks of this run may connect to the sockets of gloo.
#
# gloo does not authenticate a peer: the first process that connects and sends the number of a pair takes a rank's
# place. gloo connects all pairs in a group's constructor. After it, the ranks exchange lists of their connections and a
# random number each through their store, which only ranks can access. Each rank closes its listening sockets and the
# connections that no other rank lists, and sends its number to each rank over the group. A rank that does not receive
# the right ones may have lost a pair to a stranger: the ranks then agree through the store to create the group again.

log = logging.getLogger(__name__)
#: How often a group is created before its creation fails.
NUM_TRIALS = 100
#: Time limits for the connections of a group whose ranks are all ready: of the first trial, a quarter longer in each
#: further one, and the longest. A rank whose pair a stranger has taken waits that long, and listens meanwhile.
FIRST_CONNECT_TIMEOUT, CONNECT_TIMEOUT = timedelta(seconds=2), timedelta(seconds=30)
_Gloo = distributed_c10d.ProcessGroupGloo


def refuse_strangers(store: Store, rank: int, size: int, before: frozenset[int], number: int) -> tuple[list[int], str]:
    """Close a new group's listening sockets and the connections that no rank of the group has made.

    `store` is used by this group alone, `before` are the `inodes` before its creation, `number` is the random one of
    this rank. Returns the random numbers of all ranks, and a description of the first connection that was closed.
    """
    with tcp_sockets() as found:
        new = [own for own in found if own.inode not in before]
        listening = {own.local: own for own in new if own.peer is None}
        store.set(f"rank/{rank}", json.dumps([number, [(own.local, own.peer) for own in new if own.peer is not None]]))
        numbers, known = [], set()
        for other in range(size):
            theirs, connections = json.loads(store.get(f"rank/{other}"))
            numbers.append(theirs)
            known |= {(tuple(peer), tuple(local)) for local, peer in connections}
        for own in listening.values():
            own.stop_listening()
    strangers = []
    with tcp_sockets() as found:
        for own in found:
            if own.peer and own.local in listening and (own.local, own.peer) not in known:
                strangers.append((own.peer, own.local))
                with suppress(OSError):  # the peer has closed it already
                    own.sock.shutdown(socket.SHUT_RDWR)
    if not strangers:
        return numbers, ""
    peer, local = (f"{host}:{port}" for host, port in strangers[0])
    text = f"{peer} has connected to {local}, but is not a rank of this run"
    log.warning("refused %d connections: %s", len(strangers), text)
    return numbers, text


def _lost_peer(group: dist.ProcessGroup, number: int, numbers: list[int], timeout: timedelta) -> str:
    """Send the rank's number to all ranks of a group; return why not all of theirs arrive, or nothing."""
    received = torch.zeros(len(numbers), dtype=torch.int64)
    # Not an all-gather, which is a ring: it would use two of a rank's connections.
    options = distributed_c10d.AllToAllOptions()
    options.timeout = timeout
    try:
        group.alltoall_base(received, torch.full_like(received, number), [], [], options).wait()
    except RuntimeError as error:
        return str(error).partition(". This is typically")[0]
    return "" if received.tolist() == numbers else "another number arrived"


class _StrangerError(RendezvousError):
    """Another program has connected to a new group."""


class _AdmittingGloo(_Gloo):
    """A gloo group that compares its connections before it is used.

    If a stranger has disturbed the group, all ranks drop it and create it again with other sockets. The time in which
    the sockets listen is short, since no rank begins before the others.
    """

    def __new__(cls, store: Store, rank: int, size: int, timeout: timedelta, **options: Any) -> Self:
        # A C++ object cannot be initialised twice, so each trial needs a new one, which only `__new__` can return.
        disturbed = False
        for trial in range(1, NUM_TRIALS + 1):
            limit = min(timeout, CONNECT_TIMEOUT, FIRST_CONNECT_TIMEOUT * 1.25 ** min(trial - 1, 20))
            fresh = PrefixStore(f"admission/{trial}", store)
            if fresh.add("ready", 1) == size:
                fresh.set("begin", "")
            fresh.wait(["begin"], timeout)
            try:
                group = cls._admitted(fresh, rank, size, limit, None if disturbed else timeout, options)
            except RendezvousError as error:
                if trial == NUM_TRIALS:
                    raise
                disturbed = disturbed or isinstance(error, _StrangerError)
                if trial == 1:
                    log.warning("a process group is created again, up to %d times: %s", NUM_TRIALS - 1, error)
            else:
                group._set_default_timeout(timeout)
                return group
        raise AssertionError

    @classmethod
    def _admitted(
        cls, store: Store, rank: int, size: int, limit: timedelta, timeout: timedelta | None, options: Any
    ) -> Self:
        """Create a group of ranks only. Either all ranks return or all raise RendezvousError.

        gloo has one time limit for its connections, for which it waits five times as long, and for a receive of the
        group. With a `timeout` for the latter, the creation is given up after `limit`, and its thread is abandoned with
        the sockets that it has; a stranger would so use up all descriptors. Without a `timeout`, after a disturbance,
        point-to-point operations that are given none wait for a fifth of `limit`.
        """
        before, number, error = inodes(), secrets.randbits(63), ""
        group: Any = super().__new__(cls)
        created: Future[None] = Future()

        def create(group: Any) -> None:
            try:
                _Gloo.__init__(group, store, rank, size, timeout=timeout or limit / 5, **options)
                created.set_result(None)
            except Exception as problem:  # which `result` raises
                created.set_exception(problem)

        threading.Thread(target=create, args=(group,), name="gloo", daemon=True).start()
        try:
            created.result(limit.total_seconds() if timeout else None)
        except TimeoutError:
            error = f"rank {rank} has no connections to all ranks of a new process group after {limit.seconds} s"
        except RuntimeError as problem:
            error = f"rank {rank} cannot create a process group: {problem}"
        numbers, stranger = refuse_strangers(store, rank, size, before, number)
        if not error and (reason := _lost_peer(group, number, numbers, limit)):
            cause = (
                f"{stranger}; it is another program, or the network translates addresses between the nodes"
                if stranger
                else "another program has taken its place, or a rank has dropped the group"
            )
            error = f"rank {rank} has lost the connection to a rank of a new process group: {cause} ({reason})"
        if error:
            group = None  # at once, since the other ranks wait for its connections
        store.set(f"error/{rank}", json.dumps([not stranger, error] if error else None))
        if errors := [found for other in range(size) if (found := json.loads(store.get(f"error/{other}")))]:
            by_none, text = min(errors)  # one that names a stranger, if a rank has found it
            raise RendezvousError(text) if by_none else _StrangerError(text)
        return group  # type: ignore[no-any-return]

    def __init__(self, *arguments: Any, **options: Any) -> None:
        """Do nothing: `__new__` has initialised the group."""


def guard_gloo() -> None:
    """Make every gloo group that this process creates from now on admit only its own ranks."""
    # The listening sockets are closed after the constructor, so connections must not be deferred to the first use.
    os.environ["TORCH_GLOO_LAZY_INIT"] = "0"
    distributed_c10d.ProcessGroupGloo = _AdmittingGloo  # type: ignore[misc]
    dist.ProcessGroupGloo = _AdmittingGloo  # type: ignore[misc]


def seed_everything(seed: int) -> None:
    """Seed torch (CPU and GPUs), Python's `random`, and NumPy if it is already imported."""
    torch.manual_seed(seed)
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % 2**32)
