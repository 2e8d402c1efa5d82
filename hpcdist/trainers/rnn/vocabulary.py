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
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from hpcdist.checkpoint.sharded import Box, Target
from hpcdist.checkpoint.state import Shard
from hpcdist.checkpoint.stored_weights import StoredWeights
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
    target_places: Tensor  #: places in the batch with targets of this server
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
    lse = lses[0]
    if len(lses) > 1:
        lse = torch.logsumexp(torch.stack(list(lses)), 0)
    target_logits = torch.stack(list(chosen)).sum(0)  # 0 on all servers but one
    return lse, lse - target_logits


def _join_results(scores: Sequence[Future[tuple[Tensor, Tensor]]]) -> tuple[Tensor, Tensor]:
    """Wait for the scores of all servers and join them."""
    lses, chosen = [], []
    for score in scores:
        lse, target_logits = score.result()
        lses.append(lse)
        chosen.append(target_logits)
    return join_scores(lses, chosen)


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
        self.start = start
        self.stop = start + len(encoder)
        self.vocab_size = vocab_size
        self.encoder = nn.Parameter(encoder.to(device))
        self.weight = nn.Parameter(weight.to(device))
        self.bias = nn.Parameter(torch.zeros(len(encoder), device=device))
        self.decoder_optimizer = build_optimizer([self.weight, self.bias], cfg)
        # Plain SGD gives the same result with sparse gradients, which cost only their rows; SparseAdam does not update
        # the moments of other rows. Momentum of SGD and weight decay change every row in every step.
        is_adam = cfg.name == "adam"
        is_plain_sgd = cfg.name == "sgd" and cfg.momentum == 0
        self._is_sparse = cfg.weight_decay == 0 and (is_adam or is_plain_sgd)
        self.row_optimizer: torch.optim.Optimizer
        if not self._is_sparse:
            self.row_optimizer = build_optimizer([self.encoder], cfg)
        elif is_adam:
            self.row_optimizer = torch.optim.SparseAdam([self.encoder], lr=cfg.lr)
        else:
            self.row_optimizer = torch.optim.SGD([self.encoder], lr=cfg.lr)
        self._num_trainers = num_trainers
        self._device = device
        self._is_async = is_async
        num_slots = 1
        if is_async:  # calls of two batches may overlap
            num_slots = 2
        # By trainer, and by batch number modulo the number of slots.
        self._slots = [[Slot() for _ in range(num_slots)] for _ in range(num_trainers)]
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
        """The methods that trainers call, by name."""
        names = ("pull", "score", "backward", "decode", "measure", "push_for_norm", "push", "weights")
        return {name: getattr(self, name) for name in names}

    def pull(self, ids: Tensor) -> Tensor:
        """Return the embedding rows of these tokens, [n, embedding]."""
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
        """Compute the probabilities of a batch over this server's rows, in the slot; return the result of `score`."""
        slot.hidden = hidden.to(self._device)
        targets = targets.to(self._device)
        shape = (len(hidden), self.stop - self.start)
        if slot.probs is None or slot.probs.shape != shape:
            slot.probs = slot.hidden.new_empty(shape)
        logits = torch.addmm(self.bias, slot.hidden, self.weight.t(), out=slot.probs)
        slot.target_places = ((targets >= self.start) & (targets < self.stop)).nonzero().flatten()
        slot.targets = targets[slot.target_places] - self.start
        target_logits = slot.hidden.new_zeros(len(hidden))
        target_logits.index_put_((slot.target_places,), logits[slot.target_places, slot.targets])
        largest_logit = logits.amax(1)
        probs = torch.softmax(logits, 1, out=logits)
        # The largest probability is at least 1 / rows, so this is exact; `logsumexp` would take two more passes.
        slot.lse = largest_logit - probs.amax(1).log()
        return slot.lse, target_logits

    @torch.no_grad()
    def backward(self, trainer: int, number: int, lse: Tensor, scale: float) -> Tensor:
        """Return this server's part of the gradient of `scale` times the summed loss for `hidden`, [n, hidden].

        The weights' gradient is computed after the answer. `lse` [n] is that of the whole vocabulary.
        """
        slot = self._slot(trainer, number)
        assert slot.probs is not None
        # Row factors scale the small matrices, so that the probabilities are not written again.
        slot.factor = (slot.lse - lse.to(self._device)).exp_().mul_(scale)
        slot.scale = scale
        gradient = torch.mm(slot.probs, self.weight).mul_(slot.factor[:, None])
        gradient.index_add_(0, slot.target_places, self.weight[slot.targets], alpha=-scale)
        slot.gradients = self._run(slot, self._weight_gradient, slot)
        return gradient

    @torch.no_grad()
    def _weight_gradient(self, slot: Slot) -> tuple[Tensor, Tensor]:
        """Return the gradients of the decoder's weight and bias for a batch, in the slot's buffers."""
        assert slot.probs is not None
        if slot.buffers is None:
            slot.buffers = (torch.empty_like(self.weight), torch.empty_like(self.bias))
        weight, bias = slot.buffers
        torch.mm(slot.probs.t(), slot.hidden * slot.factor[:, None], out=weight)
        weight.index_add_(0, slot.targets, slot.hidden[slot.target_places], alpha=-slot.scale)
        torch.mv(slot.probs.t(), slot.factor, out=bias)
        bias.index_add_(0, slot.targets, torch.ones_like(slot.targets, dtype=bias.dtype), alpha=-slot.scale)
        return slot.buffers

    def decode(self, trainer: int, number: int, hidden: Tensor, targets: Tensor, scale: float) -> tuple[float, Tensor]:
        """Return summed loss and gradient of the output: `score` and `backward` in one call, for a single server."""
        own_lse, target_logits = self.score(trainer, number, hidden, targets)
        lse, losses = join_scores([own_lse], [target_logits])
        loss_sum = float(losses.double().sum())
        return loss_sum, self.backward(trainer, number, lse, scale)

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
            if rows is not None:
                joined = self._collect(trainer, number, ids, rows)
            elif self._is_async:
                joined = self._joined[trainer]
            else:
                joined = self._joined[0]
            if not joined.is_applied:  # the first of the trainers updates: all send the same scale and learning rate
                joined.is_applied = True
                self._update(joined, scale, lr)
            return self._lookup(next_ids)

    def weights(self) -> dict[str, Tensor]:
        """Return this server's rows on the CPU, after all updates, with the names of `LanguageModel`."""
        self.settle()
        return {name: tensor.cpu() for name, tensor in self.named_rows.items()}

    # --- updates

    def _slot(self, trainer: int, number: int) -> Slot:
        """Return the slot of a trainer's batch."""
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
        """Return the gradients that these trainers have pushed as one update, in the order of the trainers."""
        slots, ids, rows = [], [], []
        for trainer in trainers:
            slot, trainer_ids, trainer_rows = self._pushed.pop(trainer)
            slots.append(slot)
            ids.append(trainer_ids)
            rows.append(trainer_rows)
        joined = torch.sparse_coo_tensor(
            (torch.cat(ids) - self.start)[None],
            torch.cat(rows),
            self.encoder.shape,
            check_invariants=False,
            is_coalesced=len(ids) == 1,  # the ids of one trainer are different and sorted
        )
        return Joined(joined.coalesce(), slots)

    def _decoder_gradients(self, joined: Joined) -> tuple[Tensor, Tensor]:
        """Return the gradients of the decoder, summed over the trainers in order."""
        if joined.summed is None:
            joined.summed, *others = [slot.gradients.result() for slot in joined.slots]
            for other in others:
                torch._foreach_add_(joined.summed, other)
        return joined.summed

    def _update(self, joined: Joined, scale: float, lr: float) -> None:
        """Update the embedding now, since trainers wait for its rows, and the decoder once its gradients are there."""
        gradient = joined.rows
        if scale != 1.0:
            gradient = gradient * scale
        if not self._is_sparse:
            gradient = gradient.to_dense()
        self.encoder.grad = gradient
        set_lr(self.row_optimizer, lr)
        self.row_optimizer.step()
        update = self._run(joined.slots[0], self._update_decoder, joined, scale, lr)
        for slot in joined.slots:
            slot.used = update

    def _update_decoder(self, joined: Joined, scale: float, lr: float) -> None:
        with self._decoder_lock:
            gradients = self._decoder_gradients(joined)
            self.weight.grad, self.bias.grad = gradients
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
        """Wait for pending updates of the decoder."""
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
        rows = self.named_rows
        return Shard(
            model=rows,
            boxes={name: Box.of_rows(part, self.start, self.vocab_size) for name, part in rows.items()},
            trainer={"decoder": self.decoder_optimizer.state_dict(), "rows": self.row_optimizer.state_dict()},
        )

    def start_from(self, weights: StoredWeights) -> None:
        """Copy this server's rows of the whole tables in `weights`, by the names of `LanguageModel`."""
        for name, rows in self.named_rows.items():
            if name in weights:
                first = (self.start, *(0 for _ in rows.shape[1:]))
                weights.fill(name, [Target(rows, first)])

    def restore(self, saved: Restored) -> None:
        """Load rows and optimizer states from the shards of any number of servers."""
        check_vocab_size(saved, self.vocab_size)
        shards = self._shards_with_own_rows(saved)
        (first_row,), _ = shards[0]["boxes"]["decoder.bias"]
        own_rows = slice(self.start - first_row, self.stop - first_row)

        def select(values: Sequence[Any]) -> Any:
            """Return this server's part of a value of each shard: of its rows, or equal in all shards."""
            first = values[0]
            if not isinstance(first, Tensor):
                return first
            if first.dim() == 0:
                return first.clone()
            return torch.cat(list(values))[own_rows]

        for name, tensor in self.named_rows.items():
            tensor.copy_(select([shard["model"][name] for shard in shards]))
        for key, optimizer in (("decoder", self.decoder_optimizer), ("rows", self.row_optimizer)):
            states_of_shards = [shard["trainer"][key]["state"] for shard in shards]
            own_states: dict[int, dict[str, Any]] = {}  # by number of the parameter
            for index, state in states_of_shards[0].items():
                own_states[index] = {
                    name: select([states[index][name] for states in states_of_shards]) for name in state
                }
            # The options stay those of the config, also of a sparse optimizer, which torch makes.
            optimizer.load_state_dict({**optimizer.state_dict(), "state": own_states})

    def _shards_with_own_rows(self, saved: Restored) -> list[Mapping[str, Any]]:
        """Return the shards of a checkpoint that have some of this server's rows, in the order of the rows."""
        num_servers = saved.trainer["num_servers"]
        shards: list[Mapping[str, Any]] = []
        for server in range(num_servers):
            rows = share_of(server, num_servers, self.vocab_size)
            if rows.start >= self.stop or rows.stop <= self.start:
                continue
            shard = saved.shard(saved.trainer["num_trainers"] + server)
            if shard is not None:
                shards.append(shard)
        return shards


