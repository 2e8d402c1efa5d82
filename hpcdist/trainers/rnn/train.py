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

import math
import warnings
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpcdist.checkpoint.shards import Shard
from hpcdist.config.schema import Config
from hpcdist.data.identity import digest_of
from hpcdist.rank.checkpointing import Restored
from hpcdist.rank.context import Context
from hpcdist.rank.network.rpc import RpcGroup, rpc_group
from hpcdist.rank.optimizer import lr_factor
from hpcdist.rank.training_loop import Meter, run_epochs
from hpcdist.rank.training_position import TrainingPosition
from hpcdist.review.figures import MAX_TEXT, Text
from hpcdist.trainers.rnn.language_model import DECODER, ENCODER, LanguageModel, build_lstm, first_rows, sample
from hpcdist.trainers.rnn.learner import Flight, Learner
from hpcdist.trainers.rnn.schema import RnnConfig
from hpcdist.trainers.rnn.text import Columns, Corpus, Tokenizer, load_corpus
from hpcdist.trainers.rnn.vocabulary import VocabularyShard, row_bounds
from hpcdist.trainers.rnn.vocabulary_checkpoint import check_vocab_size, load_server, server_shard, shards_of_rows
from hpcdist.trainers.rnn.vocabulary_client import VocabularyClient
from hpcdist.trainers.rnn.vocabulary_server import CALL_TIMEOUT_S, VocabularyServer

TRAINER, SERVER = "trainer", "parameter_server"


@dataclass(frozen=True)
class RnnLoop:
    """State of the training loop of one trainer."""

    ctx: Context
    cfg: Config
    learner: Learner
    group: RpcGroup
    columns: Columns  #: this trainer's share of the training text
    held_out: Columns
    vocab_size: int
    position: TrainingPosition
    meter: Meter
    in_flight: deque[Flight]  #: launched batches with an incomplete update


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
        loop = make_loop(ctx, cfg, learner, saved, streams, vocab_size[0], group)
        ctx.end_reason = run_epochs(loop, train_epoch, interval_metrics, evaluate, save, in_flight=loop.in_flight)
        if corpus and ctx.end_reason:
            _export(ctx, cfg, learner, corpus.tokenizer)
        if not ctx.is_main:
            group.serve({})  # until rank 0 has written the model


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


def make_loop(
    ctx: Context,
    cfg: Config,
    learner: Learner,
    saved: Restored | None,
    streams: Sequence[Tensor],
    vocab_size: int,
    group: RpcGroup,
) -> RnnLoop:
    """Cut the text into this trainer's columns, and load the trainer's state from the checkpoint if there is one."""
    rnn, part = cfg.section(RnnConfig), (ctx.role_index, ctx.roles.count(TRAINER))
    columns, held_out = (Columns(stream, rnn.batch_size, rnn.bptt, part) for stream in streams)
    if saved is not None:
        check_vocab_size(saved, vocab_size)
        learner.lstm.load_state_dict({name.removeprefix("lstm."): tensor for name, tensor in saved.model.items()})
        learner.optimizer.load_state_dict(saved.trainer["optimizer"])
    local = saved.local if saved is not None else None
    if local is not None and "h" in local:
        learner.state = local["h"].to(learner.device), local["c"].to(learner.device)
    position = TrainingPosition.resume(saved.trainer["position"] if saved else None, len(columns), cfg.stop)
    meter = Meter(local["meter"] if local else None)
    return RnnLoop(ctx, cfg, learner, group, columns, held_out, vocab_size, position, meter, deque())


def train_epoch(loop: RnnLoop) -> Iterator[None]:
    """Do the remaining steps of the epoch: launch batches and land the oldest one."""
    cfg, learner, position, in_flight = loop.cfg, loop.learner, loop.position, loop.in_flight
    max_in_flight = 2 if cfg.section(RnnConfig).mode == "async" else 1
    every = cfg.checkpoint.every_steps
    if position.step_in_epoch == 0:
        learner.state = None  # the columns start anew
    upcoming = loop.columns[position.step_in_epoch]  # the next batch to launch
    while left := position.remaining_steps_in_epoch:
        # No batch is in flight at a step after which a checkpoint is saved or an evaluation follows.
        is_ending = loop.ctx.stop_agreed or loop.ctx.save_requested
        limit = min(max_in_flight, left, every - position.step % every if every else left)
        while len(in_flight) < limit and not is_ending:
            in_flight.append(learner.launch(upcoming))
            upcoming = loop.columns[(position.step_in_epoch + len(in_flight)) % position.steps_per_epoch]
        flight = in_flight.popleft()
        lr = cfg.optim.lr * lr_factor(position.step, position.total_steps, cfg.schedule)
        loop.meter.add(loss_sum=learner.land(flight, lr, upcoming.ids), num_tokens=len(flight.batch.targets))
        yield


def interval_metrics(loop: RnnLoop) -> dict[str, float]:
    """Return the training metrics since the last logged step."""
    sums = loop.meter.sums
    loss_sum, num_tokens = loop.learner.sum_over_trainers([sums["loss_sum"], sums["num_tokens"]])
    return {
        "train/loss": loss_sum / num_tokens,
        "train/lr": loop.learner.optimizer.param_groups[0]["lr"],
        "train/epoch": loop.position.epochs,
        "train/tokens_per_s": num_tokens / loop.meter.elapsed_s,
        "samples": loop.position.count_samples(num_tokens),
    }


def save(loop: RnnLoop, metrics: Mapping[str, float]) -> None:
    """Save on every rank: rank 0 orders the servers to save once they have all updates."""
    ctx, learner, position = loop.ctx, loop.learner, loop.position
    learner.settle()
    if ctx.is_main:
        loop.group.order("save", position.step, to=loop.group.of_role(SERVER))
    state = {} if learner.state is None else {"h": learner.state[0], "c": learner.state[1]}
    ctx.save(
        position.step,
        model=nn.ModuleDict({"lstm": learner.lstm}),
        trainer={
            "optimizer": learner.optimizer.state_dict(),
            "position": asdict(position),
            "num_trainers": ctx.roles.count(TRAINER),
            "num_servers": ctx.roles.count(SERVER),
            "vocab_size": loop.vocab_size,
        },
        local={**state, "meter": loop.meter.sums},
        metrics=metrics,
        shard=Shard(),
    )


def evaluate(loop: RnnLoop) -> dict[str, float]:
    """Return mean loss in nats and perplexity over the held-out text, equal on all trainers."""
    loop.learner.settle()
    loss_sum, num_tokens = loop.learner.sum_over_trainers(loop.learner.measure(loop.held_out))
    loop.ctx.alive()
    loss = loss_sum / num_tokens
    return {"eval/loss": loss, "eval/perplexity": math.exp(min(loss, 700.0))}


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
