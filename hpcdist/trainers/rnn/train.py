"""A recurrent language model with its vocabulary on parameter servers: embedding and decoder there, the LSTM here.

Roles: trainers (rank 0 is one) hold the LSTM and the text; each server holds an equal range of the rows of embedding
and decoder. A trainer's batch has three exchanges with the servers:

    lookup      receive the rows of the batch's different tokens (with the answer to the last push)
    decode      send the LSTM's output, receive its gradient and the loss: logits are never sent
    push        send the gradients of the batch's rows, each row once

The server answers `decode` before it computes the gradient of the decoder's weights, a third of its work, which
overlaps with the trainer's backward pass. Source of the method:
https://docs.pytorch.org/tutorials/intermediate/rpc_tutorial.html (its second part).

`mode: sync` equals one process on the joint batch of all trainers: servers wait for the push of every trainer and sum
in the order of their index; LSTM gradients are summed over the trainers. `mode: async` has two batches of a trainer in
flight, so that servers and LSTM work at the same time: gradients belong to weights that are one update old, and with
several trainers a server applies each push on arrival (Hogwild, https://arxiv.org/abs/1106.5730). LSTM gradients are
still averaged, so the replicas stay equal. Async runs do not repeat exactly and learn somewhat less per step.

Distributed autograd is not used: the graph is cut at two fixed places, and explicit calls avoid its context, messages
and optimizer calls in each step (`benchmarks/rnn.py` measures the difference).
"""

from __future__ import annotations

import copy
import math
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 (the name everyone uses)
from torch import Tensor, nn

from hpcdist.checkpoint.state import Shard
from hpcdist.config.schema import Config
from hpcdist.data.loading import digest_of
from hpcdist.rank.checkpointing import Restored
from hpcdist.rank.context import Context
from hpcdist.rank.rpc import RpcGroup, rpc_group
from hpcdist.rank.training_loop import Meter, Progress, build_optimizer, lr_factor, set_lr
from hpcdist.review.figures import MAX_TEXT, Text
from hpcdist.trainers.rnn import RnnConfig
from hpcdist.trainers.rnn.text import Batch, Columns, Corpus, Tokenizer, load_corpus
from hpcdist.trainers.rnn.vocabulary import (
    CALL_TIMEOUT_S,
    PendingRows,
    VocabularyClient,
    VocabularyServer,
    VocabularyShard,
    check_vocab_size,
    load_server,
    row_bounds,
    server_shard,
    shards_of_rows,
)

TRAINER, SERVER = "trainer", "parameter_server"


def train(ctx: Context, cfg: Config) -> None:
    """Train, evaluate after each epoch, save checkpoints, write a sample text and export the final model."""
    rnn = cfg.section(RnnConfig)
    ctx.roles.require(trainer=None, parameter_server=None)
    ranks = list(ctx.ranks_of(TRAINER))
    ctx.agree_among(ranks)
    trainers = dist.new_group(ranks)
    # Rank 0 alone reads the text, so all have the same. Servers need the size of the vocabulary.
    corpus = load_corpus(rnn, cfg.seed) if ctx.is_main else None
    if corpus:
        _log_corpus(ctx, rnn, corpus)
    vocab_size: list[Any] = [corpus and corpus.tokenizer.size]
    dist.broadcast_object_list(vocab_size)
    options: dict[str, Any] = {
        "timeout_s": CALL_TIMEOUT_S,
        "num_threads": max(16, 4 * len(ranks)),  # calls of all trainers but one may wait for that one
    }
    if ctx.role == SERVER:
        server = _open_server(ctx, cfg, vocab_size[0])
        with rpc_group(ctx, server.functions, **options) as group:
            group.serve({"save": lambda step: ctx.save(step, model=None, trainer={}, shard=server_shard(server))})
        return
    assert isinstance(trainers, dist.ProcessGroup)
    streams: list[Any] = [corpus.train, corpus.held_out] if corpus else [None, None]
    dist.broadcast_object_list(streams, src=ranks[0], group=trainers)
    lstm = _build_lstm(ctx, rnn, vocab_size[0])
    saved = ctx.restore()  # at the same time as the servers, which restore before RPC starts
    with rpc_group(ctx, **options) as group:
        client = VocabularyClient(group, trainer=ctx.role_index, vocab_size=vocab_size[0], device=ctx.device)
        learner = Learner(lstm, cfg, client, trainers, ctx.device)
        # This trainer's share of both texts.
        part = ctx.role_index, len(ranks)
        columns, held_out = (Columns(stream, rnn.batch_size, rnn.bptt, part) for stream in streams)
        train_lstm(ctx, cfg, learner, group, columns, held_out, saved, vocab_size[0])
        if corpus and ctx.end_reason:
            _export(ctx, cfg, learner, corpus.tokenizer)
        if not ctx.is_main:
            group.serve({})  # until rank 0 has written the model


