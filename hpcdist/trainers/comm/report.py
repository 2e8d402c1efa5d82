"""The report of the communication benchmark: tables of the main results, wrong results, and the bottleneck.

The tables show selected sizes, and as many columns as fit; `results.json` has all measurements.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from rich import box
from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Column, Table
from rich.text import Text

from hpcdist.host.network import amount, rate, seconds
from hpcdist.trainers.comm.results import (
    Change,
    RankNames,
    Results,
    Row,
    bottleneck,
    changes,
    link_speeds,
    sentences,
    slower,
)

#: Sizes in the tables besides the largest one, and further sizes if few of these were measured.
SIZES, MORE_SIZES = (2**4, 2**12, 2**16, 2**20, 2**24), (1, 2**8)
COLUMNS = 6
#: Width of a report in a file.
WIDTH = 160
#: Maximum number of ranks for a table of the bandwidths of pairs.
MATRIX_RANKS = 8
CONVENTION = "https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md"


def report(results: Results, width: int) -> RenderableType:
    """Return the complete report for a width in columns; the bottleneck is at the end."""
    parts: list[RenderableType] = [_line(heading(results)), *map(_line, _checks(results))]
    for group in dict.fromkeys(row.group for row in results.rows):
        of_group = [row for row in results.rows if row.group == group]
        by_size = [row for row in of_group if row.busbw is not None]
        sizes = _choose(sorted({row.size for row in by_size}), (width - 34) // 21)
        name = "" if group == "world" else f" in groups of {of_group[0].group_size} ({group})"
        convention = "" if name else f", as defined by nccl-tests ({CONVENTION})"
        parts += [
            _by_size(f"time of one operation{name}: median / p99", by_size, sizes, _time),
            _by_size(f"bandwidth{name}: algorithm / bus{convention}", by_size, sizes, _bandwidth),
            *(_line(f"{row.operation}: median / p99 {_time(row)}") for row in of_group if row.busbw is None),
        ]
    parts += _pairs(results)
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


def compared(now: Results, before: Results, name: str, width: int) -> RenderableType:
    """Return a table of times relative to an earlier benchmark, and the slowdowns."""
    found = changes(now, before)
    sizes = _choose(sorted({change.now.size for changed in found.values() for change in changed}), (width - 34) // 10)
    table = _table(map(amount, sizes))
    for changed in found.values():
        slow = slower(changed)
        if changed[0].now.size:  # a barrier has none
            _add_row(table, changed[0].now.label, {one.now.size: _ratio(one, one in slow) for one in changed}, sizes)
    title = f"time relative to {name}; ! slower beyond noise"
    return Group(
        _line(title, "bold"),
        table,
        *(_line(f"compared with {name}: {line}") for line in sentences(found)),
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
            group = "" if check.group == "world" else f" in {check.group}"
            yield f"WRONG: {check.operation} of {check.dtype}{group}: {check.error}"
    for reason, names in missing.items():
        yield f"skipped: {', '.join(dict.fromkeys(names))}: {reason}"
    if not results.complete:
        yield "the benchmark did not run to its end: these results are incomplete"


def _by_size(title: str, rows: Sequence[Row], sizes: Sequence[int], cell: Callable[[Row], str]) -> Group:
    table = _table(map(amount, sizes))
    for operation in dict.fromkeys(row.operation for row in rows):
        _add_row(table, operation, {row.size: cell(row) for row in rows if row.operation == operation}, sizes)
    return Group(_line(title, "bold"), table)


def _time(row: Row) -> str:
    return f"{seconds(row.median_s)} / {seconds(row.p99_s)}"


def _bandwidth(row: Row) -> str:
    if row.algbw is None or row.busbw is None:
        return ""
    return rate(row.busbw) if row.algbw == row.busbw else rate(row.algbw, row.busbw)


def _ratio(change: Change, is_slower: bool) -> str:
    text = f"{change.ratio:.2f}"
    return f"[bold red]{text} ![/]" if is_slower else text


def _pairs(results: Results) -> Iterator[Group]:
    speeds = link_speeds(results)
    if not speeds or results.world_size > MATRIX_RANKS:
        return
    places = RankNames(results)
    ranks = sorted({rank for link in speeds for rank in link})
    table = _table(map(places.name, ranks))
    for source in ranks:
        of_row = {target: rate(speed) for (one, target), speed in speeds.items() if one == source}
        _add_row(table, places.name(source), of_row, ranks)
    yield Group(_line("bandwidth of pairs, from row to column", "bold"), table)


def _line(text: str, style: str = "") -> Text:
    # As a line of its own above a table; rich would wrap a table's title to the width of the table.
    return Text(text, style=style, no_wrap=True, overflow="ignore")


def _table(columns: Iterable[str]) -> Table:
    right = [Column(escape(name), justify="right", no_wrap=True) for name in columns]
    return Table(Column("", no_wrap=True), *right, box=box.SIMPLE_HEAD)


def _add_row(table: Table, name: str, cells: Mapping[int, str], columns: Iterable[int]) -> None:
    table.add_row(escape(name), *(cells.get(column, "") for column in columns))


def _choose(sizes: Sequence[int], most: int) -> list[int]:
    """Return at most `most` of the sizes, including the largest."""
    found = [size for size in SIZES if size in sizes]
    found += [size for size in MORE_SIZES if size in sizes][: max(0, COLUMNS - 1 - len(found))]
    found = sorted({*found, *sizes[-1:]} if len(found) > 1 else sizes)
    most = max(2, min(most, COLUMNS))
    if len(found) > most:
        found = [found[round(index * (len(found) - 1) / (most - 1))] for index in range(most)]
    return found
