"""The ledger, in which every second of every allocated GPU or core has one cause, and the cost of a run."""

import math
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Literal, Protocol, TypeVar

from hpcdist.config.cluster_schema import ClusterConfig, read_price
from hpcdist.config.slurm_notation import expand
from hpcdist.config.written import read_section
from hpcdist.errors import ConfigError, RunFolderError
from hpcdist.host.json_files import LARGEST, read_json_lines
from hpcdist.review.facts import read_attempts, read_checkpoints, readable
from hpcdist.run.attempt_times import CAUSES, AttemptTimes, Cause, NodeShare, end_of, read_times
from hpcdist.run.folder import Attempt, RunDir
from hpcdist.run.job_record import JobStart, all_job_starts, start_at
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
    "idle": "GPUs or cores without a rank, ranks without steps, ranks that did nothing (launch.idle_timeout_s)",
    "down": "no running ranks after a failure",
    "unknown": "attempts in which a script has reported no step",
}


#: Wall time below which a run is named short beside the shares of its causes.
SHORT_S = 60.0
SHORT_RUN = "short run"
#: Causes of rank 0 with recorded times (`phases.jsonl`).
PHASES: tuple[Cause, ...] = ("start", "compile", "evaluation", "checkpoint", "finish")

_G_PER_KG = 1000
_J_PER_KWH = 3.6e6

K = TypeVar("K")


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
    """An attempt with its begin and end, in seconds since the epoch."""

    attempt: Attempt
    times: AttemptTimes
    began: float
    ended: float  #: the recorded end, now for a live attempt, or the last sign of a killed one
    is_live: bool
    lost: float = 0.0  #: part of the steps that no earlier attempt had done: they are lost, and not done again

    @property
    def nodes(self) -> dict[str, float]:
        """Allocated GPUs or cores by node."""
        return {node: share.allocated for node, share in self.times.shares.items()}


def read_accounts(timed: TimedAttempt, shares: Iterable[NodeShare]) -> dict[int, RankAccount | None]:
    """Return the accounts by rank; those of a plain script, which may report steps on rank 0 only, have that one's."""
    instead = None if timed.times.measured else _known_account(timed)
    ranks = [rank for share in shares for rank in share.ranks]
    return {rank: _known_account(timed, rank) or instead for rank in ranks}


def _known_account(timed: TimedAttempt, rank: int = 0) -> RankAccount | None:
    """Return the last account of a rank; None if it has none, and for a script that has reported no step."""
    account = read_account(timed.attempt, rank)
    if account is not None and account.cause == "start" and not timed.times.measured:
        return None
    return account


def last_step_of(timed: TimedAttempt, accounts: Iterable[RankAccount | None]) -> float:
    """Return when the last rank had done its steps; the end of the attempt if one has not ended well."""
    ends = []
    for account in accounts:
        if account is None or not account.closed:
            return timed.ended
        ends.append(account.until - account.seconds.get("finish", 0.0))
    return min(max(ends, default=timed.ended), timed.ended)


#: Causes of the time of steps, which is lost together with the steps.
_OF_STEPS: tuple[Cause, ...] = ("data", "compute", "communication")


def rank_seconds(timed: TimedAttempt, account: RankAccount | None, last_step: float) -> dict[Cause, float]:
    """Return the seconds of a rank by cause; they add up to the duration of the attempt.

    Time before the first account is `start`. A rank that has ended well is `idle` until `last_step`, when the last one
    has done its steps, and then `finish`. Another rank without further accounts is `down`: it was killed, or did not
    answer any more. A plain script continues after its last report.
    """
    began, ended = timed.began, timed.ended
    after = _cause_after(timed, account)
    if account is None:
        return _with_idle_end(timed, {after: ended - began}, after)
    # Clocks of nodes differ, and an account must not contain more time than the attempt.
    first = min(max(account.began, began), ended)
    last = min(max(account.until, first), ended)
    known = sum(account.seconds.values())
    scale = (last - first) / known if known > 0 else 0.0
    sums = {cause: seconds * scale for cause, seconds in account.seconds.items()}
    start_s = first - began
    if known <= 0:
        start_s += last - first
    _add(sums, "start", start_s)
    end_of_steps = last
    if account.closed:
        end_of_steps = min(max(last, last_step), ended)
    _add(sums, "idle", end_of_steps - last)
    if timed.lost:
        for cause in _OF_STEPS:
            lost_s = timed.lost * sums.get(cause, 0.0)
            _add(sums, cause, -lost_s)
            _add(sums, "discarded", lost_s)
    _add(sums, after, ended - end_of_steps)
    return _with_idle_end(timed, sums, after)