def train_lstm(
    ctx: Context,
    cfg: Config,
    learner: Learner,
    group: RpcGroup,
    columns: Columns,
    held_out: Columns,
    saved: Restored | None,
    vocab_size: int,
) -> None:
    """Train until a stop rule of the config applies, which becomes `ctx.end_reason`, or a stop is requested."""
    local = None
    if saved is not None:
        check_vocab_size(saved, vocab_size)
        learner.lstm.load_state_dict({name.removeprefix("lstm."): tensor for name, tensor in saved.model.items()})
        learner.optimizer.load_state_dict(saved.trainer["optimizer"])
        local = saved.local
    if local is not None and "h" in local:
        learner.state = local["h"].to(learner.device), local["c"].to(learner.device)
    progress = Progress(cfg, len(columns), saved.trainer["position"] if saved is not None else None)
    # Sums of trainers are lost if the number of ranks has changed: the hidden state is saved with them.
    meter = Meter(local["meter"] if local is not None else None)

    def save(metrics: Mapping[str, float]) -> None:
        """Save on every rank: rank 0 orders the servers to save once they have all updates."""
        learner.settle()
        if ctx.is_main:
            group.order("save", progress.step, to=group.of_role(SERVER))
        hidden = {} if learner.state is None else {"h": learner.state[0], "c": learner.state[1]}
        ctx.save(
            progress.step,
            model=nn.ModuleDict({"lstm": learner.lstm}),
            trainer={
                "optimizer": learner.optimizer.state_dict(),
                "position": progress.state_dict(),
                "num_trainers": ctx.roles.count(TRAINER),
                "num_servers": ctx.roles.count(SERVER),
                "vocab_size": vocab_size,
            },
            local={**hidden, "meter": meter.state_dict()},
            metrics=metrics,
            shard=Shard(),
        )

    max_in_flight = 2 if cfg.section(RnnConfig).mode == "async" else 1
    every = cfg.checkpoint.every_steps
    in_flight: deque[Flight] = deque()  # launched batches with an incomplete update
    ctx.training_begins()  # the time until here counts as start-up
    while not progress.end_reason:  # a stop rule of the config applies; known after an evaluation
        if progress.step_in_epoch == 0:
            learner.state = None  # the columns start anew
        upcoming = columns[progress.step_in_epoch % len(columns)]  # the next batch to launch
        while left := progress.steps_until_evaluation:
            # No batch is in flight at a step after which a checkpoint is saved or an evaluation follows.
            is_ending = ctx.stop_agreed or ctx.save_requested
            limit = min(max_in_flight, left, every - progress.step % every if every else left)
            while len(in_flight) < limit and not is_ending:
                in_flight.append(learner.launch(upcoming))
                upcoming = columns[(progress.step_in_epoch + len(in_flight)) % len(columns)]
            flight = in_flight.popleft()
            lr = cfg.optim.lr * lr_factor(progress.step, progress.total_steps, cfg.schedule)
            meter.add(loss_sum=learner.land(flight, lr, upcoming.ids), num_tokens=len(flight.batch.targets))
            progress.count_step()
            if progress.log_is_due:
                ctx.log(interval_metrics(learner, progress, meter), progress.step)
                meter.reset()
            stop = ctx.should_stop(progress.step, progress.total_steps)  # the same answer on all trainers
            if in_flight:
                continue
            if stop:
                save({})
                return
            # Before an evaluation no checkpoint is saved, as one with its metrics follows.
            if ctx.should_save(progress.step) and progress.steps_until_evaluation > 0:
                save({})
        with meter.paused():
            with ctx.evaluating():
                metrics = evaluate(ctx, learner, held_out)
            ctx.log(metrics, progress.step)
            progress.end_epoch(metrics)
            save(metrics)
    ctx.end_reason = progress.end_reason


