"""Initialise torch.distributed for a rank: an authenticated rendezvous before, and a release on every path after."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store  # type: ignore[attr-defined]  # exported at run time

from hpcdist.errors import RendezvousError
from hpcdist.rank.network.curve import CurveKeys
from hpcdist.rank.network.peer_admission import guard_gloo
from hpcdist.rank.network.rendezvous_store import Meeting, RendezvousStore, has_unix_sockets
from hpcdist.rank.topology import Topology

T = TypeVar("T")


@dataclass(frozen=True)
class Groups:
    """The process group and the store that the ranks use besides the default group.

    Attributes:
        control: a gloo group of all ranks for small CPU tensors, which need not wait for the device; None if the world
            size is 1.
        store: the store of the rendezvous, which only ranks can access.
    """

    control: dist.ProcessGroup | None
    store: Store

    def barrier(self) -> None:
        """Wait until every rank has called `barrier`."""
        if self.control is not None:
            dist.barrier(group=self.control)

    def sum(self, values: Sequence[float]) -> list[float]:
        """Return the sum of each value over all ranks, in double precision, on every rank."""
        return self._all_reduce(values, dist.ReduceOp.SUM)

    def max(self, values: Sequence[float]) -> list[float]:
        """Return the maximum of each value over all ranks, in double precision, on every rank."""
        return self._all_reduce(values, dist.ReduceOp.MAX)

    def _all_reduce(self, values: Sequence[float], op: dist.ReduceOp.RedOpType) -> list[float]:
        tensor = torch.tensor(values, dtype=torch.float64)
        if self.control is not None:
            dist.all_reduce(tensor, op, group=self.control)
        return [float(value) for value in tensor.tolist()]

    def all_gather(self, value: T) -> list[T]:
        """Return the values of all ranks by rank, on every rank."""
        if self.control is None:
            return [value]
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, value, group=self.control)
        return found

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks by rank on rank 0, and an empty list on the other ranks."""
        if self.control is None:
            return [value]
        is_main = dist.get_rank() == 0
        found: list[Any] = [None] * dist.get_world_size()
        dist.gather_object(value, found if is_main else None, dst=0, group=self.control)
        return found if is_main else []

    def broadcast(self, value: T) -> T:
        """Return rank 0's value on every rank."""
        values = [value]
        if self.control is not None:
            dist.broadcast_object_list(values, src=0, group=self.control)
        return values[0]


@contextmanager
def deadline(seconds: float, on_expiry: Callable[[], None]) -> Iterator[None]:
    """Call `on_expiry` from a thread if the block takes longer than `seconds`.

    `on_expiry` must report the error and end the process: a connection to a port of another program blocks inside of
    C++ for longer than any timeout that can be passed to torch (measured).
    """
    timer = threading.Timer(seconds, on_expiry)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def open_store(topology: Topology, key: bytes, timeout_s: float, folder: Path) -> Store:
    """Return the store of all ranks, which only processes that know the attempt's key can access.

    A single rank needs none. Ranks on one machine meet in `folder`, and no port is open.

    Raises RendezvousError if the port is in use, no process listens on it, or the listener is not rank 0 of this
    attempt.
    """
    if topology.world_size == 1:
        return HashStore()
    keys = None
    if topology.num_nodes > 1 or not has_unix_sockets(folder):
        keys = CurveKeys(key, topology.token)
    meeting = Meeting(
        token=topology.token,
        folder=folder,
        host=topology.master_addr,
        port=topology.master_port,
        keys=keys,
        has_remote_ranks=topology.num_nodes > 1,
    )
    timeout = timedelta(seconds=max(timeout_s, 1.0))
    try:
        return RendezvousStore(meeting, timeout, serve=topology.rank == 0)
    except OSError as error:
        raise RendezvousError(f"rank {topology.rank} cannot reach the master at {meeting}: {error}") from error


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

    Args:
        key: key of the attempt.
        folder: folder of the attempt; see `open_store`.
        init_timeout_s: time limit for the rendezvous, in seconds.
        timeout_s: time limit for one collective, in seconds.
        on_expiry: called if the rendezvous exceeds its time limit; see `deadline`.
    """
    control: dist.ProcessGroup | int | None = None
    with deadline(init_timeout_s, on_expiry):
        store = open_store(topology, key, init_timeout_s, folder)
        guard_gloo()
        dist.init_process_group(
            backend,
            store=PrefixStore("hpcdist", store),
            rank=topology.rank,
            world_size=topology.world_size,
            timeout=timedelta(seconds=timeout_s),
            device_id=device if device.type == "cuda" else None,
        )
        if topology.world_size > 1:
            control = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s), group_desc="control")
    assert control is None or isinstance(control, dist.ProcessGroup)
    yield Groups(control, store)
    dist.destroy_process_group()
