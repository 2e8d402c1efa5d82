"""Additional flags of sbatch and srun in a config (`cluster.sbatch`, `cluster.srun`), checks of them, and the secrets
that they would expose.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from hpcdist.config.launch_schema import ClusterConfig
from hpcdist.config.schema import Config
from hpcdist.config.written import secret_keys
from hpcdist.slurm.client import option_error

_NUM_TASKS = "cluster.nodes and cluster.tasks_per_node"
#: Flags that hpcdist sets from a key of the config, with that key.
_SBATCH_KEYS = {
    "job-name": "name",
    "time": "cluster.time_limit_min",
    "nodes": "cluster.nodes",
    "ntasks": _NUM_TASKS,
    "ntasks-per-node": "cluster.tasks_per_node",
    "cpus-per-task": "cluster.cpus_per_task",
    "gpus-per-node": "cluster.gpus_per_node",
    "gpus": "cluster.gpus_per_node",
    "partition": "cluster.partition",
    "account": "cluster.account",
    "qos": "cluster.qos",
    "mem": "cluster.mem",
    "constraint": "cluster.constraint",
    "exclude": "cluster.exclude",
    "signal": "cluster.signal_lead_s",
    "no-requeue": "cluster.max_requeues=0",
    "no-kill": "cluster.min_nodes or cluster.spare_nodes",
    "mincpus": "cluster.cpus_per_task",
}
#: Flags that hpcdist sets itself.
_SBATCH_RESERVED = (
    "array",
    "chdir",
    "error",
    "input",
    "open-mode",
    "output",
    "parsable",
    "requeue",
    "test-only",
    "wait",
    "wrap",
)
_SRUN_KEYS = {
    "nodes": "cluster.nodes",
    "ntasks": _NUM_TASKS,
    "ntasks-per-node": "cluster.tasks_per_node",
    "cpus-per-task": "cluster.cpus_per_task",
    "gpus-per-node": "cluster.gpus_per_node",
}
_SRUN_RESERVED = (
    "error",
    "input",
    "job-name",
    "kill-on-bad-exit",
    "multi-prog",
    "open-mode",
    "output",
    "pty",
    "test-only",
)


def option_value(value: str) -> str | bool | None:
    """Return the value of an option: True (no value) for `true`, None (leave the option out) for `false`."""
    return {"true": True, "false": None}.get(value.lower(), value)


def conflicting_flags(cluster: ClusterConfig) -> list[str]:
    """Return a problem for each flag that another key of the config or hpcdist itself sets."""
    # hpcdist sets these only for a run that may lose nodes, or with a range of nodes.
    is_set = {"no-kill": cluster.outlives_nodes, "mincpus": cluster.fewest_nodes < cluster.nodes}
    return [
        f"cluster.{program}.{flag}{problem}"
        for program, flags in (("sbatch", cluster.sbatch), ("srun", cluster.srun))
        for flag in flags
        if (problem := _conflict(program, flag)) and (program != "sbatch" or is_set.get(flag.replace("_", "-"), True))
    ]


def _conflict(program: str, flag: str) -> str:
    name = flag.replace("_", "-")
    if name.startswith("-") or len(name) == 1:
        return ": write the flag's long name without dashes, such as mail-type"
    keys, reserved = (_SBATCH_KEYS, _SBATCH_RESERVED) if program == "sbatch" else (_SRUN_KEYS, _SRUN_RESERVED)
    if name in keys:
        return f" repeats a key of the config: use {keys[name]}"
    return f": hpcdist sets --{name} itself: remove it" if name in reserved else ""


def rejected_flags(program: str, flags: Mapping[str, str], options: Collection[str] = ()) -> list[str]:
    """Return a problem for each flag that sbatch or srun does not know or cannot parse. Does not ask the controller.

    Args:
        options: flags that are options of the `hpcdist` command, not keys of the config.
    """
    values = {flag: option_value(value) for flag, value in flags.items() if not _conflict(program, flag)}
    given = {flag: value for flag, value in values.items() if value is not None}
    if not given or option_error(program, given) is None:
        return []
    found = []
    for flag, value in given.items():
        if (error := option_error(program, {flag: value})) is not None:
            source = f"--{flag} {flags[flag]}" if flag in options else f"cluster.{program}.{flag}={flags[flag]}"
            reason = "has no such flag" if "unrecognized option" in error else f"rejects it: {error}"
            found.append(f"{source}: {program} {reason}")
    return found


# Secrets of a config that would become readable to other users of the cluster.


def exposed_secrets(config: Config) -> list[str]:
    """Return a problem for each secret that would be part of the batch script or of a command line."""
    keys = [path for path in secret_keys(config) if path[0] in ("cluster", "container") and path[1] != "env"]
    return [
        f"{'.'.join(key)} holds a secret, which other users could read in the batch script or on a command line:"
        f" pass it as an environment variable, such as cluster.env.MY_TOKEN='${{oc.env:MY_TOKEN}}'"
        for key in keys
    ]
