"""What can be known to go wrong before a run is submitted, told all at once: a line a mistake, with key and fix.

Slurm itself accepts much that never starts, such as a time above the partition's limit, and says little of why it
refuses the rest. What it refuses it still refuses: these checks stand in front of `sbatch --test-only`.
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
from hpcdist.containers import request as containing
from hpcdist.errors import ConfigError, RunFolderError, UserMistake
from hpcdist.files.formats import LARGEST
from hpcdist.machine.storage import file_system
from hpcdist.run.folder import read_json
from hpcdist.slurm import client
from hpcdist.slurm import extra_flags as flags
from hpcdist.slurm.client import SlurmError
from hpcdist.slurm.cluster_nodes import Partition
from hpcdist.slurm.exposed_secrets import exposed_secrets
from hpcdist.slurm.job_components import allocations, cluster_for
from hpcdist.slurm.nodelist import expand
from hpcdist.slurm.submit import partition_limits
from hpcdist.slurm.submit import submission as slurm
from hpcdist.slurm.submit.partition_limits import Findings
from hpcdist.slurm.submit.runs_dir_check import folder_problems
from hpcdist.supervisor import start


def check_config(config: Config, cwd: Path) -> None:
    """Raise ConfigError for what the config alone shows, without a look at any cluster."""
    if problems := _config_problems(config, cwd):
        raise ConfigError(problems)


def check(
    config: Config, submission: Mapping[str, str], cwd: Path | None, *, missing_data: str, force: bool
) -> tuple[list[str], str]:
    """Look at the cluster before anything is written; returns doubts, and what Slurm says of the start.

    Args:
        submission: sbatch flags of this submission alone.
        cwd: where the user's own modules are looked for; None for a run that has a copy of them already.
        missing_data: a sentence where the dataset is not on disk, else empty.
        force: what we hold for wrong of the cluster becomes a doubt; what Slurm refuses does not.

    Raises ConfigError with a line for each mistake; UserMistake where there is no Slurm.
    """
    slurm.require()
    certain = _config_problems(config, cwd)
    if exposed_secrets(config):
        # What follows would show the secrets to Slurm's and the containers' programs.
        raise ConfigError(certain)
    asked = [cluster_for(config.cluster, part) for part in allocations(config)]
    further = {name: value for cluster in asked for name, value in cluster.sbatch.items()}
    certain += flags.rejected_flags("sbatch", {**further, **submission}, options=submission)
    certain += flags.rejected_flags("srun", config.cluster.srun)
    certain += containing.problems(config, cwd or Path.cwd(), os.environ)
    found = Findings()
    try:
        offered = client.partitions()
    except SlurmError:
        offered = None  # sbatch reports it
    chosen = []
    for cluster in asked:
        own = partition_limits.chosen_of(cluster, offered, found) if offered is not None else []
        partition_limits.check_partitions(cluster, own, found)
        chosen += own
    _check_qos(config.cluster, found)
    _check_folder(config, chosen, found)
    _check_lead(config, found)
    _check_data(config, missing_data, found)
    if inherited := sorted(name for name in os.environ if name.startswith("SBATCH_")):
        found.doubts.append(
            f"{', '.join(inherited)} in your environment wins over the batch script: unset what is not meant"
        )
    blocking = certain + ([] if force else found.wrong)
    estimate = ""
    if not certain:
        try:
            estimate = slurm.check(config, submission)
        except UserMistake as error:
            refusal = _explained(str(error), config.cluster)
            # Where we know what is wrong, Slurm's word for it says less; but it alone knows the accounts.
            if not blocking or refusal != str(error):
                blocking = [*blocking, refusal]
    if blocking:
        raise ConfigError(blocking)
    return found.wrong + found.doubts, estimate


def _config_problems(config: Config, cwd: Path | None) -> list[str]:
    asked = [cluster_for(config.cluster, part) for part in allocations(config)]
    problems = list(dict.fromkeys(line for cluster in asked for line in flags.conflicting_flags(cluster)))
    problems += exposed_secrets(config)
    try:
        if cwd is not None:
            start.check_trainer(config, cwd)
    except ConfigError as error:
        problems += error.problems
    return problems


def _check_qos(cluster: ClusterConfig, found: Findings) -> None:
    """Where limits are not enforced Slurm takes a job of a QOS that there is not, and never starts it."""
    if cluster.qos is None:
        return
    try:
        known = client.qos_names()
    except SlurmError:
        return  # a cluster without accounting
    if known and cluster.qos not in known:
        found.wrong.append(f"cluster.qos={cluster.qos}: no such QOS: there are {', '.join(known)}")


def _explained(refusal: str, cluster: ClusterConfig) -> str:
    """Slurm's refusal; one of the account with the key and the accounts that the user has."""
    if "account" not in refusal.lower():
        return refusal
    user = pwd.getpwuid(os.getuid()).pw_name
    said = f"cluster.account={cluster.account}" if cluster.account else "cluster.account is not set"
    try:
        names = client.user_accounts(user)
    except SlurmError:
        names = []
    return f"{said}: {refusal}" + (f"; yours are {', '.join(names)}" if names else "")


def _check_folder(config: Config, chosen: Sequence[Partition], found: Findings) -> None:
    if config.cluster.shared_runs:
        return
    runs_dir = Path(config.runs_dir)
    hosts = {host for partition in chosen for group in partition.nodes for host in expand(group.names)}
    wrong, doubts = folder_problems(runs_dir, file_system(runs_dir), hosts, socket.gethostname().partition(".")[0])
    found.wrong += wrong
    found.doubts += doubts


def _check_lead(config: Config, found: Findings) -> None:
    lead, limit_s = config.cluster.signal_lead_s, config.cluster.time_limit_min * 60
    if lead >= limit_s:
        found.wrong.append(
            f"cluster.signal_lead_s={lead}: the run would be asked to save at its start,"
            f" as cluster.time_limit_min={config.cluster.time_limit_min} is {limit_s} s: lower one or raise the other"
        )
    save_s, name = longest_save(Path(config.runs_dir) / config.experiment)
    # One save may be on its way when the ranks are asked for another.
    if lead < 2 * save_s:
        found.doubts.append(
            f"cluster.signal_lead_s={lead}: a save of run {name} took {save_s:.0f} s:"
            f" give it twice that, cluster.signal_lead_s={2 * save_s:.0f}"
        )


def longest_save(experiment: Path) -> tuple[float, str]:
    """Seconds of the longest save among the checkpoints of an experiment's runs, and which run's; 0 without any."""
    saves = []
    for path in experiment.glob("*/checkpoints/step-*/manifest.json"):
        with suppress(RunFolderError, OSError):  # a doubt about another run is none about this one
            seconds: Any = (read_json(path) or {}).get("write_s")
            if type(seconds) in (int, float) and 0 <= seconds <= LARGEST:
                saves.append((float(seconds), path.parents[2].name))
    return max(saves, default=(0.0, ""))


def _check_data(config: Config, missing_data: str, found: Findings) -> None:
    if not missing_data or config.trainer.script:
        return
    if config.data.download and config.data.name != "image_folder":
        found.doubts.append(f"{missing_data}: the nodes will download it, if they reach the internet")
    else:
        found.wrong.append(f"{missing_data}: put it there, or point data.root (or HPCDIST_DATA_DIR) at it")
