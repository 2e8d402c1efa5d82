"""A trainer's LSTM and the steps of a batch between LSTM and vocabulary servers."""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 (the name everyone uses)
from torch import Tensor, nn

from hpcdist.config.schema import Config
from hpcdist.rank.optimizer import build_optimizer, set_lr
from hpcdist.trainers.rnn.schema import RnnConfig
from hpcdist.trainers.rnn.text import Batch, Columns
from hpcdist.trainers.rnn.vocabulary_client import PendingRows, VocabularyClient


@dataclass
class Flight:
    """A batch between its forward and backward pass."""

    number: int  #: index among the batches that this trainer has launched
    batch: Batch
    rows: Tensor
    lstm: nn.LSTM
    hidden: Tensor
    finish: Callable[[], tuple[float, Tensor]]


class Learner:
    """A trainer's LSTM; a batch is processed by `launch`, then `land`.

    A batch that is launched while another is in flight uses the weights from before the other's update. It has its own
    copy of them, since its backward pass needs the weights of its forward pass.
    """

    def __init__(
        self, lstm: nn.LSTM, cfg: Config, client: VocabularyClient, trainers: dist.ProcessGroup, device: torch.device
    ) -> None:
        self.lstm = lstm.to(device)
        self.optimizer = build_optimizer(self.lstm.parameters(), cfg.optim)
        self.client = client
        self.state: tuple[Tensor, Tensor] | None = None  #: hidden state at the start of the next launched batch
        self.device = device
        self._copies = (
            deque(copy.deepcopy(self.lstm) for _ in range(2)) if cfg.section(RnnConfig).mode == "async" else None
        )
        self._clip = cfg.optim.max_grad_norm
        self._dropout = cfg.section(RnnConfig).dropout
        self._trainers = trainers
        self._num_trainers = dist.get_world_size(trainers)
        self._num_launched = 0
        self._coming: tuple[Tensor, PendingRows] | None = None  #: ids and their rows after the last update

    def launch(self, batch: Batch) -> Flight:
        """Run the forward pass and send its output to the servers."""
        lstm = self.lstm
        if self._copies is not None:
            self._copies.rotate()
            lstm = self._copies[0]
            with torch.no_grad():
                torch._foreach_copy_(list(lstm.parameters()), list(self.lstm.parameters()))
        rows = self._rows_of(batch.ids).requires_grad_()
        hidden = self._forward(lstm, rows, batch)
        scale = 1.0 / (len(hidden) * self._num_trainers)  # mean over the tokens of all trainers
        number, self._num_launched = self._num_launched, self._num_launched + 1
        finish = self.client.decode(number, hidden.detach(), batch.targets, scale)
        return Flight(number, batch, rows, lstm, hidden, finish)

    def _rows_of(self, ids: Tensor) -> Tensor:
        if self._coming is not None and self._coming[0] is ids:
            rows, self._coming = self._coming[1], None
        else:
            rows = self.client.pull(ids)
        return rows.wait()

    def _forward(self, lstm: nn.LSTM, rows: Tensor, batch: Batch) -> Tensor:
        embedded = F.dropout(F.embedding(batch.inverse.to(self.device), rows), self._dropout, lstm.training)
        output, (h, c) = lstm(embedded, self.state)
        self.state = h.detach(), c.detach()
        return F.dropout(output, self._dropout, lstm.training).flatten(0, 1)

    def land(self, flight: Flight, lr: float, next_ids: Tensor) -> float:
        """Run backward pass and update, and request the rows of `next_ids`; return the summed loss."""
        loss, gradient = flight.finish()
        flight.hidden.backward(gradient)
        number, ids, rows = flight.number, flight.batch.ids, flight.rows.grad
        assert rows is not None
        if self._clip is None:
            coming = self.client.push(number, ids, rows, 1.0, lr, next_ids)
            gradients = self._summed(flight.lstm)
        else:
            gradients = self._summed(flight.lstm)
            scale = self._clip_factor(self.client.offer(number, ids, rows), gradients)
            coming = self.client.push(number, ids, None, scale, lr, next_ids)
            torch._foreach_mul_(gradients, scale)
        for parameter, its in zip(self.lstm.parameters(), gradients, strict=True):
            parameter.grad = its
        set_lr(self.optimizer, lr)
        self.optimizer.step()
        flight.lstm.zero_grad()
        self._coming = next_ids, coming
        return loss

    def _summed(self, lstm: nn.LSTM) -> list[Tensor]:
        """Return the gradients of the LSTM, summed over the trainers in one message."""
        gradients = [parameter.grad for parameter in lstm.parameters() if parameter.grad is not None]
        if self._num_trainers > 1:
            joined = torch.cat([gradient.flatten() for gradient in gradients])
            dist.all_reduce(joined, group=self._trainers)
            parts = joined.split([gradient.numel() for gradient in gradients])
            gradients = [part.view_as(gradient) for part, gradient in zip(parts, gradients, strict=True)]
        return gradients

    def _clip_factor(self, squared_at_servers: float, gradients: Sequence[Tensor]) -> float:
        """Return the factor of torch's clip_grad_norm_ for the parameters of LSTM and servers."""
        assert self._clip is not None
        if self._copies is not None and self._num_trainers > 1:
            # In async mode each trainer has offered its own gradients; replicas stay equal with one common factor.
            (squared_at_servers,) = self.sum_over_trainers([squared_at_servers])
        norm = math.sqrt(squared_at_servers + sum(float(part) ** 2 for part in torch._foreach_norm(list(gradients))))
        return min(1.0, self._clip / (norm + 1e-6))

    @torch.no_grad()
    def measure(self, columns: Columns) -> tuple[float, int]:
        """Return summed loss and number of targets of these columns, without an effect on training."""
        state, self.state = self.state, None
        self.lstm.eval()
        loss = 0.0
        for batch in columns:
            hidden = self._forward(self.lstm, self.client.pull(batch.ids).wait(), batch)
            loss += self.client.loss(hidden, batch.targets)
        self.lstm.train()
        self.state = state
        return loss, columns.num_targets

    def sum_over_trainers(self, values: Sequence[float]) -> list[float]:
        """Return the sums of values over all trainers."""
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(total, group=self._trainers)
        return [float(value) for value in total.tolist()]

    def settle(self) -> None:
        """Wait until the servers have applied the last update of every trainer."""
        if self._coming is not None:
            self._coming[1].wait()
        dist.barrier(group=self._trainers)
