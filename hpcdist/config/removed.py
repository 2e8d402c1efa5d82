"""Config keys and values of earlier versions, each with its replacement.

CHANGELOG.md lists the same keys and sentences; a test compares them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Removed:
    """A key that an earlier version had."""

    instead: str
    """Sentence for a config that sets the key: what to use, or what always applies now."""
    default: Any = None
    """Default of the key when it was removed. The run folders of earlier versions contain it."""


#: By dotted key; `*` stands for any one name, such as that of a role.
REMOVED_KEYS: dict[str, Removed] = {
    "launch.backend": Removed(
        default="auto",
        instead="the backend follows from the devices: nccl or xccl if all ranks have GPUs, else gloo",
    ),
    "launch.code_max_mb": Removed(
        default=50.0,
        instead="the limit of the code snapshot is 200 MB; name data and outputs in .gitignore",
    ),
    "launch.private_network": Removed(
        default=True,
        instead="forked ranks of hpcdist's trainers always get a network namespace where the kernel allows it",
    ),
    "launch.rpc": Removed(
        default="zmq",
        instead="the trainers always use ZeroMQ; a program of your own may use torch.distributed.rpc itself",
    ),
    "launch.rpc_trusted_nodes": Removed(
        default=False,
        instead="the sockets of RPC are always authenticated",
    ),
    "model.sync_batch_norm": Removed(
        instead="call torch.nn.SyncBatchNorm.convert_sync_batchnorm before ctx.wrap in a trainer of your own",
        default=False,
    ),
    "data.preload": Removed(
        instead="a dataset of at most 1 GiB is kept in memory, except an augmented image_folder", default="auto"
    ),
    "data.eval_batch_size": Removed(instead="evaluations take 256 samples per rank and batch", default=256),
    "optim.grad_accum_steps": Removed(
        instead="set data.global_batch_size, and elastic.micro_batches to the number of its parts", default=1
    ),
    "schedule.min_lr_factor": Removed(
        instead="the cosine schedule ends at 0; another schedule needs a trainer of your own", default=0.0
    ),
    "precision.tf32": Removed(instead="TF32 is always allowed; set torch.backends in code of your own", default=True),
    "elastic.grow": Removed(
        instead="a run always restarts on nodes that return; for a fixed number of nodes leave out cluster.min_nodes",
        default="restart",
    ),
    "pipeline.activation_checkpointing": Removed(
        instead="use more stages (roles.stage), or smaller parts (pipeline.num_micro_batches)", default=False
    ),
    "rl.env_kwargs": Removed(
        instead="register an environment with these arguments, such as rl.env_id=module:Name-v0",
        default={},
    ),
    "rl.max_episode_steps": Removed(
        instead="register an environment with max_episode_steps, such as rl.env_id=module:Name-v0"
    ),
    "rl.normalize_observations": Removed(
        instead="scale the observations in an environment of your own, such as rl.env_id=module:Name-v0",
        default=False,
    ),
    "rl.gae_lambda": Removed(instead="lambda of generalised advantage estimation is always 0.95", default=0.95),
    "rl.clip_range": Removed(instead="PPO always clips the probability ratio at 0.8 and 1.2", default=0.2),
    "rl.value_coef": Removed(instead="the value loss always has the weight 0.5", default=0.5),
    "hybrid.init_scale": Removed(instead="the initial rows of tables are always uniform in ±0.01", default=0.01),
    "hybrid.eval_batch_size": Removed(
        instead="evaluations always take 4,096 samples per trainer and batch", default=4096
    ),
    "hybrid.label_column": Removed(
        instead="the column of the labels is always called label: rename it", default="label"
    ),
    "hybrid.eval_fraction": Removed(instead="the last tenth of the samples is always for the evaluation", default=0.1),
    "hybrid.num_numeric_columns": Removed(instead="the synthetic log always has 4 numeric features", default=4),
    "hybrid.export_max_mb": Removed(instead="a model is exported if its tables have at most 256 MB", default=256.0),
    "rnn.eval_fraction": Removed(instead="a twentieth of the text is always for the evaluation", default=0.05),
    "cluster.het": Removed(
        instead="all roles share one allocation; cluster.roles.ROLE.nodes and tasks_per_node place them in it"
    ),
    "cluster.roles.*.partition": Removed(
        instead="all roles share one allocation; cluster.partition applies to all of its nodes"
    ),
    "cluster.roles.*.constraint": Removed(
        instead="all roles share one allocation; cluster.constraint applies to all of its nodes"
    ),
    "cluster.roles.*.sbatch": Removed(
        instead="all roles share one allocation; cluster.sbatch applies to all of its nodes", default={}
    ),
    "cluster.roles.*.gpu_type": Removed(
        instead="all roles share one allocation; cluster.gpu_type applies to all of its nodes"
    ),
    "cluster.roles.*.mem": Removed(instead="all roles share one allocation; cluster.mem applies to all of its nodes"),
    "cluster.shared_runs": Removed(
        instead="a local disk is only a warning; submit with --force if the nodes share a folder such as /tmp",
        default=False,
    ),
    "cluster.fork": Removed(
        instead="every task of a job is a parent that imports torch once; launch.fork=false lets each rank import it",
        default=False,
    ),
    "cluster.segment": Removed(instead="use cluster.sbatch.segment=N"),
    "cluster.requeue": Removed(instead="use cluster.sbatch.requeue=expedite", default="normal"),
    "cluster.max_requeues": Removed(instead="hpcdist requeues a job until it has been restarted 50 times", default=50),
    "stop.pause_at_step": Removed(
        instead="stop the run by `hpcdist stop`; stop.max_steps ends it, and its schedule, at a step"
    ),
    "cluster.environment.local_dir": Removed(
        instead="ranks use the environment where it is; docs/how-to/environments.md shows one on a local disk",
        default="/tmp",  # noqa: S108
    ),
    "cluster.environment.stage": Removed(
        instead="ranks use the environment where it is; docs/how-to/environments.md shows one on a local disk",
        default=True,
    ),
    "cluster.environment.uv_args": Removed(
        instead="create the environment by `uv sync`, and name its folder in cluster.environment.path with kind=venv",
        default=[],
    ),
    "container.check_image": Removed(
        instead="the image is checked before a submission if this machine can start it; `submit --force` submits in any"
        " case",
        default=True,
    ),
    "container.python": Removed(
        instead="the image's PATH must have the `python3` in which hpcdist is installed",
        default="python3",
    ),
    "data.download": Removed(instead="a dataset that is missing in data.root is always downloaded", default=True),
    "elastic.min_ranks": Removed(
        instead="an elastic run uses all visible GPUs, up to launch.num_ranks; see cluster.min_nodes"
    ),
}

_ON_SLURM = "on Slurm use apptainer, enroot or pyxis, with an image that `hpcdist image convert` writes"

#: Values that a key no longer takes, by dotted key and value.
REMOVED_VALUES: dict[tuple[str, str], str] = {
    ("comm.operations", "pairs"): "the preflight of a job names slow nodes; `send_recv` measures neighbouring ranks",
    ("cluster.environment.kind", "uv"): "create the environment by `uv sync`, and use it with kind=venv",
    (
        "container.runtime",
        "charliecloud",
    ): "use apptainer; write the folder again by `hpcdist image convert --to dir`",
    ("container.runtime", "docker"): f"{_ON_SLURM}; on one machine `hpcdist run --in docker`",
    ("container.runtime", "podman"): f"{_ON_SLURM}; on one machine `hpcdist run --in podman`",
}


def removal(key: str, value: object) -> str | None:
    """Return the line for a config that sets a removed key, or a removed value of a key; None for all others."""
    removed = _removed(key)
    if removed is not None:
        return f"{key} was removed: {removed.instead}"
    values = value if isinstance(value, list) else [value]
    for item in values:
        sentence = REMOVED_VALUES.get((key, str(item)))
        if sentence is not None:
            return f"{key}={item} was removed: {sentence}"
    return None


def without_removed_defaults(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the tree of a run folder's config without the removed keys that have their former default.

    A removed key with another value stays, so that loading reports it by `removal`.
    """
    kept = {}
    for name, value in tree.items():
        key = f"{prefix}{name}"
        removed = _removed(key)
        if removed is not None and value == removed.default:
            continue
        if isinstance(value, Mapping):
            kept[name] = without_removed_defaults(value, f"{key}.")
        else:
            kept[name] = value
    return kept


def _removed(key: str) -> Removed | None:
    """Return the entry of a key in REMOVED_KEYS; None if it was not removed."""
    for pattern, removed in REMOVED_KEYS.items():
        if key.count(".") == pattern.count(".") and fnmatchcase(key, pattern):
            return removed
    return None
