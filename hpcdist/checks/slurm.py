"""Checks of Slurm: client, partitions, and how the site ends jobs."""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass, field

from hpcdist.host.machine import Check, failure, note, ok, warning
from hpcdist.slurm import client as slurm_client
from hpcdist.slurm.client import SlurmError
from hpcdist.slurm.output import Partition, count_nodes, parse_seconds

# Checks of Slurm: its commands, controller, accounting and partitions.

#: Commands that `hpcdist submit` and the supervisor need.
NEEDED = ("sbatch", "srun", "scontrol", "scancel", "squeue", "sinfo")
#: Number of partitions with a line of their own.
SHOWN_PARTITIONS = 12
#: Error of Slurm's commands without a slurm.conf.
_UNCONFIGURED = "Could not establish a configuration source"
_START_IT = "check the machine that runs slurmctld: `scontrol ping`, `systemctl status slurmctld`"


@dataclass(frozen=True, kw_only=True)
class SlurmFacts:
    missing: tuple[str, ...] = ()  #: commands that are not installed
    settings: dict[str, str] = field(default_factory=dict)  #: `scontrol show config`
    away: str = ""  #: why the controller did not answer
    seconds: float = 0.0  #: time until the controller answered
    partitions: list[Partition] | None = None  #: None if the query failed

    @property
    def installed(self) -> bool:
        return len(self.missing) < len(NEEDED)

    @property
    def reached(self) -> bool:
        return bool(self.settings)

    @property
    def proctrack(self) -> str:
        """Name of the plugin that finds the processes of a step, such as `cgroup`; empty if unknown."""
        return self.settings.get("ProctrackType", "").removeprefix("proctrack/")


def read_slurm() -> SlurmFacts:
    """Query the facts that all sections about Slurm need."""
    missing = tuple(name for name in NEEDED if shutil.which(name) is None)
    if "scontrol" in missing:
        return SlurmFacts(missing=missing)
    begun = time.monotonic()
    try:
        settings = slurm_client.settings()
    except SlurmError as error:
        return SlurmFacts(missing=missing, away=str(error))
    took = time.monotonic() - begun
    try:
        found = slurm_client.partitions()
    except SlurmError:
        found = None
    return SlurmFacts(missing=missing, settings=settings, seconds=took, partitions=found)


# --- commands and controller


def client_checks(found: SlurmFacts, user: str, *, in_container: bool = False) -> list[Check]:
    """Check whether jobs can be submitted and followed from this machine."""
    if not found.installed and in_container:
        text = "none in this container, as intended: hpcdist outside the container submits and supervises jobs"
        return [ok("commands", text)]
    if not found.installed:
        text = "Slurm is not installed: `hpcdist submit` needs it, `hpcdist run` does not"
        fix = "on a cluster use a login node or `module load slurm`; for a test cluster: `sudo hpcdist devcluster up"
        return [note("commands", text, f"{fix} --install`")]
    checks = []
    if found.missing:
        text = f"{', '.join(found.missing)} not found, other Slurm commands are: `hpcdist submit` would fail"
        fix = "put the folder of Slurm's commands on PATH, or install the package slurm-client"
        checks.append(failure("commands", text, fix))
    if found.away and _UNCONFIGURED in found.away:
        text = "Slurm's commands are installed but not configured: `hpcdist submit` would fail, `hpcdist run` works"
        fix = "on a cluster copy its slurm.conf to /etc/slurm, or set SLURM_CONF (`hpcdist devcluster up` prints"
        checks.append(warning("controller", text, f"{fix} its own)"))
    elif found.away:
        text = f"{found.away}: `hpcdist submit` would fail"
        checks.append(failure("controller", text, f"{_START_IT}; check SLURM_CONF"))
    if not found.reached:
        return checks
    cluster, version = (found.settings.get(name, "?") for name in ("ClusterName", "SLURM_VERSION"))
    controller = ok("controller", f"{cluster}, Slurm {version}, answers in {found.seconds:.2g} s")
    return [*checks, controller, _accounting(found.settings, user)]


