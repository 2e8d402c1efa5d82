"""The ledger, in which every second of every allocated GPU or core has one cause, and the cost of a run."""

import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, Protocol

from hpcdist.config.cluster_schema import ClusterConfig, read_price
from hpcdist.config.slurm_notation import expand
from hpcdist.config.written import read_section
from hpcdist.errors import ConfigError, RunFolderError
from hpcdist.host.json_files import LARGEST, read_json_lines
from hpcdist.review.facts import read_attempts, read_checkpoints
from hpcdist.run.attempt_times import CAUSES, AttemptTimes, Cause, NodeShare, end_of, read_times
from hpcdist.run.folder import Attempt, RunDir
from hpcdist.run.job_record import JobStart, all_job_starts
from hpcdist.run.lease import holder

#: One line for each cause; docs/concepts/ledger.md has the whole definitions.
MEANINGS: dict[Cause, str] = {
    "start": "from the allocation to the first step: preflight, imports, connection of the ranks, restore",
    "compile": "the first step of each attempt",
    "data": "waiting for the next batch",
    "compute": "training steps",
    "communication": "waiting for other ranks in training steps",
    "checkpoint": "training blocked by saves",
    "evaluation": "evaluation",
    "redone": "steps that were lost and done again, without the first one of an attempt, which is `compile`",
    "discarded": "steps after the newest checkpoint that are not done again",
    "finish": "after the last step: last save, export of the model, end of ranks and job",
    "idle": "GPUs or cores without a rank, ranks without steps",
    "down": "no running ranks after a failure",
    "unknown": "attempts in which a script has reported no step",
}


#: Wall time below which a run is named short beside the shares of its causes.
SHORT_S = 60.0
SHORT_RUN = "short run"
#: Causes of rank 0 whose times are recorded (`phases.jsonl`).
PHASES: tuple[Cause, ...] = ("start", "compile", "evaluation", "checkpoint", "finish")


@dataclass(frozen=True, kw_only=True)
class RankAccount:
    """The last account that a rank has written, see `TimeAccount.report`. Times are seconds since the epoch."""

    began: float
    until: float
    cause: Cause
    closed: bool
    seconds: Mapping[Cause, float]


@dataclass(frozen=True, kw_only=True)
class TimedAttempt:
    attempt: Attempt
    times: AttemptTimes
    began: float
    ended: float  #: the recorded end, now for a live attempt, or the last sign of a killed one
    is_live: bool
    lost: float = 0.0  #: part of the steps that no earlier attempt had done: they are lost, and not done again

    @property
    def nodes(self) -> dict[str, float]:
        return {node: share.allocated for node, share in self.times.shares.items()}


def read_accounts(timed: TimedAttempt, shares: Iterable[NodeShare]) -> dict[int, RankAccount | None]:
    """Return the accounts by rank; those of a plain script, which may report steps on rank 0 only, have that one's."""
    first = None if timed.times.measured else _known_account(timed)
    return {rank: _known_account(timed, rank) or first for share in shares for rank in share.ranks}


def _known_account(timed: TimedAttempt, rank: int = 0) -> RankAccount | None:
    """Return the last account of a rank; None if it has none, and for a script that has reported no step."""
    found = read_account(timed.attempt, rank)
    return None if found is not None and found.cause == "start" and not timed.times.measured else found


def last_step_of(timed: TimedAttempt, accounts: Iterable[RankAccount | None]) -> float:
    """Return when the last rank had done its steps; the end of the attempt if one has not ended well."""
    ends = [one.until - one.seconds.get("finish", 0.0) if one and one.closed else timed.ended for one in accounts]
    return min(max(ends, default=timed.ended), timed.ended)


