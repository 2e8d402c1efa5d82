"""Shard of a vocabulary: rows of embedding and decoder, with explicit forward and backward passes of the loss.

Autograd is not used: it would keep logits, log-probabilities and gradients, each as large as the probabilities, and it
could not return the gradient of the input before it computes that of the weights.

The cross-entropy over several shards needs two values from each: the log-sum-exp of the logits (`lse`) and the logit
of the target. Each shard computes its part of all gradients from the joint `lse`.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from hpcdist.checkpoint.state import Shard
from hpcdist.config.schema import OptimConfig
from hpcdist.errors import ConfigError, PeerLost
from hpcdist.rank.checkpointing import Restored
from hpcdist.rank.rpc import RpcGroup
from hpcdist.rank.training_loop import build_optimizer, set_lr


@dataclass
class Space:
    """Buffers of one batch, which are reused: allocating them again would cost page faults."""

    hidden: Tensor  #: [n, hidden]
    probs: Tensor  #: softmax over the shard's rows, [n, rows]
    lse: Tensor  #: over the shard's rows, [n]
    mine: Tensor  #: indices of the targets that this shard has
    targets: Tensor  #: rows of these targets in the shard
    factor: Tensor  #: turns probabilities over the shard into those over the vocabulary, times the loss's scale, [n]
    scale: float
    gradients: tuple[Tensor, ...] = ()  #: gradients of weight and bias


class VocabularyShard(nn.Module):
    """Rows of embedding and decoder.

    Args:
        encoder: rows of the embedding, [rows, embedding].
        weight: rows of the decoder, [rows, hidden].
        start: index of the first row in the whole vocabulary.
        vocab_size: number of rows of the whole vocabulary.
    """

    def __init__(self, encoder: Tensor, weight: Tensor, *, start: int, vocab_size: int) -> None:
        super().__init__()
        self.start, self.stop, self.vocab_size = start, start + len(encoder), vocab_size
        self.encoder = nn.Parameter(encoder)
        self.weight = nn.Parameter(weight)
        self.bias = nn.Parameter(torch.zeros(len(encoder)))

    @property
    def named_rows(self) -> dict[str, Tensor]:
        """The rows with the names of `LanguageModel`."""
        return {"encoder.weight": self.encoder, "decoder.weight": self.weight, "decoder.bias": self.bias}

    @torch.no_grad()
    def score(self, hidden: Tensor, targets: Tensor, space: Space | None = None) -> tuple[Space, Tensor]:
        """Do the forward pass; return its buffers, and the logits [n] of the targets in this shard, 0 for others.

        Args:
            hidden: [n, hidden].
            targets: [n], ids of the whole vocabulary.
            space: buffers of an earlier batch to overwrite, if they have the same size.
        """
        shape = len(hidden), self.stop - self.start
        logits = space.probs if space is not None and space.probs.shape == shape else hidden.new_empty(shape)
        torch.addmm(self.bias, hidden, self.weight.t(), out=logits)
        mine = ((targets >= self.start) & (targets < self.stop)).nonzero().flatten()
        rows = targets[mine] - self.start
        chosen = hidden.new_zeros(len(hidden)).index_put_((mine,), logits[mine, rows])
        top = logits.amax(1)
        torch.softmax(logits, 1, out=logits)
        # The largest probability is at least 1 / rows, so this is exact; `logsumexp` would take two more passes.
        lse = top - logits.amax(1).log()
        gradients = () if space is None else space.gradients
        return Space(hidden, logits, lse, mine, rows, torch.empty_like(lse), 0.0, gradients), chosen

    @torch.no_grad()
    def input_gradient(self, space: Space, lse: Tensor, scale: float) -> Tensor:
        """Return this shard's part of the gradient of `scale` times the summed loss for `hidden`, [n, hidden].

        Args:
            lse: log-sum-exp over the whole vocabulary, [n].
        """
        # Row factors scale the small matrices, so that the probabilities are not written again.
        space.factor, space.scale = (space.lse - lse).exp_().mul_(scale), scale
        gradient = torch.mm(space.probs, self.weight).mul_(space.factor[:, None])
        return gradient.index_add_(0, space.mine, self.weight[space.targets], alpha=-scale)

    @torch.no_grad()
    def weight_gradient(self, space: Space) -> tuple[Tensor, ...]:
        """Return the gradients of weight and bias in reused buffers; call it after `input_gradient`."""
        if not space.gradients:
            space.gradients = (torch.empty_like(self.weight), torch.empty_like(self.bias))
        weight, bias = space.gradients
        torch.mm(space.probs.t(), space.hidden * space.factor[:, None], out=weight)
        weight.index_add_(0, space.targets, space.hidden[space.mine], alpha=-space.scale)
        torch.mv(space.probs.t(), space.factor, out=bias)
        bias.index_add_(0, space.targets, torch.ones_like(space.targets, dtype=bias.dtype), alpha=-space.scale)
        return space.gradients


def join_scores(lses: Sequence[Tensor], chosen: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Join the scores of all shards into the `lse` over the whole vocabulary [n] and the loss of each token [n]."""
    lse = lses[0] if len(lses) == 1 else torch.logsumexp(torch.stack(list(lses)), 0)
    return lse, lse - torch.stack(list(chosen)).sum(0)


