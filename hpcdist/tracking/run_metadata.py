"""A run's config, environment and state as MLflow's parameters and tags."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from hpcdist.config.schema import unused_sections
from hpcdist.config.written import plain_tree
from hpcdist.errors import ConfigError, TrackingError
from hpcdist.run.folder import RunDir, State, read_json
from hpcdist.run.status import job_lives
from hpcdist.tracking.names import clean_name
from hpcdist.tracking.uri import redact_uri

MAX_PARAM = 6000
MAX_TAG = 8000
#: MLflow has no state for a run that was stopped and will go on: the tag `hpcdist.state` tells.
MLFLOW_STATUS = {
    "created": "SCHEDULED",
    "queued": "SCHEDULED",
    "finished": "FINISHED",
    "failed": "FAILED",
    "cancelled": "KILLED",
    "stopped": "KILLED",
}


def read_config(run: RunDir) -> dict[str, Any]:
    """The run's resolved config as plain containers. Raises TrackingError when it cannot be read."""
    try:
        return plain_tree(run.config)
    except ConfigError as error:
        raise TrackingError(f"{error}: a run cannot be shipped without its config") from error


def flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Dotted keys and texts of the leaves; text as it would stand in YAML, lists as JSON."""
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{name}.")
        else:
            yield name, value if isinstance(value, str) else json.dumps(value, default=str)


def params(config: Mapping[str, Any]) -> dict[str, str]:
    """Every key of the config that the run's trainer heeds, without passwords, no longer than MLflow takes.

    A section that belongs to other trainers says nothing about this run, and would be taken for the truth.
    """
    return {clean_name(key): _clean_text(text)[:MAX_PARAM] for key, text in flatten(_heeded(config))}


def names(config: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Keys of the parameters and of the user's own tags, each with its name in MLflow."""
    own = (config.get("tracking") or {}).get("tags") or {}
    return [(key, clean_name(key)) for tree in (_heeded(config), own) for key, _ in flatten(tree)]


def _heeded(config: Mapping[str, Any]) -> dict[str, Any]:
    trainer = config.get("trainer") or {}
    unused = set() if trainer.get("script") else unused_sections(trainer.get("target", ""))
    return {key: value for key, value in config.items() if key not in unused}


def fixed_tags(run: RunDir, config: Mapping[str, Any]) -> dict[str, str]:
    """What the run is: its name and source, its environment, the user's own tags."""
    environment = read_json(run.environment) or {}
    trainer = config.get("trainer") or {}
    # `code` says where the code was copied from; what of it matters for review, the commit, stands beside it.
    facts = {key: value for key, value in environment.items() if key != "code" and value is not None}
    if container := {key: value for key, value in (read_json(run.container) or {}).items() if value is not None}:
        facts |= {key: container.pop(key) for key in ("image", "image_digest") if key in container}
        facts["container"] = container
    tags = {clean_name(f"hpcdist.{key}"): text for key, text in flatten(facts)}
    tags |= {
        "hpcdist.folder": str(run.path),
        "mlflow.runName": run.name,
        "mlflow.source.name": " ".join(trainer.get("script") or [trainer.get("target", "hpcdist")]),
        "mlflow.source.type": "LOCAL",
    }
    for tag, key in (("mlflow.source.git.commit", "git_commit"), ("mlflow.user", "user")):
        if environment.get(key):
            tags[tag] = str(environment[key])
    own = (config.get("tracking") or {}).get("tags") or {}
    tags |= {clean_name(key): text for key, text in flatten(own)}
    return {key: _clean_text(text)[:MAX_TAG] for key, text in tags.items()}


def job_tags(run: RunDir) -> dict[str, str]:
    """Which job of Slurm's the run is, where it ran and how long it waited, through all lives of the job."""
    job = read_json(run.path / "slurm.json") or {}
    lives = job_lives(run)
    if not job.get("job_id"):
        return {}
    facts = {
        "job_id": job["job_id"],
        "cluster": job.get("cluster") or None,
        "nodes": (lives[-1].get("nodes") or None) if lives else None,
        "lives": len(lives) or None,
        "queue_s": round(sum(float(life.get("queue_s", 0.0)) for life in lives)) if lives else None,
    }
    return {f"hpcdist.slurm.{key}": str(value) for key, value in facts.items() if value is not None}


def state_tags(state: State) -> dict[str, str]:
    """What became of the run."""
    sentence = f"{state.status}: {state.reason}" if state.reason else state.status
    return {
        # The run's description: a tag's long text is cut to a few words where people look first.
        "mlflow.note.content": _clean_text(sentence)[:MAX_TAG],
        "hpcdist.attempts": str(state.attempt),
        "hpcdist.restarts": str(state.restarts),
        "hpcdist.reason": _clean_text(state.reason)[:MAX_TAG],
        "hpcdist.state": state.status,
        "hpcdist.world_size": str(state.world_size),
    }


def _clean_text(text: str) -> str:
    """Without passwords, and without the lone surrogates that stand for the bytes of odd file names."""
    return redact_uri(text).encode(errors="replace").decode()
