"""A recurrent language model with its vocabulary on parameter servers: embedding and decoder there, the LSTM here.

Roles: trainers (rank 0 is one) hold the LSTM and the text; each server holds a nearly equal range of the rows of
embedding and decoder. A trainer's batch has three exchanges with the servers:

    pull        receive the embedding rows of the batch's distinct tokens (with the answer to the last push)
    decode      send the LSTM's output, receive its gradient and the loss: logits are never sent
    push        send the gradients of the batch's embedding rows, each row once; the servers update their rows

The server answers `decode` before it computes the gradient of the decoder's weights, a third of its work, which
overlaps with the trainer's backward pass. Source of the method:
https://docs.pytorch.org/tutorials/intermediate/rpc_tutorial.html (its second part).

`mode: sync` equals one process on the joint batch of all trainers: servers wait for the push of every trainer and sum
in the order of their index; LSTM gradients are summed over the trainers. `mode: async` has two batches of a trainer in
flight, so that servers and LSTM work at the same time: gradients belong to weights that are one update old, and with
several trainers a server applies each push on arrival (Hogwild, https://arxiv.org/abs/1106.5730). LSTM gradients are
summed as in sync mode, so the replicas stay equal. Async runs do not repeat exactly and learn somewhat less per step.

    sync     forward 1, backward 1, update 1, forward 2, backward 2, update 2, …
    async    forward 1, forward 2, backward 1, update 1, forward 3, backward 2, update 2, …

Distributed autograd is not used: the graph is cut at two fixed places, and explicit calls avoid its context, messages
and optimizer calls in each step (`benchmarks/rnn.py` measures the difference).
"""

import copy
import math
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 (the name everyone uses)
from torch import Tensor, nn

from hpcdist.checkpoint.initial_weights import initial_weights, load_into
from hpcdist.checkpoint.state import Shard
from hpcdist.config.roles import share_of
from hpcdist.config.schema import Config
from hpcdist.data.datasets import digest_of
from hpcdist.rank.context import Context, Restored
from hpcdist.rank.process_group import Groups
from hpcdist.rank.rpc import RpcGroup, rpc_group
from hpcdist.rank.step_loop import Steps
from hpcdist.rank.training_loop import Meter, Progress, build_optimizer, fill_rows, lr_factor, set_lr
from hpcdist.trainers.rnn import RnnConfig
from hpcdist.trainers.rnn.token_stream import Batch, Columns, TextTokens, load_corpus
from hpcdist.trainers.rnn.vocabulary import CALL_TIMEOUT_S, VocabularyClient, VocabularyServer, check_vocab_size

TRAINER, SERVER = "trainer", "parameter_server"
#: Batches of a trainer between their forward pass and their update in `mode: async`.
ASYNC_BATCHES = 2
#: Threads of RPC besides those for batches, as many as `rpc_group` has by default.
OTHER_THREADS = 16
#: Limit of the loss in the perplexity: above 709 the exponential is not a finite float64.
MAX_EXPONENT = 700.0
#: Added to the norm of gradients before it divides, as in torch's `clip_grad_norm_`.
NORM_EPS = 1e-6


