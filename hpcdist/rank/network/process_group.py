"""The process group's life: a guarded rendezvous before, release on every path after."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import (  # type: ignore[attr-defined]  # torch exports them at run time
    FileStore,
    HashStore,
    PrefixStore,
    Store,
    TCPStore,
)

from hpcdist.errors import RendezvousError
from hpcdist.rank.network import own_sockets
from hpcdist.rank.network.own_sockets import Address
from hpcdist.rank.network.peer_admission import guard_gloo
from hpcdist.rank.network.store_gate import LOOPBACK, PROOF_S, StoreServer, open_relay, prove
from hpcdist.rank.topology import Topology


@dataclass(frozen=True)
class Groups:
    """What the ranks have in common beside the default group."""

    #: Gloo on CPU tensors, for small words between the ranks that must not wait for the device; None in a world of one.
    control: dist.ProcessGroup | None
    #: Where they met. Only they can reach it.
    store: Store


@contextmanager
def deadline(seconds: float, on_expiry: Callable[[], None]) -> Iterator[None]:
    """Call `on_expiry` from a thread when the block takes longer than `seconds`.

    Connecting to a stranger's port blocks inside C++ for longer than any timeout that torch takes (measured), so
    `on_expiry` is expected to report and end the process.
    """
    timer = threading.Timer(seconds, on_expiry)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def open_store(topology: Topology, key: bytes, timeout_s: float, folder: Path) -> Store:
    """The ranks' common store, which only processes that know the attempt's key can read and write.

    A world of one needs no port. Where the kernel allows no filter on rank 0's own TCPStore, the ranks of one machine
    share a file in `folder`, which only their user can enter; those of several machines go without the filter.

    Raises RendezvousError when the port is taken, nobody listens, or whoever does is not
    rank 0 of this attempt.
    """
    if topology.world_size == 1:
        return HashStore()
    if topology.num_nodes == 1 and not own_sockets.can_filter():
        store = FileStore(str(folder / "store"), topology.world_size)
        store.set_timeout(timedelta(seconds=max(timeout_s, 1.0)))
        return store
    address = (topology.master_addr, topology.master_port)
    where = f"{topology.master_addr}:{topology.master_port}"
    timeout = timedelta(seconds=max(timeout_s, 1.0))
    if topology.rank == 0:
        server = StoreServer(
            address,
            key,
            topology.token,
            world_size=topology.world_size,
            timeout=timeout,
            beyond_here=topology.num_nodes > 1,
        )
        port = open_relay(server.connect)
    else:
        until = time.monotonic() + timeout_s
        try:
            _connect(address, key, topology.token, until).close()
        except (OSError, RendezvousError) as error:
            if isinstance(error, RendezvousError):
                problem = f"the program at {where} is not rank 0 of this attempt ({topology.token}): {error}"
            else:
                problem = f"rank {topology.rank} cannot reach the master at {where}: {error}"
            raise RendezvousError(problem) from error
        port = open_relay(lambda: _connect(address, key, topology.token, time.monotonic() + PROOF_S))
    try:
        return TCPStore(LOOPBACK, port, topology.world_size, is_master=False, timeout=timeout, wait_for_workers=False)
    except RuntimeError as error:
        raise RendezvousError(
            f"rank {topology.rank} cannot use the store at {where}: {str(error).splitlines()[0]}"
        ) from error


def _connect(address: Address, key: bytes, token: str, until: float) -> socket.socket:
    """A connection to rank 0's gate, once it listens and both sides have proved that they know the key.

    Raises OSError when it cannot be reached, RendezvousError when another program answers.
    """
    pause_s = 0.005
    while True:
        try:
            sock = socket.create_connection(address, timeout=max(1.0, until - time.monotonic()))
        except ConnectionRefusedError:
            if time.monotonic() > until:
                raise
            time.sleep(pause_s)  # nothing tells when another process begins to listen
            pause_s = min(0.25, 1.5 * pause_s)
            continue
        try:
            sock.settimeout(max(1.0, until - time.monotonic()))
            prove(sock, key, token.encode())
        except OSError as error:
            sock.close()
            raise RendezvousError(str(error)) from error
        except RendezvousError:
            sock.close()
            raise
        return sock


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
    """Initialise torch.distributed for this rank and tear it down after the block.

    On an error inside the block nothing is torn down: peers may be dead, and a shutdown would wait for them. The
    worker ends the process right after.

    Args:
        key: the attempt's.
        folder: the attempt's; see `open_store`.
        init_timeout_s: how long the ranks may take to find each other.
        timeout_s: how long a collective may take.
        on_expiry: see `deadline`.
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