def rank_seconds(timed: TimedAttempt, account: RankAccount | None, last_step: float) -> dict[Cause, float]:
    """Return the seconds of a rank by cause; they add up to the duration of the attempt.

    Time before the first account is `start`. A rank that has ended well is `idle` until `last_step`, when the last one
    has done its steps, and then `finish`. Another rank without further accounts is `down`: it was killed, or did not
    answer any more. A plain script continues after its last report.
    """
    began, ended = timed.began, timed.ended
    after = _cause_after(timed, account)
    if account is None:
        return {after: ended - began}
    # Clocks of nodes differ, and an account must not contain more time than the attempt.
    first = min(max(account.began, began), ended)
    last = min(max(account.until, first), ended)
    known = sum(account.seconds.values())
    scale = (last - first) / known if known > 0 else 0.0
    sums = {cause: seconds * scale for cause, seconds in account.seconds.items()}
    sums["start"] = sums.get("start", 0.0) + first - began + (last - first if known <= 0 else 0.0)
    over = min(max(last, last_step), ended) if account.closed else last
    sums["idle"] = sums.get("idle", 0.0) + over - last
    for cause in ("data", "compute", "communication") if timed.lost else ():
        lost_s = timed.lost * sums.get(cause, 0.0)
        sums[cause], sums["discarded"] = sums.get(cause, 0.0) - lost_s, sums.get("discarded", 0.0) + lost_s
    sums[after] = sums.get(after, 0.0) + ended - over
    return sums


def _cause_after(timed: TimedAttempt, account: RankAccount | None) -> Cause:
    """Return the cause of the time of a rank after its last account, and after the last step of all ranks."""
    is_script = not timed.times.measured
    if account is None:
        return "unknown" if is_script else "start"
    return "finish" if account.closed else account.cause if timed.is_live or is_script else "down"


def read_account(attempt: Attempt, rank: int) -> RankAccount | None:
    """Return the last account of a rank; None before the first one, and if it is damaged."""
    found = (attempt.read_beat(rank) or {}).get("account")
    if not isinstance(found, dict) or not isinstance(found.get("seconds"), dict):
        return None
    numbers = [found.get("began"), found.get("until"), *found["seconds"].values()]
    if not all(map(_is_time, numbers)) or not all(one in CAUSES for one in (found.get("cause"), *found["seconds"])):
        return None
    return RankAccount(
        began=found["began"],
        until=found["until"],
        cause=found["cause"],
        closed=found.get("closed") is True,
        seconds=found["seconds"],
    )


