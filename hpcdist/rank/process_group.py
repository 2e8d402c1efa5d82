"""Seeds of a rank, and its process groups of torch.distributed, which meet through an authenticated store."""

import io
import logging
import math
import os
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store  # type: ignore[attr-defined]

from hpcdist.config.topology import Topology
from hpcdist.errors import RendezvousError, few
from hpcdist.rank.admission import CurveKeys
from hpcdist.rank.device import refuse_shared_gpu
from hpcdist.rank.rendezvous_store import MAX_WAIT_S, Meeting, RendezvousStore, has_unix_sockets

T = TypeVar("T")
log = logging.getLogger(__name__)
#: Time after which a rank that waits for the others says so.
WAIT_S = 30.0
#: Interval of the heartbeats of a rank in `Groups.await_all`.
ALIVE_S = 1.0
#: Numbers the calls of `Groups.await_all`, by the ranks of the group: all of them make the same calls.
_num_waits: Counter[str] = Counter()


@dataclass(frozen=True)
class Groups:
    """A group of ranks for small values in host memory, which wait for no device, and the store of all ranks.

    Values are tensors, numbers, strings and containers of them. torch's own functions for objects would unpickle what
    they receive, and so execute the code of a process that has taken a rank's place.
    """

    control: dist.ProcessGroup | None
    """A gloo group; None for a single rank."""
    store: Store  #: of the rendezvous, closed to other users

    def barrier(self) -> None:
        """Wait until all ranks have made this call."""
        if self.control is not None:
            dist.barrier(group=self.control)

    def await_all(self, alive: Callable[[], None]) -> None:
        """Wait until all ranks have made this call, with heartbeats and without a time limit.

        For ranks of which one may need minutes more than another, such as to load data: a collective has a time limit,
        and a rank that waits in it counts as hung if the other one is silent, too. After a long wait, rank 0 logs for
        which ranks it waits.

        The supervisor finds a rank that hangs before this call only if that rank has called `ctx.timer.alive` or
        `ctx.should_stop`. Ranks of hpcdist's own trainers count as if they had.

        Args:
            alive: is called about once a second: `ctx.timer.alive`.
        """
        if self.control is None:
            return
        ranks = dist.get_process_group_ranks(self.control)
        group = " ".join(map(str, ranks))
        _num_waits[group] += 1
        key = f"wait {_num_waits[group]} of ranks {group}"
        self.store.append(f"{key}: arrived", f"{dist.get_rank()} ")  # type: ignore[attr-defined]  # torch's stubs lack it
        if self.store.add(key, 1) == len(ranks):
            self.store.set(f"{key} is over", "")
        # A request without a time limit: rank 0 may be in a call that holds the interpreter, so that its store answers
        # nothing for minutes. If rank 0 ends, the request raises PeerLost at once.
        with ThreadPoolExecutor(1, thread_name_prefix="hpcdist-wait") as pool:
            over = pool.submit(self.store.wait, [f"{key} is over"], timedelta(seconds=MAX_WAIT_S))
            alive()
            names_late_at = time.monotonic() + WAIT_S
            while not futures.wait([over], ALIVE_S).done:
                alive()
                # Rank 0 alone asks: here its store answers at once.
                if dist.get_rank() == 0 and time.monotonic() >= names_late_at:
                    names_late_at = math.inf
                    arrived = self.store.get(f"{key}: arrived").decode().split()
                    late = [str(rank) for rank in ranks if str(rank) not in arrived]
                    if late:
                        log.warning("rank 0 has waited %g s for slower ranks, see their logs: %s", WAIT_S, few(late))
        over.result()
        dist.barrier(group=self.control)  # rank 0 serves the store until all ranks know

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
        """Return the values of all ranks, in rank order, on every rank."""
        if self.control is None:
            return [value]
        content = _to_bytes(value)
        sizes = [size for (size,) in self.all_gather_numbers([len(content)])]
        received = [torch.empty(max(sizes), dtype=torch.uint8) for _ in sizes]
        dist.all_gather(received, _padded(content, max(sizes)), group=self.control)
        return [_from_bytes(part[:size]) for part, size in zip(received, sizes, strict=True)]

    def all_gather_numbers(self, numbers: Sequence[int]) -> list[list[int]]:
        """Return the numbers of all ranks, in rank order, on every rank. All ranks pass equally many, of 64 bits."""
        if self.control is None:
            return [list(map(int, numbers))]
        own = torch.tensor(numbers, dtype=torch.int64)
        received = [torch.empty_like(own) for _ in range(dist.get_world_size(self.control))]
        dist.all_gather(received, own, group=self.control)
        return [part.tolist() for part in received]

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks on rank 0, and an empty list on the others."""
        _, values = self.gather_later(value, [])
        return values()

    def gather_later(self, value: T, numbers: Sequence[int]) -> tuple[list[list[int]], Callable[[], list[T]]]:
        """Exchange numbers as `all_gather_numbers` does, and send a value to rank 0, in two messages for both.

        Returns the numbers of all ranks, and a function that returns the result of `gather`. Another thread may call
        the function, which decodes one value after the other: for many ranks that takes long. A single rank gets its
        value itself.
        """
        if self.control is None:
            return self.all_gather_numbers(numbers), lambda: [value]
        content = _to_bytes(value)
        gathered = self.all_gather_numbers([*numbers, len(content)])
        sizes = [row.pop() for row in gathered]
        received = None
        if dist.get_rank() == 0:
            received = [torch.empty(max(sizes), dtype=torch.uint8) for _ in sizes]
        dist.gather(_padded(content, max(sizes)), received, dst=0, group=self.control)
        if received is None:
            return gathered, list
        parts = [part[:size] for part, size in zip(received, sizes, strict=True)]
        return gathered, lambda: [_from_bytes(part) for part in parts]

    def broadcast(self, value: T) -> T:
        """Return rank 0's value on every rank."""
        if self.control is None:
            return value
        content = _to_bytes(value)
        size = torch.tensor([len(content)])
        dist.broadcast(size, src=0, group=self.control)
        if dist.get_rank() != 0:
            content = torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(content, src=0, group=self.control)
        received: T = _from_bytes(content)
        return received


