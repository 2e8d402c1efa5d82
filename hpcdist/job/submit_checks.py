"""Checks of a request before its submission: limits of the partitions, hardware of the nodes, and whether they can see
the folder of runs. All problems are reported at once, each with its key and the fix.
"""

import os
import re
import socket
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpcdist.config.cluster_schema import ClusterConfig
from hpcdist.config.schema import Config
from hpcdist.config.slurm_notation import expand
from hpcdist.containers.probe import image_problems
from hpcdist.containers.spec import container_problems, planned_container
from hpcdist.environments.modules import module_problems
from hpcdist.environments.rank_environment import environment_problems
from hpcdist.environments.torch_check import torch_problems
from hpcdist.errors import ConfigError, RunFolderError, TopologyError, UserMistake, local_time, suggestion
from hpcdist.host.json_files import LARGEST, read_json
from hpcdist.host.ownership import user_of
from hpcdist.host.storage import IN_MEMORY, LOCAL, PRIVATE, mount_of
from hpcdist.job import submit
from hpcdist.job.earlier_start import advice, must_wait, reservation_in_the_way
from hpcdist.job.srun import exposed_secrets, option_value, unusable_path
from hpcdist.run import create
from hpcdist.run.folder import RunDir
from hpcdist.run.script_ranks import Spawn, find_spawn, find_spawn_in_copy
from hpcdist.slurm import client
from hpcdist.slurm.client import srun_option_error
from hpcdist.slurm.outer_job import outer_job, without_outer_job
from hpcdist.slurm.output import Partition, SlurmError, count_nodes, parse_memory_mb, parse_minutes
from hpcdist.slurm.placement import requested_cluster


@dataclass
class Findings:
    """The problems that the checks of a submission have found."""

    errors: list[str] = field(default_factory=list)  #: prevent the submission
    warnings: list[str] = field(default_factory=list)
    waits_for_nodes: bool = False  #: whether too few nodes are up now
    nodes: frozenset[str] = frozenset()  #: nodes that are up in the partitions that the job may run in


def requested_partitions(
    cluster: ClusterConfig, partitions: Sequence[Partition], findings: Findings
) -> list[Partition]:
    """Return the partitions that the job may run in; unknown ones become errors."""
    if cluster.partition is None:
        return [partition for partition in partitions if partition.facts.get("Default") == "YES"]
    known = {partition.name: partition for partition in partitions}
    requested = []
    for name in cluster.partition.split(","):
        if name in known:
            requested.append(known[name])
            continue
        hint = suggestion(name, known, f"the cluster has {', '.join(sorted(known))}")
        findings.errors.append(f"cluster.partition={name}: no such partition, {hint}")
    return requested


def check_partitions(cluster: ClusterConfig, partitions: Sequence[Partition], findings: Findings) -> None:
    """Add the findings of the partition that fits best: one that can run the job is enough."""
    results = []
    for partition in partitions:
        result = Findings()
        _check_access(cluster, partition, result)
        _check_size(cluster, partition, result)
        _check_nodes(cluster, partition, result)
        results.append(result)
    if results:
        best = min(results, key=lambda result: (len(result.errors), len(result.warnings)))
        findings.errors += best.errors
        findings.warnings += best.warnings
        findings.waits_for_nodes = best.waits_for_nodes


def _check_access(cluster: ClusterConfig, partition: Partition, findings: Findings) -> None:
    name = partition.name
    state = partition.facts.get("State", "UP")
    if state != "UP":
        findings.warnings.append(f"cluster.partition={name} starts no jobs (state {state}): the run will wait")
    for kind, key, value in (("Accounts", "account", cluster.account), ("Qos", "qos", cluster.qos)):
        allowed = partition.allowed(kind)
        if value is not None and allowed is not None and value not in allowed:
            findings.errors.append(f"cluster.{key}={value} may not use partition {name}: use {', '.join(allowed)}")


