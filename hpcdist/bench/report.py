"""The report of a benchmark: tables of the main results, wrong results, and the bottleneck.

The tables show selected sizes, one dtype, sums only, and as many columns as fit; `results.csv` has all measurements.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, fields, replace
from statistics import median

from rich import box
from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Column, Table
from rich.text import Text

from hpcdist.bench.bottleneck import RankNames, bottleneck, link_speeds
from hpcdist.bench.compare import Change, changes, label, sentences, slower
from hpcdist.bench.results import Results, Row, Rpc
from hpcdist.network.units import amount, rate, seconds, times

#: Sizes in the tables besides the largest one, and further sizes if few of these were measured.
SIZES, MORE_SIZES = (2**4, 2**12, 2**16, 2**20, 2**24), (1, 2**8)
COLUMNS = 6
#: Width of a report in a file.
WIDTH = 160
#: Maximum number of ranks for a table of the bandwidths of pairs.
MATRIX_RANKS = 8
CONVENTION = "https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md"
Cell = Callable[[Row], str]


def report(results: Results, width: int) -> RenderableType:
    """Return the complete report for a width in columns; the bottleneck is at the end."""
    parts: list[RenderableType] = [_line(heading(results)), *map(_line, _checks(results))]
    rows = main_rows(results)
    for group in dict.fromkeys(row.group for row in rows):
        of_group = [row for row in rows if row.group == group]
        sizes = _choose(sorted({row.size for row in of_group if row.busbw is not None}), (width - 34) // 21)
        name = "" if group == "world" else f" in groups of {of_group[0].group_size} ({group})"
        convention = "" if name else f", as defined by nccl-tests ({CONVENTION})"
        parts += [
            _by_size(f"time of one operation{name}: median / p99", of_group, sizes, _time),
            _by_size(f"bandwidth{name}: algorithm / bus{convention}", of_group, sizes, _bandwidth),
            *map(_line, _without_size(of_group)),
        ]
    parts += [*_overlap(results), *_rpc(results), *_pairs(results)]
    parts += [_line(f"note: {note}") for note in results.notes]
    parts += [_line(f"bottleneck: {sentence}", "bold") for sentence in bottleneck(results)]
    return Group(*parts)


def as_text(results: Results) -> str:
    """Return the report as text without colours."""
    page = io.StringIO()
    show(Console(file=page, width=WIDTH, color_system=None), report(results, WIDTH))
    return "".join(f"{line.rstrip()}\n" for line in page.getvalue().splitlines())


def show(console: Console, page: RenderableType) -> None:
    """Print a report without line breaks in sentences, so that a log can be searched for them."""
    console.print(page, highlight=False, crop=False)


def as_csv(results: Results) -> str:
    """Return all measurements as CSV; times in s, sizes in bytes, bandwidths in bytes/s."""
    file = io.StringIO()
    writer = csv.DictWriter(file, [field.name for field in fields(Row)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(row) for row in results.rows)
    return file.getvalue()


def compared(now: Results, before: Results, name: str, width: int) -> RenderableType:
    """Return a table of times relative to an earlier benchmark, and the slowdowns."""
    found = changes(replace(now, rows=main_rows(now)), before)
    sizes = _choose(sorted({change.now.size for changed in found.values() for change in changed}), (width - 34) // 10)
    table = _table(map(amount, sizes))
    for changed in found.values():
        slow = slower(changed)
        by_size = {change.now.size: _ratio(change, change in slow) for change in changed}
        if any(size in by_size for size in sizes):
            table.add_row(escape(label(changed[0].now)), *(by_size.get(size, "") for size in sizes))
    title = f"time relative to {name}; ! slower beyond noise"
    return Group(
        _titled(title, table), *(_line(f"compared with {name}: {line}") for line in sentences(changes(now, before)))
    )


def heading(results: Results) -> str:
    """Return one line that describes ranks, nodes, backend and versions."""
    nodes = results.nodes
    names = ", ".join(nodes) if len(nodes) <= 8 else f"{nodes[0]}, {nodes[1]}, … {nodes[-1]}"
    parts = [
        f"{results.world_size} rank{'s' * (results.world_size != 1)} on {len(nodes)} node{'s' * (len(nodes) != 1)}"
        f" ({names})",
        f"{results.backend} on {results.device}",
        f"partition {results.partition}" if results.partition else "",
        f"torch {results.torch}" + (f", NCCL {results.nccl}" if results.nccl else ""),
    ]
    return ", ".join(filter(None, parts))


def main_rows(results: Results) -> list[Row]:
    """Return the rows of sums in the first dtype of each operation; the ring follows the all-reduce."""
    types: dict[str, str] = {}
    sums = [row for row in results.rows if row.variant in ("", "sum")]
    rows = [row for row in sums if types.setdefault(row.operation, row.dtype) == row.dtype]
    order = {name: index for index, name in enumerate(dict.fromkeys(label(row) for row in rows if not is_ring(row)))}

    def position(row: Row) -> tuple[int, bool]:
        name = label(replace(row, operation="all_reduce", variant="sum") if is_ring(row) else row)
        return order.get(name, len(order)), is_ring(row)

    return sorted(rows, key=position)


def is_ring(row: Row) -> bool:
    """Return whether the row is of hpcdist's ring all-reduce, implemented with isend and irecv."""
    return row.operation.startswith("ring")


def _is_all_reduce(row: Row) -> bool:
    return row.operation == "all_reduce" and row.variant == "sum"


