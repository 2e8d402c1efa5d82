"""Checks of a request before its submission. All problems are reported at once, each with its key and the fix.

Slurm accepts requests that never start, such as a time above the partition's limit, and gives few details when it
rejects one. These checks run before `sbatch --test-only`; its rejection also counts.
"""

from __future__ import annotations

import os
import pwd
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hpcdist.config.schema import ClusterConfig, Config
from hpcdist.containers.rank_container import container_problems
from hpcdist.environments.environment_checks import environment_problems, module_problems
from hpcdist.environments.torch_checks import torch_problems
from hpcdist.errors import ConfigError, RunFolderError, UserMistake
from hpcdist.files.atomic import read_json
from hpcdist.files.formats import LARGEST
from hpcdist.machine.storage import file_system
from hpcdist.run import create
from hpcdist.slurm import client
from hpcdist.slurm.client import SlurmError
from hpcdist.slurm.cluster_nodes import Partition
from hpcdist.slurm.exposed_secrets import exposed_secrets
from hpcdist.slurm.extra_flags import conflicting_flags, rejected_flags
from hpcdist.slurm.job_components import allocations, component_cluster
from hpcdist.slurm.nodelist import expand
from hpcdist.slurm.submit import submission
from hpcdist.slurm.submit.partition_limits import Findings, check_partitions, requested_partitions
from hpcdist.slurm.submit.runs_dir_check import runs_dir_problems


def check_config(config: Config, cwd: Path) -> None:
    """Check a config without a cluster. Raises ConfigError with all problems."""
    if problems := _config_problems(config, cwd):
        raise ConfigError(problems)


def check_submission(
    config: Config, flags: Mapping[str, str], cwd: Path | None, *, missing_data: str, force: bool
) -> tuple[list[str], str]:
    """Check a submission against the cluster, without side effects; returns warnings and the estimated start.

    Args:
        flags: sbatch flags of this submission only.
        cwd: folder with the user's modules; None for a run with a copy of them in its folder.
        missing_data: a message if the dataset is not on disk, else empty.
        force: report problems with the cluster as warnings. Problems of the config and Slurm's rejection stay errors.

    Raises ConfigError with all problems, UserMistake if Slurm is not installed.
    """
    submission.require_sbatch()
    problems = _config_problems(config, cwd)
    if exposed_secrets(config):
        # The following checks would pass the secrets to other programs on command lines.
        raise ConfigError(problems)
    requests = _requests(config)
    sbatch_flags = {name: value for cluster in requests for name, value in cluster.sbatch.items()}
    problems += rejected_flags("sbatch", {**sbatch_flags, **flags}, options=flags)
    problems += rejected_flags("srun", config.cluster.srun)
    problems += container_problems(config, cwd or Path.cwd(), os.environ)
    problems += environment_problems(config, os.environ)
    findings = _check_cluster(config, requests, missing_data)
    blocking = problems + ([] if force else findings.errors)
    estimate = ""
    if not problems:
        try:
            estimate = submission.estimate_start(config, flags)
        except UserMistake as error:
            rejection = _explain_rejection(str(error), config.cluster)
            # Problems that these checks have found are more precise than Slurm's reason, except about accounts.
            if not blocking or rejection != str(error):
                blocking = [*blocking, rejection]
    if blocking:
        raise ConfigError(blocking)
    return findings.errors + findings.warnings, estimate


def _requests(config: Config) -> list[ClusterConfig]:
    """Return the section `cluster` as each component requests it."""
    return [component_cluster(config.cluster, part) for part in allocations(config)]


def _check_cluster(config: Config, requests: Sequence[ClusterConfig], missing_data: str) -> Findings:
    findings = Findings()
    requested: list[Partition] = []
    with suppress(SlurmError):  # sbatch reports it
        partitions = client.partitions()
        for cluster in requests:
            own = requested_partitions(cluster, partitions, findings)
            check_partitions(cluster, own, findings)
            requested += own
    _check_qos(config.cluster, findings)
    _check_runs_dir(config, requested, findings)
    _check_signal_lead(config, findings)
    _check_batch_size(config, findings)
    _check_data(config, missing_data, findings)
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
    problems = list(dict.fromkeys(line for cluster in _requests(config) for line in conflicting_flags(cluster)))
    problems += exposed_secrets(config)
    try:
        if cwd is not None:
            create.check_trainer(config, cwd)
    except ConfigError as error:
        problems += error.problems
    return problems