@dataclass(frozen=True)
class TimedGroups(Groups):
    """The group of all ranks in `ctx.groups`. Waiting in `barrier` and `sum` does not count as data time of a step."""

    waiting: Callable[[], AbstractContextManager[None]]
    timeout: timedelta
    """Time limit of a collective, longer than that after which the supervisor finds a hung rank."""

    def barrier(self) -> None:
        """Wait until all ranks have made this call. A long wait is logged."""
        with self.waiting(), call_of_all_ranks("ctx.groups.barrier"):
            super().barrier()

    def sum(self, values: Sequence[float]) -> list[float]:
        """Return the sum of each value over all ranks, in double precision, on every rank."""
        with self.waiting():
            return super().sum(values)


def _to_bytes(value: Any) -> torch.Tensor:
    file = io.BytesIO()
    torch.save(value, file)
    return torch.frombuffer(file.getbuffer(), dtype=torch.uint8)


def _from_bytes(content: torch.Tensor) -> Any:
    return torch.load(io.BytesIO(content.numpy().tobytes()), map_location="cpu", weights_only=True)


def _padded(content: torch.Tensor, size: int) -> torch.Tensor:
    return torch.nn.functional.pad(content, (0, size - len(content)))


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
    # A GPU bound to a default group of gloo would make each NCCL group a split of it, which fails (torch 2.11).
    device_id = None if backend == "gloo" else device
    with deadline(init_timeout_s, on_expiry):
        store = open_store(topology, key, init_timeout_s, folder)
        refuse_shared_gpu(device, topology, store, os.environ)
        dist.init_process_group(
            backend,
            store=PrefixStore("hpcdist", store),
            rank=topology.rank,
            world_size=topology.world_size,
            timeout=timedelta(seconds=timeout_s),
            device_id=device_id,
        )
        if topology.world_size > 1:
            control = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s), group_desc="control")
    assert control is None or isinstance(control, dist.ProcessGroup)
    yield Groups(control, store)
    dist.destroy_process_group()


def gloo_group(ranks: Sequence[int], timeout: timedelta) -> dist.ProcessGroup | None:
    """Return a gloo group of these ranks, and None on the others; every rank has to take part."""
    # Before torch 2.15, if the default group is one of NCCL and bound to a GPU, ranks outside the new group would split
    # it, and wait for the other ranks. These split nothing, because they are members of a gloo group.
    world: Any = dist.group.WORLD
    bound_device = world.bound_device_id
    world.bound_device_id = None
    try:
        group = dist.new_group([*ranks], timeout, "gloo")
    finally:
        world.bound_device_id = bound_device
    if not isinstance(group, dist.ProcessGroup):
        return None  # a placeholder on the ranks outside the group
    return group


@contextmanager
def deadline(seconds: float, on_expiry: Callable[[], None]) -> Iterator[None]:
    """Call `on_expiry` from a thread if the block takes longer than `seconds`.

    To end the block, `on_expiry` must report the error and end the process: the creation of a group waits inside of
    C++, with the longer time limit of a collective.
    """
    timer = threading.Timer(seconds, on_expiry)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def call_of_all_ranks(name: str) -> AbstractContextManager[None]:
    """Return a block that waits for the other ranks in a call of the trainer, and warns if that takes long.

    The usual reason is a trainer that makes the call on rank 0 only. The ranks then wait until they count as hung.
    """
    text = f"this rank has waited {WAIT_S:g} s in {name} for the other ranks: each of them must call it, too"
    return deadline(WAIT_S, lambda: log.warning("%s", text))


def open_store(topology: Topology, key: bytes, timeout_s: float, folder: Path) -> Store:
    """Return the store of all ranks.

    Ranks on one machine meet in `folder`, which only its user can enter: no port is open, and no key is needed. Ranks
    on several nodes, or on a file system without Unix sockets, need the attempt's key. Raises RendezvousError if the
    port is in use, no process listens on it, or the listener is not rank 0 of this attempt.
    """
    if topology.world_size == 1:
        return HashStore()
    has_remote_ranks = topology.num_nodes > 1
    keys = None
    if has_remote_ranks or not has_unix_sockets(folder):
        keys = CurveKeys(key, topology.token)
    meeting = Meeting(
        token=topology.token,
        folder=folder,
        host=topology.master_addr,
        port=topology.master_port,
        keys=keys,
        has_remote_ranks=has_remote_ranks,
    )
    try:
        return RendezvousStore(meeting, timedelta(seconds=max(timeout_s, 1.0)), serve=topology.rank == 0)
    except OSError as error:
        raise RendezvousError(f"rank {topology.rank} cannot reach the master at {meeting}: {error}") from error


def seed_everything(seed: int) -> None:
    """Seed torch (CPU and GPUs), Python's `random`, and NumPy if it is already imported."""
    torch.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)  # it refuses larger seeds
