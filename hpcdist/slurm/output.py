"""Parsers of the output of Slurm's commands: values and records, nodes, jobs, accounting. Pure functions."""

import re
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from hpcdist.config.slurm_notation import minutes_of
from hpcdist.errors import HpcdistError, duration, local_time, plural, shown

#: The beginning of a job's record. The job's name may contain anything. The key after it is the same in all releases.
_JOB_RECORD = re.compile(r"(?P<before>JobId=.*?)JobName=(?P<name>.*?) (?P<after>UserId=\S+\([0-9]+\) .*)")


def parse_record(line: str) -> dict[str, str]:
    """Return the `Key=value` words that `scontrol --oneliner` prints; a value is cut at its first space.

    A job's name, and the free text at the end of a record, may contain such words: the first value of a key counts.
    """
    name = {}
    match = _JOB_RECORD.match(line)
    if match:
        line = match["before"] + match["after"]
        name = {"JobName": match["name"]}
    text, _, command = line.partition(" Command=")
    words = text.split()
    # Only the first word: the free text follows the command.
    words += [f"Command={word}" for word in command.split()[:1]]
    # In reverse order, so that the first value of a key is the one that stays.
    pairs = [word.split("=", 1) for word in reversed(words) if "=" in word]
    return dict(pairs) | name


class SlurmError(HpcdistError):
    """A command of Slurm is not installed, failed, did not answer in time, or printed something unreadable."""

    def __init__(self, message: str, *, installed: bool = True, timed_out: bool = False, stderr: str = "") -> None:
        super().__init__(message)
        self.installed = installed
        self.timed_out = timed_out
        self.stderr = stderr


#: Slurm's texts in place of a value, of a time, and of a time limit.
_NO_TEXT = ("(null)", "None", "None assigned", "N/A", "Unknown")
_NO_TIME = ("", "0", "(null)", "None", "N/A", "NONE", "Unknown")
_NO_LIMIT = ("", "(null)", "INVALID", "N/A", "NOT_SET", "Partition_Limit", "UNLIMITED", "infinite")


def parse_records(text: str) -> list[dict[str, str]]:
    """Return the records of `scontrol --oneliner`, one per line."""
    return [parse_record(line) for line in text.splitlines() if line.strip()]


def parse_settings(text: str) -> dict[str, str]:
    """Return the settings that `scontrol show config` prints, by name."""
    pairs = (line.split("=", 1) for line in text.splitlines() if "=" in line)
    return {key.strip(): value.strip() for key, value in pairs}


def parse_text(text: str | None) -> str:
    """Return a value; empty if Slurm prints `(null)`, `N/A` and the like."""
    if text is None or text in _NO_TEXT:
        return ""
    return text


def parse_count(text: str) -> int | None:
    """Return a count of up to 18 digits; None for anything else, such as `UNLIMITED`."""
    if not re.fullmatch(r"[0-9]{1,18}", text):
        return None
    return int(text)


def parse_time(text: str | None) -> float | None:
    """Return a time in seconds since the epoch; None for `Unknown` and the like.

    Slurm's commands print seconds (`client.command_env`). A local time (`2026-11-20T07:05:00`) is read as well; it is
    ambiguous in the hour that a change of the clocks repeats. Raises SlurmError for other text: it is not "no time".
    """
    if text is None or text in _NO_TIME:
        return None
    if re.fullmatch(r"[0-9]{1,12}", text):
        return float(text)
    try:
        return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))
    except (ValueError, OverflowError) as error:
        raise SlurmError(f"Slurm shows the time {shown(text)}, which hpcdist cannot read") from error


def parse_estimate(text: str) -> float | None:
    """Return the expected start in `client.estimate_start`'s text in seconds since the epoch; None without one."""
    found = re.search(r"start at (\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)", text)
    if found is None:
        return None
    return parse_time(found[1])