def _is_time(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value <= LARGEST


@dataclass(frozen=True, kw_only=True)
class AllocationTimes:
    """A supervision of a local run, or a start of a Slurm job. Times are seconds since the epoch."""

    began: float
    ended: float
    attempts: Sequence[TimedAttempt]
    nodes: dict[str, float] = field(default_factory=dict)  #: allocated GPUs or cores of each node
    queue_s: float = 0.0
    energy_j: float | None = None
    resized: float | None = None  #: time since which a job has had `last_nodes` only
    last_nodes: Collection[str] = ()


def timed_attempts(run: RunDir, now: float) -> list[TimedAttempt]:
    known = [(attempt, times) for attempt in run.attempts() if (times := read_times(attempt)) is not None]
    is_held = run.read_state().status == "running" and holder(run) is not None
    found = []
    for index, (attempt, times) in enumerate(known):
        is_live = times.ended is None and is_held and index == len(known) - 1
        ended = now if is_live else end_of(attempt, times)
        if index + 1 < len(known):
            ended = min(ended, known[index + 1][1].began)
        ended = max(ended, times.began)
        found.append(TimedAttempt(attempt=attempt, times=times, began=times.began, ended=ended, is_live=is_live))
    return found


def unit_of(attempts: Iterable[TimedAttempt]) -> Literal["GPU", "core"]:
    return "GPU" if any(attempt.times.unit == "GPU" for attempt in attempts) else "core"


def allocations_of(run: RunDir, now: float | None = None) -> list[AllocationTimes]:
    now = time.time() if now is None else now
    attempts = timed_attempts(run, now)
    starts = all_job_starts(run)
    # A supervisor that was killed is restarted in the same start of its job.
    groups: dict[JobStart | float, list[TimedAttempt]] = {start: [] for start in starts if start.ended is not None}
    for attempt in attempts:
        supervised = attempt.times.supervised
        own = next((start for start in reversed(starts) if start.contains(supervised)), supervised)
        groups.setdefault(own, []).append(attempt)
    found = []
    for key, group in groups.items():
        last = group[-1].ended if group else 0.0
        if not isinstance(key, JobStart):  # the time at which the supervisor of a local run began
            found.append(AllocationTimes(began=key, ended=last, attempts=group, nodes=group[0].nodes))
            continue
        # Between the recorded end and Slurm's, Slurm ends the job.
        began, ended = key.began, max(key.began, last if key.ended is None else key.ended)
        clipped = []
        for one in group:
            first = min(max(one.began, began), ended)
            clipped.append(replace(one, began=first, ended=min(max(one.ended, first), ended)))
        # A start of a job may end before its first attempt.
        allocated = key.gpus if unit_of(attempts) == "GPU" else key.cores
        nodes: dict[str, float] = group[0].nodes if group else {key.nodes: allocated} if allocated else {}
        allocation = AllocationTimes(began=began, ended=ended, attempts=clipped, nodes=nodes)
        allocation = replace(allocation, queue_s=key.queue_s, energy_j=key.energy_j)
        if key.resized is not None:
            allocation = replace(allocation, resized=key.resized, last_nodes=expand(key.last_nodes))
        found.append(allocation)
    return sorted(found, key=lambda one: one.began)


@dataclass(frozen=True, kw_only=True)
class Entry:
    cause: Cause
    attempt: int  #: 0 for time of an allocation outside of all attempts
    node: str
    seconds: float  #: resource-seconds: wall time × number of GPUs or cores


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A part of the time axis of a run: of rank 0, or of an allocation outside of attempts."""

    cause: Literal["queue"] | Cause
    attempt: int  #: 0 outside of all attempts
    began: float
    ended: float


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """All entries of a run. Their sum is the allocated time: wall time × resources."""

    unit: Literal["GPU", "core"] = "core"
    entries: tuple[Entry, ...] = ()
    intervals: tuple[Interval, ...] = ()
    queue_s: float = 0.0  #: wall time in the queue; no resources are allocated meanwhile
    energy_kwh: float | None = None  #: None where no sensor measures it
    energy_of: str = ""  #: what was measured: nodes, GPUs or CPUs
    ended: float = 0.0  #: end of the last allocation, or now while it lasts; seconds since the epoch
    running_s: float = 0.0  #: wall time of all allocations, without the queue and pauses between them
    is_measured: bool = True  #: False with attempts in which a plain script has reported no steps
    site: ClusterConfig = field(default_factory=ClusterConfig)  #: with the prices

    @cached_property
    def seconds(self) -> dict[Cause, float]:
        """Resource-seconds by cause, in the order of CAUSES; causes without time are left out."""
        sums = dict.fromkeys(CAUSES, 0.0)
        for entry in self.entries:
            sums[entry.cause] += entry.seconds
        return {cause: seconds for cause, seconds in sums.items() if seconds}

    @property
    def allocated_s(self) -> float:
        return sum(self.seconds.values())

    @property
    def goodput(self) -> float | None:
        """Useful compute as a part of the allocated time, between 0 and 1; None if it is not measured."""
        if not self.is_measured:
            return None
        return self.seconds.get("compute", 0.0) / self.allocated_s if self.allocated_s else 0.0

    @property
    def goodput_text(self) -> str:
        return percent(self.goodput) + f" ({SHORT_RUN})" * (self.goodput is not None and self.is_short)

    @property
    def is_short(self) -> bool:
        """Whether start and end dominate the shares of the causes."""
        return 0 < self.running_s < SHORT_S

    @property
    def energy_text(self) -> str:
        return "" if self.energy_kwh is None else f"{amount(self.energy_kwh)} kWh ({self.energy_of})"

    @property
    def price_per_hour(self) -> str:
        return (self.site.price_per_gpu_hour if self.unit == "GPU" else self.site.price_per_core_hour) or ""

    @property
    def price(self) -> tuple[str, float, str] | None:
        """The price with the text before and after it, such as the currency; None without the site's price."""
        return price_of(self.price_per_hour, self.allocated_s)

    @property
    def costs(self) -> dict[str, str]:
        """The price, and the CO₂ of measured energy, by name; without a key of the site neither."""
        found = {}
        if (price := self.price) is not None:
            found["price"] = money(*price)
        if self.site.co2_g_per_kwh is not None and self.energy_kwh is not None:
            grams = self.site.co2_g_per_kwh * self.energy_kwh
            found["CO₂"] = f"{amount(grams)} g" if grams < 1000 else f"{amount(grams / 1000)} kg"
        return found

    def rows(self) -> list[tuple[str, str, str, str]]:
        total = self.allocated_s
        rows = [
            (cause, hours_text(seconds), percent(seconds / total), MEANINGS[cause])
            for cause, seconds in self.seconds.items()
        ]
        return [*rows, ("allocated", hours_text(total), percent(1.0), "")]


def read_ledger(run: RunDir) -> Ledger:
    allocations = allocations_of(run)
    attempts = [attempt for allocation in allocations for attempt in allocation.attempts]
    lost = _lost_parts(run, attempts)
    for index, one in enumerate(allocations):
        own = [replace(timed, lost=lost.get(timed.attempt.number, 0.0)) for timed in one.attempts]
        allocations[index] = replace(one, attempts=own)
    energy: dict[str, float] = {}  # joules by what was measured
    for allocation in allocations:
        if allocation.energy_j is not None:
            energy["nodes"] = energy.get("nodes", 0.0) + allocation.energy_j
            continue
        # The ranks' own values count where Slurm's accounting has none; several ranks of a node may share a sensor.
        for timed in allocation.attempts:
            for share in timed.times.shares.values():
                sensors: dict[str, float] = {}
                for rank in share.ranks:
                    measured = (timed.attempt.read_beat(rank) or {}).get("energy_j")
                    for sensor, joules in measured.items() if isinstance(measured, dict) else ():
                        if _is_time(joules):
                            sensors[sensor] = max(sensors.get(sensor, 0.0), joules)
                for sensor, joules in sensors.items():
                    kind = "GPUs" if sensor.startswith("GPU-") else "CPUs"
                    energy[kind] = energy.get(kind, 0.0) + joules
    site = ClusterConfig()
    with suppress(ConfigError, RunFolderError, OSError):  # a damaged file
        site = read_section(run.config, "cluster", ClusterConfig)
    return Ledger(
        site=site,
        unit=unit_of(attempts),
        entries=tuple(entry for allocation in allocations for entry in _entries(allocation)),
        intervals=tuple(interval for allocation in allocations for interval in _intervals(allocation)),
        queue_s=sum(allocation.queue_s for allocation in allocations),
        energy_kwh=sum(energy.values()) / 3.6e6 if energy else None,
        energy_of=" and ".join(sorted(energy, reverse=True)),
        ended=max((allocation.ended for allocation in allocations), default=0.0),
        running_s=sum(allocation.ended - allocation.began for allocation in allocations),
        # Of a plain script it is known which time was useful only if it reports steps.
        is_measured=all(timed.times.measured or _known_account(timed) is not None for timed in attempts),
    )


def together(ledgers: Collection[Ledger]) -> Ledger:
    """Return the time of several runs by cause, without intervals and prices; empty if they have different units."""
    units = {one.unit for one in ledgers if one.entries}
    if len(units) != 1:
        return Ledger()
    return Ledger(
        unit=units.pop(),
        entries=tuple(entry for one in ledgers for entry in one.entries),
        queue_s=sum(one.queue_s for one in ledgers),
        running_s=sum(one.running_s for one in ledgers),
        is_measured=all(one.is_measured for one in ledgers),
    )


def _lost_parts(run: RunDir, attempts: Sequence[TimedAttempt]) -> dict[int, float]:
    """Return which part of the new steps of an attempt is lost: steps after the newest checkpoint, not done again.

    A finished run has kept all steps. What the last attempt of a plain script has kept is unknown, so it counts.
    """
    checkpoints = read_checkpoints(run)
    known = {one.number: one for one in read_attempts(run, run.read_state(), checkpoints)} if attempts else {}
    last = known.get(attempts[-1].attempt.number) if attempts else None
    if last is None or last.status == "finished":
        return {}
    kept = checkpoints[-1].step if checkpoints else 0
    if attempts[-1].is_live or not attempts[-1].times.measured:
        kept = max(kept, last.last_step or 0)
    found = {}
    for timed in attempts:
        one = known[timed.attempt.number]
        first, end = max(one.first_step or 0, timed.times.reached), one.last_step or 0
        if end > max(first, kept):
            found[one.number] = (end - max(first, kept)) / (end - first)
    return found


def amount(value: float) -> str:
    """Return hours, kWh, money or percent with two significant digits, and from ten on as a whole number."""
    if value >= 9.95:
        return f"{value:,.0f}"
    return f"{value:.2g}" if value >= 0.001 or value == 0 else "<0.001"


def price_of(per_hour: str, seconds: float) -> tuple[str, float, str] | None:
    found = read_price(per_hour)
    return found and (found[0], found[1] * seconds / 3600, found[2])


def money(before: str, value: float, after: str) -> str:
    text = amount(value)
    return "<" * text.startswith("<") + f"{before}{text.removeprefix('<')}{after}"


class Cost(Protocol):
    """A ledger, or the part of it that MLflow has."""

    @property
    def allocated_s(self) -> float: ...
    @property
    def unit(self) -> str: ...
    @property
    def price(self) -> tuple[str, float, str] | None: ...


def cost_of(ledgers: Iterable[Cost]) -> str:
    """Return the hours and the price of ledgers; GPU-hours and core-hours, or currencies, cannot be added."""
    seconds: dict[str, float] = {}
    prices: dict[tuple[str, str], float] = {}
    for one in ledgers:
        seconds[one.unit] = seconds.get(one.unit, 0.0) + one.allocated_s
        if one.price is not None:
            before, value, after = one.price
            prices[before, after] = prices.get((before, after), 0.0) + value
    words = [f"{hours_text(total)} {unit}-hours" for unit, total in seconds.items() if total]
    return ", ".join([*words, *(money(before, value, after) for (before, after), value in prices.items() if value)])


def percent(share: float | None) -> str:
    if share is None:
        return "not measured"
    return "<0.1 %" if 0 < share < 0.001 else f"{amount(100 * share)} %"


def hours_text(seconds: float) -> str:
    return amount(seconds / 3600)


def _entries(allocation: AllocationTimes) -> Iterator[Entry]:
    for cause, nodes, began, ended in _gaps(allocation):
        for node, count in nodes.items():
            yield Entry(cause=cause, attempt=0, node=node, seconds=(ended - began) * count)
    for timed in allocation.attempts:
        sums: dict[tuple[str, Cause], float] = {}
        shares = timed.times.shares
        accounts = read_accounts(timed, shares.values())
        last_step = last_step_of(timed, accounts.values())
        for node, share in shares.items():
            unused = share.allocated - share.share * len(share.ranks)
            sums[node, "idle"] = max(0.0, unused) * (timed.ended - timed.began)
            for rank in share.ranks:
                for cause, seconds in rank_seconds(timed, accounts[rank], last_step).items():
                    sums[node, cause] = sums.get((node, cause), 0.0) + seconds * share.share
        for (node, cause), seconds in sorted(sums.items()):
            if seconds > 0:
                yield Entry(cause=cause, attempt=timed.attempt.number, node=node, seconds=seconds)


def allocated_s(allocation: AllocationTimes) -> float:
    """Return the resource-seconds of an allocation: the sum of its entries, without reading the accounts of ranks."""
    spans = [(nodes, began, ended) for _, nodes, began, ended in _gaps(allocation)]
    spans += [(timed.nodes, timed.began, timed.ended) for timed in allocation.attempts]
    return sum((ended - began) * sum(nodes.values()) for nodes, began, ended in spans)


def _gaps(allocation: AllocationTimes) -> Iterator[tuple[Cause, dict[str, float], float, float]]:
    """Yield times outside of attempts: `start` before the first, `down` after a failed one, `finish` after others."""
    cause: Cause = "start"
    at, nodes = allocation.began, allocation.nodes
    for timed in allocation.attempts:
        if timed.began > at:
            yield cause, nodes, at, timed.began
        at = max(at, timed.ended)
        nodes = timed.nodes or nodes  # those that were lost do not belong to the later gaps
        was_killed = timed.times.ended is None and not timed.is_live
        cause = "down" if timed.times.failed or was_killed else "finish"
    if allocation.resized is not None and at < allocation.resized < allocation.ended:
        # The run has ended, and its job has given back all nodes but one for the upload.
        yield cause, nodes, at, allocation.resized
        at = allocation.resized
        nodes = {node: count for node, count in nodes.items() if node in allocation.last_nodes}
    if allocation.ended > at:
        yield cause, nodes, at, allocation.ended


def _intervals(allocation: AllocationTimes) -> Iterator[Interval]:
    first = allocation.attempts[0].attempt.number if allocation.attempts else 0
    if allocation.queue_s > 0:
        began = allocation.began - allocation.queue_s
        yield Interval(cause="queue", attempt=first, began=began, ended=allocation.began)
    for cause, _, began, ended in _gaps(allocation):
        yield Interval(cause=cause, attempt=0, began=began, ended=ended)
    for timed in allocation.attempts:
        yield from _attempt_intervals(timed)


def _attempt_intervals(timed: TimedAttempt) -> list[Interval]:
    account = _known_account(timed)
    last = timed.began if account is None else min(max(account.until, timed.began), timed.ended)
    found: list[Interval] = []
    redone_s = 0.0 if account is None else account.seconds.get("redone", 0.0)  # of the first steps

    def add(cause: Cause, began: float, ended: float) -> None:
        nonlocal redone_s
        if cause == "compute" and redone_s > 0:
            redone_s, before = redone_s - (ended - began), min(ended, began + redone_s)
            add("redone", began, before)
            began = before
        if ended > began:
            first = found.pop().began if found and found[-1].cause == cause else began
            found.append(Interval(cause=cause, attempt=timed.attempt.number, began=first, ended=ended))

    phases = []
    for record in read_json_lines(timed.attempt.phases):  # some may be damaged
        began, ended = record.get("began", -1.0), record.get("ended", -1.0)
        if record.get("cause") in PHASES and _is_time(began) and _is_time(ended) and began <= ended:
            phases.append((record["cause"], began, ended))
    at = timed.began
    between: Cause = "start"
    for cause, began, ended in sorted(phases, key=lambda phase: phase[1]):
        began, ended = max(at, min(began, last)), min(ended, last)
        if ended > at:
            add(between, at, began)
            add(cause, began, ended)
            # A script goes from its start to steps; a trainer compiles, which is a phase.
            between = between if cause == "start" and timed.times.measured else "compute"
            at = ended
    over = max(at, last - account.seconds.get("finish", 0.0)) if account is not None else last
    add(between, at, over)
    add("finish", over, last)
    add(_cause_after(timed, account), last, timed.ended)
    lost_s = timed.lost * sum(one.ended - one.began for one in found if one.cause == "compute")
    for index, one in reversed(list(enumerate(found))):  # the last steps
        if one.cause == "compute" and lost_s > 0:
            kept = max(one.began, one.ended - lost_s)
            lost_s -= one.ended - kept
            before = [replace(one, ended=kept)] if kept > one.began else []
            found[index : index + 1] = [*before, replace(one, cause="discarded", began=kept)]
    return found