def _accounting(settings: dict[str, str], user: str) -> Check:
    lost = (
        f"a job's end is known only for {settings.get('MinJobAge', '300 sec')} (MinJobAge), and `explain` cannot show"
        " its memory"
    )
    if not settings.get("AccountingStorageType", "").endswith("/slurmdbd"):
        return note("accounting", f"Slurm keeps none: {lost}")
    try:
        accounts = slurm_client.user_accounts(user, cluster=settings.get("ClusterName", ""))
    except SlurmError as error:
        fix = "if sacct fails as well, slurmdbd or its database is down: contact the administrators"
        return warning("accounting", f"{error}: {lost}", fix)
    if accounts:
        return ok("accounting", f"{user} may use {few(accounts)} (cluster.account)")
    if "associations" in settings.get("AccountingStorageEnforce", "").lower():
        text = f"{user} has no account, and this cluster requires one for each job"
        return failure("accounting", text, f"an administrator can add one: `sacctmgr add user {user} account=…`")
    return ok("accounting", f"answers; {user} has no account, and none is required")


def few(names: list[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


# --- partitions


def partition_checks(found: SlurmFacts) -> list[Check]:
    """Return one result per partition: hardware, time limit, and whether it starts jobs."""
    if not found.reached:
        return []
    if found.partitions is None:
        return [warning("partitions", "scontrol or sinfo did not list them", _START_IT)]
    if not found.partitions:
        return [failure("partitions", "none: no job can start", _START_IT)]
    ordered = sorted(found.partitions, key=lambda one: one.facts.get("Default") != "YES")
    checks = [_partition(one) for one in ordered[:SHOWN_PARTITIONS]]
    if rest := [one.name for one in ordered[SHOWN_PARTITIONS:]]:
        checks.append(ok("more", f"{len(rest)} partitions: {few(rest, 10)}"))
    if all(one.facts.get("Default") != "YES" for one in found.partitions):
        checks.append(note("default", "no partition is the default: set cluster.partition"))
    return checks


def _partition(partition: Partition) -> Check:
    groups, facts = partition.nodes, partition.facts
    total, up = count_nodes(groups), count_nodes([group for group in groups if group.usable])
    shown = [f"{total} node{'s' * (total != 1)}" if up == total else f"{up} of {total} nodes up"]
    if groups:
        gpus = _span([group.gpus for group in groups])
        memory = _span([round(group.memory_mb / 1024) for group in groups])
        hardware = f"{_span([group.cpus for group in groups])} cores, {memory} GiB"
        shown.append(f"{hardware}{f', {gpus} GPUs' if gpus != '0' else ''} each")
    limit = facts.get("MaxTime", "UNLIMITED")
    limits = ["no time limit" if limit in ("UNLIMITED", "INFINITE") else f"at most {limit}"]
    if (most := partition.limit("MaxNodes")) is not None:
        limits.append(f"{most} nodes a job")
    for kind in ("Accounts", "Qos", "Groups"):
        if (allowed := partition.allowed(kind)) is not None:
            limits.append(f"{kind.lower()} {few(list(allowed), 3)} only")
    text = "; ".join([*shown, ", ".join(limits)]) + (" (default)" if facts.get("Default") == "YES" else "")
    if (state := facts.get("State", "UP")) != "UP":
        fix = f"jobs wait until it is up again (`scontrol show partition {partition.name}`)"
        return note(partition.name, f"{state}; {text}", fix)
    if not up:
        return warning(partition.name, f"no node accepts jobs; {text}", f"reasons: `sinfo -R -p {partition.name}`")
    return ok(partition.name, text)


def _span(values: list[int]) -> str:
    return str(min(values)) if min(values) == max(values) else f"{min(values)}-{max(values)}"


# Checks of Slurm's settings for the end of jobs: preemption and requeue.

#: Enough to save a checkpoint of some gigabytes on an ordinary file system.
_EASY_S = 30


def job_end_checks(found: SlurmFacts) -> list[Check]:
    """Explain the settings: how long ranks may save, and whether Slurm requeues the run."""
    if not found.reached:
        return []
    settings = found.settings
    kill_wait = parse_seconds(settings.get("KillWait", "")) or 0
    text = f"`scancel` sends SIGTERM, and SIGKILL {kill_wait} s later (KillWait)"
    checks = [ok("job ends", f"{text}; a run saves a checkpoint before its time limit (cluster.signal_lead_s)")]
    if settings.get("PreemptType", "preempt/none") in ("preempt/none", "(null)"):
        checks.append(ok("preemption", "off: no job ends because of another one"))
    else:
        by = "quality of service" if settings["PreemptType"].endswith("/qos") else "partition"
        announced = (
            "Slurm sends the user signal before it (preempt_send_user_signal)"
            if "preempt_send_user_signal" in settings.get("SlurmctldParameters", "")
            else "SIGTERM announces it, which suffices for hpcdist (preempt_send_user_signal is not set)"
        )
        checks.append(ok("preemption", f"decided by {by}; {announced}"))
        modes: dict[tuple[str, int], list[str]] = {}
        for one in found.partitions or []:
            mode = one.facts.get("PreemptMode", settings.get("PreemptMode", "")).split(",")[-1]
            modes.setdefault((mode, parse_seconds(one.facts.get("GraceTime", "0")) or 0), []).append(one.name)
        checks += [_preempted(mode, grace, kill_wait, names) for (mode, grace), names in modes.items()]
    codes = {name: settings.get(name, "") for name in ("RequeueExit", "RequeueExitHold")}
    if listed := ", ".join(f"{name}={value}" for name, value in codes.items() if {1, 2} & _numbers(value)):
        text = f"{listed}: Slurm requeues jobs with exit code 1 or 2, so a failed run starts again"
        fix = "cluster.sbatch={no-requeue: true} prevents it; administrators can set other codes"
        checks.append(warning("requeue", text, fix))
    if settings.get("ProctrackType", "").endswith("/pgid"):
        text = "Slurm finds a job's processes by pgid, so processes outside their process group remain"
        fix = "check the node with `ps`; administrators can set ProctrackType=proctrack/cgroup"
        checks.append(note("clean-up", text, fix))
    size = settings.get("MaxArraySize", "")
    if size.isdigit() and int(size) <= 1:
        text = "job arrays are disabled (MaxArraySize): Slurm would reject `hpcdist submit --sweep`"
        checks.append(note("sweeps", text, "submit the cells one at a time"))
    return checks


def _preempted(mode: str, grace: int, kill_wait: int, names: list[str]) -> Check:
    where = f"preempted in {few(names)}"
    if mode in ("OFF", "DISABLED"):
        return ok("preemption", f"jobs in {few(names)} are never preempted")
    if mode in ("SUSPEND", "GANG"):
        text = f"{where}: Slurm suspends the processes and resumes them later with their memory"
        fix = "set launch.hang_timeout_s above the usual pause, so that suspended ranks do not count as hung"
        return note("preemption", text, fix)
    then = "requeues the run" if mode == "REQUEUE" else "does not requeue the run (PreemptMode=CANCEL)"
    total = grace + kill_wait
    text = f"{where}: SIGTERM, and SIGKILL {total} s later (GraceTime {grace} + KillWait {kill_wait}); Slurm {then}"
    fix = "" if mode == "REQUEUE" else "`hpcdist resume RUN` submits it again"
    if total < _EASY_S:
        more = f"a step and a checkpoint must fit into {total} s, or the steps since the newest checkpoint are lost:"
        more += " set checkpoint.every_steps accordingly, or ask for a longer GraceTime"
        return note("preemption", text, "; ".join(filter(None, [fix, more])))
    return Check(name="preemption", level="ok" if mode == "REQUEUE" else "note", text=text, fix=fix)


def _numbers(text: str) -> set[int]:
    """Return the exit codes of a list such as `1-3,42`."""
    ends = (part.strip().partition("-")[::2] for part in text.split(","))
    return {code for first, last in ends if first.isdigit() for code in range(int(first), int(last or first) + 1)}