def parse_minutes(text: str) -> float | None:
    """Return a time limit (`1-00:00:00`, `30:00`) in minutes; None for `UNLIMITED` and the like.

    Raises SlurmError for other text: it is not "no limit".
    """
    if text in _NO_LIMIT:
        return None
    minutes = minutes_of(text)
    if minutes is None:
        raise SlurmError(f"Slurm shows the time limit {shown(text)}, which hpcdist cannot read")
    return minutes


def parse_seconds(text: str) -> int | None:
    """Return a duration of a setting (`30 sec`, `2 min`, `30`) in seconds; None for anything else."""
    match = re.fullmatch(r"(?P<number>[0-9]{1,18})(?: (?P<unit>sec|min))?", text.strip())
    if match is None:
        return None
    number = int(match["number"])
    if match["unit"] == "min":
        return 60 * number
    return number


#: MiB of the units of memory sizes; a number without a unit is in MiB.
_MEMORY_UNITS_MB = {"K": 1 / 1024, "": 1, "M": 1, "G": 1024, "T": 1024**2}


def parse_memory_mb(text: str) -> float | None:
    """Return a memory size of sbatch or sacct (`64G`, `2000`, `1.5M`) in MiB; None for anything else."""
    size = r"(?P<number>[0-9]{1,18}(?:\.[0-9]{1,18})?)(?P<unit>[KMGT]?)B?"
    match = re.fullmatch(size, text.strip(), re.IGNORECASE)
    if match is None:
        return None
    return float(match["number"]) * _MEMORY_UNITS_MB[match["unit"].upper()]


def parse_gpus(text: str) -> tuple[str | None, int]:
    """Return type and number of the GPUs in `4`, `a100:4`, `a100` or `a100:2,v100:2`.

    The type is None if there is none, or several.
    """
    entries = text.split(",")
    count = 0
    for entry in entries:
        number = entry.split(":")[-1]
        count += int(number) if number.isdecimal() else 1
    kind = text.split(":")[0]
    if len(entries) > 1 or kind.isdecimal():
        return None, count
    return kind, count


# Partitions and nodes of a cluster, from `scontrol` and `sinfo`.

#: States in which a node takes no jobs (`sinfo`'s long names).
_UNUSABLE = ("down", "drain", "fail", "error", "inval", "unknown", "future", "not_responding", "reboot")
#: Formats of `sinfo` for the nodes of all partitions, and for single nodes.
PARTITION_FORMAT = "%R|%D|%c|%m|%G|%T|%N"
NODE_FORMAT = "%N|%T|%f|%G|%c|%m|%H|%u|%E"
#: Their numbers of fields. A line with another number is in another format.
_NUM_PARTITION_FIELDS = PARTITION_FORMAT.count("|") + 1
_NUM_NODE_FIELDS = NODE_FORMAT.count("|") + 1
#: GPUs in the field %G: `gpu:a100:4(S:0-1)`, `gpu:4`.
_GPU_GRES = re.compile(r"\bgpu(?::(?P<kind>[^:,()]+))?(?::[^:,()]+)*:(?P<number>[0-9]{1,9})")


@dataclass(frozen=True, kw_only=True)
class NodeGroup:
    """Nodes of one partition with the same hardware and state."""

    partition: str
    num_nodes: int
    cpus: int
    memory_mb: int
    gpus: int
    gpu_types: Mapping[str, int] = field(default_factory=dict)  #: the number of GPUs of each type that has a name
    usable: bool
    names: str  #: nodelist as Slurm writes it, `n[1-4]`

    def gpus_of(self, kind: str | None) -> int:
        """Return the number of GPUs of a type; for None, that of all types."""
        if kind is None:
            return self.gpus
        return self.gpu_types.get(kind, 0)


