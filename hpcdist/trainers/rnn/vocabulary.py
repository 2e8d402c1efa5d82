"""Parameter servers of a vocabulary: rows of embedding and decoder, with explicit forward and backward passes.

Autograd is not used: it would keep logits, log-probabilities and gradients, each as large as the probabilities, and it
could not return the gradient of the input before it computes that of the weights.

The cross-entropy over several servers needs two values from each: the log-sum-exp of its logits (`lse`) and the logit
of the target. Each server computes its part of all gradients from the joint `lse`.

In sync mode the gradients of all trainers are one update: a server waits for the push of every trainer and sums in the
order of their index. In async mode each push is an update of its own.
"""

import itertools
import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from hpcdist.checkpoint.state import Shard
from hpcdist.config.roles import share_of
from hpcdist.config.training_schema import OptimConfig
from hpcdist.errors import ConfigError, PeerLost
from hpcdist.rank.context import Restored
from hpcdist.rank.rpc import RpcGroup
from hpcdist.rank.training_loop import build_optimizer, set_lr

T = TypeVar("T")
#: A batch with fewer probabilities than this is computed in the calling thread.
MIN_BACKGROUND_SIZE = 1 << 14
#: Timeout of a call. The loss of a peer is detected by its connection, much earlier.
CALL_TIMEOUT_S = 300.0


class Slot:
    """One of a trainer's batches. Its buffers are reused: allocating them again would cost page faults."""

    hidden: Tensor  #: [n, hidden]
    probs: Tensor | None = None  #: softmax over the server's rows, [n, rows]
    lse: Tensor  #: over the server's rows, [n]
    mine: Tensor  #: indices of the targets that this server has
    targets: Tensor  #: rows of these targets
    factor: Tensor  #: turns probabilities over the rows into those over the vocabulary, times the loss's scale, [n]
    scale: float
    buffers: tuple[Tensor, Tensor] | None = None  #: for the gradients of weight and bias
    gradients: Future[tuple[Tensor, Tensor]]  #: of weight and bias
    used: Future[None] | None = None  #: completion of the update that these gradients are part of


@dataclass
class Joined:
    """Gradients of one update."""

    rows: Tensor  #: gradients of the embedding, sparse and coalesced
    slots: list[Slot]
    summed: tuple[Tensor, Tensor] | None = None  #: gradients of the decoder, once all have arrived
    squared_norm: float | None = None  #: of all gradients, for clipping
    is_applied: bool = False


