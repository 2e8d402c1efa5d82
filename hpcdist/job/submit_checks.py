"""Checks of a request before its submission: limits of the partitions, hardware of the nodes, and whether they can see
the folder of runs. All problems are reported at once, each with its key and the fix.
"""

import os
import re
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpcdist.config.cluster_schema import ClusterConfig
from hpcdist.config.schema import Config
from hpcdist.config.slurm_notation import expand
from hpcdist.containers.probe import image_problems
from hpcdist.containers.spec import container_problems
from hpcdist.environments.modules import module_problems
from hpcdist.environments.rank_environment import environment_problems
from hpcdist.environments.torch_check import torch_problems
from hpcdist.errors import ConfigError, RunFolderError, UserMistake, suggestion
from hpcdist.host.json_files import LARGEST, read_json
from hpcdist.host.ownership import user_of
from hpcdist.host.storage import IN_MEMORY, LOCAL, PRIVATE, mount_of
from hpcdist.job import submit
from hpcdist.job.srun import exposed_secrets, option_value, unusable_path
from hpcdist.run import create
from hpcdist.slurm import client
from hpcdist.slurm.client import srun_option_error
from hpcdist.slurm.output import Partition, SlurmError, count_nodes, parse_memory_mb, parse_minutes
from hpcdist.slurm.placement import requested_cluster


@dataclass
class Findings:
    errors: list[str] = field(default_factory=list)  #: prevent the submission
    warnings: list[str] = field(default_factory=list)
    waits_for_nodes: bool = False  #: whether too few nodes are up now


def requested_partitions(
    cluster: ClusterConfig, partitions: Sequence[Partition], findings: Findings
) -> list[Partition]:
    """Return the partitions that the job may run in; unknown ones become errors."""
    if cluster.partition is None:
        return [partition for partition in partitions if partition.facts.get("Default") == "YES"]
    known = {partition.name: partition for partition in partitions}
    found = []
    for name in cluster.partition.split(","):
        if name in known:
            found.append(known[name])
            continue
        hint = suggestion(name, known, f"the cluster has {', '.join(sorted(known))}")
        findings.errors.append(f"cluster.partition={name}: no such partition, {hint}")
    return found


def check_partitions(cluster: ClusterConfig, partitions: Sequence[Partition], findings: Findings) -> None:
    """Add the findings of the partition that fits best: one that can run the job is enough."""
    results = []
    for partition in partitions:
        results.append(result := Findings())
        _check_access(cluster, partition, result)
        _check_size(cluster, partition, result)
        _check_nodes(cluster, partition, result)
    if results:
        best = min(results, key=lambda result: (len(result.errors), len(result.warnings)))
        findings.errors += best.errors
        findings.warnings += best.warnings
        findings.waits_for_nodes = best.waits_for_nodes


def _check_access(cluster: ClusterConfig, partition: Partition, findings: Findings) -> None:
    name, state, error = partition.name, partition.facts.get("State", "UP"), findings.errors.append
    if state != "UP":
        findings.warnings.append(f"cluster.partition={name} starts no jobs (state {state}): the run will wait")
    for kind, key, value in (("Accounts", "account", cluster.account), ("Qos", "qos", cluster.qos)):
        allowed = partition.allowed(kind)
        if value is not None and allowed is not None and value not in allowed:
            error(f"cluster.{key}={value} may not use partition {name}: use {', '.join(allowed)}")


def _check_size(cluster: ClusterConfig, partition: Partition, findings: Findings) -> None:
    name, error = partition.name, findings.errors.append
    max_min = parse_minutes(partition.facts.get("MaxTime", ""))
    if max_min is not None and cluster.time_limit_min > max_min:
        why = "lower it; a longer run saves, requeues itself and continues"
        error(f"cluster.time_limit_min={cluster.time_limit_min}: partition {name} allows {max_min:g}: {why}")
    total = count_nodes(partition.nodes)
    limit = partition.limit("MaxNodes")
    most = total if limit is None else min(total, limit)
    asked, fewest = _requested(cluster)
    if total and fewest > most:
        why = f"has {total}" if most == total else f"allows {most} per job"
        error(f"{asked}: partition {name} {why}: lower it or choose another")


