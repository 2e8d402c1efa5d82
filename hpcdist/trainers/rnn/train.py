"""A recurrent language model whose vocabulary lies on parameter servers: embedding and decoder there, LSTM here.

Roles: trainers (rank 0 is one) hold the LSTM and the text; servers hold rows of embedding and decoder, each an equal
stretch of the vocabulary. One batch of a trainer is three things to say:

    look up      the different tokens' rows come (with the answer to the last push)
    decode       the LSTM's output goes, its gradient and the loss come back: logits never travel
    push         gradients of the rows that the batch has touched go, each row once

The server answers `decode` before it begins with the gradient of the decoder's weights, a third of its work, which
then overlaps with the trainer's backward. Source of the method:
https://docs.pytorch.org/tutorials/intermediate/rpc_tutorial.html (its second part).

`mode: sync` equals one process on the joined batch of all trainers: servers wait for every trainer's push and add up
in the order of their index; LSTM gradients are summed over the trainers. `mode: async` has two batches of a trainer in
flight, so that servers and LSTM work at the same time: gradients are of weights that are one update old, and with
several trainers a server applies each push as it comes (Hogwild, https://arxiv.org/abs/1106.5730). LSTM gradients are
still averaged, so the trainers' replicas stay equal. It gives up that two runs are alike, and some progress a step.

Distributed autograd is left out on purpose: the graph is cut at two places that are always the same, and an exchange
by hand spares a context, the graph's messages and the optimizer's calls in each step (`benchmarks/rnn.py`).
"""

from __future__ import annotations

import itertools
import math
import time
import warnings
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpcdist.checkpoint.shards import Shard
from hpcdist.config.schema import Config
from hpcdist.errors import ConfigError
from hpcdist.rank.context import Context, Restored
from hpcdist.rank.network.rpc import RpcGroup, rpc_group
from hpcdist.rank.optimizer import lr_factor
from hpcdist.rank.training_position import Position
from hpcdist.trainers.rnn.language_model import DECODER, ENCODER, LanguageModel, build_lstm, first_rows, sample
from hpcdist.trainers.rnn.learner import Flight, Learner
from hpcdist.trainers.rnn.schema import RnnConfig
from hpcdist.trainers.rnn.text import Columns, Tokenizer, load_corpus
from hpcdist.trainers.rnn.vocabulary import VocabularyShard, row_bounds
from hpcdist.trainers.rnn.vocabulary_client import Servers
from hpcdist.trainers.rnn.vocabulary_server import CALL_S, Server, answer_with

TRAINER, SERVER = "trainer", "parameter_server"


def train(ctx: Context, cfg: Config) -> None:
    """Train, measure perplexity after each epoch, and leave checkpoints, a text and the final model."""
    ctx.roles.require(trainer=None, parameter_server=None)
    ranks = list(ctx.ranks_of(TRAINER))
    ctx.agree_among(ranks)
    trainers = dist.new_group(ranks)
    wire, device_maps = _wire(ctx)
    # One rank reads: all have the same text, wherever they are. Servers need to know how many rows there are.
    corpus = load_corpus(cfg.section(RnnConfig), cfg.seed) if ctx.is_main else None
    size: list[Any] = [corpus and corpus.tokenizer.size]
    dist.broadcast_object_list(size)
    options: dict[str, Any] = {
        "timeout_s": CALL_S,
        "num_threads": max(16, 4 * len(ranks)),  # calls of all trainers but one may wait for that one
        "device_maps": device_maps,
    }
    if ctx.role == SERVER:
        server = _open_server(ctx, cfg, size[0], wire)
        with rpc_group(ctx, **options) as group:
            group.serve({"save": lambda step: ctx.save(step, model=None, trainer={}, shard=server.content())})
        return
    assert isinstance(trainers, dist.ProcessGroup)
    streams: list[Any] = [corpus.train, corpus.held_out] if corpus else [None, None]
    dist.broadcast_object_list(streams, src=ranks[0], group=trainers)
    run, at, meter = _open_trainer(ctx, cfg, size[0], streams, wire, trainers)
    with rpc_group(ctx, **options) as group:
        _train(run, group, at, meter)
        if corpus and ctx.end_reason:
            _finish(run, corpus.tokenizer)
        if not ctx.is_main:
            group.serve({})  # until rank 0 has written what it has to write


def _wire(ctx: Context) -> tuple[torch.device, dict[str, dict[Any, Any]] | None]:
    """Where tensors are when they travel: on the GPUs, if all ranks have one, else on the host."""
    devices: list[Any] = [None] * ctx.world_size
    dist.all_gather_object(devices, str(ctx.device))
    if not all(device.startswith("cuda") for device in devices):
        return torch.device("cpu"), None
    others = [rank for rank in range(ctx.world_size) if rank != ctx.rank]
    return ctx.device, {ctx.roles.name_of(rank): {ctx.device: torch.device(devices[rank])} for rank in others}


