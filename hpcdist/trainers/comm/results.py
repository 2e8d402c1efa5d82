"""Results of the communication benchmark: records, noise, the bottleneck, and the report.

It needs no torch, so that a login node can read results. Times are in seconds, sizes in bytes, bandwidths in bytes/s.
"""

import dataclasses
import io
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Literal, Self

from rich import box
from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Column, Table
from rich.text import Text

from hpcdist.config.conversion import Mistake, convert_section
from hpcdist.errors import RunFolderError, shown
from hpcdist.host.files import parse_json
from hpcdist.host.network import SlowLinks, amount, find_slow_links, rate, seconds, times

#: Path relative to the run's artifacts.
ARTIFACT = "comm/results.json"


@dataclass(frozen=True, kw_only=True)
class RankPlace:
    rank: int
    node: str
    device: str  #: `cpu`, or the GPU's name


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """Result of the check of one operation on every rank, at several sizes."""

    operation: str
    dtype: str
    ok: bool | None  #: None if the backend does not support the operation or there are too few ranks
    error: str = ""  #: the wrong value (rank, index, expected, got), or the reason why the check was skipped


@dataclass(frozen=True, kw_only=True)
class Row:
    """Measurement of an operation at one size: the time of the slowest rank, bandwidths as in nccl-tests."""

    operation: str
    size: int  #: nominal size, a power of two
    bytes: int  #: actual size, rounded up to equal parts; the size as defined in nccl-tests
    iterations: int
    median_s: float
    p99_s: float
    min_s: float
    algbw: float | None  #: None if no data is moved (barrier)
    busbw: float | None


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Measurement from one rank to another."""

    source: int
    target: int
    bytes: int  #: message size of the bandwidth measurement
    latency_s: float  #: half of a round trip of a few bytes, median
    bandwidth: float  #: of the fastest of several messages


@dataclass(kw_only=True)
class Results:
    """All results of a benchmark; incomplete if the run was stopped."""

    version: Literal[4] = 4
    backend: str
    device: str  #: `cpu`, or the type of the GPUs
    world_size: int
    torch: str
    nccl: str | None
    partition: str | None  #: Slurm's
    nodes: list[str]
    ranks: list[RankPlace]
    complete: bool = False  #: whether the benchmark ran to its end
    checked: list[CheckResult] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    pairs: list[Pair] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  #: sentences for the report, such as skipped measurements

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Parse the document. Raises ValueError for missing and unknown keys and for other versions."""
        mistakes: list[Mistake] = []
        try:
            found = convert_section(cls, parse_json(text), "results", mistakes)
        except TypeError as error:  # a required key is missing, or there are no keys
            mistakes.append(" ".join(map(str, error.args)))
        if mistakes:
            raise ValueError(
                "; ".join(one if isinstance(one, str) else f"{one[0]} cannot be {shown(one[1])}" for one in mistakes)
            )
        return found


def read_results(artifacts: Path) -> Results:
    """Return the results in a run's artifacts folder. Raises RunFolderError if they are missing or invalid."""
    path = artifacts / ARTIFACT
    try:
        return Results.from_json(path.read_bytes())
    except FileNotFoundError:
        raise RunFolderError(
            f"{path} does not exist: is this a run of `hpcdist bench comm` that reached its first result?"
        ) from None
    except (OSError, ValueError) as error:
        raise RunFolderError(f"{path} cannot be read: {error}") from error


# Noise of the measurements: the factor by which equal operations differ without a fault.
#
# The noise is large on machines that run other work. Smaller differences are not reported as faults.

#: Noise factor from which on the report mentions the noise, and the largest factor that counts as noise.
BUSY, MAX_NOISE = 4.0, 20.0