def train(ctx: Context, cfg: Config) -> None:
    """Train, evaluate after each epoch, save checkpoints and export the final model."""
    ctx.roles.require(trainer=None, parameter_server=None)  # any number of each
    # Trainers decide on stops and saves: servers count no steps.
    trainers = ctx.roles.agree_among(ctx.roles.ranks_of(TRAINER))
    # For gradients of the LSTM on the trainers' devices; every rank has to take part.
    lstm_group = dist.new_group(list(ctx.roles.ranks_of(TRAINER)), ctx.groups.timeout)
    # Rank 0 alone reads the text, so that all ranks have the same.
    corpus = None
    vocab_size = 0
    texts: list[Tensor] = []
    if ctx.is_main:
        corpus = load_corpus(cfg.section(RnnConfig), cfg.seed, ctx.timer.alive)
        vocab_size = corpus.vocab_size
        texts = [corpus.train, corpus.held_out]
    ctx.groups.await_all(ctx.timer.alive)  # heartbeats, since loading counts no steps
    vocab_size = ctx.groups.broadcast(vocab_size)
    # A server has to answer two calls for each batch at the same time: it is decoded, and pushed. A call may wait in
    # its thread for the calls of the other trainers.
    num_threads = OTHER_THREADS + 2 * ASYNC_BATCHES * ctx.roles.count(TRAINER)
    options: dict[str, Any] = {"timeout_s": CALL_TIMEOUT_S, "num_threads": num_threads}
    if ctx.roles.own == SERVER:
        server = open_server(ctx, cfg, vocab_size)
        with rpc_group(ctx, server.functions, **options) as rpc:
            rpc.serve({"save": lambda step: ctx.save(step, model=None, trainer={}, shard=server.shard())})
        return
    assert isinstance(lstm_group, dist.ProcessGroup)
    texts = trainers.broadcast(texts)
    lstm = open_lstm(ctx, cfg, corpus, vocab_size)
    saved = ctx.restore()  # at the same time as the servers, which restore before RPC starts
    if saved is None:  # the weights of `model.init_from`, of which servers load their rows
        initial = initial_weights(ctx.run, whole_on_meta(cfg, vocab_size), cfg.model)
        load_into(in_whole_model(lstm), initial)
    with rpc_group(ctx, **options) as rpc:
        client = VocabularyClient(rpc, trainer=ctx.roles.own_index, vocab_size=vocab_size, device=ctx.device)
        learner = Learner(ctx, cfg, lstm, client, trainers, lstm_group)
        train_lstm(ctx, cfg, learner, rpc, texts, saved)
        model = None
        if not ctx.is_main:
            rpc.serve({})  # until rank 0 has the whole model
        elif ctx.end_reason:  # empty after a stop
            model = whole_model(cfg, learner)
    if model is not None:
        export(ctx, cfg, model)


def train_lstm(
    ctx: Context, cfg: Config, learner: "Learner", rpc: RpcGroup, texts: Sequence[Tensor], saved: Restored | None
) -> None:
    """Train until a stop rule of the config applies, which becomes `ctx.end_reason`, or a stop is requested."""
    rnn = cfg.section(RnnConfig)
    part = (ctx.roles.own_index, ctx.roles.count(TRAINER))
    columns, held_out = (Columns(text, rnn.batch_size, rnn.bptt, part) for text in texts)
    position, sums = None, None
    if saved is not None:
        position = saved.trainer["position"]
        if saved.local is not None:  # the number of trainers has not changed; else the sums begin anew
            sums = saved.local["meter"]
    # Steps and epochs done so far, and sums of the loss and of tokens since the last logged step.
    progress = Progress(cfg, len(columns), position)
    meter = Meter(sums)
    if saved is not None:
        learner.load(saved)
    steps = ctx.steps(progress.total_steps, save=partial(save_step, ctx, learner, rpc, progress, meter))
    batches = columns.from_batch(progress.step_in_epoch)  # without end
    next_batch = next(batches)
    in_flight: deque[BatchInFlight] = deque()  # after their forward pass, before their update
    ctx.timer.training_begins()  # the time until here counts as start-up

    while not progress.end_reason:  # until a stop rule of the config applies, known after an evaluation
        if progress.step_in_epoch == 0:
            learner.state = None  # the columns start anew
        for step in progress.until_evaluation(steps):
            while len(in_flight) < max_in_flight(cfg, progress, steps):
                in_flight.append(learner.forward(next_batch))
                next_batch = next(batches)
            batch = in_flight.popleft()
            lr = cfg.optim.lr * lr_factor(step, progress.total_steps, cfg.schedule)
            loss_sum = learner.backward_and_update(batch, lr, next_batch.ids)
            meter.add(loss_sum=loss_sum, num_tokens=len(batch.batch.targets))
            steps.is_complete = not in_flight  # a stop or a save waits for a step without a batch in flight
            if steps.log_is_due:
                ctx.log(interval_metrics(learner, progress, meter))
                meter.reset()
        if steps.is_stopped:  # on all trainers after the same step, which is saved
            return
        with meter.paused():
            with ctx.timer.evaluating():  # its time counts apart from training
                metrics = evaluate(ctx, learner, held_out)
            progress.end_epoch(metrics)
            steps.save(metrics)

    ctx.end_reason = progress.end_reason


