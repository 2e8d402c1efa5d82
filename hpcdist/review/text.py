"""Times, lists and addresses as text for descriptions of runs."""

from __future__ import annotations

import time
from collections.abc import Sequence

from hpcdist.review.facts import RunFacts
from hpcdist.review.markdown import escaped, run_page

#: Nodes of a list beyond these are counted.
_MAX_NODES = 8


def nodes_text(nodes: Sequence[str]) -> str:
    """Return the names of nodes as Markdown."""
    shown = [escaped(node) for node in nodes[:_MAX_NODES]]
    return ", ".join([*shown, *more(len(nodes) - _MAX_NODES)])


def more(number: int) -> list[str]:
    """Return the end of a shortened list; empty if nothing is left out."""
    return [f"{number} more"] if number > 0 else []


def artifact_page(facts: RunFacts, path: str) -> str:
    """Return the address of an artifact of a run, relative to MLflow's UI; empty before the upload."""
    return run_page(facts.experiment_id, facts.run_id, path)


def clock(seconds: float) -> str:
    """Return a time as `2026-11-22 12:30 UTC`."""
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))


def duration(seconds: float) -> str:
    """Return a duration in its two largest units: `45 s`, `12 min 5 s`, `3 h 20 min`, `2 d 4 h`."""
    whole = round(seconds)
    for unit_s, unit, part_s, part in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= unit_s:
            rest = whole % unit_s // part_s
            return f"{whole // unit_s} {unit}" + (f" {rest} {part}" if rest else "")
    return f"{whole} s"


def image_text(facts: RunFacts) -> str:
    """Return the image of the ranks with its digest or build, not escaped; empty if it is unknown."""
    words = [facts.image] if facts.image else ["name not recorded"]
    if facts.image_digest:
        # Of an image file without a digest in its name.
        partial = " (of its size, first and last MiB)" if facts.image_digest.startswith("ends-") else ""
        words.append(f"digest {facts.image_digest}{partial}")
    elif facts.image_build:
        words.append(f"build {facts.image_build[:12]}")
        words += [f"built from {facts.image_base}"] if facts.image_base else []
    if facts.image or len(words) > 1:
        return ", ".join(words)
    if facts.container_runtime:
        return f"not recorded; the run used a container of {facts.container_runtime}"
    return "none, without a container" if facts.config.get("container.runtime") == "none" else ""
