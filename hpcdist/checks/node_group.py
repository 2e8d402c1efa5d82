"""The group of all nodes of a job before its ranks start: who joins it, and how fast each node computes and receives.

One process per node meets the others at the rendezvous store, as ranks do, and each stage begins when all nodes have
reached it:

1. All join the store. A node that does not is named by its missing answer.
2. Each connects to some others, because gloo does not say which connection of a group has failed.
3. Each times a computation, so that a slow processor is seen.
4. Each sends to one node and receives from another at the same time, as in the steps of a ring all-reduce; the time
   of a step is taken at the receiver. The rings differ, so that a node is slow with all its partners and a healthy
   node is not.
"""

import os
import socket
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # torch exports them at run time

from hpcdist.checks.node_links import TRANSFER_BYTES, shifts
from hpcdist.config.topology import Topology
from hpcdist.errors import HpcdistError
from hpcdist.rank.network_interface import interface_env
from hpcdist.rank.process_group import open_store
from hpcdist.run.folder import RunDir

#: TCP repeats a lost first packet after one and three seconds.
CONNECT_S = 3.5
#: Time limit of one transfer.
TRANSFER_S = 20.0
#: Transfers of one ring, of which the fastest counts, since other load only prolongs them; fewer if one takes long.
TRANSFERS, MIN_TRANSFERS, LONG_S = 5, 3, 0.2
#: Timings of the computation, of which the fastest counts, since other load only prolongs them. A CPU quota stops a
#: process for the rest of each 100 ms, which a shorter computation might not meet: each takes about 0.1 s.
COMPUTATIONS, PRODUCTS, MATRIX_SIZE = 2, 400, 256
#: Time for a stage that all nodes have begun, beside its own limits: a node may be busy.
STAGE_S = 20.0
#: Time for the others to end after the first node is done.
LEAVE_S = 5.0


def join(run_folder: Path, attempt: int, join_s: float) -> dict[str, Any]:
    """Join the group of all nodes of the step, and return the observations of this node in it.

    Returns:
        `joined`: whether it has reached the store; `error`: why it has not gone through all stages; `connections`: by
        node, why there is none, empty if there is one; `compute_s`: seconds of the computation; `received_s`: seconds
        of a transfer by its source. Values that were not measured are missing.
    """
    found: dict[str, Any] = {"joined": False}
    stages = None
    try:
        topology = Topology.from_env(os.environ)
        os.environ.update(interface_env(topology.master_addr, os.environ))
        folder = RunDir(run_folder).attempt(attempt)
        began = time.monotonic()
        store = open_store(topology, folder.read_key(), join_s, folder.path)
        found["joined"] = True
        stages = Stages(store, topology.world_size)
        stages.meet("joined", join_s - (time.monotonic() - began))
        found["connections"] = connect(topology, store, stages)
        num_failures = sum(reason != "" for reason in found["connections"].values())
        store.add("failures", num_failures)
        stages.meet("connected", STAGE_S)
        if store.add("failures", 0) == 0:
            found["compute_s"] = computation_s()
            found["received_s"] = transfers(topology, store)
    except (HpcdistError, RuntimeError, OSError) as error:
        found["error"] = " ".join(str(error).split())[:300]
    if stages is not None:
        stages.leave(is_first=topology.rank == 0)
    return found


class Stages:
    """Lets all nodes wait for each other."""

    def __init__(self, store: Store, num_nodes: int) -> None:
        self._store, self._num_nodes = store, num_nodes

    def meet(self, stage: str, limit_s: float) -> None:
        """Return when all nodes have called this. Raises DistStoreError, a RuntimeError, after the limit."""
        key = f"stage/{stage}"
        if self._store.add(f"{key}/nodes", 1) == self._num_nodes:
            self._store.set(key, "")
        self._store.wait([key], timedelta(seconds=max(0.0, limit_s)))

    def leave(self, *, is_first: bool) -> None:
        """Let the first node stay until the others have left: the store ends with its process."""
        with suppress(HpcdistError, RuntimeError):
            if self._store.add("left", 1) == self._num_nodes:
                self._store.set("all have left", "")
            if is_first:
                self._store.wait(["all have left"], timedelta(seconds=LEAVE_S))


def connect(topology: Topology, store: Store, stages: Stages) -> dict[str, str]:
    """Connect to a new port of the next node of each ring. The kernel accepts the connections; no data is sent.

    Returns:
        By node, why the connection fails; empty if it works.
    """
    hosts, rank = topology.hosts, topology.rank

    def try_node(partner: int) -> str:
        try:
            port = int(store.get(f"port/{partner}"))
            socket.create_connection((hosts[partner], port), CONNECT_S).close()
        except TimeoutError:
            return "packets to it are dropped"
        except OSError as error:
            return error.strerror or str(error)
        return ""

    with socket.create_server(("", 0)) as server:
        store.set(f"port/{rank}", str(server.getsockname()[1]))
        partners = [(rank + shift) % len(hosts) for shift in shifts(len(hosts))]
        with ThreadPoolExecutor(len(partners)) as pool:
            reasons = dict(zip(partners, pool.map(try_node, partners), strict=True))
        stages.meet("tried", CONNECT_S + STAGE_S)
    return {hosts[partner]: reason for partner, reason in reasons.items()}


def computation_s() -> float:
    """Return the shortest time of some matrix products on one core."""
    torch.set_num_threads(1)
    matrix = torch.ones(MATRIX_SIZE, MATRIX_SIZE)
    seconds = []
    for _ in range(COMPUTATIONS):
        began = time.perf_counter()
        for _ in range(PRODUCTS):
            torch.mm(matrix, matrix)
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def transfers(topology: Topology, store: Store) -> dict[str, float]:
    """Return the shortest time of a transfer from the previous node of each ring, by its name."""
    hosts, rank = topology.hosts, topology.rank
    dist.init_process_group(
        "gloo",
        store=PrefixStore("nodes", store),
        rank=rank,
        world_size=len(hosts),
        timeout=timedelta(seconds=TRANSFER_S),
    )
    found = {}
    for shift in shifts(len(hosts)):
        source, target = (rank - shift) % len(hosts), (rank + shift) % len(hosts)
        found[hosts[source]] = min(_timed_transfers(source, target))
    return found


def _timed_transfers(source: int, target: int) -> Sequence[float]:
    leaving = torch.zeros(TRANSFER_BYTES, dtype=torch.uint8)
    arriving = torch.empty_like(leaving)
    slowest = torch.zeros(1)
    seconds: list[float] = []
    while len(seconds) < TRANSFERS:
        if len(seconds) >= MIN_TRANSFERS and slowest.item() >= LONG_S:
            break
        dist.barrier()
        began = time.perf_counter()
        sending = dist.isend(leaving, target)
        receiving = dist.irecv(arriving, source)
        assert sending is not None
        assert receiving is not None
        receiving.wait()
        seconds.append(time.perf_counter() - began)
        sending.wait()
        # All nodes make the same number of transfers.
        slowest.fill_(seconds[-1])
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return seconds
