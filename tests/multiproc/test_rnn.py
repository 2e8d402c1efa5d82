"""The language model on several ranks: equal to one process."""

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from context_scene import new_run, open_context
from spawn import Rank, spawn_ranks
from torch import Tensor, nn

from hpcdist.checkpoint.state import load_weights
from hpcdist.config.record_schema import CheckpointConfig, TrackingConfig
from hpcdist.config.schema import Config
from hpcdist.config.training_schema import OptimConfig, StopConfig
from hpcdist.rank.context import close
from hpcdist.rank.training_loop import build_optimizer
from hpcdist.run.folder import RunDir
from hpcdist.tracking.journal import read_records
from hpcdist.trainers.rnn import RnnConfig
from hpcdist.trainers.rnn import train as rnn
from hpcdist.trainers.rnn.token_stream import Columns, TextTokens, load_corpus
from hpcdist.trainers.rnn.train import LanguageModel, initial_rows

SGD = OptimConfig(name="sgd", lr=0.5, momentum=0.0)


def config(trainers: int, servers: int, optim: OptimConfig, steps: int, **options: Any) -> Config:
    text = {"tokenizer": "byte", "max_corpus_mb": 0.02}
    sizes = {"embedding_size": 12, "hidden_size": 12, "dropout": 0.0, "batch_size": 4, "bptt": 5}
    return Config(
        roles={"trainer": trainers, "parameter_server": servers},
        sections={"rnn": RnnConfig(**{**text, **sizes, **options})},
        optim=optim,
        stop=StopConfig(max_steps=steps),
        checkpoint=CheckpointConfig(monitor="eval/perplexity", monitor_mode="min"),
        tracking=TrackingConfig(log_every_steps=1),
    )


def train(here: Rank, path: Path, cfg: Config) -> None:
    with open_context(here, RunDir(path), cfg) as ctx:
        ctx.export_model = lambda *_: None  # type: ignore[method-assign]  # MLflow takes seconds
        rnn.train(ctx, cfg)
        close(ctx)


