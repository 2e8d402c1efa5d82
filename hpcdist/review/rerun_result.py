"""Result of a rerun: what differs between a recorded run and the run that repeats it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpcdist.review.facts import RunFacts
from hpcdist.review.value_comparison import ValueComparison
from hpcdist.run.training_record import Dataset

#: Metrics that a line names.
_SHOWN = 6


@dataclass(frozen=True, kw_only=True)
class RerunResult:
    """Comparison of a rerun with its original."""

    values: ValueComparison
    notes: tuple[str, ...] = ()  #: differences of data and image, which may explain those of the values

    @property
    def is_equal(self) -> bool:
        """Whether values were compared, and none differs."""
        return self.values.is_equal and self.values.num_values > 0

    @property
    def sentence(self) -> str:
        """The result in one sentence."""
        values = self.values
        if not values.num_values:
            return "nothing was compared: the runs have no common values"
        compared = f"{values.num_values:,} values of {len(values.keys)} metrics at {values.num_steps:,} steps"
        if values.differences:
            return f"the first difference is at {values.differences[0]}; {values.num_differing:,} of {compared} differ"
        if not values.is_equal:
            return f"only one of the runs has logged {_listed((*values.only_before, *values.only_after))}"
        return f"no value differs: {compared}"


def data_differences(before: Collection[Dataset], after: Collection[Dataset]) -> list[str]:
    """Return the datasets whose content differs, one sentence each; datasets without a digest are not compared."""
    known = {(one.name, one.split): one.digest for one in before if one.digest}
    return [
        f"data: {one.name} ({one.split}) had digest {known[one.name, one.split]}, has {one.digest}"
        for one in after
        if one.digest and known.get((one.name, one.split), one.digest) != one.digest
    ]


def image_differences(digest: str, facts: RunFacts) -> list[str]:
    """Return a sentence if the ranks of a rerun had another image than the run with this digest."""
    if not digest or not facts.image_digest or digest == facts.image_digest:
        return []
    return [f"image: had digest {digest}, has {facts.image_digest}"]


def machine_differences(before: Mapping[str, Any], after: Mapping[str, Any], *, code_is_restored: bool) -> list[str]:
    """Return differences between two machines by the content of `environment.json`, one sentence each.

    Args:
        code_is_restored: whether the code of hpcdist itself may come from the run, too.
    """
    old, new = (_versions(facts) for facts in (before, after))
    found = [
        f"{name} {old[name]} in the run, {new.get(name, 'none')} here" for name in old if old[name] != new.get(name)
    ]
    sources = before.get("source_digest"), after.get("source_digest")
    if all(sources) and sources[0] != sources[1] and not code_is_restored and old.get("hpcdist") == new.get("hpcdist"):
        found.append(f"hpcdist {old['hpcdist']} has other source files here than in the run")
    return found


def _versions(facts: Mapping[str, Any]) -> dict[str, str]:
    versions = facts.get("versions")
    found = {"Python": facts.get("python"), **(versions if isinstance(versions, dict) else {})}
    found["platform"] = facts.get("platform")
    return {name: text for name, text in found.items() if isinstance(text, str) and text}


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
