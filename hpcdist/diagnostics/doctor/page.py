"""Rendering of doctor's report as text and as a JSON document. Pure functions."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from hpcdist.machine.check import Check, Level

#: Sections: title and results.
Page = Sequence[tuple[str, Sequence[Check]]]
_MARKS: dict[Level, str] = {"ok": "ok", "note": "note", "warning": "warning", "failure": "FAILURE"}
#: Widths of the columns, and the column of the text.
_INDENT, _MARK, _NAME = 2, 9, 15
_TEXT = _INDENT + _MARK + _NAME


def section_lines(title: str, checks: Sequence[Check], width: int) -> Iterator[tuple[str, str]]:
    """Yield the lines of one section, each with its style: `title`, a level, or empty."""
    if checks:
        yield "title", title
    for check in checks:
        name = f"{check.node} {check.name}".strip() if check.name != check.node else check.name
        head = f"{'':{_INDENT}}{_MARKS[check.level]:<{_MARK}}{name:<{_NAME}}"
        yield from _wrapped(check.level, head if head.endswith(" ") else f"{head} ", check.text, width, _TEXT)
        if check.fix:
            yield from _wrapped("", f"{'':{_TEXT}}→ ", check.fix, width, _TEXT + 2)


def _wrapped(kind: str, head: str, text: str, width: int, indent: int) -> Iterator[tuple[str, str]]:
    """Yield the lines of a text; rich would break long words such as paths and commands."""
    lines = textwrap.wrap(
        text,
        max(width, 60),
        initial_indent=head,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    for number, line in enumerate(lines or [head]):
        yield (kind if number == 0 else ""), line.rstrip()


def summary_lines(page: Page, width: int) -> Iterator[tuple[str, str]]:
    """Yield the summary: the number of warnings, and each failure again."""
    found = [(title, check) for title, checks in page for check in checks]
    failures = [(title, check) for title, check in found if check.level == "failure"]
    warnings = sum(check.level == "warning" for _, check in found)
    others = f"{warnings} warning{'s' * (warnings != 1)} above" if warnings else "no warnings"
    if not failures:
        yield "ok", f"No problem found that would make a run fail; {others}."
        return
    count = "1 problem" if len(failures) == 1 else f"{len(failures)} problems"
    yield "failure", f"{count} would make a run fail ({others}):"
    for title, check in failures:
        where = f"{check.node}: " if check.node else ""
        yield from _wrapped("", "  - ", f"{where}{title}, {check.name}: {check.text}", width, 4)


def document(page: Page, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the report as a document: `facts` (version, host, time, …), `would_fail`, and all checks by section."""
    checks = [{"section": title, **asdict(check)} for title, found in page for check in found]
    return {**facts, "would_fail": would_fail(page), "checks": checks}


def would_fail(page: Page) -> bool:
    """Return whether a finding would make a run fail."""
    return any(check.level == "failure" for _, checks in page for check in checks)