def _requested(cluster: ClusterConfig) -> tuple[str, int]:
    """Return the keys and values of the least number of nodes that a job needs, and that number."""
    asked = f"cluster.nodes={cluster.nodes}" if cluster.min_nodes is None else f"cluster.min_nodes={cluster.min_nodes}"
    spare = f" and cluster.spare_nodes={cluster.spare_nodes}" if cluster.spare_nodes else ""
    return asked + spare, cluster.fewest_nodes + cluster.spare_nodes


def _check_nodes(cluster: ClusterConfig, partition: Partition, findings: Findings) -> None:
    name, nodes, gpus, kind = partition.name, partition.nodes, cluster.gpus_per_node, cluster.gpu_type
    cpus = cluster.tasks_per_node * cluster.cpus_per_task
    memory = parse_memory_mb(cluster.mem or "0") or 0
    types = ", ".join(sorted({own for group in nodes for own in group.gpu_types})) or "none"
    unit = f"GPUs of type {kind} (its types: {types})" if kind else "GPUs"
    most_gpus = max((group.gpus_of(kind) for group in nodes), default=0)
    tasks = f"cluster.tasks_per_node={cluster.tasks_per_node} × cluster.cpus_per_task={cluster.cpus_per_task}"
    too_large = [
        f"{request}: partition {name} offers at most {most} {unit} per node: lower it or choose another"
        for request, requested, most, unit in (
            (tasks, cpus, max((group.cpus for group in nodes), default=0), "cores"),
            (f"cluster.gpus_per_node={cluster.gpu_request}", gpus, most_gpus, unit),
            (f"cluster.mem={cluster.mem}", memory, max((group.memory_mb for group in nodes), default=0), "MiB"),
        )
        if nodes and requested > most
    ]
    findings.errors += too_large
    asked, fewest = _requested(cluster)
    if too_large or fewest > count_nodes(nodes):
        return
    fitting = [g for g in nodes if g.cpus >= cpus and g.gpus_of(kind) >= gpus and g.memory_mb >= memory]
    total, up = count_nodes(fitting), count_nodes([group for group in fitting if group.usable])
    if fewest > total:
        why = f"{total} nodes of partition {name} have the requested hardware: lower the number or the request"
        findings.errors.append(f"{asked}: {why}")
    elif fewest > up:
        findings.warnings.append(f"only {up} of the {total} matching nodes of {name} are up: the run will wait")
        findings.waits_for_nodes = True


def check_runs_dir(runs_dir: Path, file_system: str, findings: Findings) -> None:
    """Add the finding about a runs folder that the nodes do not see, or may not see."""
    private = next((place for place in PRIVATE if runs_dir.resolve().is_relative_to(place)), None)
    if file_system in IN_MEMORY or (private is not None and file_system in LOCAL):
        reason = f"each machine has its own {private}" if private else f"{file_system} is in this machine's memory"
        findings.errors.append(
            f"runs_dir={runs_dir}: {reason}, and the nodes would not see the run folder:"
            " set runs_dir (or HPCDIST_RUNS_DIR) to a folder on a shared file system"
        )
    elif file_system in LOCAL:
        findings.warnings.append(
            f"runs_dir={runs_dir} is on {file_system}, a file system of this machine: the nodes must see it under the"
            " same path"
        )


# Additional flags of sbatch and srun (`cluster.sbatch`, `cluster.srun`).

