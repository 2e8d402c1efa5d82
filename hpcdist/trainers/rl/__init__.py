"""Trainer `rl`: proximal policy optimization with one agent and several observers."""

from __future__ import annotations

from hpcdist.config.schema import Trainer
from hpcdist.trainers.rl.schema import RlConfig

TRAINER = Trainer(
    section=RlConfig,
    shared_sections=("optim", "schedule"),
    roles={"agent": 1, "observer": 2},
    single_roles=("agent",),
    instead_of_accumulation="rl.num_minibatches",
    charts={"mean return of an episode": ("train/return", "eval/return")},
    fixed_keys=("rl.env_id", "rl.hidden_sizes", "rl.normalize_observations", "optim.name"),
)
