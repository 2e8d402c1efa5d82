"""Slurm as this machine reaches it: its commands, its controller, accounting, and what its partitions offer."""

from __future__ import annotations

import re
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from hpcdist.machine.check import Check
from hpcdist.slurm import client as slurm_client
from hpcdist.slurm.client import SlurmError
from hpcdist.slurm.cluster_nodes import NodeGroup, Partition

#: What `submit` and all that follows a run need.
NEEDED = ("sbatch", "srun", "scontrol", "scancel", "squeue", "sinfo")
#: The oldest that hpcdist is tested with.
OLDEST = (22, 5)
#: Lines of partitions before the rest is counted.
SHOWN_PARTITIONS = 12
#: What Slurm says where it finds no slurm.conf.
_UNCONFIGURED = "Could not establish a configuration source"
_START_IT = "start with the machine that runs slurmctld: `scontrol ping`, `systemctl status slurmctld`"


@dataclass(frozen=True, kw_only=True)
class Answers:
    """What Slurm's commands have said."""

    missing: tuple[str, ...] = ()  #: commands that are not here
    settings: dict[str, str] = field(default_factory=dict)  #: `scontrol show config`
    away: str = ""  #: why the controller could not be asked
    seconds: float = 0.0  #: how long the controller took
    partitions: list[Partition] | None = None  #: None where they could not be asked for

    @property
    def installed(self) -> bool:
        return len(self.missing) < len(NEEDED)

    @property
    def reached(self) -> bool:
        return bool(self.settings)


def ask_slurm() -> Answers:
    """All that the sections about Slurm share, asked once."""
    missing = tuple(name for name in NEEDED if shutil.which(name) is None)
    if "scontrol" in missing:
        return Answers(missing=missing)
    begun = time.monotonic()
    try:
        settings = slurm_client.settings()
    except SlurmError as error:
        return Answers(missing=missing, away=str(error))
    took = time.monotonic() - begun
    try:
        found = slurm_client.partitions()
    except SlurmError:
        found = None
    return Answers(missing=missing, settings=settings, seconds=took, partitions=found)


class Once:
    """A question that several sections wait for, and that is asked once."""

    def __init__(self, ask: Callable[[], Answers]) -> None:
        self._ask = ask
        self._lock = threading.Lock()
        self._answers: Answers | None = None

    def __call__(self) -> Answers:
        with self._lock:
            if self._answers is None:
                self._answers = self._ask()
            return self._answers


# --- the client and its controller


def client(found: Answers, user: str, *, in_container: bool = False) -> list[Check]:
    """Whether jobs can be submitted from here, and followed."""
    if not found.installed and in_container:
        text = "none of Slurm's in here, as it should be: what stands outside submits and supervises"
        return [Check(name="commands", level="ok", text=text)]
    if not found.installed:
        return [
            Check(
                name="commands",
                level="note",
                text="none of Slurm's are here: `hpcdist run` needs none, `hpcdist submit` does",
                fix="on a cluster use a login node, or `module load slurm`; to try one out:"
                " `sudo hpcdist devcluster up --install`",
            )
        ]
    checks = []
    if found.missing:
        checks.append(
            Check(
                name="commands",
                level="failure",
                text=f"{', '.join(found.missing)} not found, others of Slurm's are: `hpcdist submit` would fail",
                fix="put the folder of Slurm's commands on PATH, or install the package slurm-client",
            )
        )
    if found.away and _UNCONFIGURED in found.away:
        text = "Slurm's commands are here, but no cluster for them: `hpcdist submit` would fail, `hpcdist run` not"
        fix = "on a cluster put its slurm.conf into /etc/slurm, or name it in SLURM_CONF (`hpcdist devcluster up` says"
        checks.append(Check(name="controller", level="warning", text=text, fix=f"{fix} its own)"))
    elif found.away:
        checks.append(
            Check(
                name="controller",
                level="failure",
                text=f"{found.away}: `hpcdist submit` would fail",
                fix=f"{_START_IT}; is SLURM_CONF right?",
            )
        )
    if found.reached:
        checks += [_controller(found), *_accounting(found.settings, user)]
    return checks


def _controller(found: Answers) -> Check:
    version = found.settings.get("SLURM_VERSION", "")
    text = f"{found.settings.get('ClusterName', '?')}, Slurm {version}, answers in {found.seconds:.2g} s"
    number = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if number and number < OLDEST:
        oldest = ".".join(f"{part:02d}" for part in OLDEST)
        fix = "try a run with --test and a short one before a long one"
        return Check(name="controller", level="warning", text=f"{text}: tested is {oldest} and newer", fix=fix)
    return Check(name="controller", level="ok", text=text)


