"""A benchmark beside an earlier one: what got slower, and what only looks so."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import median

from hpcdist.bench.noise import roughness
from hpcdist.bench.results import Results, Row
from hpcdist.bench.units import amount, seconds, times

#: Slower by less than this is not worth a word.
SLOWER = 1.2

Key = tuple[str, str, str, str, str]


@dataclass(frozen=True)
class Change:
    """One operation at one size, now and before."""

    now: Row
    before: Row

    @property
    def ratio(self) -> float:
        """Above 1: slower than before."""
        return self.now.median_s / self.before.median_s

    @property
    def beyond_noise(self) -> bool:
        """Slower by more than 20 %, slower than 99 of 100 earlier iterations, and the fastest one slower by 20 %, too.

        The tail of what was measured before (p99) says how late an iteration is now and then without anything being
        wrong; the fastest iteration now says whether the machine still reaches what it did.
        """
        least_s = SLOWER * self.before.min_s
        return self.ratio > SLOWER and self.now.median_s > self.before.p99_s and self.now.min_s > least_s


def facts(results: Results) -> dict[str, str]:
    """What two benchmarks must have in common to be compared."""
    return {
        "partition": results.partition or "none",
        "backend": results.backend,
        "device": results.device,
        "number of ranks": str(results.world_size),
        "number of nodes": str(len(results.nodes)),
    }


def differences(now: Mapping[str, str], before: Mapping[str, str]) -> str:
    """In which of these facts, as far as both are known, two benchmarks differ; empty where they do not."""
    both = (name for name in now if name in before and now[name] != before[name])
    return ", ".join(f"{name} {now[name]} now and {before[name]} then" for name in both)


def changes(now: Results, before: Results) -> dict[Key, list[Change]]:
    """What both have measured, by operation, in the order of sizes."""
    known = {(_key(row), row.size): row for row in before.rows}
    found: dict[Key, list[Change]] = defaultdict(list)
    for row in sorted(now.rows, key=lambda row: row.size):
        if (theirs := known.get((_key(row), row.size))) is not None:
            found[_key(row)].append(Change(row, theirs))
    return dict(found)


def slower(found: list[Change]) -> list[Change]:
    """Those of one operation's sizes that are slower beyond noise, and a neighbouring size with them.

    Of hundreds of operations and sizes some are slower by chance; what slows a network does not stop at one size.
    And where a benchmark's own sizes differ by a factor, without an order, that factor is no change either.
    """
    noise = max(roughness(change.now for change in found), roughness(change.before for change in found))
    marks = [change.beyond_noise and change.ratio > noise for change in found]
    if len(found) == 1:  # no other size to learn from, so even its best has to be late
        marks = [marks[0] and found[0].now.min_s > found[0].before.median_s]
    return [
        change
        for index, change in enumerate(found)
        if marks[index] and (len(found) == 1 or any(marks[max(0, index - 1) : index] + marks[index + 1 : index + 2]))
    ]


def sentences(found: dict[Key, list[Change]]) -> Iterator[str]:
    """What got slower, the worst first; one sentence that nothing did otherwise."""
    worse = {key: slow for key, all_sizes in found.items() if (slow := slower(all_sizes))}
    if not found:
        yield "nothing was measured in both"
    elif not worse:
        ratios = [change.ratio for all_sizes in found.values() for change in all_sizes]
        yield (
            f"nothing got slower by more than {SLOWER - 1:.0%} beyond noise"
            f" (median {median(ratios):.2f}× the time of before, over {len(ratios)} measurements)"
        )
    for key, slow in sorted(worse.items(), key=lambda item: -max(change.ratio for change in item[1])):
        worst = max(slow, key=lambda change: change.ratio)
        count = f"{len(slow)} of {len(found[key])} sizes"
        yield (
            f"{label(worst.now)} is slower at {count}, most at {amount(worst.now.size)}: {times(worst.ratio)} the time"
            f" ({seconds(worst.now.median_s)}, before {seconds(worst.before.median_s)})"
        )


def label(row: Row) -> str:
    """`all_reduce[sum]`, `broadcast async, halves`: what was measured, its size and type aside."""
    variant = f"[{row.variant}]" if row.variant else ""
    more = [row.mode if row.mode != "blocking" else "", row.group if row.group != "world" else ""]
    return ", ".join([f"{row.operation}{variant}", *filter(None, more)])


def _key(row: Row) -> Key:
    return row.operation, row.variant, row.mode, row.group, row.dtype