@dataclass(frozen=True, kw_only=True)
class Partition:
    """A partition of the cluster and its nodes."""

    name: str
    facts: Mapping[str, str]  #: the record that `scontrol show partition` prints
    nodes: tuple[NodeGroup, ...]

    def limit(self, key: str) -> int | None:
        """Return a limit of the record, such as `MaxNodes`; None without a limit."""
        return parse_count(self.facts.get(key, ""))

    def allowed(self, kind: str) -> tuple[str, ...] | None:
        """Return the `Accounts`, `Groups` or `Qos` that may use the partition; None if all but the denied may."""
        text = self.facts.get(f"Allow{kind}", "ALL")
        if text.upper() in ("ALL", "(NULL)", ""):
            return None
        return tuple(text.split(","))


@dataclass(frozen=True, kw_only=True)
class NodeState:
    """The state of one node, as `sinfo` shows it."""

    name: str
    state: str  #: long name: idle, mixed, allocated, down*, …
    hardware: str  #: features, GPUs and other GRES, cores and memory, as `sinfo` prints them
    since: float | None = None  #: time of the reason, in seconds since the epoch
    user: str = ""  #: the user who set the reason
    reason: str = ""  #: the reason why the node is down or drained

    @property
    def has_failed(self) -> bool:
        """Whether the node is down, has failed or does not respond; a drained node that responds has not failed."""
        return self.state.startswith(("down", "fail")) or self.state.endswith("*")


def is_usable(state: str) -> bool:
    """Return whether a node in a state takes jobs; `*` after it marks a node that does not respond."""
    return not (state.startswith(_UNUSABLE) or state.endswith("*"))


def count_nodes(groups: Iterable[NodeGroup]) -> int:
    """Return the number of nodes in all groups."""
    return sum(group.num_nodes for group in groups)


def parse_partitions(partitions: str, nodes: str) -> list[Partition]:
    """Return the partitions of `scontrol show partition --oneliner` with their nodes, from PARTITION_FORMAT lines."""
    groups: dict[str, list[NodeGroup]] = {}
    for line in nodes.splitlines():
        group = _parse_node_group(line)
        if group is not None:
            groups.setdefault(group.partition, []).append(group)
    parsed = []
    for facts in parse_records(partitions):
        name = facts.get("PartitionName")
        if name:
            parsed.append(Partition(name=name, facts=facts, nodes=tuple(groups.get(name, ()))))
    return parsed


def _parse_node_group(line: str) -> NodeGroup | None:
    """Return the nodes of a line in PARTITION_FORMAT; None for a line of another format."""
    fields = line.split("|")
    if len(fields) != _NUM_PARTITION_FIELDS:
        return None
    partition, nodes, cpus, memory, gres, state, names = fields
    # sinfo prints `16+` if the nodes of one line differ.
    num_nodes = parse_count(nodes.removesuffix("+"))
    num_cpus = parse_count(cpus.removesuffix("+"))
    memory_mb = parse_count(memory.removesuffix("+"))
    if num_nodes is None or num_cpus is None or memory_mb is None:
        return None
    gpus: Counter[str] = Counter()
    for match in _GPU_GRES.finditer(gres):
        gpus[match["kind"] or ""] += int(match["number"])
    return NodeGroup(
        partition=partition,
        num_nodes=num_nodes,
        cpus=num_cpus,
        memory_mb=memory_mb,
        gpus=gpus.total(),
        gpu_types={kind: number for kind, number in gpus.items() if kind},
        usable=is_usable(state),
        names=names,
    )


def parse_node_states(text: str) -> list[NodeState]:
    """Return the nodes of `sinfo --Node` lines in NODE_FORMAT, each once: sinfo has a line per node and partition."""
    nodes = {}
    for line in text.splitlines():
        # The reason, the last field, may contain `|`.
        fields = line.strip().split("|", _NUM_NODE_FIELDS - 1)
        if len(fields) != _NUM_NODE_FIELDS:
            continue
        name, state, *hardware, since, user, reason = fields
        reason = reason.strip()
        if reason.lower() == "none":
            reason = ""
        nodes[name] = NodeState(
            name=name,
            state=state,
            hardware="|".join(hardware),
            since=parse_time(since),
            user=parse_text(user),
            reason=reason,
        )
    return list(nodes.values())