def _with_idle_end(timed: TimedAttempt, sums: dict[Cause, float], after: Cause) -> dict[Cause, float]:
    """Return the seconds of a rank with those since `idle_since` as `idle`.

    They are taken from the cause of the time after the last account, and then from the largest cause, because a rank
    counts the time without steps as part of its next step.
    """
    if timed.times.idle_since is None:
        return sums
    left_s = min(max(timed.ended - timed.times.idle_since, 0.0), timed.ended - timed.began)
    others = sorted((cause for cause in sums if cause != after), key=lambda cause: -sums[cause])
    for cause in (after, *others):
        moved_s = min(left_s, sums.get(cause, 0.0))
        left_s -= moved_s
        _add(sums, cause, -moved_s)
        _add(sums, "idle", moved_s)
    return sums


def _add(sums: dict[K, float], key: K, value: float) -> None:
    sums[key] = sums.get(key, 0.0) + value


def _cause_after(timed: TimedAttempt, account: RankAccount | None) -> Cause:
    """Return the cause of the time of a rank after its last account, and after the last step of all ranks."""
    is_script = not timed.times.measured
    if account is None:
        return "unknown" if is_script else "start"
    if account.closed:
        return "finish"
    if timed.is_live or is_script:
        return account.cause
    return "down"


def read_account(attempt: Attempt, rank: int) -> RankAccount | None:
    """Return the last account of a rank; None before the first one, and if it is damaged."""
    content = (attempt.read_beat(rank) or {}).get("account")
    if not isinstance(content, dict) or not isinstance(content.get("seconds"), dict):
        return None
    times = [content.get("began"), content.get("until"), *content["seconds"].values()]
    causes = [content.get("cause"), *content["seconds"]]
    if not all(_is_time(time_s) for time_s in times) or not all(cause in CAUSES for cause in causes):
        return None
    return RankAccount(
        began=content["began"],
        until=content["until"],
        cause=content["cause"],
        closed=content.get("closed") is True,
        seconds=content["seconds"],
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
    """Return the attempts of a run with a recorded begin, oldest first; they do not overlap."""
    attempts: list[tuple[Attempt, AttemptTimes]] = []
    for attempt in run.attempts():
        times = read_times(attempt)
        if times is not None:
            attempts.append((attempt, times))
    is_held = run.read_state().status == "running" and holder(run) is not None
    timed = []
    for index, (attempt, times) in enumerate(attempts):
        following = attempts[index + 1 :]
        is_live = times.ended is None and is_held and not following
        ended = now if is_live else end_of(attempt, times)
        if following:
            _, next_times = following[0]
            ended = min(ended, next_times.began)
        ended = max(ended, times.began)
        timed.append(TimedAttempt(attempt=attempt, times=times, began=times.began, ended=ended, is_live=is_live))
    return timed


def unit_of(attempts: Iterable[TimedAttempt]) -> Literal["GPU", "core"]:
    """Return the resource that is counted: GPUs if any attempt had some."""
    return "GPU" if any(attempt.times.unit == "GPU" for attempt in attempts) else "core"


def allocations_of(run: RunDir, now: float | None = None) -> list[AllocationTimes]:
    """Return the allocations of a run with their attempts, oldest first.

    Args:
        now: the end of a live attempt, in seconds since the epoch; by default the time of the call.
    """
    attempts = timed_attempts(run, time.time() if now is None else now)
    starts = all_job_starts(run)
    # A supervisor that was killed is restarted in the same start of its job.
    groups: dict[JobStart | float, list[TimedAttempt]] = {start: [] for start in starts if start.ended is not None}
    for attempt in attempts:
        supervised = attempt.times.supervised
        start = start_at(starts, supervised)
        if start is not None:
            groups.setdefault(start, []).append(attempt)
        else:
            groups.setdefault(supervised, []).append(attempt)
    unit = unit_of(attempts)
    allocations = []
    for key, group in groups.items():
        if isinstance(key, JobStart):
            allocations.append(_of_job_start(key, group, unit))
        else:  # the time at which the supervisor of a local run began
            nodes = group[0].nodes
            allocations.append(AllocationTimes(began=key, ended=group[-1].ended, attempts=group, nodes=nodes))
    return sorted(allocations, key=lambda allocation: allocation.began)


def _of_job_start(start: JobStart, group: Sequence[TimedAttempt], unit: Literal["GPU", "core"]) -> AllocationTimes:
    """Return the allocation of a start of a job, with the attempts that ran in it: there may be none."""
    began = start.began
    # Between the recorded end of the last attempt and Slurm's, Slurm ends the job.
    ended = began
    if start.ended is not None:
        ended = max(began, start.ended)
    elif group:
        ended = max(began, group[-1].ended)
    attempts = []
    for timed in group:
        first = min(max(timed.began, began), ended)
        last = min(max(timed.ended, first), ended)
        attempts.append(replace(timed, began=first, ended=last))
    allocated = start.gpus if unit == "GPU" else start.cores
    nodes: dict[str, float] = {}
    if group:
        nodes = group[0].nodes
    elif allocated:
        nodes = {start.nodes: allocated}
    allocation = AllocationTimes(
        began=began,
        ended=ended,
        attempts=attempts,
        nodes=nodes,
        queue_s=start.queue_s,
        energy_j=start.energy_j,
    )
    if start.resized is None:
        return allocation
    return replace(allocation, resized=start.resized, last_nodes=expand(start.last_nodes))


@dataclass(frozen=True, kw_only=True)
class Entry:
    """The time of a node with one cause, in one attempt."""

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
    energy_of: str = ""  #: the measured devices: nodes, GPUs or CPUs
    ended: float = 0.0  #: end of the last allocation, or now while it lasts; seconds since the epoch
    spans: tuple[tuple[float, float], ...] = ()  #: begin and end of each allocation, in seconds since the epoch
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
        """Allocated resource-seconds."""
        return sum(self.seconds.values())

    @property
    def goodput(self) -> float | None:
        """Useful compute as a part of the allocated time, between 0 and 1; None if it is not measured."""
        if not self.is_measured:
            return None
        if not self.allocated_s:
            return 0.0
        return self.seconds.get("compute", 0.0) / self.allocated_s

    @property
    def goodput_text(self) -> str:
        """The goodput in percent, with a note for a short run."""
        text = percent(self.goodput)
        if self.goodput is not None and self.is_short:
            text += f" ({SHORT_RUN})"
        return text

    @cached_property
    def running_s(self) -> float:
        """The wall time in which something was allocated, without the queue and the pauses between allocations.

        Runs of a sweep that ran at the same time count once.
        """
        total = 0.0
        counted_until = -math.inf
        for began, ended in sorted(self.spans):
            total += max(0.0, ended - max(began, counted_until))
            counted_until = max(counted_until, ended)
        return total

    @property
    def elapsed_s(self) -> float:
        """The wall time from the begin of the first allocation to the end of the last one."""
        if not self.spans:
            return 0.0
        return max(ended for _, ended in self.spans) - min(began for began, _ in self.spans)

    @property
    def is_short(self) -> bool:
        """Whether start and end dominate the shares of the causes."""
        return 0 < self.running_s < SHORT_S

    @property
    def energy_text(self) -> str:
        """The measured energy as `1.2 kWh (GPUs)`; empty without a measurement."""
        if self.energy_kwh is None:
            return ""
        return f"{amount(self.energy_kwh)} kWh ({self.energy_of})"

    @property
    def price_per_hour(self) -> str:
        """The site's price of an hour of the counted resource; empty without one."""
        price = self.site.price_per_gpu_hour if self.unit == "GPU" else self.site.price_per_core_hour
        return price or ""

    @property
    def price(self) -> tuple[str, float, str] | None:
        """The price with the text before and after it, such as the currency; None without the site's price."""
        return price_of(self.price_per_hour, self.allocated_s)

    @property
    def costs(self) -> dict[str, str]:
        """The price, and the CO₂ of measured energy, by name; without a key of the site neither."""
        costs = {}
        price = self.price
        if price is not None:
            costs["price"] = money(*price)
        if self.site.co2_g_per_kwh is not None and self.energy_kwh is not None:
            grams = self.site.co2_g_per_kwh * self.energy_kwh
            if grams < _G_PER_KG:
                costs["CO₂"] = f"{amount(grams)} g"
            else:
                costs["CO₂"] = f"{amount(grams / _G_PER_KG)} kg"
        return costs

    def rows(self) -> list[tuple[str, str, str, str]]:
        """Return the cells of a table by cause: cause, hours, share and meaning; the last row has the sums."""
        total = self.allocated_s
        rows: list[tuple[str, str, str, str]] = []
        for cause, seconds in self.seconds.items():
            rows.append((cause, hours_text(seconds), percent(seconds / total), MEANINGS[cause]))
        rows.append(("allocated", hours_text(total), percent(1.0), ""))
        return rows


def read_ledger(run: RunDir) -> Ledger:
    """Return the ledger of a run until now.

    Raises RunFolderError if the state or the list of attempts cannot be read, OSError if the file system fails.
    """
    allocations = allocations_of(run)
    attempts = [attempt for allocation in allocations for attempt in allocation.attempts]
    lost = _lost_parts(run, attempts)
    for index, allocation in enumerate(allocations):
        with_lost = [replace(timed, lost=lost.get(timed.attempt.number, 0.0)) for timed in allocation.attempts]
        allocations[index] = replace(allocation, attempts=with_lost)
    energy_j = _energy_of(allocations)
    energy_kwh = None
    if energy_j:
        energy_kwh = sum(energy_j.values()) / _J_PER_KWH
    site = ClusterConfig()
    with suppress(ConfigError, RunFolderError, OSError):  # a damaged file
        site = read_section(run.config, "cluster", ClusterConfig)
    return Ledger(
        site=site,
        unit=unit_of(attempts),
        entries=tuple(entry for allocation in allocations for entry in _entries(allocation)),
        intervals=tuple(interval for allocation in allocations for interval in _intervals(allocation)),
        queue_s=sum(allocation.queue_s for allocation in allocations),
        energy_kwh=energy_kwh,
        energy_of=" and ".join(sorted(energy_j, reverse=True)),
        ended=max((allocation.ended for allocation in allocations), default=0.0),
        spans=tuple((allocation.began, allocation.ended) for allocation in allocations),
        # The useful time of a plain script is known only if it reports steps.
        is_measured=all(timed.times.measured or _known_account(timed) is not None for timed in attempts),
    )


def ledgers_of(runs: Iterable[RunDir]) -> dict[str, Ledger]:
    """Return the ledgers of runs by name; an empty one for a run with unreadable files."""
    return {run.name: readable(partial(read_ledger, run)) or Ledger() for run in runs}


def _energy_of(allocations: Iterable[AllocationTimes]) -> dict[str, float]:
    """Return the energy in joules by measured device: nodes by Slurm's accounting, else GPUs and CPUs by ranks."""
    energy_j: dict[str, float] = {}
    for allocation in allocations:
        if allocation.energy_j is not None:
            _add(energy_j, "nodes", allocation.energy_j)
            continue
        for timed in allocation.attempts:
            for share in timed.times.shares.values():
                for sensor, joules in _energy_of_node(timed.attempt, share).items():
                    kind = "GPUs" if sensor.startswith("GPU-") else "CPUs"
                    _add(energy_j, kind, joules)
    return energy_j


def _energy_of_node(attempt: Attempt, share: NodeShare) -> dict[str, float]:
    """Return the joules that the ranks of a node have measured, by sensor, which several ranks may share."""
    sensors: dict[str, float] = {}
    for rank in share.ranks:
        measured = (attempt.read_beat(rank) or {}).get("energy_j")
        if not isinstance(measured, dict):
            continue
        for sensor, joules in measured.items():
            if _is_time(joules):
                sensors[sensor] = max(sensors.get(sensor, 0.0), joules)
    return sensors


def together(ledgers: Collection[Ledger]) -> Ledger:
    """Return the time of several runs by cause, without intervals and prices; empty if they have different units."""
    units = {ledger.unit for ledger in ledgers if ledger.entries}
    if len(units) != 1:
        return Ledger()
    return Ledger(
        unit=units.pop(),
        entries=tuple(entry for ledger in ledgers for entry in ledger.entries),
        queue_s=sum(ledger.queue_s for ledger in ledgers),
        spans=tuple(span for ledger in ledgers for span in ledger.spans),
        is_measured=all(ledger.is_measured for ledger in ledgers),
    )


def _lost_parts(run: RunDir, attempts: Sequence[TimedAttempt]) -> dict[int, float]:
    """Return which part of the new steps of an attempt is lost: steps after the newest checkpoint, not done again.

    A finished run has kept all steps. The kept steps of the last attempt of a plain script are unknown, so all count.
    """
    checkpoints = read_checkpoints(run)
    if not attempts:
        return {}
    facts = {attempt.number: attempt for attempt in read_attempts(run, run.read_state(), checkpoints)}
    last = facts.get(attempts[-1].attempt.number)
    if last is None or last.status == "finished":
        return {}
    kept = checkpoints[-1].step if checkpoints else 0
    if attempts[-1].is_live or not attempts[-1].times.measured:
        kept = max(kept, last.last_step or 0)
    lost = {}
    for timed in attempts:
        attempt = facts[timed.attempt.number]
        # The steps that no earlier attempt had done.
        first = max(attempt.first_step or 0, timed.times.reached)
        end = attempt.last_step or 0
        num_lost = end - max(first, kept)
        if num_lost > 0:
            lost[attempt.number] = num_lost / (end - first)
    return lost


#: Two significant digits round values from here on to 10 or more.
_WHOLE = 9.95
#: The least amount that is shown, and the least share.
_LEAST_AMOUNT = 0.001
_LEAST_SHARE = 0.001


def amount(value: float) -> str:
    """Return hours, kWh, money or percent with two significant digits, and from ten on as a whole number."""
    if value >= _WHOLE:
        return f"{value:,.0f}"
    if value >= _LEAST_AMOUNT or value == 0:
        return f"{value:.2g}"
    return "<0.001"


def price_of(per_hour: str, seconds: float) -> tuple[str, float, str] | None:
    """Return the price of resource-seconds with the text before and after it; None without a price per hour."""
    price = read_price(per_hour)
    if price is None:
        return None
    before, value, after = price
    return before, value * seconds / 3600, after


def money(before: str, value: float, after: str) -> str:
    """Return a price as `€1.2` or `<€0.001`."""
    text = amount(value)
    if text.startswith("<"):
        return f"<{before}{text.removeprefix('<')}{after}"
    return f"{before}{text}{after}"


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
    for ledger in ledgers:
        _add(seconds, ledger.unit, ledger.allocated_s)
        price = ledger.price
        if price is not None:
            before, value, after = price
            _add(prices, (before, after), value)
    texts = [f"{hours_text(total)} {unit}-hours" for unit, total in seconds.items() if total]
    texts += [money(before, value, after) for (before, after), value in prices.items() if value]
    return ", ".join(texts)


def percent(share: float | None) -> str:
    """Return a share between 0 and 1 in percent; None as `not measured`."""
    if share is None:
        return "not measured"
    if 0 < share < _LEAST_SHARE:
        return "<0.1 %"
    return f"{amount(100 * share)} %"


def hours_text(seconds: float) -> str:
    """Return resource-seconds as a number of hours."""
    return amount(seconds / 3600)


def _entries(allocation: AllocationTimes) -> Iterator[Entry]:
    for cause, nodes, began, ended in _gaps(allocation):
        for node, count in nodes.items():
            yield Entry(cause=cause, attempt=0, node=node, seconds=(ended - began) * count)
    for timed in allocation.attempts:
        for (node, cause), seconds in sorted(_attempt_seconds(timed).items()):
            if seconds > 0:
                yield Entry(cause=cause, attempt=timed.attempt.number, node=node, seconds=seconds)


def _attempt_seconds(timed: TimedAttempt) -> dict[tuple[str, Cause], float]:
    """Return the resource-seconds of an attempt by node and cause."""
    sums: dict[tuple[str, Cause], float] = {}
    shares = timed.times.shares
    accounts = read_accounts(timed, shares.values())
    last_step = last_step_of(timed, accounts.values())
    for node, share in shares.items():
        unused = share.allocated - share.share * len(share.ranks)
        sums[node, "idle"] = max(0.0, unused) * (timed.ended - timed.began)
        for rank in share.ranks:
            for cause, seconds in rank_seconds(timed, accounts[rank], last_step).items():
                _add(sums, (node, cause), seconds * share.share)
    return sums


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
    if allocation.queue_s > 0:
        first = allocation.attempts[0].attempt.number if allocation.attempts else 0
        began = allocation.began - allocation.queue_s
        yield Interval(cause="queue", attempt=first, began=began, ended=allocation.began)
    for cause, _, began, ended in _gaps(allocation):
        yield Interval(cause=cause, attempt=0, began=began, ended=ended)
    for timed in allocation.attempts:
        yield from _attempt_intervals(timed)


#: Cause, begin and end of a part of the time of rank 0.
Span = tuple[Cause, float, float]


def _attempt_intervals(timed: TimedAttempt) -> list[Interval]:
    """Return the intervals of rank 0 in an attempt, without gaps."""
    account = _known_account(timed)
    last = timed.began
    end_of_steps = timed.began
    redone_s = 0.0
    if account is not None:
        last = min(max(account.until, timed.began), timed.ended)
        end_of_steps = last - account.seconds.get("finish", 0.0)
        redone_s = account.seconds.get("redone", 0.0)
    spans, at, between = _phase_spans(timed, last)
    end_of_steps = max(at, end_of_steps)
    spans.append((between, at, end_of_steps))
    spans.append(("finish", end_of_steps, last))
    spans.append((_cause_after(timed, account), last, timed.ended))
    intervals = _joined(_with_redone(spans, redone_s), timed.attempt.number)
    return _with_discarded(intervals, timed.lost)


def _phase_spans(timed: TimedAttempt, last: float) -> tuple[list[Span], float, Cause]:
    """Return the recorded phases until `last` with the time between them, their end, and the cause after it."""
    phases: list[Span] = []
    for record in read_json_lines(timed.attempt.phases):  # some may be damaged
        began = record.get("began", -1.0)
        ended = record.get("ended", -1.0)
        if record.get("cause") in PHASES and _is_time(began) and _is_time(ended) and began <= ended:
            phases.append((record["cause"], began, ended))
    spans: list[Span] = []
    at = timed.began
    between: Cause = "start"
    for cause, began, ended in sorted(phases, key=lambda phase: phase[1]):
        began = max(at, min(began, last))
        ended = min(ended, last)
        if ended > at:
            spans.append((between, at, began))
            spans.append((cause, began, ended))
            # A script goes from its start to steps; a trainer compiles, which is a phase.
            if cause != "start" or not timed.times.measured:
                between = "compute"
            at = ended
    return spans, at, between


def _with_redone(spans: Iterable[Span], redone_s: float) -> Iterator[Span]:
    """Yield spans, with the first `redone_s` seconds of their steps as `redone`."""
    for cause, began, ended in spans:
        if cause == "compute" and redone_s > 0:
            end_of_redone = min(ended, began + redone_s)
            redone_s -= ended - began
            yield "redone", began, end_of_redone
            began = end_of_redone
        yield cause, began, ended


def _joined(spans: Iterable[Span], attempt: int) -> list[Interval]:
    """Return spans as intervals, without empty ones, and with consecutive ones of the same cause as one."""
    intervals: list[Interval] = []
    for cause, began, ended in spans:
        if ended <= began:
            continue
        if intervals and intervals[-1].cause == cause:
            began = intervals.pop().began
        intervals.append(Interval(cause=cause, attempt=attempt, began=began, ended=ended))
    return intervals


def _with_discarded(intervals: Sequence[Interval], lost: float) -> list[Interval]:
    """Return the intervals of an attempt, with the last ones of its steps as `discarded`.

    Args:
        lost: the lost part of the steps, between 0 and 1.
    """
    lost_s = lost * sum(interval.ended - interval.began for interval in intervals if interval.cause == "compute")
    parts: list[Interval] = []
    for interval in reversed(intervals):
        if interval.cause != "compute" or lost_s <= 0:
            parts.append(interval)
            continue
        end_of_kept = max(interval.began, interval.ended - lost_s)
        lost_s -= interval.ended - end_of_kept
        parts.append(replace(interval, cause="discarded", began=end_of_kept))
        if end_of_kept > interval.began:
            parts.append(replace(interval, ended=end_of_kept))
    return parts[::-1]
