"""Point-to-point transfer of activations and gradients between pipeline stages by RPC."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Literal

import torch
from torch import Tensor

from hpcdist.rank.context import Context
from hpcdist.rank.network.rpc import RpcGroup

#: Seconds to wait for a tensor before the sender is called to check that it is alive.
CHECK_INTERVAL_S = 1.0

Kind = Literal["activation", "gradient", "done"]


class Inbox:
    """Received tensors by kind and number, since RPC's threads may deliver them in another order.

    It exists before its rank opens the RPC group, since neighbours that have opened theirs send at once.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._tensors: dict[tuple[str, int], tuple[Tensor, torch.cuda.Event | None]] = {}

    @property
    def functions(self) -> dict[str, Callable[..., Any]]:
        """What the neighbours call."""
        return {"put": self.put, "check_alive": lambda: None}

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


class Wire:
    """Connection of a stage to its two neighbours. Tensors of a kind are received in the order they are sent.

    Args:
        inbox: its functions are those of this rank in the group.
    """

    def __init__(self, ctx: Context, group: RpcGroup, inbox: Inbox) -> None:
        self._device = ctx.device
        self._group = group
        self._inbox = inbox
        self._num_sent: Counter[tuple[int, Kind]] = Counter()
        self._num_received: Counter[Kind] = Counter()
        self._pending: deque[Future[None]] = deque()
        self.waited_s = 0.0

    def send(self, rank: int, kind: Kind, tensor: Tensor) -> None:
        """Send a tensor to a neighbour without waiting. The caller must not change it afterwards.

        Raises PeerLost or RemoteError if an earlier tensor could not be delivered.
        """
        self._check_deliveries()
        number = self._num_sent[rank, kind]
        self._num_sent[rank, kind] += 1
        self._pending.append(self._group.call(rank, "put", kind, number, tensor))

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
            self._group.call(rank, "check_alive").result()
        self.waited_s += time.perf_counter() - began
        tensor, event = self._inbox.pop(kind, number)
        if event is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(event)
            tensor.record_stream(stream)
        return tensor.to(self._device)

    def _check_deliveries(self) -> None:
        """Raise the error of the oldest delivery that has failed; a call that is not answered fails after a minute."""
        while self._pending and self._pending[0].done():
            self._pending.popleft().result()