#: Flags that hpcdist sets from a key of the config, with that key.
_SBATCH_KEYS = {
    **{key: f"cluster.{key}" for key in ("nodes", "partition", "account", "qos", "mem", "constraint", "exclude")},
    "job-name": "name",
    "time": "cluster.time_limit_min",
    "ntasks": "cluster.nodes and cluster.tasks_per_node",
    "ntasks-per-node": "cluster.tasks_per_node",
    "cpus-per-task": "cluster.cpus_per_task",
    "gpus-per-node": "cluster.gpus_per_node",
    "gpus": "cluster.gpus_per_node",
    "signal": "cluster.signal_lead_s",
    "no-kill": "cluster.min_nodes or cluster.spare_nodes",
    "mincpus": "cluster.cpus_per_task",
}
#: Flags that hpcdist sets itself.
_SBATCH_RESERVED = {
    *("array", "chdir", "error", "input", "no-requeue", "open-mode", "output", "parsable", "test-only", "wait", "wrap")
}
_SRUN_KEYS = {
    key: _SBATCH_KEYS[key] for key in ("nodes", "ntasks", "ntasks-per-node", "cpus-per-task", "gpus-per-node")
}
_SRUN_RESERVED = {
    *("chdir", "error", "export", "export-file", "input", "jobid", "job-name", "kill-on-bad-exit", "multi-prog"),
    *("nodelist", "open-mode", "output", "pty", "relative", "test-only", "wait"),
}


def conflicting_flags(cluster: ClusterConfig) -> list[str]:
    """Return a problem for each flag that another key of the config or hpcdist itself sets."""
    # hpcdist sets these only for a run that may lose nodes, or with a range of nodes.
    is_set = {"no-kill": cluster.outlives_nodes, "mincpus": cluster.fewest_nodes < cluster.nodes}
    return [
        f"cluster.{program}.{flag}{problem}"
        for program, flags in (("sbatch", cluster.sbatch), ("srun", cluster.srun))
        for flag in flags
        if (problem := _conflict(program, flag)) and is_set.get(flag.replace("_", "-"), True)
    ]


def gpu_conflicts(cluster: ClusterConfig, env: Mapping[str, str]) -> list[str]:
    """Return a problem for each option or variable with which Slurm 26.05 refuses --gpus-per-node."""
    asked = f"cluster.gpus_per_node={cluster.gpu_request}" if cluster.gpus_per_node else "SBATCH_GPUS_PER_NODE"
    if not cluster.gpus_per_node and "SBATCH_GPUS_PER_NODE" not in env:
        return []
    given = {f"cluster.{name}.gres": getattr(cluster, name).get("gres", "") for name in ("sbatch", "srun")}
    given |= {f"{name} in your environment": env.get(name, "") for name in ("SBATCH_GRES", "SLURM_GRES")}
    return [
        f"{place} ({value}) requests GPUs beside {asked}, which Slurm refuses:"
        " remove it; cluster.gpus_per_node: a100:4 requests a type"
        for place, value in given.items()
        if re.search(r"(^|,)\s*(gres[:/])?gpu(?=[:=,]|$)", value)  # an entry of --gres
    ]


def _conflict(program: str, flag: str) -> str:
    name = flag.replace("_", "-")
    keys, reserved = (_SBATCH_KEYS, _SBATCH_RESERVED) if program == "sbatch" else (_SRUN_KEYS, _SRUN_RESERVED)
    if name in keys:
        return f" repeats a key of the config: use {keys[name]}"
    return f": hpcdist controls --{name}: remove it" if name in reserved else ""


def rejected_flags(flags: Mapping[str, str]) -> list[str]:
    """Return a problem for each flag that srun does not know; sbatch reports its own."""
    values = {flag: option_value(value) for flag, value in flags.items() if not _conflict("srun", flag)}
    errors = {flag: srun_option_error(flag, value) for flag, value in values.items() if value is not None}
    return [
        f"cluster.srun.{flag}={flags[flag]}: srun rejects it: {error}"
        for flag, error in errors.items()
        if error is not None
    ]