def parse_boot_times(text: str) -> dict[str, float]:
    """Return the boot time by node from `scontrol show node --oneliner`, without nodes with an unknown time."""
    boot_times = {}
    for record in parse_records(text):
        name = record.get("NodeName")
        booted = parse_time(record.get("BootTime"))
        if name is not None and booted is not None:
            boot_times[name] = booted
    return boot_times


# The state of a job, from scontrol, squeue and sacct.

#: States of jobs that have ended. A job in any other state lives, also in one that a later release of Slurm adds.
ENDED = frozenset(
    {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED"}
    | {"TIMEOUT"}
)
#: States of jobs that are in the queue, or about to return to it.
WAITING = frozenset(
    {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT", "EXPEDITING"}
)
#: Not a signal of Linux: Slurm shows its code 253 for a lack of memory as `0:125`.
_OUT_OF_MEMORY_SIGNAL = 125
#: Reasons that repeat the state or the exit code of a failed job.
_REDUNDANT_REASONS = ("NonZeroExitCode", "NodeDown", "TimeLimit", "OutOfMemory")
#: Output fields requested of squeue and sacct.
SQUEUE_FIELDS = "%i|%T|%r|%V|%S|%e|%N|%j"
SACCT_FIELDS = "JobID,JobName,State,ExitCode,Submit,Start,End,NodeList"
#: The same, with scontrol's names.
_SQUEUE_KEYS = ("JobId", "JobState", "Reason", "SubmitTime", "StartTime", "EndTime", "NodeList", "JobName")
_SACCT_KEYS = ("JobId", "JobName", "JobState", "ExitCode", "SubmitTime", "StartTime", "EndTime", "NodeList")


@dataclass(frozen=True, kw_only=True)
class JobInfo:
    """The state of a job. Times are seconds since the epoch."""

    id: str
    name: str = ""
    state: str  #: Slurm's name: PENDING, RUNNING, COMPLETED, TIMEOUT, …
    reason: str = ""  #: why the job is pending (Priority, Resources, …) or has failed
    submitted: float | None = None  #: time of the submission or of the last requeue
    started: float | None = None  #: of a pending job: the expected start
    ended: float | None = None  #: of a running job: the end of its allocation
    exit_code: int = 0
    signal: int = 0
    nodes: str = ""
    restarts: int = 0
    step_states: tuple[str, ...] = ()  #: states of the steps since the last requeue

    @property
    def alive(self) -> bool:
        """Whether the job waits or runs."""
        return self.state not in ENDED

    @property
    def waiting(self) -> bool:
        return self.state in WAITING

    @property
    def out_of_memory(self) -> bool:
        """Whether the kernel has killed a process of the job, or of one of its steps, for lack of memory.

        Slurm reports this also if the killed process is a child of a rank, and all ranks have ended with success.
        """
        return "OUT_OF_MEMORY" in (self.state, *self.step_states)

    def queue_s(self, now: float) -> float | None:
        """Return the seconds in the queue since the submission or the last requeue; None if unknown."""
        until = now if self.waiting else self.started
        if until is None or self.submitted is None:
            return None
        return max(0.0, until - self.submitted)

    def sentence(self) -> str:
        """Return the state, with the reason and the nodes, as a sentence."""
        if self.waiting:
            return f"job {self.id} waits ({self.reason or self.state})"
        nodes = f" on {self.nodes}" if self.nodes else ""
        if self.alive:
            return f"job {self.id} is {self.state}{nodes}"
        if self.state == "CANCELLED" and not self.nodes:
            return f"job {self.id} was cancelled in the queue"
        text = f"job {self.id} ended as {self.state}"
        if self.reason:
            text += f" ({self.reason})"
        if self.exit_code:
            text += f" with exit code {self.exit_code}"
        if self.signal == _OUT_OF_MEMORY_SIGNAL:
            text += " (0:125, Slurm's exit code for a process that was killed for lack of memory)"
        elif self.signal:
            text += f" by signal {self.signal}"
        return text + nodes

    def describe(self, now: float) -> str:
        """Return the sentence with the expected start, the time in the queue and the number of requeues."""
        parts = [self.sentence()]
        if self.waiting and self.started is not None and self.started > now:
            parts.append(f"expected to start at {local_time(self.started)}")
        queue_s = self.queue_s(now)
        if queue_s is not None:
            parts.append(f"{duration(queue_s)} in the queue")
        if self.restarts:
            parts.append(f"requeued {plural(self.restarts, 'time')}")
        return ", ".join(parts)


def parse_scontrol(text: str, job_id: str) -> JobInfo | None:
    """Return a job from `scontrol --oneliner show job`; None if it is not there."""
    records = [record for record in parse_records(text) if "JobId" in record]
    if not records:
        return None
    record = records[0]
    task = job_id.partition("_")[2]
    if task:
        record = next((other for other in records if other.get("ArrayTaskId") == task), record)
    return _job_info(job_id, record, restarts=parse_count(record.get("Restarts", "0")) or 0)


def parse_squeue(text: str, job_id: str) -> JobInfo | None:
    """Return a job from lines of squeue with SQUEUE_FIELDS; None if it is not there."""
    for line in text.splitlines():
        # The name of the job, the last field, may contain `|`.
        fields = line.split("|", len(_SQUEUE_KEYS) - 1)
        if len(fields) == len(_SQUEUE_KEYS) and fields[0] == job_id:
            return _job_info(job_id, dict(zip(_SQUEUE_KEYS, fields, strict=True)))
    return None


@dataclass
class _SacctStart:
    """The rows of sacct about one start of a job: that of the job, and those of its steps."""

    job: dict[str, str]
    step_states: list[str] = field(default_factory=list)


def parse_sacct(text: str, job_id: str) -> JobInfo | None:
    """Return a job from `sacct --duplicates`: its last start, the number of earlier ones, and its steps."""
    starts: list[_SacctStart] = []
    for line in text.splitlines():
        row = dict(zip(_SACCT_KEYS, line.split("|"), strict=False))  # fewer in a line of another format
        row_id, dot, _ = row["JobId"].partition(".")
        if row_id != job_id or len(row) < len(_SACCT_KEYS):
            continue
        row["JobState"] = _accounted_state(row["JobState"])
        last = starts[-1] if starts else None
        if dot:
            if last is not None:
                last.step_states.append(row["JobState"])
        elif last is not None and last.job["JobState"] == "RESIZING":
            # The job has lost a node: each size has a row, but it is one start.
            last.job = {**row, "StartTime": last.job["StartTime"]}
        else:
            starts.append(_SacctStart(row))
    if not starts:
        return None
    last = starts[-1]
    return _job_info(job_id, last.job, restarts=len(starts) - 1, step_states=tuple(last.step_states))


def _accounted_state(text: str) -> str:
    """Return the state of sacct's field: `CANCELLED` for `CANCELLED by 1000` and for `CANCELLED+`."""
    words = text.split()
    if not words:
        return "UNKNOWN"
    return words[0].rstrip("+")


def _job_info(job_id: str, facts: Mapping[str, str], **more: Any) -> JobInfo:
    """Return a job from facts with scontrol's names."""
    state = facts.get("JobState", "")
    reason = facts.get("Reason", "")
    explains_failure = state in ("FAILED", "BOOT_FAIL") and reason not in _REDUNDANT_REASONS
    if state not in WAITING and not explains_failure:
        # A cancelled or completed job keeps the reason that it was pending for.
        reason = ""
    exit_code = 0
    signal = 0
    codes = re.fullmatch(r"([0-9]{1,9}):([0-9]{1,9})", facts.get("ExitCode", ""))
    if codes:
        exit_code = int(codes[1])
        signal = int(codes[2])
    return JobInfo(
        id=job_id,
        name=facts.get("JobName", ""),
        state=state or "UNKNOWN",
        reason=parse_text(reason),
        submitted=parse_time(facts.get("SubmitTime")),
        started=parse_time(facts.get("StartTime")),
        ended=parse_time(facts.get("EndTime")),
        exit_code=exit_code,
        signal=signal,
        nodes=parse_text(facts.get("NodeList")),
        **more,
    )


# The starts of a job in accounting, from sacct.

#: Output fields requested of sacct.
START_FIELDS = "JobID,JobName,Submit,Start,End,NodeList,AllocCPUS,AllocTRES,ConsumedEnergyRaw,State"


@dataclass(frozen=True, kw_only=True)
class AccountedStart:
    """One start of a job in accounting. Times are seconds since the epoch."""

    name: str
    began: float
    ended: float | None  #: None while the job runs
    queue_s: float  #: time in the queue before this start; after a requeue, the time since the end of the start before
    nodes: str
    cores: int
    gpus: int
    energy_j: float | None  #: None if the cluster does not measure it
    state: str = ""  #: of this start, such as PREEMPTED or NODE_FAIL
    resized: float | None = None  #: time since which it has had `last_nodes`, if it has lost nodes or given some back
    last_nodes: str = ""


def parse_starts(text: str, job_id: str) -> list[AccountedStart]:
    """Return the starts of a job from `sacct --duplicates`, oldest first.

    A job that has lost nodes or given some back has a record for each size. These count as one start, with the nodes
    and cores of its begin. Times in which the job only waited are left out.
    """
    names = START_FIELDS.split(",")
    parsed = []
    for line in text.splitlines():
        row = dict(zip(names, line.split("|"), strict=False))
        if len(row) < len(names) or row["JobID"] != job_id:
            continue  # a line of another format, or another job
        accounted = _parse_start(row)
        if accounted is not None:
            parsed.append(accounted)
    starts: list[AccountedStart] = []
    for start in sorted(parsed, key=lambda start: start.began):
        last = starts[-1] if starts else None
        if last is not None and last.state == "RESIZING":
            starts[-1] = _joined(last, start)
            continue
        # Slurm submits a requeued job again when it has cleaned up all of its nodes, some seconds after the job's end.
        # It may give the id of an old job to another one.
        if last is not None and last.ended is not None and last.name == start.name:
            start = replace(start, queue_s=max(start.queue_s, start.began - last.ended))
        starts.append(start)
    return starts


def _parse_start(row: dict[str, str]) -> AccountedStart | None:
    """Return a start from a row of START_FIELDS; None if the job only waited."""
    began = parse_time(row["Start"])
    submitted = parse_time(row["Submit"])
    cores = parse_count(row["AllocCPUS"]) or 0
    if began is None or not cores:
        return None
    gpus = re.search(r"(?:^|,)gres/gpu=([0-9]{1,9})(?:,|$)", row["AllocTRES"])
    # Slurm without an energy plugin reports 0.
    energy = parse_count(row["ConsumedEnergyRaw"]) or None
    queue_s = 0.0
    if submitted is not None:
        queue_s = max(0.0, began - submitted)
    return AccountedStart(
        name=row["JobName"],
        began=began,
        ended=parse_time(row["End"]),
        queue_s=queue_s,
        nodes=parse_text(row["NodeList"]),
        cores=cores,
        gpus=int(gpus[1]) if gpus else 0,
        energy_j=float(energy) if energy is not None else None,
        state=row["State"].partition(" ")[0],  # without `by UID`
    )


def _joined(start: AccountedStart, smaller: AccountedStart) -> AccountedStart:
    """Return a start with the end, the state and the energy of its next record, when it had fewer nodes."""
    energies = [record.energy_j for record in (start, smaller) if record.energy_j is not None]
    return replace(
        start,
        ended=smaller.ended,
        state=smaller.state,
        energy_j=sum(energies) if energies else None,
        resized=smaller.began,
        last_nodes=smaller.nodes,
    )