def row_bounds(vocab_size: int, num_shards: int) -> list[int]:
    """Return the bounds of the shards: shard i has the rows from bound i to bound i + 1."""
    return [vocab_size * shard // num_shards for shard in range(num_shards + 1)]


# Parameter server of a vocabulary's rows, called by the trainers through RPC.
#
# In sync mode the gradients of all trainers are one update: a server waits for the push of every trainer and sums in
# the order of their index. In async mode each push is an update of its own.

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
    """Rows of embedding and decoder, and their optimizers. Trainers call its methods, in threads of RPC."""

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
        names = ("pull", "score", "backward", "decode", "measure", "offer", "push", "weights")
        return {name: getattr(self, name) for name in names}

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
            gradients = (*self._decoder_gradients(joined), joined.rows.values())
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
        """Return the gradients of the decoder, summed over the trainers in order."""
        if not joined.summed:
            first, *others = [slot.gradients.result() for slot in joined.slots if slot.gradients is not None]
            for other in others:
                torch._foreach_add_(first, other)
            joined.summed = first
        return joined.summed

    def _update(self, joined: Joined, scale: float, lr: float) -> None:
        """Update the embedding now, since trainers wait for its rows, and the decoder once its gradients are there."""
        gradient = joined.rows if scale == 1.0 else joined.rows * scale
        self.shard.encoder.grad = gradient if self._is_lazy else gradient.to_dense()
        set_lr(self.row_optimizer, lr)
        self.row_optimizer.step()
        self._synchronize()
        update = self._run(joined.slots[0].space, self._update_decoder, joined, scale, lr)
        for slot in joined.slots:
            slot.used = update

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
        return self._out(self.shard.encoder.detach()[ids.to(self._device) - self.shard.start])

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


# Checkpoints of vocabulary servers: each saves its own rows, which may return to another number of servers.


def check_vocab_size(saved: Restored, vocab_size: int) -> None:
    """Raise ConfigError unless the checkpoint was trained on a vocabulary of this size."""
    if (trained := saved.trainer["vocab_size"]) != vocab_size:
        raise ConfigError(
            [f"the text has {vocab_size} different tokens, but the checkpoint was trained on {trained}:"
             " resume with the same text and tokenizer"]
        )  # fmt: skip


def server_shard(server: VocabularyServer) -> Shard:
    """Return the rows and optimizer states of a server. It waits for pending updates; no new ones may arrive."""
    server.settle()
    rows = server.shard.named_rows
    return Shard(
        model={name: tensor.detach() for name, tensor in rows.items()},
        rows=dict.fromkeys(rows, (server.shard.start, server.shard.vocab_size)),
        trainer={"decoder": server.decoder_optimizer.state_dict(), "rows": server.row_optimizer.state_dict()},
    )


def shards_of_rows(saved: Restored, start: int, stop: int) -> list[dict[str, Any]]:
    """Return the contents of the saved shards that have rows from `start` to `stop`."""
    bounds = row_bounds(saved.trainer["vocab_size"], saved.trainer["num_servers"])
    owners = [
        saved.trainer["num_trainers"] + index
        for index, (first, last) in enumerate(itertools.pairwise(bounds))
        if first < stop and start < last
    ]
    return [content for rank in owners if (content := saved.shard(rank)) is not None]


def load_server(server: VocabularyServer, contents: Sequence[Mapping[str, Any]]) -> None:
    """Load a server's rows and optimizer states from the shards that have these rows, in order."""
    first = contents[0]["rows"]["decoder.bias"][0]
    own = slice(server.shard.start - first, server.shard.stop - first)

    def select(values: Sequence[Any]) -> Any:
        if not isinstance(values[0], Tensor):
            return values[0]
        return torch.cat(list(values))[own] if values[0].dim() else values[0].clone()

    def select_state(key: str) -> dict[str, Any]:
        saved = [content["trainer"][key] for content in contents]
        states = {
            index: {name: select([one["state"][index][name] for one in saved]) for name in state}
            for index, state in saved[0]["state"].items()
        }
        return {"state": states, "param_groups": saved[0]["param_groups"]}

    with torch.no_grad():
        for name, tensor in server.shard.named_rows.items():
            tensor.copy_(select([content["model"][name] for content in contents]))
    server.decoder_optimizer.load_state_dict(select_state("decoder"))
    server.row_optimizer.load_state_dict(select_state("rows"))


# Client of the vocabulary servers: it splits requests by server and joins the answers.


class PendingRows:
    """Requested rows of the embedding."""

    def __init__(self, calls: Sequence[Future[Tensor]], device: torch.device) -> None:
        self._calls, self._device = calls, device

    def wait(self) -> Tensor:
        """Return the rows when all calls have ended."""
        parts = [call.result().to(self._device) for call in self._calls]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


class VocabularyClient:
    """All servers of the vocabulary as one object, for the trainer with this index and device."""

    def __init__(self, group: RpcGroup, *, trainer: int, vocab_size: int, device: torch.device) -> None:
        self._group, self._names = group, group.of_role("parameter_server")
        self._trainer = trainer
        self.vocab_size = vocab_size
        self._bounds = torch.tensor(row_bounds(vocab_size, len(self._names)))
        self._device = device

    def _call_all(self, method: str, *arguments: Any) -> list[Future[Any]]:
        return self._group.call_all(self._names, method, *arguments)

    def _of_each(self, ids: Tensor) -> dict[str, slice]:
        """Return the slice of the sorted ids that each server has."""
        if len(self._names) == 1:
            return {self._names[0]: slice(None)}
        cuts = torch.searchsorted(ids, self._bounds).tolist()
        return {name: slice(*pair) for name, pair in zip(self._names, itertools.pairwise(cuts), strict=True)}

    def pull(self, ids: Tensor) -> PendingRows:
        """Request the rows of different, sorted tokens."""
        calls = [self._group.call(server, "pull", ids[part]) for server, part in self._of_each(ids).items()]
        return PendingRows(calls, self._device)

    def decode(self, number: int, hidden: Tensor, targets: Tensor, scale: float) -> Callable[[], tuple[float, Tensor]]:
        """Start a batch; return a function that waits for its summed loss and the gradient of `hidden`.

        Args:
            scale: factor of the gradient.
        """
        if len(self._names) == 1:  # which has all rows: one call is enough
            (call,) = self._call_all("decode", self._trainer, number, hidden, targets, scale)
            return lambda: (call.result()[0], call.result()[1].to(self._device))
        scores = self._call_all("score", self._trainer, number, hidden, targets)

        def finish() -> tuple[float, Tensor]:
            lse, losses = self._joined(scores)
            parts = [call.result() for call in self._call_all("backward", self._trainer, number, lse, scale)]
            return float(losses.double().sum()), torch.stack(parts).sum(0).to(self._device)

        return finish

    def _joined(self, scores: Sequence[Future[Any]]) -> tuple[Tensor, Tensor]:
        return join_scores(*zip(*(call.result() for call in scores), strict=True))

    def loss(self, hidden: Tensor, targets: Tensor) -> float:
        """Return the loss summed over the targets, for an evaluation."""
        _, losses = self._joined(self._call_all("measure", self._trainer, hidden, targets))
        return float(losses.double().sum())

    def offer(self, number: int, ids: Tensor, rows: Tensor) -> float:
        """Send gradients for clipping; return the squared norm of all gradients of the servers."""
        calls = [
            self._group.call(server, "offer", self._trainer, number, ids[part], rows[part])
            for server, part in self._of_each(ids).items()
        ]
        return math.fsum(call.result() for call in calls)

    def push(
        self, number: int, ids: Tensor, rows: Tensor | None, scale: float, lr: float, next_ids: Tensor
    ) -> PendingRows:
        """Update the servers with these gradients, without `rows` with `scale` times the offered ones."""
        calls, next_parts = [], self._of_each(next_ids)
        for server, part in self._of_each(ids).items():
            mine = (None, None) if rows is None else (ids[part], rows[part])
            further = (scale, lr, next_ids[next_parts[server]])
            calls.append(self._group.call(server, "push", self._trainer, number, *mine, *further))
        return PendingRows(calls, self._device)

    def weights(self) -> dict[str, Tensor]:
        """Return the whole embedding and decoder with the names of `LanguageModel`."""
        parts = [call.result() for call in self._call_all("weights")]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
