"""What a communication benchmark has found, as the document `artifacts/comm/results.json` of its run.

The standard library alone: a login node reads it. Times are seconds, sizes bytes, rates bytes a second.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

from hpcdist.errors import RunFolderError
from hpcdist.files.bounded_json import parse_json

VERSION = 1
#: Its place among the run's artifacts.
ARTIFACT = "comm/results.json"
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a rank stands."""

    rank: int
    node: str
    device: str  #: `cpu`, or the GPU's name


@dataclass(frozen=True, kw_only=True)
class Checked:
    """One operation compared with the exact expectation, on every rank of its group and on several sizes."""

    operation: str  #: with its variant: `all_reduce[sum]`
    group: str
    dtype: str
    ok: bool | None  #: None: the backend has no such operation, or the group has too few ranks
    error: str = ""  #: what was wrong (rank, index, expected, got), or why it was left out


@dataclass(frozen=True, kw_only=True)
class Row:
    """One point: an operation at a size. An iteration's time is that of the slowest rank.

    `algbw` and `busbw` are nccl-tests', https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md; None
    where nothing is moved (barrier).
    """

    operation: str
    variant: str  #: of reductions: `sum`, `product`, `max`, `min`; else empty
    #: `blocking`: one after the other; `async`: `depth` of them under way at once, times are those of one.
    mode: Literal["blocking", "async"]
    depth: int
    group: str  #: `world`, or how it is cut into groups that work at the same time: `halves`, `even and odd`, …
    group_size: int
    dtype: str
    size: int  #: the power of two that was asked for
    bytes: int  #: what it was rounded up to, so that it is cut into equal parts; nccl-tests' meaning of a size
    iterations: int
    median_s: float
    p99_s: float
    min_s: float
    algbw: float | None
    busbw: float | None


@dataclass(frozen=True, kw_only=True)
class Pair:
    """One way between two ranks."""

    source: int
    target: int
    bytes: int  #: what was sent at a time for the bandwidth
    latency_s: float  #: half of a round trip of a few bytes, median
    bandwidth: float  #: of the fastest of some messages


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """An operation beside a computation that takes as long as it, by the slowest rank; medians."""

    operation: str
    bytes: int
    compute_s: float
    communication_s: float
    together_s: float
    hidden: float  #: share of the shorter one that disappears behind the other, 0 to 1


@dataclass(frozen=True, kw_only=True)
class Rpc:
    """Calls from rank 0 that carry a tensor there and back."""

    source: str  #: `node/rank`
    target: str
    bytes: int
    device: str  #: `cpu` or `cuda`
    latency_s: float  #: of a round trip, one at a time; median
    p99_s: float
    calls_per_s: float  #: with `in_flight` calls under way
    in_flight: int
    bandwidth: float  #: both ways, with `in_flight` calls under way


@dataclass(kw_only=True)
class Results:
    """All of it; a run that was stopped has what it got to."""

    version: int = VERSION
    backend: str
    device: str  #: `cpu` or `cuda`
    world_size: int
    torch: str
    nccl: str | None
    partition: str | None  #: Slurm's
    nodes: list[str]
    ranks: list[Place]
    complete: bool = False  #: whether the benchmark got to its end
    checked: list[Checked] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    pairs: list[Pair] = field(default_factory=list)
    overlap: list[Overlap] = field(default_factory=list)
    rpc: list[Rpc] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  #: sentences for people: what was left out, and why

    def to_json(self) -> str:
        """One line a row, so that a person can read it too."""
        lines = []
        for key, value in dataclasses.asdict(self).items():
            if isinstance(value, list) and value and isinstance(value[0], dict):
                text = "[\n  " + ",\n  ".join(json.dumps(item) for item in value) + "\n ]"
            else:
                text = json.dumps(value)
            lines.append(f" {json.dumps(key)}: {text}")
        return "{\n" + ",\n".join(lines) + "\n}\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Raises ValueError for what is no such document; keys of later versions are passed over."""
        tree = parse_json(text)
        if not isinstance(tree, dict) or tree.get("version") != VERSION:
            version = tree.get("version") if isinstance(tree, dict) else None
            raise ValueError(f"version {version!r} is not {VERSION}")
        known = {item.name for item in dataclasses.fields(cls)}
        values: dict[str, Any] = {key: value for key, value in tree.items() if key in known}
        for key, kind in _TABLES.items():
            if key in values:
                values[key] = [_row(kind, item) for item in values[key]]
        try:
            return cls(**values)
        except TypeError as error:
            raise ValueError(str(error)) from error


_TABLES: dict[str, type[Any]] = {
    "ranks": Place,
    "checked": Checked,
    "rows": Row,
    "pairs": Pair,
    "overlap": Overlap,
    "rpc": Rpc,
}


def _row(kind: type[T], item: Any) -> T:
    known = {found.name for found in dataclasses.fields(kind)}  # type: ignore[arg-type]  # all in _TABLES are dataclasses
    try:
        return kind(**{key: value for key, value in item.items() if key in known})
    except (TypeError, AttributeError) as error:
        raise ValueError(f"{item!r} is no {kind.__name__}") from error


def read_results(artifacts: Path) -> Results:
    """The results in a run's folder of artifacts. Raises RunFolderError where there are none, or no such ones."""
    path = artifacts / ARTIFACT
    try:
        return Results.from_json(path.read_bytes())
    except FileNotFoundError:
        raise RunFolderError(
            f"no {path}: is this a run of `hpcdist bench comm` that got to its first result?"
        ) from None
    except (OSError, ValueError) as error:
        raise RunFolderError(f"{path} cannot be read: {error}") from error