def save_step(
    ctx: Context,
    learner: "Learner",
    rpc: RpcGroup,
    progress: Progress,
    meter: Meter,
    step: int,
    metrics: Mapping[str, float],
) -> None:
    """Save on every rank: rank 0 tells the servers to save when they have all updates."""
    learner.settle()
    if ctx.is_main:
        rpc.send_command("save", step, to=rpc.of_role(SERVER))
    trainer = {
        "optimizer": learner.optimizer.state_dict(),
        "position": progress.state_dict(),
        "num_trainers": ctx.roles.count(TRAINER),
        "num_servers": ctx.roles.count(SERVER),
        "vocab_size": learner.client.vocab_size,
    }
    local: dict[str, Any] = {"meter": meter.state_dict()}
    if learner.state is not None:
        local["h"], local["c"] = learner.state
    model = in_whole_model(learner.lstm)  # the tables are in the shards of the servers
    ctx.save(step, model=model, trainer=trainer, local=local, metrics=metrics, shard=Shard())


def max_in_flight(cfg: Config, progress: Progress, steps: Steps) -> int:
    """Return the maximum number of batches in flight in this step: 1 if a checkpoint or evaluation follows it."""
    if cfg.section(RnnConfig).mode == "sync" or steps.save_is_due:
        return 1
    limits = [ASYNC_BATCHES, 1 + progress.steps_until_evaluation]
    every = cfg.checkpoint.every_steps
    if every is not None:
        limits.append(every - steps.step % every)  # this step and those up to the next save
    return min(limits)


def interval_metrics(learner: "Learner", progress: Progress, meter: Meter) -> dict[str, float]:
    """Return the training metrics since the last logged step, and count their tokens in `progress`."""
    loss_sum, num_tokens = learner.trainers.sum([meter.sums["loss_sum"], meter.sums["num_tokens"]])
    num_samples = progress.add_samples(num_tokens)
    return {
        "train/loss": loss_sum / num_tokens,
        "train/lr": learner.optimizer.param_groups[0]["lr"],
        "train/epoch": progress.epochs,
        "train/tokens_per_s": num_tokens / meter.elapsed_s,
        "samples": num_samples,
    }


@torch.no_grad()
def evaluate(ctx: Context, learner: "Learner", held_out: Columns) -> dict[str, float]:
    """Return mean loss in nats and perplexity over the held-out text, equal on all trainers."""
    learner.settle()
    training_state = learner.state
    learner.state = None
    learner.lstm.eval()
    loss_sum = 0.0
    for batch in held_out:
        loss_sum += learner.loss(batch)
        ctx.timer.alive()  # a heartbeat, since an evaluation counts no steps
    learner.lstm.train()
    learner.state = training_state
    loss_sum, num_tokens = learner.trainers.sum([loss_sum, held_out.num_targets])
    loss = loss_sum / num_tokens
    return {"eval/loss": loss, "eval/perplexity": math.exp(min(loss, MAX_EXPONENT))}


# A trainer's LSTM, and the passes of a batch through LSTM and vocabulary servers.


@dataclass
class BatchInFlight:
    """A batch between its forward pass and its update."""

    number: int  #: index among the batches of this trainer in this attempt
    batch: Batch
    rows: Tensor  #: of the embedding
    lstm: nn.LSTM  #: the weights of the forward pass
    output: Tensor
    #: Waits for the servers; returns the summed loss and the gradient of `output`.
    receive_gradient: Callable[[], tuple[float, Tensor]]