def interval_metrics(learner: Learner, progress: Progress, meter: Meter) -> dict[str, float]:
    """Return the training metrics since the last logged step."""
    loss_sum, num_tokens = learner.sum_over_trainers([meter.sums["loss_sum"], meter.sums["num_tokens"]])
    return {
        "train/loss": loss_sum / num_tokens,
        "train/lr": learner.optimizer.param_groups[0]["lr"],
        "train/epoch": progress.epochs,
        "train/tokens_per_s": num_tokens / meter.elapsed_s,
        "samples": progress.count_samples(num_tokens),
    }


def evaluate(ctx: Context, learner: Learner, held_out: Columns) -> dict[str, float]:
    """Return mean loss in nats and perplexity over the held-out text, equal on all trainers."""
    learner.settle()
    loss_sum, num_tokens = learner.sum_over_trainers(learner.measure(held_out))
    ctx.alive()
    loss = loss_sum / num_tokens
    return {"eval/loss": loss, "eval/perplexity": math.exp(min(loss, 700.0))}


def _log_corpus(ctx: Context, rnn: RnnConfig, corpus: Corpus) -> None:
    name, source = ("text", " ".join(rnn.files)) if rnn.files else ("python-stdlib", "Python's standard library")
    for split, tokens in (("train", corpus.train), ("test", corpus.held_out)):
        ctx.log_dataset(name, split=split, num_samples=len(tokens), digest=digest_of(tokens), source=source)


def _open_server(ctx: Context, cfg: Config, vocab_size: int) -> VocabularyServer:
    rnn = cfg.section(RnnConfig)
    start, stop = row_bounds(vocab_size, ctx.roles.count(SERVER))[ctx.role_index : ctx.role_index + 2]
    shard = VocabularyShard(
        first_rows(start, stop, rnn.embedding_size, cfg.seed, ENCODER),
        None if rnn.tie_weights else first_rows(start, stop, rnn.hidden_size, cfg.seed, DECODER),
        start=start,
        vocab_size=vocab_size,
    )
    num_trainers, is_async = ctx.roles.count(TRAINER), rnn.mode == "async"
    server = VocabularyServer(shard, cfg.optim, num_trainers, device=ctx.device, is_async=is_async)
    if (saved := ctx.restore()) is not None:
        check_vocab_size(saved, vocab_size)
        load_server(server, shards_of_rows(saved, start, stop))
    return server


def _build_lstm(ctx: Context, rnn: RnnConfig, vocab_size: int) -> nn.LSTM:
    lstm = build_lstm(rnn.embedding_size, rnn.hidden_size, rnn.num_layers, rnn.dropout)
    vocabulary_row = rnn.embedding_size + (0 if rnn.tie_weights else rnn.hidden_size) + 1  # and a bias of the decoder
    ctx.log_model_size(sum(weight.numel() for weight in lstm.parameters()) + vocab_size * vocabulary_row)
    ctx.seed_per_rank()
    return lstm


# A trainer's LSTM and the steps of a batch between LSTM and vocabulary servers.


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


# A recurrent language model in one process, and the initial values of its tables.

#: Rows are drawn in blocks of this size, so that their values do not depend on the number of shards.
_BLOCK = 1024
_BOUND = 0.1
ENCODER, DECODER = 0, 1