def _checks(results: Results) -> Iterator[str]:
    right = [check for check in results.checked if check.ok]
    wrong = [check for check in results.checked if check.ok is False]
    missing: dict[str, list[str]] = {}
    for check in results.checked:
        if check.ok is None:
            missing.setdefault(check.error or f"{results.backend} has no such operation", []).append(check.operation)
    operations, types = ({getattr(check, key) for check in right} for key in ("operation", "dtype"))
    if right:
        yield f"correct on every rank: {len(operations)} operations × {len(types)} dtypes ({', '.join(sorted(types))})"
    for check in wrong:
        group = "" if check.group == "world" else f" in {check.group}"
        yield f"WRONG: {check.operation} of {check.dtype}{group}: {check.error}"
    for reason, names in missing.items():
        yield f"skipped: {', '.join(dict.fromkeys(names))}: {reason}"
    if not results.complete:
        yield "the benchmark did not run to its end: these results are incomplete"


def _by_size(title: str, rows: Sequence[Row], sizes: Sequence[int], cell: Cell) -> Group:
    table = _table(map(amount, sizes))
    operations: dict[str, dict[int, Row]] = {}
    for row in rows:
        if row.busbw is not None:
            operations.setdefault(label(replace(row, group="world")), {})[row.size] = row
    reference: dict[int, Row] = {}
    for name, by_size in operations.items():
        first = next(iter(by_size.values()))
        table.add_row(escape(name), *(cell(by_size[size]) if size in by_size else "" for size in sizes))
        if _is_all_reduce(first):
            reference = by_size
        elif is_ring(first) and reference and first.mode == next(iter(reference.values())).mode:
            both = [size for size in sizes if size in by_size and size in reference]
            gains = {size: by_size[size].median_s / reference[size].median_s for size in both}
            cells = (times(gains[size]) if size in gains else "" for size in sizes)
            table.add_row("  ring / all_reduce", *cells, style="italic")
    return _titled(title, table)


def _time(row: Row) -> str:
    return f"{seconds(row.median_s)} / {seconds(row.p99_s)}"


def _bandwidth(row: Row) -> str:
    if row.algbw is None or row.busbw is None:
        return ""
    return rate(row.busbw) if row.algbw == row.busbw else rate(row.algbw, row.busbw)


def _ratio(change: Change, is_slower: bool) -> str:
    text = f"{change.ratio:.2f}"
    return f"[bold red]{text} ![/]" if is_slower else text


def _without_size(rows: Sequence[Row]) -> Iterator[str]:
    for row in rows:
        if row.busbw is None:
            yield f"{label(row)}: median {seconds(row.median_s)}, p99 {seconds(row.p99_s)}"


def _overlap(results: Results) -> Iterator[Group]:
    if results.overlap:
        table = _table(("size", "compute", "communication", "together", "hidden"))
        for found in results.overlap:
            spans = (found.compute_s, found.communication_s, found.together_s)
            table.add_row(escape(found.operation), amount(found.bytes), *map(seconds, spans), f"{found.hidden:.0%}")
        yield _titled("overlap of communication and computation", table)


def _rpc(results: Results) -> Iterator[Group]:
    """Yield a table by size and device: the median of all targets, and the slowest target."""
    if not results.rpc:
        return
    flights = max(call.in_flight for call in results.rpc)
    table = _table(("device", "median", "p99", "slowest", "calls/s", "bandwidth"))
    groups: dict[tuple[int, str], list[Rpc]] = {}
    for call in results.rpc:
        groups.setdefault((call.bytes, call.device), []).append(call)
    for (num_bytes, device), calls in sorted(groups.items()):
        slowest = max(calls, key=lambda call: call.latency_s)
        table.add_row(
            amount(num_bytes),
            device,
            seconds(median(call.latency_s for call in calls)),
            seconds(median(call.p99_s for call in calls)),
            f"{escape(slowest.target)} {seconds(slowest.latency_s)}",
            f"{median(call.calls_per_s for call in calls):,.0f}",
            rate(median(call.bandwidth for call in calls)),
        )
    title = f"RPC from {results.rpc[0].source}: round trip of a tensor; calls and bandwidth with {flights} in flight"
    yield _titled(title, table)


def _pairs(results: Results) -> Iterator[Group]:
    speeds = link_speeds(results)
    if not speeds or results.world_size > MATRIX_RANKS:
        return
    places = RankNames(results)
    ranks = sorted({rank for link in speeds for rank in link})
    table = _table(map(places.name, ranks))
    for source in ranks:
        cells = (rate(speeds[source, target]) if (source, target) in speeds else "" for target in ranks)
        table.add_row(places.name(source), *cells)
    yield _titled("bandwidth of pairs, from row to column", table)


def _line(text: str, style: str = "") -> Text:
    return Text(text, style=style, no_wrap=True, overflow="ignore")


def _table(columns: Iterable[str]) -> Table:
    right = [Column(escape(name), justify="right", no_wrap=True) for name in columns]
    return Table(Column("", no_wrap=True), *right, box=box.SIMPLE_HEAD)


def _titled(title: str, table: Table) -> Group:
    """Return the table below its title; rich would wrap a title of its own to the width of the table."""
    return Group(_line(title, "bold"), table)


def _choose(sizes: Sequence[int], most: int) -> list[int]:
    """Return at most `most` of the sizes, including the largest."""
    found = [size for size in SIZES if size in sizes]
    found += [size for size in MORE_SIZES if size in sizes][: max(0, COLUMNS - 1 - len(found))]
    found = sorted({*found, *sizes[-1:]} if len(found) > 1 else sizes)
    most = max(2, min(most, COLUMNS))
    if len(found) > most:
        found = [found[round(index * (len(found) - 1) / (most - 1))] for index in range(most)]
    return found
