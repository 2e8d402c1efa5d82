"""Client of the vocabulary servers: it splits requests by server and joins the answers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor

from hpcdist.rank.network.rpc import RpcGroup
from hpcdist.trainers.rnn.vocabulary import join_scores, row_bounds


class PendingRows:
    """Requested rows of the embedding."""

    def __init__(self, calls: Sequence[Future[Tensor]], device: torch.device) -> None:
        self._calls, self._device = calls, device

    def wait(self) -> Tensor:
        """Return the rows when all calls have ended."""
        parts = [call.result().to(self._device) for call in self._calls]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


class VocabularyClient:
    """All servers of the vocabulary as one object.

    Args:
        trainer: index of this trainer.
        device: device of this trainer.
    """

    def __init__(self, group: RpcGroup, *, trainer: int, vocab_size: int, device: torch.device) -> None:
        self._group, self._names = group, group.of_role("parameter_server")
        self._trainer = trainer
        self._bounds = torch.tensor(row_bounds(vocab_size, len(self._names)))
        self._device = device

    def _call(self, server: int, method: str, *arguments: Any) -> Future[Any]:
        return self._group.call(self._names[server], method, *arguments)

    def _call_all(self, method: str, *arguments: Any) -> list[Future[Any]]:
        return self._group.call_all(self._names, method, *arguments)

    def _of_each(self, ids: Tensor) -> list[slice]:
        """Return the slice of the sorted ids that each server has."""
        if len(self._names) == 1:
            return [slice(None)]
        cuts = torch.searchsorted(ids, self._bounds).tolist()
        return [slice(*pair) for pair in itertools.pairwise(cuts)]

    def pull(self, ids: Tensor) -> PendingRows:
        """Request the rows of different, sorted tokens."""
        calls = [self._call(i, "pull", ids[part]) for i, part in enumerate(self._of_each(ids))]
        return PendingRows(calls, self._device)

    def decode(self, number: int, hidden: Tensor, targets: Tensor, scale: float) -> Callable[[], tuple[float, Tensor]]:
        """Start a batch; return a function that waits for its summed loss and the gradient of `hidden`.

        Args:
            scale: factor of the gradient.
        """
        if len(self._names) == 1:  # which has all rows: one call is enough
            (call,) = self._call_all("decode", self._trainer, number, hidden, targets, scale)
            return lambda: self._received(*call.result())
        scores = self._call_all("score", self._trainer, number, hidden, targets)

        def finish() -> tuple[float, Tensor]:
            lse, losses = self._joined(scores)
            parts = [call.result() for call in self._call_all("backward", self._trainer, number, lse, scale)]
            return self._received(float(losses.double().sum()), torch.stack(parts).sum(0))

        return finish

    def _received(self, loss: float, gradient: Tensor) -> tuple[float, Tensor]:
        return loss, gradient.to(self._device)

    def _joined(self, scores: Sequence[Future[Any]]) -> tuple[Tensor, Tensor]:
        return join_scores(*zip(*(call.result() for call in scores), strict=True))

    def loss(self, hidden: Tensor, targets: Tensor) -> float:
        """Return the loss summed over the targets, for an evaluation."""
        _, losses = self._joined(self._call_all("measure", self._trainer, hidden, targets))
        return float(losses.double().sum())

    def offer(self, number: int, ids: Tensor, rows: Tensor) -> float:
        """Send gradients for clipping; return the squared norm of all gradients of the servers."""
        calls = [
            self._call(i, "offer", self._trainer, number, ids[part], rows[part])
            for i, part in enumerate(self._of_each(ids))
        ]
        return math.fsum(call.result() for call in calls)

    def push(
        self, number: int, ids: Tensor, rows: Tensor | None, scale: float, lr: float, next_ids: Tensor
    ) -> PendingRows:
        """Update the servers with these gradients, without `rows` with `scale` times the offered ones."""
        calls = []
        for i, (part, next_part) in enumerate(zip(self._of_each(ids), self._of_each(next_ids), strict=True)):
            mine = (None, None) if rows is None else (ids[part], rows[part])
            calls.append(self._call(i, "push", self._trainer, number, *mine, scale, lr, next_ids[next_part]))
        return PendingRows(calls, self._device)

    def weights(self) -> dict[str, Tensor]:
        """Return the whole embedding and decoder with the names of `LanguageModel`."""
        parts = [call.result() for call in self._call_all("weights")]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