def _check_size(cluster: ClusterConfig, partition: Partition, findings: Findings) -> None:
    name = partition.name
    max_min = parse_minutes(partition.facts.get("MaxTime", ""))
    if max_min is not None and cluster.time_limit_min > max_min:
        findings.errors.append(
            f"cluster.time_limit_min={cluster.time_limit_min}: partition {name} allows {max_min:g}: lower it; a longer"
            " run saves, requeues itself and continues"
        )
    total = count_nodes(partition.nodes)
    limit = partition.limit("MaxNodes")
    most = total if limit is None else min(total, limit)
    fewest = cluster.fewest_nodes + cluster.spare_nodes
    if total and fewest > most:
        why = f"has {total}" if most == total else f"allows {most} per job"
        asked = _fewest_nodes_text(cluster)
        findings.errors.append(f"{asked}: partition {name} {why}: lower it or choose another")


def _fewest_nodes_text(cluster: ClusterConfig) -> str:
    """Return the keys and values that make the least number of nodes that a job needs."""
    text = f"cluster.nodes={cluster.nodes}"
    if cluster.min_nodes is not None:
        text = f"cluster.min_nodes={cluster.min_nodes}"
    if cluster.spare_nodes:
        text += f" and cluster.spare_nodes={cluster.spare_nodes}"
    return text


def _check_nodes(cluster: ClusterConfig, partition: Partition, findings: Findings) -> None:
    """Compare the requested hardware with that of the nodes. Partitions without nodes have no findings."""
    nodes = partition.nodes
    if not nodes:
        return
    name = partition.name
    kind = cluster.gpu_type
    cpus = cluster.tasks_per_node * cluster.cpus_per_task
    gpus = cluster.gpus_per_node
    memory_mb = parse_memory_mb(cluster.mem or "0") or 0
    tasks = f"cluster.tasks_per_node={cluster.tasks_per_node} × cluster.cpus_per_task={cluster.cpus_per_task}"
    gpu_unit = f"GPUs of type {kind} (its types: {_gpu_types(partition)})" if kind else "GPUs"
    requests = (
        (tasks, cpus, max(group.cpus for group in nodes), "cores"),
        (f"cluster.gpus_per_node={cluster.gpu_request}", gpus, max(group.gpus_of(kind) for group in nodes), gpu_unit),
        (f"cluster.mem={cluster.mem}", memory_mb, max(group.memory_mb for group in nodes), "MiB"),
    )
    too_large = [
        f"{request}: partition {name} offers at most {most} {unit} per node: lower it or choose another"
        for request, requested, most, unit in requests
        if requested > most
    ]
    findings.errors += too_large
    fewest = cluster.fewest_nodes + cluster.spare_nodes
    if too_large or fewest > count_nodes(nodes):
        return
    fitting = [
        group for group in nodes if group.cpus >= cpus and group.gpus_of(kind) >= gpus and group.memory_mb >= memory_mb
    ]
    num_fitting = count_nodes(fitting)
    num_up = count_nodes([group for group in fitting if group.usable])
    if fewest > num_fitting:
        why = f"{num_fitting} nodes of partition {name} have the requested hardware: lower the number or the request"
        findings.errors.append(f"{_fewest_nodes_text(cluster)}: {why}")
    elif fewest > num_up:
        findings.warnings.append(
            f"only {num_up} of the {num_fitting} matching nodes of {name} are up: the run will wait"
        )
        findings.waits_for_nodes = True


def _gpu_types(partition: Partition) -> str:
    """Return the names of the types of GPUs in a partition, for a message."""
    types: set[str] = set()
    for group in partition.nodes:
        types.update(group.gpu_types)
    return ", ".join(sorted(types)) or "none"


def check_runs_dir(runs_dir: Path, file_system: str, findings: Findings) -> None:
    """Add the finding about a runs folder that the nodes do not see, or may not see."""
    folder = runs_dir.resolve()
    private = next((place for place in PRIVATE if folder.is_relative_to(place)), None)
    if file_system in IN_MEMORY or (private is not None and file_system in LOCAL):
        reason = f"{file_system} is in this machine's memory"
        if private:
            reason = f"each machine has its own {private}"
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
    problems = []
    for program, flags in (("sbatch", cluster.sbatch), ("srun", cluster.srun)):
        for flag in flags:
            problem = _conflict(program, flag)
            if problem and is_set.get(flag.replace("_", "-"), True):
                problems.append(f"cluster.{program}.{flag}{problem}")
    return problems


