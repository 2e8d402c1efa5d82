"""The report of the communication benchmark, with its plots."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from statistics import median
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Column, Table
from rich.text import Text

from hpcdist.bench.results import (
    Change,
    RankNames,
    Results,
    Row,
    Rpc,
    bottleneck,
    changes,
    label,
    link_speeds,
    sentences,
    slower,
)
from hpcdist.host.files import write_atomic
from hpcdist.host.network import amount, rate, seconds, times

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# The report of a benchmark: tables of the main results, wrong results, and the bottleneck.
#
# The tables show selected sizes, one dtype, sums only, and as many columns as fit; `results.csv` has all measurements.

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


# Plots of a benchmark: bandwidth and time over size, and the pairs as a heat map.
#
# The colours are those of Okabe and Ito, which are distinguishable with any colour vision
# (https://jfly.uni-koeln.de/color/); lines also differ by dashes and markers.

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#7F7F7F")
MARKERS = "osD^vPX"
#: Maximum number of ranks for which the heat map shows a number for each pair, and a name for each rank.
MAX_NUMBERED, MAX_NAMED = 16, 64
DPI = 120


def draw(results: Results, folder: Path) -> None:
    """Write `bandwidth.png`, `latency.png` and `pairs.png`, each if there are measurements for it."""
    rows = [row for row in main_rows(results) if row.group == "world"]
    rows = [row for row in rows if row.busbw is not None and row.size > 0]
    if rows:
        bandwidths = _over_size(results, rows, lambda row: row.busbw or math.nan, "bus bandwidth", rate)
        latencies = _over_size(results, rows, lambda row: row.median_s, "time of one operation (median)", seconds)
        write_atomic(folder / "bandwidth.png", bandwidths)
        write_atomic(folder / "latency.png", latencies)
    if link_speeds(results):
        write_atomic(folder / "pairs.png", pair_map(results))


def _over_size(
    results: Results, rows: list[Row], value: Callable[[Row], float], title: str, label: Callable[[float], str]
) -> bytes:
    """Return a PNG with a panel for each mode and a line for each operation; both axes are logarithmic."""
    from matplotlib.figure import Figure  # not pyplot, which keeps global state and looks for a display

    modes = [mode for mode in ("blocking", "async") if any(row.mode == mode for row in rows)]
    operations = list(dict.fromkeys(row.operation for row in rows))
    width = 6 * len(modes) + 2.2
    figure = Figure(figsize=(width, 5.8), layout="constrained", dpi=DPI)
    panels = figure.subplots(1, len(modes), sharey=True, squeeze=False)[0]
    for panel, mode in zip(panels, modes, strict=True):
        for number, operation in enumerate(operations):
            line = [row for row in rows if (row.operation, row.mode) == (operation, mode)]
            panel.plot(
                [row.size for row in line],
                [value(row) for row in line],
                **_style(number, ring=is_ring(line[0]) if line else False),
                label=_label(line[0]) if line else None,
            )
        depth = max(row.depth for row in rows if row.mode == mode)
        panel.set_title("one at a time" if mode == "blocking" else f"{depth} at the same time", fontsize=14)
        _axes(panel, [row.size for row in rows], label)
    figure.supylabel(title, fontsize=14)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", fontsize=12, frameon=False)
    figure.suptitle("\n".join(wrap(heading(results), int(8.5 * width))), fontsize=14)
    return _png(figure)


def _style(number: int, *, ring: bool) -> dict[str, Any]:
    if ring:
        return {"color": "black", "linestyle": "--", "linewidth": 2.4, "marker": "x", "markersize": 5}
    turn, place = divmod(number, len(COLOURS))
    dash = ("-", ":", "-.")[turn % 3]
    return {
        "color": COLOURS[place],
        "linestyle": dash,
        "linewidth": 1.8,
        "marker": MARKERS[(number + turn) % len(MARKERS)],
        "markersize": 4,
    }


def _label(row: Row) -> str:
    return f"{row.operation} (hpcdist)" if is_ring(row) else row.operation


def _axes(panel: Axes, sizes: list[int], label: Callable[[float], str]) -> None:
    from matplotlib.ticker import FuncFormatter, NullLocator

    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    low, high = (int(math.log2(size)) for size in (min(sizes), max(sizes)))
    ticks = [2**power for power in range(low, high + 1, max(1, -(-(high - low) // 7)))]
    panel.set_xticks(ticks, [amount(size) for size in ticks], fontsize=12, rotation=30)
    panel.xaxis.set_minor_locator(NullLocator())
    panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _trim(label(value))))
    panel.tick_params(axis="y", labelsize=12, labelleft=True)
    panel.grid(True, which="major", alpha=0.3)
    panel.set_xlabel("size", fontsize=13)


def pair_map(results: Results) -> bytes:
    """Return a PNG of the bandwidth from each rank (row) to each other rank (column); slow pairs are dark."""
    from matplotlib.colors import LogNorm, Normalize
    from matplotlib.figure import Figure

    speeds, places = link_speeds(results), RankNames(results)
    ranks = sorted({rank for link in speeds for rank in link})
    table = [[speeds.get((source, target), math.nan) for target in ranks] for source in ranks]
    low, high = min(speeds.values()), max(speeds.values())
    # A scale from zero shows small differences as small; large differences need a logarithmic scale.
    scale = LogNorm(low, high) if high > 4 * low else Normalize(0, high)
    side = min(12.0, max(6.0, 1.2 + 0.66 * len(ranks)))
    figure = Figure(figsize=(side + 2.6, side + 0.6), layout="constrained", dpi=DPI)
    panel = figure.subplots()
    panel.set_facecolor("#dddddd")
    image = panel.imshow(table, norm=scale, cmap="cividis")
    names = [places.name(rank) for rank in ranks]
    every = -(-len(ranks) // MAX_NAMED)
    shown = range(0, len(ranks), every)
    panel.set_xticks(shown, names[::every], rotation=90 if len(ranks) > 6 else 0, fontsize=11)
    panel.set_yticks(shown, names[::every], fontsize=11)
    panel.set(xlabel="to", ylabel="from")
    if len(ranks) <= MAX_NUMBERED:
        for (source, target), speed in speeds.items():
            colour = "black" if scale(speed) > 0.55 else "white"
            place: dict[str, Any] = {"ha": "center", "va": "center", "color": colour, "fontsize": 11}
            panel.text(ranks.index(target), ranks.index(source), rate(speed).replace(" ", "\n"), **place)
    bar = figure.colorbar(image, ax=panel, label="bandwidth")
    marks = [scale.inverse(part / 5) for part in range(6)]  # the ticks of LogNorm would overlap
    bar.set_ticks(marks, labels=[rate(max(mark, 0.0)) for mark in marks])
    bar.minorticks_off()
    lines = [heading(results), *bottleneck(results)[:2]]
    figure.suptitle("\n".join(line for text in lines for line in wrap(text, int(9.5 * (side + 2.6)))), fontsize=12)
    return _png(figure)


def _trim(label: str) -> str:
    """Remove trailing zeros, such as `10.0 MB/s` to `10 MB/s`."""
    number, _, unit = label.partition(" ")
    return f"{float(number):g} {unit}"


def _png(figure: Figure) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()
