"""Text of reports: durations, numbers and sizes, and Markdown."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING
from urllib.parse import quote

from hpcdist.config.redaction import redact_text

if TYPE_CHECKING:
    from hpcdist.review.facts import RunFacts


# Text of users as Markdown for MLflow's UI, which renders it with showdown and removes unsafe HTML.

#: Characters that the showdown of MLflow 3.17 accepts after a backslash.
_SPECIAL = re.compile(r"[\\`*_{}\[\]()#+.!~=-]")
#: Characters of HTML, and those with a meaning in showdown that a backslash does not remove.
_HTML = {"&": "&amp;", "<": "&lt;", ">": "&gt;", "@": "&#64;", "$": "&#36;", "|": "&#124;"}
_HTML_CHARS = re.compile("[&<>@$|]")

#: Parameter of addresses in MLflow's UI, which otherwise opens its pages for LLM applications.
TRAINING_PAGES = "workflowType=machine_learning"
#: Artifact with the uncommitted changes, `code.patch` in the run folder. MLflow's viewer shows no file `*.patch`.
PATCH = "code.patch.txt"

#: Between two cells: a space that the renderer does not remove.
_GAP = " &ensp;| "


def escaped(text: str, limit: int = 300) -> str:
    """Return a text of the user as one line that is shown as it is, also in a table, without passwords.

    The line is cut after `limit` characters.
    """
    line = " ".join(redact_text(text).split())
    line = line if len(line) <= limit else f"{line[: limit - 1]}…"
    # The backslashes first: those of the entities would be shown.
    marked = _SPECIAL.sub(r"\\\g<0>", line)
    return _HTML_CHARS.sub(lambda match: _HTML[match[0]], marked)


def code_block(text: str, language: str = "") -> str:
    """Return lines as a block of code, without passwords."""
    return f"```{language}\n{redact_text(text).replace('```', chr(39) * 3)}\n```"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of cells that are Markdown already. MLflow shows tables without space between the columns."""
    lines = [_GAP.join(head), " | ".join(["---"] * len(head)), *map(_GAP.join, rows)]
    return "\n".join(f"| {line} |" for line in lines)


def link(text: str, target: str) -> str:
    """Return a link with a text that is Markdown already."""
    return f"[{text}]({target})"


def models_page(experiment_id: str) -> str:
    """Return the address of the tab Models of an experiment, relative to MLflow's UI; empty without an id."""
    return f"#/experiments/{quote(experiment_id)}/models?{TRAINING_PAGES}" if experiment_id else ""


def run_page(experiment_id: str, run_id: str, artifact: str = "") -> str:
    """Return the address of a run, or of one of its artifacts, relative to MLflow's UI; empty without ids."""
    if not experiment_id or not run_id:
        return ""
    page = f"#/experiments/{quote(experiment_id)}/runs/{quote(run_id)}"
    return (f"{page}/artifacts/{quote(artifact)}" if artifact else page) + f"?{TRAINING_PAGES}"


# Times, lists and addresses as text for descriptions of runs.

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
    """Return a duration in its two largest units: `4.2 s`, `12 min 5 s`, `3 h 20 min`, `2 d 4 h`."""
    whole = round(seconds)
    for unit_s, unit, part_s, part in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= unit_s:
            rest = whole % unit_s // part_s
            return f"{whole // unit_s} {unit}" + (f" {rest} {part}" if rest else "")
    return f"{seconds:.2g} s" if seconds >= 0.01 else "0 s"


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
    return "none, without a container" if facts.stored.values.get("container.runtime") == "none" else ""
