"""Text of reports: Markdown for MLflow's UI, addresses in it, and times."""

import json
import re
import time
from collections.abc import Iterable, Sequence
from typing import Any
from urllib.parse import quote

from hpcdist.config.redaction import redact_text

#: Characters that the showdown of MLflow 3.17, which removes unsafe HTML, accepts after a backslash.
#: Within a word, `_` and `-` have no meaning; MLflow's list of experiments shows the source, `eval_loss` included.
_SPECIAL = re.compile(r"[\\`*{}\[\]()#+.!~=]|(?<![A-Za-z0-9])[_-]|[_-](?![A-Za-z0-9])")
#: Characters of HTML, and those with a meaning in showdown that a backslash does not remove.
_HTML = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;", "@": "&#64;", "$": "&#36;", "|": "&#124;"})

#: Parameter of addresses in MLflow's UI, which otherwise opens its pages for LLM applications.
TRAINING_PAGES = "workflowType=machine_learning"
#: Artifact with the uncommitted changes, `code.patch` in the run folder. MLflow's viewer shows no file `*.patch`.
PATCH = "code.patch.txt"

#: Largest number of characters of a value in a report.
MAX_TEXT = 600


class Markdown(str):
    """Text that is already Markdown; `table` and `link` escape any other text."""

    __slots__ = ()


def one_line(text: str, limit: int) -> str:
    """Return at most `limit` characters of a text as one line, without passwords."""
    line = " ".join(redact_text(text).split())
    if len(line) <= limit:
        return line
    return f"{line[: limit - 1]}…"


def text_of(value: Any) -> str:
    """Return a value as text of at most MAX_TEXT characters, without passwords in addresses."""
    if value is None:
        return "null"
    text = value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
    # Lone surrogates cannot be written to a file.
    text = redact_text(text.encode(errors="replace").decode())
    if len(text) <= MAX_TEXT:
        return text
    return text[:MAX_TEXT] + "…"


def escaped(text: str, limit: int = 300) -> Markdown:
    """Return `one_line` of a text so that Markdown shows it as it is."""
    return _escaped(one_line(text, limit))


def with_code(text: str, limit: int) -> Markdown:
    """Return `one_line` of a text as `escaped` does, and text between backticks as code."""
    line = one_line(text, limit)
    if line.endswith("…") and line.count("`") % 2:  # the closing backtick was cut off
        line = f"{line[:-1]}`…"
    # In a table, a vertical bar in code would end the cell. Each second part is code.
    parts = re.split(r"(`[^`|]+`)", line)
    parts[::2] = map(_escaped, parts[::2])
    return Markdown("".join(parts))


def _escaped(line: str) -> Markdown:
    # First the backslashes: afterwards, the `#` of an entity such as `&#64;` would get one too.
    return Markdown(_SPECIAL.sub(r"\\\g<0>", line).translate(_HTML))


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table. Its cells are escaped unless they are Markdown."""
    # MLflow shows tables without space between the columns, and removes simple spaces.
    first, *others = ["&nbsp;&nbsp;| ".join(map(_cell, cells)) for cells in (head, *rows)]
    rule = " | ".join(["---"] * len(head))
    return "\n".join(f"| {line} |" for line in (first, rule, *others))


def _cell(text: str) -> Markdown:
    if isinstance(text, Markdown):
        return text
    return escaped(text)


def link(text: str, target: str) -> Markdown:
    """Return a link; only its text without a target."""
    shown = _cell(text)
    if not target:
        return Markdown(shown)
    return Markdown(f"[{shown}]({target})")


def run_page(experiment_id: str, run_id: str, artifact: str = "") -> str:
    """Return the address of a run, or of one of its artifacts, relative to MLflow's UI; empty without ids."""
    if not experiment_id or not run_id:
        return ""
    page = f"#/experiments/{quote(experiment_id)}/runs/{quote(run_id)}"
    if artifact:
        page += f"/artifacts/{quote(artifact)}"
    return f"{page}?{TRAINING_PAGES}"


def clock(seconds: float) -> str:
    """Return a time as `2026-11-22 12:30 UTC`."""
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))