class Learner:
    """A trainer's LSTM. A batch is processed by `forward`, then `backward_and_update`.

    If the forward pass of a batch runs while another batch is in flight, it uses the weights from before the other's
    update. The batch keeps a copy of them, since its backward pass needs the weights of its forward pass.
    """

    def __init__(
        self,
        ctx: Context,
        cfg: Config,
        lstm: nn.LSTM,
        client: VocabularyClient,
        trainers: Groups,
        lstm_group: dist.ProcessGroup,
    ) -> None:
        rnn, device = cfg.section(RnnConfig), ctx.device
        self.lstm = lstm.to(device)
        self.optimizer = build_optimizer(self.lstm.parameters(), cfg.optim)
        self.client = client
        self.state: tuple[Tensor, Tensor] | None = None  #: hidden state at the start of the next batch
        self._device = device
        #: The weights of the batches in flight; None in sync mode, in which they are those of `lstm`.
        self._copies: deque[nn.LSTM] | None = None
        if rnn.mode == "async":
            # Parameters of a deep copy lie apart: `to` joins them in the buffer that cuDNN reads, or each call would
            # copy.
            self._copies = deque(copy.deepcopy(self.lstm).to(device) for _ in range(ASYNC_BATCHES))
        self._max_norm = cfg.optim.max_grad_norm
        self._dropout = rnn.dropout
        self._batch_size = rnn.batch_size
        self.trainers = trainers
        self._lstm_group = lstm_group
        self._num_trainers = dist.get_world_size(lstm_group)
        self._num_forward = 0
        #: Waits for the embedding rows of the next batch, as they are after the last update.
        self._receive_rows: Callable[[], Tensor] | None = None

    def forward(self, batch: Batch) -> BatchInFlight:
        """Run the forward pass and send its output to the servers."""
        lstm = self.lstm
        if self._copies is not None:
            self._copies.rotate()
            lstm = self._copies[0]
            with torch.no_grad():
                torch._foreach_copy_(list(lstm.parameters()), list(self.lstm.parameters()))
        # The last update has requested the rows of the batch that follows it, but not of a second one.
        receive_rows = self._receive_rows
        self._receive_rows = None
        if receive_rows is None:
            receive_rows = self.client.pull(batch.ids)
        rows = receive_rows().requires_grad_()
        output = self._run_lstm(lstm, rows, batch)
        scale = 1.0 / (len(output) * self._num_trainers)  # mean over the tokens of all trainers
        number = self._num_forward
        self._num_forward += 1
        receive_gradient = self.client.decode(number, output.detach(), batch.targets, scale)
        return BatchInFlight(number, batch, rows, lstm, output, receive_gradient)

    def _run_lstm(self, lstm: nn.LSTM, rows: Tensor, batch: Batch) -> Tensor:
        """Return the LSTM's output for each token of the batch, [n, hidden], and keep the hidden state."""
        embedded = F.embedding(batch.inverse.to(self._device), rows)
        embedded = F.dropout(embedded, self._dropout, lstm.training)
        output, (h, c) = lstm(embedded, self.state)
        self.state = h.detach(), c.detach()
        return F.dropout(output, self._dropout, lstm.training).flatten(0, 1)

    def backward_and_update(self, batch: BatchInFlight, lr: float, next_ids: Tensor) -> float:
        """Run backward pass and update, and request the embedding rows of the next batch; return the summed loss."""
        loss_sum, output_gradient = batch.receive_gradient()
        batch.output.backward(output_gradient)
        number, ids, row_gradients = batch.number, batch.batch.ids, batch.rows.grad
        assert row_gradients is not None
        if self._max_norm is None:
            self._receive_rows = self.client.push(number, ids, row_gradients, 1.0, lr, next_ids)
            gradients = self._summed_gradients(batch.lstm)
        else:
            gradients = self._summed_gradients(batch.lstm)
            # The norm of all gradients is known only after the servers have those of the rows.
            squared_at_servers = self.client.push_for_norm(number, ids, row_gradients)
            scale = self._clip_scale(self._max_norm, squared_at_servers, gradients)
            # The servers have the gradients already.
            self._receive_rows = self.client.push(number, ids, None, scale, lr, next_ids)
            torch._foreach_mul_(gradients, scale)
        for parameter, gradient in zip(self.lstm.parameters(), gradients, strict=True):
            parameter.grad = gradient
        set_lr(self.optimizer, lr)
        self.optimizer.step()
        batch.lstm.zero_grad()
        return loss_sum

    def _clip_scale(self, max_norm: float, squared_at_servers: float, gradients: list[Tensor]) -> float:
        """Return the factor of all gradients that limits their joint norm; equal on all trainers."""
        if self._copies is not None and self._num_trainers > 1:
            # In async mode each trainer has pushed its own gradients; one common factor keeps replicas equal.
            (squared_at_servers,) = self.trainers.sum([squared_at_servers])
        squared_here = sum(float(norm) ** 2 for norm in torch._foreach_norm(gradients))
        norm = math.sqrt(squared_at_servers + squared_here)
        return min(1.0, max_norm / (norm + NORM_EPS))

    def _summed_gradients(self, lstm: nn.LSTM) -> list[Tensor]:
        """Return the gradients of the LSTM, summed over the trainers in one message."""
        gradients = [parameter.grad for parameter in lstm.parameters() if parameter.grad is not None]
        if self._num_trainers == 1:
            return gradients
        joined = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(joined, group=self._lstm_group)
        parts = joined.split([gradient.numel() for gradient in gradients])
        return [part.view_as(gradient) for part, gradient in zip(parts, gradients, strict=True)]

    def loss(self, batch: Batch) -> float:
        """Return the summed loss of a batch of held-out text, and keep the hidden state for the next one."""
        rows = self.client.pull(batch.ids)()
        return self.client.loss(self._run_lstm(self.lstm, rows, batch), batch.targets)

    def settle(self) -> None:
        """Wait until the servers have applied the last update of every trainer."""
        if self._receive_rows is not None:
            self._receive_rows()  # sent after the update; `forward` may call it again
        self.trainers.barrier()

    def load(self, saved: Restored) -> None:
        """Load weights, optimizer and, if number and batch size of the trainers have not changed, the hidden state."""
        check_vocab_size(saved, self.client.vocab_size)
        in_whole_model(self.lstm).load_state_dict(saved.model)
        self.optimizer.load_state_dict(saved.trainer["optimizer"])
        if saved.local is not None and "h" in saved.local and saved.local["h"].shape[1] == self._batch_size:
            self.state = saved.local["h"].to(self._device), saved.local["c"].to(self._device)