def step(model: LanguageModel, tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
    """Return logits [T, B, vocab_size] for tokens [T, B], and the hidden state after them."""
    output, state = model.lstm(model.encoder(tokens), state)
    return model.decoder(output), state


def in_one_process(cfg: Config, steps: int) -> tuple[dict[str, Tensor], float, list[float]]:
    """Return weights, held-out perplexity and losses of the whole model, trained by autograd and torch.optim."""
    options = cfg.section(RnnConfig)
    corpus = load_corpus(options, cfg.seed)
    torch.manual_seed(cfg.seed)
    model = whole_model(cfg, corpus)
    columns, held_out = (
        Columns(text, options.batch_size * cfg.roles["trainer"], options.bptt)
        for text in (corpus.train, corpus.held_out)
    )
    others = [parameter for name, parameter in model.named_parameters() if name != "encoder.weight"]
    is_lazy = cfg.optim.name == "adam"
    optimizers = [build_optimizer(others if is_lazy else model.parameters(), replace(cfg.optim, max_grad_norm=None))]
    if is_lazy:
        optimizers.append(torch.optim.SparseAdam([model.encoder.weight], lr=cfg.optim.lr))
    state, losses = None, []
    for number in range(steps):
        batch = columns[number]
        logits, (h, c) = step(model, batch.ids[batch.inverse], state)
        state = h.detach(), c.detach()
        loss = F.cross_entropy(logits.flatten(0, 1), batch.targets)
        loss.backward()
        losses.append(loss.item())
        if cfg.optim.max_grad_norm is not None:
            assert nn.utils.clip_grad_norm_(model.parameters(), cfg.optim.max_grad_norm) > cfg.optim.max_grad_norm
        if is_lazy:
            assert model.encoder.weight.grad is not None
            touched = torch.zeros(corpus.vocab_size, 1).index_fill_(0, batch.ids, 1.0)
            model.encoder.weight.grad = (model.encoder.weight.grad + touched * 1e-30).to_sparse(1)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return model.state_dict(), perplexity(model, held_out), losses


def whole_model(cfg: Config, corpus: TextTokens) -> LanguageModel:
    model = LanguageModel(replace(cfg.section(RnnConfig), dropout=0.0), corpus.vocab_size)
    for table in ("encoder", "decoder"):
        weight = model.get_parameter(f"{table}.weight")
        weight.data = initial_rows(table, range(corpus.vocab_size), weight.shape[1], cfg.seed)
    nn.init.zeros_(model.decoder.bias)
    return model


@torch.no_grad()
def perplexity(model: LanguageModel, columns: Columns) -> float:
    state, loss = None, 0.0
    for batch in columns:
        logits, state = step(model, batch.ids[batch.inverse], state)
        loss += F.cross_entropy(logits.flatten(0, 1), batch.targets, reduction="sum").item()
    return math.exp(loss / columns.num_targets)


@pytest.mark.slow
def test_another_number_of_servers_continues_the_same_training(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    for num_servers, steps in ((1, 3), (3, 6)):
        cfg = config(2, num_servers, SGD, steps)
        spawn_ranks(train, 2 + num_servers, path=run.path, cfg=cfg)
    found, (expected, _, _) = load_weights(run.checkpoints / "step-00000006"), in_one_process(cfg, 6)
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize(
    ("trainers", "servers", "optim"),
    [
        pytest.param(2, 2, OptimConfig(lr=0.01, max_grad_norm=0.05), marks=pytest.mark.faults),
        (2, 1, SGD),
        pytest.param(1, 2, replace(SGD, lr=0.1, momentum=0.9, max_grad_norm=0.1), marks=pytest.mark.slow),
    ],
    ids=["adam, clipped", "sgd", "momentum"],
)
def test_training_equals_one_process(tmp_path: Path, trainers: int, servers: int, optim: OptimConfig) -> None:
    steps = 12
    cfg = config(trainers, servers, optim, steps)
    expected, expected_perplexity, losses = in_one_process(cfg, steps)
    run = new_run(tmp_path)
    spawn_ranks(train, trainers + servers, path=run.path, cfg=cfg)
    found = load_weights(run.checkpoints / f"step-{steps:08d}")
    assert set(found) == set(expected)
    torch.manual_seed(cfg.seed)
    before = whole_model(cfg, load_corpus(cfg.section(RnnConfig), cfg.seed)).state_dict()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=2e-6, msg=partial("{}: {}".format, name))
        assert not torch.equal(found[name], before[name]), f"{name} has not changed"
    records, _ = read_records(run.journal / "attempt-001.rank-00000.jsonl")
    metrics = {(key, record.step): value for record in records for key, value in record.metrics.items()}
    assert [metrics["train/loss", step + 1] for step in range(steps)] == pytest.approx(losses, rel=1e-4)
    assert losses[0] == pytest.approx(math.log(256), rel=0.05), "initial loss of a uniform prediction"
    assert metrics["eval/perplexity", steps] == pytest.approx(expected_perplexity, rel=1e-4)


def train_async(here: Rank, path: Path, cfg: Config) -> float:
    """Train; return the sum of the LSTM's parameters at the last checkpoint."""
    found = []
    with open_context(here, RunDir(path), cfg) as ctx:
        ctx.export_model = lambda *_: None  # type: ignore[method-assign]
        save = ctx.save

        def save_and_sum(step: int, *, model: nn.Module | None, **rest: Any) -> None:
            found.append(sum(float(p.double().sum()) for p in model.parameters()) if model is not None else 0.0)
            save(step, model=model, **rest)

        ctx.save = save_and_sum  # type: ignore[method-assign]
        rnn.train(ctx, cfg)
        close(ctx)
    return found[-1]


@pytest.mark.faults
def test_async_replicas_stay_equal_and_learn_nearly_as_much(tmp_path: Path) -> None:
    steps = 60
    cfg = config(
        2, 2, OptimConfig(lr=0.01, max_grad_norm=1.0), steps, mode="async", max_corpus_mb=0.05, batch_size=8, bptt=16
    )
    cfg = replace(cfg, checkpoint=replace(cfg.checkpoint, every_steps=25))
    run = new_run(tmp_path)
    first, second, *_ = spawn_ranks(train_async, 4, path=run.path, cfg=cfg)
    assert first == second
    records, _ = read_records(run.journal / "attempt-001.rank-00000.jsonl")
    (reached,) = (record.metrics["eval/perplexity"] for record in records if "eval/perplexity" in record.metrics)
    assert {path.name for path in run.checkpoints.glob("step-*")} == {"step-00000050", "step-00000060"}
    _, expected, losses = in_one_process(replace(cfg, optim=replace(cfg.optim, max_grad_norm=None)), steps)
    assert expected < 50 < math.exp(losses[0]), "the task can be learned"
    assert reached < 1.15 * expected
