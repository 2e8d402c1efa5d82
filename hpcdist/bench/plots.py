"""Plots of a benchmark: bandwidth and time over size, and the pairs as a heat map.

The colours are those of Okabe and Ito, which are distinguishable with any colour vision
(https://jfly.uni-koeln.de/color/); lines also differ by dashes and markers.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from hpcdist.bench.bottleneck import RankNames, bottleneck, link_speeds
from hpcdist.bench.report import heading, is_ring, main_rows
from hpcdist.bench.results import Results, Row
from hpcdist.files.atomic import write_atomic
from hpcdist.network.units import amount, rate, seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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