# Set-up: LSTM of a trainer, rows of a server.


def open_lstm(ctx: Context, cfg: Config, corpus: TextTokens | None, vocab_size: int) -> nn.LSTM:
    """Return the LSTM of a trainer; log text and size of the model."""
    rnn = cfg.section(RnnConfig)
    if corpus is not None:  # on rank 0
        name, source = "python-stdlib", "Python's standard library"
        if rnn.files:
            name, source = "text", " ".join(rnn.files)
        for split, tokens in (("train", corpus.train), ("test", corpus.held_out)):
            ctx.report.log_dataset(name, split=split, num_samples=len(tokens), digest=digest_of(tokens), source=source)
    lstm = build_lstm(rnn)  # equal on all trainers, which have the same seed so far
    num_in_lstm = sum(weight.numel() for weight in lstm.parameters())
    num_per_word = rnn.embedding_size + rnn.hidden_size + 1  # and a bias of the decoder
    ctx.report.log_model_size(num_in_lstm + vocab_size * num_per_word)
    return lstm


def open_server(ctx: Context, cfg: Config, vocab_size: int) -> VocabularyServer:
    """Return this rank's rows of the vocabulary, new or from the newest checkpoint."""
    rnn = cfg.section(RnnConfig)
    rows = share_of(ctx.roles.own_index, ctx.roles.count(SERVER), vocab_size)
    server = VocabularyServer(
        initial_rows("encoder", rows, rnn.embedding_size, cfg.seed),
        initial_rows("decoder", rows, rnn.hidden_size, cfg.seed),
        cfg.optim,
        start=rows.start,
        vocab_size=vocab_size,
        num_trainers=ctx.roles.count(TRAINER),
        device=ctx.device,
        is_async=rnn.mode == "async",
    )
    saved = ctx.restore()
    if saved is None:
        server.start_from(initial_weights(ctx.run, whole_on_meta(cfg, vocab_size), cfg.model))
    else:
        server.restore(saved)
    return server


