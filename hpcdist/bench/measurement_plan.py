"""The points of a benchmark in their order: a function of the config and of the nodes of the ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from hpcdist.bench import overlap, pairs
from hpcdist.bench.comm_config import COMM_OPERATIONS, CommConfig, parse_bytes
from hpcdist.bench.correctness import OperationVariant
from hpcdist.bench.groups import WORLD, cuts
from hpcdist.bench.operations import OPERATIONS
from hpcdist.bench.patterns import DTYPES, REDUCTIONS

#: Data type of operations that only move data.
BYTES = "uint8"
#: Sizes of secondary series: every fourth power of two, up to a size at which the bandwidth is constant.
_SPARSE, _SETTLED = 4, 1 << 24
#: Number of simultaneous operations in the mode `async`.
DEPTH = 4
#: Operations that are measured in sub-groups; the others are only checked there.
_IN_GROUPS = ("all_reduce", "all_gather", "all_to_all", "broadcast")


@dataclass(frozen=True, kw_only=True)
class CorrectnessCheck:
    """A check of one operation in one partition of the ranks, in all dtypes."""

    variant: OperationVariant
    team: str
    dtypes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Series:
    """An operation over all its sizes, one line of a plot."""

    variant: OperationVariant
    mode: Literal["blocking", "async"]
    team: str
    dtype: str

    @property
    def title(self) -> str:
        """Name of the series in reports."""
        parts = [
            self.variant.title,
            self.dtype if self.variant.kind.reduces else "",
            self.mode * (self.mode == "async"),
        ]
        return ", ".join([*filter(None, parts), *([self.team] if self.team != WORLD else [])])


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One point of a series."""

    series: Series
    size: int
    is_last: bool


@dataclass(frozen=True, kw_only=True)
class PairRound:
    """Pairs of ranks that are measured at the same time."""

    links: tuple[pairs.Link, ...]
    is_last: bool


@dataclass(frozen=True, kw_only=True)
class OverlapPoint:
    """An operation overlapped with a computation."""

    variant: OperationVariant
    size: int


@dataclass(frozen=True, kw_only=True)
class RpcPoint:
    """All measurements of RPC."""


Point = CorrectnessCheck | Measurement | PairRound | OverlapPoint | RpcPoint


def points(cfg: CommConfig, nodes: Sequence[str]) -> list[Point]:
    """Return all points in order: first the checks, then the pairs of ranks, then the other measurements.

    Args:
        cfg: the section `comm`.
        nodes: node name by rank.
    """
    named = [name for name in COMM_OPERATIONS if name in cfg.operations]
    teams = [WORLD, *cuts(nodes)] if "groups" in cfg.operations else [WORLD]
    found: list[Point] = [*_checks(cfg, named, teams)]
    several = len(nodes) > 1
    if "pairs" in cfg.operations and several:
        rounds = pairs.rounds(nodes)
        found += [PairRound(links=tuple(links), is_last=index == len(rounds) - 1) for index, links in enumerate(rounds)]
    for series, sizes in _all_series(cfg, named, teams):
        found += [Measurement(series=series, size=size, is_last=size == sizes[-1]) for size in sizes]
    if "overlap" in cfg.operations and several:
        found += [
            OverlapPoint(variant=variant, size=size)
            for name in named
            if name in overlap.OPERATIONS
            for variant in _variants(name)[:1]
            for size in overlap.SIZES
            if size <= parse_bytes(cfg.max_bytes)
        ]
    if "rpc" in cfg.operations and several:
        found.append(RpcPoint())
    return found


def _variants(name: str) -> list[OperationVariant]:
    kind = OPERATIONS[name]
    return (
        [OperationVariant(kind=kind, reduction=one) for one in REDUCTIONS]
        if kind.reduces
        else [OperationVariant(kind=kind)]
    )


def _checks(cfg: CommConfig, named: Sequence[str], teams: Sequence[str]) -> Iterator[CorrectnessCheck]:
    for team in teams:
        # All dtypes for the world. In sub-groups, which can only confuse ranks, the dtypes that are measured.
        dtypes = tuple(DTYPES) if team == WORLD else tuple(dict.fromkeys([BYTES, *cfg.dtypes]))
        for name in named:
            for variant in _variants(name):
                yield CorrectnessCheck(variant=variant, team=team, dtypes=(BYTES,) if name == "barrier" else dtypes)


def _all_series(cfg: CommConfig, named: Sequence[str], teams: Sequence[str]) -> Iterator[tuple[Series, list[int]]]:
    dense = sizes(parse_bytes(cfg.max_bytes))
    sparse = [size for size in dense[::_SPARSE] if size <= _SETTLED]
    for name in named:
        for variant in _variants(name):
            kind = variant.kind
            for dtype in cfg.dtypes if kind.reduces else [BYTES]:
                wanted = [size for size in dense if size >= DTYPES[dtype].itemsize]
                few = [size for size in sparse if size >= DTYPES[dtype].itemsize]
                is_main = variant.reduction in (None, "sum")
                here = wanted if is_main else few
                yield (
                    Series(variant=variant, mode="blocking", team=WORLD, dtype=dtype),
                    here if name != "barrier" else [0],
                )
                if is_main and kind.can_overlap and "async" in cfg.operations:
                    yield Series(variant=variant, mode="async", team=WORLD, dtype=dtype), few
                for team in teams[1:] if is_main and name in _IN_GROUPS else ():
                    yield Series(variant=variant, mode="blocking", team=team, dtype=dtype), few


def sizes(max_bytes: int) -> list[int]:
    """Return the powers of two from 1 to `max_bytes`."""
    return [1 << power for power in range(max_bytes.bit_length())]


def elements(size: int, dtype: str, num_parts: int) -> int:
    """Return the number of elements of a size in bytes, rounded up to equal parts."""
    count = max(1, size // DTYPES[dtype].itemsize)
    return -(-count // num_parts) * num_parts
