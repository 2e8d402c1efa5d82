"""Checks of Slurm for `hpcdist doctor`: its commands, its controller, its partitions, and how it ends jobs."""

import shutil
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace

from hpcdist.errors import few, plural
from hpcdist.host.check_result import Check, failure, note, ok, warning
from hpcdist.slurm import client as slurm_client
from hpcdist.slurm.output import Partition, SlurmError, count_nodes, parse_seconds

#: Commands that `hpcdist submit` and the supervisor need.
NEEDED = ("sbatch", "srun", "scontrol", "scancel", "squeue", "sinfo")
#: Number of partitions with a line of their own.
SHOWN_PARTITIONS = 12
#: Enough time to save a checkpoint of some gigabytes on an ordinary file system.
_SAVE_S = 30
_START_IT = "check the machine that runs slurmctld: `scontrol ping`, `systemctl status slurmctld`"


@dataclass(frozen=True, kw_only=True)
class SlurmFacts:
    """Slurm as this machine sees it: its commands, its settings and its partitions."""

    missing: tuple[str, ...] = ()  #: commands that are not installed
    settings: dict[str, str] = field(default_factory=dict)  #: `scontrol show config`
    away: str = ""  #: why the controller did not answer
    seconds: float = 0.0  #: time until the controller answered
    partitions: list[Partition] | None = None  #: None if the query failed

    @property
    def reached(self) -> bool:
        """Whether the controller has answered."""
        return bool(self.settings)

    @property
    def proctrack(self) -> str:
        """Name of the plugin that finds the processes of a step, such as `cgroup`; empty if unknown."""
        return self.settings.get("ProctrackType", "").removeprefix("proctrack/")


def read_slurm() -> SlurmFacts:
    """Ask Slurm for its settings and partitions; an unavailable part is missing in the result."""
    missing = tuple(name for name in NEEDED if shutil.which(name) is None)
    if "scontrol" in missing:
        return SlurmFacts(missing=missing)
    begun = time.monotonic()
    try:
        settings = slurm_client.settings()
    except SlurmError as error:
        return SlurmFacts(missing=missing, away=str(error))
    found = SlurmFacts(missing=missing, settings=settings, seconds=time.monotonic() - begun)
    with suppress(SlurmError):
        return replace(found, partitions=slurm_client.partitions())
    return found


def client_checks(found: SlurmFacts, user: str, *, in_container: bool = False) -> list[Check]:
    """Check Slurm's commands, its controller, and its accounting for a user."""
    if found.missing == NEEDED and in_container:
        text = "none in this container, as intended: hpcdist outside the container submits and supervises jobs"
        return [ok("commands", text)]
    if found.missing == NEEDED:
        text = "Slurm is not installed: `hpcdist submit` needs it, `hpcdist run` does not"
        fix = (
            "on a cluster use a login node or `module load slurm`;"
            " for a test cluster: `sudo hpcdist devcluster up --install`"
        )
        return [note("commands", text, fix)]
    checks = []
    if found.missing:
        text = f"{', '.join(found.missing)} not found, other Slurm commands are: `hpcdist submit` would fail"
        fix = "put the folder of Slurm's commands on PATH, or install the package slurm-client"
        checks.append(failure("commands", text, fix))
    if slurm_client.NO_CONFIG in found.away:
        text = "Slurm's commands are installed but not configured: `hpcdist submit` would fail, `hpcdist run` works"
        fix = (
            "on a cluster copy its slurm.conf to /etc/slurm, or set SLURM_CONF (`hpcdist devcluster up` prints its own)"
        )
        checks.append(warning("controller", text, fix))
    elif found.away:
        text = f"{found.away}: `hpcdist submit` would fail"
        checks.append(failure("controller", text, f"{_START_IT}; check SLURM_CONF"))
    if not found.reached:
        return checks
    cluster = found.settings.get("ClusterName", "?")
    version = found.settings.get("SLURM_VERSION", "?")
    controller = ok("controller", f"{cluster}, Slurm {version}, answers in {found.seconds:.2g} s")
    return [*checks, controller, _accounting(found.settings, user)]


def _accounting(settings: dict[str, str], user: str) -> Check:
    min_job_age = settings.get("MinJobAge", "300 sec")
    lost = f"a job's end is known only for {min_job_age} (MinJobAge), and `explain` cannot show its memory"
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


def partition_checks(found: SlurmFacts) -> list[Check]:
    """Describe the partitions, the default first, and report those to which Slurm sends no jobs."""
    if not found.reached:
        return []
    if found.partitions is None:
        return [warning("partitions", "scontrol or sinfo did not list them", _START_IT)]
    if not found.partitions:
        return [failure("partitions", "none: no job can start", _START_IT)]
    ordered = sorted(found.partitions, key=lambda partition: not _is_default(partition))
    checks = [_partition(partition) for partition in ordered[:SHOWN_PARTITIONS]]
    others = [partition.name for partition in ordered[SHOWN_PARTITIONS:]]
    if others:
        checks.append(ok("more", f"{len(others)} partitions: {few(others, 10)}"))
    if not any(_is_default(partition) for partition in found.partitions):
        checks.append(note("default", "no partition is the default: set cluster.partition"))
    topology = found.settings.get("TopologyPlugin", "unknown")
    if topology == "topology/block":
        topology += ": cluster.sbatch.segment=N keeps groups of N nodes in one block each"
    return [*checks, ok("topology", topology)]


