"""Trainer `pipeline`: a ResNet in stages on different ranks."""

from __future__ import annotations

from hpcdist.config.schema import Config, Trainer
from hpcdist.models import RESNET_NAMES, model_name_problems
from hpcdist.trainers.pipeline.schema import PipelineConfig


def _check(config: Config) -> list[str]:
    cfg = config.section(PipelineConfig)
    problems = model_name_problems(config.model.name)
    number = cfg.num_micro_batches
    if not problems and config.model.name not in RESNET_NAMES:
        problems.append(
            f"model.name={config.model.name} has no stages: trainer pipeline cuts ResNets, such as resnet50"
        )
    if config.model.sync_batch_norm or config.model.compile:
        problems.append("model.sync_batch_norm and model.compile are not for trainer pipeline: set them to false")
    if config.precision.dtype != "fp32":
        problems.append(f"precision.dtype={config.precision.dtype} is not for trainer pipeline: leave it out")
    if isinstance(number, int) and config.data.batch_size % number:
        problems.append(
            f"data.batch_size={config.data.batch_size} cannot be cut into {number} equal"
            f" parts (pipeline.num_micro_batches): use {config.data.batch_size // number * number or number}"
        )
    return problems


TRAINER = Trainer(
    section=PipelineConfig,
    shared_sections=("model", "data", "optim", "schedule"),
    roles={"stage": 2},
    instead_of_accumulation="pipeline.num_micro_batches",
    check=_check,
    charts={
        "bubble: share of a step that stages are idle": ("pipeline/bubble", "pipeline/bubble_in_theory"),
        "seconds of computation per step and stage": ("pipeline/busy_s/*",),
    },
    fixed_keys=("model.name", "optim.name"),
)
