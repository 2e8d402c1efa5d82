"""The trainers' side of a vocabulary that lies on servers: which rows are asked of whom, and how answers are joined."""

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
    """Rows of the embedding on their way."""

    def __init__(self, calls: Sequence[Any]) -> None:
        self._calls = calls

    def wait(self) -> Tensor:
        parts = [call.wait() for call in self._calls]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


class VocabularyClient:
    """All servers together, as a trainer sees them: whole tables, whole losses.

    Args:
        names: the servers' in RPC, by index.
        trainer: this trainer's index.
        device: where this trainer computes.
        wire: where tensors are when they travel.
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
        """Which of the sorted ids each server has."""
        if len(self._names) == 1:
            return [slice(None)]
        cuts = torch.searchsorted(ids, self._bounds).tolist()
        return [slice(*pair) for pair in itertools.pairwise(cuts)]

    def pull(self, ids: Tensor) -> PendingRows:
        """Rows of different tokens, `ids` being sorted."""
        return PendingRows(
            [self._call(i, "pull", ids[part].to(self._wire)) for i, part in enumerate(self._of_each(ids))]
        )

    def decode(self, number: int, hidden: Tensor, targets: Tensor, scale: float) -> Callable[[], tuple[float, Tensor]]:
        """Begin the batch of this number. Call what is returned for its summed loss and the gradient of `hidden`.

        Args:
            scale: what the gradient of the summed loss is multiplied with.
        """
        hidden, targets = hidden.to(self._wire), targets.to(self._wire)
        if len(self._names) == 1:  # which needs nobody else's word: one call
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
        """Summed over the targets, without a backward to come."""
        calls = self._call_all("measure", self._trainer, hidden.to(self._wire), targets.to(self._wire))
        _, losses = join_scores(*zip(*(call.wait() for call in calls), strict=True))
        return float(losses.double().sum())

    def offer(self, number: int, ids: Tensor, rows: Tensor) -> float:
        """Give a batch's gradients that are to be clipped; the squared norm of all that the servers will update."""
        rows = rows.to(self._wire)
        calls = [
            self._call(i, "offer", self._trainer, number, ids[part].to(self._wire), rows[part])
            for i, part in enumerate(self._of_each(ids))
        ]
        return math.fsum(call.wait() for call in calls)

    def push(
        self, number: int, ids: Tensor, rows: Tensor | None, scale: float, lr: float, next_ids: Tensor
    ) -> PendingRows:
        """Have the servers update; without `rows`, with `scale` times those that were offered."""
        rows = None if rows is None else rows.to(self._wire)
        calls = []
        for i, (part, next_part) in enumerate(zip(self._of_each(ids), self._of_each(next_ids), strict=True)):
            mine = (None, None) if rows is None else (ids[part].to(self._wire), rows[part])
            then = next_ids[next_part].to(self._wire)
            calls.append(self._call(i, "push", self._trainer, number, *mine, scale, lr, then))
        return PendingRows(calls)

    def weights(self) -> dict[str, Tensor]:
        """Embedding and decoder, whole, under the names of `LanguageModel`."""
        parts = [call.wait() for call in self._call_all("weights")]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
