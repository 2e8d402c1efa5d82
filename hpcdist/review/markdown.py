"""Text of users as Markdown for MLflow's UI, which renders it with showdown and removes unsafe HTML."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from urllib.parse import quote

from hpcdist.config.redaction import redact_text

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