def first_rows(start: int, stop: int, width: int, seed: int, table: int) -> Tensor:
    """Return the initial rows `start` to `stop` of a table, uniform in ±0.1, float32 [stop - start, width]."""
    blocks = []
    for block in range(start // _BLOCK, -(-stop // _BLOCK)):
        generator = torch.Generator().manual_seed((((2 * seed + table) << 24) + block) % 2**63)
        blocks.append(torch.empty(_BLOCK, width).uniform_(-_BOUND, _BOUND, generator=generator))
    offset = start // _BLOCK * _BLOCK
    return torch.cat(blocks)[start - offset : stop - offset].clone()


class LanguageModel(nn.Module):
    """Embedding, LSTM and decoder: from tokens int64 [B, T] to logits of the next tokens [B, T, vocab_size]."""

    def __init__(
        self,
        *,
        vocab_size: int,
        embedding: int,
        hidden: int,
        layers: int,
        dropout: float = 0.0,
        tied: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.encoder = nn.Embedding(vocab_size, embedding, _weight=first_rows(0, vocab_size, embedding, seed, ENCODER))
        self.lstm = build_lstm(embedding, hidden, layers, dropout)
        self.decoder = nn.Linear(hidden, vocab_size)
        self.decoder.weight = nn.Parameter(first_rows(0, vocab_size, hidden, seed, DECODER))
        nn.init.zeros_(self.decoder.bias)
        if tied:
            self.decoder.weight = self.encoder.weight
        self.dropout = dropout

    def forward(self, tokens: Tensor) -> Tensor:
        return self.step(tokens.t(), None)[0].transpose(0, 1)

    def step(self, tokens: Tensor, state: tuple[Tensor, Tensor] | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return logits [T, B, vocab_size] for tokens [T, B], and the hidden state after them."""
        embedded = F.dropout(self.encoder(tokens), self.dropout, self.training)
        output, state = self.lstm(embedded, state)
        return self.decoder(F.dropout(output, self.dropout, self.training)), state


def build_lstm(embedding: int, hidden: int, layers: int, dropout: float) -> nn.LSTM:
    """Return an LSTM for inputs [T, B, embedding], initialised from torch's global generator."""
    # With one layer torch warns about dropout, which applies between layers.
    return nn.LSTM(embedding, hidden, layers, dropout=dropout if layers > 1 else 0.0)


@torch.no_grad()
def sample(
    model: LanguageModel, prompt: Sequence[int], num_tokens: int, temperature: float, generator: torch.Generator
) -> list[int]:
    """Return `num_tokens` tokens drawn one by one from the model, after `prompt` (at least one token)."""
    model.eval()
    logits, state = model.step(torch.tensor(prompt)[:, None], None)
    tokens: list[int] = []
    for _ in range(num_tokens):
        probabilities = torch.softmax(logits[-1, 0].float().cpu() / temperature, 0)
        tokens.append(int(torch.multinomial(probabilities, 1, generator=generator)))
        logits, state = model.step(torch.tensor(tokens[-1:])[:, None], state)
    return tokens


def _export(ctx: Context, cfg: Config, learner: Learner, tokenizer: Tokenizer) -> None:
    """Build the whole model on rank 0, write a text sampled from it, and export it."""
    rnn = cfg.section(RnnConfig)
    model = LanguageModel(
        vocab_size=tokenizer.size,
        embedding=rnn.embedding_size,
        hidden=rnn.hidden_size,
        layers=rnn.num_layers,
        dropout=rnn.dropout,
        tied=rnn.tie_weights,
    )
    lstm = {f"lstm.{name}": tensor.cpu() for name, tensor in learner.lstm.state_dict().items()}
    model.load_state_dict({**lstm, **learner.client.weights()})
    if rnn.num_sample_tokens:
        prompt = tokenizer.encode([rnn.prompt])[0]
        generator = torch.Generator().manual_seed(cfg.seed)
        tokens = sample(model, prompt, rnn.num_sample_tokens, rnn.temperature, generator)
        path = ctx.artifact("sample.txt")
        text = tokenizer.decode([*prompt, *tokens])
        path.write_text(text)
        ctx.figure("sample", Text(title="text sampled from the final model", text=text[:MAX_TEXT]))
    with warnings.catch_warnings():
        # The list is a second name of the LSTM's parameters, which are exported.
        warnings.filterwarnings("ignore", message="The tensor attributes self.lstm._flat_weights")
        ctx.export_model(model, torch.zeros(2, rnn.bptt, dtype=torch.int64))