def disturbance(results: Results) -> float:
    """Return the factor by which transfers between two ranks differ, at least 1.

    It is the larger of p99 / median (at the upper quartile over the sizes) and the factor by which small transfers took
    longer than large ones.
    """
    series = [[row for row in results.rows if row.operation == name] for name in ("send_recv", "isend_irecv")]
    tails = sorted(row.p99_s / row.median_s for rows in series for row in rows)
    found = [*tails[len(tails) * 3 // 4 :][:1], 1.0]
    for rows in series:
        by_size = sorted(rows, key=lambda row: row.size)
        found += [small.median_s / large.median_s for small, large in combinations(by_size, 2)]
    return min(max(found), MAX_NOISE)


# Sentences that describe the bottleneck: the nodes, ranks or pairs that are slower than the others.

#: Source and target rank.
Link = tuple[int, int]
#: A pair is slow by bandwidth from the first factor on, and late by latency from the second factor and difference on.
SLOW_FACTOR, LATE_FACTOR, LATE_S = 1.5, 3.0, 20e-6
#: Maximum number of pairs that are reported individually.
MAX_PAIRS = 4


def bottleneck(results: Results) -> list[str]:
    """Return a sentence for each finding, the worst first, or the range of bandwidths if there is no finding."""
    speeds = link_speeds(results)
    if not speeds:
        return ["no pairs were measured"]
    late = {(pair.source, pair.target): 1 / pair.latency_s for pair in results.pairs if pair.latency_s}
    names, noise = RankNames(results), disturbance(results)
    found, ranges = [], []
    for nearby in (False, True):
        links = {link: speed for link, speed in speeds.items() if names.share_node(link) is nearby}
        if not links:
            continue
        kind = " within a node" if nearby and len(links) < len(speeds) else ""
        slow = find_slow_links(links, max(SLOW_FACTOR, noise))
        findings = _findings(slow, names, kind)
        answers = {link: late[link] for link in links if link in late}
        if answers and not findings:
            slow = find_slow_links(answers, max(LATE_FACTOR, noise), LATE_S)
            findings = _findings(slow, names, kind, late=True)
        found += [sentence for _, sentence in sorted(findings, key=lambda item: -item[0])]
        ranges.append(_range(links, names, kind))
    if not found and noise > BUSY:
        ranges.append(
            f"the measurements are noisy: transfers differ by up to {times(noise)}, which hides smaller faults"
        )
    return found or ranges


def link_speeds(results: Results) -> dict[Link, float]:
    return {(pair.source, pair.target): pair.bandwidth for pair in results.pairs if pair.bandwidth}


class RankNames:
    """Names of ranks: the name of the node if it has only one rank."""

    def __init__(self, results: Results) -> None:
        self._node = {rank.rank: rank.node for rank in results.ranks}
        self._members: dict[str, list[int]] = defaultdict(list)
        for rank, node in self._node.items():
            self._members[node].append(rank)

    def share_node(self, link: Link) -> bool:
        return self._node[link[0]] == self._node[link[1]]

    def name(self, rank: int) -> str:
        """Return a rank's name in messages, with its node if there are several."""
        node = self._node[rank]
        if len(self._members) == 1:
            return f"rank {rank}"
        return node if len(self._members[node]) == 1 else f"rank {rank} ({node})"

    def group(self, ranks: Iterable[int], measured: Iterable[Link]) -> Iterator[tuple[str, list[int]]]:
        """Yield names and their ranks; all measured ranks of a node are combined under the node's name."""
        known = {rank for link in measured for rank in link}
        left = set(ranks)
        for node, members in self._members.items():
            of_node = known.intersection(members)
            if len(self._members) > 1 and of_node and left.issuperset(of_node):
                left -= of_node
                yield node, sorted(of_node)
        for rank in sorted(left):
            yield self.name(rank), [rank]

    def group_links(self, links: Iterable[Link], measured: Mapping[Link, float]) -> dict[tuple[str, str], float]:
        """Return median speeds by the names of both ends; all measured links between two nodes are combined."""
        of_nodes: dict[tuple[str, str], list[Link]] = defaultdict(list)
        for source, target in measured:
            of_nodes[self._node[source], self._node[target]].append((source, target))
        left, found = set(links), {}
        for (here, there), members in of_nodes.items():
            if here != there and left.issuperset(members):
                left -= set(members)
                found[here, there] = median(measured[link] for link in members)
        return found | {(self.name(source), self.name(target)): measured[source, target] for source, target in left}


Finding = tuple[float, str]


def _findings(slow: SlowLinks[int], names: RankNames, kind: str, *, late: bool = False) -> list[Finding]:
    """Return the slow nodes, ranks and pairs, or those of high latency, with their factors."""

    def compared(name: str, verb: str, speed: float, more: str = "") -> str:
        factor = times(slow.usual / speed)
        if late:
            span = f"({seconds(1 / speed)}, median {seconds(1 / slow.usual)})"
            return f"{name} has {factor} the latency of the median pair{kind} {span} at full bandwidth"
        span = f"({rate(speed)}, median {rate(slow.usual)})"
        return f"{name} {verb} {factor} slower than the median pair{kind}{more} {span}"

    both = " in both directions"
    found = []
    ports = "check its card, cable and switch port"
    for ranks, verb, more, advice in (
        (slow.sends & slow.receives, "is", both, ": check its link and network card"),
        (slow.sends - slow.receives, "sends", "", f", and receives at full speed: {ports}"),
        (slow.receives - slow.sends, "receives", "", f", and sends at full speed: {ports}"),
    ):
        if late:
            advice = ": check for a busy processor, power saving and interrupt coalescing"
        for name, members in names.group(ranks, slow.links):
            speed = slow.of_ends(members)
            found.append((slow.usual / speed, compared(name, verb, speed, more) + advice))
    pairs: list[Finding] = []
    by_name = names.group_links(slow.pairs, slow.links)
    for (here, there), speed in by_name.items():
        if (back := by_name.get((there, here))) is None:
            advice = f", but {there} → {here} is not: check the route in this direction"
            text = compared(f"{here} → {there}", "is", speed)
        elif here < there:
            speed = min(speed, back)
            advice = ", and both ends are faster with others: check the path between"
            text = compared(f"{here} ↔ {there}", "is", speed, both)
        else:
            continue
        pairs.append((slow.usual / speed, text + (": a longer route" if late else advice)))
    if len(pairs) > MAX_PAIRS:
        factor, sentence = max(pairs)
        pairs = [(factor, f"{len(slow.pairs)} of {len(slow.links)} pairs are slow. The slowest: {sentence}")]
    return found + pairs


def _range(links: Mapping[Link, float], names: RankNames, kind: str) -> str:
    usual = median(links.values())
    slowest, fastest = min(links, key=lambda link: links[link]), max(links, key=lambda link: links[link])
    differ = max(1 - links[slowest] / usual, links[fastest] / usual - 1)
    prefix = f"{kind[1:]}: " if kind else ""
    if len(links) == 1:
        return f"{prefix}one pair was measured, {rate(usual)}: there is no other pair to compare it with"
    if differ <= 0.25:  # they count as equal
        count = "both pairs" if len(links) == 2 else f"all {len(links)} pairs"
        return f"{prefix}{count} have equal bandwidth: {rate(usual)}, within {max(differ, 0.01):.0%}"
    low, high = (" → ".join(map(names.name, link)) for link in (slowest, fastest))
    return (
        f"{prefix}no pair is an outlier: median {rate(usual)}, from {rate(links[slowest])} ({low})"
        f" to {rate(links[fastest])} ({high})"
    )


# The report: tables of the main results, wrong results, and the bottleneck. The tables show selected sizes, and as many
# columns as fit; `results.json` has all measurements.

#: Sizes in the tables besides the largest one, and further sizes if few of these were measured.
SIZES, MORE_SIZES = (2**4, 2**12, 2**16, 2**20, 2**24), (1, 2**8)
COLUMNS = 6
#: Width of a report in a file.
WIDTH = 160
CONVENTION = "https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md"


def report(results: Results, width: int) -> RenderableType:
    """Return the complete report for a width in columns; the bottleneck is at the end."""
    parts: list[RenderableType] = [_line(heading(results)), *map(_line, _checks(results))]
    if results.rows:
        by_size = [row for row in results.rows if row.busbw is not None]
        sizes = _choose(sorted({row.size for row in by_size}), (width - 34) // 21)
        parts += [
            _by_size("time of one operation: median / p99", by_size, sizes, _time),
            _by_size(
                f"bandwidth: algorithm / bus, as defined by nccl-tests ({CONVENTION})", by_size, sizes, _bandwidth
            ),
            *(_line(f"{row.operation}: median / p99 {_time(row)}") for row in results.rows if row.busbw is None),
        ]
    parts += _pairs(results)
    parts += [_line(f"note: {note}") for note in results.notes]
    parts += [_line(f"bottleneck: {sentence}", "bold") for sentence in bottleneck(results)]
    return Group(*parts)


def as_text(results: Results) -> str:
    page = io.StringIO()
    show(Console(file=page, width=WIDTH, color_system=None), report(results, WIDTH))
    return "".join(f"{line.rstrip()}\n" for line in page.getvalue().splitlines())


def show(console: Console, page: RenderableType) -> None:
    """Print a report without line breaks in sentences, so that a log can be searched for them."""
    console.print(page, highlight=False, crop=False)


def heading(results: Results) -> str:
    nodes = results.nodes
    names = ", ".join(nodes) if len(nodes) <= 8 else f"{nodes[0]}, {nodes[1]}, … {nodes[-1]}"
    return (
        f"{results.world_size} rank{'s' * (results.world_size != 1)} on {len(nodes)} node{'s' * (len(nodes) != 1)}"
        f" ({names}), {results.backend} on {results.device}"
        + (f", partition {results.partition}" if results.partition else "")
        + f", torch {results.torch}"
        + (f", NCCL {results.nccl}" if results.nccl else "")
    )


def _checks(results: Results) -> Iterator[str]:
    right = [check for check in results.checked if check.ok]
    missing: dict[str, list[str]] = {}
    for check in results.checked:
        if check.ok is None:
            missing.setdefault(check.error, []).append(check.operation)
    operations, types = ({getattr(check, key) for check in right} for key in ("operation", "dtype"))
    if right:
        yield f"correct on every rank: {len(operations)} operations × {len(types)} dtypes ({', '.join(sorted(types))})"
    for check in results.checked:
        if check.ok is False:
            yield f"WRONG: {check.operation} of {check.dtype}: {check.error}"
    for reason, names in missing.items():
        yield f"skipped: {', '.join(dict.fromkeys(names))}: {reason}"
    if not results.complete:
        yield "the benchmark did not run to its end: these results are incomplete"


def _by_size(title: str, rows: Sequence[Row], sizes: Sequence[int], cell: Callable[[Row], str]) -> Group:
    cells: dict[str, dict[int, str]] = defaultdict(dict)
    for row in rows:
        cells[row.operation][row.size] = cell(row)
    return Group(_line(title, "bold"), _table({size: amount(size) for size in sizes}, cells.items()))


def _time(row: Row) -> str:
    return f"{seconds(row.median_s)} / {seconds(row.p99_s)}"


def _bandwidth(row: Row) -> str:
    if row.algbw is None or row.busbw is None:
        return ""
    return rate(row.busbw) if row.algbw == row.busbw else rate(row.algbw, row.busbw)


def _pairs(results: Results) -> Iterator[Group]:
    speeds = link_speeds(results)
    if not speeds or results.world_size > 8:  # the maximum for a table of pairs
        return
    places = RankNames(results)
    names = {rank: places.name(rank) for rank in sorted({rank for link in speeds for rank in link})}
    rows = [
        (name, {target: rate(speed) for (one, target), speed in speeds.items() if one == source})
        for source, name in names.items()
    ]
    yield Group(_line("bandwidth of pairs, from row to column", "bold"), _table(names, rows))


def _line(text: str, style: str = "") -> Text:
    # As a line of its own above a table; rich would wrap a table's title to the width of the table.
    return Text(text, style=style, no_wrap=True, overflow="ignore")


def _table(columns: Mapping[int, str], rows: Iterable[tuple[str, Mapping[int, str]]]) -> Table:
    right = [Column(escape(name), justify="right", no_wrap=True) for name in columns.values()]
    table = Table(Column("", no_wrap=True), *right, box=box.SIMPLE_HEAD)
    for name, cells in rows:
        table.add_row(escape(name), *(cells.get(column, "") for column in columns))
    return table


def _choose(sizes: Sequence[int], most: int) -> list[int]:
    """Return at most `most` of the sizes, including the largest."""
    found = [size for size in SIZES if size in sizes]
    found += [size for size in MORE_SIZES if size in sizes][: max(0, COLUMNS - 1 - len(found))]
    found = sorted({*found, *sizes[-1:]} if len(found) > 1 else sizes)
    most = max(2, min(most, COLUMNS))
    if len(found) > most:
        found = [found[round(index * (len(found) - 1) / (most - 1))] for index in range(most)]
    return found