def _accounting(settings: dict[str, str], user: str) -> list[Check]:
    lost = (
        "once the controller has forgotten a job"
        f" ({settings.get('MinJobAge', '300 sec')} after its end) nobody knows how it ended, and `explain` never its"
        " memory"
    )
    if not settings.get("AccountingStorageType", "").endswith("/slurmdbd"):
        return [Check(name="accounting", level="note", text=f"none is kept: {lost}")]
    try:
        accounts = slurm_client.user_accounts(user, cluster=settings.get("ClusterName", ""))
    except SlurmError as error:
        fix = "if sacct does not answer either, slurmdbd or its database is down: tell the cluster's staff"
        return [Check(name="accounting", level="warning", text=f"{error}: {lost}", fix=fix)]
    enforced = "associations" in settings.get("AccountingStorageEnforce", "").lower()
    if accounts:
        return [Check(name="accounting", level="ok", text=f"{user} may charge {few(accounts)} (cluster.account)")]
    if enforced:
        return [
            Check(
                name="accounting",
                level="failure",
                text=f"{user} has no account here, and this cluster takes no job without one",
                fix=f"the cluster's staff can say: `sacctmgr add user {user} account=…`",
            )
        ]
    return [Check(name="accounting", level="ok", text=f"answers; {user} has no account, and none is asked for")]


def few(names: list[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


# --- partitions


def partitions(found: Answers) -> list[Check]:
    """A line for each partition: what it has, how long a job may take, whether it starts any at present."""
    if not found.reached:
        return []
    if found.partitions is None:
        text = "scontrol or sinfo did not tell which there are"
        return [Check(name="partitions", level="warning", text=text, fix=f"{_START_IT}")]
    if not found.partitions:
        return [Check(name="partitions", level="failure", text="there are none: no job can start", fix=_START_IT)]
    ordered = sorted(found.partitions, key=lambda one: one.facts.get("Default") != "YES")
    checks = [_partition(one) for one in ordered[:SHOWN_PARTITIONS]]
    if rest := [one.name for one in ordered[SHOWN_PARTITIONS:]]:
        checks.append(Check(name="more", level="ok", text=f"{len(rest)} partitions: {few(rest, 10)}"))
    if all(one.facts.get("Default") != "YES" for one in found.partitions):
        text = "no partition is the default: a run has to say cluster.partition"
        checks.append(Check(name="default", level="note", text=text))
    return checks


def _partition(partition: Partition) -> Check:
    total, up = _count(partition.nodes), _count([group for group in partition.nodes if group.usable])
    state = partition.facts.get("State", "UP")
    shown = [f"{total} node{'s' * (total != 1)}" if up == total else f"{up} of {total} nodes up"]
    if partition.nodes:
        shown.append(_hardware(partition.nodes))
    shown.append(_limits(partition))
    text = "; ".join(filter(None, shown)) + (" (default)" if partition.facts.get("Default") == "YES" else "")
    if state != "UP":
        fix = f"until it is up again (`scontrol show partition {partition.name}`) jobs wait there"
        return Check(name=partition.name, level="note", text=f"{state}; {text}", fix=fix)
    if not up:
        fix = f"why: `sinfo -R -p {partition.name}`"
        return Check(name=partition.name, level="warning", text=f"no node takes jobs; {text}", fix=fix)
    return Check(name=partition.name, level="ok", text=text)


def _hardware(groups: tuple[NodeGroup, ...]) -> str:
    """`8-64 cores, 32 GiB, 0-4 GPUs each`."""
    cores = _span([group.cpus for group in groups])
    memory = _span([round(group.memory_mb / 1024) for group in groups])
    gpus = _span([group.gpus for group in groups])
    return f"{cores} cores, {memory} GiB" + (f", {gpus} GPUs" if gpus != "0" else "") + " each"


def _span(values: list[int]) -> str:
    return str(min(values)) if min(values) == max(values) else f"{min(values)}-{max(values)}"


def _limits(partition: Partition) -> str:
    words = [_duration(partition.facts.get("MaxTime", "UNLIMITED"))]
    if (most := partition.limit("MaxNodes")) is not None:
        words.append(f"{most} nodes a job")
    for what in ("Accounts", "Qos", "Groups"):
        if (allowed := partition.allowed(what)) is not None:
            words.append(f"{what.lower()} {few(list(allowed), 3)} only")
    return ", ".join(words)


def _duration(text: str) -> str:
    """`1-12:00:00`, or minutes, as people say it."""
    if text in ("UNLIMITED", "INFINITE"):
        return "no time limit"
    match = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d+):(\d+)", text)
    if match is None:
        return f"at most {text}"
    days, hours, minutes = (int(part or 0) for part in match.groups()[:3])
    units = ((days, "day" + "s" * (days != 1)), (hours, "h"), (minutes, "min"))
    return "at most " + " ".join(f"{value} {unit}" for value, unit in units if value)


def _count(groups: tuple[NodeGroup, ...] | list[NodeGroup]) -> int:
    return sum(group.num_nodes for group in groups)
