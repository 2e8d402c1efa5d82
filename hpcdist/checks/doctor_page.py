"""The output of `hpcdist doctor`: the lines of its sections and of its summary, and the same as a document."""

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from hpcdist.errors import plural
from hpcdist.host.check_result import Check

#: Sections: title and results.
Page = Sequence[tuple[str, Sequence[Check]]]
#: Widths of the columns before the text: margin, level and name of a check.
_INDENT = 2
_MARK = 9
_NAME = 15
#: Column in which the text begins.
_TEXT = _INDENT + _MARK + _NAME
#: On a narrower terminal, the terminal breaks the lines.
_MIN_WIDTH = 60


def section_lines(title: str, checks: Sequence[Check], width: int) -> Iterator[tuple[str, str]]:
    """Yield the lines of one section, each with its style: `title`, a level, or empty."""
    if checks:
        yield "title", title
    for check in checks:
        name = check.name
        if check.node != check.name:  # a check of a node may have the node's name
            name = f"{check.node} {check.name}".strip()
        mark: str = check.level
        if check.level == "failure":
            mark = mark.upper()
        head = f"{'':{_INDENT}}{mark:<{_MARK}}{name:<{_NAME}}"
        if not head.endswith(" "):  # the name fills its column
            head += " "
        yield from _wrapped(check.level, head, check.text, width, _TEXT)
        if check.fix:
            yield from _wrapped("", f"{'':{_TEXT}}→ ", check.fix, width, _TEXT + 2)


def _wrapped(style: str, head: str, text: str, width: int, indent: int) -> Iterator[tuple[str, str]]:
    """Yield the lines of a text after `head`; the first one has the style, the others are indented."""
    # rich would break long words such as paths and commands.
    lines = textwrap.wrap(
        text,
        max(width, _MIN_WIDTH),
        initial_indent=head,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    for line in lines or [head]:
        yield style, line.rstrip()
        style = ""


def summary_lines(page: Page, width: int) -> Iterator[tuple[str, str]]:
    """Yield the lines of the summary, each with its style: whether a run would fail, and why."""
    failures = []
    num_warnings = 0
    for title, checks in page:
        failures += [(title, check) for check in checks if check.level == "failure"]
        num_warnings += sum(check.level == "warning" for check in checks)
    others = f"{plural(num_warnings, 'warning')} above" if num_warnings else "no warnings"
    if not failures:
        yield "ok", f"No problem found that would make a run fail; {others}."
        return
    yield "failure", f"{plural(len(failures), 'problem')} would make a run fail ({others}):"
    for title, check in failures:
        where = f"{check.node}: " if check.node else ""
        yield from _wrapped("", "  - ", f"{where}{title}, {check.name}: {check.text}", width, 4)


def document(page: Page, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the report as a document: `facts` (version, host, time, …), `would_fail`, and all checks by section."""
    entries = []
    for title, checks in page:
        entries += [{"section": title, **asdict(check)} for check in checks]
    return {**facts, "would_fail": would_fail(page), "checks": entries}


def would_fail(page: Page) -> bool:
    """Return whether a run would fail: whether the report has a failure."""
    return any(check.level == "failure" for _, checks in page for check in checks)