# The checks of a submission.
#
# Slurm accepts requests that never start, such as a time above the partition's limit, and gives few details when it
# rejects one. These checks run before `sbatch --test-only`, whose rejection also counts unless the job only waits.


def check_config(config: Config, cwd: Path | None) -> None:
    """Check a config without a cluster; `cwd` as for `check_submission`. Raises ConfigError with all problems."""
    if problems := _config_problems(config, cwd):
        raise ConfigError(*problems)


def check_submission(
    config: Config, flags: Mapping[str, str], cwd: Path | None, *, missing_data: str, force: bool
) -> tuple[list[str], str]:
    """Check a submission against the cluster, without side effects; returns warnings and the estimated start.

    Args:
        flags: sbatch flags of this submission only.
        cwd: folder with the user's modules; None for a run with a copy of them in its folder.
        missing_data: a message if the dataset is not on disk, else empty.
        force: report problems with the cluster as warnings, also Slurm's; problems of the config stay errors.
    """
    submit.require_sbatch()
    problems = _config_problems(config, cwd)
    if exposed_secrets(config):
        # The following checks would pass the secrets to other programs on command lines.
        raise ConfigError(*problems)
    problems += rejected_flags(config.cluster.srun)
    folder = cwd or Path.cwd()
    of_container = container_problems(config, folder)
    problems += of_container
    problems += environment_problems(config, os.environ)
    findings = _check_cluster(config, missing_data)
    if not of_container:
        # Forced where only the nodes can start the image, such as one for another processor architecture.
        findings.errors += image_problems(config, folder, os.environ)
    blocking = problems + ([] if force else findings.errors)
    estimate = ""
    if not problems:
        try:
            estimate = submit.estimate_start(config, flags)
        except UserMistake as error:
            rejection = _explain_rejection(str(error), config.cluster)
            # `sbatch --test-only` refuses what sbatch accepts: a job that waits for its reservation, or for nodes.
            later = _reservation_begins(config.cluster) if "Invalid time specified" in rejection else ""
            waits = findings.waits_for_nodes and "Requested node configuration is not available" in rejection
            if later:
                findings.warnings.append(later)
            elif force:
                findings.warnings.append(rejection)
            # Problems that these checks have found are more precise than Slurm's reason, except about accounts.
            elif rejection != str(error) or not (blocking or waits):
                blocking = [*blocking, rejection]
    if blocking:
        raise ConfigError(*blocking)
    return findings.errors + findings.warnings, estimate


def _check_cluster(config: Config, missing_data: str) -> Findings:
    findings = Findings()
    requested: list[Partition] = []
    with suppress(SlurmError):  # sbatch reports it
        cluster = requested_cluster(config)
        requested = requested_partitions(cluster, client.partitions(), findings)
        check_partitions(cluster, requested, findings)
    if config.cluster.qos is not None:
        # Without enforced limits Slurm accepts a job with an unknown QOS and never starts it.
        with suppress(SlurmError):  # a cluster without accounting
            known = client.qos_names()
            if known and config.cluster.qos not in known:
                findings.errors.append(
                    f"cluster.qos={config.cluster.qos}: no such QOS, the cluster has {', '.join(known)}"
                )
    nodes = {node for partition in requested for group in partition.nodes for node in expand(group.names)}
    if nodes != {socket.gethostname().partition(".")[0]}:
        check_runs_dir(Path(config.runs_dir), mount_of(Path(config.runs_dir))[0], findings)
    _check_run(config, missing_data, findings)
    findings.errors += module_problems(config, os.environ)
    missing_torch = torch_problems(config, {**os.environ, **config.cluster.env}, on_slurm=True)
    if config.cluster.setup:  # these commands may provide it; the job checks it again
        findings.warnings += missing_torch
    else:
        findings.errors += missing_torch
    if inherited := sorted(name for name in os.environ if name.startswith("SBATCH_")):
        findings.warnings.append(
            f"{', '.join(inherited)} in your environment overrides the batch script: unset what you do not need"
        )
    return findings


