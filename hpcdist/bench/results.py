"""Results of a communication benchmark, the document `artifacts/comm/results.json` of its run.

Uses the standard library only, so that a login node can read it. Times are in seconds, sizes in bytes, bandwidths in
bytes/s.
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
#: Path relative to the run's artifacts.
ARTIFACT = "comm/results.json"
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class RankPlace:
    """Node and device of a rank."""

    rank: int
    node: str
    device: str  #: `cpu`, or the GPU's name


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """Result of the check of one operation on every rank of its group, at several sizes."""

    operation: str  #: with its operator, such as `all_reduce[sum]`
    group: str
    dtype: str
    ok: bool | None  #: None if the backend does not support the operation or the group has too few ranks
    error: str = ""  #: the wrong value (rank, index, expected, got), or the reason why the check was skipped


@dataclass(frozen=True, kw_only=True)
class Row:
    """Measurement of an operation at one size. The time of an iteration is that of the slowest rank.

    `algbw` and `busbw` are defined as in nccl-tests,
    https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md; None if no data is moved (barrier).
    """

    operation: str
    variant: str  #: operator of a reduction: `sum`, `product`, `max`, `min`; otherwise empty
    #: `blocking`: one at a time; `async`: `depth` operations at the same time, with the time of one.
    mode: Literal["blocking", "async"]
    depth: int
    group: str  #: `world`, or the partition into groups that communicate at the same time: `halves`, `even and odd`, …
    group_size: int
    dtype: str
    size: int  #: nominal size, a power of two
    bytes: int  #: actual size, rounded up to equal parts; the size as defined in nccl-tests
    iterations: int
    median_s: float
    p99_s: float
    min_s: float
    algbw: float | None
    busbw: float | None


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Measurement from one rank to another."""

    source: int
    target: int
    bytes: int  #: message size of the bandwidth measurement
    latency_s: float  #: half of a round trip of a few bytes, median
    bandwidth: float  #: of the fastest of several messages


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """An operation overlapped with a computation of the same duration; medians of the slowest rank."""

    operation: str
    bytes: int
    compute_s: float
    communication_s: float
    together_s: float
    hidden: float  #: share of the shorter one that is hidden behind the other, 0 to 1


@dataclass(frozen=True, kw_only=True)
class Rpc:
    """Calls from rank 0 that send a tensor and return it."""

    source: str  #: `node/rank`
    target: str
    bytes: int
    device: str  #: `cpu` or `cuda`
    latency_s: float  #: median of a round trip, one call at a time
    p99_s: float
    calls_per_s: float  #: with `in_flight` simultaneous calls
    in_flight: int
    bandwidth: float  #: sum of both directions, with `in_flight` simultaneous calls


@dataclass(kw_only=True)
class Results:
    """All results of a benchmark; incomplete if the run was stopped."""

    version: int = VERSION
    backend: str
    device: str  #: `cpu` or `cuda`
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
    overlap: list[Overlap] = field(default_factory=list)
    rpc: list[Rpc] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  #: sentences for the report, such as skipped measurements

    def to_json(self) -> str:
        """Return the document with one line for each row, for readability."""
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
        """Parse the document; unknown keys are ignored. Raises ValueError if it is invalid."""
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
    "ranks": RankPlace,
    "checked": CheckResult,
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
        raise ValueError(f"{item!r} is not a valid {kind.__name__}") from error


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