def initial_rows(table: str, rows: range, width: int, seed: int) -> Tensor:
    """Return the initial rows of `encoder` (the embedding) or `decoder`, float32 [len(rows), width]."""
    filled = torch.empty(len(rows), width)
    fill_rows(filled, rows, table=table, scale=0.1, seed=seed)
    return filled


class LanguageModel(nn.Module):
    """Embedding, LSTM and decoder: from tokens int64 [B, T] to logits of the next tokens [B, T, vocab_size]."""

    def __init__(self, cfg: RnnConfig, vocab_size: int) -> None:
        super().__init__()
        self.lstm = build_lstm(cfg)
        self.encoder = nn.Embedding(vocab_size, cfg.embedding_size)
        self.decoder = nn.Linear(cfg.hidden_size, vocab_size)
        self.dropout = cfg.dropout

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits [B, T, vocab_size] of the tokens that follow `tokens`, from a hidden state of zeros."""
        embedded = F.dropout(self.encoder(tokens.t()), self.dropout, self.training)
        output, _ = self.lstm(embedded)
        logits: Tensor = self.decoder(F.dropout(output, self.dropout, self.training))
        return logits.transpose(0, 1)


def build_lstm(cfg: RnnConfig) -> nn.LSTM:
    """Return an LSTM for inputs [T, B, embedding_size], initialised from torch's global generator."""
    dropout = 0.0
    if cfg.num_layers > 1:  # with one layer torch warns about dropout, which applies between layers
        dropout = cfg.dropout
    return nn.LSTM(cfg.embedding_size, cfg.hidden_size, cfg.num_layers, dropout=dropout)


def in_whole_model(lstm: nn.LSTM) -> nn.Module:
    """Return the LSTM with the names that its weights have in `LanguageModel`."""
    return nn.ModuleDict({"lstm": lstm})


def whole_on_meta(cfg: Config, vocab_size: int) -> LanguageModel:
    """Return the whole model without memory: its names and shapes."""
    with torch.device("meta"):
        return LanguageModel(cfg.section(RnnConfig), vocab_size)


def whole_model(cfg: Config, learner: Learner) -> LanguageModel:
    """Return the model with the weights of the trainers and the servers."""
    model = LanguageModel(cfg.section(RnnConfig), learner.client.vocab_size)
    model.load_state_dict({**in_whole_model(learner.lstm).state_dict(), **learner.client.weights()})
    return model


def export(ctx: Context, cfg: Config, model: LanguageModel) -> None:
    """Export the whole model with sequences of `rnn.bptt` tokens as example."""
    with warnings.catch_warnings():
        # The list is a second name of the LSTM's parameters, which are exported.
        warnings.filterwarnings("ignore", message="The tensor attributes self.lstm._flat_weights")
        ctx.export_model(model, torch.zeros(2, cfg.section(RnnConfig).bptt, dtype=torch.int64))