#: An entry of --gres that requests GPUs.
_GPU_GRES = re.compile(r"(^|,)\s*(gres[:/])?gpu(?=[:=,]|$)")


def gpu_conflicts(cluster: ClusterConfig, env: Mapping[str, str]) -> list[str]:
    """Return a problem for each option or variable with which Slurm 26.05 refuses --gpus-per-node."""
    if cluster.gpus_per_node:
        asked = f"cluster.gpus_per_node={cluster.gpu_request}"
    elif "SBATCH_GPUS_PER_NODE" in env:
        asked = "SBATCH_GPUS_PER_NODE"
    else:
        return []
    given = {
        "cluster.sbatch.gres": cluster.sbatch.get("gres", ""),
        "cluster.srun.gres": cluster.srun.get("gres", ""),
        "SBATCH_GRES in your environment": env.get("SBATCH_GRES", ""),
        "SLURM_GRES in your environment": env.get("SLURM_GRES", ""),
    }
    return [
        f"{place} ({value}) requests GPUs beside {asked}, which Slurm refuses:"
        " remove it; cluster.gpus_per_node: a100:4 requests a type"
        for place, value in given.items()
        if _GPU_GRES.search(value)
    ]


def _conflict(program: str, flag: str) -> str:
    """Return the end of a sentence that explains why a flag must not be set; "" if it may be."""
    name = flag.replace("_", "-")
    if program == "sbatch":
        keys, reserved = _SBATCH_KEYS, _SBATCH_RESERVED
    else:
        keys, reserved = _SRUN_KEYS, _SRUN_RESERVED
    if name in keys:
        return f" repeats a key of the config: use {keys[name]}"
    if name in reserved:
        return f": hpcdist controls --{name}: remove it"
    return ""


def rejected_flags(flags: Mapping[str, str]) -> list[str]:
    """Return a problem for each flag that srun does not know; sbatch reports its own."""
    problems = []
    for flag, text in flags.items():
        value = option_value(text)
        if value is None or _conflict("srun", flag):
            continue
        error = srun_option_error(flag, value)
        if error is not None:
            problems.append(f"cluster.srun.{flag}={text}: srun rejects it: {error}")
    return problems


# The checks of a submission.
#
# Slurm accepts requests that never start, such as a time above the partition's limit, and gives few details when it
# rejects one. These checks run before `sbatch --test-only`. If that rejects the request, it counts as well, unless the
# job would only wait.


def check_config(config: Config, cwd: Path | None) -> None:
    """Check a config without a cluster; `cwd` as for `check_submission`. Raises ConfigError with all problems."""
    problems = _config_problems(config, cwd)
    if problems:
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
        box = planned_container(config, folder, without_outer_job(os.environ))
        if box is not None:
            findings.warnings += box.inherited.notes
    blocking = list(problems)
    if not force:
        blocking += findings.errors
    estimate = ""
    if not problems:
        try:
            estimate = submit.estimate_start(config, flags)
            if not flags and must_wait(estimate, time.time()):  # with flags, the user has asked for a later start
                findings.warnings += _earlier_start(config, findings.nodes)
        except UserMistake as error:
            rejection = _explain_rejection(str(error), config.cluster)
            # `sbatch --test-only` refuses jobs that sbatch accepts: those that wait for a reservation, or for nodes.
            later = _reservation_begins(config.cluster) if "Invalid time specified" in rejection else ""
            unavailable = "Requested node configuration is not available" in rejection
            reserved = _earlier_start(config, findings.nodes, only_reserved=True) if unavailable else []
            waits = findings.waits_for_nodes and unavailable
            is_about_account = rejection != str(error)
            if later:
                findings.warnings.append(later)
            elif reserved:
                findings.warnings += reserved
            elif force:
                findings.warnings.append(rejection)
            elif is_about_account or not (blocking or waits):
                # Otherwise the problems that these checks have found are more precise than Slurm's reason.
                blocking.append(rejection)
    if blocking:
        raise ConfigError(*blocking)
    return findings.errors + findings.warnings, estimate


