"""Further flags of sbatch and srun that a config names: none that undoes what other keys say, none that is unknown."""

from __future__ import annotations

import subprocess
from collections.abc import Collection, Mapping

from hpcdist.config.schema import ClusterConfig
from hpcdist.slurm.partitions import PATIENCE_S

_LENGTH = "cluster.nodes and cluster.tasks_per_node"
#: Flags that are ours to set, and the key that steers each; empty where nothing may.
_SBATCH_KEYS = {
    "job-name": "name",
    "time": "cluster.time_limit_min",
    "nodes": "cluster.nodes",
    "ntasks": _LENGTH,
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
}
_SBATCH_OURS = (
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
    "ntasks": _LENGTH,
    "ntasks-per-node": "cluster.tasks_per_node",
    "cpus-per-task": "cluster.cpus_per_task",
    "gpus-per-node": "cluster.gpus_per_node",
}
_SRUN_OURS = ("error", "input", "job-name", "kill-on-bad-exit", "multi-prog", "open-mode", "output", "pty", "test-only")


def without_value(value: str) -> str | bool | None:
    """A flag's value as YAML has it: `exclusive: true` is a flag without one (True), `false` leaves it out (None)."""
    return {"true": True, "false": None}.get(value.lower(), value)


def collisions(cluster: ClusterConfig) -> list[str]:
    """Further flags that would undo what other keys say, or what a submission stands on."""
    found = []
    for section, flags in (("sbatch", cluster.sbatch), ("srun", cluster.srun)):
        for flag in flags:
            if clash := _collision(section, flag):
                found.append(f"cluster.{section}.{flag}{clash}")
    return found


def _collision(program: str, flag: str) -> str:
    name = flag.replace("_", "-")
    if name.startswith("-") or len(name) == 1:
        return ": write the flag's long name without dashes, such as mail-type"
    keys, ours = (_SBATCH_KEYS, _SBATCH_OURS) if program == "sbatch" else (_SRUN_KEYS, _SRUN_OURS)
    if name in keys:
        return f" says again what a key says: use {keys[name]}"
    return f": hpcdist sets --{name} by itself: remove it" if name in ours else ""


def refused(program: str, flags: Mapping[str, str], own: Collection[str] = ()) -> list[str]:
    """Flags that a program of Slurm's does not know or whose values it cannot read. Asks no controller.

    Args:
        own: those that are options of our command, not keys of the config.
    """
    flags = {flag: value for flag, value in flags.items() if not _collision(program, flag)}
    if not flags or _parse_error(program, flags) is None:
        return []
    found = []
    for flag, value in flags.items():
        if (error := _parse_error(program, {flag: value})) is not None:
            where = f"--{flag} {value}" if flag in own else f"cluster.{program}.{flag}={value}"
            unknown = "unrecognized option" in error
            found.append(f"{where}: {program} {'has no such flag' if unknown else f'refuses it: {error}'}")
    return found


def _parse_error(program: str, flags: Mapping[str, str]) -> str | None:
    words = [(flag, without_value(value)) for flag, value in flags.items()]
    options = [f"--{flag}" if value is True else f"--{flag}={value}" for flag, value in words if value is not None]
    try:
        # Options are read in order, and --help ends the program: it parses and does nothing else.
        done = subprocess.run(
            [program, *options, "--help"], capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    if done.returncode == 0:
        return None
    lines = [line for line in done.stderr.splitlines() if not line.startswith("Try ")]
    return "; ".join(line.removeprefix(f"{program}: ").removeprefix("error: ") for line in lines)
