"""What a benchmark measures, point by point and in which order: a function of its config and of the ranks' nodes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from hpcdist.bench import overlap, pairs
from hpcdist.bench.comm_config import COMM_OPERATIONS, CommConfig, parse_bytes
from hpcdist.bench.correctness import Variety
from hpcdist.bench.groups import WORLD, cuts
from hpcdist.bench.operations import OPERATIONS
from hpcdist.bench.patterns import DTYPES, REDUCTIONS

#: What only moves is measured in these.
BYTES = "uint8"
#: Sizes of what is measured beside the main series: every fourth power of two up to where rates have settled.
_SPARSE, _SETTLED = 4, 1 << 24
#: Operations under way at once in mode `async`.
DEPTH = 4
#: Measured in sub-groups; the others are only checked there.
_IN_GROUPS = ("all_reduce", "all_gather", "all_to_all", "broadcast")


@dataclass(frozen=True, kw_only=True)
class Check:
    """One operation in one cut of the world, in all dtypes."""

    variety: Variety
    team: str
    dtypes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Series:
    """One line of a plot: an operation over all its sizes."""

    variety: Variety
    mode: Literal["blocking", "async"]
    team: str
    dtype: str

    @property
    def title(self) -> str:
        parts = [
            self.variety.title,
            self.dtype if self.variety.kind.reduces else "",
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
class Round:
    """Ways between ranks that are measured at the same time."""

    ways: tuple[pairs.Way, ...]
    is_last: bool


@dataclass(frozen=True, kw_only=True)
class Hiding:
    """An operation beside a computation."""

    variety: Variety
    size: int


@dataclass(frozen=True, kw_only=True)
class Calls:
    """RPC, all of it."""


Point = Check | Measurement | Round | Hiding | Calls


def points(cfg: CommConfig, nodes: Sequence[str]) -> list[Point]:
    """All that is to be done, in order: everything is checked, then measured, the ways between ranks first.

    Args:
        nodes: each rank's.
    """
    named = [name for name in COMM_OPERATIONS if name in cfg.operations]
    teams = [WORLD, *cuts(nodes)] if "groups" in cfg.operations else [WORLD]
    found: list[Point] = [*_checks(cfg, named, teams)]
    several = len(nodes) > 1
    if "pairs" in cfg.operations and several:
        ways = pairs.rounds(nodes)
        found += [Round(ways=tuple(one), is_last=index == len(ways) - 1) for index, one in enumerate(ways)]
    for series, sizes in _all_series(cfg, named, teams):
        found += [Measurement(series=series, size=size, is_last=size == sizes[-1]) for size in sizes]
    if "overlap" in cfg.operations and several:
        found += [
            Hiding(variety=variety, size=size)
            for name in named
            if name in overlap.OPERATIONS
            for variety in _varieties(name)[:1]
            for size in overlap.SIZES
            if size <= parse_bytes(cfg.max_bytes)
        ]
    if "rpc" in cfg.operations and several:
        found.append(Calls())
    return found


def _varieties(name: str) -> list[Variety]:
    kind = OPERATIONS[name]
    return [Variety(kind=kind, reduction=one) for one in REDUCTIONS] if kind.reduces else [Variety(kind=kind)]


def _checks(cfg: CommConfig, named: Sequence[str], teams: Sequence[str]) -> Iterator[Check]:
    for team in teams:
        # The world in all dtypes; its parts, where only ranks could be mistaken for others, in those that are used.
        dtypes = tuple(DTYPES) if team == WORLD else tuple(dict.fromkeys([BYTES, *cfg.dtypes]))
        for name in named:
            for variety in _varieties(name):
                yield Check(variety=variety, team=team, dtypes=(BYTES,) if name == "barrier" else dtypes)


def _all_series(cfg: CommConfig, named: Sequence[str], teams: Sequence[str]) -> Iterator[tuple[Series, list[int]]]:
    dense = sizes(parse_bytes(cfg.max_bytes))
    sparse = [size for size in dense[::_SPARSE] if size <= _SETTLED]
    for name in named:
        for variety in _varieties(name):
            kind = variety.kind
            for dtype in cfg.dtypes if kind.reduces else [BYTES]:
                wanted = [size for size in dense if size >= DTYPES[dtype].itemsize]
                few = [size for size in sparse if size >= DTYPES[dtype].itemsize]
                is_main = variety.reduction in (None, "sum")
                here = wanted if is_main else few
                yield (
                    Series(variety=variety, mode="blocking", team=WORLD, dtype=dtype),
                    here if name != "barrier" else [0],
                )
                if is_main and kind.can_overlap and "async" in cfg.operations:
                    yield Series(variety=variety, mode="async", team=WORLD, dtype=dtype), few
                for team in teams[1:] if is_main and name in _IN_GROUPS else ():
                    yield Series(variety=variety, mode="blocking", team=team, dtype=dtype), few


def sizes(max_bytes: int) -> list[int]:
    """Powers of two from 1 to `max_bytes`."""
    return [1 << power for power in range(max_bytes.bit_length())]


def elements(size: int, dtype: str, num_parts: int) -> int:
    """How many elements a size is, rounded up to equal parts."""
    count = max(1, size // DTYPES[dtype].itemsize)
    return -(-count // num_parts) * num_parts