def check_vocab_size(saved: Restored, vocab_size: int) -> None:
    """Raise ConfigError unless the checkpoint was trained on a vocabulary of this size."""
    trained_size = saved.trainer["vocab_size"]
    if trained_size != vocab_size:
        raise ConfigError(
            f"the text has {vocab_size} different tokens, but the checkpoint was trained on {trained_size}:"
            " resume with the same text and tokenizer"
        )


class VocabularyClient:
    """All servers of the vocabulary as one object, for the trainer with this index and device.

    A method that returns a function sends its requests at once; the function waits for the answers. Token ids are
    sorted and different.
    """

    def __init__(self, group: RpcGroup, *, trainer: int, vocab_size: int, device: torch.device) -> None:
        self._group = group
        self._names = group.of_role("parameter_server")
        self._trainer = trainer
        self.vocab_size = vocab_size
        num_servers = len(self._names)
        first_rows = [share_of(server, num_servers, vocab_size).start for server in range(num_servers)]
        self._bounds = torch.tensor([*first_rows, vocab_size])
        self._device = device

    def _slices(self, ids: Tensor) -> dict[str, slice]:
        """Return the slice of the ids of each server's rows, by name of the server."""
        if len(self._names) == 1:
            return {self._names[0]: slice(None)}
        cuts = torch.searchsorted(ids, self._bounds).tolist()
        return {name: slice(*pair) for name, pair in zip(self._names, itertools.pairwise(cuts), strict=True)}

    def _rows_of(self, calls: Sequence[Future[Tensor]]) -> Callable[[], Tensor]:
        """Return a function that waits for the rows of all servers and joins them."""

        def receive_rows() -> Tensor:
            parts = [call.result().to(self._device) for call in calls]
            if len(parts) == 1:
                return parts[0]
            return torch.cat(parts)

        return receive_rows

    def pull(self, ids: Tensor) -> Callable[[], Tensor]:
        """Request the embedding rows of these tokens."""
        calls = [self._group.call(server, "pull", ids[part]) for server, part in self._slices(ids).items()]
        return self._rows_of(calls)

    def decode(self, number: int, hidden: Tensor, targets: Tensor, scale: float) -> Callable[[], tuple[float, Tensor]]:
        """Start a batch; request its summed loss and the gradient of `hidden`, multiplied by `scale`."""
        if len(self._names) == 1:  # which has all rows: one call is enough
            (call,) = self._group.call_all(self._names, "decode", self._trainer, number, hidden, targets, scale)

            def receive() -> tuple[float, Tensor]:
                loss_sum, gradient = call.result()
                return loss_sum, gradient.to(self._device)

            return receive
        scores = self._group.call_all(self._names, "score", self._trainer, number, hidden, targets)

        def receive_and_propagate_back() -> tuple[float, Tensor]:
            lse, losses = _join_results(scores)
            calls = self._group.call_all(self._names, "backward", self._trainer, number, lse, scale)
            parts = [call.result() for call in calls]
            return float(losses.double().sum()), torch.stack(parts).sum(0).to(self._device)

        return receive_and_propagate_back

    def loss(self, hidden: Tensor, targets: Tensor) -> float:
        """Return the summed loss of a batch for an evaluation."""
        scores = self._group.call_all(self._names, "measure", self._trainer, hidden, targets)
        _, losses = _join_results(scores)
        return float(losses.double().sum())

    def push_for_norm(self, number: int, ids: Tensor, rows: Tensor) -> float:
        """Send gradients for clipping; return the squared norm of all gradients of the servers."""
        calls = []
        for server, part in self._slices(ids).items():
            calls.append(self._group.call(server, "push_for_norm", self._trainer, number, ids[part], rows[part]))
        return math.fsum(call.result() for call in calls)

    def push(
        self, number: int, ids: Tensor, rows: Tensor | None, scale: float, lr: float, next_ids: Tensor
    ) -> Callable[[], Tensor]:
        """Update the servers with the gradients `rows`, or, with None, with `scale` times those of `push_for_norm`.

        Request the rows of `next_ids` after the update.
        """
        calls = []
        next_slices = self._slices(next_ids)
        for server, part in self._slices(ids).items():
            server_rows = None
            if rows is not None:
                server_rows = rows[part]
            server_next_ids = next_ids[next_slices[server]]
            arguments = (self._trainer, number, ids[part], server_rows, scale, lr, server_next_ids)
            calls.append(self._group.call(server, "push", *arguments))
        return self._rows_of(calls)

    def weights(self) -> dict[str, Tensor]:
        """Return all rows on the CPU, with the names of `LanguageModel`."""
        parts = [call.result() for call in self._group.call_all(self._names, "weights")]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