def _is_default(partition: Partition) -> bool:
    return partition.facts.get("Default") == "YES"


def _partition(partition: Partition) -> Check:
    total = count_nodes(partition.nodes)
    up = count_nodes([group for group in partition.nodes if group.usable])
    parts = [plural(total, "node") if up == total else f"{up} of {total} nodes up"]
    if partition.nodes:
        parts.append(f"{_hardware(partition)} each")
    parts.append(_limits(partition))
    text = "; ".join(parts)
    if _is_default(partition):
        text += " (default)"
    state = partition.facts.get("State", "UP")
    if state != "UP":
        fix = f"jobs wait until it is up again (`scontrol show partition {partition.name}`)"
        return note(partition.name, f"{state}; {text}", fix)
    if not up:
        return warning(partition.name, f"no node accepts jobs; {text}", f"reasons: `sinfo -R -p {partition.name}`")
    return ok(partition.name, text)


def _hardware(partition: Partition) -> str:
    """Return the hardware of a node: `64 cores, 256-512 GiB, 4 GPUs`."""
    groups = partition.nodes
    cores = _span([group.cpus for group in groups])
    memory = _span([round(group.memory_mb / 1024) for group in groups])
    gpus = _span([group.gpus for group in groups])
    text = f"{cores} cores, {memory} GiB"
    if gpus != "0":
        text += f", {gpus} GPUs"
    return text


def _limits(partition: Partition) -> str:
    """Return the limits of a job: `at most 1-00:00:00, 8 nodes a job, accounts physics only`."""
    max_time = partition.facts.get("MaxTime", "UNLIMITED")
    limits = [f"at most {max_time}"]
    if max_time in ("UNLIMITED", "INFINITE"):
        limits = ["no time limit"]
    max_nodes = partition.limit("MaxNodes")
    if max_nodes is not None:
        limits.append(f"{max_nodes} nodes a job")
    for kind in ("Accounts", "Qos", "Groups"):
        allowed = partition.allowed(kind)
        if allowed is not None:
            limits.append(f"{kind.lower()} {few(list(allowed), 3)} only")
    return ", ".join(limits)


def _span(values: list[int]) -> str:
    """Return `8`, or `4-8` for different values."""
    lowest, highest = min(values), max(values)
    if lowest == highest:
        return str(lowest)
    return f"{lowest}-{highest}"


def job_end_checks(found: SlurmFacts) -> list[Check]:
    """Explain how long ranks may save a checkpoint at the end of a job, and whether Slurm requeues the run."""
    if not found.reached:
        return []
    settings = found.settings
    kill_wait = parse_seconds(settings.get("KillWait", "")) or 0
    text = f"`scancel` sends SIGTERM, and SIGKILL {kill_wait} s later (KillWait)"
    checks = [ok("job ends", f"{text}; a run saves a checkpoint before its time limit (cluster.signal_lead_s)")]
    if settings.get("PreemptType", "preempt/none") not in ("preempt/none", "(null)"):
        partitions: dict[tuple[str, int], list[str]] = {}  #: by mode and grace time
        for partition in found.partitions or []:
            mode = partition.facts.get("PreemptMode", settings.get("PreemptMode", "")).split(",")[-1]
            grace_s = parse_seconds(partition.facts.get("GraceTime", "0")) or 0
            partitions.setdefault((mode, grace_s), []).append(partition.name)
        checks += [_preempted(mode, grace_s, kill_wait, names) for (mode, grace_s), names in partitions.items()]
    return checks


def _preempted(mode: str, grace: int, kill_wait: int, names: list[str]) -> Check:
    """Explain the preemption of jobs in partitions with the same mode and grace time, in seconds."""
    where = f"preempted in {few(names)}"
    if mode in ("OFF", "DISABLED"):
        return ok("preemption", f"jobs in {few(names)} are never preempted")
    if mode in ("SUSPEND", "GANG"):
        text = f"{where}: Slurm suspends the processes and resumes them later with their memory"
        fix = "set launch.hang_timeout_s above the usual pause, so that suspended ranks do not count as hung"
        return note("preemption", text, fix)
    total = grace + kill_wait
    signals = f"{where}: SIGTERM, and SIGKILL {total} s later (GraceTime {grace} + KillWait {kill_wait})"
    is_short = total < _SAVE_S
    save = (
        f"a step and a checkpoint must fit into {total} s, or the steps since the newest checkpoint are lost:"
        " set checkpoint.every_steps accordingly, or ask for a longer GraceTime"
    )
    if mode == "REQUEUE":
        text = f"{signals}; Slurm requeues the run"
        if is_short:
            return note("preemption", text, save)
        return ok("preemption", text)
    text = f"{signals}; Slurm does not requeue the run (PreemptMode=CANCEL)"
    resume = "`hpcdist resume RUN` submits it again"
    if is_short:
        return note("preemption", text, f"{resume}; {save}")
    return note("preemption", text, resume)
