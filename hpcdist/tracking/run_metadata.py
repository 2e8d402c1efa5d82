"""The config, environment and state of a run as parameters and tags of MLflow."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from hpcdist.config.redaction import redact_text, redact_tree
from hpcdist.config.tree import flat
from hpcdist.config.written import StoredConfig, read_stored
from hpcdist.errors import ConfigError, TrackingError
from hpcdist.host.files import read_json
from hpcdist.run.create import is_generated
from hpcdist.run.folder import RunDir, State
from hpcdist.run.records import PLAIN_SCRIPT, overrides, parameters, read_origin, read_rerun, script_arguments
from hpcdist.run.slurm_job import job_starts
from hpcdist.run.sweeps import affects_results, label
from hpcdist.tracking.journal import clean_name

MAX_PARAM = 6000
MAX_RUN_NAME = 250
#: Overrides in the name of a run.
_NAMED_OVERRIDES = 4
MAX_TAG = 8000
#: MLflow has no status for a stopped run that can be resumed; the tag `hpcdist.state` holds it.
MLFLOW_STATUS = {
    "created": "SCHEDULED",
    "queued": "SCHEDULED",
    "finished": "FINISHED",
    "failed": "FAILED",
    "cancelled": "KILLED",
    "stopped": "KILLED",
}


def read_config(run: RunDir) -> StoredConfig:
    """Return the config of a run. Raises TrackingError if it cannot be read."""
    try:
        return read_stored(run.config)
    except ConfigError as error:
        raise TrackingError(f"{error}: a run cannot be uploaded without its config") from error


def flatten(tree: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield dotted keys and values as text; lists are JSON."""
    for key, value in flat(tree).items():
        yield key, value if isinstance(value, str) else json.dumps(value, default=str)


def params(run: RunDir, stored: StoredConfig) -> dict[str, str]:
    """Return the parameters of a run, with secrets redacted and values of MLflow's maximum length."""
    return {clean_name(key): clean_text(text)[:MAX_PARAM] for key, text in flatten(parameters(run, stored))}


def names(run: RunDir, stored: StoredConfig) -> list[tuple[str, str]]:
    """Return the keys of parameters and user tags, each with its name in MLflow."""
    own = stored.config.tracking.tags
    return [(key, clean_name(key)) for tree in (parameters(run, stored), own) for key, _ in flatten(tree)]


def fixed_tags(run: RunDir, stored: StoredConfig) -> dict[str, str]:
    """Return the tags that do not change: name, source, environment, and the tags of the user."""
    environment = read_json(run.environment) or {}
    trainer = stored.config.trainer
    # `code` is the path that the code was copied from; the commit is a key of its own.
    facts = {key: value for key, value in environment.items() if key != "code" and value is not None}
    if "command" in facts:  # the tag `hpcdist.command` is for commands to the run, see `command_tag.py`
        facts["command_line"] = facts.pop("command")
    if "cores" in facts:  # of the machine on which the run was created, not of its allocation
        facts["host_cores"] = facts.pop("cores")
    if container := {key: value for key, value in (read_json(run.container) or {}).items() if value is not None}:
        facts |= {key: container.pop(key) for key in ("image", "image_digest") if key in container}
        facts["container"] = container
    if rank_environment := read_json(run.rank_environment):
        facts["rank_environment"] = {key: value for key, value in rank_environment.items() if value}
    tags = {clean_name(f"hpcdist.{key}"): text for key, text in flatten(facts)}
    tags |= {
        "hpcdist.folder": str(run.path),
        "mlflow.runName": run_name(run, stored),
        "mlflow.source.name": " ".join(trainer.script or [trainer.target]),
        "mlflow.source.type": "LOCAL",
    }
    if (rerun := read_rerun(run)) is not None:
        tags["hpcdist.rerun_of"] = rerun.run_id or rerun.name
    for tag, key in (("mlflow.source.git.commit", "git_commit"), ("mlflow.user", "user")):
        if environment.get(key):
            tags[tag] = str(environment[key])
    tags |= {clean_name(key): text for key, text in stored.config.tracking.tags.items()}
    return {key: clean_text(text)[:MAX_TAG] for key, text in tags.items()}


def run_name(run: RunDir, stored: StoredConfig) -> str:
    """Return the name of a run in MLflow.

    A generated name is preceded by the overrides that affect the result, and by the arguments of a script that was
    started without a config: `lr=0.01 seed=2 (ddp-20261122-121700-1a2b)`.
    """
    origin = read_origin(run) if is_generated(run.name) else None
    if origin is None:
        return run.name
    differing = {key: item.after for key, item in overrides(origin, stored.values).items() if affects_results(key)}
    arguments = redact_tree(script_arguments(stored.config.trainer.script)) if origin.config == PLAIN_SCRIPT else {}
    named = label({key: differing[key] for key in list(differing)[:_NAMED_OVERRIDES]})
    shown = " ".join(filter(None, [*(f"{name}={text}" for name, text in arguments.items()), named]))
    more = f" +{len(differing) - _NAMED_OVERRIDES}" * (len(differing) > _NAMED_OVERRIDES)
    end = f"{more} ({run.name})"
    return f"{shown[: MAX_RUN_NAME - len(end)]}{end}" if shown else run.name


def job_tags(run: RunDir) -> dict[str, str]:
    """Return the nodes of the run, and of its Slurm job the id, the nodes of its last start, and the number of starts
    with their time in the queue.
    """
    job = read_json(run.path / "slurm.json") or {}
    starts = job_starts(run)
    if not job.get("job_id"):
        host = (read_json(run.environment) or {}).get("host")
        return {"hpcdist.nodes": clean_text(str(host))[:MAX_TAG]} if host else {}
    facts = {
        "job_id": job["job_id"],
        "cluster": job.get("cluster") or None,
        "nodes": (starts[-1].get("nodes") or None) if starts else None,
        "starts": len(starts) or None,
        "queue_s": round(sum(float(start.get("queue_s", 0.0)) for start in starts)) if starts else None,
    }
    tags = {f"hpcdist.slurm.{key}": str(value) for key, value in facts.items() if value is not None}
    # The same tag for runs with and without Slurm, for a column in the list of runs.
    nodes = dict.fromkeys(start["nodes"] for start in starts if start.get("nodes"))
    return tags | ({"hpcdist.nodes": ",".join(nodes)[:MAX_TAG]} if nodes else {})


def state_tags(state: State) -> dict[str, str]:
    """Return the tags of the run's state."""
    return {
        "hpcdist.attempts": str(state.attempt),
        "hpcdist.restarts": str(state.restarts),
        "hpcdist.reason": clean_text(state.reason)[:MAX_TAG],
        "hpcdist.state": state.status,
        "hpcdist.world_size": str(state.world_size),
    }


def clean_text(text: str) -> str:
    """Return text without passwords and without lone surrogates, which file names may contain."""
    return redact_text(text).encode(errors="replace").decode()
