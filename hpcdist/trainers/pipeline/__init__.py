"""Trainer `pipeline`: a ResNet in stages on different ranks."""

from __future__ import annotations

from dataclasses import dataclass, field

from hpcdist.config.schema import Config
from hpcdist.config.section import ConfigSection, number
from hpcdist.config.trainer_declaration import Trainer
from hpcdist.data import RESNET_NAMES, model_name_problems


@dataclass(frozen=True, kw_only=True)
class PipelineConfig(ConfigSection):
    """A ResNet split into `roles.stage` stages, one per rank; more ranks train replicas (`trainer: pipeline`)."""

    split_points: list[str] = field(default_factory=list)
    """Last units of the stages: `[layer1.2, layer3.0]`, or `[measured]`; empty: `[layer2]` for two, else measured."""
    num_micro_batches: int = number(4, least=1)
    """Equal parts of `data.batch_size`, the batch of a step on all ranks, each with its own batch statistics."""


def _check(config: Config) -> list[str]:
    problems = model_name_problems(config.model.name)
    num_micro_batches = config.section(PipelineConfig).num_micro_batches
    if not problems and config.model.name not in RESNET_NAMES:
        problems.append(
            f"model.name={config.model.name} has no stages: trainer pipeline cuts ResNets, such as resnet50"
        )
    if config.model.compile:
        problems.append("model.compile is not for trainer pipeline: set it to false")
    if config.precision.dtype != "fp32":
        problems.append(f"precision.dtype={config.precision.dtype} is not for trainer pipeline: leave it out")
    batch_size = config.data.batch_size
    if batch_size % num_micro_batches:
        next_smaller = batch_size // num_micro_batches * num_micro_batches
        problems.append(
            f"data.batch_size={batch_size} cannot be cut into {num_micro_batches} equal"
            f" parts (pipeline.num_micro_batches): use {next_smaller or num_micro_batches}"
        )
    return problems


TRAINER = Trainer(
    section=PipelineConfig,
    shared_sections=("model", "data", "optim", "schedule"),
    roles={"stage": 2},
    check=_check,
    charts={
        "bubble: share of a step that stages are idle": ("pipeline/bubble", "pipeline/bubble_in_theory"),
        "seconds of computation per step and stage": ("pipeline/busy_s/*",),
    },
    fixed_keys=("model.name", "optim.name"),
)
