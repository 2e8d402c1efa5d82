"""Trainers with roles learn the same weights over both transports of RPC; over ZeroMQ without torch.distributed.rpc."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from context_scene import new_run, open_context
from spawn import Rank, spawn_ranks

from hpcdist.checkpoint.state import load_weights
from hpcdist.checkpoint.store import CheckpointStore
from hpcdist.config.launch_schema import CheckpointConfig
from hpcdist.config.schema import Config, DataConfig, ModelConfig, OptimConfig, StopConfig
from hpcdist.run.folder import RunDir
from hpcdist.trainers.hybrid import HybridConfig
from hpcdist.trainers.pipeline import PipelineConfig
from hpcdist.trainers.rl import RlConfig
from hpcdist.trainers.rnn import RnnConfig

SERVERS = {"trainer": 2, "parameter_server": 2}
RL: dict[str, Any] = {"num_envs": 4, "num_rollout_steps": 32, "num_eval_episodes": 3}
CONFIGS: dict[str, dict[str, Any]] = {
    "rl": {"roles": {"agent": 1, "observer": 2}, "sections": {"rl": RlConfig(**RL)}},
    "rnn": {
        "roles": SERVERS,
        "sections": {
            "rnn": RnnConfig(
                tokenizer="byte", max_corpus_mb=0.01, embedding_size=12, hidden_size=12, batch_size=4, bptt=5,
                num_sample_tokens=0,
            )
        },
        "optim": OptimConfig(max_grad_norm=0.05),
    },
    "hybrid": {
        "roles": SERVERS,
        "sections": {"hybrid": HybridConfig(tables={"user": 50, "tag": 3}, num_samples=400, batch_size=16)},
    },
    "pipeline": {
        "roles": {"stage": 2},
        "sections": {"pipeline": PipelineConfig()},
        "model": ModelConfig(name="resnet18", channels_last=True),
        "data": DataConfig(name="synthetic", image_size=16, num_samples=64, batch_size=16),
    },
}  # fmt: skip
MONITORS = {"rl": "eval/return", "hybrid": "eval/auc"}


def remove_torch_rpc() -> None:
    """Make torch.distributed.rpc unimportable in this process, as if torch had no RPC any more."""
    for name in ["torch.distributed.rpc", *(name for name in sys.modules if name.startswith("torch.distributed.rpc."))]:
        sys.modules[name] = None  # type: ignore[assignment]
    vars(torch.distributed).pop("rpc", None)


def train(here: Rank, path: Path, trainer: str, cfg: Config) -> None:
    if cfg.launch.rpc == "zmq":
        remove_torch_rpc()
    with open_context(here, RunDir(path), cfg) as ctx:
        ctx.export_model = lambda *_: None  # type: ignore[method-assign]  # MLflow takes seconds
        importlib.import_module(f"hpcdist.trainers.{trainer}.train").train(ctx, cfg)
        ctx.close()


def final_weights(folder: Path, trainer: str, **launch: Any) -> dict[str, torch.Tensor]:
    cfg = Config(
        **CONFIGS[trainer],
        stop=StopConfig(max_steps=4, max_epochs=99),
        checkpoint=CheckpointConfig(monitor=MONITORS.get(trainer, "eval/loss")),
    )
    run = new_run(folder)
    cfg = replace(cfg, launch=replace(cfg.launch, **launch))
    spawn_ranks(train, sum(cfg.roles.values()), path=run.path, trainer=trainer, cfg=cfg)
    newest = CheckpointStore(run.checkpoints).latest()
    assert newest is not None
    return load_weights(newest.path)


@pytest.mark.parametrize("trainer", ["rl", *(pytest.param(name, marks=pytest.mark.slow) for name in [*CONFIGS][1:])])
def test_both_transports_train_the_same_weights(tmp_path: Path, trainer: str) -> None:
    default = final_weights(tmp_path / "zmq", trainer)
    other = final_weights(tmp_path / "torch", trainer, rpc="torch", rpc_trusted_nodes=True)
    assert default.keys() == other.keys()
    assert [name for name, value in default.items() if not torch.equal(value, other[name])] == []