def _open_server(ctx: Context, cfg: Config, vocab_size: int, wire: torch.device) -> Server:
    rnn = cfg.section(RnnConfig)
    start, stop = row_bounds(vocab_size, ctx.roles.count(SERVER))[ctx.role_index : ctx.role_index + 2]
    shard = VocabularyShard(
        first_rows(start, stop, rnn.embedding_size, cfg.seed, ENCODER),
        None if rnn.tie_weights else first_rows(start, stop, rnn.hidden_size, cfg.seed, DECODER),
        start=start,
        vocab_size=vocab_size,
    )
    num_trainers, is_async = ctx.roles.count(TRAINER), rnn.mode == "async"
    server = Server(shard, cfg.optim, num_trainers, device=ctx.device, wire=wire, is_async=is_async)
    if (saved := ctx.restore()) is not None:
        _check_vocabulary(saved, vocab_size)
        server.load(_shards_with(saved, start, stop))
    answer_with(server)
    return server


def _check_vocabulary(saved: Restored, vocab_size: int) -> None:
    if (trained := saved.trainer["vocab_size"]) != vocab_size:
        raise ConfigError(
            [f"the text has {vocab_size} different tokens, the checkpoint was trained on {trained}:"
             " it goes on with the same text and tokenizer only"]
        )  # fmt: skip


def _shards_with(saved: Restored, start: int, stop: int) -> list[dict[str, Any]]:
    """What those servers had saved that had some of these rows."""
    bounds = row_bounds(saved.trainer["vocab_size"], saved.trainer["num_servers"])
    owners = [
        saved.trainer["num_trainers"] + index
        for index, (first, last) in enumerate(itertools.pairwise(bounds))
        if first < stop and start < last
    ]
    return [shard for rank in owners if (shard := saved.shard(rank)) is not None]


# --- one batch


# --- an epoch


@dataclass
class Meter:
    """This trainer's loss since the last logged point."""

    loss_sum: float = 0.0
    num_tokens: int = 0
    since: float = field(default_factory=time.perf_counter)


@dataclass(frozen=True)
class Training:
    """What does not change while training."""

    ctx: Context
    cfg: Config
    learner: Learner
    train: Columns
    held_out: Columns
    vocab_size: int
    total_steps: int


def _open_trainer(
    ctx: Context,
    cfg: Config,
    vocab_size: int,
    streams: Sequence[Tensor],
    wire: torch.device,
    trainers: dist.ProcessGroup,
) -> tuple[Training, Position, Meter]:
    rnn = cfg.section(RnnConfig)
    part = ctx.role_index, ctx.roles.count(TRAINER)
    train_columns, held_out = (Columns(stream, rnn.batch_size, rnn.bptt, part) for stream in streams)
    names = [ctx.roles.name_of(rank) for rank in ctx.ranks_of(SERVER)]
    servers = Servers(names, trainer=ctx.role_index, vocab_size=vocab_size, device=ctx.device, wire=wire)
    lstm = build_lstm(rnn.embedding_size, rnn.hidden_size, rnn.num_layers, rnn.dropout)
    learner = Learner(lstm, cfg, servers, trainers, ctx.device)
    ctx.seed_per_rank()
    at, meter = Position(steps_per_epoch=len(train_columns)), Meter()
    if (saved := ctx.restore()) is not None:
        _check_vocabulary(saved, vocab_size)
        at = _load(saved, learner, meter, len(train_columns))
    return Training(ctx, cfg, learner, train_columns, held_out, vocab_size, at.total_steps(cfg.stop)), at, meter


def _load(saved: Restored, learner: Learner, meter: Meter, steps_per_epoch: int) -> Position:
    learner.lstm.load_state_dict({name.removeprefix("lstm."): tensor for name, tensor in saved.model.items()})
    learner.optimizer.load_state_dict(saved.trainer["optimizer"])
    if saved.local is not None:
        meter.loss_sum, meter.num_tokens = saved.local["loss_sum"], saved.local["num_tokens"]
        if "h" in saved.local:
            learner.state = saved.local["h"].to(learner.device), saved.local["c"].to(learner.device)
    at = Position(**saved.trainer["position"])
    at.rescale(steps_per_epoch)
    return at


def _train(run: Training, group: RpcGroup, at: Position, meter: Meter) -> None:
    while not (reason := at.end_reason(run.cfg.stop, run.cfg.checkpoint, run.total_steps)):
        if not _train_epoch(run, group, at, meter):
            return  # stopped, and saved
        metrics = evaluate(run)
        run.ctx.log(metrics, at.step)
        at.note_evaluation(metrics, run.cfg.checkpoint)
        _save(run, group, at, meter, metrics)
    run.ctx.end_reason = reason


