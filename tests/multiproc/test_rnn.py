"""The language model on several ranks is the model in one process: weights, gradients, perplexity."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (the name everyone uses)
from context_scene import new_run, open_context
from spawn import Rank, spawn_ranks
from torch import Tensor, nn

from hpcdist.data.text import Columns, Corpus, load_corpus
from hpcdist.models.rnn import LanguageModel
from hpcdist.rundir import RunDir
from hpcdist.runtime.checkpoint import load_weights
from hpcdist.runtime.optimizer import build_optimizer
from hpcdist.schema import CheckpointConfig, Config, OptimConfig, RnnConfig, StopConfig, TrackingConfig
from hpcdist.trainers import rnn
from hpcdist.tracking.journal import read_records

SGD = OptimConfig(name="sgd", lr=0.5, momentum=0.0)


def config(trainers: int, servers: int, optim: OptimConfig, steps: int, **options: Any) -> Config:
    return Config(
        roles={"trainer": trainers, "server": servers},
        rnn=RnnConfig(
            **{
                "tokenizer": "byte",
                "corpus_mb": 0.01,
                "held_out": 0.2,
                "embedding": 12,
                "hidden": 12,
                "dropout": 0.0,
                "batch_size": 4,
                "bptt": 5,
                "sample_tokens": 0,
                **options,
            }
        ),
        optim=optim,
        stop=StopConfig(steps=steps),
        checkpoint=CheckpointConfig(best="eval/perplexity", best_mode="min"),
        tracking=TrackingConfig(log_every=1),
    )


def train(here: Rank, path: Path, cfg: Config) -> None:
    with open_context(here, RunDir(path), cfg) as ctx:
        ctx.export_model = lambda *_: None  # type: ignore[method-assign]  # seconds, and MLflow's
        rnn.train(ctx, cfg)
        ctx.close()


def in_one_process(cfg: Config, steps: int) -> tuple[dict[str, Tensor], float, list[float]]:
    """The unsplit model, by autograd and torch's own optimizers: weights, held-out perplexity, losses."""
    corpus = load_corpus(cfg.rnn, cfg.seed)
    torch.manual_seed(cfg.seed)
    model = unsplit(cfg, corpus)
    columns = Columns(corpus.train, cfg.rnn.batch_size * cfg.roles["trainer"], cfg.rnn.bptt)
    others = [parameter for name, parameter in model.named_parameters() if name != "encoder.weight"]
    lazily = cfg.optim.name == "adam" and not cfg.rnn.tied
    optimizers = [build_optimizer(others if lazily else model.parameters(), replace(cfg.optim, clip_norm=None))]
    if lazily:
        optimizers.append(torch.optim.SparseAdam([model.encoder.weight], lr=cfg.optim.lr))
    state, losses = None, []
    for step in range(steps):
        batch = columns[step]
        logits, (h, c) = model.step(batch.ids[batch.where], state)
        state = h.detach(), c.detach()
        loss = F.cross_entropy(logits.flatten(0, 1), batch.targets)
        loss.backward()
        losses.append(loss.item())
        if cfg.optim.clip_norm is not None:
            assert nn.utils.clip_grad_norm_(model.parameters(), cfg.optim.clip_norm) > cfg.optim.clip_norm
        if lazily:
            assert model.encoder.weight.grad is not None
            touched = torch.zeros(corpus.tokenizer.size, 1).index_fill_(0, batch.ids, 1.0)
            model.encoder.weight.grad = (model.encoder.weight.grad + touched * 1e-30).to_sparse(1)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    held_out = Columns(corpus.held_out, cfg.rnn.batch_size * cfg.roles["trainer"], cfg.rnn.bptt)
    return model.state_dict(), perplexity(model, held_out), losses


def unsplit(cfg: Config, corpus: Corpus) -> LanguageModel:
    size, rnn = corpus.tokenizer.size, cfg.rnn
    sizes = {"vocab_size": size, "embedding": rnn.embedding, "hidden": rnn.hidden, "layers": rnn.layers}
    return LanguageModel(**sizes, tied=rnn.tied, seed=cfg.seed)


@torch.no_grad()
def perplexity(model: LanguageModel, columns: Columns) -> float:
    state, loss = None, 0.0
    for batch in columns:
        logits, state = model.step(batch.ids[batch.where], state)
        loss += F.cross_entropy(logits.flatten(0, 1), batch.targets, reduction="sum").item()
    return math.exp(loss / columns.num_targets)


@pytest.mark.parametrize(
    ("trainers", "servers", "optim", "steps", "options"),
    [
        # One step of SGD shows the gradients of all owners, many show that what is carried over is right.
        (1, 1, SGD, 1, {}),
        (2, 2, OptimConfig(lr=0.01, clip_norm=0.05), 12, {}),
        (2, 1, SGD, 12, {}),
        (1, 2, replace(SGD, lr=0.1, momentum=0.9, clip_norm=0.1), 12, {"tied": True}),
    ],
    ids=["gradients", "adam, clipped", "sgd", "tied"],
)
def test_as_in_one_process(
    tmp_path: Path, trainers: int, servers: int, optim: OptimConfig, steps: int, options: dict[str, Any]
) -> None:
    cfg = config(trainers, servers, optim, steps, **options)
    expected, expected_perplexity, losses = in_one_process(cfg, steps)
    run = new_run(tmp_path)
    spawn_ranks(train, trainers + servers, path=run.path, cfg=cfg)
    found = load_weights(run.checkpoints / f"step-{steps:08d}")
    assert set(found) == set(expected)
    torch.manual_seed(cfg.seed)
    before = unsplit(cfg, load_corpus(cfg.rnn, cfg.seed)).state_dict()
    for name, tensor in expected.items():
        torch.testing.assert_close(
            found[name], tensor, rtol=1e-4, atol=2e-6, msg=lambda text, name=name: f"{name}: {text}"
        )
        assert not torch.equal(found[name], before[name]), f"{name} has not moved"
    records, _ = read_records(run.journal / "attempt-001.rank-00000.jsonl")
    metrics = {(key, record.step): value for record in records for key, value in record.metrics.items()}
    assert [metrics["train/loss", step + 1] for step in range(steps)] == pytest.approx(losses, rel=1e-4)
    assert losses[0] == pytest.approx(math.log(256), rel=0.05), "cross-entropy over another axis begins elsewhere"
    assert metrics["eval/perplexity", steps] == pytest.approx(expected_perplexity, rel=1e-4)