def _earlier_start(config: Config, nodes: Collection[str], *, only_reserved: bool = False) -> list[str]:
    """Return a note on what would start now in place of a job that must wait; none without a useful answer.

    Args:
        only_reserved: only if a reservation keeps the job waiting.
    """
    now = time.time()
    reservation = reservation_in_the_way(config, nodes, now)
    if only_reserved and reservation is None:
        return []
    text = advice(config, nodes, reservation, now)
    return [text] if text else []


def _check_cluster(config: Config, missing_data: str) -> Findings:
    """Compare a config with the cluster, this machine and earlier runs."""
    findings = Findings()
    requested: list[Partition] = []
    with suppress(SlurmError):  # sbatch reports it
        cluster = requested_cluster(config)
        requested = requested_partitions(cluster, client.partitions(), findings)
        check_partitions(cluster, requested, findings)
    _check_qos(config.cluster.qos, findings)
    nodes: set[str] = set()
    for partition in requested:
        for group in partition.nodes:
            nodes.update(expand(group.names))
    excluded: set[str] = set()
    if config.cluster.exclude:
        with suppress(TopologyError):  # sbatch reports it
            excluded.update(expand(config.cluster.exclude))
    for partition in requested:
        for group in partition.nodes:
            if group.usable:
                findings.nodes |= set(expand(group.names)) - excluded
    this_machine = socket.gethostname().partition(".")[0]
    if nodes != {this_machine}:
        runs_dir = Path(config.runs_dir)
        file_system = mount_of(runs_dir)[0]
        check_runs_dir(runs_dir, file_system, findings)
    _check_run(config, missing_data, findings)
    findings.errors += module_problems(config, os.environ)
    missing_torch = torch_problems(config, {**os.environ, **config.cluster.env}, on_slurm=True)
    if config.cluster.setup:  # these commands may provide it; the job checks it again
        findings.warnings += missing_torch
    else:
        findings.errors += missing_torch
    inherited = sorted(name for name in os.environ if name.startswith("SBATCH_"))
    if inherited:
        findings.warnings.append(
            f"{', '.join(inherited)} in your environment overrides the batch script: unset it if you do not need it"
        )
    around = outer_job(os.environ)
    if around:
        findings.warnings.append(f"submitted from inside {around}: its variables do not reach the new job")
    return findings


def _check_qos(qos: str | None, findings: Findings) -> None:
    """Add an error for an unknown QOS: without enforced limits Slurm accepts such a job and never starts it."""
    if qos is None:
        return
    with suppress(SlurmError):  # a cluster without accounting
        known = client.qos_names()
        if known and qos not in known:
            findings.errors.append(f"cluster.qos={qos}: no such QOS, the cluster has {', '.join(known)}")


def _config_problems(config: Config, cwd: Path | None) -> list[str]:
    """Return the problems of a config that can be found without a cluster."""
    cluster = requested_cluster(config)
    problems = (
        conflicting_flags(cluster) + gpu_conflicts(cluster, without_outer_job(os.environ)) + exposed_secrets(config)
    )
    folder = Path(config.runs_dir).absolute() / config.experiment / (config.name or "")
    path_problem = unusable_path(folder)
    if path_problem:
        problems.append(path_problem)
    if cluster.mem is not None and parse_memory_mb(cluster.mem) is None:
        problems.append(f"cluster.mem={cluster.mem} is not a memory size: write 64G, or MiB without a unit")
    try:
        if cwd is not None:
            create.check_trainer(config, cwd, num_ranks=cluster.nodes * cluster.tasks_per_node)
    except ConfigError as error:
        problems += error.problems
    return problems + _spawn_problems(config, cluster, cwd)


