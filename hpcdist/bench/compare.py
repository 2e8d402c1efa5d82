"""Comparison of a benchmark with an earlier one: slowdowns beyond the noise of the measurements."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import median

from hpcdist.bench.noise import roughness
from hpcdist.bench.results import Results, Row
from hpcdist.network.units import amount, seconds, times

#: Slowdowns by less than this factor are not reported.
MIN_SLOWDOWN = 1.2

Key = tuple[str, str, str, str, str]


@dataclass(frozen=True)
class Change:
    """One operation at one size, now and before."""

    now: Row
    before: Row

    @property
    def ratio(self) -> float:
        """Time now divided by time before; above 1 it is slower."""
        return self.now.median_s / self.before.median_s

    @property
    def beyond_noise(self) -> bool:
        """Whether the median is 20 % slower and above the earlier p99, and the fastest iteration is 20 % slower too.

        The earlier p99 shows the normal outliers, and the fastest iteration shows whether the earlier speed is still
        reachable.
        """
        limit_s = MIN_SLOWDOWN * self.before.min_s
        return self.ratio > MIN_SLOWDOWN and self.now.median_s > self.before.p99_s and self.now.min_s > limit_s


def facts(results: Results) -> dict[str, str]:
    """Return the properties that must be equal in two benchmarks for a comparison."""
    return {
        "partition": results.partition or "none",
        "backend": results.backend,
        "device": results.device,
        "number of ranks": str(results.world_size),
        "number of nodes": str(len(results.nodes)),
    }


def differences(now: Mapping[str, str], before: Mapping[str, str]) -> str:
    """Return a description of the properties that differ; empty if none does."""
    both = (name for name in now if name in before and now[name] != before[name])
    return ", ".join(f"{name} {now[name]} now and {before[name]} before" for name in both)


def changes(now: Results, before: Results) -> dict[Key, list[Change]]:
    """Return the measurements that both benchmarks contain, by operation, ordered by size."""
    known = {(_key(row), row.size): row for row in before.rows}
    found: dict[Key, list[Change]] = defaultdict(list)
    for row in sorted(now.rows, key=lambda row: row.size):
        if (theirs := known.get((_key(row), row.size))) is not None:
            found[_key(row)].append(Change(row, theirs))
    return dict(found)


def slower(found: list[Change]) -> list[Change]:
    """Return the sizes of an operation that are slower beyond noise, if a neighbouring size is slower as well.

    Among hundreds of measurements some are slower by chance, but a slower network affects neighbouring sizes too. A
    slowdown must also exceed the factor by which smaller sizes took longer than larger ones in the same benchmark.
    """
    noise = max(roughness(change.now for change in found), roughness(change.before for change in found))
    marks = [change.beyond_noise and change.ratio > noise for change in found]
    if len(found) == 1:  # without another size, the fastest iteration must exceed the earlier median
        marks = [marks[0] and found[0].now.min_s > found[0].before.median_s]
    return [
        change
        for index, change in enumerate(found)
        if marks[index] and (len(found) == 1 or any(marks[max(0, index - 1) : index] + marks[index + 1 : index + 2]))
    ]


def sentences(found: dict[Key, list[Change]]) -> Iterator[str]:
    """Yield a sentence for each slower operation, the worst first, or one sentence that nothing is slower."""
    worse = {key: slow for key, all_sizes in found.items() if (slow := slower(all_sizes))}
    if not found:
        yield "the benchmarks have no measurement in common"
    elif not worse:
        ratios = [change.ratio for all_sizes in found.values() for change in all_sizes]
        yield (
            f"nothing is slower by more than {MIN_SLOWDOWN - 1:.0%} beyond noise"
            f" (median {median(ratios):.2f}× the earlier time, over {len(ratios)} measurements)"
        )
    for key, slow in sorted(worse.items(), key=lambda item: -max(change.ratio for change in item[1])):
        worst = max(slow, key=lambda change: change.ratio)
        count = f"{len(slow)} of {len(found[key])} sizes"
        yield (
            f"{label(worst.now)} is slower at {count}, most at {amount(worst.now.size)}: {times(worst.ratio)} the time"
            f" ({seconds(worst.now.median_s)}, before {seconds(worst.before.median_s)})"
        )


def label(row: Row) -> str:
    """Return the name of a measurement without size and dtype, such as `all_reduce[sum]` or `broadcast, async`."""
    variant = f"[{row.variant}]" if row.variant else ""
    more = [row.mode if row.mode != "blocking" else "", row.group if row.group != "world" else ""]
    return ", ".join([f"{row.operation}{variant}", *filter(None, more)])


def _key(row: Row) -> Key:
    return row.operation, row.variant, row.mode, row.group, row.dtype
