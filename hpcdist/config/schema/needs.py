"""What each shipped trainer heeds of a config, and what it cannot do with the sections that all share."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpcdist.config.schema.run import Config

#: The sections that say what is trained and how, by shipped trainer; the others hold for every run.
TRAINER_SECTIONS: dict[str, tuple[str, ...]] = {
    "ddp": ("model", "data", "optim", "schedule", "precision"),
    "rl": ("rl", "optim", "schedule"),
    "rnn": ("rnn", "optim", "schedule"),
    "pipeline": ("pipeline", "model", "data", "optim", "schedule"),
    "hybrid": ("hybrid", "optim"),
    "comm": ("comm",),
}

#: The roles of each trainer that has some, in rank order, and an example. Rank 0 leads, so the order counts.
_ROLES = {
    "rl": (("agent", "observer"), "{agent: 1, observer: 2}"),
    "rnn": (("trainer", "server"), "{trainer: 1, server: 1}"),
    "pipeline": (("stage",), "{stage: 2}"),
    "hybrid": (("trainer", "server"), "{trainer: 2, server: 2}"),
}
#: What to use where a trainer has no micro-batches of an optimizer step.
_INSTEAD_OF_ACCUMULATE = {
    "rl": "rl.minibatches",
    "rnn": "rnn.batch_size",
    "pipeline": "pipeline.micro_batches",
    "hybrid": "hybrid.batch_size",
}


def trainer_problems(config: Config) -> list[str]:
    """Mistakes about the shipped trainer that a config names, each with its fix; none for code of the user's own."""
    trainer = config.trainer.target
    if trainer not in _ROLES:
        return []
    problems = []
    roles, example = _ROLES[trainer]
    if tuple(config.roles) != roles or (trainer == "rl" and config.roles["agent"] != 1):
        got = ", ".join(f"{role}: {count}" for role, count in config.roles.items()) or "none"
        wanted = "one agent, then observers" if trainer == "rl" else ", then ".join(f"{role}s" for role in roles)
        problems.append(f"roles: trainer {trainer} needs {wanted}, got {got}: set roles='{example}'")
    if config.optim.accumulate != 1:
        instead = _INSTEAD_OF_ACCUMULATE[trainer]
        problems.append(f"optim.accumulate={config.optim.accumulate} is not for trainer {trainer}: use {instead}")
    if trainer == "pipeline":
        problems += _pipeline_problems(config)
    if trainer == "hybrid":
        problems += _hybrid_problems(config)
    return problems


def _pipeline_problems(config: Config) -> list[str]:
    problems = []
    num_stages, number = config.roles.get("stage", 0), config.pipeline.micro_batches
    if config.model.name == "simple_cnn":
        problems.append("model.name=simple_cnn has no stages: trainer pipeline cuts ResNets, such as resnet50")
    if config.model.sync_batch_norm or config.model.compile:
        problems.append("model.sync_batch_norm and model.compile are not for trainer pipeline: set them to false")
    if config.precision.dtype != "fp32":
        problems.append(f"precision.dtype={config.precision.dtype} is not for trainer pipeline: leave it out")
    if isinstance(number, int):
        if config.data.batch_size % number:
            problems.append(
                f"data.batch_size={config.data.batch_size} cannot be cut into {number} equal"
                f" parts (pipeline.micro_batches): use {config.data.batch_size // number * number or number}"
            )
        if config.pipeline.engine == "pipelining" and config.pipeline.schedule == "1f1b" and number < num_stages:
            problems.append(
                f"pipeline.engine=pipelining needs pipeline.micro_batches >= {num_stages} for 1f1b with"
                f" {num_stages} stages, got {number}: raise it, or use pipeline.schedule=gpipe"
            )
    return problems


def _hybrid_problems(config: Config) -> list[str]:
    problems = []
    if config.optim.clip_norm is not None:
        problems.append(f"optim.clip_norm={config.optim.clip_norm:g} is not for trainer hybrid: leave it out")
    if not config.hybrid.tables:
        problems.append("hybrid.tables must name at least one table, such as {user: 1000}")
    return problems
