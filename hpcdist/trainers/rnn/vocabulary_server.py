"""Parameter server of a vocabulary's rows, called by the trainers through RPC.

In sync mode the gradients of all trainers are one update: a server waits for the push of every trainer and sums in the
order of their index. In async mode each push is an update of its own.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from hpcdist.config.schema import OptimConfig
from hpcdist.errors import PeerLost
from hpcdist.rank.optimizer import build_optimizer, set_lr
from hpcdist.trainers.rnn.vocabulary import Space, VocabularyShard, join_scores

T = TypeVar("T")
#: A batch with fewer probabilities than this is computed in the calling thread.
MIN_BACKGROUND_SIZE = 1 << 14
#: Timeout of a call. The loss of a peer is detected by its connection, much earlier.
CALL_TIMEOUT_S = 300.0


@dataclass
class Slot:
    """State of one of a trainer's batches."""

    space: Space | None = None
    gradients: Future[tuple[Tensor, ...]] | None = None  #: gradients of the decoder's rows
    used: Future[None] | None = None  #: completion of the update that they are part of


@dataclass
class Joined:
    """Gradients of one update."""

    rows: Tensor  #: gradients of the embedding, sparse and coalesced
    slots: list[Slot]
    summed: tuple[Tensor, ...] = ()  #: gradients of the decoder, once all have arrived