def _spawn_problems(config: Config, cluster: ClusterConfig, cwd: Path | None) -> list[str]:
    """Return the keys that would start a script several times that starts its own ranks. `cwd`: see above."""
    run = RunDir(config.folder)
    spawn: Spawn | None = None
    if cwd is not None:
        spawn = find_spawn(config, [cwd])
    elif run.environment.exists():
        spawn = find_spawn_in_copy(config, run)
    if spawn is None:
        return []
    return spawn.problems(config, cluster)


def _explain_rejection(reason: str, cluster: ClusterConfig) -> str:
    """Return Slurm's reason, with the key and the user's accounts if it is about the account."""
    if "account" not in reason.lower():
        return reason
    setting = f"cluster.account={cluster.account}" if cluster.account else "cluster.account is not set"
    try:
        names = client.user_accounts(user_of(os.geteuid()))
    except SlurmError:
        names = []
    if not names:
        return f"{setting}: {reason}"
    return f"{setting}: {reason}; your accounts are {', '.join(names)}"


def _reservation_begins(cluster: ClusterConfig) -> str:
    """Return a warning if the job waits for its reservation, which begins later and is long enough; else ""."""
    name = cluster.sbatch.get("reservation", "")
    if not name:
        return ""
    try:
        begin, end = client.reservation_times(name)
    except SlurmError:
        return ""
    if begin is None or end is None:
        return ""
    is_long_enough = end - begin >= 60 * cluster.time_limit_min
    if begin <= time.time() or not is_long_enough:
        return ""
    return f"cluster.sbatch.reservation={name} begins at {local_time(begin)}: the run will wait until then"


def _check_run(config: Config, missing_data: str, findings: Findings) -> None:
    """Check the times, the batch size and the data of the run."""
    cluster = config.cluster
    lead_s = cluster.signal_lead_s
    limit_s = cluster.time_limit_min * 60
    if lead_s >= limit_s:
        findings.errors.append(
            f"cluster.signal_lead_s={lead_s}: the run would be stopped at its start, because cluster.time_limit_min="
            f"{cluster.time_limit_min} is {limit_s} s: lower the first or raise the second"
        )
    save_s, name = longest_save(Path(config.runs_dir) / config.experiment)
    # The ranks may be saving already when the signal arrives, and then save again.
    least_lead_s = 2 * save_s
    if lead_s < least_lead_s:
        findings.warnings.append(
            f"cluster.signal_lead_s={lead_s}: run {name} needed {save_s:.0f} s for a checkpoint:"
            f" set at least twice that, cluster.signal_lead_s={least_lead_s:.0f}"
        )
    if cluster.fewest_nodes < cluster.nodes and config.data.global_batch_size is None and not config.trainer.script:
        findings.warnings.append(
            f"cluster.min_nodes={cluster.min_nodes} without data.global_batch_size: the batch of a step, and so the"
            " training, depends on the number of nodes"
        )
    if missing_data and not config.trainer.script:
        if config.data.name == "image_folder":
            fix = "put it there, or point data.root (or HPCDIST_DATA_DIR) at it"
            findings.errors.append(f"{missing_data}: {fix}")
        else:
            findings.warnings.append(f"{missing_data}: the nodes will download it if they have internet access")


def longest_save(experiment: Path) -> tuple[float, str]:
    """Return the longest time, in seconds, in which a run of an experiment has saved a checkpoint, and the run's name.

    Without checkpoints the time is 0 and the name is empty.
    """
    saves = []
    for path in experiment.glob("*/checkpoints/step-*/manifest.json"):
        with suppress(RunFolderError, OSError):  # damaged files of other runs do not matter here
            seconds: Any = (read_json(path) or {}).get("write_s")
            if type(seconds) in (int, float) and 0 <= seconds <= LARGEST:
                saves.append((float(seconds), path.parents[2].name))
    return max(saves, default=(0.0, ""))