def _check_qos(cluster: ClusterConfig, findings: Findings) -> None:
    """Check the QOS: without enforced limits Slurm accepts a job with an unknown QOS and never starts it."""
    if cluster.qos is None:
        return
    try:
        known = client.qos_names()
    except SlurmError:
        return  # a cluster without accounting
    if known and cluster.qos not in known:
        findings.errors.append(f"cluster.qos={cluster.qos}: no such QOS, the cluster has {', '.join(known)}")


def _explain_rejection(reason: str, cluster: ClusterConfig) -> str:
    """Return Slurm's reason, with the key and the user's accounts if it is about the account."""
    if "account" not in reason.lower():
        return reason
    user = pwd.getpwuid(os.getuid()).pw_name
    setting = f"cluster.account={cluster.account}" if cluster.account else "cluster.account is not set"
    try:
        names = client.user_accounts(user)
    except SlurmError:
        names = []
    return f"{setting}: {reason}" + (f"; your accounts are {', '.join(names)}" if names else "")


def _check_runs_dir(config: Config, partitions: Sequence[Partition], findings: Findings) -> None:
    if config.cluster.shared_runs:
        return
    runs_dir = Path(config.runs_dir)
    nodes = {node for partition in partitions for group in partition.nodes for node in expand(group.names)}
    hostname = socket.gethostname().partition(".")[0]
    errors, warnings = runs_dir_problems(runs_dir, file_system(runs_dir), nodes, hostname)
    findings.errors += errors
    findings.warnings += warnings


def _check_signal_lead(config: Config, findings: Findings) -> None:
    lead, limit_s = config.cluster.signal_lead_s, config.cluster.time_limit_min * 60
    if lead >= limit_s:
        findings.errors.append(
            f"cluster.signal_lead_s={lead}: the run would be stopped at its start, because cluster.time_limit_min="
            f"{config.cluster.time_limit_min} is {limit_s} s: lower the first or raise the second"
        )
    save_s, name = longest_save(Path(config.runs_dir) / config.experiment)
    # The ranks may be saving already when the signal arrives, and then save again.
    if lead < 2 * save_s:
        findings.warnings.append(
            f"cluster.signal_lead_s={lead}: run {name} needed {save_s:.0f} s for a checkpoint:"
            f" set at least twice that, cluster.signal_lead_s={2 * save_s:.0f}"
        )


def _check_batch_size(config: Config, findings: Findings) -> None:
    cluster = config.cluster
    if cluster.fewest_nodes < cluster.nodes and config.data.global_batch_size is None and not config.trainer.script:
        findings.warnings.append(
            f"cluster.min_nodes={cluster.min_nodes} without data.global_batch_size: the batch of a step, and so the"
            " training, depends on the number of nodes"
        )


def longest_save(experiment: Path) -> tuple[float, str]:
    """Return the seconds of the longest checkpoint save of an experiment's runs, and the name of that run."""
    saves = []
    for path in experiment.glob("*/checkpoints/step-*/manifest.json"):
        with suppress(RunFolderError, OSError):  # damaged files of other runs do not matter here
            seconds: Any = (read_json(path) or {}).get("write_s")
            if type(seconds) in (int, float) and 0 <= seconds <= LARGEST:
                saves.append((float(seconds), path.parents[2].name))
    return max(saves, default=(0.0, ""))


def _check_data(config: Config, missing_data: str, findings: Findings) -> None:
    if not missing_data or config.trainer.script:
        return
    if config.data.download and config.data.name != "image_folder":
        findings.warnings.append(f"{missing_data}: the nodes will download it if they have internet access")
    else:
        findings.errors.append(f"{missing_data}: put it there, or point data.root (or HPCDIST_DATA_DIR) at it")