def _train_epoch(run: Training, group: RpcGroup, at: Position, meter: Meter) -> bool:
    """Do what is left of the epoch; False when the trainers agreed to stop, with everything saved."""
    ctx, cfg, learner = run.ctx, run.cfg, run.learner
    in_flight = 2 if cfg.section(RnnConfig).mode == "async" else 1
    every = cfg.checkpoint.every_steps
    flights: deque[Flight] = deque()
    coming = run.train[at.step_in_epoch]  # the batch to be launched next
    while left := min(at.steps_per_epoch - at.step_in_epoch, run.total_steps - at.step):
        # Nothing is under way at a boundary where something is saved or measured.
        ahead = min(in_flight, left, every - at.step % every if every else left)
        while len(flights) < ahead and not ctx.stop_agreed:
            flights.append(learner.launch(coming))
            coming = run.train[(at.step_in_epoch + len(flights)) % at.steps_per_epoch]
        flight = flights.popleft()
        lr = cfg.optim.lr * lr_factor(at.step, run.total_steps, cfg.schedule)
        meter.loss_sum += learner.land(flight, lr, coming.ids)
        meter.num_tokens += len(flight.batch.targets)
        at.count_step()
        if at.step % cfg.tracking.log_every_steps == 0:
            _log(run, at, meter, lr)
        stop = ctx.should_stop(at.step, run.total_steps)
        if flights:
            continue
        if ctx.should_save(at.step) and (stop or not at.before_evaluation(run.total_steps)):
            _save(run, group, at, meter, {})
        if stop:
            return False
    if at.close_epoch():
        learner.state = None  # the columns begin anew
    return True


def _log(run: Training, at: Position, meter: Meter, lr: float) -> None:
    """Record the interval's mean loss over all trainers."""
    loss_sum, num_tokens = run.learner.sum_over_trainers([meter.loss_sum, meter.num_tokens])
    metrics = {
        "train/loss": loss_sum / num_tokens,
        "train/lr": lr,
        "train/epoch": at.epochs,
        "train/tokens_per_s": num_tokens / (time.perf_counter() - meter.since),
    }
    run.ctx.log(metrics, at.step)
    meter.loss_sum, meter.num_tokens, meter.since = 0.0, 0, time.perf_counter()


def evaluate(run: Training) -> dict[str, float]:
    """Mean loss in nats and perplexity over the held-out text, equal on all trainers."""
    run.learner.settle()
    loss_sum, num_tokens = run.learner.sum_over_trainers(run.learner.measure(run.held_out))
    run.ctx.alive()
    loss = loss_sum / num_tokens
    return {"eval/loss": loss, "eval/perplexity": math.exp(min(loss, 700.0))}


def _save(run: Training, group: RpcGroup, at: Position, meter: Meter, metrics: dict[str, float]) -> None:
    """Each owner writes its own: servers by order, once nothing is under way."""
    ctx, learner = run.ctx, run.learner
    learner.settle()
    if ctx.is_main:
        group.order("save", at.step, to=group.of_role(SERVER))
    state = {} if learner.state is None else {"h": learner.state[0], "c": learner.state[1]}
    ctx.save(
        at.step,
        model=nn.ModuleDict({"lstm": learner.lstm}),
        trainer={
            "optimizer": learner.optimizer.state_dict(),
            "position": asdict(at),
            "num_trainers": ctx.roles.count(TRAINER),
            "num_servers": ctx.roles.count(SERVER),
            "vocab_size": run.vocab_size,
        },
        local={
            **state,
            "loss_sum": meter.loss_sum,
            "num_tokens": meter.num_tokens,
        },
        metrics=metrics,
        shard=Shard(),
    )


def _finish(run: Training, tokenizer: Tokenizer) -> None:
    """The whole model in one process: what it writes, and the model itself."""
    rnn = run.cfg.section(RnnConfig)
    model = LanguageModel(
        vocab_size=run.vocab_size,
        embedding=rnn.embedding_size,
        hidden=rnn.hidden_size,
        layers=rnn.num_layers,
        dropout=rnn.dropout,
        tied=rnn.tie_weights,
    )
    lstm = {f"lstm.{name}": tensor.cpu() for name, tensor in run.learner.lstm.state_dict().items()}
    model.load_state_dict({**lstm, **run.learner.servers.weights()})
    if rnn.num_sample_tokens:
        prompt = tokenizer.encode([rnn.prompt])[0]
        generator = torch.Generator().manual_seed(run.cfg.seed)
        tokens = sample(model, prompt, rnn.num_sample_tokens, rnn.temperature, generator)
        path = run.ctx.artifact("sample.txt")
        path.write_text(tokenizer.decode([*prompt, *tokens]))
    with warnings.catch_warnings():
        # The list is a second name of the LSTM's parameters, which are exported.
        warnings.filterwarnings("ignore", message="The tensor attributes self.lstm._flat_weights")
        run.ctx.export_model(model, torch.zeros(2, rnn.bptt, dtype=torch.int64))
