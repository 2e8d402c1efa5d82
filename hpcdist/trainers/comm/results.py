"""Results of the communication benchmark: records and the report.

It needs no torch, so that a login node can read results. Times are in seconds, sizes in bytes, bandwidths in bytes/s.
"""

import dataclasses
import io
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Self

from rich import box
from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Column, Table
from rich.text import Text

from hpcdist.config.conversion import Mistake, convert_section
from hpcdist.errors import RunFolderError, plural, shown
from hpcdist.host.json_files import parse_json
from hpcdist.host.network import amount, rate, seconds

#: Path relative to the run's artifacts.
ARTIFACT = "comm/results.json"


@dataclass(frozen=True, kw_only=True)
class RankPlace:
    """Node and device of a rank."""

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


@dataclass(kw_only=True)
class Results:
    """All results of a benchmark; incomplete if the run was stopped."""

    version: Literal[5] = 5
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
    notes: list[str] = field(default_factory=list)  #: sentences for the report, such as skipped measurements

    def to_json(self) -> str:
        """Return the document that `from_json` parses."""
        return json.dumps(dataclasses.asdict(self), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Parse the document. Raises ValueError for missing and unknown keys and for other versions."""
        mistakes: list[Mistake] = []
        try:
            results = convert_section(cls, parse_json(text), "results", mistakes)
        except TypeError as error:  # a required key is missing, or there are no keys
            mistakes.append(" ".join(map(str, error.args)))
        if mistakes:
            raise ValueError("; ".join(map(_mistake_text, mistakes)))
        return results


def _mistake_text(mistake: Mistake) -> str:
    if isinstance(mistake, str):
        return mistake
    key, value = mistake
    return f"{key} cannot be {shown(value)}"


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


# The report: wrong results, and tables of the main results. The tables show selected sizes, and as many columns as fit;
# `results.json` has all measurements.

#: Sizes in the tables besides the largest one, and further sizes if few of these were measured.
SIZES, MORE_SIZES = (2**4, 2**12, 2**16, 2**20, 2**24), (1, 2**8)
COLUMNS = 6
#: Characters of the column of names, and of the widest column of a size.
NAMES_WIDTH, SIZE_WIDTH = 34, 21
#: The names of more nodes than this are abbreviated.
MAX_NAMED_NODES = 8
#: Width of a report in a file.
WIDTH = 160
CONVENTION = "https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md"


def report(results: Results, width: int) -> RenderableType:
    """Return the complete report for a width in columns."""
    parts: list[RenderableType] = [_line(heading(results)), *map(_line, _checks(results))]
    if results.rows:
        rows_with_data = [row for row in results.rows if row.busbw is not None]
        sizes = _choose(sorted({row.size for row in rows_with_data}), (width - NAMES_WIDTH) // SIZE_WIDTH)
        parts.append(_by_size("time of one operation: median / p99", rows_with_data, sizes, _time))
        bandwidth_title = f"bandwidth: algorithm / bus, as defined by nccl-tests ({CONVENTION})"
        parts.append(_by_size(bandwidth_title, rows_with_data, sizes, _bandwidth))
        for row in results.rows:
            if row.busbw is None:
                parts.append(_line(f"{row.operation}: median / p99 {_time(row)}"))
    parts += [_line(f"note: {note}") for note in results.notes]
    return Group(*parts)


def as_text(results: Results) -> str:
    """Return the report for a file, WIDTH columns wide."""
    page = io.StringIO()
    show(Console(file=page, width=WIDTH, color_system=None), report(results, WIDTH))
    return "".join(f"{line.rstrip()}\n" for line in page.getvalue().splitlines())


def show(console: Console, page: RenderableType) -> None:
    """Print a report without line breaks in sentences, so that a log can be searched for them."""
    console.print(page, highlight=False, crop=False)


def heading(results: Results) -> str:
    """Return one line about ranks, nodes, backend and versions."""
    nodes = results.nodes
    names = ", ".join(nodes)
    if len(nodes) > MAX_NAMED_NODES:
        names = f"{nodes[0]}, {nodes[1]}, … {nodes[-1]}"
    ranks_and_nodes = f"{plural(results.world_size, 'rank')} on {plural(len(nodes), 'node')} ({names})"
    facts = [ranks_and_nodes, f"{results.backend} on {results.device}"]
    if results.partition:
        facts.append(f"partition {results.partition}")
    facts.append(f"torch {results.torch}")
    if results.nccl:
        facts.append(f"NCCL {results.nccl}")
    return ", ".join(facts)


def _checks(results: Results) -> Iterator[str]:
    """Yield lines about correct, wrong and skipped operations."""
    correct = [check for check in results.checked if check.ok]
    if correct:
        num_operations = len({check.operation for check in correct})
        dtypes = sorted({check.dtype for check in correct})
        yield f"correct on every rank: {num_operations} operations × {len(dtypes)} dtypes ({', '.join(dtypes)})"
    for check in results.checked:
        if check.ok is False:
            yield f"WRONG: {check.operation} of {check.dtype}: {check.error}"
    skipped: dict[str, list[str]] = {}  # operations by reason
    for check in results.checked:
        if check.ok is None:
            skipped.setdefault(check.error, []).append(check.operation)
    for reason, names in skipped.items():
        different_names = dict.fromkeys(names)  # an operation has a check for each dtype
        yield f"skipped: {', '.join(different_names)}: {reason}"
    if not results.complete:
        yield "the benchmark did not run to its end: these results are incomplete"


def _by_size(title: str, rows: Sequence[Row], sizes: Sequence[int], cell: Callable[[Row], str]) -> Group:
    """Return a table with a row for each operation and a column for each of `sizes`."""
    cells: dict[str, dict[int, str]] = defaultdict(dict)
    for row in rows:
        cells[row.operation][row.size] = cell(row)
    columns = {size: amount(size) for size in sizes}
    return Group(_line(title, "bold"), _table(columns, cells.items()))


def _time(row: Row) -> str:
    return f"{seconds(row.median_s)} / {seconds(row.p99_s)}"


def _bandwidth(row: Row) -> str:
    if row.algbw is None or row.busbw is None:
        return ""
    if row.algbw == row.busbw:
        return rate(row.busbw)
    return rate(row.algbw, row.busbw)


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
    chosen = [size for size in SIZES if size in sizes]
    num_free = max(0, COLUMNS - 1 - len(chosen))  # beside the largest size
    more = [size for size in MORE_SIZES if size in sizes]
    chosen += more[:num_free]
    if len(chosen) <= 1:  # too few of the usual sizes were measured
        chosen = list(sizes)
    chosen = sorted({*chosen, *sizes[-1:]})
    most = max(2, min(most, COLUMNS))
    if len(chosen) <= most:
        return chosen
    spacing = (len(chosen) - 1) / (most - 1)
    return [chosen[round(index * spacing)] for index in range(most)]
