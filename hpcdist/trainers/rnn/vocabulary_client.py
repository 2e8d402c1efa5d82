"""Client of the vocabulary servers: it splits requests by server and joins the answers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import rpc

from hpcdist.trainers.rnn.vocabulary import join_scores, row_bounds
from hpcdist.trainers.rnn.vocabulary_server import CALL_TIMEOUT_S, call_server


class PendingRows:
    """Requested rows of the embedding."""

    def __init__(self, calls: Sequence[Any]) -> None:
        self._calls = calls

    def wait(self) -> Tensor:
        """Return the rows when all calls have ended."""
        parts = [call.wait() for call in self._calls]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


class VocabularyClient:
    """All servers of the vocabulary as one object.

    Args:
        names: RPC names of the servers, by index.
        trainer: index of this trainer.
        device: device of this trainer.
        wire: device of the tensors in RPC calls.
    """

    def __init__(
        self, names: Sequence[str], *, trainer: int, vocab_size: int, device: torch.device, wire: torch.device
    ) -> None:
        self._names = list(names)
        self._trainer = trainer
        self._bounds = torch.tensor(row_bounds(vocab_size, len(names)))
        self._device, self._wire = device, wire

    def _call(self, server: int, method: str, *arguments: Any) -> Any:
        return rpc.rpc_async(self._names[server], call_server, (method, *arguments), timeout=CALL_TIMEOUT_S)

    def _call_all(self, method: str, *arguments: Any) -> list[Any]:
        return [self._call(server, method, *arguments) for server in range(len(self._names))]

    def _of_each(self, ids: Tensor) -> list[slice]:
        """Return the slice of the sorted ids that each server has."""
        if len(self._names) == 1:
            return [slice(None)]
        cuts = torch.searchsorted(ids, self._bounds).tolist()
        return [slice(*pair) for pair in itertools.pairwise(cuts)]

    def pull(self, ids: Tensor) -> PendingRows:
        """Request the rows of different, sorted tokens."""
        return PendingRows(
            [self._call(i, "pull", ids[part].to(self._wire)) for i, part in enumerate(self._of_each(ids))]
        )

    def decode(self, number: int, hidden: Tensor, targets: Tensor, scale: float) -> Callable[[], tuple[float, Tensor]]:
        """Start a batch; return a function that waits for its summed loss and the gradient of `hidden`.

        Args:
            scale: factor of the gradient.
        """
        hidden, targets = hidden.to(self._wire), targets.to(self._wire)
        if len(self._names) == 1:  # which has all rows: one call is enough
            (call,) = self._call_all("decode", self._trainer, number, hidden, targets, scale)
            return lambda: self._received(*call.wait())
        scores = self._call_all("score", self._trainer, number, hidden, targets)

        def finish() -> tuple[float, Tensor]:
            lse, losses = join_scores(*zip(*(call.wait() for call in scores), strict=True))
            parts = [call.wait() for call in self._call_all("backward", self._trainer, number, lse, scale)]
            return self._received(float(losses.double().sum()), torch.stack(parts).sum(0))

        return finish

    def _received(self, loss: float, gradient: Tensor) -> tuple[float, Tensor]:
        return loss, gradient.to(self._device)

    def loss(self, hidden: Tensor, targets: Tensor) -> float:
        """Return the loss summed over the targets, for an evaluation."""
        calls = self._call_all("measure", self._trainer, hidden.to(self._wire), targets.to(self._wire))
        _, losses = join_scores(*zip(*(call.wait() for call in calls), strict=True))
        return float(losses.double().sum())

    def offer(self, number: int, ids: Tensor, rows: Tensor) -> float:
        """Send gradients for clipping; return the squared norm of all gradients of the servers."""
        rows = rows.to(self._wire)
        calls = [
            self._call(i, "offer", self._trainer, number, ids[part].to(self._wire), rows[part])
            for i, part in enumerate(self._of_each(ids))
        ]
        return math.fsum(call.wait() for call in calls)

    def push(
        self, number: int, ids: Tensor, rows: Tensor | None, scale: float, lr: float, next_ids: Tensor
    ) -> PendingRows:
        """Update the servers with these gradients, without `rows` with `scale` times the offered ones."""
        rows = None if rows is None else rows.to(self._wire)
        calls = []
        for i, (part, next_part) in enumerate(zip(self._of_each(ids), self._of_each(next_ids), strict=True)):
            mine = (None, None) if rows is None else (ids[part].to(self._wire), rows[part])
            then = next_ids[next_part].to(self._wire)
            calls.append(self._call(i, "push", self._trainer, number, *mine, scale, lr, then))
        return PendingRows(calls)

    def weights(self) -> dict[str, Tensor]:
        """Return the whole embedding and decoder with the names of `LanguageModel`."""
        parts = [call.wait() for call in self._call_all("weights")]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
