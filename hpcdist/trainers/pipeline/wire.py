"""Point-to-point transfer of activations and gradients between pipeline stages by RPC."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Iterable
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import rpc

from hpcdist.errors import PeerLost, RemoteError
from hpcdist.rank.context import Context
from hpcdist.rank.network.rpc import RpcGroup, remote, rpc_target

#: Seconds to wait for a tensor before the sender is called to check that it is alive.
CHECK_INTERVAL_S = 1.0

Kind = Literal["activation", "gradient", "done"]


class Inbox:
    """Received tensors by kind and number, since RPC's threads may deliver them in another order.

    It is the RPC target of its rank, so that it takes tensors from the moment the RPC group opens.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._tensors: dict[tuple[str, int], tuple[Tensor, torch.cuda.Event | None]] = {}

    def put(self, kind: str, number: int, tensor: Tensor) -> None:
        """Store a received tensor and wake up the thread that waits for it."""
        event = torch.cuda.current_stream(tensor.device).record_event() if tensor.is_cuda else None
        with self._changed:
            self._tensors[kind, number] = (tensor, event)
            self._changed.notify()

    def wait_for(self, kind: str, number: int, timeout_s: float) -> bool:
        """Wait until the tensor is received; return whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: (kind, number) in self._tensors, timeout=timeout_s)

    def pop(self, kind: str, number: int) -> tuple[Tensor, torch.cuda.Event | None]:
        """Return a received tensor and the event after which its content is complete."""
        return self._tensors.pop((kind, number))


@remote
def _deliver(kind: str, number: int, tensor: Tensor) -> None:
    rpc_target(Inbox).put(kind, number, tensor)


@remote
def _check_alive() -> None:
    """Do nothing: the answer shows that the rank is alive."""


class Wire:
    """Connection of a stage to its two neighbours. Tensors of a kind are received in the order they are sent.

    Measured on loopback: TensorPipe's shared memory takes 1.7 ms for 8 MB, gloo's send and recv take 2.7 ms, and
    sending by RPC never waits for the receiver.

    Args:
        inbox: the RPC target of this rank.
        mapped: ranks with a GPU that receives tensors directly; others receive them through host memory.
    """

    def __init__(self, ctx: Context, group: RpcGroup, inbox: Inbox, mapped: Iterable[int] = ()) -> None:
        self._device = ctx.device
        self._names = group.names
        self._inbox = inbox
        self._mapped = frozenset(mapped)
        self._num_sent: Counter[tuple[int, Kind]] = Counter()
        self._num_received: Counter[Kind] = Counter()
        self._pending: deque[tuple[int, torch.futures.Future[None]]] = deque()
        self.waited_s = 0.0

    def send(self, rank: int, kind: Kind, tensor: Tensor) -> None:
        """Send a tensor to a neighbour without waiting. The caller must not change it afterwards.

        Raises PeerLost or RemoteError if an earlier tensor could not be delivered.
        """
        self._check_deliveries()
        number = self._num_sent[rank, kind]
        self._num_sent[rank, kind] += 1
        if rank not in self._mapped:
            tensor = tensor.cpu()
        self._pending.append((rank, rpc.rpc_async(self._names[rank], _deliver, (kind, number, tensor))))

    def receive(self, rank: int, kind: Kind) -> Tensor:
        """Return the next tensor of a kind; each kind comes from one neighbour.

        Raises PeerLost if the neighbour is gone, and PeerLost or RemoteError if a sent tensor could not be delivered:
        the neighbour would wait for that tensor, and this rank for the neighbour.
        """
        number = self._num_received[kind]
        self._num_received[kind] += 1
        began = time.perf_counter()
        while not self._inbox.wait_for(kind, number, CHECK_INTERVAL_S):
            self._check_deliveries()
            self._wait(rank, rpc.rpc_async(self._names[rank], _check_alive))
        self.waited_s += time.perf_counter() - began
        tensor, event = self._inbox.pop(kind, number)
        if event is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(event)
            tensor.record_stream(stream)
        return tensor.to(self._device)

    def _check_deliveries(self) -> None:
        """Raise the error of the oldest delivery that has failed; a call that is not answered fails after a minute."""
        while self._pending and self._pending[0][1].done():
            receiver, future = self._pending.popleft()
            self._wait(receiver, future)

    def _wait(self, rank: int, future: torch.futures.Future[None]) -> None:
        try:
            future.wait()
        except RuntimeError as error:
            if (remote_error := RemoteError.received(error)) is not None:
                raise remote_error from None
            reason = str(error).partition("\n")[0]
            raise PeerLost(f"{self._names[rank]} (rank {rank}) does not answer: {reason}") from error


def device_maps(ctx: Context) -> dict[str, dict[Any, Any]]:
    """Return, for each other rank with a GPU, the mapping of this rank's GPU to its GPU. Call it on every rank.

    It is empty if this rank has no GPU.
    """
    devices: list[Any] = [None] * ctx.world_size
    dist.all_gather_object(devices, str(ctx.device))
    if ctx.device.type != "cuda":
        return {}
    return {
        ctx.roles.name_of(rank): {ctx.device: torch.device(device)}
        for rank, device in enumerate(devices)
        if rank != ctx.rank and device.startswith("cuda")
    }
