"""Config, environment and state of a run as parameters and tags of MLflow."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from hpcdist.config.document import flat
from hpcdist.config.redaction import redact_tree
from hpcdist.config.written import StoredConfig, read_stored
from hpcdist.errors import ConfigError, TrackingError
from hpcdist.host.json_files import read_json
from hpcdist.run.config_origin import PLAIN_SCRIPT, is_generated, overrides, read_origin
from hpcdist.run.fitted_batch import read_fitted
from hpcdist.run.folder import RunDir, State
from hpcdist.run.job_record import job_starts
from hpcdist.run.run_parameters import parameters, script_arguments
from hpcdist.run.sweeps import affects_results, label
from hpcdist.run.training_record import devices_of
from hpcdist.run.weight_files import read_origin_of_weights

MAX_RUN_NAME = 250
#: Overrides in the name of a run.
_NAMED_OVERRIDES = 4
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
    """Return the config of a run. Raises TrackingError if it is missing or damaged."""
    try:
        return read_stored(run.config)
    except ConfigError as error:
        raise TrackingError(f"{error}: a run cannot be uploaded without its config") from error


def params(run: RunDir, stored: StoredConfig) -> dict[str, str]:
    """Return the parameters of a run as text by their dotted keys."""
    return _texts(parameters(run, stored))


def _texts(tree: Mapping[str, Any]) -> dict[str, str]:
    """Return values as text by their dotted keys; lists are JSON."""
    texts = {}
    for key, value in flat(tree).items():
        texts[key] = value if isinstance(value, str) else json.dumps(value, default=str)
    return texts


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
    if "source_digest" in facts:  # not that of the user's code, which is `code_digest`
        facts["hpcdist_source_digest"] = facts.pop("source_digest")
    container = read_json(run.container) or {}
    container = {key: value for key, value in container.items() if value is not None}
    if container:
        facts |= {key: container.pop(key) for key in ("image", "image_digest") if key in container}
        facts["container"] = container
    weights = read_origin_of_weights(run)
    if weights is not None:
        facts["init_from"] = {key: value for key, value in asdict(weights).items() if value not in ("", None)}
    rank_environment = read_json(run.rank_environment)
    if rank_environment:
        facts["rank_environment"] = {key: value for key, value in rank_environment.items() if value}
    tags = {f"hpcdist.{key}": text for key, text in _texts(facts).items()}
    tags |= {
        "hpcdist.folder": str(run.path),
        "mlflow.runName": run_name(run, stored),
        "mlflow.source.name": " ".join(trainer.script or [trainer.target]),
        "mlflow.source.type": "LOCAL",
    }
    for tag, key in (("mlflow.source.git.commit", "git_commit"), ("mlflow.user", "user")):
        if environment.get(key):
            tags[tag] = str(environment[key])
    return tags | stored.config.tracking.tags


def run_name(run: RunDir, stored: StoredConfig) -> str:
    """Return the name of a run in MLflow.

    A generated name is preceded by the overrides that affect the result, and by the arguments of a script that was
    started without a config: `lr=0.01 seed=2 (ddp-20261122-121700-1a2b)`.
    """
    origin = read_origin(run) if is_generated(run.name) else None
    if origin is None:
        return run.name
    changed = overrides(origin, stored.values)
    differing = {key: item.after for key, item in changed.items() if affects_results(key)}
    script = stored.config.trainer.script if origin.config == PLAIN_SCRIPT else []
    arguments = redact_tree(script_arguments(script))
    parts = [f"{name}={text}" for name, text in arguments.items()]
    first = list(differing)[:_NAMED_OVERRIDES]
    parts.append(label({key: differing[key] for key in first}))
    shown = " ".join(filter(None, parts))
    if not shown:
        return run.name
    end = f" ({run.name})"
    num_others = len(differing) - len(first)
    if num_others:
        end = f" +{num_others}{end}"
    return f"{shown[: MAX_RUN_NAME - len(end)]}{end}"


def state_tags(run: RunDir, state: State) -> dict[str, str]:
    """Return the tags of the state, the devices and the nodes of the run, and those of its Slurm job."""
    tags = {
        "hpcdist.attempts": str(state.attempt),
        "hpcdist.restarts": str(state.restarts),
        "hpcdist.reason": state.reason,
        "hpcdist.state": state.status,
        "hpcdist.world_size": str(state.world_size),
    }
    fitted = read_fitted(run)
    if fitted is not None:
        tags["hpcdist.fitted_micro_batches"] = str(fitted)
    devices, cpu = devices_of(run)
    if devices:
        tags["hpcdist.devices"] = devices
    if cpu:
        tags["hpcdist.cpu"] = cpu
    job = read_json(run.path / "slurm.json") or {}
    starts = job_starts(run)
    # `hpcdist.nodes` is set for runs with and without Slurm, for a column in the list of runs.
    if not job.get("job_id"):
        host = (read_json(run.environment) or {}).get("host")
        if host:
            tags["hpcdist.nodes"] = str(host)
        return tags
    nodes = dict.fromkeys(start["nodes"] for start in starts if start.get("nodes"))
    facts = {"nodes": ",".join(nodes), "slurm.job_id": job["job_id"], "slurm.cluster": job.get("cluster")}
    if starts:
        facts |= {"slurm.nodes": starts[-1].get("nodes"), "slurm.starts": len(starts)}
        queue_s = sum(float(start.get("queue_s", 0.0)) for start in starts)
        facts["slurm.queue_s"] = str(round(queue_s))
    return tags | {f"hpcdist.{key}": str(value) for key, value in facts.items() if value}