def _config_problems(config: Config, cwd: Path | None) -> list[str]:
    cluster = requested_cluster(config)
    problems = conflicting_flags(cluster) + gpu_conflicts(cluster, os.environ) + exposed_secrets(config)
    folder = Path(config.runs_dir).absolute() / config.experiment / (config.name or "")
    problems += filter(None, [unusable_path(folder)])
    if cluster.mem is not None and parse_memory_mb(cluster.mem) is None:
        problems.append(f"cluster.mem={cluster.mem} is not a memory size: write 64G, or MiB without a unit")
    try:
        if cwd is not None:
            create.check_trainer(config, cwd)
    except ConfigError as error:
        problems += error.problems
    return problems


def _explain_rejection(reason: str, cluster: ClusterConfig) -> str:
    """Return Slurm's reason, with the key and the user's accounts if it is about the account."""
    if "account" not in reason.lower():
        return reason
    setting = f"cluster.account={cluster.account}" if cluster.account else "cluster.account is not set"
    try:
        names = client.user_accounts(user_of(os.geteuid()))
    except SlurmError:
        names = []
    return f"{setting}: {reason}" + (f"; your accounts are {', '.join(names)}" if names else "")


def _reservation_begins(cluster: ClusterConfig) -> str:
    """Return a warning if the job waits for its reservation, which begins later and is long enough; else ""."""
    name = cluster.sbatch.get("reservation", "")
    try:
        began, ended = client.reservation_times(name) if name else (None, None)
    except SlurmError:
        return ""
    if began is None or ended is None or began <= time.time() or ended - began < 60 * cluster.time_limit_min:
        return ""
    clock = time.strftime("%Y-%m-%d %H:%M", time.localtime(began))
    return f"cluster.sbatch.reservation={name} begins at {clock}: the run will wait until then"


def _check_run(config: Config, missing_data: str, findings: Findings) -> None:
    cluster = config.cluster
    lead, limit_s = cluster.signal_lead_s, cluster.time_limit_min * 60
    if lead >= limit_s:
        findings.errors.append(
            f"cluster.signal_lead_s={lead}: the run would be stopped at its start, because cluster.time_limit_min="
            f"{cluster.time_limit_min} is {limit_s} s: lower the first or raise the second"
        )
    save_s, name = longest_save(Path(config.runs_dir) / config.experiment)
    # The ranks may be saving already when the signal arrives, and then save again.
    if lead < 2 * save_s:
        findings.warnings.append(
            f"cluster.signal_lead_s={lead}: run {name} needed {save_s:.0f} s for a checkpoint:"
            f" set at least twice that, cluster.signal_lead_s={2 * save_s:.0f}"
        )
    if cluster.fewest_nodes < cluster.nodes and config.data.global_batch_size is None and not config.trainer.script:
        findings.warnings.append(
            f"cluster.min_nodes={cluster.min_nodes} without data.global_batch_size: the batch of a step, and so the"
            " training, depends on the number of nodes"
        )
    if missing_data and not config.trainer.script:
        if config.data.name != "image_folder":
            findings.warnings.append(f"{missing_data}: the nodes will download it if they have internet access")
        else:
            fix = "put it there, or point data.root (or HPCDIST_DATA_DIR) at it"
            findings.errors.append(f"{missing_data}: {fix}")


def longest_save(experiment: Path) -> tuple[float, str]:
    saves = []
    for path in experiment.glob("*/checkpoints/step-*/manifest.json"):
        with suppress(RunFolderError, OSError):  # damaged files of other runs do not matter here
            seconds: Any = (read_json(path) or {}).get("write_s")
            if type(seconds) in (int, float) and 0 <= seconds <= LARGEST:
                saves.append((float(seconds), path.parents[2].name))
    return max(saves, default=(0.0, ""))