class VocabularyServer:
    """Rows of embedding and decoder, and their optimizers. Trainers call its methods, in threads of RPC.

    Args:
        is_async: whether each push is an update of its own.
    """

    def __init__(
        self,
        shard: VocabularyShard,
        cfg: OptimConfig,
        num_trainers: int,
        *,
        device: torch.device,
        is_async: bool = False,
    ) -> None:
        self.shard = shard.to(device)
        self.decoder_optimizer = build_optimizer([shard.weight, shard.bias], cfg)
        self.row_optimizer: torch.optim.Optimizer | None = None
        if not shard.is_tied:
            self.row_optimizer, self._is_lazy = build_row_optimizer(shard.encoder, cfg)
        self._num_trainers = num_trainers
        self._device = device
        self._is_async = is_async
        # By trainer and batch number modulo the number of slots; calls of two batches may overlap.
        self._slots = [[Slot() for _ in range(2 if is_async else 1)] for _ in range(num_trainers)]
        self._scratch: list[Space | None] = [None] * num_trainers
        self._pushed: dict[int, tuple[Slot, Tensor, Tensor]] = {}
        self._offered: dict[int, Joined] = {}
        self._squared_norm: dict[int, float] = {}
        self._round = 0
        self._condition = threading.Condition()
        self._decoder_lock = threading.Lock()
        # A task only waits for earlier ones, so the pool cannot deadlock.
        self._pool = ThreadPoolExecutor(num_trainers + 1)

    @property
    def functions(self) -> dict[str, Callable[..., Any]]:
        """The methods that trainers call, by name."""
        methods: tuple[Callable[..., Any], ...] = (
            self.pull, self.score, self.backward, self.decode, self.measure, self.offer, self.push, self.weights
        )  # fmt: skip
        return {method.__name__: method for method in methods}

    # --- called by trainers

    def pull(self, ids: Tensor) -> Tensor:
        """Return the rows of some ids."""
        with self._condition:
            return self._lookup(ids)

    def score(self, trainer: int, number: int, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Start a batch; return the log-sum-exp over this server's rows and the logits of the targets it has, [n]."""
        slot = self._slot(trainer, number)
        if slot.used is not None:  # the last update in sync mode, the one before in async mode
            slot.used.result()
        slot.space, chosen = self.shard.score(hidden.to(self._device), targets.to(self._device), slot.space)
        return self._out(slot.space.lse), self._out(chosen)

    def backward(self, trainer: int, number: int, lse: Tensor, scale: float) -> Tensor:
        """Return this server's part of the output's gradient. The weights' gradient is computed after the answer."""
        slot = self._slot(trainer, number)
        assert slot.space is not None
        gradient = self._out(self.shard.input_gradient(slot.space, lse.to(self._device), scale))
        slot.gradients = self._run(slot.space, self._weight_gradient, slot.space)
        return gradient

    def decode(self, trainer: int, number: int, hidden: Tensor, targets: Tensor, scale: float) -> tuple[float, Tensor]:
        """Return summed loss and gradient of the output: `score` and `backward` in one call, for a single server."""
        lse, losses = join_scores(*zip(self.score(trainer, number, hidden, targets), strict=True))
        return float(losses.double().sum()), self.backward(trainer, number, lse, scale)

    def measure(self, trainer: int, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the same as `score`, for an evaluation."""
        self.settle()
        scratch, chosen = self.shard.score(hidden.to(self._device), targets.to(self._device), self._scratch[trainer])
        self._scratch[trainer] = scratch
        return self._out(scratch.lse), self._out(chosen)

    def offer(self, trainer: int, number: int, ids: Tensor, rows: Tensor) -> float:
        """Take gradients of embedding rows for clipping; return the squared norm of all gradients of this update."""
        key = self._key(trainer)

        def measure(joined: Joined) -> None:
            gradients = self._decoder_gradients(joined) + (() if self.shard.is_tied else (joined.rows.values(),))
            self._squared_norm[key] = sum(float(norm) ** 2 for norm in torch._foreach_norm(gradients))
            self._offered[key] = joined

        with self._condition:
            self._collect(trainer, number, ids, rows, measure)
            return self._squared_norm[key]

    def push(
        self,
        trainer: int,
        number: int,
        ids: Tensor | None,
        rows: Tensor | None,
        scale: float,
        lr: float,
        next_ids: Tensor,
    ) -> Tensor:
        """Update with these gradients, or with `scale` times the offered ones; return the rows of the next batch."""
        with self._condition:
            if ids is not None and rows is not None:
                self._collect(trainer, number, ids, rows, lambda joined: self._update(joined, 1.0, lr))
            elif (offered := self._offered.pop(self._key(trainer), None)) is not None:
                self._update(offered, scale, lr)  # the first trainer updates: all send the same scale
            return self._lookup(next_ids)

    def weights(self) -> dict[str, Tensor]:
        """Return the rows on the host, for the final model."""
        self.settle()
        return {name: tensor.detach().cpu() for name, tensor in self.shard.named_rows.items()}

    # --- updates

    def _key(self, trainer: int) -> int:
        return trainer if self._is_async else 0

    def _slot(self, trainer: int, number: int) -> Slot:
        slots = self._slots[trainer]
        return slots[number % len(slots)]

    def _collect(self, trainer: int, number: int, ids: Tensor, rows: Tensor, then: Callable[[Joined], None]) -> None:
        """Call `then` with the gradients of all trainers, who wait for it; in async mode with this trainer's."""
        self._pushed[trainer] = self._slot(trainer, number), ids.to(self._device), rows.to(self._device)
        if self._is_async:
            then(self._join([trainer]))
            return
        if len(self._pushed) == self._num_trainers:
            then(self._join(range(self._num_trainers)))
            self._round += 1
            self._condition.notify_all()
            return
        before = self._round
        if not self._condition.wait_for(lambda: self._round > before, CALL_TIMEOUT_S):
            missing = sorted(set(range(self._num_trainers)) - set(self._pushed))
            raise PeerLost(f"trainer:{missing[0]} has pushed no gradients for {CALL_TIMEOUT_S:g} s")

    def _join(self, trainers: Sequence[int]) -> Joined:
        slots, ids, rows = zip(*(self._pushed.pop(trainer) for trainer in trainers), strict=True)
        where = (torch.cat(ids) - self.shard.start)[None]
        joined = torch.sparse_coo_tensor(
            where,
            torch.cat(rows),
            self.shard.encoder.shape,
            check_invariants=False,
            is_coalesced=len(ids) == 1,  # the ids of one trainer are different and sorted
        )
        return Joined(joined.coalesce(), list(slots))

    def _decoder_gradients(self, joined: Joined) -> tuple[Tensor, ...]:
        """Return the gradients summed over the trainers in order; if tied, including those of the embedding."""
        if not joined.summed:
            first, *others = [slot.gradients.result() for slot in joined.slots if slot.gradients is not None]
            for other in others:
                torch._foreach_add_(first, other)
            if self.shard.is_tied:
                first[0].index_add_(0, joined.rows.indices()[0], joined.rows.values())
            joined.summed = first
        return joined.summed

    def _update(self, joined: Joined, scale: float, lr: float) -> None:
        """Update the embedding now, since trainers wait for its rows, and the decoder once its gradients are there."""
        if self.row_optimizer is not None:
            gradient = joined.rows if scale == 1.0 else joined.rows * scale
            self.shard.encoder.grad = gradient if self._is_lazy else gradient.to_dense()
            set_lr(self.row_optimizer, lr)
            self.row_optimizer.step()
            self._synchronize()
        update = self._run(joined.slots[0].space, self._update_decoder, joined, scale, lr)
        for slot in joined.slots:
            slot.used = update
        if self.shard.is_tied:
            update.result()

    def _run(self, space: Space | None, task: Callable[..., T], *arguments: Any) -> Future[T]:
        """Run a task in the background, unless the batch is so small that waking a thread costs more."""
        if space is not None and space.probs.numel() >= MIN_BACKGROUND_SIZE:
            return self._pool.submit(task, *arguments)
        done: Future[T] = Future()
        done.set_result(task(*arguments))
        return done

    def _update_decoder(self, joined: Joined, scale: float, lr: float) -> None:
        with self._decoder_lock:
            weight, bias = self._decoder_gradients(joined)
            if scale != 1.0:
                torch._foreach_mul_((weight, bias), scale)
            self.shard.weight.grad, self.shard.bias.grad = weight, bias
            set_lr(self.decoder_optimizer, lr)
            self.decoder_optimizer.step()
            self._synchronize()

    def _weight_gradient(self, space: Space) -> tuple[Tensor, ...]:
        gradients = self.shard.weight_gradient(space)
        self._synchronize()
        return gradients

    def _lookup(self, ids: Tensor) -> Tensor:
        return self._out(self.shard.lookup(ids.to(self._device)))

    def _out(self, tensor: Tensor) -> Tensor:
        self._synchronize()
        return tensor

    def _synchronize(self) -> None:
        # Calls and updates run in threads with their own streams; each completes its work before others use it.
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def settle(self) -> None:
        """Wait until all pushed gradients are applied."""
        for slot in itertools.chain.from_iterable(self._slots):
            if slot.used is not None:
                slot.used.result()


def build_row_optimizer(encoder: nn.Parameter, cfg: OptimConfig) -> tuple[torch.optim.Optimizer, bool]:
    """Return the optimizer of the embedding, and whether it takes sparse gradients, which cost only their rows.

    Plain SGD gives the same result with both; sparse Adam does not update the moments of other rows (SparseAdam).
    Momentum of SGD and weight decay change every row in every step, so they take dense gradients.
    """
    if cfg.weight_decay == 0 and cfg.name == "adam":
        return torch.optim.SparseAdam([encoder], lr=cfg.lr), True
    if cfg.weight_decay == 0 and cfg.name == "sgd" and cfg.momentum == 0:
        return torch.optim.SGD([encoder], lr=cfg.lr), True
    return build_optimizer([encoder], cfg), False