def join_scores(lses: Sequence[Tensor], chosen: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Join the scores of all servers into the `lse` over the whole vocabulary [n] and the loss of each token [n]."""
    lse = lses[0] if len(lses) == 1 else torch.logsumexp(torch.stack(list(lses)), 0)
    return lse, lse - torch.stack(list(chosen)).sum(0)


class VocabularyServer:
    """Rows of embedding [rows, embedding] and decoder [rows, hidden] from row `start` on, with their optimizers.

    Trainers call its methods, in threads of RPC.
    """

    def __init__(
        self,
        encoder: Tensor,
        weight: Tensor,
        cfg: OptimConfig,
        *,
        start: int,
        vocab_size: int,
        num_trainers: int,
        device: torch.device,
        is_async: bool = False,
    ) -> None:
        self.start, self.stop, self.vocab_size = start, start + len(encoder), vocab_size
        self.encoder = nn.Parameter(encoder.to(device))
        self.weight = nn.Parameter(weight.to(device))
        self.bias = nn.Parameter(torch.zeros(len(encoder), device=device))
        self.decoder_optimizer = build_optimizer([self.weight, self.bias], cfg)
        # Plain SGD gives the same result with sparse gradients, which cost only their rows; SparseAdam does not update
        # the moments of other rows. Momentum of SGD and weight decay change every row in every step.
        self._is_sparse = cfg.weight_decay == 0 and (cfg.name == "adam" or (cfg.name == "sgd" and cfg.momentum == 0))
        self.row_optimizer: torch.optim.Optimizer
        if self._is_sparse:
            kind = torch.optim.SparseAdam if cfg.name == "adam" else torch.optim.SGD
            self.row_optimizer = kind([self.encoder], lr=cfg.lr)
        else:
            self.row_optimizer = build_optimizer([self.encoder], cfg)
        self._num_trainers = num_trainers
        self._device = device
        self._is_async = is_async
        # By trainer and batch number modulo the number of slots; calls of two batches may overlap.
        self._slots = [[Slot() for _ in range(2 if is_async else 1)] for _ in range(num_trainers)]
        self._evaluation_slots = [Slot() for _ in range(num_trainers)]
        self._pushed: dict[int, tuple[Slot, Tensor, Tensor]] = {}  #: by trainer, until the update has all of them
        self._joined: dict[int, Joined] = {}  #: the last update; in async mode that of each trainer
        self._round = 0  #: number of updates in sync mode
        self._condition = threading.Condition()
        self._decoder_lock = threading.Lock()
        # A task only waits for earlier ones, so the pool cannot deadlock.
        self._pool = ThreadPoolExecutor(num_trainers + 1)

    @property
    def functions(self) -> dict[str, Callable[..., Any]]:
        names = ("pull", "score", "backward", "decode", "measure", "push_for_norm", "push", "weights")
        return {name: getattr(self, name) for name in names}

    def pull(self, ids: Tensor) -> Tensor:
        with self._condition:
            return self._lookup(ids)

    def score(self, trainer: int, number: int, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Start a batch; return the log-sum-exp over this server's rows [n] and the logits of the targets [n].

        The logits of targets on other servers are 0.
        """
        slot = self._slot(trainer, number)
        if slot.used is not None:  # the last update in sync mode, the one before in async mode
            slot.used.result()
        return self._forward(slot, hidden, targets)

    @torch.no_grad()
    def _forward(self, slot: Slot, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        slot.hidden, targets = hidden.to(self._device), targets.to(self._device)
        shape = len(hidden), self.stop - self.start
        if slot.probs is None or slot.probs.shape != shape:
            slot.probs = slot.hidden.new_empty(shape)
        logits = torch.addmm(self.bias, slot.hidden, self.weight.t(), out=slot.probs)
        slot.mine = ((targets >= self.start) & (targets < self.stop)).nonzero().flatten()
        slot.targets = targets[slot.mine] - self.start
        chosen = slot.hidden.new_zeros(len(hidden)).index_put_((slot.mine,), logits[slot.mine, slot.targets])
        top = logits.amax(1)
        torch.softmax(logits, 1, out=logits)
        # The largest probability is at least 1 / rows, so this is exact; `logsumexp` would take two more passes.
        slot.lse = top - logits.amax(1).log()
        return slot.lse, chosen

    @torch.no_grad()
    def backward(self, trainer: int, number: int, lse: Tensor, scale: float) -> Tensor:
        """Return this server's part of the gradient of `scale` times the summed loss for `hidden`, [n, hidden].

        The weights' gradient is computed after the answer. `lse` [n] is that of the whole vocabulary.
        """
        slot = self._slot(trainer, number)
        assert slot.probs is not None
        # Row factors scale the small matrices, so that the probabilities are not written again.
        slot.factor, slot.scale = (slot.lse - lse.to(self._device)).exp_().mul_(scale), scale
        gradient = torch.mm(slot.probs, self.weight).mul_(slot.factor[:, None])
        gradient.index_add_(0, slot.mine, self.weight[slot.targets], alpha=-scale)
        slot.gradients = self._run(slot, self._weight_gradient, slot)
        return gradient

    @torch.no_grad()
    def _weight_gradient(self, slot: Slot) -> tuple[Tensor, Tensor]:
        assert slot.probs is not None
        if slot.buffers is None:
            slot.buffers = (torch.empty_like(self.weight), torch.empty_like(self.bias))
        weight, bias = slot.buffers
        torch.mm(slot.probs.t(), slot.hidden * slot.factor[:, None], out=weight)
        weight.index_add_(0, slot.targets, slot.hidden[slot.mine], alpha=-slot.scale)
        torch.mv(slot.probs.t(), slot.factor, out=bias)
        bias.index_add_(0, slot.targets, torch.ones_like(slot.targets, dtype=bias.dtype), alpha=-slot.scale)
        return slot.buffers

    def decode(self, trainer: int, number: int, hidden: Tensor, targets: Tensor, scale: float) -> tuple[float, Tensor]:
        """Return summed loss and gradient of the output: `score` and `backward` in one call, for a single server."""
        lse, losses = join_scores(*zip(self.score(trainer, number, hidden, targets), strict=True))
        return float(losses.double().sum()), self.backward(trainer, number, lse, scale)

    def measure(self, trainer: int, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the same as `score`, for an evaluation."""
        self.settle()
        return self._forward(self._evaluation_slots[trainer], hidden, targets)

    def push_for_norm(self, trainer: int, number: int, ids: Tensor, rows: Tensor) -> float:
        """Take gradients of embedding rows for clipping; return the squared norm of all gradients of this update."""
        with self._condition:
            joined = self._collect(trainer, number, ids, rows)
            if joined.squared_norm is None:  # the first of the trainers measures, before any of them can update
                gradients = (*self._decoder_gradients(joined), joined.rows.values())
                joined.squared_norm = sum(float(norm) ** 2 for norm in torch._foreach_norm(gradients))
            return joined.squared_norm

    def push(
        self, trainer: int, number: int, ids: Tensor, rows: Tensor | None, scale: float, lr: float, next_ids: Tensor
    ) -> Tensor:
        """Update with these gradients, or with `scale` times those for the norm; return the rows of the next batch."""
        with self._condition:
            if rows is None:
                joined = self._joined[trainer if self._is_async else 0]
            else:
                joined = self._collect(trainer, number, ids, rows)
            if not joined.is_applied:  # the first of the trainers updates: all send the same scale and learning rate
                joined.is_applied = True
                self._update(joined, scale, lr)
            return self._lookup(next_ids)

    def weights(self) -> dict[str, Tensor]:
        self.settle()
        return {name: tensor.cpu() for name, tensor in self.named_rows.items()}

    # --- updates

    def _slot(self, trainer: int, number: int) -> Slot:
        slots = self._slots[trainer]
        return slots[number % len(slots)]

    def _collect(self, trainer: int, number: int, ids: Tensor, rows: Tensor) -> Joined:
        """Wait for the gradients of all trainers, and return their sum; in async mode those of this trainer."""
        self._pushed[trainer] = self._slot(trainer, number), ids.to(self._device), rows.to(self._device)
        if self._is_async:
            self._joined[trainer] = self._join([trainer])
            return self._joined[trainer]
        if len(self._pushed) == self._num_trainers:
            self._joined[0] = self._join(range(self._num_trainers))
            self._round += 1
            self._condition.notify_all()
            return self._joined[0]
        before = self._round
        if not self._condition.wait_for(lambda: self._round > before, CALL_TIMEOUT_S):
            missing = sorted(set(range(self._num_trainers)) - set(self._pushed))
            raise PeerLost(f"trainer:{missing[0]} has pushed no gradients for {CALL_TIMEOUT_S:g} s")
        return self._joined[0]

    def _join(self, trainers: Sequence[int]) -> Joined:
        slots, ids, rows = zip(*(self._pushed.pop(trainer) for trainer in trainers), strict=True)
        joined = torch.sparse_coo_tensor(
            (torch.cat(ids) - self.start)[None],
            torch.cat(rows),
            self.encoder.shape,
            check_invariants=False,
            is_coalesced=len(ids) == 1,  # the ids of one trainer are different and sorted
        )
        return Joined(joined.coalesce(), list(slots))

    def _decoder_gradients(self, joined: Joined) -> tuple[Tensor, Tensor]:
        """Return the gradients of the decoder, summed over the trainers in order."""
        if joined.summed is None:
            joined.summed, *others = [slot.gradients.result() for slot in joined.slots]
            for other in others:
                torch._foreach_add_(joined.summed, other)
        return joined.summed

    def _update(self, joined: Joined, scale: float, lr: float) -> None:
        """Update the embedding now, since trainers wait for its rows, and the decoder once its gradients are there."""
        gradient = joined.rows if scale == 1.0 else joined.rows * scale
        self.encoder.grad = gradient if self._is_sparse else gradient.to_dense()
        set_lr(self.row_optimizer, lr)
        self.row_optimizer.step()
        update = self._run(joined.slots[0], self._update_decoder, joined, scale, lr)
        for slot in joined.slots:
            slot.used = update

    def _update_decoder(self, joined: Joined, scale: float, lr: float) -> None:
        with self._decoder_lock:
            self.weight.grad, self.bias.grad = gradients = self._decoder_gradients(joined)
            if scale != 1.0:
                torch._foreach_mul_(gradients, scale)
            set_lr(self.decoder_optimizer, lr)
            self.decoder_optimizer.step()

    def _run(self, slot: Slot, task: Callable[..., T], *arguments: Any) -> Future[T]:
        """Run a task in the background, unless the batch is so small that waking a thread costs more."""
        if slot.probs is not None and slot.probs.numel() >= MIN_BACKGROUND_SIZE:
            return self._pool.submit(task, *arguments)
        done: Future[T] = Future()
        done.set_result(task(*arguments))
        return done

    def _lookup(self, ids: Tensor) -> Tensor:
        return self.encoder.detach()[ids.to(self._device) - self.start]

    def settle(self) -> None:
        for slot in itertools.chain.from_iterable(self._slots):
            if slot.used is not None:
                slot.used.result()

    # --- checkpoints: each server saves its own rows, which may return to another number of servers

    @property
    def named_rows(self) -> dict[str, Tensor]:
        """The rows with the names of `LanguageModel`."""
        rows = {"encoder.weight": self.encoder, "decoder.weight": self.weight, "decoder.bias": self.bias}
        return {name: parameter.detach() for name, parameter in rows.items()}

    def shard(self) -> Shard:
        """Return rows and optimizer states. It waits for pending updates; no new ones may arrive."""
        self.settle()
        return Shard(
            model=self.named_rows,
            rows=dict.fromkeys(self.named_rows, (self.start, self.vocab_size)),
            trainer={"decoder": self.decoder_optimizer.state_dict(), "rows": self.row_optimizer.state_dict()},
        )

    def restore(self, saved: Restored) -> None:
        """Load rows and optimizer states from the shards of any number of servers."""
        check_vocab_size(saved, self.vocab_size)
        num_servers = saved.trainer["num_servers"]
        shares = [share_of(server, num_servers, self.vocab_size) for server in range(num_servers)]
        owners = [
            saved.trainer["num_trainers"] + server
            for server, rows in enumerate(shares)
            if rows.start < self.stop and self.start < rows.stop
        ]
        contents = [content for rank in owners if (content := saved.shard(rank)) is not None]
        first = contents[0]["rows"]["decoder.bias"][0]
        own = slice(self.start - first, self.stop - first)

        def select(values: Sequence[Any]) -> Any:
            if not isinstance(values[0], Tensor):
                return values[0]
            return torch.cat(list(values))[own] if values[0].dim() else values[0].clone()

        for name, tensor in self.named_rows.items():
            tensor.copy_(select([content["model"][name] for content in contents]))
        for key, optimizer in (("decoder", self.decoder_optimizer), ("rows", self.row_optimizer)):
            parts = [content["trainer"][key] for content in contents]
            states = {
                index: {name: select([part["state"][index][name] for part in parts]) for name in state}
                for index, state in parts[0]["state"].items()
            }
            # The options stay those of the config, also of a sparse optimizer, which torch makes.
            optimizer.load_state_dict({**optimizer.state_dict(), "state": states})


def check_vocab_size(saved: Restored, vocab_size: int) -> None:
    """Raise ConfigError unless the checkpoint was trained on a vocabulary of this size."""
    if (trained := saved.trainer["vocab_size"]) != vocab_size:
        raise ConfigError(
            f"the text has {vocab_size} different tokens, but the checkpoint was trained on {trained}:"
             " resume with the same text and tokenizer"
        )  # fmt: skip


class VocabularyClient:
    """All servers of the vocabulary as one object, for the trainer with this index and device.

    A method that returns a function sends its requests at once; the function waits for the answers.
    """

    def __init__(self, group: RpcGroup, *, trainer: int, vocab_size: int, device: torch.device) -> None:
        self._group, self._names = group, group.of_role("parameter_server")
        self._trainer = trainer
        self.vocab_size = vocab_size
        firsts = [share_of(server, len(self._names), vocab_size).start for server in range(len(self._names))]
        self._bounds = torch.tensor([*firsts, vocab_size])
        self._device = device

    def _of_each(self, ids: Tensor) -> dict[str, slice]:
        """Return the slice of the sorted ids that each server has."""
        if len(self._names) == 1:
            return {self._names[0]: slice(None)}
        cuts = torch.searchsorted(ids, self._bounds).tolist()
        return {name: slice(*pair) for name, pair in zip(self._names, itertools.pairwise(cuts), strict=True)}

    def _rows_of(self, calls: Sequence[Future[Tensor]]) -> Callable[[], Tensor]:
        def rows() -> Tensor:
            parts = [call.result().to(self._device) for call in calls]
            return parts[0] if len(parts) == 1 else torch.cat(parts)

        return rows

    def pull(self, ids: Tensor) -> Callable[[], Tensor]:
        return self._rows_of([self._group.call(name, "pull", ids[part]) for name, part in self._of_each(ids).items()])

    def decode(self, number: int, hidden: Tensor, targets: Tensor, scale: float) -> Callable[[], tuple[float, Tensor]]:
        """Start a batch; request its summed loss and the gradient of `hidden`, multiplied by `scale`."""
        if len(self._names) == 1:  # which has all rows: one call is enough
            (call,) = self._group.call_all(self._names, "decode", self._trainer, number, hidden, targets, scale)
            return lambda: (call.result()[0], call.result()[1].to(self._device))
        scores = self._group.call_all(self._names, "score", self._trainer, number, hidden, targets)

        def loss_and_gradient() -> tuple[float, Tensor]:
            lse, losses = join_scores(*zip(*(score.result() for score in scores), strict=True))
            parts = [
                call.result()
                for call in self._group.call_all(self._names, "backward", self._trainer, number, lse, scale)
            ]
            return float(losses.double().sum()), torch.stack(parts).sum(0).to(self._device)

        return loss_and_gradient

    def loss(self, hidden: Tensor, targets: Tensor) -> float:
        scores = self._group.call_all(self._names, "measure", self._trainer, hidden, targets)
        _, losses = join_scores(*zip(*(score.result() for score in scores), strict=True))
        return float(losses.double().sum())

    def push_for_norm(self, number: int, ids: Tensor, rows: Tensor) -> float:
        """Send gradients for clipping; return the squared norm of all gradients of the servers."""
        calls = [
            self._group.call(server, "push_for_norm", self._trainer, number, ids[part], rows[part])
            for server, part in self._of_each(ids).items()
        ]
        return math.fsum(call.result() for call in calls)

    def push(
        self, number: int, ids: Tensor, rows: Tensor | None, scale: float, lr: float, next_ids: Tensor
    ) -> Callable[[], Tensor]:
        """Update the servers with these gradients, without `rows` with `scale` times those for the norm.

        Request the rows of `next_ids` after the update.
        """
        calls, next_parts = [], self._of_each(next_ids)
        for server, part in self._of_each(ids).items():
            mine = (ids[part], None if rows is None else rows[part])
            further = (scale, lr, next_ids[next_parts[server]])
            calls.append(self._group.call(server, "push", self._trainer, number, *mine, *further))
        return self._rows_of(calls)

    def weights(self) -> dict[str, Tensor]:
        parts = [call.result() for call in self._group.call_all(self._names, "weights")]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
