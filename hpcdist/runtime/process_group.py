"""The process group's life: a guarded rendezvous before, release on every path after."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import (  # type: ignore[attr-defined]  # torch exports them at run time
    HashStore,
    PrefixStore,
    Store,
    TCPStore,
)

from hpcdist.cluster.topology import Topology
from hpcdist.errors import RendezvousError

_JOB_KEY = "hpcdist/job"


@dataclass(frozen=True)
class Groups:
    """What the ranks have in common beside the default group."""

    #: Gloo on CPU tensors, for small words between the ranks that must not wait for the device; None in a world of one.
    control: dist.ProcessGroup | None
    #: Where they met. It has shown that it is this job's.
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


def open_store(topology: Topology, timeout_s: float) -> Store:
    """The ranks' common store, after proof that it is this job's and not a stranger's on the same port.

    A world of one needs no port. Raises RendezvousError when the port is taken, nobody listens, or the token is
    another job's.
    """
    if topology.world_size == 1:
        return HashStore()
    where = f"{topology.master_addr}:{topology.master_port}"
    if topology.rank != 0:
        timeout_s -= _wait_for_listener(topology.master_addr, topology.master_port, timeout_s)
    timeout = timedelta(seconds=max(timeout_s, 1.0))
    try:
        store = TCPStore(
            topology.master_addr,
            topology.master_port,
            topology.world_size,
            is_master=topology.rank == 0,
            timeout=timeout,
            wait_for_workers=False,
        )
    except (dist.DistNetworkError, dist.DistStoreError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        if topology.rank == 0:
            raise RendezvousError(f"rank 0 cannot listen on {where}: {reason}") from error
        raise RendezvousError(f"rank {topology.rank} cannot reach the master at {where}: {reason}") from error
    if topology.rank == 0:
        store.set(_JOB_KEY, topology.token)
        return store
    try:
        store.wait([_JOB_KEY], timeout)
        token = store.get(_JOB_KEY).decode()
    except (dist.DistStoreError, dist.DistNetworkError, RuntimeError) as error:
        raise RendezvousError(f"the store at {where} has no token of hpcdist: another program's?") from error
    if token != topology.token:
        raise RendezvousError(f"the store at {where} belongs to job {token!r}, this is {topology.token!r}")
    return store


def _wait_for_listener(host: str, port: int, timeout_s: float) -> float:
    """Wait until a connection is taken, or cannot be for another reason than that nobody listens yet; returns seconds.

    A TCPStore that finds nobody sleeps for 0.3 to 4 s (measured) before it looks again, and ranks that are started
    at once find nobody half of the time.
    """
    began = time.monotonic()
    pause_s = 0.005
    while (waited_s := time.monotonic() - began) < timeout_s:
        try:
            socket.create_connection((host, port), timeout=timeout_s - waited_s).close()
        except ConnectionRefusedError:
            time.sleep(pause_s)  # nothing tells when another process begins to listen
            pause_s = min(0.25, 1.5 * pause_s)
        except OSError:
            break  # TCPStore says what is wrong
        else:
            break
    return time.monotonic() - began


@contextmanager
def process_groups(
    topology: Topology,
    device: torch.device,
    backend: str,
    *,
    init_timeout_s: float,
    timeout_s: float,
    on_expiry: Callable[[], None],
) -> Iterator[Groups]:
    """Initialise torch.distributed for this rank and tear it down after the block.

    On an error inside the block nothing is torn down: peers may be dead, and a shutdown would wait for them. The
    worker ends the process right after.

    Args:
        init_timeout_s: how long the ranks may take to find each other.
        timeout_s: how long a collective may take.
        on_expiry: see `deadline`.
    """
    control: dist.ProcessGroup | int | None = None
    with deadline(init_timeout_s, on_expiry):
        store = open_store(topology, init_timeout_s)
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
